"""``squad`` against the published scorers, written down here once more; ``unicode`` and marks that make a number."""

from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from mempo.data import files
from mempo.data.layouts import Example, columns_of, read_example
from mempo.rewards import normalized_words, score_answer
from mempo.sources import Layout
from tests.real_data import FOLDER, needs_real_data

# ---------------------------------------------------------------- the published scorers: SQuAD v1.1, HotpotQA


def published_normal_form(text: str) -> str:
    exclude = set(string.punctuation)
    without_punctuation = "".join(char for char in text.lower() if char not in exclude)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without_punctuation).split())


def published_em(prediction: str, golds: list[str]) -> float:
    return max(float(published_normal_form(prediction) == published_normal_form(gold)) for gold in golds)


def published_f1(prediction: str, golds: list[str]) -> float:
    """HotpotQA's, which is SQuAD's but for yes, no and noanswer: those are worth nothing against anything else."""
    return max(one_f1(published_normal_form(prediction), published_normal_form(gold)) for gold in golds)


def one_f1(prediction: str, gold: str) -> float:
    special = ("yes", "no", "noanswer")
    if (prediction in special or gold in special) and prediction != gold:
        return 0.0
    prediction_tokens, gold_tokens = prediction.split(), gold.split()
    same = sum((Counter(prediction_tokens) & Counter(gold_tokens)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction_tokens), same / len(gold_tokens)
    return (2 * precision * recall) / (precision + recall)


def assert_equal_to_the_published(prediction: str, golds: list[str]) -> None:
    score = score_answer(prediction, [golds], "squad")
    # To the bit: no tolerance.
    assert (score.em, score.f1) == (published_em(prediction, golds), published_f1(prediction, golds)), (
        prediction,
        golds,
    )


WORDS = [
    "the",
    "a",
    "An",
    "A.",
    "New",
    "York",
    "york",
    "yes",
    "no",
    "No.",
    "noanswer",
    "10%",
    "3.14",
    "1,000",
    "-5",
    "C++",
]
WORDS += [
    "it's",
    "São",
    "Zürich",
    "北京",
    "，",
    "–",
    "U.S.",
    "the-",
    "x",
    "x",
    "\u00a0",
    "\u0085",
    "\t",
    "theatre",
    "İ",
    "ẞ",
]
TEXT = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=4).map("".join),
    st.text(max_size=20),
)


@settings(max_examples=2000)
@given(prediction=TEXT, golds=st.lists(TEXT, min_size=1, max_size=3))
def test_squad_is_the_published_scorers_to_the_bit(prediction: str, golds: list[str]) -> None:
    # But where normalising leaves nothing of a side: the published scorers then pay an empty answer.
    kept = [gold for gold in golds if published_normal_form(gold)]
    if kept and published_normal_form(prediction):
        assert_equal_to_the_published(prediction, kept)


QUESTION_FILES: list[tuple[str, Layout]] = [
    ("train/hotpotqa_train.json", "hotpotqa"),
    ("train/musique_train.json", "musique"),
    ("train/2wiki_train_100.json", "2wiki"),
    ("formats/searchr1_nq_test.parquet", "verl"),
    ("formats/deepresearcher_dev.parquet", "verl"),
    ("formats/flashrag_bamboogle.jsonl", "flashrag"),
]


def real_examples(name: str, layout: Layout) -> list[Example]:
    return [read_example(layout, row) for row in files.read_rows(FOLDER / name, columns_of(layout))]


@needs_real_data
@pytest.mark.parametrize(("name", "layout"), QUESTION_FILES)
def test_squad_is_the_published_scorers_on_real_answers(name: str, layout: Layout) -> None:
    examples = real_examples(name, layout)
    for example, other in zip(examples, [*examples[1:], examples[0]], strict=True):
        golds = [gold for gold in example.golden_answers if published_normal_form(gold)][:4]
        own, others = example.golden_answers[-1], other.golden_answers[0]
        for prediction in (own, others, f"The {own}, {others}."):
            if golds and published_normal_form(prediction):
                assert_equal_to_the_published(prediction, golds)


