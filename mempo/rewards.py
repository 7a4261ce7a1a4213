"""The outcome reward: does the answer match? Exact match and token F1 after normalising.

``squad`` equals the published scorers (lower case, no ASCII punctuation, no articles, white space folded) except where
that leaves nothing of a side: then the case-folded strings themselves are compared. ``unicode`` does the same for any
script: compatibility forms folded (NFKC), every punctuation mark and symbol out, Chinese and kana split per character.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mempo.records import Question, Trajectory

Normalizer = Literal["auto", "squad", "unicode"]
OutcomeKind = Literal["em", "em_mean", "f1"]
GoldenAnswers = Sequence[str | Sequence[str]]

CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_YES_NO = {"yes", "no", "noanswer"}


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """``em`` 1 where every objective matches; ``f1`` and ``em_mean`` are means over objectives."""

    em: float
    f1: float
    em_mean: float


def score_answer(prediction: str | None, golden_answers: GoldenAnswers, normalizer: Normalizer = "auto") -> AnswerScore:
    """Compare with the best alias of each objective. Several objectives are split on ``;`` (``unicode``: or ``；``).

    A bare string is an objective with one alias. Another number of parts than of objectives scores 0.
    """
    objectives = [[entry] if isinstance(entry, str) else list(entry) for entry in golden_answers]
    if normalizer == "auto":
        plain = all(alias.isascii() for aliases in objectives for alias in aliases)
        normalizer = "squad" if plain else "unicode"
    parts = [prediction or ""]
    if len(objectives) > 1:
        parts = re.split("[;；]" if normalizer == "unicode" else ";", parts[0])
    if len(parts) != len(objectives):
        return AnswerScore(0.0, 0.0, 0.0)
    matches = [_best_match(part, aliases, normalizer) for part, aliases in zip(parts, objectives, strict=True)]
    ems = [em for em, _ in matches]
    return AnswerScore(min(ems), fmean(f1 for _, f1 in matches), fmean(ems))


def outcome_reward(
    trajectory: Trajectory,
    question: Question,
    *,
    kind: OutcomeKind = "em",
    normalizer: Normalizer = "auto",
    format_credit: float = 0.0,
    require_format: bool = True,
) -> float:
    """value + format_credit * (1 - value) where every turn is valid; where one is not, 0 (``require_format``) or value.

    value in [0, 1] is ``AnswerScore.kind`` of ``trajectory.answer``. No answer: 0, with no credit for the format.
    """
    if trajectory.answer is None:
        return 0.0
    well_formed = all(turn.valid for turn in trajectory.turns)
    if require_format and not well_formed:
        return 0.0
    score = score_answer(trajectory.answer, question.golden_answers, normalizer)
    value = {"em": score.em, "em_mean": score.em_mean, "f1": score.f1}[kind]
    return value + format_credit * (1.0 - value) if well_formed else value


def normalized_words(text: str, normalizer: Literal["squad", "unicode"]) -> list[str]:
    """The words that are compared; empty where the text is articles and punctuation alone."""
    if normalizer == "squad":
        return _ARTICLES.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split()
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(char for char in folded if unicodedata.category(char)[0] not in "PS")
    return CJK.sub(r" \g<0> ", _ARTICLES.sub(" ", kept)).split()


def _best_match(
    prediction: str, aliases: Sequence[str], normalizer: Literal["squad", "unicode"]
) -> tuple[float, float]:
    """(em, f1), each the best over the aliases; an empty alias is none."""
    words = normalized_words(prediction, normalizer)
    found = [_match(prediction, words, alias, normalizer) for alias in aliases if alias.strip()]
    return max((em for em, _ in found), default=0.0), max((f1 for _, f1 in found), default=0.0)


def _match(
    prediction: str, words: list[str], alias: str, normalizer: Literal["squad", "unicode"]
) -> tuple[float, float]:
    gold = normalized_words(alias, normalizer)
    if not words or not gold:
        same = float(prediction.strip().casefold() == alias.strip().casefold())
        return same, same
    if words == gold:
        return 1.0, 1.0
    if " ".join(words) in _YES_NO or " ".join(gold) in _YES_NO:
        return 0.0, 0.0
    # Words are counted, not collected: "New York New York" against "New York" has precision 2/4.
    shared = (Counter(words) & Counter(gold)).total()
    return 0.0, 2.0 * shared / (len(words) + len(gold))
