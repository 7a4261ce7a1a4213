"""The advantage step: trajectories and their scores become weighted training samples. No model runs here.

Two signals meet: the outcome advantage on every response token, and ``mem_weight`` times the memory advantage on the
tokens of the turn's ``<mem>...</mem>``. All reward variants over the stored probes are recomputed here from files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mempo import advantages, rewards
from mempo.config import Config
from mempo.memory_signal import memory_signal
from mempo.mismatch import mismatch_figures, refuse_mismatch, sampler_weights
from mempo.probe_rewards import ProbeValue, memory_rewards
from mempo.records import Question, Sample, Trajectory, Turn, TurnScore

CUT_OFF = ("truncated", "context_overflow", "max_turns")


@dataclass(frozen=True, slots=True)
class TurnReward:
    """What became of one turn: one row of the round's reward table."""

    question_id: str
    sample_index: int
    turn: int
    status: str
    valid: bool
    score: float
    outcome_advantage: float
    reason: str | None
    p_full: float | None
    p_mem: float | None
    kept_full: int
    kept_mem: int
    answer_tokens: int
    mem_reward: float | None
    mem_advantage: float
    mem_tokens: int
    context_tokens: int
    response_tokens: int


def build(
    trajectories: Sequence[Trajectory],
    questions: Mapping[str, Question],
    scores: Sequence[TurnScore],
    config: Config,
    *,
    round_index: int,
) -> tuple[list[Sample], list[TurnReward]]:
    """One Sample and one TurnReward a turn. Trajectories whose tool failed are in no statistic and have weight 0."""
    kept = [t for t in trajectories if t.status != "tool_failed"]
    by_turn = {(s.question_id, s.sample_index, s.turn): s for s in scores}
    turns = [[by_turn[t.question_id, t.sample_index, i + 1] for i in range(len(t.turns))] for t in kept]

    paid = config.reward.model_dump()
    outcomes = [rewards.outcome_reward(t, questions[t.question_id], **paid) for t in kept]
    groups = [t.question_id for t in kept]
    outcome_advantages = advantages.outcome_advantages(outcomes, groups, normalize_std=config.advantage.normalize_std)
    probes, mem_rewards = memory_rewards(turns, config.mem_reward, aliases=config.scoring.aliases)
    if config.mem_reward.ill_formed == "drop":
        mem_rewards = [
            [reward if turn.valid else None for reward, turn in zip(row, t.turns, strict=True)]
            for row, t in zip(mem_rewards, kept, strict=True)
        ]
    memory_advantages, on_memory = memory_signal(
        mem_rewards,
        groups,
        config.advantage,
        outcomes=outcomes,
        outcome_advantages=outcome_advantages,
        weight=config.advantage.weight_at(round_index),
        turns=[[score.turn for score in of_trajectory] for of_trajectory in turns],
    )

    samples: list[Sample] = []
    table: list[TurnReward] = []
    flat = _flat_groups(outcomes, groups) if config.advantage.flat_groups == "drop" else set()
    for i, trajectory in enumerate(kept):
        for j, turn in enumerate(trajectory.turns):
            samples.append(_sample(trajectory, turn, turns[i][j], outcome_advantages[i], on_memory[i][j], config, flat))
            table.append(
                _row(trajectory, turn, turns[i][j], outcomes[i], outcome_advantages[i], probes[i][j],
                     mem_rewards[i][j], memory_advantages[i][j])
            )  # fmt: skip
    return _weighted(samples, [t.key for t in kept for _ in t.turns], config), table


def mismatch(
    trajectories: Sequence[Trajectory], scores: Sequence[TurnScore], config: Config, *, round_index: int
) -> dict[str, float]:
    """``mismatch/...``: recomputed log-probs against the sampler's; nothing where those are trained on, see ``update``.

    Raises ``Mismatch`` above ``loss.max_mismatch``.
    """
    loss = config.loss
    if loss.old_logprobs == "sampler":
        return {}
    old = [value for score in scores for value in score.old_logprobs]
    sampling = [value for t in trajectories for turn in t.turns for value in turn.sampling_logprobs]
    figures = mismatch_figures(old, sampling, cap=loss.sampler_cap)
    refuse_mismatch(figures, loss.max_mismatch, round_index=round_index)
    return {f"mismatch/{name}": value for name, value in figures.items()}


def _sample(
    trajectory: Trajectory,
    turn: Turn,
    score: TurnScore,
    outcome_advantage: float,
    memory: float,
    config: Config,
    flat: set[str],
) -> Sample:
    """A turn as a sample of weight 0: weights depend on how many tokens the whole batch trains on."""
    prompt, response = [0.0] * len(turn.prompt_ids), len(turn.response_ids)
    spans = [turn.mem_span] if turn.mem_span else []
    on_span = advantages.span_advantages(response, spans, [memory] * len(spans))
    trained = [1] * response
    if config.advantage.cut_off == "drop" and trajectory.status in CUT_OFF:
        trained = [0] * response
    elif trajectory.question_id in flat:
        # A flat group carries no outcome signal: only its memory tokens train, and only they are counted.
        trained = [int(value != 0.0) for value in on_span]
    loss = config.loss
    corrected = sampler_weights(
        score.old_logprobs, turn.sampling_logprobs, correction=loss.sampler_correction, cap=loss.sampler_cap
    )
    return Sample(
        key=f"{trajectory.key}/{score.turn}",
        token_ids=[*turn.prompt_ids, *turn.response_ids],
        loss_mask=[0] * len(prompt) + trained,
        old_logprobs=prompt + score.old_logprobs,
        ref_logprobs=prompt + score.ref_logprobs,
        outcome_advantage=outcome_advantage,
        memory_advantages=prompt + on_span,
        weight=0.0,
        sampler_weights=prompt + corrected,
    )


def _weighted(samples: Sequence[Sample], owners: Sequence[str], config: Config) -> list[Sample]:
    weights = advantages.token_weights(
        [sum(sample.loss_mask) for sample in samples],
        owners,
        aggregation=config.advantage.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return [replace(sample, weight=weight) for sample, weight in zip(samples, weights, strict=True)]


def _flat_groups(outcomes: Sequence[float], groups: Sequence[str]) -> set[str]:
    """Groups of two or more with equal outcomes; a group of one keeps its raw outcome and is not flat."""
    values: dict[str, list[float]] = defaultdict(list)
    for outcome, group in zip(outcomes, groups, strict=True):
        values[group].append(outcome)
    return {group for group, found in values.items() if len(found) > 1 and len(set(found)) == 1}


def _row(
    trajectory: Trajectory,
    turn: Turn,
    score: TurnScore,
    outcome: float,
    outcome_advantage: float,
    probe: ProbeValue | None,
    reward: float | None,
    advantage: float,
) -> TurnReward:
    return TurnReward(
        question_id=trajectory.question_id,
        sample_index=trajectory.sample_index,
        turn=score.turn,
        status=trajectory.status,
        valid=turn.valid,
        score=outcome,
        outcome_advantage=outcome_advantage,
        reason=score.reason,
        p_full=probe.p_full if probe else None,
        p_mem=probe.p_mem if probe else None,
        kept_full=probe.kept_full if probe else 0,
        kept_mem=probe.kept_mem if probe else 0,
        answer_tokens=probe.answer_tokens if probe else 0,
        mem_reward=reward,
        mem_advantage=advantage,
        mem_tokens=score.mem_tokens,
        context_tokens=score.context_tokens,
        response_tokens=len(turn.response_ids),
    )
