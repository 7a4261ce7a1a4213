"""Several turns with a tool, ours and TRL's tools path, timed: ``python -m benchmarks.trl_tools SIZE FOLDER``.

On both sides all that was said stays in context (``rollout.context: full``), and there is no memory reward. An
untrained policy calls no tool: a ``response_template`` makes TRL's tokenizer read anything as a call of ``search``,
``max_tool_calling_iterations`` ends the calls, and ``generation_kwargs`` a turn, for which TRL has no setting. Ours
reads and observes a turn as ``mempo.rollout`` does, then takes it for a search. Both write the same chat frame.
TRL trains a trajectory as one sequence, of which all goes through the vocabulary head (without Triton); ours a turn as
one sample, which repeats all that came before it, and only what is trained goes through the head.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.synthetic import NARROW, SMOLLM2, random_policy
from benchmarks.trl_sides import GROUP_SIZE, Found, ask, fastest, finished, grpo, learn, main, told
from mempo.engines import Engine, Sampling, open_engine
from mempo.engines.loader import load_tokenizer
from mempo.prompts import ChatFrame, chat_frame, context, encode_text
from mempo.records import Trajectory, Turn
from mempo.runtime import Runtime
from mempo.scratch import CHAT_TEMPLATE
from mempo.turns import read_turn

SIZES = {"4 layers of width 128": (NARROW, 2, 2), "SmolLM2-135M's sizes": (SMOLLM2, 1, 1)}  # policy, questions, repeats
TURNS, TURN_TOKENS, WINDOW = 4, 24, 2048
SAMPLING = Sampling(temperature=1.0, max_tokens=TURN_TOKENS, stop=())
DOCUMENT = "Ulm\nUlm is a city in Germany."  # 30 tokens in its frame
# The demo's frame for TRL: what a tool says also closes the message before it, since no end of turn is ever sampled.
TOOLS_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% elif message.role == 'tool' %}"
    "{{ '<|im_end|>\\n<|im_start|>user\\n<information>\\n' + message.content + '\\n</information><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "{content}"}}}
ANYTHING_IS_A_CALL = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {"tool_calls": {"content": "text", "repeats": True, "transform": CALL}},
}


def search(query: str) -> str:
    """Search for documents.

    Args:
        query: What to look for.
    """
    return DOCUMENT


def _measure(size: str, folder: Path) -> tuple[Found, Found]:
    sizes, questions, repeats = SIZES[size]
    policy, prompts = random_policy(folder, sizes), ask(questions)
    framed = load_tokenizer(policy)  # the policy's own has no template: the mark after its turns would end them
    framed.chat_template = CHAT_TEMPLATE
    ours = fastest(partial(_round, policy, folder / "next", prompts, chat_frame(framed, "")), repeats)
    return ours, _theirs(policy, folder, prompts, repeats)


def _round(policy: Path, after: Path, prompts: list[str], frame: ChatFrame) -> Found:
    engine = open_engine(policy, Runtime())
    asked = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]

    async def together() -> list[Trajectory]:
        return await asyncio.gather(*(_attempt(engine, frame, place, prompt) for place, prompt in enumerate(asked)))

    return learn(engine, policy, after, asyncio.run(together()), prompts)


async def _attempt(engine: Engine, frame: ChatFrame, place: int, prompt: str) -> Trajectory:
    first = frame.first_prompt(encode_text(engine.tokenizer, prompt))
    turns: list[Turn] = []
    for number in range(1, TURNS + 1):
        prompt_ids = context("full", first, turns)
        found = await engine.generate(prompt_ids, seed=place * TURNS + number, sampling=SAMPLING)
        turn = read_turn(
            engine.tokenizer, prompt_ids, found.token_ids, number, sampling_logprobs=found.logprobs,
            finish_reason=found.finish_reason, require_memory=False,
        )  # fmt: skip
        if number == TURNS:
            turns.append(replace(turn, valid=True, action="answer", argument=told(place)))
        else:
            text = search(turn.text)
            ids = frame.observation(encode_text(engine.tokenizer, text), [])
            turn = replace(turn, valid=True, action="search", argument=turn.text)
            turns.append(replace(turn, observation=text, observation_ids=ids))
    return finished(place, turns)


def _theirs(policy: Path, folder: Path, prompts: list[str], repeats: int) -> Found:
    tokenizer: Any = load_tokenizer(policy)
    tokenizer.chat_template, tokenizer.response_template = TOOLS_TEMPLATE, ANYTHING_IS_A_CALL
    settings = {
        "max_completion_length": WINDOW,
        "max_tool_calling_iterations": TURNS - 1,
        "generation_kwargs": {"max_new_tokens": TURN_TOKENS},
    }
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return grpo(policy, folder, asked, repeats, settings, processing_class=tokenizer, tools=[search])


if __name__ == "__main__":
    main(_measure)
