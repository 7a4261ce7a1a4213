"""The adapter by itself: what it computes, what its folder holds, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from torch.func import functional_call

from mempo import lora, storage
from mempo.config import Lora
from mempo.engines import loader
from mempo.runtime import Runtime

pytest.importorskip("peft")
RUNTIME = Runtime(num_threads=1)
OPTIONS = Lora(rank=3, alpha=6.0)  # W + 2 B A
IDS = torch.tensor([[30, 77, 200, 41, 5, 300]])
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def with_adapter(policy: Path, options: Lora = OPTIONS, runtime: Runtime = RUNTIME) -> Any:
    """The policy under an adapter that changes what it says."""
    model = lora.attach(loader.load_model(policy, runtime), options)
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1)
    return model


def saved(model: Any, folder: Path, base: Path) -> Path:
    folder.mkdir(parents=True)
    lora.save(model, {name: p for name, p in model.named_parameters() if p.requires_grad}, folder, base)
    return folder


@torch.no_grad()
def says(model: Any) -> Tensor:
    found: Tensor = model(IDS, use_cache=False).logits.log_softmax(-1)
    return found


@pytest.fixture
def workspace(tiny_policy: Path, tmp_path: Path) -> Path:
    """``base`` and an adapter over it, ``runs/policy``."""
    root = tmp_path / "workspace"
    shutil.copytree(tiny_policy, root / "base")
    saved(with_adapter(root / "base"), root / "runs" / "policy", root / "base")
    return root


# --- what it computes ------------------------------------------------------------------------------------------------


def test_a_fresh_adapter_changes_nothing_and_is_always_the_same(tiny_policy: Path) -> None:
    before = says(loader.load_model(tiny_policy, RUNTIME))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        model = lora.attach(loader.load_model(tiny_policy, RUNTIME), OPTIONS)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(says(model), before)
        found.append({name: p for name, p in model.named_parameters() if p.requires_grad})
    one, other = found
    assert len(one) == 2 * 2 * len(LAYERS)
    for name, weight in one.items():
        assert torch.equal(weight, other[name])
        assert bool(weight.any()) == ("lora_A" in name)


def test_gradients_are_those_of_w_plus_two_b_a_written_out(tiny_policy: Path) -> None:
    model = with_adapter(tiny_policy).double()
    model(IDS, use_cache=False).logits.log_softmax(-1).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    plain = loader.load_model(tiny_policy, RUNTIME).double()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if "lora_" in name}
    weights = dict(plain.named_parameters())
    for layer in {name.partition(".lora_")[0] for name in leaves}:
        a, b = (leaves[f"{layer}.lora_{side}.default.weight"] for side in "AB")
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"].detach() + 2.0 * b @ a
    logits = functional_call(plain, weights, (IDS,), {"use_cache": False}).logits
    logits.log_softmax(-1).square().sum().backward()

    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.grad, rtol=1e-9, atol=1e-9)
        assert leaf.grad is not None and leaf.grad.abs().max() > 1e-3


def test_switched_off_it_is_its_base_to_the_bit_and_on_again_itself(tiny_policy: Path) -> None:
    model = with_adapter(tiny_policy)
    on = says(model)
    with pytest.raises(KeyError), lora.switched_off(model):
        assert torch.equal(says(model), says(loader.load_model(tiny_policy, RUNTIME)))
        raise KeyError
    assert torch.equal(says(model), on)
    assert (on - says(loader.load_model(tiny_policy, RUNTIME))).abs().max() > 0.1


def test_targets_are_the_layers_that_are_named_and_no_others(tiny_policy: Path) -> None:
    model = lora.attach(loader.load_model(tiny_policy, RUNTIME), Lora(rank=2, targets=("q_proj", "mlp.up_proj")))
    moved = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert moved == {f"model.layers.{i}.{layer}" for i in (0, 1) for layer in ("self_attn.q_proj", "mlp.up_proj")}


@pytest.mark.parametrize("name", ["q_porj", "lm_head", "embed_tokens", "proj", ""])
def test_a_target_that_names_no_layer_of_the_body_is_refused(tiny_policy: Path, name: str) -> None:
    model = loader.load_model(tiny_policy, RUNTIME)
    with pytest.raises(ValueError, match=rf"lora\.targets: '{name}' names no linear layer"):
        lora.attach(model, Lora(rank=2, targets=("q_proj", name)))


def test_the_adapter_is_in_float32_over_weights_in_bfloat16(tiny_policy: Path) -> None:
    model = with_adapter(tiny_policy, runtime=Runtime(dtype="bfloat16"))
    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert says(model).dtype == torch.bfloat16


# --- its folder ------------------------------------------------------------------------------------------------------


def test_a_folder_holds_the_adapter_alone_and_loads_to_the_bit(workspace: Path) -> None:
    policy, base = workspace / "runs" / "policy", workspace / "base"
    assert {item.name for item in policy.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "base.json"}
    expected = {"path": "../../base", "sha256": storage.content_hash(base)}
    assert storage.read_json(policy / "base.json") == expected
    names = {f"base_model.model.model.layers.{i}.{n}.lora_{s}.weight" for i in (0, 1) for n in LAYERS for s in "AB"}
    assert load_file(policy / "adapter_model.safetensors").keys() == names  # as peft itself writes it
    assert torch.equal(says(loader.load_model(policy, RUNTIME)), says(with_adapter(base)))


def test_peft_reads_it(workspace: Path) -> None:
    from peft import PeftModel

    policy = workspace / "runs" / "policy"
    model = PeftModel.from_pretrained(loader.load_model(workspace / "base", RUNTIME), str(policy)).eval()
    assert torch.equal(says(model), says(loader.load_model(policy, RUNTIME)))


def test_a_workspace_moves_as_a_whole(workspace: Path) -> None:
    moved = workspace.rename(workspace.with_name("elsewhere"))
    assert lora.base_of(moved / "runs" / "policy") == moved / "base"
    loader.load_model(moved / "runs" / "policy", RUNTIME)
    assert lora.base_of(moved / "base") == moved / "base"  # no adapter: itself


def test_a_base_that_is_gone_or_another_is_refused_naming_both(workspace: Path) -> None:
    policy, base = workspace / "runs" / "policy", workspace / "base"
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    for trouble in ("is not the one it was trained on", "is missing"):
        with pytest.raises(ValueError, match=f"{policy}: the policy under this LoRA adapter, {base}, {trouble}"):
            loader.load_model(policy, RUNTIME)
        shutil.rmtree(base, ignore_errors=True)


def test_an_adapter_of_another_program_without_a_base_is_refused(workspace: Path) -> None:
    policy = workspace / "runs" / "policy"
    for text in ("[]", '{"path": "../../base"}', None):
        (policy / "base.json").write_text(text) if text else (policy / "base.json").unlink()
        with pytest.raises(ValueError, match=rf"{policy}: a LoRA adapter without a base\.json"):
            loader.load_model(policy, RUNTIME)


def test_damaged_and_foreign_adapters_are_refused_by_name(workspace: Path) -> None:
    policy = workspace / "runs" / "policy"
    file = policy / "adapter_model.safetensors"
    weights = load(whole := file.read_bytes())  # no view of the file, which is written over below
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: not a whole"):
        loader.load_model(policy, RUNTIME)
    for wrong in (
        {key: value for key, value in weights.items() if key != name},
        weights | {name: weights[name][:1].clone()},  # one row would spread over all three
    ):
        save_file(wrong, file)
        with pytest.raises(ValueError, match=f"{name} does not belong to the policy under it"):
            loader.load_model(policy, RUNTIME)
    config = storage.read_json(policy / "adapter_config.json")
    for wrong in ({"r": "all"}, {"r": 9999}, {"target_modules": None}):
        (policy / "adapter_config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=r"adapter_config\.json: not of a LoRA adapter"):
            loader.load_model(policy, RUNTIME)


def test_a_base_that_is_no_folder_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.rank: some/hub-id is no local folder"):
        saved(with_adapter(tiny_policy), tmp_path / "p", Path("some/hub-id"))


def test_other_options_than_those_of_the_adapter_are_refused(workspace: Path) -> None:
    policy = workspace / "runs" / "policy"
    for options in (Lora(rank=4, alpha=6.0), Lora(rank=3, alpha=5.0), Lora()):
        with pytest.raises(ValueError, match=rf"{policy}: a LoRA adapter of rank 3, alpha 6.0; .*rank {options.rank}"):
            lora.trainable(loader.load_model(policy, RUNTIME), policy, options)
    assert all("lora_" in name for name in lora.trainable(loader.load_model(policy, RUNTIME), policy, OPTIONS))


# --- merged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_merged_is_an_ordinary_folder_that_says_the_same(tiny_policy: Path, tmp_path: Path, shard: str) -> None:
    base = Path(shutil.copytree(tiny_policy, tmp_path / "base"))
    (base / "model.safetensors").unlink()
    loader.load_model(tiny_policy, RUNTIME).save_pretrained(base, max_shard_size=shard)
    files = {item.name for item in base.iterdir()}
    save_file({"lm_head.weight/exp_avg": torch.ones(1)}, base / "trainer.safetensors")  # of the warm start
    policy, target = saved(with_adapter(base), tmp_path / "policy", base), tmp_path / "merged"
    for name in ("trainer.json", "trainer.safetensors"):
        (policy / name).write_text("{}")
    lora.write_merged(policy, target)
    assert {item.name for item in target.iterdir()} == files | {"trainer.json"}
    assert (len(list(target.glob("*.safetensors"))) > 1) == (shard == "20KB")
    merged, apart = loader.load_model(target, RUNTIME), loader.load_model(policy, RUNTIME)
    torch.testing.assert_close(says(merged), says(apart), rtol=0, atol=1e-5)

    weights = load_file(policy / "adapter_model.safetensors")
    a, b = (weights[f"base_model.model.model.layers.1.mlp.down_proj.lora_{side}.weight"] for side in "AB")
    before = loader.load_model(base, RUNTIME).model.layers[1].mlp.down_proj.weight
    torch.testing.assert_close(merged.model.layers[1].mlp.down_proj.weight, before + 2.0 * b @ a)


def test_a_weight_that_the_base_does_not_hold_by_this_name_is_not_left_out(tiny_policy: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_policy, tmp_path / "base"))
    weights = load((base / "model.safetensors").read_bytes())
    old = "model.layers.0.mlp.up_proj"
    weights["up"] = weights.pop(f"{old}.weight")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    policy = saved(with_adapter(tiny_policy), tmp_path / "policy", base)
    for made in (lambda: lora.write_merged(policy, tmp_path / "merged"), lambda: next(lora.merged_weights(policy))):
        with pytest.raises(ValueError, match=rf"{policy}.* no weight for base_model\.model\.{old}\.lora_A"):
            made()


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"rank": -1}, {"rank": 513}, {"alpha": 0}, {"targets": []}, {"targets": "q_proj"}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Lora.model_validate(wrong)


def test_a_missing_package_is_named_with_its_remedy(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loader.load_model(tiny_policy, RUNTIME)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora\.rank: .* peft; pip install 'mempo\[lora\]'"):
        lora.attach(model, OPTIONS)
