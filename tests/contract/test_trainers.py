"""What every trainer must do, whatever software it stands on.

DeepSpeed takes seconds to start: it passes these tests under ``MEMPO_CONTRACT=full`` (``make contract``), and the short
ones of ``test_deepspeed.py`` always.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mempo import advantages
from mempo.config import LossConfig, Optim
from mempo.engines import loader, open_engine
from mempo.packing import chain
from mempo.records import Sample
from mempo.runtime import DeepSpeed, Runtime
from mempo.storage import content_hash
from mempo.trainers import Trainer, open_trainer
from mempo.trainers.gradient import microbatches

FULL = os.environ.get("MEMPO_CONTRACT") == "full"
TRAINERS = {
    "torch": Runtime(),
    "deepspeed": Runtime(trainer="deepspeed", deepspeed=DeepSpeed(stage=3)),
    "deepspeed-2": Runtime(trainer="deepspeed", deepspeed=DeepSpeed(ranks=2)),
}
OPTIM = Optim(learning_rate=1e-3, max_grad_norm=1e9, tokens_per_microbatch=4096)


@pytest.fixture(params=TRAINERS)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param != "torch" and not FULL:
        pytest.skip("MEMPO_CONTRACT=full opens a trainer for each test")
    return TRAINERS[request.param]


def make_sample(key: str, prompt: int, response: int, weight: float = 0.01, seed: int = 0) -> Sample:
    rng = random.Random(f"{key}/{seed}")
    length = prompt + response
    on = [0] * prompt + [1] * response
    return Sample(
        key=key,
        token_ids=[rng.randrange(13, 300) for _ in range(length)],
        loss_mask=on,
        old_logprobs=[-rng.uniform(3, 9) * m for m in on],
        ref_logprobs=[-rng.uniform(3, 9) * m for m in on],
        outcome_advantage=rng.uniform(-2, 2),
        memory_advantages=[rng.choice([0.0, 1.0]) * m for m in on],
        weight=weight,
    )


def on_policy(policy: Path, runtime: Runtime, samples: list[Sample], temperature: float) -> list[Sample]:
    """The samples with the log-probs that an engine gives their loss tokens."""
    engine = open_engine(policy, runtime)
    made = []
    for sample in samples:
        first = sample.loss_mask.index(1)
        (found,) = engine.logprobs([chain(sample.token_ids, first)], temperature=temperature)
        made.append(replace(sample, old_logprobs=[0.0] * first + found))
    return made


def gradient(trainer: Trainer, folder: Path, beta1: float = OPTIM.beta1) -> dict[str, torch.Tensor]:
    """After one step from nothing the first moment is (1 - beta1) times the gradient."""
    trainer.save(folder, policy_version=1)
    moments = load_file(folder / "trainer.safetensors")
    return {name[: -len("/exp_avg")]: m / (1 - beta1) for name, m in moments.items() if name.endswith("/exp_avg")}


def expected_gradient(policy: Path, samples: list[Sample], options: LossConfig, temperature: float) -> dict[str, Any]:
    """The definition, token by token, in float64, over whole logits, one sample at a time."""
    model = loader.load_model(policy, Runtime()).double()
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logits = model(torch.tensor([sample.token_ids])).logits[0] / temperature
        for t, on in enumerate(sample.loss_mask):
            if on:
                logprob = logits[t - 1].log_softmax(-1)[sample.token_ids[t]]
                ratio = (logprob - sample.old_logprobs[t]).exp()
                advantage = sample.outcome_advantage + sample.memory_advantages[t]
                clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
                d = sample.ref_logprobs[t] - logprob
                kl = d.exp() - d - 1
                total = total + sample.weight * (
                    -torch.minimum(ratio * advantage, clipped * advantage) + options.kl_coef * kl
                )
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": float(total.detach())}


AGGREGATIONS = ["token-mean", "turn-mean", "trajectory-mean", "constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_of_100_and_900_tokens_add_up(
    tiny_policy: Path, runtime: Runtime, tmp_path: Path, aggregation: Any
) -> None:
    sizes = [450, 50, 450, 50]
    weights = advantages.token_weights(sizes, ["a", "a", "b", "c"], aggregation=aggregation, max_response_tokens=450)
    samples = [make_sample(f"s{i}", 10, n, w) for i, (n, w) in enumerate(zip(sizes, weights, strict=True))]
    options = LossConfig(kl_coef=0.1)
    expected = expected_gradient(tiny_policy, samples, options, 0.8)
    # Rows of 460 and 60 tokens: a budget of 4096 holds all, one of 920 parts 900 loss tokens from 100, one of 60 each.
    for budget, count in ((4096, 1), (920, 2), (60, 4)):
        lengths = [len(sample.token_ids) for sample in samples]
        assert len(list(microbatches(lengths, budget))) == count
        optim = OPTIM.model_copy(update={"tokens_per_microbatch": budget})
        trainer = open_trainer(tiny_policy, optim, options, runtime, temperature=0.8)
        stats = trainer.step(samples)
        found = gradient(trainer, tmp_path / str(budget))
        assert stats["num_tokens"] == 1000
        assert stats["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        for name, value in found.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-3, atol=1e-5 * stats["grad_norm"])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_at_one_version_trainer_and_engine_agree(
    tiny_policy: Path, runtime: Runtime, tmp_path: Path, temperature: float
) -> None:
    samples = [
        replace(make_sample(f"s{i}", 5 + i, 9, weight=0.5 / 9), outcome_advantage=a) for i, a in enumerate((2.0, -1.0))
    ]
    samples = [replace(s, memory_advantages=[0.0] * len(s.token_ids)) for s in samples]
    policy = tiny_policy
    for version in (1, 2):
        samples = on_policy(policy, runtime, samples, temperature)
        trainer = open_trainer(policy, OPTIM, LossConfig(), runtime, temperature=temperature)
        stats = trainer.step(samples)
        assert stats["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert stats["clip_fraction"] == 0
        assert stats["loss"] == pytest.approx(-0.5, abs=1e-4)  # -(0.5 * 2 + 0.5 * -1), every ratio 1
        before = samples
        policy = tmp_path / f"v{version}"
        trainer.save(policy, policy_version=version)
        assert open_engine(policy, runtime).policy_version == version
        after = on_policy(policy, runtime, samples, temperature)
        # The first sample is worth more of, the second less: the new engine runs the new weights.
        assert sum(after[0].old_logprobs) > sum(before[0].old_logprobs) + 0.1
        assert sum(after[1].old_logprobs) < sum(before[1].old_logprobs) - 0.1


def test_sft_is_the_weighted_sum_of_log_probs(tiny_policy: Path, runtime: Runtime) -> None:
    samples = on_policy(tiny_policy, runtime, [make_sample("a", 4, 8, 0.25), make_sample("b", 9, 3, 0.5)], 1.0)
    expected = -sum(s.weight * sum(s.old_logprobs) for s in samples)
    trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
    losses = [trainer.step(samples, objective="sft")["loss"] for _ in range(20)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_statistics_speak_of_loss_tokens(tiny_policy: Path, runtime: Runtime) -> None:
    samples = [make_sample("a", 4, 8), make_sample("b", 9, 3)]
    stats = open_trainer(tiny_policy, OPTIM, LossConfig(kl_coef=0.1), runtime).step(samples)
    assert stats["num_tokens"] == 11
    assert 0 < stats["entropy"] < math.log(512)
    assert stats["ref_kl"] > 0 and stats["grad_norm"] > 0 and 0 <= stats["clip_fraction"] <= 1
    assert "ref_kl" not in open_trainer(tiny_policy, OPTIM, LossConfig(), runtime).step(samples)


def test_gradient_is_clipped(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    optim = OPTIM.model_copy(update={"max_grad_norm": 0.01})
    trainer = open_trainer(tiny_policy, optim, LossConfig(), runtime)
    assert trainer.step([make_sample("a", 4, 8, 1.0)])["grad_norm"] > 0.01  # the figure is of before the clip
    squares = sum(float(g.square().sum()) for g in gradient(trainer, tmp_path / "p").values())
    assert math.sqrt(squares) == pytest.approx(0.01, rel=1e-3)


def test_warm_up_is_linear_then_constant(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    optim = OPTIM.model_copy(update={"warmup_steps": 4, "learning_rate": 0.04})
    trainer = open_trainer(tiny_policy, optim, LossConfig(), runtime)
    rates = [trainer.step([make_sample("a", 4, 8)])["learning_rate"] for _ in range(3)]
    trainer.save(tmp_path / "p", policy_version=1)
    trainer = open_trainer(tmp_path / "p", optim, LossConfig(), runtime)
    rates += [trainer.step([make_sample("a", 4, 8)])["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.04, 0.04])


def test_weight_decay_is_on_matrices_alone(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    found = []
    for decay in (0.0, 0.5):
        trainer = open_trainer(tiny_policy, OPTIM.model_copy(update={"weight_decay": decay}), LossConfig(), runtime)
        trainer.step([make_sample("a", 4, 8)])
        trainer.save(tmp_path / str(decay), policy_version=1)
        found.append(load_file(tmp_path / str(decay) / "model.safetensors"))
    first = load_file(tiny_policy / "model.safetensors")
    for name, plain in found[0].items():
        # AdamW: the weight falls by lr * decay = 1e-3 * 0.5 of itself, apart from the gradient's step.
        drop = 1e-3 * 0.5 * first[name] if plain.ndim == 2 else torch.zeros_like(plain)
        torch.testing.assert_close(found[1][name], plain - drop, rtol=1e-5, atol=1e-7)


def test_two_steps_save_two_steps_equal_four_to_the_bit(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    optim = OPTIM.model_copy(update={"warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5})
    steps = [[make_sample(f"{i}/{k}", 3 + k, 5 + 2 * i, seed=i) for k in range(3)] for i in range(4)]

    def run(policy: Path, these: list[list[Sample]], name: str) -> Path:
        trainer = open_trainer(policy, optim, LossConfig(), runtime)
        for samples in these:
            trainer.step(samples)
        trainer.save(tmp_path / name, policy_version=1)
        trainer.close()
        return tmp_path / name

    torch.manual_seed(5)
    straight = run(tiny_policy, steps, "straight")
    torch.manual_seed(5)
    half = run(tiny_policy, steps[:2], "half")
    torch.manual_seed(99)  # another process starts with another state
    resumed = run(half, steps[2:], "resumed")
    names = sorted(item.name for item in straight.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "trainer.json", "trainer.safetensors"} <= set(names)
    assert sorted(item.name for item in resumed.iterdir()) == names
    for name in names:
        assert (resumed / name).read_bytes() == (straight / name).read_bytes(), name
    assert (half / "model.safetensors").read_bytes() != (straight / "model.safetensors").read_bytes()


def test_the_saved_tokenizer_is_the_one_that_was_opened(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    open_trainer(tiny_policy, OPTIM, LossConfig(), runtime).save(tmp_path / "p", policy_version=0)
    before, after = loader.load_tokenizer(tiny_policy), loader.load_tokenizer(tmp_path / "p")
    assert after.get_vocab() == before.get_vocab() and after.chat_template == before.chat_template
    assert (after.pad_token_id, after.eos_token_id) == (before.pad_token_id, before.eos_token_id)
    text = "<mem>Paris</mem> <|im_end|> Zürich 北京"
    assert after(text)["input_ids"] == before(text)["input_ids"]


def test_tied_embeddings_are_saved_once(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
    trainer.step([make_sample("a", 4, 8)])
    trainer.save(tmp_path / "p", policy_version=1)
    names = load_file(tmp_path / "p" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    model = loader.load_model(tmp_path / "p", runtime)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_gradient_that_is_not_finite_names_its_samples(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    optim = OPTIM.model_copy(update={"tokens_per_microbatch": 12})
    trainer = open_trainer(tiny_policy, optim, LossConfig(), runtime)
    bad = replace(make_sample("bad/0/1", 4, 8), outcome_advantage=float("nan"))
    with pytest.raises(FloatingPointError, match=r"\['bad/0/1'\]"):
        trainer.step([make_sample("good/0/1", 3, 8), bad])
    trainer.save(tmp_path / "p", policy_version=1)
    before, after = load_file(tiny_policy / "model.safetensors"), load_file(tmp_path / "p" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert math.isfinite(trainer.step([make_sample("good/0/1", 3, 8)])["grad_norm"])  # and it goes on


def opposite(samples: list[Sample]) -> list[Sample]:
    """The same samples worth the reverse: at ratio 1, where nothing is clipped, the gradient turns round."""
    return [
        replace(s, outcome_advantage=-s.outcome_advantage, memory_advantages=[-a for a in s.memory_advantages])
        for s in samples
    ]


def test_alignment_is_the_cosine_of_two_gradients(tiny_policy: Path, runtime: Runtime) -> None:
    samples = on_policy(tiny_policy, runtime, [make_sample(f"s{i}", 5, 9 + i) for i in range(3)], 1.0)
    trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
    same = trainer.alignment(samples, samples)
    assert same["cosine"] == pytest.approx(1.0, abs=1e-12)
    assert same["first_norm"] == same["second_norm"] > 0
    assert trainer.alignment(samples, opposite(samples))["cosine"] == pytest.approx(-1.0, abs=1e-5)
    thrice = [replace(sample, weight=3 * sample.weight) for sample in samples]
    scaled = trainer.alignment(samples, thrice)
    assert scaled["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert scaled["second_norm"] == pytest.approx(3 * scaled["first_norm"], rel=1e-4)

    one, two = (expected_gradient(tiny_policy, part, LossConfig(), 1.0) for part in (samples[:1], samples[1:]))
    flat = [torch.cat([g.flatten() for name, g in sorted(part.items()) if name != "loss"]) for part in (one, two)]
    found = trainer.alignment(samples[:1], samples[1:])
    assert found["cosine"] == pytest.approx(float(torch.cosine_similarity(*flat, dim=0)), abs=1e-4)
    assert found["first_norm"] == pytest.approx(float(flat[0].norm()), rel=1e-4)
    assert found["second_norm"] == pytest.approx(float(flat[1].norm()), rel=1e-4)


def test_alignment_with_nothing_has_no_cosine(tiny_policy: Path, runtime: Runtime) -> None:
    (sample,) = on_policy(tiny_policy, runtime, [make_sample("a", 4, 8)], 1.0)
    nothing = replace(sample, outcome_advantage=0.0, memory_advantages=[0.0] * 12)
    found = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime).alignment([sample], [nothing])
    assert found.keys() == {"first_norm", "second_norm"}
    assert found["second_norm"] == 0


def test_alignment_leaves_the_trainer_as_it_was(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    samples = [make_sample("a", 4, 8), make_sample("b", 6, 5)]
    saved = {}
    for asked in (False, True):
        trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
        for step in range(2):
            if asked:
                trainer.alignment(samples, opposite(samples))
            trainer.step(samples)
            trainer.save(tmp_path / f"{asked}-{step}", policy_version=step)
            saved[asked, step] = content_hash(tmp_path / f"{asked}-{step}")
    assert saved[True, 0] == saved[False, 0] != saved[False, 1] == saved[True, 1]  # weights, moments, steps, RNG


def test_samples_that_cannot_train_are_refused(tiny_policy: Path, runtime: Runtime) -> None:
    trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
    sample = make_sample("q/0/1", 2, 3)
    for broken in (replace(sample, weight=0.0), replace(sample, loss_mask=[0] * 5), replace(sample, loss_mask=[1] * 5)):
        with pytest.raises(ValueError, match="q/0/1"):
            trainer.step([broken])
    with pytest.raises(ValueError, match="samples"):
        trainer.step([])


def test_damaged_state_is_named(tiny_policy: Path, runtime: Runtime, tmp_path: Path) -> None:
    trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
    trainer.step([make_sample("a", 4, 8)])
    trainer.save(tmp_path / "p", policy_version=1)
    for name in ("trainer.safetensors", "trainer.json", "model.safetensors"):
        broken = shutil.copytree(tmp_path / "p", tmp_path / name)
        data = (broken / name).read_bytes()
        (broken / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=str(broken)):
            open_trainer(broken, OPTIM, LossConfig(), runtime)


# Read by every Python process that starts with its folder on PYTHONPATH: the writer may be a child's child.
KILLER = """
import os, signal
sync, calls = os.fsync, 0
def fsync(descriptor):
    global calls
    calls += "/.policy." in os.readlink(f"/proc/self/fd/{descriptor}")
    if calls == int(os.environ["KILLED_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)
os.fsync = fsync
"""
SAVES = """
import sys
from tests.contract.test_trainers import LossConfig, Optim, Path, Runtime, make_sample, open_trainer
trainer = open_trainer(Path(sys.argv[1]), Optim(), LossConfig(), Runtime.model_validate_json(sys.argv[2]))
trainer.step([make_sample("a", 4, 8)])
trainer.save(Path(sys.argv[1]), policy_version=8)
"""


@pytest.mark.parametrize("call", [1, 6])
def test_a_kill_during_a_save_leaves_the_former_checkpoint(
    tiny_policy: Path, runtime: Runtime, tmp_path: Path, call: int
) -> None:
    policy = tmp_path / "saved" / "policy"
    trainer = open_trainer(tiny_policy, OPTIM, LossConfig(), runtime)
    trainer.step([make_sample("a", 4, 8)])
    trainer.save(policy, policy_version=7)
    before = {item.name: item.read_bytes() for item in policy.iterdir()}
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "KILLED_AT": str(call)}
    arguments = [sys.executable, "-c", SAVES, str(policy), runtime.model_dump_json()]
    code = subprocess.run(arguments, cwd=Path(__file__).parents[2], env=environment, check=False).returncode
    assert code == (-signal.SIGKILL if runtime.trainer == "torch" else 1)
    assert {item.name: item.read_bytes() for item in policy.iterdir()} == before
    reopened = open_trainer(policy, OPTIM, LossConfig(), runtime)
    reopened.save(policy, policy_version=9)
    assert open_engine(policy, runtime).policy_version == 9
    assert list(policy.parent.iterdir()) == [policy]


def test_unknown_trainers_are_named(tiny_policy: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime\.trainer: no trainer named 'sparkle'"):
        open_trainer(tiny_policy, OPTIM, LossConfig(), Runtime().model_copy(update={"trainer": "sparkle"}))
