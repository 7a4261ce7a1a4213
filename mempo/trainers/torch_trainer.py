"""Trainer ``torch``: one process, AdamW, the same gradient whatever the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from mempo import storage
from mempo.batch import collate
from mempo.config import LossConfig, Optim
from mempo.engines import loader
from mempo.loss import merge_stats, policy_loss, sft_loss, token_logprobs
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import Objective

# Logits [tokens, vocabulary] of one piece hold at most this many numbers: 64 MiB in float32.
MAX_LOGITS = 2**24
STATE, MOMENTS = "trainer.json", "trainer.safetensors"


class TorchTrainer:
    """Weights and moments are float32; ``runtime.dtype`` bfloat16 means that the forward pass is autocast to it.

    The model stays in eval mode: dropout would make the trainer's log-probs differ from the sampler's.
    """

    def __init__(
        self, policy: Path, optim: Optim, loss: LossConfig, runtime: Runtime, *, temperature: float = 1.0
    ) -> None:
        torch.set_num_threads(runtime.num_threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.tokenizer: Any = loader.load_tokenizer(policy)
        self.model: Any = loader.load_model(policy, runtime.model_copy(update={"dtype": "float32"}))
        self.num_steps = 0
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(_decay_groups(self.parameters, optim), betas=(optim.beta1, optim.beta2))
        self._optim, self._loss, self._runtime, self._temperature = optim, loss, runtime, temperature
        _check_head(self.model)
        if (policy / MOMENTS).exists():
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
        norms = {"first_norm": _dot(one, one) ** 0.5, "second_norm": _dot(two, two) ** 0.5}
        product = norms["first_norm"] * norms["second_norm"]
        return norms | ({"cosine": _dot(one, two) / product} if product else {})

    def save(self, folder: Path, *, policy_version: int) -> None:
        """See ``Trainer``. ``trainer.safetensors`` holds ``parameter/field`` of AdamW, ``trainer.json`` the rest."""
        moments = {
            f"{name}/{field}": value.detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
            for field, value in self.optimizer.state[parameter].items()
        }
        rng = bytes(torch.get_rng_state().tolist()).hex()
        with storage.whole_folder(folder) as temporary:
            self.model.save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
            save_file(moments, temporary / MOMENTS)
            storage.write_json(
                temporary / STATE, {"policy_version": policy_version, "step": self.num_steps, "torch_rng": rng}
            )

    def close(self) -> None:
        """Free the model and its moments."""
        self.model = None
        self.parameters = {}
        self.optimizer = None  # type: ignore[assignment]

    def _gradient(self, samples: Sequence[Sample], objective: Objective) -> tuple[list[dict[str, float]], Tensor]:
        """Leave the gradient over all samples on the parameters; the statistics of its pieces, and its norm."""
        _check_samples(samples)
        self.optimizer.zero_grad()
        pieces: list[dict[str, float]] = []
        norm = torch.zeros(())
        for indices in microbatches([len(s.token_ids) for s in samples], self._optim.tokens_per_microbatch):
            chosen = [samples[index] for index in indices]
            pieces += self._backward(chosen, objective)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
            if not torch.isfinite(norm):
                raise FloatingPointError(f"the gradient is not finite after samples {[s.key for s in chosen]}")
        return pieces, norm

    def _backward(self, samples: Sequence[Sample], objective: Objective) -> list[dict[str, float]]:
        """Add the gradient of one micro-batch; statistics of each piece of its N loss tokens.

        Only the hidden states before loss tokens go through the vocabulary head, piece by piece: each piece's loss goes
        back to its hidden states at once, so that one piece of logits is held at a time, then all go through the body.
        """
        data = collate(samples, self.tokenizer.pad_token_id).to(self._runtime.device)
        rows, before = torch.nonzero(data.weights[:, 1:], as_tuple=True)  # token t is predicted at t - 1
        with self._autocast():
            # No mask: causal attention hides the padding on the right.
            hidden = self.model.base_model(input_ids=data.token_ids, use_cache=False).last_hidden_state
        flat = hidden.flatten(0, 1).index_select(0, rows * hidden.shape[1] + before)  # [N, D]
        size = max(1, MAX_LOGITS // self.model.get_output_embeddings().weight.shape[0])
        parts = flat.split(size)
        leaves = [part.detach().requires_grad_() for part in parts]
        fields = (data.token_ids, data.old_logprobs, data.advantages, data.weights, data.ref_logprobs)
        columns = [field[rows, before + 1].split(size) for field in fields]  # type: ignore[no-untyped-call]
        stats = []
        for leaf, *values in zip(leaves, *columns, strict=True):
            loss, figures = self._piece_loss(objective, leaf, *values)
            loss.backward()  # type: ignore[no-untyped-call]
            stats.append(figures)
        torch.autograd.backward(parts, [leaf.grad for leaf in leaves])
        return stats

    def _piece_loss(
        self,
        objective: Objective,
        hidden: Tensor,
        ids: Tensor,
        old: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of n tokens, all [n], from the hidden states [n, D] that predict them."""
        # ``token_logprobs`` shifts: an empty row at the end of the logits and an empty token at the front fit it.
        with self._autocast():
            logits = self.model.get_output_embeddings()(pad(hidden, (0, 0, 0, 1)))
        found = token_logprobs(logits[None], pad(ids, (1, 0))[None], temperature=self._temperature, entropy=True)
        logprobs, entropy = (value[0, 1:] for value in found)
        if objective == "sft":
            loss, stats = sft_loss(logprobs, weights)
        else:
            options = self._loss
            loss, stats = policy_loss(
                logprobs, old, advantages, weights, ref if options.kl_coef else None,
                clip_low=options.clip_low, clip_high=options.clip_high, kl_coef=options.kl_coef,
            )  # fmt: skip
        return loss, stats | {"entropy": float(entropy.double().mean())}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._runtime.dtype == "bfloat16")

    def _restore(self, folder: Path) -> None:
        try:
            moments = load_file(folder / MOMENTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / MOMENTS}: not a whole safetensors file: {error}") from error
        for key, value in moments.items():
            name, field = key.rsplit("/", 1)
            parameter = self.parameters.get(name)
            if parameter is None or (field != "step" and parameter.shape != value.shape):
                raise ValueError(f"{folder / MOMENTS}: {key} does not belong to the weights beside it")
            # AdamW counts its steps on the CPU, wherever the weights are.
            self.optimizer.state[parameter][field] = value if field == "step" else value.to(parameter.device)
        state = storage.read_json(folder / STATE)
        self.num_steps = state["step"]
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch_rng"])), dtype=torch.uint8))


