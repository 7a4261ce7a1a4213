"""A policy made ready to be trained: what all trainers do before their optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from mempo import lora
from mempo.config import Lora
from mempo.engines import loader
from mempo.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Policy:
    """``parameters``: what is trained, by name. ``base``: the folder under the LoRA adapter, where there is one."""

    tokenizer: Any
    model: Any
    parameters: dict[str, Parameter]
    base: Path | None


def open_policy(folder: Path, runtime: Runtime, adapter: Lora, *, device: str) -> Policy:
    """The policy in ``folder`` on ``device``, in float32; the weights under an adapter in ``runtime.dtype``.

    Raises ``ValueError`` where its logits are more than its vocabulary head.
    """
    tokenizer = loader.load_tokenizer(folder)
    dtype = runtime.dtype if adapter.rank else "float32"
    model = loader.load_model(folder, runtime.model_copy(update={"device": device, "dtype": dtype}))
    parameters = lora.trainable(model, folder, adapter)
    check_head(model)
    if runtime.gradient_checkpointing:
        checkpoint_layers(model)
    base = lora.base_of(folder) if adapter.rank else None
    return Policy(tokenizer, model, parameters, base)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Some models bend their logits after the vocabulary head; the gradient here would be of another distribution."""
    ids = torch.arange(min(8, model.get_output_embeddings().weight.shape[0]), device=model.device)[None]
    direct = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(direct, model(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-4):
        raise ValueError(f"{model.config.model_type}: its logits are more than its vocabulary head")


def checkpoint_layers(model: Any) -> None:
    """Keep only the inputs of layers and compute the rest again in the backward pass: less memory, a third slower.

    transformers' own switch asks for training mode, with which dropout comes.
    """
    layers = [module for module in model.modules() if hasattr(type(module), "gradient_checkpointing")]
    if not layers:
        raise ValueError(f"runtime.gradient_checkpointing: {model.config.model_type} has no layers made for it")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
