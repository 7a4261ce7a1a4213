"""The evaluation step: a policy on held-out questions, one row a question, and the figures people compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mempo import rewards
from mempo.config import Config
from mempo.records import Question, Trajectory


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One question answered once. Tokens are those a turn holds: P of its prompt, R of its response.

    ``total_tokens``: the sum of P + R over the turns (what is read and written without a cache). ``peak_tokens``: the
    largest P + R. ``dependency``: the sum of R (P + R / 2), on how many tokens the generated ones depended in all. The
    last two are MEM1's (arXiv 2506.15841, ``Mem1/inference/eval.py``), whose code leaves the question out of P.
    """

    policy: str
    greedy: bool
    question_id: str
    question: str
    source: str
    num_objectives: int
    sample_index: int
    answer: str | None
    em: float
    em_mean: float
    f1: float
    format: bool
    status: str
    turns: int
    total_tokens: int
    peak_tokens: int
    dependency: float


def rows(
    policy: str, trajectories: Sequence[Trajectory], questions: Mapping[str, Question], config: Config, *, greedy: bool
) -> list[EvaluationRow]:
    """Score every trajectory; the answer counts whatever the format, which has its own column."""
    found = []
    for trajectory in trajectories:
        question = questions[trajectory.question_id]
        score = rewards.score_answer(trajectory.answer, question.golden_answers, config.reward.normalizer)
        lengths = [(len(turn.prompt_ids), len(turn.response_ids)) for turn in trajectory.turns]
        found.append(
            EvaluationRow(
                policy=policy,
                greedy=greedy,
                question_id=question.question_id,
                question=question.question,
                source=question.source,
                num_objectives=len(question.golden_answers),
                sample_index=trajectory.sample_index,
                answer=trajectory.answer,
                em=score.em,
                em_mean=score.em_mean,
                f1=score.f1,
                format=bool(trajectory.turns) and all(turn.valid for turn in trajectory.turns),
                status=trajectory.status,
                turns=len(trajectory.turns),
                total_tokens=sum(read + written for read, written in lengths),
                peak_tokens=max((read + written for read, written in lengths), default=0),
                dependency=sum(written * (read + written / 2) for read, written in lengths),
            )
        )
    return found


def counted(found: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Rows that speak of the policy: a failed tool is no wrong answer. Raises ``ValueError`` where none is left."""
    kept = [row for row in found if row.status != "tool_failed"]
    if not kept:
        raise ValueError(f"the search tool failed in all {len(found)} trajectories")
    return kept


def mean_em(found: Sequence[EvaluationRow]) -> float:
    return fmean(row.em for row in counted(found))


def summary(found: Sequence[EvaluationRow]) -> dict[str, float]:
    """The figures of one policy: sampled ones under plain names, greedy ones under ``..._greedy``."""
    sampled = counted([row for row in found if not row.greedy])
    greedy = counted([row for row in found if row.greedy])
    return {
        "em": fmean(row.em for row in sampled),
        "em_greedy": fmean(row.em for row in greedy),
        "em_mean": fmean(row.em_mean for row in sampled),
        "em_mean_greedy": fmean(row.em_mean for row in greedy),
        "f1": fmean(row.f1 for row in sampled),
        "f1_greedy": fmean(row.f1 for row in greedy),
        "format_rate": fmean(row.format for row in sampled),
        "turns": fmean(row.turns for row in sampled),
        "total_tokens": fmean(row.total_tokens for row in sampled),
        "peak_tokens": fmean(row.peak_tokens for row in sampled),
        "num_questions": len({row.question_id for row in sampled}),
        "tool_failed": fmean(row.status == "tool_failed" for row in found),
    }