@needs_real_data
@pytest.mark.parametrize(("name", "layout"), QUESTION_FILES)
def test_every_answer_is_right_about_itself(name: str, layout: Layout) -> None:
    for example in real_examples(name, layout):
        gold = example.golden_answers[-1]
        assert score_answer(gold, [[gold]]).em == score_answer(f" {gold}\n", [[gold]], "unicode").em == 1, gold


# ---------------------------------------------------------------- unicode


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1,000", "1000"),
        ("1，234，567", "1234567"),  # full-width commas
        ("１０００", "1,000"),
        ("$1,000.50", "1000.50"),
        (".5", "0.5"),
        ("−5", "-5"),  # the minus sign
        ("－５", "-5"),  # its full-width form
        ("-$5", "$-5"),
        ("1914–1918", "1914-1918"),
        ("10%", "１０％"),
        ("U.S.", "US"),
        ("COVID-19", "COVID19"),
        ("Côte d’Ivoire", "Côte d'Ivoire"),
        ("ﬁne", "fine"),  # a ligature
        ("Cafe\u0301", "Café"),
        ("Ulm\u200b", "\ufeffUlm"),  # marks of no width
        ("straße", "STRASSE"),
        ("「里德学院」", "里德学院。"),
        ("The Straße", "straße"),
        ("the Rings of the Lord", "rings of lord"),
    ],
)
def test_the_same_answer(left: str, right: str) -> None:
    assert score_answer(left, [[right]], "unicode").em == score_answer(right, [[left]], "unicode").em == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("-5", "5"),
        ("−5", "5"),
        ("3.14", "314"),
        ("3,14", "314"),
        ("3,14", "3.14"),  # a decimal comma or two numbers: nobody can tell
        ("1,0000", "10000"),
        ("1.5", "15"),
        (".5", "5"),
        ("10-20", "1020"),
        ("½", "12"),
        ("1/2", "12"),
        ("3:45", "345"),
        ("il y a", "il y à"),
        ("Été à la mer", "Été la mer"),
        ("il a été", "il été"),  # no English article
        ("the Москва", "Москва"),
        ("a 北京", "北京"),
    ],
)
def test_another_answer(left: str, right: str) -> None:
    assert score_answer(left, [[right]], "unicode").em == score_answer(right, [[left]], "unicode").em == 0


def test_chinese_and_kana_are_words_of_one_character_and_hangul_is_not() -> None:
    assert normalized_words("東京タワー、第３回", "unicode") == ["東", "京", "タ", "ワ", "ー", "第", "3", "回"]
    assert normalized_words("서울 특별시", "unicode") == ["서울", "특별시"]
    # shared 学 院 of 里德学院 (4) and 大学学院 (4): precision 2/4, recall 2/4
    assert score_answer("大学学院", [["里德学院"]]).f1 == 0.5


@settings(max_examples=300)
@given(words=st.lists(st.sampled_from(["The", "a", "Ulm", "city,", "(old)", "it's", "well-known", "U.S.", "7", "10%"])))
def test_unicode_is_squad_on_plain_english(words: list[str]) -> None:
    text = " ".join(words)
    assert normalized_words(text, "unicode") == normalized_words(text, "squad")


def test_several_objectives() -> None:
    golds = [["New York City", "NYC"], ["no"], ["-5 °C"]]
    score = score_answer("nyc; No.; −5 °C", golds, "unicode")
    assert (score.em, score.em_mean, score.f1) == (1, 1, 1)
    score = score_answer("New York; yes; -5 °C", golds)  # f1 2 * (2/2) * (2/3) / (1 + 2/3) = 0.8, 0 and 1
    assert (score.em, score.em_mean) == (0, pytest.approx(1 / 3))
    assert score.f1 == pytest.approx((0.8 + 0 + 1) / 3)
