"""What a round is made of beside the steps: which questions it asks, and its figures for people."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import pandas as pd

from mempo import mem_reward, stats, storage
from mempo.records import NoScore, ProbeScore, Question, Status, Trajectory, TurnScore
from mempo.samples import TurnReward
from mempo.sources import Phase


@dataclass(frozen=True, slots=True)
class RoundRecords:
    """What the steps of one round have written: ``table`` is its reward table, ``questions`` go by their id."""

    trajectories: list[Trajectory]
    questions: Mapping[str, Question]
    scores: list[TurnScore]
    table: list[TurnReward]


def read_round(folder: Path) -> RoundRecords:
    """The records of ``round_<index>/``. Scores and rewards are empty until their step has written them."""
    scores, rewards = folder / "scores.parquet", folder / "rewards.parquet"
    return RoundRecords(
        storage.read_records(folder / "rollouts.parquet", Trajectory),
        by_question(storage.read_records(folder / "questions.parquet", Question)),
        storage.read_records(scores, TurnScore) if scores.exists() else [],
        storage.read_records(rewards, TurnReward) if rewards.exists() else [],
    )


def reward_frame(rows: Sequence[TurnReward]) -> pd.DataFrame:
    """One row a turn; the columns of ``TurnReward`` even where a round has no turn at all."""
    names = [field.name for field in fields(TurnReward)]
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    kinds = dict.fromkeys(("p_full", "p_mem", "mem_reward"), float)  # None is NaN
    return pd.DataFrame(columns).astype(kinds | {"question_id": str, "sample_index": int, "turn": int})


def questions_of_round(
    questions: Sequence[Question], round_index: int, per_round: int, seed: int, curriculum: Sequence[Phase] = ()
) -> list[Question]:
    """``per_round`` questions; every question comes once an epoch, each epoch in its own seeded order.

    Under a curriculum they are of the round's phase, and epochs are counted from its first round. Raises ``ValueError``
    where there are fewer than ``per_round``.
    """
    if begun := [phase for phase in curriculum if phase.from_round <= round_index]:
        questions = [question for question in questions if len(question.golden_answers) in begun[-1].objectives]
        round_index -= begun[-1].from_round
    if len(questions) < per_round:
        phase = f" of {list(begun[-1].objectives)} objectives" if begun else ""
        raise ValueError(f"loop.questions_per_round: {per_round}, and train has {len(questions)} questions{phase}")
    epoch, index = divmod(round_index * per_round, len(questions))
    order = _order(len(questions), epoch, per_round, seed)[index:]
    if len(order) < per_round:
        order += _order(len(questions), epoch + 1, per_round, seed)
    return [questions[place] for place in order[:per_round]]


def _order(count: int, epoch: int, per_round: int, seed: int) -> list[int]:
    """The order of an epoch. Its first round may have begun with the end of the epoch before: none of those follow."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    begun = epoch * count % per_round
    if begun == 0:
        return order
    before = set(_order(count, epoch - 1, per_round, seed)[-begun:])
    first = dict.fromkeys([place for place in order if place not in before][: per_round - begun])
    return [*first, *(place for place in order if place not in first)]


def rollout_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Counts of a round's trajectories; rates are over trajectories, tokens over turns."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    total = len(trajectories)
    statuses = Counter(trajectory.status for trajectory in trajectories)
    figures = {
        "trajectories": total,
        "turns": len(turns) / total,
        "format_rate": sum(all(turn.valid for turn in t.turns) and bool(t.turns) for t in trajectories) / total,
        "response_tokens": sum(len(turn.response_ids) for turn in turns),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "peak_tokens": max((len(turn.prompt_ids) + len(turn.response_ids) for turn in turns), default=0),
    }
    return figures | {f"status/{name}": statuses[name] / total for name in get_args(Status)}


def score_figures(scores: Sequence[TurnScore]) -> dict[str, float]:
    """How many turns were scored.

    ``p_full/drift``: mean over first wordings of the mean over answer tokens of the reference's log-prob after the
    history minus the actor's.
    """
    figures: dict[str, float] = {"probes": sum(score.reason is None for score in scores)}
    drifts = [_drift(score.probes[0]) for score in scores if score.probes and score.probes[0].actor_logprobs]
    if drifts:
        figures["p_full/drift"] = math.fsum(drifts) / len(drifts)
    return figures


def _drift(probe: ProbeScore) -> float:
    answer = mem_reward.answer_mask(probe.starts, probe.ends, probe.gold_spans)
    sides = zip(probe.full_logprobs, probe.actor_logprobs, answer, strict=True)
    return math.fsum(reference - actor for reference, actor, on in sides if on) / sum(answer)


def reward_figures(table: Sequence[TurnReward]) -> dict[str, float]:
    """Distributions of mem_reward, p_mem and p_full over the round's turns that have one, and per turn index."""
    frame = reward_frame(table)
    if frame.empty:
        return {}
    trajectories = frame.drop_duplicates(["question_id", "sample_index"])
    groups = trajectories.groupby("question_id")["score"]
    figures: dict[str, float] = {
        "reward/mean": float(trajectories["score"].mean()),
        "group/flat_share": float((groups.nunique() == 1).mean()),
    }
    figures |= {f"no_signal/{reason}": float((frame["reason"] == reason).mean()) for reason in get_args(NoScore)}
    for name in ("mem_reward", "p_mem", "p_full"):
        found = frame[["turn", name]].dropna()
        figures |= {f"{name}/{key}": value for key, value in stats.summary(found[name]).items()}
        for turn, rows in found.groupby("turn"):
            figures |= {f"{name}/turn_{turn}/{key}": value for key, value in stats.summary(rows[name]).items()}
    probed = frame[frame["reason"].isna()]
    if not probed.empty:
        figures |= {
            "kept/full": float((probed["kept_full"] / probed["answer_tokens"].clip(lower=1)).mean()),
            "kept/mem": float((probed["kept_mem"] / probed["answer_tokens"].clip(lower=1)).mean()),
            "kept/nothing_full": float((probed["kept_full"] == 0).mean()),
            "kept/nothing_mem": float((probed["kept_mem"] == 0).mean()),
            "mem_tokens/mean": float(probed["mem_tokens"].mean()),
        }
    scored = frame[frame["mem_reward"].notna()]
    if not scored.empty:
        pools = scored.groupby("question_id")["mem_reward"]
        figures |= {
            "pool/flat_share": float((pools.nunique() == 1).mean()),
            "pool/std": float(pools.std(ddof=0).mean()),
            "mem_advantage/std": float(scored["mem_advantage"].std(ddof=0)),
        }
    return figures


def by_question(questions: Sequence[Question]) -> dict[str, Question]:
    """Questions by id. Raises ``ValueError`` on an id that occurs twice: groups would run together."""
    found: dict[str, Question] = {}
    counts: dict[str, int] = defaultdict(int)
    for question in questions:
        counts[question.question_id] += 1
        found[question.question_id] = question
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"question_id {twice[0]!r} occurs {counts[twice[0]]} times")
    return found
