"""Policies and trajectories for measurements: what tokens say changes no time, so they are drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from mempo import data
from mempo.config import Data, Model
from mempo.data.geo import build_world
from mempo.engines import Engine, Sampling
from mempo.records import Question, Trajectory, Turn
from mempo.scratch import build_policy, save_tokenizer, train_bpe

QUESTION, MEMORY, RESPONSE, OBSERVATION = 40, 20, 50, 30  # tokens; a memory is part of its response
VOCABULARY = 49_152  # of SmolLM2
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
NARROW = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


def demo_policy(folder: Path, window: int = 4096) -> Path:
    """The demo's policy before any training, with room for many turns."""
    bpe = train_bpe(data.tokenizer_texts(build_world(Data()), []), Model().vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    build_policy(Model(window=window), folder / "tokenizer.json", folder / "policy", seed=0)
    return folder / "policy"


def trajectories(
    num_turns: int, num_questions: int, group_size: int, vocab_size: int, seed: int = 0, question: int = QUESTION
) -> tuple[list[Trajectory], dict[str, Question]]:
    """``num_turns`` turns each, under the context rule ``memory``; from the second on with a memory.

    ``question``: tokens of the first prompt.
    """
    random = Random(seed)

    def tokens(count: int) -> list[int]:
        return [random.randrange(20, vocab_size) for _ in range(count)]

    questions = {f"q{i}": Question(f"q{i}", "?", [["Ulm"], ["Rome"]]) for i in range(num_questions)}
    found = []
    for name in questions:
        first = tokens(question)
        for sample in range(group_size):
            turns: list[Turn] = []
            for number in range(num_turns):
                latest = turns[-1].response_ids + turns[-1].observation_ids if turns else []
                response = tokens(RESPONSE)
                turns.append(
                    Turn(
                        prompt_ids=first + latest,
                        response_ids=response,
                        sampling_logprobs=[-1.0] * RESPONSE,
                        text="",
                        valid=True,
                        memory="m" if number else None,
                        mem_span=(0, MEMORY) if number else None,
                        action="search",
                        argument="x",
                        observation="o",
                        observation_ids=tokens(OBSERVATION),
                        finish_reason="stop",
                    )
                )
            found.append(Trajectory(name, sample, 0, turns, None, "max_turns"))
    return found, questions


def decode(engine: Engine, made: Sequence[Trajectory]) -> None:
    """As many tokens after each turn's prompt as its response has, turn by turn; what is sampled is not read.

    Raises ``AssertionError`` where more than a few answers end before.
    """
    sampling = Sampling(temperature=1.0, max_tokens=RESPONSE, stop=())

    async def turn(index: int) -> int:
        prompts = [trajectory.turns[index].prompt_ids for trajectory in made]
        found = await asyncio.gather(*(engine.generate(p, seed=i, sampling=sampling) for i, p in enumerate(prompts)))
        return sum(len(generation.token_ids) for generation in found)

    decoded, wanted = 0, sum(len(turn.response_ids) for trajectory in made for turn in trajectory.turns)
    for index in range(len(made[0].turns)):
        decoded += asyncio.run(turn(index))
    if decoded < 0.9 * wanted:
        raise AssertionError(f"{decoded} tokens were decoded, a round of this size has {wanted}")


def random_policy(folder: Path, sizes: dict[str, int]) -> Path:
    """A Llama of ``VOCABULARY`` tokens in these sizes that nothing has trained, with the demo's tokenizer.

    It never stops by itself: the tokenizer's end of text is a token that the model has no logit for.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(_with_unused_tokens(folder / "demo"))
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    tokenizer.chat_template = None  # or the mark after its turns would end them
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    return folder / "policy"


def _with_unused_tokens(folder: Path) -> Path:
    """The demo's tokenizer, filled up to ``VOCABULARY`` tokens that no text is made of."""
    made = json.loads(train_bpe(data.tokenizer_texts(build_world(Data()), []), Model().vocab_size).to_str())
    known = made["model"]["vocab"]
    made["model"]["vocab"] = known | {f"unused{i}": i for i in range(len(known), VOCABULARY)}
    save_tokenizer(Tokenizer.from_str(json.dumps(made)), folder, 8192)
    return folder
