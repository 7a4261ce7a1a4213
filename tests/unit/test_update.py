"""A round's samples as optimiser steps: what enters, how it is cut, what each step weighs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from mempo.config import Config, LossConfig, Optim
from mempo.engines import open_engine
from mempo.mismatch import Mismatch
from mempo.packing import chain
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import open_trainer
from mempo.update import merge, split, token_weight, update
from tests.tiny import make_policy


def sample(key: str, tokens: int, weight: float, advantage: float = 1.0) -> Sample:
    on = [0, 0] + [1] * tokens
    ids = [20 + (7 * i + len(key)) % 200 for i in range(len(on))]
    return Sample(key, ids, on, [-6.0 * m for m in on], [0.0] * len(on), advantage, [0.0] * len(on), weight)


def config(loss: LossConfig | None = None, **optim: Any) -> Config:
    """The made-up log-probs of ``sample`` are no policy's: by default no mismatch stops."""
    return Config(loss=loss or LossConfig(max_mismatch=None), optim=Optim(**optim), runtime=Runtime(num_threads=1))


sizes = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.01, 0.02])), max_size=12)


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.text(max_size=3))
def test_every_sample_with_a_weight_enters_once(sizes: list[tuple[int, float]], count: int, seed: str) -> None:
    samples = [sample(f"s{i}", *size) for i, size in enumerate(sizes)]
    entering = {s.key: s for s in samples if s.weight > 0}
    parts = split(samples, count, seed=seed)
    assert sorted(s.key for part in parts for s in part) == sorted(entering)
    assert len(parts) == min(count, len(entering))
    lengths = [len(part) for part in parts]
    assert not lengths or (min(lengths) >= 1 and max(lengths) - min(lengths) <= 1)
    for part in parts:
        assert token_weight(part) == pytest.approx(token_weight(samples))
        # Within a minibatch the weights keep their proportions; nothing else of a sample changes.
        scale = part[0].weight / entering[part[0].key].weight
        for one in part:
            assert one.weight == pytest.approx(scale * entering[one.key].weight)
            assert replace(one, weight=0.0) == replace(entering[one.key], weight=0.0)


def test_a_minibatch_is_the_weighted_mean_over_its_own_tokens() -> None:
    # token-mean over 8 + 2 tokens: each weighs 1/10. Apart, the tokens of the one weigh 1/8, of the other 1/2.
    parts = split([sample("long", 8, 0.1), sample("short", 2, 0.1)], 2, seed="0")
    assert {s.key: s.weight for part in parts for s in part} == pytest.approx({"long": 1 / 8, "short": 1 / 2})
    # constant over 2 samples of at most 20: 1/40 a token, W = 10/40. Each minibatch keeps W: 1/32 and 1/8 a token.
    parts = split([sample("long", 8, 1 / 40), sample("short", 2, 1 / 40)], 2, seed="0")
    assert {s.key: s.weight for part in parts for s in part} == pytest.approx({"long": 1 / 32, "short": 1 / 8})


def test_the_order_is_of_seed_and_round() -> None:
    samples = [sample(f"s{i}", 3, 0.1) for i in range(20)]

    def order(seed: str) -> list[str]:
        return [s.key for part in split(samples, 2, seed=seed) for s in part]

    assert order("0/1") == order("0/1")
    assert len({tuple(order(seed)) for seed in ("0/1", "0/2", "1/1", "1/2")}) == 4


def test_statistics_of_steps_merge_by_their_meaning() -> None:
    shared = {"clip_fraction": 0.0, "learning_rate": 1e-4}
    steps = [
        shared | {"loss": 1.0, "num_tokens": 30.0, "grad_norm": 2.0, "ratio_max": 1.5, "entropy": 1.0},
        shared | {"loss": 2.0, "num_tokens": 10.0, "grad_norm": 4.0, "ratio_max": 1.2, "entropy": 3.0},
    ]
    # entropy (30 * 1 + 10 * 3) / 40 = 1.5; loss and grad_norm are one figure a step: (1 + 2) / 2, (2 + 4) / 2
    assert merge(steps) == pytest.approx(
        shared | {"num_steps": 2, "num_tokens": 40, "loss": 1.5, "grad_norm": 3.0, "ratio_max": 1.5, "entropy": 1.5}
    )


def test_update_trains_and_is_the_same_to_the_bit(tiny_policy: Path, tmp_path: Path) -> None:
    samples = [sample(f"s{i}", 4 + i, 0.02, advantage=1.0 - 0.5 * i) for i in range(5)]
    options = config(minibatches=2, learning_rate=1e-3)
    found = []
    for name, round_index in (("a", 3), ("b", 3), ("c", 4)):
        trainer = open_trainer(tiny_policy, options.optim, LossConfig(), options.runtime)
        seen: list[int] = []
        stats = update(
            trainer, samples, options, round_index=round_index, progress=lambda done, seen=seen, **_: seen.append(done)
        )
        trainer.save(tmp_path / name, policy_version=round_index + 1)
        assert seen == [1, 2]
        assert stats["num_steps"] == 2 and stats["num_tokens"] == 4 + 5 + 6 + 7 + 8
        found.append((stats, (tmp_path / name / "model.safetensors").read_bytes()))
    assert found[0] == found[1]
    assert found[0][1] != found[2][1]  # another round, another order


