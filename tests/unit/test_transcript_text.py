"""A transcript in one text is cut where the tool's words begin and end, whatever they and the model's hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from mempo.tags import parse_turn
from mempo.transcript_text import Said, asked_question, own_words, split_prompt, split_turns, unwrapped

NOTICE = (
    "My previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again."
)
CHAT = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<answer> Beijing </answer>. Question: where?\n<|im_end|>\n"


def searched(query: str) -> str:
    return f"<think>t</think>\n<search>{query}</search>"


def told(passages: str) -> str:
    """As Search-R1's environment writes it down."""
    return f"\n\n<information>{passages}</information>\n\n"


A, B, END = searched("a"), searched("b"), "<think>t</think><answer>c</answer>"
MADE_UP = "<think>t</think><information>P</information><answer>a</answer>"
QWEN = "<|im_end|>\n<|im_start|>{}\n"
LLAMA = "<|eot_id|><|start_header_id|>{}<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        (A + told("P") + B + told("Q") + END, [(A, "P"), (B, "Q"), (END, None)]),
        # The passage closes the tag itself, answers, opens it again.
        (A + told("P</information>" + END) + "z", [(A, "P</information>" + END), ("z", None)]),
        (A + told("<information>P</information> Q") + "z", [(A, "<information>P</information> Q"), ("z", None)]),
        (A + told("P</search><information>Q") + "z", [(A, "P</search><information>Q"), ("z", None)]),
        (A + told("P" + B + "R") + "z", [(A, "P" + B + "R"), ("z", None)]),
        # Elsewhere than after a search it must be the model that wrote it.
        (MADE_UP, [(MADE_UP, None)]),
        (A + " so <information>P</information>", [(A + " so <information>P</information>", None)]),
        # What it writes so after an observation is taken for the tool's.
        (A + told("P") + "<information>Q</information>z", [(A, "P</information>\n\n<information>Q"), ("z", None)]),
        # Cut off.
        (A + "\n\n<information>P " + END, [(A, "P " + END)]),
        (A, [(A, None)]),
        ("<think>t</think><search>a", [("<think>t</think><search>a", None)]),
        (A + told(""), [(A, "")]),
        ("", [("", None)]),
        # An action that was none.
        ("<think>t</think>\n" + NOTICE + "\n" + B + told("P"), [("<think>t</think>", NOTICE), (B, "P")]),
        (A + told("P") + NOTICE + "\n" + END, [(A, "P"), ("", NOTICE), (END, None)]),
        (A + told(NOTICE) + END, [(A, NOTICE), (END, None)]),
        # Chat templates between them, with and without their marks.
        (
            A + QWEN.format("user") + "<information>P</information>" + QWEN.format("assistant") + "z<|im_end|>",
            [(A, "P"), ("z", None)],
        ),
        (
            A + LLAMA.format("tool") + "<information>P</information>" + LLAMA.format("assistant") + "z",
            [(A, "P"), ("z", None)],
        ),
        (f"assistant\n{A}\nuser\n<information>P</information>\nassistant\nz", [(A, "P"), ("z", None)]),
        ("assistants help", [("assistants help", None)]),
    ],
)
def test_turns(text: str, turns: list[tuple[str, str | None]]) -> None:
    assert split_turns(text) == [Said(*turn) for turn in turns]


PIECES = ["<information>", "</information>", "<search>", "</search>", "<answer>X</answer>", "<mem>m</mem>",
          "<|im_end|>", "<think>", "\n", " ", "a", NOTICE]  # fmt: skip
soup = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
passages = soup.filter(lambda text: not re.search(r"</search>\s*(<\|im_end\|>\s*)*<information>", text))


