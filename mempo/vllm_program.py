"""How a vLLM server is started: its options and its environment. Pure.

The endpoints that change weights ask for no key: such a server is for programs that may do anything with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from mempo.runtime import Runtime

GIB = 2**30
MAX_STEP_TOKENS = 2048  # scoring makes the logits of all that one step reads: of 150,000 numbers each, 1.2 GB
# Nothing is asked of the network, and nothing told to it.
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines of a machine sit on the same cores
    "HF_HUB_OFFLINE": "1",
}


def step_tokens(runtime: Runtime, window: int, *, on_cpu: bool) -> int:
    """Tokens of one step (``max_num_batched_tokens``); a CPU reads every prompt whole, ``window`` is the model's.

    There a seeded request whose prompt is read in pieces ends vLLM 0.32: it sets the generator's offset back, and
    generators of the CPU have none.
    """
    return max(MAX_STEP_TOKENS, runtime.max_batch, window if on_cpu else 0)


def command(model: Path, runtime: Runtime, *, window: int, host: str, port: int) -> list[str]:
    """The program that serves ``model``. Sampling is as in the process: see docs/engines.md."""
    cpu = runtime.device == "cpu"
    on_cpu = ["--enforce-eager", "--no-enable-chunked-prefill"]  # see ``step_tokens``
    on_cpu += ["--kv-cache-memory-bytes", str(runtime.vllm.kv_cache_gib * GIB)]
    if runtime.vllm.tensor_parallel == 1:  # or a second process is started, to bind threads to cores
        on_cpu += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    options = {
        "--model": model,
        "--host": host,
        "--port": port,
        "--dtype": runtime.dtype,
        "--seed": 0,
        "--max-model-len": window,
        "--max-num-seqs": runtime.max_batch,
        "--max-num-batched-tokens": step_tokens(runtime, window, on_cpu=cpu),
        "--tensor-parallel-size": runtime.vllm.tensor_parallel,
        "--gpu-memory-utilization": runtime.vllm.gpu_memory_utilization,
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "mempo.engines.vllm_worker.WeightSync",
    }
    flags = ["--enable-prefix-caching", "--enable-scale-out", "--disable-uvicorn-access-log", "--disable-log-stats"]
    pairs = [str(part) for option in options.items() for part in option]
    # Not `vllm serve`: the command fails where the package is the CPU build.
    program = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    return [*program, *pairs, *flags, *(on_cpu if cpu else ())]


def environment(runtime: Runtime, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Of server ``index``: its own GPUs, nothing asked of the network, and the endpoints that change weights.

    Raises ``ValueError`` where CUDA_VISIBLE_DEVICES names too few; where it is set and empty there are none.
    """
    return {
        **inherited,
        **({} if runtime.device == "cpu" else _devices(runtime.vllm.tensor_parallel, index, inherited)),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": inherited.get("VLLM_LOGGING_LEVEL", "WARNING"),
        **QUIET,
        "OMP_NUM_THREADS": str(runtime.num_threads),
        "PYTHONUNBUFFERED": "1",  # else a log ends with what was printed before the error
    }


def _devices(size: int, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
    all_of_them = ",".join(str(number) for number in range((index + 1) * size))
    named = [name for name in inherited.get("CUDA_VISIBLE_DEVICES", all_of_them).split(",") if name.strip()]
    devices = named[index * size : (index + 1) * size]
    if len(devices) < size:
        raise ValueError(f"CUDA_VISIBLE_DEVICES names {len(named)} GPUs, {(index + 1) * size} are needed")
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
