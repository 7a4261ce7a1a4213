"""Engine ``vllm`` over HTTP: servers that run elsewhere, started by ``mempo serve``. Nothing here imports vLLM.

Every answer names the weights that made it, by a name that this engine gave when it loaded them: a server that was
started again, or that another program loads, answers under another name, and is loaded and proven before it is asked.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import os
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mempo import lora, proof
from mempo.engines import (
    BaseScorer,
    Generation,
    Sampling,
    loader,
    policy_version,
    swapped,
    vllm_replies as replies,
    vllm_requests as requests,
)
from mempo.engines.background import BackgroundLoop
from mempo.engines.decoding import make_stops
from mempo.engines.routing import Ask, NoServer, Pool, Server
from mempo.packing import TokenTree
from mempo.runtime import Runtime

GENERATE = "/inference/v1/generate"
OPENING_S = 60.0  # for the first answer of any server


class VLLMServers:
    """The policy in a folder that every server of ``runtime.vllm.servers`` sees under the same path.

    The window is one token shorter than the model's: vLLM scores a prompt only where it could sample one more token.
    """

    continuous = True

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loop = BackgroundLoop("vllm-servers")  # steps come with an event loop each, or with none
        self._thread_of_proofs = ThreadPoolExecutor(1)  # a proof waits for what runs in the loop
        self._pool: Pool = self._loop.run(self._open())
        self._ask: Ask = self._pool.ask
        atexit.register(self.close)
        try:
            self._take(folder, min(OPENING_S, runtime.vllm.deadline_s))
        except BaseException as error:
            self.close()
            if isinstance(error, NoServer):  # a mistyped URL more likely than a server that will come: no retry
                raise ValueError(f"{error}; `mempo serve` starts some") from None
            raise

    def load(self, policy: Path) -> None:
        """See ``Engine``. Waits for what is in flight; servers that do not answer now get the weights when they do.

        Raises ``StaleWeights`` where one does not run them, ``NoServer``, ``ValueError`` naming the URL.
        """
        self._take(policy, self._runtime.vllm.deadline_s)

    def _take(self, policy: Path, deadline_s: float) -> None:
        self.tokenizer: Any = loader.load_tokenizer(policy)
        outline = loader.load_outline(policy)
        self.window = loader.context_window(outline) - 1
        self._vocabulary = int(outline.config.get_text_config().vocab_size)
        self._end_ids = loader.end_ids(outline, self.tokenizer)
        self._stops_for = cache(partial(make_stops, self.tokenizer, self._end_ids))
        self.policy_version = policy_version(policy)
        self._policy, self._base = policy, lora.base_of(policy)
        self._weights = f"{self.policy_version}-{uuid.uuid4().hex}"
        self._loop.run(self._pool.renew(deadline_s))

    def base(self) -> BaseScorer | None:
        """See ``Engine``: the servers load the base's weights for each call, then the policy's."""
        other = self._base != self._policy
        return BaseScorer(self, partial(swapped, self, self._policy, self._base)) if other else None

    def sleep(self) -> None:
        """Servers keep their memory: it is not the trainer's."""

    async def generate(self, prompt_ids: list[int], *, seed: int, sampling: Sampling) -> Generation:
        """One turn after ``prompt_ids``. Raises ``ValueError`` where the window has no room for a single token."""
        room = requests.room(prompt_ids, sampling, self.window)
        fields = requests.sampling_fields(sampling, seed=seed, max_tokens=room, end_ids=self._end_ids)
        body = {"token_ids": prompt_ids, "sampling_params": fields}
        stops = self._stops_for(sampling.stop)

        def read(content: bytes) -> Generation:
            token_ids, logprobs = replies.sampled(content, self._weights, self._vocabulary)
            return requests.generation(token_ids, logprobs, stops, max_tokens=room)

        return await self._loop.ask(self._ask(GENERATE, body, read))

    def logprobs(
        self,
        trees: Sequence[TokenTree],
        *,
        temperature: float = 1.0,
        mode: Literal["packed", "padded"] = "packed",
    ) -> list[list[float]]:
        """See ``Engine``; both modes are one prompt for each path of a tree, spread over the servers.

        Raises ``ValueError`` for a temperature other than 1, a target at a root, a tree deeper than the window.
        """
        return requests.scored(trees, self._score, temperature=temperature, window=self.window)

    def close(self) -> None:
        """End the connections and the thread. The servers go on."""
        atexit.unregister(self.close)
        if not self._loop.closed:
            self._loop.run(self._pool.close())
            self._thread_of_proofs.shutdown()
            self._loop.close()

    def _score(self, prompts: list[list[int]]) -> list[replies.Places]:
        return self._loop.run(self._ask_all(prompts))

    async def _ask_all(self, prompts: list[list[int]]) -> list[replies.Places]:
        def one(prompt: list[int]) -> Coroutine[Any, Any, replies.Places]:
            body = {"token_ids": prompt, "sampling_params": requests.scoring_fields()}
            return self._ask(GENERATE, body, lambda content: replies.scored(content, self._weights, prompt))

        tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # where one failed, the others are not waited for
                task.cancel()

    async def _open(self) -> Pool:
        key = os.environ.get("VLLM_API_KEY")
        return Pool(
            list(dict.fromkeys(url.rstrip("/") for url in self._runtime.vllm.servers)),
            self._prepare,
            deadline_s=self._runtime.vllm.deadline_s,
            max_inflight=self._runtime.max_batch,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def _prepare(self, server: Server) -> None:
        """The server runs this policy, and has proven it on the probe prompt, by itself."""
        pool, weights = self._pool, self._weights
        if replies.weight_version(await pool.send(server, "/weight_info", method="GET")) == weights:
            return
        one = self._alone(server)
        await pool.send(server, "/update_weight_version", {"new_version": one._weights})
        await self._load(server)
        if not replies.cache_was_reset(await pool.send(server, "/reset_prefix_cache")):
            raise replies.Unfinished("other requests hold the prefix cache of the former weights")
        try:
            prove = partial(proof.prove, one, self._policy, self._runtime.dtype)
            await asyncio.get_running_loop().run_in_executor(self._thread_of_proofs, prove)
        except proof.StaleWeights as error:
            raise proof.StaleWeights(f"{server.url}: {error}") from None
        await pool.send(server, "/update_weight_version", {"new_version": weights})

    async def _load(self, server: Server) -> None:
        folder = str(self._policy.absolute())
        try:
            await self._pool.send(server, "/collective_rpc", {"method": "load_policy", "args": [folder]})
        except replies.ServerError as error:
            await self._pool.healthy(server)  # one that is going down is tried again
            raise ValueError(
                f"{server.url}: it cannot load {folder}, which it must see under this path: {error}"
            ) from None

    def _alone(self, server: Server) -> VLLMServers:
        """This engine over one server, past the router, while its weights have no name that is used elsewhere."""
        one = copy.copy(self)
        one._ask = self._pool.only(server)
        one._weights = f"{self._weights}-unproven"
        return one