@given(st.lists(passages, max_size=4), st.sampled_from(["<answer>c</answer>", "<think>t</think>", ""]))
def test_what_a_passage_says_is_never_the_models(found: list[str], end: str) -> None:
    """Short of a whole ``</search> <information>``, which nobody can tell from a search of the model's."""
    text = "".join(searched(str(number)) + told(passage) for number, passage in enumerate(found)) + end
    turns = [Said(searched(str(number)), passage.strip()) for number, passage in enumerate(found)]
    assert split_turns(text) == turns + ([Said(end)] if end or not turns else [])


@given(soup, st.sampled_from(["search-r1", "mem1"]))
def test_any_text_is_cut_into_turns(text: str, dialect: str) -> None:
    turns = split_turns(text, dialect)  # type: ignore[arg-type]
    assert turns and all(turn.observation is not None for turn in turns[:-1])
    if dialect == "search-r1":
        told_of = "".join(turn.response + (turn.observation or "") for turn in turns)
        assert len(told_of) <= len(text)
        at = 0
        for part in (part for turn in turns for part in (turn.response, turn.observation or "")):
            at = text.index(part, at) + len(part)  # in their order, each word once


@given(passages)
def test_nothing_inside_an_information_of_the_models_counts(inside: str) -> None:
    """As in a rollout: what stands in a block is in the block."""
    inside = inside.replace("</information>", "x").replace(NOTICE, "x")
    (turn,) = split_turns(f"<think>t</think><information>{inside}</information>")
    parsed = parse_turn(turn.response, 1)
    assert parsed.action is None and parsed.memory is None and not parsed.valid


@pytest.mark.parametrize(
    "unit",
    ["</search><information>", "<information>", "</information>", "</search> ", "<|a|> ", "\n", "Question:",
     "My previous action is invalid. If I want to search, ", NOTICE, "</search>\n<information></information>",
     "\nassistant", "<|im_start|>assistant"],
)  # fmt: skip
def test_a_million_characters_of_one_tag_are_read(unit: str) -> None:
    text = unit * (10**6 // len(unit))
    split_turns(text)
    own_words(text)
    asked_question(text)
    split_prompt(f"Question: a\n{text}")


@pytest.mark.parametrize(
    ("text", "prompt", "rest"),
    [
        (CHAT + "<|im_start|>assistant\n<think>a", CHAT + "<|im_start|>assistant\n", "<think>a"),
        ("Say <answer> B </answer>. Question: a?\n<think>b", "Say <answer> B </answer>. Question: a?\n", "<think>b"),
        ("Question: where?", "Question: where?", ""),
        (" <think>a</think> Question: where?\nx", "", " <think>a</think> Question: where?\nx"),
    ],
)  # fmt: skip
def test_where_a_prompt_ends(text: str, prompt: str, rest: str) -> None:
    assert split_prompt(text) == (prompt, rest)


def test_a_prompt_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="no assistant header, no line with 'Question:'"):
        split_prompt("I think that <answer>b</answer>")


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        (CHAT, "where?"),
        ("system\nS\nuser\nQuestion: old\nQuestion: where\nto?\nassistant\n", "where\nto?"),
        ("Question: who is his assistant", "who is his assistant"),
        ("where?", ""),
    ],
)
def test_the_question_of_a_prompt(prompt: str, question: str) -> None:
    assert asked_question(prompt) == question


def test_the_names_of_mem1() -> None:
    text = "<IS>s</IS>\n<query>q</query>\n<info>P <query>x</query></info>\n<IS>u</IS><answer>a</answer>"
    assert split_turns(text, "mem1") == [
        Said("<mem>s</mem>\n<search>q</search>", "P <query>x</query>"),
        Said("<mem>u</mem><answer>a</answer>"),
    ]
    assert split_turns(text) == [Said(text)]  # to Search-R1 these are words


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<information>\nP\n</information>", "P"),
        ("P", "P"),
        ("<information>P</information> Q", "P</information> Q"),
    ],
)
def test_a_message_of_the_tool(text: str, inside: str) -> None:
    assert unwrapped(text) == inside
