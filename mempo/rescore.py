"""A finished run under another reward: recomputed from its stored log-probabilities, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from mempo import samples, stats, storage
from mempo.config import Config, Scoring
from mempo.data import Truth
from mempo.params import ConfigError
from mempo.quality import Chain, memory_quality
from mempo.records import ProbeScore, Trajectory, TurnScore
from mempo.rounds import read_round, reward_frame

# What the stored trajectories depend on: another value is another run.
SAMPLED = ("prompt", "format", "search", "rollout", "model", "data", "warmstart", "loop")


def other_passes(made: Config, asked: Config) -> str | None:
    """Which setting needs forward passes that the stored probes do not answer; None where they answer them all.

    Raises ``ConfigError`` naming a setting under which other trajectories would have been sampled.
    """
    for section in SAMPLED:
        before, after = getattr(made, section).model_dump(), getattr(asked, section).model_dump()
        for key in (key for key, value in after.items() if value != before[key]):
            raise ConfigError(f"{section}.{key}: {after[key]!r} needs other rollouts than the run's {before[key]!r}")
    if asked.uses_memory_reward and not made.uses_memory_reward:
        return "advantage.mem_weight: a run without memory reward has no probes and needs forward passes for them"
    had, wants = made.scoring, asked.scoring
    answered = {
        "baseline": wants.baseline == had.baseline,
        "full_scorer": wants.full_scorer == had.full_scorer or wants.full_scorer == "actor",
        "lookahead": wants.lookahead <= had.lookahead,
        "aliases": wants.aliases == "first" or had.aliases != "first",
    }
    for key in (key for key, is_answered in answered.items() if not is_answered):
        before, after = getattr(had, key), getattr(wants, key)
        return f"scoring.{key}: {after!r} needs other forward passes than the run's {before!r}"
    return None


def rescore(
    run_folder: Path, config: Config, truth: Mapping[str, list[Chain]], scored: Path | None = None
) -> pd.DataFrame:
    """The reward table of every finished round under ``config``, with each memory's true quality where it is known.

    ``scored``: a folder with other scores of the same rounds, see ``tasks.rescoring``.
    """
    tables = []
    for folder in sorted(run_folder.glob("round_*")):
        if not (folder / "advantage.json").exists():
            continue
        made, index = read_round(folder), int(folder.name.removeprefix("round_"))
        scores = storage.read_records(scored / f"{folder.name}.parquet", TurnScore) if scored else made.scores
        if len(scores) < sum(len(trajectory.turns) for trajectory in made.trajectories):
            raise FileNotFoundError(f"{folder}: scores.parquet is missing or of other rollouts")
        asked = [_narrowed(score, config.scoring) for score in scores]
        _, table = samples.build(made.trajectories, made.questions, asked, config, round_index=index)
        known = qualities(made.trajectories, truth)
        tables.append(reward_frame(table).merge(known, on=["question_id", "sample_index", "turn"], how="left"))
        tables[-1]["round"] = index
    if not tables:
        raise FileNotFoundError(f"{run_folder}: no finished round in it")
    return pd.concat(tables, ignore_index=True)


def _narrowed(score: TurnScore, asked: Scoring) -> TurnScore:
    """``score`` as a pass under ``asked`` would have made it, out of one that asked for no less."""
    probes = [
        replace(
            probe,
            full_logprobs=probe.full_logprobs if asked.full_scorer == "reference" else _actor(probe),
            ahead_logprobs=probe.ahead_logprobs[: asked.lookahead],
        )
        for probe in (score.probes[:1] if asked.aliases == "first" else score.probes)
    ]
    return replace(score, probes=probes)


def _actor(probe: ProbeScore) -> list[float]:
    return probe.actor_logprobs or probe.full_logprobs


def summary(table: pd.DataFrame) -> dict[str, float]:
    """Distribution of mem_reward, how much of the answer it read, and whether its advantage follows true quality.

    ``correlation`` is Pearson's, of the normalised memory advantage with quality over all scored turns that have one;
    ``complete`` and ``incomplete`` are mean advantages of memories that hold all they should, and of the others.
    """
    scored = table[table["mem_reward"].notna()]
    known = scored[scored["quality"].notna()]
    complete = known["quality"] == 1.0
    figures = {f"mem_reward/{key}": value for key, value in stats.summary(scored["mem_reward"].tolist()).items()}
    return figures | {
        "nothing kept": float((scored["kept_mem"] == 0).mean()),
        "correlation": float(known["mem_advantage"].corr(known["quality"])),
        "complete": float(known.loc[complete, "mem_advantage"].mean()),
        "incomplete": float(known.loc[~complete, "mem_advantage"].mean()),
    }


def chains(truth: Mapping[str, Sequence[Truth]]) -> dict[str, list[Chain]]:
    """Question id -> the facts behind each objective."""
    return {name: [objective.chain for objective in objectives] for name, objectives in truth.items()}


def qualities(trajectories: Sequence[Trajectory], truth: Mapping[str, list[Chain]]) -> pd.DataFrame:
    """The true quality of every turn's memory, NaN where there is none or nothing is known yet."""
    rows = []
    for trajectory in trajectories:
        observations: list[str] = []
        for index, turn in enumerate(trajectory.turns):
            chains = truth.get(trajectory.question_id, [])
            quality = memory_quality(turn.memory, chains, observations) if turn.memory is not None else None
            rows.append((trajectory.question_id, trajectory.sample_index, index + 1, quality))
            observations += [turn.observation] if turn.observation else []
    kinds = {"question_id": str, "sample_index": int, "turn": int, "quality": float}
    return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)