def test_a_sample_of_weight_zero_has_no_influence(tiny_policy: Path, tmp_path: Path) -> None:
    options = config(minibatches=1)
    kept = [sample("a", 5, 0.1), sample("b", 5, 0.1, advantage=-1.0)]
    for name, samples in (("with", [*kept, sample("tool failed", 30, 0.0, advantage=9.0)]), ("without", kept)):
        trainer = open_trainer(tiny_policy, options.optim, LossConfig(), options.runtime)
        update(trainer, samples, options, round_index=0)
        trainer.save(tmp_path / name, policy_version=1)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    for name, value in one.items():
        assert (value - other[name]).abs().max() < 1e-5  # the shuffle may order the rows otherwise


def sampled_by(policy: Path, samples: list[Sample], temperature: float = 1.0) -> list[Sample]:
    """The samples with the log-probs that an engine over ``policy`` gives them."""
    engine = open_engine(policy, Runtime(num_threads=1))
    found = engine.logprobs([chain(s.token_ids, s.loss_mask.index(1)) for s in samples], temperature=temperature)
    return [replace(s, old_logprobs=[0.0] * s.loss_mask.index(1) + row) for s, row in zip(samples, found, strict=True)]


@pytest.mark.parametrize(("old", "prefix"), [("sampler", "mismatch/"), ("recomputed", "mismatch/trainer_")])
def test_the_mismatch_of_a_sound_sampler_is_arithmetic(tiny_policy: Path, old: Any, prefix: str) -> None:
    samples = sampled_by(tiny_policy, [sample(f"s{i}", 4 + i, 0.02) for i in range(5)])
    options = config(LossConfig(old_logprobs=old), learning_rate=0.1)  # the second step is far from the sampler
    trainer = open_trainer(tiny_policy, options.optim, options.loss, options.runtime)
    figures = update(trainer, samples, options, round_index=0)
    assert {name for name in figures if name.startswith("mismatch")} == {f"{prefix}kl", f"{prefix}ratio_max"}
    assert figures[f"{prefix}kl"] == pytest.approx(0.0, abs=1e-9)
    assert 1 <= figures[f"{prefix}ratio_max"] < 1 + 1e-4
    assert figures["approx_kl"] > 0.1


@pytest.mark.parametrize("old", ["sampler", "recomputed"])
@pytest.mark.parametrize("fault", ["stale weights", "temperature"])
def test_another_sampler_stops_the_update_at_its_first_step(
    tiny_policy: Path, tiny_tokenizer: Any, tmp_path: Path, old: Any, fault: str
) -> None:
    other = make_policy(tmp_path / "other", tiny_tokenizer, seed=1) if fault == "stale weights" else tiny_policy
    temperature = 0.5 if fault == "temperature" else 1.0
    samples = sampled_by(other, [sample(f"s{i}", 4 + i, 0.02) for i in range(5)], temperature)
    options = config(LossConfig(old_logprobs=old))
    trainer = open_trainer(tiny_policy, options.optim, options.loss, options.runtime)
    done: list[int] = []
    with pytest.raises(Mismatch, match=r"^round 7: .*KL \d.*max_mismatch: 0\.1\), largest ratio .*stale weights"):
        update(trainer, samples, options, round_index=7, progress=lambda step, **_: done.append(step))
    assert done == []


def test_the_samplers_weights_scale_each_tokens_gradient(tiny_policy: Path) -> None:
    """A token of weight 2 counts as one and pulls like two; one of weight 0 is left out, and all of them may be."""
    options = config(minibatches=1, max_grad_norm=1e9)
    (one,) = sampled_by(tiny_policy, [sample("a", 4, 0.1)])
    found = {}
    for name, weights in {
        "plain": [1.0] * 4,
        "twice": [2.0] * 4,
        "half": [1.0, 1.0, 0.0, 0.0],
        "none": [0.0] * 4,
    }.items():
        trainer = open_trainer(tiny_policy, options.optim, options.loss, options.runtime)
        corrected = replace(one, sampler_weights=[0.0, 0.0, *weights])
        found[name] = update(trainer, [corrected], options, round_index=0)
    # 4 tokens of weight 0.1, advantage 1, ratio 1
    assert [found[n]["loss"] for n in found] == pytest.approx([-0.4, -0.8, -0.2, 0.0], abs=1e-5)
    assert [found[n]["num_tokens"] for n in found] == [4, 4, 2, 0]
    assert found["twice"]["grad_norm"] == pytest.approx(2 * found["plain"]["grad_norm"], rel=1e-4)
    assert found["none"]["grad_norm"] == 0
    assert all(math.isfinite(value) for figures in found.values() for value in figures.values())


def test_a_round_without_signal_makes_no_step(tiny_policy: Path) -> None:
    options = config()
    trainer = open_trainer(tiny_policy, options.optim, LossConfig(), options.runtime)
    assert update(trainer, [sample("a", 3, 0.0)], options, round_index=0) == {"num_steps": 0.0, "num_tokens": 0.0}
