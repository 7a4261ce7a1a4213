"""The trainer ``deepspeed`` beside ``torch``: the same steps and the same folders, whatever its ranks and its stage.

Each start takes seconds: two ranks serve most tests, ``MEMPO_CONTRACT=full`` opens every stage (``make contract``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mempo.config import Lora, LossConfig
from mempo.runtime import DeepSpeed, Runtime
from mempo.storage import read_json
from mempo.trainers import Trainer, open_trainer
from mempo.trainers.deepspeed_trainer import DeepSpeedTrainer
from tests.contract.test_trainers import FULL, OPTIM, gradient, make_sample
from tests.tiny import make_policy

pytest.importorskip("deepspeed")
# Rows of 14 to 30 tokens: four micro-batches, so that two ranks make two passes each.
SMALL = OPTIM.model_copy(update={"tokens_per_microbatch": 45, "learning_rate": 1e-4, "warmup_steps": 2})
SAMPLES = [make_sample(f"s{i}", 5 + i, 9 + 3 * i, weight=5e-6) for i in range(5)]
BROKEN = replace(SAMPLES[0], key="bad/0/1", outcome_advantage=float("nan"))
LOSS = LossConfig(kl_coef=0.1)
WIDE: dict[str, Any] = {"hidden_size": 320, "intermediate_size": 640, "initializer_range": 0.1}
whole = pytest.mark.skipif(not FULL, reason="MEMPO_CONTRACT=full opens every stage")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Its matrices are larger than those that stage 3 leaves whole on every rank; its head is its embeddings."""
    return make_policy(tmp_path_factory.mktemp("policy") / "wide", tiny_tokenizer, **WIDE)


def opened(policy: Path, *, adapter: Lora = Lora(), **settings: Any) -> Trainer:
    sharing = DeepSpeed(**{name: settings.pop(name) for name in ("ranks", "stage", "offload") if name in settings})
    runtime = Runtime(trainer="deepspeed", deepspeed=sharing, **settings)
    return open_trainer(policy, SMALL, LOSS, runtime, temperature=0.8, adapter=adapter)


def of_torch(policy: Path, **settings: Any) -> Trainer:
    return open_trainer(policy, SMALL, LOSS, Runtime(), temperature=0.8, **settings)


@pytest.fixture(scope="module")
def two(policy: Path) -> Iterator[Trainer]:
    trainer = opened(policy, ranks=2, stage=2)
    yield trainer
    trainer.close()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bound: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_ranks_train_as_one_process_and_another_number_of_them_goes_on(
    two: Trainer, policy: Path, tmp_path: Path
) -> None:
    alone = of_torch(policy)
    aligned, expected = two.alignment(SAMPLES[:2], SAMPLES[2:]), alone.alignment(SAMPLES[:2], SAMPLES[2:])
    assert aligned == pytest.approx(expected, rel=1e-4)  # and leaves no trace in what follows
    steps = [two.step(SAMPLES), alone.step(SAMPLES)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)
    found, own = gradient(two, tmp_path / "two"), gradient(alone, tmp_path / "one")
    assert 0.1 < steps[0]["grad_norm"] < 10
    assert_close(found, own, 1e-5)
    # One sample is one micro-batch: the second rank has none.
    assert two.step(SAMPLES[:1], objective="sft") == pytest.approx(alone.step(SAMPLES[:1], objective="sft"), rel=1e-4)
    for trainer, name in ((two, "two"), (alone, "one")):
        trainer.save(tmp_path / name, policy_version=4)
    files = [sorted(item.name for item in (tmp_path / name).iterdir()) for name in ("two", "one")]
    assert files[0] == files[1]
    assert read_json(tmp_path / "two" / "trainer.json").items() >= {"policy_version": 4, "step": 2}.items()
    assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), 1e-6)

    with pytest.raises(FloatingPointError, match=r"\['bad/0/1'"):
        two.step([BROKEN, *SAMPLES[1:]])
    two.step(SAMPLES)
    two.save(tmp_path / "third", policy_version=5)
    for trainer in (opened(tmp_path / "two", ranks=1, stage=3), of_torch(tmp_path / "two")):
        trainer.step(SAMPLES)
        trainer.save(tmp_path / "resumed", policy_version=5)
        trainer.close()
        assert_close(weights(tmp_path / "resumed"), weights(tmp_path / "third"), 1e-6)


@whole
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_those_of_torch(
    policy: Path, tiny_tokenizer: Any, tmp_path: Path, stage: int, ranks: int, tied: bool
) -> None:
    if not tied:
        policy = make_policy(tmp_path / "untied", tiny_tokenizer, tie_word_embeddings=False, **WIDE)
    _compare(opened(policy, ranks=ranks, stage=stage), of_torch(policy), tmp_path, 1e-5)


@whole
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("option", ["offload", "gradient_checkpointing"])
def test_options_change_no_gradient(policy: Path, tmp_path: Path, stage: int, option: str) -> None:
    _compare(opened(policy, ranks=2, stage=stage, **{option: True}), of_torch(policy), tmp_path, 1e-5)


