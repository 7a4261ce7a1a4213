"""The sizes of a decoder, and the number of its weights, from its config alone: no weights, no network."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempo.config import Lora, Model
from mempo.storage import read_json

# Sizes of hub models that profiles use, from their config.json on the hub: "/" in the id is "--" in the file's name.
KNOWN = Path(__file__).parent / "models"
FAMILIES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like decoder: grouped queries, gated MLP, two RMSNorms a layer. ``vocab`` rows of the embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    window: int
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @property
    def query(self) -> int:
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear maps of one layer, by their name in transformers."""
        d, f = self.hidden, self.intermediate
        attention = {"q_proj": (d, self.query), "k_proj": (d, self.key), "v_proj": (d, self.key)}
        return attention | {"o_proj": (self.query, d), "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def shape_of(model: Model) -> Shape:
    """Of ``model.path``: a folder's config.json or a hub id that is known here; without one, of the small policy.

    Raises ``ValueError`` naming what is missing, or the file and the family or key that is not known.
    """
    if model.path is None:
        size = model.hidden_size // model.num_heads
        return Shape(
            model.hidden_size, model.intermediate_size, model.num_layers, model.num_heads, model.num_heads, size,
            model.vocab_size, model.window, tied=True, qkv_bias=True, out_bias=True,
        )  # fmt: skip
    files = [Path(model.path) / "config.json", KNOWN / f"{model.path.replace('/', '--')}.json"]
    for file in files:
        if file.is_file():
            return _read(read_json(file), file)
    told = "neither a hub id of known sizes nor a folder with a config.json"
    raise ValueError(f"model.path: {model.path}: {told} (`mempo convert` makes one, `make smollm2` that of SmolLM2)")


def _read(values: Any, file: Path) -> Shape:
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected a model's config, found {type(values).__name__}")
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type {family!r}; sizes are known of {', '.join(FAMILIES)}")

    def size(key: str, default: int | None = None) -> int:
        value = default if values.get(key) is None else values[key]
        if type(value) is not int or value < 1:
            raise ValueError(f"{file}: {key}: expected a whole number above 0, found {reprlib.repr(value)}")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    biased = bool(values.get("attention_bias", False))
    return Shape(
        hidden,
        size("intermediate_size"),
        size("num_hidden_layers"),
        heads,
        size("num_key_value_heads", heads),
        size("head_dim", hidden // heads),
        size("vocab_size"),
        size("max_position_embeddings"),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=biased or family == "qwen2",
        out_bias=biased,
        mlp_bias=bool(values.get("mlp_bias", False)),
    )


def num_parameters(shape: Shape) -> int:
    """V d (twice where the head is not tied) + layers (attention + 3 d f + 2 d) + d, biases where there are some."""
    d, f = shape.hidden, shape.intermediate
    biases = shape.qkv_bias * (shape.query + 2 * shape.key) + shape.out_bias * d + shape.mlp_bias * (2 * f + d)
    layer = sum(inputs * outputs for inputs, outputs in shape.linears.values()) + biases + 2 * d
    return shape.vocab * d * (1 if shape.tied else 2) + shape.layers * layer + d


def num_trained(shape: Shape, lora: Lora) -> int:
    """Weights that the rounds train: all, or rank (inputs + outputs) of each adapted linear map (arXiv 2106.09685)."""
    if lora.rank == 0:
        return num_parameters(shape)
    chosen = [dims for name, dims in shape.linears.items() if lora.targets == "all-linear" or name in lora.targets]
    return shape.layers * lora.rank * sum(inputs + outputs for inputs, outputs in chosen)
