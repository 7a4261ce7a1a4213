"""The update: a trainer's step against a bare forward and backward pass over the same tokens, packed and padded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import torch

from benchmarks.rows import Row
from benchmarks.synthetic import demo_policy
from benchmarks.timing import side_by_side
from mempo.config import LossConfig, Model, Optim
from mempo.cost import product_flops
from mempo.floor import measure
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.shapes import shape_of
from mempo.trainers import Trainer, open_trainer

BUDGET, NUM_SAMPLES, PROMPTS, RESPONSE = 4096, 192, (40, 200), 50


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    policy = demo_policy(folder / "update")
    trainer = open_trainer(policy, Optim(tokens_per_microbatch=BUDGET), LossConfig(), Runtime())
    model, vocab = trainer.model, trainer.model.config.vocab_size
    drawn = draw(vocab, NUM_SAMPLES, PROMPTS, RESPONSE)
    _agree(trainer, drawn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ours, packed, padded = side_by_side(
        lambda: trainer.step(drawn),
        lambda: bare_step(model, optimizer, _packed(drawn)),
        lambda: bare_step(model, optimizer, _padded(drawn)),
    )
    tokens = sum(len(sample.token_ids) for sample in drawn)
    told = f"{ours:.2f} CPU-s for {tokens:,} tokens against {{:.2f}}"
    yield Row("update, against a packed bare loop", packed / ours, "higher", told.format(packed), 0.95)
    yield Row("update, against a padded bare loop", padded / ours, "higher", told.format(padded), 1.2)
    trained = sum(sum(sample.loss_mask) for sample in drawn)
    machine = measure(clock=time.process_time)
    floor = 3 * product_flops(shape_of(Model()), tokens, trained) / machine.flop_rate
    told = f"{floor:.2f} s of matrix products at {machine.flop_rate / 1e9:.0f} GFLOP/s, {ours:.2f} measured"
    yield Row("update, share of the floor, tiny policy", 100 * floor / ours, "higher", told, unit="%")


def draw(vocab: int, count: int, prompts: tuple[int, int], response: int, seed: int = 0) -> list[Sample]:
    """Turns of a round: ``prompts`` are the fewest and the most tokens of a prompt, each response has as many."""
    random, found = Random(seed), []
    for i in range(count):
        prompt = random.randint(*prompts)
        ids = [random.randrange(20, vocab) for _ in range(prompt + response)]
        mask = [0] * prompt + [1] * response
        zeros = [0.0] * len(ids)
        advantage = random.choice((-1.0, 1.0))
        weight = 1 / count / response
        found.append(Sample(f"q/{i}/1", ids, mask, [-8.0 * m for m in mask], zeros, advantage, zeros, weight))
    return found


@torch.no_grad()
def _agree(trainer: Trainer, drawn: Sequence[Sample]) -> None:
    """The trainer's loss of all samples is the padded loop's, or their times say nothing. Makes a step."""
    total = sum(float(_losses(trainer.model, ids, mask).sum()) for ids, mask in _padded(drawn))
    with torch.enable_grad():
        stats = trainer.step(drawn, objective="sft")
    bare = total / sum(sum(sample.loss_mask) for sample in drawn)
    if abs(bare - stats["nll"]) > 1e-4 * bare:
        raise AssertionError(f"mean losses of trainer and padded loop: {stats['nll']} and {bare}")


Rows = list[tuple[torch.Tensor, torch.Tensor]]  # ids [B, T] and which of them are learnt [B, T]


def _packed(drawn: Sequence[Sample]) -> Rows:
    """All tokens in rows of 1,024 without a gap: what no layout can do better, though sequences see each other."""
    ids = torch.tensor([token for sample in drawn for token in sample.token_ids])
    mask = torch.tensor([on for sample in drawn for on in sample.loss_mask])
    width = 1024
    whole = len(ids) // width * width
    rows, learnt = ids[:whole].view(-1, width), mask[:whole].view(-1, width)
    found = list(zip(rows.split(BUDGET // width), learnt.split(BUDGET // width), strict=True))
    rest = [(ids[None, whole:], mask[None, whole:])] if whole < len(ids) else []
    return [*found, *rest]


def _padded(drawn: Sequence[Sample]) -> Rows:
    """In their order, every micro-batch padded to the longest of all samples."""
    width = max(len(sample.token_ids) for sample in drawn)
    size, found = BUDGET // width, []
    for start in range(0, len(drawn), size):
        some = drawn[start : start + size]
        ids, mask = torch.zeros(len(some), width, dtype=torch.long), torch.zeros(len(some), width, dtype=torch.long)
        for row, sample in enumerate(some):
            ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
            mask[row, : len(sample.token_ids)] = torch.tensor(sample.loss_mask)
        found.append((ids, mask))
    return found


def bare_step(model, optimizer, rows: Rows) -> None:
    """Cross entropy of the learnt tokens, one backward pass a micro-batch, AdamW."""
    for ids, mask in rows:
        _losses(model, ids, mask).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _losses(model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each learnt token [N]; only the states before them go through the vocabulary head."""
    learnt = mask[:, 1:].bool()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][learnt]
    logits = model.get_output_embeddings()(hidden)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][learnt], reduction="none")
