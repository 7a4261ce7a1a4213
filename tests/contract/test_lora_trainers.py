"""What every trainer must do where it trains a LoRA adapter, and what the engines then run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mempo import lora
from mempo.config import Lora, LossConfig
from mempo.engines import open_engine
from mempo.packing import chain
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.storage import content_hash
from mempo.trainers import Trainer, open_trainer
from tests.contract.test_trainers import FULL, OPTIM, TRAINERS, expected_gradient, gradient, make_sample, on_policy

pytest.importorskip("peft")
ADAPTER = Lora(rank=4, alpha=12.0)  # W + 3 B A
SAMPLES = [make_sample("a", 5, 9, 0.05), make_sample("b", 7, 6, 0.05)]


@pytest.fixture(params=TRAINERS)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param != "torch" and not FULL:
        pytest.skip("MEMPO_CONTRACT=full opens a trainer for each test")
    return TRAINERS[request.param]


@pytest.fixture
def base(tiny_policy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_policy, tmp_path / "base"))


def opened(policy: Path, runtime: Runtime, adapter: Lora = ADAPTER) -> Trainer:
    return open_trainer(policy, OPTIM, LossConfig(), runtime, adapter=adapter)


def trained(policy: Path, folder: Path, runtime: Runtime, *steps: list[Sample]) -> Path:
    trainer = opened(policy, runtime)
    for samples in steps:
        trainer.step(samples)
    trainer.save(folder, policy_version=1)
    trainer.close()
    return folder


def scores(policy: Path, runtime: Runtime) -> list[list[float]]:
    engine = open_engine(policy, runtime)
    return engine.logprobs([chain(sample.token_ids, 1) for sample in SAMPLES])


def test_at_each_version_trainer_engine_and_merged_folder_agree(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    before, policy = content_hash(base), base
    for version in (1, 2, 3):
        samples = on_policy(policy, runtime, SAMPLES, 1.0)
        trainer = opened(policy, runtime)
        assert trainer.step(samples)["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        former, policy = policy, tmp_path / f"v{version}"
        trainer.save(policy, policy_version=version)
        trainer.close()
        assert open_engine(policy, runtime).policy_version == version
        lora.write_merged(policy, tmp_path / f"m{version}")
        assert open_engine(tmp_path / f"m{version}", runtime).policy_version == version
        found, was = scores(policy, runtime), scores(former, runtime)
        for row, merged, old in zip(found, scores(tmp_path / f"m{version}", runtime), was, strict=True):
            assert row == pytest.approx(merged, abs=1e-5)
            assert row != pytest.approx(old, abs=1e-3)
    assert content_hash(base) == before


def test_the_base_is_served_by_the_same_weights(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    engine = open_engine(trained(base, tmp_path / "p", runtime, SAMPLES), runtime)
    frozen, alone = engine.base(), open_engine(base, runtime)
    assert frozen is not None and alone.base() is None
    trees = [chain(sample.token_ids, 1) for sample in SAMPLES]
    before = engine.logprobs(trees)
    assert frozen.logprobs(trees) == alone.logprobs(trees) != before
    assert engine.logprobs(trees) == before


def test_gradients_of_a_and_b_follow_from_that_of_w(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    """With G the gradient of W + 3 B A: 3 B' G is that of A, 3 G A' that of B. G is made over the merged folder."""
    policy = trained(base, tmp_path / "p", runtime, SAMPLES)
    (policy / "trainer.safetensors").unlink()  # moments from nothing: the first is the gradient times 1 - beta1
    lora.write_merged(policy, tmp_path / "merged")
    expected = expected_gradient(tmp_path / "merged", SAMPLES, LossConfig(), 1.0)
    trainer = opened(policy, runtime)
    norm = trainer.step(SAMPLES)["grad_norm"]
    found = gradient(trainer, tmp_path / "after")
    weights = load_file(policy / "adapter_model.safetensors")
    layers = {name.partition(".lora_")[0] for name in found}
    assert len(layers) == 14 and len(found) == 28
    for layer in layers:
        a, b = (weights[f"base_model.model.{layer}.lora_{side}.weight"].double() for side in "AB")
        g = expected[f"{layer}.weight"]
        for side, value in (("A", 3 * b.T @ g), ("B", 3 * g @ a.T)):
            own = found[f"{layer}.lora_{side}.default.weight"].double()
            torch.testing.assert_close(own, value, rtol=1e-3, atol=1e-5 * norm)


def test_two_steps_save_two_steps_equal_four_to_the_bit(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    steps = [[make_sample(f"{i}/{k}", 3 + k, 5 + 2 * i, seed=i) for k in range(3)] for i in range(4)]
    torch.manual_seed(5)
    straight = trained(base, tmp_path / "straight", runtime, *steps)
    torch.manual_seed(5)
    half = trained(base, tmp_path / "half", runtime, *steps[:2])
    torch.manual_seed(99)  # another process starts with another state
    resumed = trained(half, tmp_path / "resumed", runtime, *steps[2:])
    names = {item.name for item in straight.iterdir()}
    assert {"adapter_model.safetensors", "base.json", "tokenizer.json", "trainer.json", "trainer.safetensors"} <= names
    assert "model.safetensors" not in names
    assert content_hash(resumed) == content_hash(straight) != content_hash(half)


def test_recomputed_layers_give_the_same_gradient(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    found = []
    for asked in (False, True):
        again = runtime.model_copy(update={"gradient_checkpointing": asked})
        policy = trained(base, tmp_path / str(asked), again, SAMPLES)
        found.append(load_file(policy / "trainer.safetensors"))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)


def test_nothing_but_the_adapter_has_moments(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    policy = trained(base, tmp_path / "p", runtime, SAMPLES)
    assert all(".lora_A." in name or ".lora_B." in name for name in load_file(policy / "trainer.safetensors"))


def test_weights_under_an_adapter_are_held_in_bfloat16_where_asked(base: Path, tmp_path: Path) -> None:
    half = Runtime(num_threads=1, dtype="bfloat16")
    samples = on_policy(base, half, SAMPLES, 1.0)
    stats = opened(base, half).step(samples)
    assert stats["ratio_max"] == pytest.approx(1.0, abs=0.1)
    policy = trained(base, tmp_path / "p", half, SAMPLES)
    assert {value.dtype for value in load_file(policy / "adapter_model.safetensors").values()} == {torch.float32}


def test_an_adapter_is_not_trained_as_something_else(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    policy = trained(base, tmp_path / "p", runtime, SAMPLES)
    for adapter in (Lora(), Lora(rank=8, alpha=12.0)):
        with pytest.raises(ValueError, match=f"{policy}: a LoRA adapter of rank 4"):
            opened(policy, runtime, adapter)


def test_a_sample_that_is_worth_more_becomes_likelier(base: Path, runtime: Runtime, tmp_path: Path) -> None:
    (sample,) = on_policy(base, runtime, SAMPLES[:1], 1.0)
    good = replace(sample, outcome_advantage=2.0, memory_advantages=[0.0] * len(sample.token_ids))
    policy = trained(base, tmp_path / "p", runtime, [good], [good], [good])
    (after,) = on_policy(policy, runtime, [good], 1.0)
    assert sum(after.old_logprobs) > sum(good.old_logprobs) + 0.1
