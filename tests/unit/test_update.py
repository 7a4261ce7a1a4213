"""A round's samples as optimiser steps: what enters, how it is cut, what each step weighs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from mempo.config import Config, LossConfig, Optim
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import open_trainer
from mempo.update import merge, split, token_weight, update


def sample(key: str, tokens: int, weight: float, advantage: float = 1.0) -> Sample:
    on = [0, 0] + [1] * tokens
    ids = [20 + (7 * i + len(key)) % 200 for i in range(len(on))]
    return Sample(key, ids, on, [-6.0 * m for m in on], [0.0] * len(on), advantage, [0.0] * len(on), weight)


def config(**optim: Any) -> Config:
    return Config(optim=Optim(**optim), runtime=Runtime(num_threads=1))


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


def test_a_round_without_signal_makes_no_step(tiny_policy: Path) -> None:
    options = config()
    trainer = open_trainer(tiny_policy, options.optim, LossConfig(), options.runtime)
    assert update(trainer, [sample("a", 3, 0.0)], options, round_index=0) == {"num_steps": 0.0, "num_tokens": 0.0}
