"""The records that travel between steps: frozen, plain Python, lengths checked at birth.

rollouts -> scores -> samples -> policy. A step never fills in a record that another step made: it makes a new one.
Index t of any per-token list speaks of token t. Log-probabilities are natural logs and are named by who computed them.
Spans are half-open, ``[start, end)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["search", "answer"]
FinishReason = Literal["stop", "length", "eos"]
Status = Literal["answered", "no_action", "max_turns", "truncated", "context_overflow", "tool_failed"]
NoScore = Literal["first_turn", "no_segment", "overflow", "not_asked"]


def _same_length(record: object, length: int, **lists: Sequence[object]) -> None:
    for name, values in lists.items():
        if len(values) != length:
            raise ValueError(f"{type(record).__name__}.{name} has {len(values)} entries, expected {length}")


@dataclass(frozen=True, slots=True)
class Question:
    """One question of one or more objectives; ``golden_answers[i]`` are the aliases of objective i.

    A bare string in the list is an objective with one alias; empty aliases are dropped.
    """

    question_id: str
    question: str
    golden_answers: list[list[str]]
    source: str = ""

    def __post_init__(self) -> None:
        aliases = [[entry] if isinstance(entry, str) else list(entry) for entry in self.golden_answers]
        aliases = [[alias for alias in objective if alias.strip()] for objective in aliases]
        if not aliases or not all(aliases):
            raise ValueError(f"question {self.question_id!r}: every objective needs a non-empty golden answer")
        if len(aliases) > 1 and any(mark in objective[0] for objective in aliases for mark in ";；"):
            raise ValueError(f"question {self.question_id!r}: a golden answer of several holds ';'")
        object.__setattr__(self, "golden_answers", aliases)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: P prompt tokens exactly as sampled from, R response tokens exactly as sampled.

    ``observation_ids`` [O] is all that stands between this response and the next turn's generation: the rest of the
    assistant frame, the observation, the next assistant header. Empty after the last turn.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    sampling_logprobs: list[float]
    text: str
    valid: bool
    memory: str | None
    mem_span: tuple[int, int] | None
    action: Action | None
    argument: str | None
    observation: str | None
    observation_ids: list[int]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        _same_length(self, len(self.response_ids), sampling_logprobs=self.sampling_logprobs)
        if self.mem_span is not None and not 0 <= self.mem_span[0] < self.mem_span[1] <= len(self.response_ids):
            raise ValueError(f"Turn.mem_span {self.mem_span} is outside its {len(self.response_ids)} response tokens")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All turns of one attempt at one question, sampled by one policy version."""

    question_id: str
    sample_index: int
    policy_version: int
    turns: list[Turn]
    answer: str | None
    status: Status

    @property
    def key(self) -> str:
        return f"{self.question_id}/{self.sample_index}"


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """One way to write the gold answer as a final turn, and log-probabilities of its last A tokens in every context.

    The first of the A is the first that some rule counts to the answer; what stands before is a frame. ``starts`` and
    ``ends`` [A] are their character offsets in ``text``, ``gold_spans`` those of the objectives' answers;
    ``core_tokens`` is the length of the gold text encoded by itself, with which the published mask counts.
    ``ahead_logprobs`` [k][A] follow the memory and the next 1..k observations (look-ahead), fewer at a trajectory's
    end; ``actor_logprobs`` [A] are the policy's own after the full history where ``full_logprobs`` are the reference's.
    """

    text: str
    gold_spans: list[tuple[int, int]]
    token_ids: list[int]
    starts: list[int]
    ends: list[int]
    core_tokens: int
    full_logprobs: list[float]
    mem_logprobs: list[float]
    ahead_logprobs: list[list[float]]
    actor_logprobs: list[float]

    def __post_init__(self) -> None:
        _same_length(
            self,
            len(self.starts),
            ends=self.ends,
            full_logprobs=self.full_logprobs,
            mem_logprobs=self.mem_logprobs,
        )
        for values in self.ahead_logprobs:
            _same_length(self, len(self.starts), ahead_logprobs=values)


@dataclass(frozen=True, slots=True)
class TurnScore:
    """What one turn's contexts make of the gold answer, a probe for each wording, and R response tokens' log-probs.

    ``probes[0]`` takes the first alias of every objective. ``reason`` says why a turn has no probe. ``scorer`` names
    whose weights gave the full side: the sampling policy's or the reference's.
    """

    question_id: str
    sample_index: int
    turn: int
    policy_version: int
    probes: list[ProbeScore]
    mem_tokens: int
    context_tokens: int
    scorer: str
    reason: NoScore | None
    old_logprobs: list[float]
    ref_logprobs: list[float]

    def __post_init__(self) -> None:
        if (self.reason is None) != bool(self.probes):
            raise ValueError(f"TurnScore.reason {self.reason!r} with {len(self.probes)} probes")


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn as training data: T = P + R tokens. Everything is 0 on prompt tokens.

    ``weight`` multiplies each loss token (see ``advantages.token_weights``), ``sampler_weights`` [T] too (see
    ``mismatch``; none given: 1 everywhere); the loss is a plain sum of weighted terms.
    """

    key: str
    token_ids: list[int]
    loss_mask: list[int]
    old_logprobs: list[float]
    ref_logprobs: list[float]
    outcome_advantage: float
    memory_advantages: list[float]
    weight: float
    sampler_weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.sampler_weights:
            object.__setattr__(self, "sampler_weights", [1.0] * len(self.token_ids))
        _same_length(
            self,
            len(self.token_ids),
            loss_mask=self.loss_mask,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
            memory_advantages=self.memory_advantages,
            sampler_weights=self.sampler_weights,
        )
