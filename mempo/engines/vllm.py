"""Engine ``vllm`` in this process: requests join and leave a running batch; none waits for another's tool.

vLLM's asynchronous engine belongs to one event loop: it has its own here, whatever loops the steps of a run bring.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mempo import lora, proof, vllm_program as program
from mempo.engines import BaseScorer, Generation, Sampling, loader, policy_version, swapped, vllm_requests as requests
from mempo.engines.background import BackgroundLoop
from mempo.engines.decoding import make_stops
from mempo.engines.vllm_replies import Places
from mempo.engines.vllm_worker import STARTER
from mempo.packing import TokenTree
from mempo.runtime import Runtime


class VLLMEngine:
    """Runs a policy in processes that vLLM starts.

    The window is one token shorter than the model's: vLLM scores a prompt only where it could sample one more token.
    """

    continuous = True

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        _import_vllm()
        self._runtime = runtime
        self._llm: Any = None
        self._kind: Any = None  # architecture and vocabulary of what runs
        self._names = itertools.count()
        self._loop = BackgroundLoop("vllm")
        atexit.register(self.close)
        try:
            self.load(folder)
        except BaseException:
            self.close()
            raise

    def load(self, policy: Path) -> None:
        """See ``Engine``. In place where the architecture and the tokenizer are those of the policy that runs."""
        tokenizer, outline = loader.load_tokenizer(policy), loader.load_outline(policy)
        kind = (outline.config.to_dict() | {"_name_or_path": None}, tokenizer.get_vocab())
        if self._llm is not None and (self._llm.errored or kind != self._kind):
            self._stop()
        self.tokenizer: Any = tokenizer
        self.window = loader.context_window(outline) - 1
        self._kind = kind
        self._end_ids = loader.end_ids(outline, tokenizer)
        self._stops_for = cache(partial(make_stops, tokenizer, self._end_ids))
        base = lora.base_of(policy)
        if self._llm is None:
            self._loop.run(self._start(base))
        self._loop.run(self._change(policy))
        self._policy, self._base = policy, base
        self.policy_version = policy_version(policy)
        proof.prove(self, policy, self._runtime.dtype)

    def base(self) -> BaseScorer | None:
        """See ``Engine``: the weights of the base are loaded in place for each call, then the policy's."""
        other = self._base != self._policy
        return BaseScorer(self, partial(swapped, self, self._policy, self._base)) if other else None

    def sleep(self) -> None:
        """A GPU gives back the weights and the cache. A CPU keeps them: a start takes longer than a round of a tiny
        policy, and a change of weights in place takes none.
        """
        if self._llm is not None and self._llm.model_config.enable_sleep_mode:
            self._loop.run(self._llm.sleep(level=2))

    async def generate(self, prompt_ids: list[int], *, seed: int, sampling: Sampling) -> Generation:
        """One turn after ``prompt_ids``. Raises ``ValueError`` where the window has no room for a single token."""
        room = requests.room(prompt_ids, sampling, self.window)
        fields = requests.sampling_fields(sampling, seed=seed, max_tokens=room, end_ids=self._end_ids)
        made = (await self._loop.ask(self._ask(prompt_ids, fields))).outputs[0]
        logprobs = [place[token].logprob for place, token in zip(made.logprobs, made.token_ids, strict=True)]
        return requests.generation(made.token_ids, logprobs, self._stops_for(sampling.stop), max_tokens=room)

    def logprobs(
        self,
        trees: Sequence[TokenTree],
        *,
        temperature: float = 1.0,
        mode: Literal["packed", "padded"] = "packed",
    ) -> list[list[float]]:
        """See ``Engine``. Both modes are a prompt for each path of a tree that is no part of another path.

        Raises ``ValueError`` for a temperature other than 1, a target at a root, a tree deeper than the window.
        """
        return requests.scored(trees, self._score, temperature=temperature, window=self.window)

    def close(self) -> None:
        """End vLLM's processes and the thread. The end of the program does it too."""
        self._stop()
        self._loop.close()
        atexit.unregister(self.close)

    async def _start(self, policy: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.utils.system_utils import set_env_var
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        runtime, on_cpu = self._runtime, current_platform.is_cpu()
        if on_cpu != (runtime.device == "cpu"):
            kind = current_platform.device_type
            raise ValueError(f"runtime.device: {runtime.device!r} is asked for, and this vLLM runs on {kind!r}")
        arguments = AsyncEngineArgs(
            model=str(policy),
            load_format="dummy",  # weights come in one way alone, ``_change``
            dtype=runtime.dtype,
            max_model_len=self.window + 1,
            max_num_seqs=runtime.max_batch,
            max_num_batched_tokens=program.step_tokens(runtime, self.window + 1, on_cpu=on_cpu),
            enable_chunked_prefill=not on_cpu,
            # vLLM would start a second process on a CPU, to bind its threads to cores; it costs as long as the first.
            distributed_executor_backend=UniProcExecutor if on_cpu and runtime.vllm.tensor_parallel == 1 else None,
            tensor_parallel_size=runtime.vllm.tensor_parallel,
            gpu_memory_utilization=runtime.vllm.gpu_memory_utilization,
            kv_cache_memory_bytes=runtime.vllm.kv_cache_gib * program.GIB if on_cpu else None,
            enforce_eager=on_cpu,
            enable_prefix_caching=True,
            enable_sleep_mode=not on_cpu,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from; of temperature 1 when greedy
            worker_extension_cls="mempo.engines.vllm_worker.WeightSync",
            trust_remote_code=False,
            disable_log_stats=True,
        )
        # For the processes that start.
        with set_env_var("OMP_NUM_THREADS", str(runtime.num_threads)), set_env_var(STARTER, str(os.getpid())):
            self._llm = AsyncLLM.from_engine_args(arguments)

    async def _change(self, policy: Path) -> None:
        """Other weights in place; what the cache holds of the former ones goes."""
        asleep = await self._llm.is_sleeping()
        if asleep:
            await self._llm.wake_up(["weights"])
        await self._llm.collective_rpc("load_policy", args=(str(policy),))
        if asleep:
            await self._llm.wake_up(["kv_cache"])
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError(f"{policy}: the engine still runs requests of policy version {self.policy_version}")

    async def _ask(self, prompt_ids: list[int], fields: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
        answers = self._llm.generate({"prompt_token_ids": prompt_ids}, wanted, str(next(self._names)))
        return [answer async for answer in answers][-1]

    def _score(self, prompts: list[list[int]]) -> list[Places]:
        answers = self._loop.run(self._ask_all(prompts, requests.scoring_fields()))
        return [[p and {t: v.logprob for t, v in p.items()} for p in answer.prompt_logprobs] for answer in answers]

    async def _ask_all(self, prompts: Sequence[list[int]], fields: dict[str, Any]) -> list[Any]:
        return await asyncio.gather(*(self._ask(prompt, fields) for prompt in prompts))

    def _stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=2)
            self._loop.cancel_all()


def _import_vllm() -> None:
    for name, value in ({"VLLM_LOGGING_LEVEL": "ERROR"} | program.QUIET).items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        hint = "make install-vllm, on a GPU make install-gpu"
        raise ValueError(f"runtime.engine: vllm is not installed here: {hint}") from error
