"""The sizes of a decoder, and the number of its weights, from its config alone: no weights, no network."""

from __future__ import annotations

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

    Raises ``ValueError`` naming what is missing, or the family that is not known.
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
    raise ValueError(f"model.path: {model.path}: neither a folder with a config.json nor a hub id of known sizes")


def _read(values: dict[str, Any], file: Path) -> Shape:
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type {family!r}; sizes are known of {', '.join(FAMILIES)}")
    heads = values["num_attention_heads"]
    biased = bool(values.get("attention_bias", False))
    return Shape(
        values["hidden_size"],
        values["intermediate_size"],
        values["num_hidden_layers"],
        heads,
        values.get("num_key_value_heads") or heads,
        values.get("head_dim") or values["hidden_size"] // heads,
        values["vocab_size"],
        values["max_position_embeddings"],
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
