"""What holds ours and TRL's side to the same work; TRL itself is not needed here."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import trl, trl_tools
from mempo import scratch
from mempo.prompts import chat_frame, encode_text

FOUND = {"sampled": 96.0, "held": 212, "entropy": 10.7768}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    bpe = scratch.train_bpe([trl_tools.DOCUMENT, "system user assistant"], 400)
    return scratch.save_tokenizer(bpe, tmp_path_factory.mktemp("tokenizer"), 1024)


def test_nearly_equal_entropies_agree() -> None:
    trl.agree(FOUND, FOUND | {"entropy": 10.78, "held": 212.0})


@pytest.mark.parametrize(("key", "value"), [("sampled", 95.0), ("held", 213), ("entropy", 10.76)])
def test_other_work_is_no_ratio(key: str, value: float) -> None:
    with pytest.raises(AssertionError, match=key):
        trl.agree(FOUND, FOUND | {key: value})


def test_both_sides_write_the_same_frame(tokenizer: Any) -> None:
    frame = chat_frame(tokenizer, "")
    told = {"role": "tool", "name": "search", "content": trl_tools.DOCUMENT}
    calls = [{"type": "function", "function": {"name": "search", "arguments": {}}}]
    before = [{"role": "user", "content": "Ulm?"}, {"role": "assistant", "content": "", "tool_calls": calls}]

    def rendered(messages: list[dict[str, Any]], asked: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=asked, chat_template=trl_tools.TOOLS_TEMPLATE, return_dict=False
            )
        )

    assert rendered(before[:1], True) == frame.first_prompt(encode_text(tokenizer, "Ulm?"))
    whole, start = rendered([*before, told], True), rendered(before, False)
    # As GRPOTrainer cuts out what a tool adds: the messages before it stay as they were.
    assert whole[: len(start)] == start
    assert whole[len(start) :] == frame.observation(encode_text(tokenizer, trl_tools.DOCUMENT), [])


@pytest.mark.parametrize("text", ["Ulm", '{"name": "answer"}', "</search> <answer>Ulm</answer>", "a\nb"])
def test_anything_is_read_as_a_call(tokenizer: Any, text: str) -> None:
    prefix = "<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n"
    found = tokenizer.parse_response(text, trl_tools.ANYTHING_IS_A_CALL, prefix=prefix)
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": text}}}
    assert found == {"role": "assistant", "tool_calls": [call]}
