"""What a round's parts cost against the plain way, on a real run: ``python benchmarks/round.py runs/mempo-<key>``.

Decoding against ``model.generate`` on the same first-turn and later-turn prompts; packed scoring against the published
layout (every context alone, left-padded). CPU-seconds of this process, best of three, ratios in one run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mempo import scoring
from mempo.engines import Sampling, open_engine
from mempo.records import Question, Trajectory
from mempo.rounds import by_question
from mempo.storage import read_records
from mempo.workspace import Workspace, recorded


def best(action: Callable[[], object], repeats: int = 3) -> float:
    """CPU-seconds of the fastest of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def main(run_folder: Path, root: Path = Path(".")) -> None:
    config = recorded(run_folder)
    policy = Workspace(root).checkpoint("warmstart")
    engine = open_engine(policy, config.runtime)
    trajectories = read_records(run_folder / "round_0000" / "rollouts.parquet", Trajectory)
    questions = by_question(read_records(run_folder / "round_0000" / "questions.parquet", Question))
    for label, index in (("first turn (prompts shared in a group)", 0), ("third turn (prompts all differ)", 2)):
        prompts = [t.turns[index].prompt_ids for t in trajectories if len(t.turns) > index]
        compare_decoding(engine, label, prompts, config.rollout.max_response_tokens)
    packed = best(lambda: scoring.score(engine, trajectories, questions, config))
    padded_config = config.model_copy(update={"scoring": config.scoring.model_copy(update={"mode": "padded"})})
    padded = best(lambda: scoring.score(engine, trajectories, questions, padded_config))
    turns = sum(len(t.turns) for t in trajectories) / len(trajectories)
    print(f"scoring, {turns:.1f} turns: packed {packed:.2f} s, padded {padded:.2f} s, {padded / packed:.2f} x")


def compare_decoding(engine, label: str, prompts: list[list[int]], max_tokens: int) -> None:
    """The engine against ``generate`` on one left-padded batch, both sampling at temperature 1 until their own end."""
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    made: list[int] = []

    async def ours() -> None:
        found = await asyncio.gather(*(engine.generate(p, seed=i, sampling=sampling) for i, p in enumerate(prompts)))
        made.append(sum(len(generation.token_ids) for generation in found))

    tokenizer, model = engine.tokenizer, engine.model
    stops = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["</search>", "</answer>"])]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    plain_made: list[int] = []

    def plain() -> None:
        torch.manual_seed(0)
        output = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=max_tokens, eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = output.sequences[:, batch["input_ids"].shape[1] :]
        plain_made.append(int((new != tokenizer.pad_token_id).sum()))

    fast, slow = best(lambda: asyncio.run(ours())), best(plain)
    rates = (max(made) / fast, max(plain_made) / slow)
    print(f"decoding, {label}, batch {len(prompts)}: {rates[0]:.0f} against {rates[1]:.0f} tokens/CPU-s, "
          f"{rates[0] / rates[1]:.2f} x")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:3]))
