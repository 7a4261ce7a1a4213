"""Decoding: the engine ``hf`` against ``model.generate`` on one left-padded batch of the same prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.rows import Row
from benchmarks.synthetic import demo_policy, trajectories
from benchmarks.timing import side_by_side
from mempo.engines import Sampling, open_engine
from mempo.runtime import Runtime

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 48


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    trained = Path("checkpoints/warmstart/final")
    policy = trained if trained.exists() else demo_policy(folder / "rollout")
    engine = open_engine(policy, Runtime())
    made, _ = trajectories(3, GROUPS, GROUP_SIZE, len(engine.tokenizer))
    which = "the demo's warm start" if policy == trained else "an untrained policy, which never stops by itself"
    for label, index in (("prompts shared in a group", 0), ("prompts that differ", 2)):
        prompts = [t.turns[index].prompt_ids for t in made]
        (fast, ours), (slow, theirs) = _rates(engine, prompts)
        detail = (
            f"{fast:,.0f} tokens a CPU-second against {slow:,.0f} of `generate`; {ours} and {theirs} tokens, {which}"
        )
        yield Row(f"decoding, {label}", fast / slow, "higher", detail, 2.0)


def _rates(engine, prompts: list[list[int]]) -> tuple[tuple[float, int], tuple[float, int]]:
    """Tokens a CPU-second and tokens of the engine and of ``generate``, both sampling at temperature 1.

    ``generate`` also returns its logits, of which it would have to make the log-probs that the engine gives.
    """
    sampling, counts = Sampling(temperature=1.0, max_tokens=NEW_TOKENS), {"ours": 0, "theirs": 0}
    tokenizer, model = engine.tokenizer, engine.model
    stops = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["</search>", "</answer>"])]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")

    async def all_at_once() -> int:
        found = await asyncio.gather(*(engine.generate(p, seed=i, sampling=sampling) for i, p in enumerate(prompts)))
        return sum(len(generation.token_ids) for generation in found)

    def ours() -> None:
        counts["ours"] = asyncio.run(all_at_once())

    def theirs() -> None:
        torch.manual_seed(0)
        output = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = output.sequences[:, batch["input_ids"].shape[1] :]
        counts["theirs"] = int((new != tokenizer.pad_token_id).sum())

    fast, slow = side_by_side(ours, theirs)
    return (counts["ours"] / fast, counts["ours"]), (counts["theirs"] / slow, counts["theirs"])
