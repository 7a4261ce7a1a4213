"""The one file that imports transformers: tokenizers and models from a local folder or a hub id.

No code from a repository is run (``trust_remote_code`` off) and no pickle is read (``use_safetensors`` on).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mempo import lora, storage
from mempo.prompts import chat_frame
from mempo.runtime import Runtime

# Decoders whose attention is plain causal and whose logits are the vocabulary head of the last hidden state. They take
# a ready 4D mask, own position ids and any cache. What is not listed here runs left-padded, which is slower.
PLAIN_CAUSAL = frozenset({"llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"})
TAKES_A_MASK = frozenset({"sdpa", "eager"})  # kernels that read a 4D mask; a trainer's model may run on another


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a policy. Raises ``ValueError`` naming the folder where there is none."""
    name = _checked(folder)
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # over files of another form, transformers raises anything
        raise ValueError(f"{name}: no tokenizer can be read from it: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(folder: Path | str, runtime: Runtime) -> Any:
    """A causal language model in eval mode, on ``runtime.device`` in ``runtime.dtype``, attention by sdpa.

    A folder with a LoRA adapter gives the model under it with the adapter, in float32, apart from the weights.
    Raises ``ValueError`` naming the folder where files are missing, damaged or incomplete: a weight that the files lack
    would otherwise be a random one, and naming ``runtime.device`` where this machine has no such device.
    """
    import torch

    if lora.is_adapter(folder):
        return lora.load(load_model(lora.base_of(folder), runtime), Path(folder))
    name = _checked(folder)
    transformers = _transformers()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype=getattr(torch, runtime.dtype),
            attn_implementation="sdpa",
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ValueError(f"{name}: no causal language model can be read from it: {_first_line(error)}") from error
    if report["missing_keys"]:
        raise ValueError(f"{name}: the weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
    try:
        return model.to(runtime.device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"runtime.device: {runtime.device!r}: {_first_line(error)}") from error


def load_outline(folder: Path | str) -> Any:
    """``config`` and ``generation_config`` of a policy without its weights: ``context_window`` and ``end_ids`` read it.

    Raises ``ValueError`` naming the folder where there is no config, and where files do not hold every weight: an
    engine that reads them by itself would go on with random ones.
    """
    name = _checked(lora.base_of(folder))
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        try:
            generation_config = transformers.GenerationConfig.from_pretrained(name)
        except OSError:  # as a model does that has no file for it
            generation_config = transformers.GenerationConfig.from_model_config(config)
    except Exception as error:
        raise ValueError(f"{name}: no model can be read from it: {_first_line(error)}") from error
    _check_weights(Path(name), config)
    return SimpleNamespace(config=config, generation_config=generation_config)


def _check_weights(folder: Path, config: Any) -> None:
    import torch
    from safetensors import SafetensorError, safe_open

    found: set[str] = set()
    for file in storage.weight_files(folder):
        try:
            with safe_open(file, "pt") as weights:
                found.update(weights.keys())
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole safetensors file: {error}") from error
    with torch.device("meta"):
        model = _transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    if missing := sorted(set(model.state_dict()) - found - tied):
        raise ValueError(f"{folder}: the weights lack {', '.join(missing[:3])}")


def context_window(model: Any) -> int:
    """Tokens the model can hold, prompt and response together."""
    return int(model.config.get_text_config().max_position_embeddings)


def is_plain_causal(model: Any) -> bool:
    """Whether every token attends to all tokens before it, within the whole window, to no others, by a mask we give."""
    config = model.config.get_text_config().to_dict()
    layers = set(config.get("layer_types") or ["full_attention"])
    sliding = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    within = sliding is None or sliding >= context_window(model)
    masked = model.config._attn_implementation in TAKES_A_MASK
    return config["model_type"] in PLAIN_CAUSAL and layers == {"full_attention"} and within and masked


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a turn: by the tokenizer, by the generation config, and the mark after a turn in the template."""
    configured = model.generation_config.eos_token_id
    listed = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    if tokenizer.chat_template:
        # Base models name another end than the one their chat template writes.
        listed += [token for token in chat_frame(tokenizer, "").eos_ids if token in tokenizer.added_tokens_decoder]
    return frozenset(int(token) for token in listed if token is not None)


def _checked(folder: Path | str) -> str:
    """A local folder as it is; a hub id only where it looks like one, so that a mistyped path asks no network."""
    path = Path(folder)
    if not path.is_dir() and (path.is_absolute() or len(path.parts) > 2 or path.exists()):
        raise ValueError(f"{folder}: no such folder")
    return str(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _transformers() -> Any:
    import torch

    if not torch.cuda.is_available():
        # transformers imports DeepSpeed where it is installed, which else tells every program that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers
