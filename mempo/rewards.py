"""The outcome reward: does the answer match? Exact match and token F1 after normalising.

``squad`` equals the published scorers to the bit: the exact match of SQuAD's ``evaluate-v1.1.py``, the F1 of HotpotQA's
``hotpot_evaluate_v1.py`` with its rule for yes and no (lower case, no ASCII punctuation, no articles, white space
folded), except where that leaves nothing of a side: then the case-folded strings themselves are compared. ``unicode``
does the same for any script: compatibility forms folded (NFKC), every mark and symbol out but those that make another
number, Chinese and kana split per character, English articles out of what can be English.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mempo.records import Question, Trajectory

Normalizer = Literal["auto", "squad", "unicode"]
OutcomeKind = Literal["em", "em_mean", "f1"]
GoldenAnswers = Sequence[str | Sequence[str]]

CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_SEPARATOR = re.compile("[;；]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_FIRST_ARTICLE = re.compile(r"^\s*(a|an|the)\s+")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(,\d{3})+(?![\d,])")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # .5
_SIGNED = re.compile(r"[$€£¥]?\d")
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
        parts = re.split(_SEPARATOR if normalizer == "unicode" else ";", parts[0])
    if len(parts) != len(objectives):
        return AnswerScore(0.0, 0.0, 0.0)
    matches = [_best_match(part, aliases, normalizer) for part, aliases in zip(parts, objectives, strict=True)]
    ems = [em for em, _ in matches]
    return AnswerScore(min(ems), fmean(f1 for _, f1 in matches), fmean(ems))


def holds_separator(aliases: Iterable[str]) -> bool:
    """Whether one of them would be split, were it the answer of one of several objectives."""
    return any(_SEPARATOR.search(alias) for alias in aliases)


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
    numbers = _BARE_POINT.sub("0.", _THOUSANDS.sub(lambda number: number[0].replace(",", ""), folded))
    kept = "".join(_kept(numbers, at) for at in range(len(numbers)))
    return CJK.sub(r" \g<0> ", _without_articles(kept)).split()


def _kept(text: str, at: int) -> str:
    """The character at ``at``, or what is left of a mark: 3.14 is not 314, 3-5 not 35, -5 not 5, but A-5 is A5."""
    char, before, after = text[at], text[at - 1 : at], text[at + 1 : at + 2]
    if (category := unicodedata.category(char))[0] not in "PS":
        return "" if category == "Cf" else char
    if before.isdecimal() and after.isdecimal():
        return "." if char == "." else " "
    is_sign = char in "-−–" and not before.isalnum() and before != ")" and _SIGNED.match(text, at + 1)
    return "-" if is_sign else ""


def _without_articles(text: str) -> str:
    """From ASCII text all English articles go, from other Latin text (French: il y a) a first one, else none."""
    if text.isascii():
        return _ARTICLES.sub(" ", text)
    latin = all(unicodedata.name(char, "").startswith("LATIN") for char in text if char.isalpha())
    return _FIRST_ARTICLE.sub("", text) if latin else text


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
    precision, recall = shared / len(words), shared / len(gold)
    return 0.0, 2 * precision * recall / (precision + recall) if shared else 0.0
