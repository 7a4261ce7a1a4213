"""Sections that say on what the pipeline runs: engines, trainers, devices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mempo.sections import Count, Section, server_urls

SERVERS = "runtime.vllm.servers"


def _servers(urls: Any) -> tuple[str, ...]:
    for place, url in enumerate(urls if isinstance(urls, list | tuple) else ()):
        if "@" in str(url):
            message = "no user and password in a URL; the environment's VLLM_API_KEY is the servers' key"
            raise ValueError(f"{SERVERS}.{place}: {message}")
    form = "http:// or https://, a host, a port up to 65535 and no more"
    return server_urls(urls, SERVERS, form, example="http://127.0.0.1:8000", path=False)


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
