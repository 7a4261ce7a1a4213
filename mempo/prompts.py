"""The chat frame and the three context rules, in token ids. No sampled text is ever tokenised again.

Text from data, tools or the model is data: it is encoded with special tokens switched off, between frame pieces that
come from the model's own chat template. So ``<|im_end|>`` in a passage is eleven harmless characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mempo.config import Context
from mempo.records import Turn

PROBE_HEAD = "\n<think>\nI have sufficient information to provide the final answers.\n</think>\n<answer>\n"
PROBE_TAIL = "\n</answer>"
_SLOT = "\u2043slot\u2043"  # stands where content goes while the template is rendered; no template treats it specially


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of untrusted text: no special token can come out of it."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def encode_frame(tokenizer: Any, text: str) -> list[int]:
    """Token ids of our own text, in which special tokens are meant."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The fixed token pieces around a question and an observation, cut from a chat template.

    ChatML: ``question_head`` is ``<|im_start|>system`` to the user header, ``question_tail`` from ``<|im_end|>`` to the
    assistant header, ``observation_head`` from ``<|im_end|>`` to ``<information>``. ``eos_ids`` end a turn.
    """

    question_head: list[int]
    question_tail: list[int]
    observation_head: list[int]
    observation_tail: list[int]
    eos_ids: frozenset[int]

    def first_prompt(self, question_ids: Sequence[int]) -> list[int]:
        return [*self.question_head, *question_ids, *self.question_tail]

    def observation(self, text_ids: Sequence[int], response_ids: Sequence[int]) -> list[int]:
        """What follows ``response_ids`` until the next generation; a sampled end-of-turn token is not repeated."""
        head = self.observation_head
        if response_ids and response_ids[-1] in self.eos_ids and head[0] == response_ids[-1]:
            head = head[1:]
        return [*head, *text_ids, *self.observation_tail]


def chat_frame(tokenizer: Any, system: str) -> ChatFrame:
    """Cut the frame out of the tokenizer's chat template. Raises ``ValueError`` where that alters its content."""
    system_turn = [{"role": "system", "content": system}] if system else []
    first = [*system_turn, {"role": "user", "content": _SLOT}]
    answer_slot = _SLOT + "a"
    second = [*first[:-1], {"role": "user", "content": "q"}, {"role": "assistant", "content": answer_slot}]
    second.append({"role": "user", "content": f"<information>\n{_SLOT}\n</information>"})
    try:
        question = tokenizer.apply_chat_template(first, tokenize=False, add_generation_prompt=True)
        later = tokenizer.apply_chat_template(second, tokenize=False, add_generation_prompt=True)
        question_head, question_tail = question.split(_SLOT)
        observation_head, observation_tail = later.split(answer_slot)[1].split(_SLOT)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not carry its content through"
        ) from error
    closing = encode_frame(tokenizer, observation_head)
    return ChatFrame(
        encode_frame(tokenizer, question_head),
        encode_frame(tokenizer, question_tail),
        closing,
        encode_frame(tokenizer, observation_tail),
        eos_ids=frozenset({tokenizer.eos_token_id, *closing[:1]}),
    )


def context(rule: Context, first_prompt: Sequence[int], turns: Sequence[Turn], recent_turns: int = 1) -> list[int]:
    """The prompt of the turn that follows ``turns``.

    ``memory`` and ``think``: first prompt + the latest turn's response and observation. ``full``: first prompt + all of
    them; ``recent``: + the latest ``recent_turns`` of them. ``none``: first prompt + the latest observation. Each ends
    with the assistant header. ``think`` is MEM1's (arXiv 2506.15841): what is to be kept stands in ``<think>``.
    """
    if rule == "none":
        return [*first_prompt, *(turns[-1].observation_ids if turns else [])]
    kept = {"full": len(turns), "recent": recent_turns}.get(rule, 1)
    ids = list(first_prompt)
    for turn in turns[max(0, len(turns) - kept) :]:
        ids += turn.response_ids + turn.observation_ids
    return ids