@whole
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_keeps_weights_in_float32(policy: Path, tmp_path: Path, stage: int) -> None:
    trainer = opened(policy, ranks=2, stage=stage, dtype="bfloat16")
    trainer.save(tmp_path / "v0", policy_version=0)
    assert_close(weights(tmp_path / "v0"), weights(policy), 0.0)
    assert (tmp_path / "v0" / "config.json").read_text() == (policy / "config.json").read_text()
    trainer.step(SAMPLES)
    found, alone = gradient(trainer, tmp_path / "v1"), of_torch(policy)
    trainer.close()
    alone.step(SAMPLES)
    expected = gradient(alone, tmp_path / "torch")
    flat, other = (torch.cat([part[name].flatten() for name in sorted(part)]) for part in (found, expected))
    assert torch.cosine_similarity(flat, other, dim=0) > 0.98
    assert weights(tmp_path / "v1")["model.embed_tokens.weight"].dtype == torch.float32


@whole
@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_is_trained_as_by_torch(policy: Path, tmp_path: Path, stage: int) -> None:
    adapter = Lora(rank=4)
    trainers = opened(policy, ranks=2, stage=stage, adapter=adapter), of_torch(policy, adapter=adapter)
    for _ in range(2):  # B is zero before the first step, and A without a gradient
        stats = [trainer.step(SAMPLES) for trainer in trainers]
        assert stats[0] == pytest.approx(stats[1], rel=1e-4)
    saved = []
    for trainer, name in zip(trainers, ("deepspeed", "torch"), strict=True):
        trainer.save(tmp_path / name, policy_version=1)
        saved.append(load_file(tmp_path / name / "adapter_model.safetensors"))
        trainer.close()
    assert_close(saved[0], saved[1], 1e-5)


def _compare(trainer: Trainer, alone: Trainer, tmp_path: Path, bound: float) -> None:
    """A gradient, what is asked for and dropped, and a step from there."""
    stats = [trainer.step(SAMPLES), alone.step(SAMPLES)]
    assert stats[0] == pytest.approx(stats[1], rel=1e-4)
    assert_close(gradient(trainer, tmp_path / "deepspeed"), gradient(alone, tmp_path / "torch"), bound)
    aligned = trainer.alignment(SAMPLES[:2], SAMPLES[2:])
    assert aligned == pytest.approx(alone.alignment(SAMPLES[:2], SAMPLES[2:]), rel=1e-3)
    with pytest.raises(FloatingPointError, match="bad/0/1"):
        trainer.step([*SAMPLES[1:], BROKEN])
    assert trainer.step(SAMPLES) == pytest.approx(alone.step(SAMPLES), rel=1e-3)
    trainer.save(tmp_path / "deepspeed", policy_version=2)
    alone.save(tmp_path / "torch", policy_version=2)
    # A tenth of AdamW's step, which makes of a gradient near 0 a step as long as any.
    assert_close(weights(tmp_path / "deepspeed"), weights(tmp_path / "torch"), 1e-5)
    trainer.close()


def family(trainer: Trainer) -> list[psutil.Process]:
    """torchrun and the ranks."""
    assert isinstance(trainer, DeepSpeedTrainer)
    agent = psutil.Process(trainer._child.pid)
    return [agent, *agent.children(recursive=True)]


def test_ranks_meet_without_a_port_that_others_reach(two: Trainer) -> None:
    found = [connection for process in family(two) for connection in process.net_connections("inet")]
    assert {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_a_rank_killed_in_mid_step_is_an_error(policy: Path) -> None:
    trainer = opened(policy, ranks=2, stage=2)
    processes = family(trainer)
    victim = processes[-1]
    victim.suspend()  # the others wait for it in the middle of the step
    caught: list[Exception] = []

    def step() -> None:
        try:
            trainer.step(SAMPLES)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive()
    victim.send_signal(signal.SIGKILL)
    thread.join(60)
    assert "its ranks ended" in str(caught[0]) and "SIGKILL" in str(caught[0])
    trainer.close()
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    assert not trainer._mailbox.folder.exists()  # type: ignore[attr-defined]


ORPHANS = """
import sys, time
from tests.contract.test_deepspeed import Path, family, opened
trainer = opened(Path(sys.argv[1]))
print("pids", *(process.pid for process in family(trainer)), flush=True)
time.sleep(600)
"""


def test_ranks_end_with_a_killed_parent(policy: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(policy)], cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        words = next(line.split() for line in parent.stdout if line.startswith(b"pids"))  # libraries print as well
        processes = [psutil.Process(int(pid)) for pid in words[1:]]
        parent.kill()
    assert len(processes) >= 2
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_what_cannot_work_is_named(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"runtime\.device: .* not 'cuda:1'"):
        opened(policy, device="cuda:1")
    monkeypatch.setattr("mempo.trainers.deepspeed_trainer.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"runtime\.trainer: .*mempo\[deepspeed\]"):
        opened(policy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_more_ranks_than_gpus_are_refused(policy: Path) -> None:
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with pytest.raises(ValueError, match=r"runtime\.deepspeed\.ranks: 2 ranks, 0 GPUs"):
        opened(policy, ranks=2, device="cuda")
