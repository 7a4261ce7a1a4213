"""A pretrained model from a GGUF file, as an ordinary Hugging Face folder (``mempo convert``).

A GGUF file holds quantised weights: the folder holds the float32 numbers that they stand for, not the original ones.
"""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mempo.storage import whole_folder


def find_gguf(source: str) -> Path:
    """``source`` itself where it is a file, else the one .gguf file of the installed package ``source``.

    The package is looked at, not imported. Raises ``ValueError``.
    """
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise ValueError(f"{source}: no such file")
        return Path(source)
    spec = find_spec(source) if source.isidentifier() else None
    folders = (spec and spec.submodule_search_locations) or []
    found = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise ValueError(f"{source}: expected a .gguf file, or an installed package that holds one; {len(found)} found")
    return found[0]


def load_gguf(file: Path) -> tuple[Any, Any]:
    """Model (float32, eval mode) and tokenizer as transformers' GGUF loader reads them.

    Raises ``ValueError`` where it is no GGUF file that the loader knows, or ``gguf`` or ``accelerate`` is missing.
    """
    import torch
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (ImportError, OSError, ValueError, KeyError, struct.error) as error:
        raise ValueError(f"{file}: {str(error).strip().splitlines()[0]}") from error
    return model.eval(), tokenizer


def convert(file: Path, folder: Path) -> Path:
    """Write config, safetensors weights, tokenizer and chat template of ``file``; ``folder`` appears whole.

    Raises ``ValueError`` where it is there already: nothing is replaced.
    """
    import transformers

    if folder.exists():
        raise ValueError(f"{folder}: is there already; remove it, or name another folder")
    quantised, tokenizer = load_gguf(file)
    values = quantised.config.to_dict()
    # With it, save_pretrained refuses: it takes the model for one that still holds packed weights.
    values.pop("quantization_config", None)
    config = type(quantised.config).from_dict(values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    with whole_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder
