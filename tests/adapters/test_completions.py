"""A completion of another trainer, read as turns."""

from __future__ import annotations

from typing import Any

from mempo.adapters.completions import read_completion


def test_turns_begin_where_the_model_writes_and_at_segments(tiny_tokenizer: Any) -> None:
    parts = [
        ("<think>a</think><search>x</search>", 1),
        ("<information><mem>a tool</mem></information>", 0),
        ("<mem>one</mem><think>b</think><mem>two</mem><answer>c</answer>", 1),
    ]
    ids = [tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    completion = [token for part in ids for token in part]
    written = [by for part, (_, by) in zip(ids, parts, strict=True) for _ in part]
    trajectory, spans = read_completion(tiny_tokenizer, [1, 2], completion, written, question_id="q", sample_index=3)
    first, second, third = trajectory.turns
    assert [turn.memory for turn in trajectory.turns] == [None, "one", "two"]
    assert first.prompt_ids == [1, 2] and first.response_ids == ids[0] and first.observation_ids == ids[1]
    assert second.prompt_ids == [1, 2, *ids[0], *ids[1]] and second.observation_ids == []
    assert third.prompt_ids == [*second.prompt_ids, *second.response_ids]
    assert [tiny_tokenizer.decode(completion[s:e]) for s, e in spans] == ["", "<mem>one</mem>", "<mem>two</mem>"]
    assert trajectory.key == "q/3"


def test_a_single_turn_completion_and_segments_that_are_none(tiny_tokenizer: Any) -> None:
    def memories(text: str) -> list[str | None]:
        ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
        return [turn.memory for turn in read_completion(tiny_tokenizer, [1], ids)[0].turns]

    assert memories("<mem>a</mem>") == ["a"]
    assert memories("<think>t</think><mem>a</mem>") == [None, "a"]
    assert memories("<think><mem>quoted</mem></think><answer>x</answer>") == [None]
    assert memories("<answer>x</answer><mem>cut off") == [None]
    assert memories("") == []
