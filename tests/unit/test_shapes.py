"""Sizes of known models, and the count of weights against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mempo.config import Lora, Model
from mempo.shapes import KNOWN, num_parameters, num_trained, shape_of


def test_qwen_7b_by_hand() -> None:
    shape = shape_of(Model(path="Qwen/Qwen2.5-7B-Instruct"))
    # embedding and head 2 x 152064 x 3584 = 1,089,994,752; a layer: q, o 2 x 3584 x 3584 = 25,690,112, k, v 2 x 3584 x
    # 512 = 3,670,016, their biases 3584 + 2 x 512 = 4,608, MLP 3 x 3584 x 18944 = 203,685,888, norms 7,168
    layer = 25_690_112 + 3_670_016 + 4_608 + 203_685_888 + 7_168
    assert num_parameters(shape) == 1_089_994_752 + 28 * layer + 3_584 == 7_615_616_512


@pytest.mark.parametrize("file", sorted(KNOWN.glob("*.json")), ids=lambda file: file.stem)
def test_counts_equal_those_of_the_models_themselves(file: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(file.read_text()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = num_parameters(shape_of(Model(path=file.stem.replace("--", "/"))))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("extra", [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 16}])
def test_a_folder_counts_as_its_model(tmp_path: Path, extra: dict[str, object]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300, tie_word_embeddings=False, **extra)
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    assert num_parameters(shape_of(Model(path=str(tmp_path)))) == sum(p.numel() for p in model.parameters())


def test_the_small_policy_counts_as_it_is_built(tmp_path: Path) -> None:
    from mempo import scratch

    options = Model(vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, window=64)
    bpe = scratch.train_bpe(["a b c"], 300)
    bpe.save(str(tmp_path / "tokenizer.json"))
    scratch.build_policy(options, tmp_path / "tokenizer.json", tmp_path / "policy", 0)
    built = Model(path=str(tmp_path / "policy"))
    exact = options.model_copy(update={"vocab_size": bpe.get_vocab_size()})
    assert shape_of(built) == shape_of(exact)


def test_adapters_by_hand() -> None:
    shape = shape_of(Model(hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, window=64))
    # q and v are 8 x 8: rank 4 x (8 + 8) each; all seven: 4 x 16 for attention, 3 x 24 for the MLP
    assert num_trained(shape, Lora(rank=4, targets=("q_proj", "v_proj"))) == 2 * 4 * 2 * 16
    assert num_trained(shape, Lora(rank=4)) == 2 * 4 * (4 * 16 + 3 * 24)
    assert num_trained(shape, Lora()) == num_parameters(shape)


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: nobody/nothing: neither"):
        shape_of(Model(path="nobody/nothing"))
    with pytest.raises(ValueError, match=r"smollm2/pretrained: .*`mempo convert` makes one, `make smollm2`"):
        shape_of(Model(path=str(tmp_path / "smollm2" / "pretrained")))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="model_type 'mamba'; sizes are known of llama"):
        shape_of(Model(path=str(tmp_path)))


SIZES = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([], "expected a model's config, found list"),
        (SIZES | {"hidden_size": None}, "hidden_size: expected a whole number above 0, found None"),
        (SIZES | {"num_attention_heads": 0}, "num_attention_heads: expected a whole number above 0, found 0"),
        (SIZES | {"vocab_size": "300"}, "vocab_size: expected a whole number above 0, found '300'"),
        (SIZES | {"num_key_value_heads": 1.5}, "num_key_value_heads: expected a whole number above 0, found 1.5"),
    ],
)
def test_a_config_without_sizes_is_named_with_the_key(tmp_path: Path, values: object, told: str) -> None:
    known = values | {"model_type": "llama"} if isinstance(values, dict) else values
    (tmp_path / "config.json").write_text(json.dumps(known))
    with pytest.raises(ValueError) as caught:
        shape_of(Model(path=str(tmp_path)))
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {told}"
