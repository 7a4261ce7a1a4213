"""Known good and bad memories in the place of a round's own: what would the reward say of them?

Does it tell a complete memory from one that lacks an item, holds a wrong one, or nothing? What does a probe gain from a
short context alone, whatever stands in it? Nothing is trained on here; draws are seeded apart from those of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from statistics import fmean
from typing import get_args

from mempo import scoring
from mempo.config import Config, MemReward
from mempo.engines import Engine
from mempo.probe_rewards import memory_rewards, round_threshold
from mempo.probes import Asked, memory_tree
from mempo.records import Sample, Trajectory, Turn, TurnScore
from mempo.rounds import RoundRecords
from mempo.standins import Facts, Key, Kind, Standin, memories, memory_turns, standins

SHORT: tuple[Kind, ...] = ("own", "complete", "shuffled", "other", "none")  # whose gain over the history is told


@dataclass(frozen=True, slots=True)
class ControlRow:
    """What a memory of kind ``kind`` is worth in the place of a turn's own.

    ``p_mem``, ``p_full`` and ``reward`` are as the run's settings have them, for this turn without later ones;
    ``all_mem`` and ``all_full`` are geometric means over all tokens of the answer, none filtered out.
    """

    question_id: str
    sample_index: int
    turn: int
    kind: str
    memory: str
    mem_tokens: int
    p_mem: float | None
    p_full: float | None
    reward: float | None
    all_mem: float | None
    all_full: float | None

    @property
    def key(self) -> Key:
        return self.question_id, self.sample_index, self.turn


def measure(
    engine: Engine, records: RoundRecords, config: Config, facts: Facts, *, round_index: int
) -> tuple[dict[str, float], list[ControlRow]]:
    """Figures and rows for the chosen turns, by the policy that wrote them.

    A policy that is trained without memory reward has no stored probes: its chosen trajectories are scored here.
    """
    turns = memory_turns(records.trajectories)
    found = memories(engine.tokenizer, turns)
    chosen = chosen_turns(turns, config, round_index)
    scores = _scores(engine, records, chosen, config)
    by_key = {(t.question_id, t.sample_index): t for t in records.trajectories}
    made: list[Standin] = []
    for key in chosen:
        if scores[key].reason is None:
            random = Random(f"diagnose/{config.loop.seed}/{round_index}/{key}")
            made += standins(engine.tokenizer, by_key[key[:2]], key[2], found, facts, random)
    first_prompts = {t.question_id: t.turns[0].prompt_ids for t in records.trajectories if t.turns}
    pairs = scored(engine, made, scores, first_prompts, config)
    rows = rows_of(pairs, list(scores.values()), config)
    return figures(rows), rows


def chosen_turns(turns: Mapping[Key, Turn], config: Config, round_index: int) -> list[Key]:
    """``diagnose.num_turns`` of the turns, or all where there are fewer, in their order."""
    random = Random(f"diagnose/{config.loop.seed}/{round_index}")
    keys = list(turns)
    count = min(config.diagnose.num_turns, len(keys))
    return [keys[i] for i in sorted(random.sample(range(len(keys)), count))]


def _scores(engine: Engine, records: RoundRecords, chosen: Sequence[Key], config: Config) -> dict[Key, TurnScore]:
    scores = records.scores
    if not config.uses_memory_reward:
        asked = config.model_copy(
            update={
                "advantage": config.advantage.model_copy(update={"mem_weight": 1.0}),
                "scoring": config.scoring.model_copy(update={"full_scorer": "actor"}),
                "loss": config.loss.model_copy(update={"kl_coef": 0.0, "old_logprobs": "sampler"}),
            }
        )
        wanted = {key[:2] for key in chosen}
        some = [t for t in records.trajectories if (t.question_id, t.sample_index) in wanted]
        scores = scoring.score(engine, some, records.questions, asked)
    return {(score.question_id, score.sample_index, score.turn): score for score in scores}


def scored(
    engine: Engine,
    made: Sequence[Standin],
    scores: Mapping[Key, TurnScore],
    first_prompts: Mapping[str, Sequence[int]],
    config: Config,
) -> list[tuple[Standin, TurnScore]]:
    """Each stand-in with its turn's score as it would be: other log-probs on the memory side, no look-ahead.

    Equal memories of a question are scored once; one that leaves no room in the window is left out.
    """
    fitting = []
    asked: dict[str, list[Asked]] = {}
    segments: dict[str, dict[tuple[int, ...], None]] = {}  # in order, each once
    for standin in made:
        name, ids = standin.key[0], standin.memory.token_ids
        asked[name] = [(probe.token_ids, len(probe.starts)) for probe in scores[standin.key].probes]
        if len(first_prompts[name]) + len(ids) + max(len(probe) for probe, _ in asked[name]) <= engine.window:
            fitting.append(standin)
            segments.setdefault(name, {})[tuple(ids)] = None
    trees = [
        memory_tree(first_prompts[name], [[segment] for segment in some], asked[name])
        for name, some in segments.items()
    ]
    flat = (value for values in engine.logprobs(trees, mode=config.scoring.mode) for value in values)
    logprobs = {
        (name, segment): [list(islice(flat, targets)) for _, targets in asked[name]]
        for name, some in segments.items()
        for segment in some
    }
    pairs = []
    for standin in fitting:
        score, found = scores[standin.key], logprobs[standin.key[0], tuple(standin.memory.token_ids)]
        probes = [
            replace(probe, mem_logprobs=values, ahead_logprobs=[])
            for probe, values in zip(score.probes, found, strict=True)
        ]
        pairs.append((standin, replace(score, probes=probes, mem_tokens=len(standin.memory.token_ids))))
    return pairs


def rows_of(
    pairs: Sequence[tuple[Standin, TurnScore]], round_scores: Sequence[TurnScore], config: Config
) -> list[ControlRow]:
    """``round_scores`` give the threshold where it is a quantile of the round."""
    options, aliases = config.mem_reward, config.scoring.aliases
    threshold = round_threshold([round_scores], options)
    alone = options.model_copy(update={"threshold": threshold, "quantile": None, "return_horizon": 0})
    # A memory without a token would be infinitely compressed.
    turns = [[replace(score, mem_tokens=max(1, score.mem_tokens))] for _, score in pairs]
    probes, rewards = memory_rewards(turns, alone, aliases=aliases)
    everything, _ = memory_rewards(turns, MemReward(mask="none", separators=options.separators), aliases=aliases)
    rows = []
    for (standin, _), (value,), (reward,), (whole,) in zip(pairs, probes, rewards, everything, strict=True):
        assert value is not None and whole is not None, "only turns with a probe have stand-ins"
        memory = standin.memory
        rows.append(
            ControlRow(*standin.key, standin.kind, memory.text, len(memory.token_ids), value.p_mem, value.p_full,
                       reward, whole.p_mem, whole.p_full)
        )  # fmt: skip
    return rows


def figures(rows: Sequence[ControlRow]) -> dict[str, float]:
    """By kind: means, and ``below``, the share of turns whose reward falls below that of the complete memory there.

    ``gain/<kind>`` = mean of all_mem - all_full. No memory tells more than the history: above 0, that of ``complete``,
    ``other`` or ``none`` is what a context gains by being short.
    """
    complete = {row.key: row.reward for row in rows if row.kind == "complete"}
    found: dict[str, float] = {}
    for kind in get_args(Kind):
        some = [row for row in rows if row.kind == kind]
        found |= {f"{kind}/n": float(len(some))}
        for name in ("p_mem", "reward", "all_mem"):
            values = [value for row in some if (value := getattr(row, name)) is not None]
            found |= {f"{kind}/{name}": fmean(values)} if values else {}
        ranked = [
            row.reward < best for row in some if row.reward is not None and (best := complete.get(row.key)) is not None
        ]
        found |= {f"{kind}/below": fmean(ranked)} if ranked and kind != "complete" else {}
        gains = [row.all_mem - row.all_full for row in some if row.all_mem is not None and row.all_full is not None]
        found |= {f"gain/{kind}": fmean(gains)} if gains and kind in SHORT else {}
    whole = [row.all_full for row in rows if row.kind == "own" and row.all_full is not None]
    return found | ({"all_full": fmean(whole)} if whole else {})


def signals(
    samples: Sequence[Sample], trajectories: Sequence[Trajectory], config: Config, round_index: int
) -> tuple[list[Sample], list[Sample]]:
    """The ``<mem>`` tokens of the chosen turns twice: with the outcome's part of their advantage, with the memory's."""
    turns = memory_turns(trajectories)
    spans = {}
    for key in chosen_turns(turns, config, round_index):
        turn = turns[key]
        assert turn.mem_span is not None, "memory turns have one"
        spans["/".join(map(str, key))] = [len(turn.prompt_ids) + edge for edge in turn.mem_span]
    outcome, memory = [], []
    for sample in samples:
        start, end = spans.get(sample.key, (0, 0))
        mask = [on if start <= t < end else 0 for t, on in enumerate(sample.loss_mask)]
        if sample.weight > 0 and any(mask):
            outcome.append(replace(sample, loss_mask=mask, memory_advantages=[0.0] * len(mask)))
            memory.append(replace(sample, loss_mask=mask, outcome_advantage=0.0))
    return outcome, memory
