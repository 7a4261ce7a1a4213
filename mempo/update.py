"""The update step: a round's samples become a few optimiser steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from mempo.config import Config
from mempo.loss import merge_stats
from mempo.mismatch import ratio_of, refuse_mismatch
from mempo.records import Sample
from mempo.trainers import Trainer

# Statistics of one optimiser step as a whole; the others speak of its loss tokens.
_PER_STEP = ("loss", "grad_norm", "learning_rate")


def update(
    trainer: Trainer,
    samples: Sequence[Sample],
    config: Config,
    *,
    round_index: int,
    progress: Callable[..., None] | None = None,
) -> dict[str, float]:
    """One ``trainer.step`` for each of ``optim.minibatches`` minibatches; returns the statistics of all steps as one.

    Samples of weight 0 stay out. The rest is shuffled by (loop.seed, round_index) and cut into nearly equal numbers of
    samples. Weights came normalised over the whole update batch, W = their sum over its loss tokens; minibatch k holds
    W_k of it and is multiplied by W / W_k. So each step carries the weight of the whole batch: with W = 1 it is the
    weighted mean over its own tokens, and the ``constant`` aggregation keeps its W. (Multiplying by the number of
    minibatches instead would let a step shrink or grow with the tokens that the shuffle happened to put into it.)

    Before its first step the trainer is the policy that sampled: ``mismatch/...`` compares its log-probs with the
    sampler's, ``mismatch/trainer_...`` with recomputed ones. Raises ``Mismatch`` where that KL is above
    ``loss.max_mismatch``: one step was made by then, and nothing was saved.
    """
    minibatches = split(samples, config.optim.minibatches, seed=f"{config.loop.seed}/{round_index}")
    steps = []
    mismatch: dict[str, float] = {}
    for done, minibatch in enumerate(minibatches, start=1):
        steps.append(trainer.step(minibatch))
        if done == 1:
            mismatch = {"kl": steps[0]["approx_kl"], "ratio_max": ratio_of(steps[0]["log_ratio_max"])}
            refuse_mismatch(mismatch, config.loss.max_mismatch, round_index=round_index)
        if progress:
            progress(done, loss=steps[-1]["loss"])
    prefix = "mismatch/" if config.loss.old_logprobs == "sampler" else "mismatch/trainer_"
    return merge(steps) | {f"{prefix}{name}": value for name, value in mismatch.items()}


def split(samples: Sequence[Sample], num_minibatches: int, *, seed: str) -> list[list[Sample]]:
    """Shuffled minibatches of nearly equal size, none empty, each with the summed token weight of all samples."""
    chosen = [sample for sample in samples if sample.weight > 0]
    random.Random(seed).shuffle(chosen)
    count = min(num_minibatches, len(chosen))
    total = token_weight(chosen)
    parts = [chosen[len(chosen) * k // count : len(chosen) * (k + 1) // count] for k in range(count)]
    return [[replace(s, weight=s.weight * total / token_weight(part)) for s in part] for part in parts]


def token_weight(samples: Sequence[Sample]) -> float:
    """Sum of the weights of all loss tokens."""
    return sum(sample.weight * sum(sample.loss_mask) for sample in samples)


def merge(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of all steps as one: ``loss.merge_stats``, but figures of a step as a whole are means over steps."""
    merged = merge_stats(steps) | {name: fmean(step[name] for step in steps) for name in _PER_STEP if steps}
    return {"num_tokens": 0.0} | merged | {"num_steps": float(len(steps))}
