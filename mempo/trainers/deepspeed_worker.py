"""What every rank of the trainer ``deepspeed`` runs, under torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mempo import lora, proof, storage
from mempo.config import Lora, LossConfig, Optim
from mempo.engines import loader
from mempo.loss import merge_stats, token_logprobs
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import Objective, deepspeed_engine, state
from mempo.trainers.deepspeed_engine import MOMENTS
from mempo.trainers.deepspeed_trainer import START
from mempo.trainers.gradient import MicrobatchLoss, aligned, dot, learning_rate, passes
from mempo.trainers.mailbox import ERRORS, Mailbox
from mempo.trainers.policy import open_policy


class Rank:
    """One rank of the trainer; every method is called on all ranks at once. See ``DeepSpeedTrainer``."""

    def __init__(
        self, policy: Path, optim: Optim, loss: LossConfig, runtime: Runtime, temperature: float, adapter: Lora
    ) -> None:
        self._optim = optim
        opened = open_policy(policy, runtime, adapter, device="cpu")  # DeepSpeed moves it
        self._tokenizer, self._model = opened.tokenizer, opened.model
        self._parameters, self._base = opened.parameters, opened.base
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        module = MicrobatchLoss(self._model, loss, temperature, self._tokenizer.pad_token_id, autocast=False)
        self._shared = deepspeed_engine.Shared(module, self._parameters, optim, runtime)
        self._finite = torch.ones((), dtype=torch.bool, device=self._shared.device)
        for parameter in self._parameters.values():
            parameter.register_hook(self._watch)  # type: ignore[no-untyped-call]
        self._num_steps = state.restore(policy)
        self._shared.start_moments(self._num_steps)
        for name, field, value in state.moments(policy, shapes) if self._num_steps else ():
            if field != "step":
                self._shared.set_full(self._parameters[name], value, field)

    def step(self, samples: Sequence[Sample], *, objective: Objective) -> dict[str, float]:
        """See ``TorchTrainer.step``."""
        stats = self._gradient(samples, objective)
        rate = learning_rate(self._optim, self._num_steps)
        norm = self._shared.step(rate)
        if norm is None:
            raise FloatingPointError("the gradient of all samples together is not finite")
        self._num_steps += 1
        return stats | {"grad_norm": norm, "learning_rate": rate}

    def alignment(self, first: Sequence[Sample], second: Sequence[Sample]) -> dict[str, float]:
        """See ``Trainer``."""
        found = []
        for samples in (first, second):
            self._gradient(samples, "policy")
            found.append([self._shared.gradient_part(parameter) for parameter in self._parameters.values()])
            # A pass that is not finite, and a step, which is then dropped with all that was added up.
            self._shared.backward(samples[:1], "policy", last=True, scale=float("nan"))
            self._shared.step(0.0)
        one, two = found
        parts = self._shared.everyone([dot(one, one), dot(two, two), dot(one, two)])
        return aligned(*(sum(column) for column in zip(*parts, strict=True)))

    def save(self, *, folder: str, policy_version: int) -> dict[str, float]:
        """See ``Trainer``. All ranks gather, weight by weight; rank 0 writes."""
        weights = {name: self._shared.full(parameter) for name, parameter in self._parameters.items()}
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items() if self._num_steps else ():
            moments |= {f"{name}/{field}": self._shared.full(parameter, field) for field in MOMENTS}
            moments[f"{name}/step"] = torch.tensor(float(self._num_steps))
        token_ids, logprobs = self._probe()
        if self._shared.rank == 0:
            with storage.whole_folder(Path(folder)) as temporary:
                self._write_weights(temporary, weights)
                self._tokenizer.save_pretrained(temporary)
                proof.write(temporary, token_ids, logprobs)
                state.write(temporary, moments, policy_version=policy_version, num_steps=self._num_steps)
        return {}

    def _gradient(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Leave the gradient over all samples with DeepSpeed; the statistics of all ranks.

        Every rank makes every pass: one that has no samples in it takes a sample of weight 0.
        """
        nothing = replace(min(samples, key=lambda sample: len(sample.token_ids)), weight=0.0)
        shared = passes([len(s.token_ids) for s in samples], self._optim.tokens_per_microbatch, self._shared.ranks)
        stats: list[dict[str, float]] = []
        finite: list[Tensor] = []
        for parts in shared:
            mine = [samples[index] for index in parts[self._shared.rank]]
            self._finite.fill_(True)
            stats += self._shared.backward(mine or [nothing], objective, last=parts is shared[-1])
            finite.append(self._finite.clone())
        sound = self._shared.everyone(torch.stack(finite).tolist())
        bad = [
            i for k, parts in enumerate(shared) for rank, part in enumerate(parts) if not sound[rank][k] for i in part
        ]
        if bad:
            self._shared.step(0.0)  # drops it
            raise FloatingPointError(f"the gradient is not finite after samples {[samples[i].key for i in bad]}")
        own = merge_stats(stats)
        return merge_stats([dict(zip(own, row, strict=True)) for row in self._shared.everyone(list(own.values()))])

    def _watch(self, gradient: Tensor) -> None:
        self._finite.logical_and_(gradient.isfinite().all())

    @torch.no_grad()
    def _probe(self) -> tuple[list[int], list[float]]:
        token_ids = proof.probe_ids(self._tokenizer)[: loader.context_window(self._model) - 1]
        row = torch.tensor([token_ids], device=self._shared.device)
        logits = self._model(input_ids=row, use_cache=False).logits
        return token_ids, token_logprobs(logits, row)[0, 1:].tolist()

    def _write_weights(self, folder: Path, weights: dict[str, Tensor]) -> None:
        if self._base:
            lora.save(self._model, weights, folder, self._base)
            return
        gathered = {id(parameter): weights[name] for name, parameter in self._parameters.items()}
        entries = self._model.state_dict(keep_vars=True)  # tied weights stand under two names
        entries = {name: gathered.get(id(value), value) for name, value in entries.items()}
        self._model.save_pretrained(folder, state_dict=entries)
        self._model.config.dtype = torch.float32  # of what was written, not of the model here
        self._model.config.save_pretrained(folder)


