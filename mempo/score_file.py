"""The memory reward of anyone's trajectories: a file and a policy in, a row for each turn out (docs/score.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mempo import samples
from mempo.asking import plain
from mempo.config import Config, LossConfig
from mempo.console import progress
from mempo.engines import Engine, open_engine
from mempo.engines.loader import load_tokenizer
from mempo.params import ConfigError
from mempo.probe_rewards import KeptTokens, kept_tokens
from mempo.records import Question, Trajectory, TurnScore
from mempo.scoring import needs_reference, score
from mempo.transcript_file import read_transcripts
from mempo.transcript_tokens import tokenised

MAX_SHOWN = 100  # rows of the table on a terminal
_AT_ONCE = 16  # trajectories between two steps of the progress bar


@dataclass(frozen=True, slots=True)
class ScoredTurn:
    """One row: what became of one turn, and the A tokens of its probe (A = 0 where ``reason`` says why there is none).

    ``answer_mask``, ``full_mask``, ``mem_mask`` [A] are 1 for the answer's tokens and for those of them that were kept.
    """

    id: str
    sample_index: int
    turn: int
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
    scorer: str
    tokens: list[str]
    answer_mask: list[int]
    full_mask: list[int]
    mem_mask: list[int]
    full_logprobs: list[float]
    mem_logprobs: list[float]


def score_file(
    path: Path, model: Path, config: Config, *, reference: Path | None = None, limit: int | None = None
) -> list[ScoredTurn]:
    """Score every turn of the first ``limit`` trajectories of ``path`` with the policy in folder ``model``.

    Raises ``ValueError`` naming the bad rows of ``path`` before a model is loaded, and ``ConfigError`` for a setting
    that asks for no memory reward or for a ``reference`` that is not given.
    """
    if not config.uses_memory_reward:
        raise ConfigError("advantage.mem_weight: 0 asks for no memory reward, and there is nothing else to score")
    # Old and reference log-probs are what training needs of a score, and cost a pass of their own.
    config = config.model_copy(update={"loss": LossConfig()})
    if needs_reference(config) and reference is None:
        raise ConfigError("scoring.full_scorer: reference needs the frozen policy: pass --reference")
    if reference is not None and not needs_reference(config):
        raise ConfigError("--reference: nothing reads it, scoring.full_scorer is actor")
    attempts = read_transcripts(path, limit)
    trajectories, questions = tokenised(attempts, load_tokenizer(model), config, path)
    engine = open_engine(model, config.runtime)
    frozen = open_engine(reference, config.runtime) if reference else None
    if frozen is not None and frozen.tokenizer.get_vocab() != engine.tokenizer.get_vocab():
        raise ValueError(f"{reference}: another vocabulary than {model}")
    trajectories = [replace(trajectory, policy_version=engine.policy_version) for trajectory in trajectories]
    scores = _scores(engine, frozen, trajectories, questions, config)
    _, table = samples.build(trajectories, questions, scores, config, round_index=0)
    kept = kept_tokens(scores, config.mem_reward)
    return [_row(*given) for given in zip(table, scores, kept, strict=True)]


def _scores(
    engine: Engine,
    reference: Engine | None,
    trajectories: Sequence[Trajectory],
    questions: Mapping[str, Question],
    config: Config,
) -> list[TurnScore]:
    scores: list[TurnScore] = []
    with progress("score", len(trajectories)) as advance:
        for start in range(0, len(trajectories), _AT_ONCE):
            some = trajectories[start : start + _AT_ONCE]
            scores += score(engine, some, questions, config, reference=reference)
            advance(start + len(some))
    return scores


def _row(reward: samples.TurnReward, score: TurnScore, kept: Sequence[KeptTokens]) -> ScoredTurn:
    first = next(iter(score.probes), None)
    masks = next(iter(kept), KeptTokens([], [], []))
    return ScoredTurn(
        id=reward.question_id,
        sample_index=reward.sample_index,
        turn=reward.turn,
        reason=reward.reason,
        p_full=reward.p_full,
        p_mem=reward.p_mem,
        kept_full=reward.kept_full,
        kept_mem=reward.kept_mem,
        answer_tokens=reward.answer_tokens,
        mem_reward=reward.mem_reward,
        mem_advantage=reward.mem_advantage,
        mem_tokens=reward.mem_tokens,
        context_tokens=reward.context_tokens,
        scorer=score.scorer,
        tokens=[first.text[start:end] for start, end in zip(first.starts, first.ends, strict=True)] if first else [],
        answer_mask=masks.answer,
        full_mask=masks.full,
        mem_mask=masks.mem,
        full_logprobs=first.full_logprobs if first else [],
        mem_logprobs=first.mem_logprobs if first else [],
    )


def table(rows: Sequence[ScoredTurn]) -> Table:
    """The first ``MAX_SHOWN`` turns and a summary of all; texts of the file are printed as plain text."""
    shown = Table(caption=_caption(rows), caption_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    shown.add_column("trajectory", overflow="fold", min_width=12)
    for name in ("turn", "context", "memory", "kept", "p_full", "p_mem", "reward", "advantage"):
        shown.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows[:MAX_SHOWN]:
        key = (row.id, row.sample_index)
        label = Text(plain(f"{row.id}/{row.sample_index}") if key != before else "")
        before = key
        shown.add_row(label, str(row.turn), str(row.context_tokens), str(row.mem_tokens), *_figures(row))
    shown.add_section()
    scored = [row for row in rows if row.mem_reward is not None]
    answer = sum(row.answer_tokens for row in scored)
    full, mem = sum(row.kept_full for row in scored), sum(row.kept_mem for row in scored)
    shown.add_row(
        f"mean of {len(scored)}",
        "",
        _mean((row.context_tokens for row in scored), ".0f"),
        _mean((row.mem_tokens for row in scored), ".0f"),
        f"{full} {mem} / {answer}",
        *(_mean((getattr(row, name) for row in scored), ".3f") for name in ("p_full", "p_mem")),
        *(_mean((getattr(row, name) for row in scored), "+.3f") for name in ("mem_reward", "mem_advantage")),
        style="bold",
    )
    return shown


def _figures(row: ScoredTurn) -> list[str]:
    if row.reason is not None:
        return [row.reason, "", "", "", ""]
    reward = "none" if row.mem_reward is None else f"{row.mem_reward:+.3f}"
    sides = ["none" if p is None else f"{p:.3f}" for p in (row.p_full, row.p_mem)]
    return [f"{row.kept_full} {row.kept_mem} / {row.answer_tokens}", *sides, reward, f"{row.mem_advantage:+.3f}"]


def _caption(rows: Sequence[ScoredTurn]) -> str:
    trajectories = len({(row.id, row.sample_index) for row in rows})
    reasons = Counter(row.reason for row in rows if row.reason is not None)
    parts = [f"{len(rows)} turns of {trajectories} trajectories"]
    parts += [f"{count} {reason}" for reason, count in reasons.items()]
    silent = sum(row.reason is None and row.mem_reward is None for row in rows)
    parts += [f"{silent} without a reward"] if silent else []
    nothing = sum(row.answer_tokens > 0 and min(row.kept_full, row.kept_mem) == 0 for row in rows)
    parts += [f"{nothing} with nothing kept on a side (see mem_reward.empty)"] if nothing else []
    parts += [f"the first {MAX_SHOWN} shown, --out has all"] if len(rows) > MAX_SHOWN else []
    return "; ".join(parts) + "\nkept: answer tokens that count after the history, after the memory / of how many"


def _mean(values: Iterable[float], form: str) -> str:
    found = list(values)
    return format(sum(found) / len(found), form) if found else "-"
