"""Memory of an update at a vocabulary of 49,152: a trainer's step against loops that hold all logits at once.

Each is a process of its own (``python -m benchmarks.memory SIDE FOLDER``), whose peak less what it holds before the
step is told. All make one AdamW step of supervised loss over the same rows of equal length, padding apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from benchmarks.rows import Row
from benchmarks.synthetic import NARROW, random_policy
from benchmarks.update import draw
from mempo.config import LossConfig, Optim
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import open_trainer

ROWS, PROMPT, RESPONSE = 16, 128, 128  # one micro-batch of 4,096 tokens
SIDES = ("trainer", "all", "learnt")  # whose logits a loop holds at once: of all tokens, of the learnt ones alone
MIB = 2**20


def run(folder: Path, full: bool) -> Iterator[Row]:
    policy = random_policy(folder, NARROW)
    ours, whole, learnt = (_child(side, policy) for side in SIDES)
    for other in (whole, learnt):
        if abs(ours["loss"] - other["loss"]) > 1e-3 * abs(ours["loss"]) or ours["tokens"] != other["tokens"]:
            raise AssertionError(f"not the same loss: {ours} and {other}")
    held = {name: f"{side['bytes'] / MIB:,.0f} MiB" for name, side in zip(SIDES, (ours, whole, learnt), strict=True)}
    detail = (
        f"{held['trainer']} above what lay there before, {held['all']} of a loop with whole logits, {held['learnt']} "
        f"with those of learnt tokens alone; {ROWS * (PROMPT + RESPONSE):,} tokens, {ROWS * RESPONSE:,} of them learnt"
    )
    name = "update, peak memory at a vocabulary of 49,152"
    yield Row(name, whole["bytes"] / ours["bytes"], "higher", detail, 2.0)


def _child(side: str, policy: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", side, str(policy)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return dict(json.loads(told.splitlines()[-1]))


def _measure(side: str, policy: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    optim = Optim(tokens_per_microbatch=ROWS * (PROMPT + RESPONSE))
    trainer = open_trainer(policy, optim, LossConfig(), Runtime())
    drawn = draw(3000, ROWS, (PROMPT, PROMPT), RESPONSE)
    before = psutil.Process().memory_info().rss
    if side == "trainer":
        stats = trainer.step(drawn, objective="sft")
        loss, tokens = stats["loss"], stats["num_tokens"]
    else:
        loss, tokens = _bare_step(trainer.model, drawn, learnt_alone=side == "learnt")
    return {"bytes": high_water() - before, "loss": loss, "tokens": tokens}


def high_water() -> int:
    """Bytes this process held at most; ``getrusage`` would count what its parent held when it was started."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _bare_step(model, drawn: list[Sample], *, learnt_alone: bool) -> tuple[float, float]:
    """The same step from whole logits [tokens, vocabulary], in as few copies of them as cross entropy allows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.tensor([sample.token_ids for sample in drawn])
    learnt = torch.tensor([sample.loss_mask for sample in drawn])[:, 1:].bool()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = torch.nn.functional.pad(ids[:, 1:].masked_fill(~learnt, -100), (0, 1), value=-100).flatten()
    flat = hidden.flatten(0, 1)
    if learnt_alone:
        flat, wanted = flat[wanted >= 0], wanted[wanted >= 0]
    logits = model.get_output_embeddings()(flat)
    loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") * drawn[0].weight
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), float(learnt.sum())


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], Path(sys.argv[2]))))
