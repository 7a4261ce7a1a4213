"""Runs inside vLLM's worker processes: the weights of another folder into the model that is there."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from mempo import lora, storage

STARTER = "MEMPO_VLLM_STARTER"  # the process id with which a worker ends


class WeightSync:
    """Becomes a base of vLLM's worker class (``worker_extension_cls``); called by ``collective_rpc``."""

    def load_policy(self: Any, folder: str) -> None:
        """vLLM's own ``reload_weights``, a LoRA adapter merged into its base; then what it forgets on a CPU.

        There a linear layer computes with a packed copy of its weights. The reload packs the layers that it finds in
        the files anew. A vocabulary head tied to the embeddings is in no file: it kept its first copy (vLLM 0.32).
        """
        if lora.is_adapter(folder):
            self.reload_weights(weights_iterator=lora.merged_weights(Path(folder)))
        else:
            self.reload_weights(weights_iterator=_weights(Path(folder)))
        for layer in self.get_model().modules():
            # A layer with a weight of size 0 has nothing but its packed copy, and the reload has just made it.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)


def _weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """vLLM's own reader takes the trainer's moments for weights."""
    from safetensors import safe_open

    for file in storage.weight_files(folder):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                yield name, weights.get_tensor(name)


def _end_with(starter: int) -> None:
    """vLLM 0.32 does not see that its starter was killed, and would keep the memory of a GPU for good."""
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(starter)], [], [])
    os._exit(1)


# vLLM imports this module in a worker before it loads a model: a start may take minutes.
if STARTER in os.environ:
    Thread(target=_end_with, args=(int(os.environ[STARTER]),), daemon=True).start()