def _open(folder: Path) -> Rank:
    start: dict[str, Any] = storage.read_json(folder / START)
    runtime = Runtime.model_validate(start["runtime"])
    deepspeed_engine.join(runtime, folder / "ranks")
    optim, loss = Optim.model_validate(start["optim"]), LossConfig.model_validate(start["loss"])
    adapter = Lora.model_validate(start["adapter"])
    return Rank(Path(start["policy"]), optim, loss, runtime, start["temperature"], adapter)


def main(folder: Path) -> None:
    """Command 0 is to open. A gradient that is not finite leaves all as it was; any other error ends the ranks."""
    threading.Thread(target=_end_with_parent, args=(folder, os.getppid()), daemon=True).start()
    mailbox = Mailbox(folder)
    speaks = os.environ["RANK"] == "0"
    rank: Rank | None = None
    for number in count():
        result: dict[str, float] = {}
        try:
            if rank is None:
                rank = _open(folder)
            else:
                call, samples, options = mailbox.read(number)
                result = getattr(rank, call)(*samples, **options)
        except tuple(ERRORS.values()) as error:
            if speaks:
                mailbox.refuse(number, error)
            if not isinstance(error, FloatingPointError):
                raise
        else:
            if speaks:
                mailbox.answer(number, result)


def _end_with_parent(folder: Path, agent: int) -> None:
    """Standard input is the parent's pipe: it ends when the parent lets go of it, or ends in whatever way.

    torchrun's ``agent`` would go on for minutes, to agree with nobody on an end through files that are gone.
    """
    sys.stdin.buffer.read()
    if os.environ["RANK"] == "0":
        if os.getppid() == agent:  # else it ended, and its number may be another's
            os.kill(agent, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
