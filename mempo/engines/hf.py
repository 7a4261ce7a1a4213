"""Engine ``hf``: a transformers model in this process, with a decoding loop and a scoring pass of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from mempo import lora, proof
from mempo.engines import BaseScorer, Generation, Sampling, loader, policy_version
from mempo.engines.decoders import PaddedDecoder, PlainDecoder
from mempo.engines.decoding import Decoder, Row, Stops, decode, make_stops, room
from mempo.engines.scoring import check_targets, packed_logprobs, padded_logprobs
from mempo.packing import TokenTree
from mempo.runtime import Runtime

logger = logging.getLogger(__name__)


class HFEngine:
    """Runs the policy in ``folder``. Requests made in one tick of the event loop are decoded together, in their order.

    Where the model's attention is not plain causal, ``packed`` scoring and shared prompts fall back to padded rows.
    """

    continuous = False

    def __init__(self, folder: Path | str, runtime: Runtime) -> None:
        torch.set_num_threads(runtime.num_threads)
        self._runtime = runtime
        self.load(Path(folder))

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> HFEngine:
        """Over a model that another program has loaded and may be training; its weights are read as they are then."""
        engine = cls.__new__(cls)
        engine._runtime = Runtime()
        engine._hold(model, tokenizer, 0, engine._runtime.max_batch)
        return engine

    def _hold(self, model: Any, tokenizer: Any, policy_version: int, max_batch: int) -> None:
        self.policy_version = policy_version
        self.tokenizer: Any = tokenizer
        self.model: Any = model
        self.window = loader.context_window(model)
        self.plain_causal = loader.is_plain_causal(model)
        self._max_batch = max_batch
        self._stops: dict[tuple[str, ...], Stops] = {}
        self._pending: list[tuple[Row, Sampling, asyncio.Future[Generation]]] = []

    def load(self, policy: Path) -> None:
        """See ``Engine``."""
        self.sleep()
        tokenizer = loader.load_tokenizer(policy)
        model = loader.load_model(policy, self._runtime)
        self._hold(model, tokenizer, policy_version(policy), self._runtime.max_batch)
        if not self.plain_causal:
            logger.warning("%s: attention of %s is not plain causal: padded rows", policy, model.config.model_type)
        proof.prove(self, policy, self._runtime.dtype)

    def base(self) -> BaseScorer | None:
        """See ``Engine``: with the adapter switched off."""
        return BaseScorer(self, partial(lora.switched_off, self.model)) if lora.has_adapter(self.model) else None

    def sleep(self) -> None:
        """Free the model."""
        self.model = None

    async def generate(self, prompt_ids: list[int], *, seed: int, sampling: Sampling) -> Generation:
        """One turn after ``prompt_ids``. Raises ``ValueError`` where the window has no room for a single token."""
        left = room(prompt_ids, sampling, self.window)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((Row(list(prompt_ids), seed, left), sampling, future))
        return await future

    def logprobs(
        self,
        trees: Sequence[TokenTree],
        *,
        temperature: float = 1.0,
        mode: Literal["packed", "padded"] = "packed",
    ) -> list[list[float]]:
        """Log-probability of each tree's targets given their ancestors, of softmax(logits / temperature), in nats.

        Raises ``ValueError`` for a target at a root and for a tree deeper than the window.
        """
        check_targets(trees)
        for number, tree in enumerate(trees):
            if len(tree) > self.window and max(tree.positions()) >= self.window:
                raise ValueError(f"tree {number}: deeper than the window of {self.window} tokens")
        layout = packed_logprobs if mode == "packed" and self.plain_causal else padded_logprobs
        training = self.model.training  # of a model that another program trains: layers that recompute keep no cache
        try:
            with torch.inference_mode():
                return layout(self.model.eval(), trees, temperature)
        finally:
            self.model.train(training)

    def close(self) -> None:
        """Free the model."""
        self.sleep()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        by_sampling: dict[Sampling, list[tuple[Row, asyncio.Future[Generation]]]] = {}
        for row, sampling, future in pending:
            if not future.done():  # its caller may have gone
                by_sampling.setdefault(sampling, []).append((row, future))
        try:
            for sampling, requests in by_sampling.items():
                for start in range(0, len(requests), self._max_batch):
                    self._run(requests[start : start + self._max_batch], sampling)
        except BaseException as signal:  # that ends the program: the event loop would log it, and all would wait on
            for _, _, future in pending:
                if not future.done():
                    future.set_exception(signal)

    def _run(self, requests: list[tuple[Row, asyncio.Future[Generation]]], sampling: Sampling) -> None:
        decoder: Decoder = PlainDecoder(self.model) if self.plain_causal else PaddedDecoder(self.model)
        try:
            decode(decoder, [row for row, _ in requests], sampling, self._stops_for(sampling.stop))
        except Exception as error:  # hand it to those who wait: raised here it would end in the event loop's log
            for _, future in requests:
                future.set_exception(error)
            return
        for row, future in requests:
            future.set_result(row.generation())

    def _stops_for(self, texts: tuple[str, ...]) -> Stops:
        if texts not in self._stops:
            self._stops[texts] = make_stops(self.tokenizer, loader.end_ids(self.model, self.tokenizer), texts)
        return self._stops[texts]
