"""What is particular to the trainer ``torch``: pieces, micro-batches, models it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from mempo.config import LossConfig, Optim
from mempo.engines import loader
from mempo.loss import token_logprobs
from mempo.runtime import Runtime
from mempo.storage import read_json, write_json
from mempo.trainers import gradient as sharing, policy as opening, state
from mempo.trainers.gradient import learning_rate, microbatches, passes
from mempo.trainers.torch_trainer import TorchTrainer
from tests.contract.test_trainers import OPTIM, gradient, make_sample

RUNTIME = Runtime(num_threads=1)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 200))
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = list(microbatches(lengths, budget))
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[index] for index in part) <= budget
    assert parts == list(microbatches(lengths, budget))


def test_pieces_of_logits_add_up(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [make_sample("a", 4, 30), make_sample("b", 7, 11)]
    found = []
    for bound in (2**24, 7 * 512):  # all 41 loss tokens at once, and 7 at a time
        monkeypatch.setattr(sharing, "MAX_LOGITS", bound)
        trainer = TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME)
        stats = trainer.step(samples)
        found.append((stats, gradient(trainer, tmp_path / str(bound))))
    (whole, expected), (pieces, values) = found
    assert pieces == pytest.approx(whole, rel=1e-4)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5 * whole["grad_norm"])


def test_logits_are_made_for_loss_tokens_alone_in_bounded_pieces(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME)
    shapes: list[tuple[int, ...]] = []

    def spied(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        shapes.append(tuple(logits.shape))
        return token_logprobs(logits, *arguments, **options)

    monkeypatch.setattr(sharing, "token_logprobs", spied)
    vocabulary = len(trainer.tokenizer)
    monkeypatch.setattr(sharing, "MAX_LOGITS", 16 * vocabulary)
    trainer.step([make_sample(f"s{i}", 400, 20) for i in range(4)])
    # 80 loss tokens of 1,680: five pieces of 16, each with the one row that closes it.
    assert shapes == [(1, 17, vocabulary)] * 5


def test_bfloat16_keeps_the_weights_in_float32(tiny_policy: Path, tmp_path: Path) -> None:
    samples = [make_sample("a", 6, 20), make_sample("b", 9, 12)]
    found = {}
    for dtype in ("float32", "bfloat16"):
        trainer = TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME.model_copy(update={"dtype": dtype}))
        trainer.step(samples)
        assert {parameter.dtype for parameter in trainer.parameters.values()} == {torch.float32}
        found[dtype] = gradient(trainer, tmp_path / dtype)["model.embed_tokens.weight"].flatten()
    # The same direction within bfloat16's three digits, and not the same numbers.
    assert torch.cosine_similarity(found["float32"], found["bfloat16"], dim=0) > 0.98
    assert not torch.equal(found["float32"], found["bfloat16"])


def test_moments_of_other_weights_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME)
    trainer.step([make_sample("a", 4, 8)])
    trainer.save(tmp_path / "p", policy_version=1)
    moments = load_file(tmp_path / "p" / "trainer.safetensors")
    save_file({f"x.{name}": value for name, value in moments.items()}, tmp_path / "p" / "trainer.safetensors")
    with pytest.raises(ValueError, match=r"trainer\.safetensors: x\..* does not belong to the weights"):
        TorchTrainer(tmp_path / "p", OPTIM, LossConfig(), RUNTIME)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        *(({"step": value}, "step: Input should be") for value in (-1, 1.5, "1", None)),
        *(({"policy_version": value}, "policy_version: Input should be") for value in (-1, True)),
        *(({"torch_rng": value}, "torch_rng: ") for value in ("", "ff", "no hex", 3)),
    ],
)
def test_a_wrong_trainer_state_is_named(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    state.write(tmp_path, {}, policy_version=1, num_steps=1)
    assert state.restore(tmp_path) == 1
    write_json(tmp_path / "trainer.json", read_json(tmp_path / "trainer.json") | values)
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'trainer.json'}: {said}.*$"):
        state.restore(tmp_path)


def test_moments_need_their_state_and_a_published_policy_has_none(tmp_path: Path) -> None:
    state.write(tmp_path, {}, policy_version=1, num_steps=1)
    (tmp_path / "trainer.json").rename(tmp_path / "aside")
    with pytest.raises(ValueError, match=r"trainer\.json is missing beside trainer\.safetensors"):
        state.restore(tmp_path)
    (tmp_path / "aside").rename(tmp_path / "trainer.json")
    (tmp_path / "trainer.safetensors").unlink()
    assert state.restore(tmp_path) == 0


def test_a_model_that_bends_its_logits_is_refused(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loader.load_model(tiny_policy, RUNTIME)
    forward = model.forward

    def capped(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(model, "forward", capped)
    monkeypatch.setattr(loader, "load_model", lambda *_: model)
    with pytest.raises(ValueError, match="llama: its logits are more than its vocabulary head"):
        TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME)


def test_the_learning_rate_rises_then_falls_to_a_twentieth() -> None:
    optim = Optim(learning_rate=1.0, warmup_steps=2, decay_steps=10)
    assert [learning_rate(optim, step) for step in (0, 1, 5, 10, 99)] == pytest.approx([0.5, 0.9, 0.5, 0.05, 0.05])
    assert learning_rate(Optim(learning_rate=1.0), 99) == 1.0


def test_threads_are_those_of_the_runtime(tiny_policy: Path) -> None:
    TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME.model_copy(update={"num_threads": 2}))
    assert torch.get_num_threads() == 2
    TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME)
    assert torch.get_num_threads() == 1


def test_layers_computed_twice_give_the_same_gradient(tiny_policy: Path, tmp_path: Path) -> None:
    calls, found = [], []
    for checkpointed in (False, True):
        runtime = RUNTIME.model_copy(update={"gradient_checkpointing": checkpointed})
        trainer = TorchTrainer(tiny_policy, OPTIM, LossConfig(), runtime)
        seen: list[int] = []
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        trainer.step([make_sample("a", 6, 20), make_sample("b", 9, 12)])
        calls.append(len(seen))
        found.append(gradient(trainer, tmp_path / str(checkpointed)))
    assert calls == [1, 2]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_model_without_layers_to_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime\.gradient_checkpointing: plain"):
        opening.checkpoint_layers(PlainModel())


class PlainModel(torch.nn.Module):
    class config:
        model_type = "plain"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200), st.integers(1, 4))
def test_every_rank_makes_every_pass(lengths: list[int], budget: int, ranks: int) -> None:
    shared = passes(lengths, budget, ranks)
    assert all(len(parts) == ranks for parts in shared)
    assert [] not in [part for parts in shared[:-1] for part in parts]
    assert sorted(index for parts in shared for part in parts for index in part) == list(range(len(lengths)))


def test_micro_batches_of_one_pass_are_alike() -> None:
    # Padded tokens 30, 27, 24, 5: the large ones meet.
    assert passes([10, 9, 8, 5, 10, 9, 8, 10, 9, 8], budget=30, ranks=2) == [[[0, 4, 7], [1, 5, 8]], [[2, 6, 9], [3]]]


def test_the_state_of_a_new_training_does_not_depend_on_what_the_process_did_before(
    tiny_policy: Path, tmp_path: Path
) -> None:
    states = []
    for drawn in (0, 5):
        torch.rand(drawn)
        trainer = TorchTrainer(tiny_policy, OPTIM, LossConfig(), RUNTIME)
        trainer.step([make_sample("a", 4, 30)])
        trainer.save(tmp_path / str(drawn), policy_version=1)
        states.append((tmp_path / str(drawn) / state.STATE).read_bytes())
    assert states[0] == states[1]
