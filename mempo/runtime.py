"""Sections that say on what the pipeline runs: engines, trainers, devices."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mempo.sections import Count, Section

SERVERS = "runtime.vllm.servers"
AS_IN = f"as in {SERVERS}: [http://127.0.0.1:8000]"
BASE_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:]+\]|[^/?#\s:\[\]]+)(?::([0-9]{1,5}))?/?")  # scheme, host, port


def _servers(urls: Any) -> tuple[str, ...]:
    # No message repeats a URL: there may be a secret in it.
    if not isinstance(urls, list | tuple):
        raise ValueError(f"{SERVERS}: expected a list, {AS_IN}")
    addresses = [_address(str(url), f"{SERVERS}.{place}") for place, url in enumerate(urls)]
    for place, address in enumerate(addresses):
        if address in addresses[:place]:
            raise ValueError(f"{SERVERS}.{place}: this server stands in the list already")
    return tuple(str(url) for url in urls)


def _address(url: str, key: str) -> tuple[str, int]:
    if "@" in url:
        raise ValueError(f"{key}: no user and password in a URL; the environment's VLLM_API_KEY is the servers' key")
    found = BASE_URL.fullmatch(url)
    port = int(found[3] or {"http": 80, "https": 443}[found[1]]) if found else 0
    if not found or not 0 < port <= 65535:
        raise ValueError(f"{key}: expected http:// or https://, a host, a port up to 65535 and no more, {AS_IN}")
    return found[2].lower(), port


class VLLM(Section):
    """Engine ``vllm``. ``servers``: base URLs of running vLLM servers; none: one engine in this process.

    ``kv_cache_gib``: its cache on a CPU; ``gpu_memory_utilization``: the share of a GPU's memory that it takes.
    ``deadline_s``: the longest that one turn may take, retries on other servers included.
    """

    servers: Annotated[tuple[str, ...], BeforeValidator(_servers)] = ()
    tensor_parallel: Count = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_gib: Count = 1
    deadline_s: Annotated[float, Field(gt=0)] = 600.0


class DeepSpeed(Section):
    """Trainer ``deepspeed``: ``ranks`` processes on this machine share optimiser state (ZeRO ``stage`` 1), gradients
    (2), weights (3). ``offload``: optimiser state and, at stage 3, weights live in the memory of the CPU.
    """

    ranks: Count = 1
    stage: Literal[1, 2, 3] = 2
    offload: bool = False


class Runtime(Section):
    """``vllm`` and ``deepspeed`` say where and how, and change no result beyond floating-point noise."""

    engine: Literal["hf", "vllm"] = "hf"
    trainer: Literal["torch", "deepspeed"] = "torch"
    num_threads: Count = 1
    max_batch: Count = 128
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    vllm: VLLM = VLLM()
    deepspeed: DeepSpeed = DeepSpeed()
