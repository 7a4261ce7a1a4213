"""Trajectories to look into: which ones, and what each turn's memory was worth; the page escapes all texts.

Read from ``results/<policy>/trajectories/`` and ``results/<policy>/config.json``, DVC's outputs, like the report.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle
from math import exp
from pathlib import Path

import pandas as pd

from mempo import rounds, storage, workspace
from mempo.config import MemReward
from mempo.excerpts import Piece, pieces
from mempo.probe_rewards import KeptTokens, kept_tokens
from mempo.records import ProbeScore, Question, Trajectory, Turn, TurnScore
from mempo.results import there
from mempo.samples import TurnReward

Key = tuple[str, int]
SHOWN = 8  # trajectories of a round
_VISIBLE = ("\n", "\t", "\u200c", "\u200d")  # the two joiners shape words and emoji


@dataclass(frozen=True, slots=True)
class Token:
    """A probe token: p after the whole history and after the memory, and whether the reward counts it on each side."""

    text: str
    p_full: float
    p_mem: float
    answer: bool
    kept_full: bool
    kept_mem: bool


@dataclass(frozen=True, slots=True)
class TurnScene:
    turn: Turn
    pieces: list[Piece]
    reward: TurnReward
    probes: list[list[Token]]


@dataclass(frozen=True, slots=True)
class Scene:
    """A trajectory and the reason it was chosen."""

    why: str
    question: Question
    trajectory: Trajectory
    turns: list[TurnScene]


def read(root: Path, name: str, rewards: pd.DataFrame) -> dict[int, list[Scene]]:
    """Scenes of the published rounds of policy ``name``, by round. ``rewards``: its rows of TurnReward with ``round``.

    Raises ``FileNotFoundError`` naming the missing file and the command that makes it.
    """
    folder, command = root / "results" / name, f"mempo train {name}"
    there(folder / "config.json", command)
    options = workspace.recorded(folder).mem_reward
    found = {}
    for index in sorted({0, int(rewards["round"].max())}):
        kept = {kind: there(folder / "trajectories" / f"{kind}_{index:04d}.parquet", command)
                for kind in ("rollouts", "questions", "scores")}  # fmt: skip
        found[index] = scenes(
            storage.read_records(kept["rollouts"], Trajectory),
            rounds.by_question(storage.read_records(kept["questions"], Question)),
            storage.read_records(kept["scores"], TurnScore),
            turn_rewards(rewards[rewards["round"] == index]),
            options,
        )
    return found


def turn_rewards(frame: pd.DataFrame) -> list[TurnReward]:
    """Rows of a rewards table as records again: what pandas holds as NaN is None."""
    columns = [field.name for field in fields(TurnReward)]
    rows = frame[columns].astype(object).where(frame[columns].notna(), None)
    return [TurnReward(*row) for row in rows.to_numpy().tolist()]


def scenes(
    trajectories: Sequence[Trajectory],
    questions: Mapping[str, Question],
    scores: Sequence[TurnScore],
    table: Sequence[TurnReward],
    options: MemReward,
    count: int = SHOWN,
) -> list[Scene]:
    """Scenes of the ``count`` trajectories that ``choose`` picks of one round."""
    rows = by_trajectory(table)
    counted = [score for score in scores if (score.question_id, score.sample_index) in rows]
    kept = {
        (score.question_id, score.sample_index, score.turn): (score, masks)
        for score, masks in zip(counted, kept_tokens(counted, options), strict=True)
    }
    by_key = {(t.question_id, t.sample_index): t for t in trajectories}

    def scene(key: Key, why: str) -> Scene:
        turns = [
            TurnScene(turn, pieces(turn.text, row.turn), row, _probes(*kept[(*key, row.turn)]))
            for turn, row in zip(by_key[key].turns, rows[key], strict=True)
        ]
        return Scene(why, questions[key[0]], by_key[key], turns)

    return [scene(key, why) for key, why in choose(table, count).items()]


def choose(table: Sequence[TurnReward], count: int = SHOWN) -> dict[Key, str]:
    """``count`` trajectories in turn: the longest right one, the longest wrong one, those with the largest and with the
    most negative memory advantage, then the next of each, each with the reason it was taken for.

    Of equals the first. A question that is not shown yet goes before one that is.
    """
    rows = by_trajectory(table)
    advantages = {key: [row.mem_advantage for row in of if row.mem_reward is not None] for key, of in rows.items()}
    scored = [key for key, found in advantages.items() if found]
    longest = sorted(rows, key=lambda key: -len(rows[key]))
    queues = {
        "right": [key for key in longest if rows[key][0].score > 0],
        "wrong": [key for key in longest if rows[key][0].score <= 0],
        "largest memory advantage": sorted(scored, key=lambda key: -max(advantages[key])),
        "most negative memory advantage": sorted(scored, key=lambda key: min(advantages[key])),
    }
    chosen: dict[Key, str] = {}
    for why in cycle(queues):
        if len(chosen) == min(count, len(rows)):
            return chosen
        asked = {name for name, _ in chosen}
        left = [key for key in queues[why] if key not in chosen]
        if left:
            chosen[next((key for key in left if key[0] not in asked), left[0])] = why
    return chosen


def by_trajectory(table: Sequence[TurnReward]) -> dict[Key, list[TurnReward]]:
    found: dict[Key, list[TurnReward]] = {}
    for row in table:
        found.setdefault((row.question_id, row.sample_index), []).append(row)
    return found


def scale_end(shown: Sequence[Scene]) -> float:
    """Where the colour scale ends: the largest absolute memory advantage shown, at most 2; 1 where there is none."""
    found = max((abs(turn.reward.mem_advantage) for scene in shown for turn in scene.turns), default=0.0)
    return min(found, 2.0) or 1.0


def _probes(score: TurnScore, masks: Sequence[KeptTokens]) -> list[list[Token]]:
    return [list(_tokens(probe, kept)) for probe, kept in zip(score.probes, masks, strict=True)]


def _tokens(probe: ProbeScore, kept: KeptTokens) -> Iterator[Token]:
    for i, (start, end) in enumerate(zip(probe.starts, probe.ends, strict=True)):
        yield Token(
            probe.text[start:end],
            exp(probe.full_logprobs[i]),
            exp(probe.mem_logprobs[i]),
            bool(kept.answer[i]),
            bool(kept.full[i]),
            bool(kept.mem[i]),
        )


def visible(text: str) -> str:
    """``text`` with control and direction characters spelled out, as in ``‹U+202E›``: what is there is seen."""
    return "".join(
        f"‹U+{ord(letter):04X}›"
        if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp") and letter not in _VISIBLE
        else letter
        for letter in text
    )
