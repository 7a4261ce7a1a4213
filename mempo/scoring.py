"""The scoring step: log-probs of the gold answer after the whole history and after the memory alone. No reward yet.

The full side is one token tree a trajectory, the memory side one tree a question (docs/algorithm.md, "One scoring
pass"). A tree never crosses a question, so results do not depend on shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mempo.config import Config
from mempo.engines import Engine
from mempo.packing import TokenTree, chain
from mempo.probes import Probe, full_tree, make_probe, memory_trees, segment_ids
from mempo.records import NoScore, Question, Trajectory, Turn, TurnScore


@dataclass(frozen=True, slots=True)
class _Plan:
    """One turn before the forward pass: the segment as the memory side reads it, or the reason why it is not scored."""

    trajectory: Trajectory
    index: int
    reason: NoScore | None
    segment_ids: list[int]
    context_tokens: int

    @property
    def turn(self) -> Turn:
        return self.trajectory.turns[self.index]


def score(
    engine: Engine,
    trajectories: Sequence[Trajectory],
    questions: Mapping[str, Question],
    config: Config,
    *,
    reference: Engine | None = None,
) -> list[TurnScore]:
    """One TurnScore for every turn of every trajectory, in their order. Probes are scored at temperature 1.

    ``reference`` gives ``ref_logprobs``; without it they are 0. Raises ``ValueError`` where the engine runs another
    policy version than the one that sampled a trajectory.
    """
    _refuse_stale(engine, trajectories)
    probes = {name: make_probe(engine.tokenizer, questions[name]) for name in {t.question_id for t in trajectories}}
    plans = [plan for t in trajectories for plan in _plan(engine, t, probes[t.question_id], config)]
    turns = [plan.turn for plan in plans]
    sides = _probe_logprobs(engine, [plan for plan in plans if plan.reason is None], probes, config)
    sampler = config.loss.old_logprobs == "sampler"
    old = [t.sampling_logprobs for t in turns] if sampler else _response_logprobs(engine, turns, config)
    ref = _response_logprobs(reference, turns, config) if reference else [[0.0] * len(t.response_ids) for t in turns]
    return [
        _turn_score(plan, probes[plan.trajectory.question_id], next(sides) if plan.reason is None else ([], []), *given)
        for plan, *given in zip(plans, old, ref, strict=True)
    ]


def _refuse_stale(engine: Engine, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.policy_version != engine.policy_version:
            raise ValueError(
                f"stale: trajectory {trajectory.key} was sampled by policy version {trajectory.policy_version}, "
                f"the engine runs version {engine.policy_version}"
            )


def _plan(engine: Engine, trajectory: Trajectory, probe: Probe, config: Config) -> Iterator[_Plan]:
    history = first = len(trajectory.turns[0].prompt_ids) if trajectory.turns else 0
    for index, turn in enumerate(trajectory.turns):
        context_tokens = history if config.scoring.baseline == "history" else len(turn.prompt_ids)
        segment = segment_ids(engine.tokenizer, turn, index + 1)
        longest = max(context_tokens, first + len(segment)) + len(probe.token_ids)
        reason: NoScore | None = None
        if index == 0:
            reason = "first_turn"
        elif turn.mem_span is None:
            reason = "no_segment"
        elif not config.uses_memory_reward:
            reason = "not_asked"
        elif longest > engine.window:
            reason = "overflow"
        yield _Plan(trajectory, index, reason, segment, context_tokens)
        history += len(turn.response_ids) + len(turn.observation_ids)


def _probe_logprobs(
    engine: Engine, scored: Sequence[_Plan], probes: Mapping[str, Probe], config: Config
) -> Iterator[tuple[list[float], list[float]]]:
    """Per scored turn, the log-probs [A] of its question's probe: after the full context, after the memory."""
    full_trees: list[TokenTree] = []
    mem_trees: list[TokenTree] = []
    for name, of_question in groupby(scored, key=lambda plan: plan.trajectory.question_id):
        plans, probe_ids = list(of_question), probes[name].token_ids
        segments = [plan.segment_ids for plan in plans]
        first_prompt = plans[0].trajectory.turns[0].prompt_ids
        mem_trees += memory_trees(first_prompt, segments, probe_ids, config.scoring.max_tree_tokens)
        for _, of_trajectory in groupby(plans, key=lambda plan: plan.trajectory.key):
            some = list(of_trajectory)
            turns, indices = some[0].trajectory.turns, [plan.index for plan in some]
            full_trees.append(full_tree(turns, indices, probe_ids, config.scoring.baseline))
    sizes = [len(probes[plan.trajectory.question_id].token_ids) for plan in scored]
    full = engine.logprobs(full_trees, mode=config.scoring.mode)
    mem = engine.logprobs(mem_trees, mode=config.scoring.mode)
    return zip(_split(full, sizes), _split(mem, sizes), strict=True)


def _split(per_tree: Iterable[Sequence[float]], sizes: Sequence[int]) -> Iterator[list[float]]:
    flat = [value for values in per_tree for value in values]
    start = 0
    for size in sizes:
        yield flat[start : start + size]
        start += size


def _response_logprobs(engine: Engine, turns: Sequence[Turn], config: Config) -> list[list[float]]:
    trees = [chain([*turn.prompt_ids, *turn.response_ids], len(turn.prompt_ids)) for turn in turns]
    return engine.logprobs(trees, temperature=config.rollout.temperature)


def _turn_score(
    plan: _Plan, probe: Probe, sides: tuple[list[float], list[float]], old: list[float], ref: list[float]
) -> TurnScore:
    scored = plan.reason is None
    span = plan.turn.mem_span
    return TurnScore(
        question_id=plan.trajectory.question_id,
        sample_index=plan.trajectory.sample_index,
        turn=plan.index + 1,
        policy_version=plan.trajectory.policy_version,
        probe_text=probe.text,
        gold_spans=probe.gold_spans,
        probe_ids=probe.token_ids if scored else [],
        probe_starts=[start for start, _ in probe.offsets] if scored else [],
        probe_ends=[end for _, end in probe.offsets] if scored else [],
        core_tokens=probe.core_tokens,
        full_logprobs=sides[0],
        mem_logprobs=sides[1],
        mem_tokens=span[1] - span[0] if span else 0,
        context_tokens=plan.context_tokens,
        scorer=f"actor@{plan.trajectory.policy_version}",
        reason=plan.reason,
        old_logprobs=old,
        ref_logprobs=ref,
    )