def learning_rate(optim: Optim, step: int) -> float:
    """Rises linearly over ``warmup_steps`` steps, then stays, or falls linearly to a twentieth over ``decay_steps``.

    ``step`` counts the steps already made.
    """
    rise = min(1.0, (step + 1) / max(1, optim.warmup_steps))
    fall = max(0.05, 1.0 - step / optim.decay_steps) if optim.decay_steps else 1.0
    return optim.learning_rate * rise * fall


def microbatches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices by falling length, as many at once as fit ``budget`` padded tokens; a longer sample goes alone.

    >>> list(microbatches([3, 9, 4, 8], budget=18))
    [[1, 3], [2, 0]]
    """
    chosen: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if chosen and (len(chosen) + 1) * lengths[chosen[0]] > budget:
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen


def _decay_groups(parameters: Mapping[str, torch.nn.Parameter], optim: Optim) -> list[dict[str, Any]]:
    """Weight decay on matrices only: on biases and norms it would pull the model's scale, not its size."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _check_samples(samples: Sequence[Sample]) -> None:
    if not samples:
        raise ValueError("a step needs samples")
    for sample in samples:
        if sample.weight == 0 or not any(sample.loss_mask):
            raise ValueError(f"sample {sample.key}: no token of it trains")
        if sample.loss_mask[0]:
            raise ValueError(f"sample {sample.key}: nothing comes before its first token, so it cannot train")


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    products = (torch.dot(a.flatten().double(), b.flatten().double()) for a, b in zip(first, second, strict=True))
    return float(sum(products))


@torch.no_grad()
def _check_head(model: Any) -> None:
    """Some models bend their logits after the vocabulary head; this trainer would train another distribution."""
    ids = torch.arange(min(8, model.get_output_embeddings().weight.shape[0]), device=model.device)[None]
    direct = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(direct, model(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-4):
        raise ValueError(f"{model.config.model_type}: its logits are more than its vocabulary head")
