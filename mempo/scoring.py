"""The scoring step: log-probs of the gold answer after the whole history and after the memory alone. No reward yet.

The full side is one token tree a trajectory, the memory side one tree a question (docs/algorithm.md, "One scoring
pass"). A tree never crosses a question, so results do not depend on shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, islice

from mempo.config import Config
from mempo.engines import Engine, Scorer
from mempo.packing import TokenTree, chain
from mempo.probes import Probe, full_tree, make_probe, memory_tree, segment_ids, wordings
from mempo.records import NoScore, ProbeScore, Question, Trajectory, Turn, TurnScore


@dataclass(frozen=True, slots=True)
class _Plan:
    """One turn before the forward pass: what the memory side reads, or the reason why it is not scored.

    ``pieces``: the segment, then the observations that look-ahead adds one by one.
    """

    trajectory: Trajectory
    index: int
    reason: NoScore | None
    pieces: list[list[int]]
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
    reference: Scorer | None = None,
    actor: AbstractContextManager[Scorer] | None = None,
) -> list[TurnScore]:
    """One TurnScore for every turn of every trajectory, in their order. Probes are scored at temperature 1.

    ``reference`` gives ``ref_logprobs`` where the loss has a KL term, else they are 0, and the full side where
    ``scoring.full_scorer`` says so. ``actor`` (the engine): who recomputes ``old_logprobs``, opened last. Raises
    ``ValueError`` where the engine runs another policy version than the one that sampled a trajectory, and where a
    reference is needed and not given.
    """
    _refuse_stale(engine, trajectories)
    if reference is None and needs_reference(config):
        raise ValueError("loss.kl_coef > 0 and scoring.full_scorer: reference need the reference policy: pass it")
    probes = {name: _probes(engine, questions[name], config) for name in {t.question_id for t in trajectories}}
    plans = [plan for t in trajectories for plan in _plan(engine, t, probes[t.question_id], config)]
    turns = [plan.turn for plan in plans]
    scored = _probe_scores(engine, reference, [plan for plan in plans if plan.reason is None], probes, config)
    ref = [[0.0] * len(turn.response_ids) for turn in turns]
    if reference is not None and config.loss.kl_coef > 0:
        ref = _response_logprobs(reference, turns, config)
    old = [turn.sampling_logprobs for turn in turns]
    if config.loss.old_logprobs == "recomputed":
        with actor or nullcontext(engine) as scorer:
            old = _response_logprobs(scorer, turns, config)
    return [
        _turn_score(plan, next(scored) if plan.reason is None else [], config, *given)
        for plan, *given in zip(plans, old, ref, strict=True)
    ]


def needs_reference(config: Config) -> bool:
    frozen = config.scoring.full_scorer == "reference" and config.uses_memory_reward
    return frozen or config.loss.kl_coef > 0


def _probes(engine: Engine, question: Question, config: Config) -> list[Probe]:
    """The wordings that the tokenizer tells apart; the first alias first."""
    made = [make_probe(engine.tokenizer, worded) for worded in wordings(question, config.scoring.aliases)]
    return list({tuple(probe.token_ids): probe for probe in made}.values())


def _refuse_stale(engine: Engine, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.policy_version != engine.policy_version:
            raise ValueError(
                f"stale: trajectory {trajectory.key} was sampled by policy version {trajectory.policy_version}, "
                f"the engine runs version {engine.policy_version}"
            )


def _plan(engine: Engine, trajectory: Trajectory, probes: Sequence[Probe], config: Config) -> Iterator[_Plan]:
    asked = max(len(probe.token_ids) for probe in probes)
    history = first = len(trajectory.turns[0].prompt_ids) if trajectory.turns else 0
    for index, turn in enumerate(trajectory.turns):
        context_tokens = history if config.scoring.baseline == "history" else len(turn.prompt_ids)
        segment = segment_ids(engine.tokenizer, turn, index + 1)
        ahead = [t.observation_ids for t in trajectory.turns[index : index + config.scoring.lookahead]]
        pieces = [segment, *(ids for ids in ahead if ids)]
        longest = max(context_tokens, first + sum(map(len, pieces))) + asked
        reason: NoScore | None = None
        if index == 0:
            reason = "first_turn"
        elif turn.mem_span is None:
            reason = "no_segment"
        elif not config.uses_memory_reward:
            reason = "not_asked"
        elif longest > engine.window:
            reason = "overflow"
        yield _Plan(trajectory, index, reason, pieces, context_tokens)
        history += len(turn.response_ids) + len(turn.observation_ids)


def _probe_scores(
    engine: Engine,
    reference: Scorer | None,
    scored: Sequence[_Plan],
    probes: Mapping[str, Sequence[Probe]],
    config: Config,
) -> Iterator[list[ProbeScore]]:
    """Per scored turn its probes after the full context, after the memory, and after the memory with what follows."""
    full_trees: list[TokenTree] = []
    mem_trees: list[TokenTree] = []
    for name, of_question in groupby(scored, key=lambda plan: plan.trajectory.question_id):
        plans, asked = list(of_question), [probe.asked for probe in probes[name]]
        first_prompt = plans[0].trajectory.turns[0].prompt_ids
        mem_trees.append(memory_tree(first_prompt, [p.pieces for p in plans], asked))
        for _, of_trajectory in groupby(plans, key=lambda plan: plan.trajectory.key):
            some = list(of_trajectory)
            turns, indices = some[0].trajectory.turns, [plan.index for plan in some]
            full_trees.append(full_tree(turns, indices, asked, config.scoring.baseline))
    frozen = reference if config.scoring.full_scorer == "reference" else None
    full = _values((frozen or engine).logprobs(full_trees, mode=config.scoring.mode))
    actor = _values(engine.logprobs(full_trees, mode=config.scoring.mode)) if frozen else iter(())
    mem = _values(engine.logprobs(mem_trees, mode=config.scoring.mode))
    for plan in scored:
        asked_here = probes[plan.trajectory.question_id]
        sizes = [probe.scored for probe in asked_here]
        whole = [list(islice(full, size)) for size in sizes]
        own = [list(islice(actor, size)) for size in sizes]
        pieces = [[list(islice(mem, size)) for size in sizes] for _ in plan.pieces]
        yield [
            _probe_score(probe, whole[i], [after[i] for after in pieces], own[i]) for i, probe in enumerate(asked_here)
        ]


def _values(per_tree: Iterable[Sequence[float]]) -> Iterator[float]:
    return (value for values in per_tree for value in values)


def _probe_score(probe: Probe, full: list[float], pieces: list[list[float]], actor: list[float]) -> ProbeScore:
    return ProbeScore(
        text=probe.text,
        gold_spans=probe.gold_spans,
        token_ids=probe.token_ids,
        starts=[start for start, _ in probe.offsets[-probe.scored :]],
        ends=[end for _, end in probe.offsets[-probe.scored :]],
        core_tokens=probe.core_tokens,
        full_logprobs=full,
        mem_logprobs=pieces[0],
        ahead_logprobs=pieces[1:],
        actor_logprobs=actor,
    )


def _response_logprobs(engine: Scorer, turns: Sequence[Turn], config: Config) -> list[list[float]]:
    trees = [chain([*turn.prompt_ids, *turn.response_ids], len(turn.prompt_ids)) for turn in turns]
    return engine.logprobs(trees, temperature=config.rollout.temperature)


def _turn_score(plan: _Plan, probes: list[ProbeScore], config: Config, old: list[float], ref: list[float]) -> TurnScore:
    span = plan.turn.mem_span
    frozen = config.scoring.full_scorer == "reference"
    return TurnScore(
        question_id=plan.trajectory.question_id,
        sample_index=plan.trajectory.sample_index,
        turn=plan.index + 1,
        policy_version=plan.trajectory.policy_version,
        probes=probes,
        mem_tokens=span[1] - span[0] if span else 0,
        context_tokens=plan.context_tokens,
        scorer="reference" if frozen else f"actor@{plan.trajectory.policy_version}",
        reason=plan.reason,
        old_logprobs=old,
        ref_logprobs=ref,
    )
