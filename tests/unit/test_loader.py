"""Loading a policy: what is refused, and how the refusal names the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mempo.engines import loader, open_engine
from mempo.runtime import Runtime
from tests.tiny import make_policy, make_tokenizer

RUNTIME = Runtime(num_threads=1)


@pytest.fixture
def copy(tiny_policy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_policy, tmp_path / "policy"))


def edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_model_is_in_eval_mode_with_sdpa_and_the_dtype_asked_for(tiny_policy: Path) -> None:
    model = loader.load_model(tiny_policy, RUNTIME)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert str(model.dtype) == "torch.float32"
    assert loader.context_window(model) == 512
    assert loader.is_plain_causal(model)
    assert str(loader.load_model(tiny_policy, Runtime(dtype="bfloat16")).dtype) == "torch.bfloat16"


def test_a_missing_folder_is_named_and_no_hub_is_asked(tmp_path: Path) -> None:
    for load in (loader.load_tokenizer, lambda folder: loader.load_model(folder, RUNTIME)):
        with pytest.raises(ValueError, match="absent: no such folder"):
            load(tmp_path / "absent")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: no tokenizer"):
        loader.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: no causal language model"):
        loader.load_model(tmp_path, RUNTIME)


@pytest.mark.parametrize("text", ["[]", '"x"', "null", "3"])
def test_json_of_another_form_is_refused_by_folder(copy: Path, tmp_path: Path, text: str) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        folder = shutil.copytree(copy, tmp_path / name)
        (folder / name).write_text(text)
        model_loads = (loader.load_outline, lambda folder: loader.load_model(folder, RUNTIME))
        for load in (loader.load_tokenizer,) if name.startswith("tokenizer") else model_loads:
            with pytest.raises(ValueError, match=f"{folder}: no "):
                load(folder)


def test_a_half_written_weight_file_is_named(copy: Path) -> None:
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=f"{copy}: no causal language model"):
        loader.load_model(copy, RUNTIME)


def test_a_missing_weight_is_refused_not_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    for load in (loader.load_outline, lambda folder: loader.load_model(folder, RUNTIME)):
        with pytest.raises(ValueError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
            load(copy)


def test_an_outline_wants_every_weight_and_no_tied_one_twice(copy: Path, tmp_path: Path) -> None:
    loader.load_outline(copy)  # the head is tied to the embeddings, and in no file
    make_policy(tmp_path / "untied", make_tokenizer(), tie_word_embeddings=False)
    loader.load_outline(tmp_path / "untied")
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    with pytest.raises(ValueError, match=f"{copy}: the weights lack model"):
        loader.load_outline(copy)


def test_pickled_weights_are_not_read(copy: Path) -> None:
    import torch

    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no causal language model"):
        loader.load_model(copy, RUNTIME)


def test_code_from_a_folder_is_not_run(copy: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    edit(copy, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ValueError, match="no causal language model"):
        loader.load_model(copy, RUNTIME)
    assert not trace.exists()


def test_a_tokenizer_without_padding_pads_with_its_end(copy: Path) -> None:
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = loader.load_tokenizer(copy)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_end_ids_come_from_the_tokenizer_and_the_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    tokenizer = loader.load_tokenizer(copy)
    assert loader.end_ids(loader.load_model(copy, RUNTIME), tokenizer) == {0, 5, tokenizer.eos_token_id}


def test_the_mark_after_a_turn_ends_one_though_the_model_names_another(copy: Path) -> None:
    """As base models do: their end is ``<|endoftext|>``, their template writes ``<|im_end|>``."""
    for name in ("tokenizer_config.json", "generation_config.json"):
        values = json.loads((copy / name).read_text())
        values |= {"eos_token": "<|endoftext|>"} if "tokenizer" in name else {"eos_token_id": 0}
        (copy / name).write_text(json.dumps(values))
    tokenizer = loader.load_tokenizer(copy)
    ends = loader.end_ids(loader.load_model(copy, RUNTIME), tokenizer)
    assert sorted(tokenizer.convert_ids_to_tokens(sorted(ends))) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, False),
        ({"model_type": "mistral", "sliding_window": 512}, True),  # as long as the window: never felt
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16}, True),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, False),
        ({"model_type": "gemma"}, False),  # plain causal in truth, not listed: the slower way is right for every model
    ],
)
def test_plain_causal_is_read_from_the_config(copy: Path, values: dict[str, object], plain: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((copy / "config.json").read_text())
    for key in ("architectures", "rope_parameters"):
        config.pop(key, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config | values)))
    assert loader.is_plain_causal(model) is plain


def test_an_unknown_engine_is_named(tiny_policy: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime\.engine: no engine named 'abacus'"):
        open_engine(tiny_policy, RUNTIME.model_copy(update={"engine": "abacus"}))


@pytest.mark.parametrize("device", ["nonsense", "cuda"])
def test_a_device_that_is_not_there_is_named(tiny_policy: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(ValueError, match=rf"runtime\.device: '{device}'"):
        loader.load_model(tiny_policy, Runtime(device=device))
