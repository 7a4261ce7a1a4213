"""Trainer ``torch``: one process, AdamW, the same gradient whatever the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mempo import lora, proof, storage
from mempo.config import Lora, LossConfig, Optim
from mempo.engines import engine_of
from mempo.loss import merge_stats
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import Objective, state
from mempo.trainers.gradient import (
    MicrobatchLoss,
    aligned,
    check_samples,
    decay_groups,
    dot,
    learning_rate,
    microbatches,
)
from mempo.trainers.policy import open_policy


class TorchTrainer:
    """Weights that are trained and moments are float32; ``runtime.dtype`` bfloat16 means that the forward pass is
    autocast to it, and that the weights under a LoRA adapter are held in it.

    The model stays in eval mode: dropout would make the trainer's log-probs differ from the sampler's.
    """

    def __init__(
        self,
        policy: Path,
        optim: Optim,
        loss: LossConfig,
        runtime: Runtime,
        *,
        temperature: float = 1.0,
        adapter: Lora = Lora(),
    ) -> None:
        torch.set_num_threads(runtime.num_threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        opened = open_policy(policy, runtime, adapter, device=runtime.device)
        self.tokenizer: Any = opened.tokenizer
        self.model: Any = opened.model
        self.parameters, self._base = opened.parameters, opened.base
        self.num_steps = 0
        self.optimizer = torch.optim.AdamW(decay_groups(self.parameters, optim), betas=(optim.beta1, optim.beta2))
        self._optim = optim
        self._loss = MicrobatchLoss(
            self.model, loss, temperature, self.tokenizer.pad_token_id, autocast=runtime.dtype == "bfloat16"
        )
        self._restore(policy)

    def step(self, samples: Sequence[Sample], *, objective: Objective = "policy") -> dict[str, float]:
        """One optimiser step on the sum of the weighted terms of all loss tokens.

        Statistics: those of ``loss.policy_loss`` or ``loss.sft_loss``, entropy (nats, mean over loss tokens), grad_norm
        before clipping, learning_rate. Raises ``ValueError`` for a sample that trains nothing, ``FloatingPointError``
        for a gradient that is not finite, naming the samples it came with; the weights are then as before.
        """
        pieces, norm = self._gradient(samples, objective)
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._optim.max_grad_norm, norm)
        rate = learning_rate(self._optim, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.num_steps += 1
        return merge_stats(pieces) | {"grad_norm": float(norm), "learning_rate": rate}

    def alignment(self, first: Sequence[Sample], second: Sequence[Sample]) -> dict[str, float]:
        """See ``Trainer``. Raises as ``step`` does; weights, moments and the count of steps stay as they are."""
        found = []
        for samples in (first, second):
            self._gradient(samples, "policy")
            found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()])
        self.optimizer.zero_grad()  # lets go of the gradients, which live on in ``found``
        one, two = found
        return aligned(dot(one, one), dot(two, two), dot(one, two))

    def save(self, folder: Path, *, policy_version: int) -> None:
        """See ``Trainer`` and ``state``."""
        moments = {
            f"{name}/{field}": value.detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
            for field, value in self.optimizer.state[parameter].items()
        }
        with storage.whole_folder(folder) as temporary:
            if self._base:
                lora.save(self.model, self.parameters, temporary, self._base)
            else:
                self.model.save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
            proof.record(temporary, engine_of(self.model, self.tokenizer))
            state.write(temporary, moments, policy_version=policy_version, num_steps=self.num_steps)

    def close(self) -> None:
        """Free the model and its moments."""
        self.model = self._loss = None  # type: ignore[assignment]
        self.parameters = {}
        self.optimizer = None  # type: ignore[assignment]

    def _gradient(self, samples: Sequence[Sample], objective: Objective) -> tuple[list[dict[str, float]], Tensor]:
        """Leave the gradient over all samples on the parameters; the statistics of its pieces, and its norm."""
        check_samples(samples)
        self.optimizer.zero_grad()
        pieces: list[dict[str, float]] = []
        norm = torch.zeros(())
        for indices in microbatches([len(s.token_ids) for s in samples], self._optim.tokens_per_microbatch):
            chosen = [samples[index] for index in indices]
            loss, stats = self._loss(chosen, objective)
            loss.backward()
            pieces += stats
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
            if not torch.isfinite(norm):
                raise FloatingPointError(f"the gradient is not finite after samples {[s.key for s in chosen]}")
        return pieces, norm

    def _restore(self, folder: Path) -> None:
        self.num_steps = state.restore(folder)
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        for name, field, value in state.moments(folder, shapes) if self.num_steps else ():
            parameter = self.parameters[name]
            # AdamW counts its steps on the CPU, wherever the weights are.
            self.optimizer.state[parameter][field] = value if field == "step" else value.to(parameter.device)
