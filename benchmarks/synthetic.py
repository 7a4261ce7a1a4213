"""Policies and trajectories for measurements: what tokens say changes no time, so they are drawn."""

from __future__ import annotations

from pathlib import Path
from random import Random

from mempo import data
from mempo.config import Data, Model
from mempo.data.geo import build_world
from mempo.records import Question, Trajectory, Turn
from mempo.scratch import build_policy, train_bpe

QUESTION, MEMORY, RESPONSE, OBSERVATION = 40, 20, 50, 30  # tokens; a memory is part of its response


def demo_policy(folder: Path, window: int = 4096) -> Path:
    """The demo's policy before any training, with room for many turns."""
    bpe = train_bpe(data.tokenizer_texts(build_world(Data()), []), Model().vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    build_policy(Model(window=window), folder / "tokenizer.json", folder / "policy", seed=0)
    return folder / "policy"


def trajectories(
    num_turns: int, num_questions: int, group_size: int, vocab_size: int, seed: int = 0
) -> tuple[list[Trajectory], dict[str, Question]]:
    """``num_turns`` turns each, under the context rule ``memory``; from the second on with a memory."""
    random = Random(seed)

    def tokens(count: int) -> list[int]:
        return [random.randrange(20, vocab_size) for _ in range(count)]

    questions = {f"q{i}": Question(f"q{i}", "?", [["Ulm"], ["Rome"]]) for i in range(num_questions)}
    found = []
    for name in questions:
        first = tokens(QUESTION)
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


def smollm2_shape(folder: Path, tokenizer_of: Path) -> Path:
    """A random policy in the sizes of SmolLM2-135M (30 layers, width 576, 49,152 tokens) with another's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
