"""The gradient of a set of samples, micro-batch by micro-batch: what all trainers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from mempo.batch import collate
from mempo.config import LossConfig, Optim
from mempo.loss import policy_loss, sft_loss, token_logprobs
from mempo.records import Sample
from mempo.trainers import Objective

# Logits [tokens, vocabulary] of one piece hold at most this many numbers: 64 MiB in float32.
MAX_LOGITS = 2**24

# Hidden states [n, D], head's weight [V, D], its bias [V] or None, which of the loss tokens -> their loss.
PieceLoss = Callable[[Tensor, Tensor, Tensor | None, slice], Tensor]


class MicrobatchLoss(torch.nn.Module):
    """The loss of a micro-batch as one scalar, and the statistics of the pieces that it was made of.

    A module around the model: ZeRO stage 3 gathers weights where modules are called.
    """

    def __init__(self, model: Any, loss: LossConfig, temperature: float, pad_id: int, *, autocast: bool) -> None:
        super().__init__()
        self.model, self.head = model, _Head(model.get_output_embeddings())
        self._loss, self._temperature, self._pad_id, self._autocast = loss, temperature, pad_id, autocast

    def forward(self, samples: Sequence[Sample], objective: Objective) -> tuple[Tensor, list[dict[str, float]]]:
        """Only the hidden states before the N loss tokens go through the vocabulary head. N may be 0."""
        data = collate(samples, self._pad_id).to(self.model.device)
        rows, before = torch.nonzero(data.weights[:, 1:], as_tuple=True)  # token t is predicted at t - 1
        with self._precision():
            # No mask: causal attention hides the padding on the right.
            hidden = self.model.base_model(input_ids=data.token_ids, use_cache=False).last_hidden_state
        flat = hidden.flatten(0, 1).index_select(0, rows * hidden.shape[1] + before)  # [N, D]
        fields = (data.token_ids, data.old_logprobs, data.advantages, data.weights, data.ref_logprobs)
        columns = [field[rows, before + 1] for field in fields]
        stats: list[dict[str, float]] = []

        def piece_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice) -> Tensor:
            # ``token_logprobs`` shifts: an empty row at the end of the logits and an empty token at the front fit it.
            with self._precision():
                logits = linear(pad(hidden, (0, 0, 0, 1)), weight, bias)
            loss, figures = self._piece_loss(objective, logits, *(column[tokens] for column in columns))
            stats.append(figures)
            return loss

        return self.head(flat, piece_loss), stats

    def _piece_loss(
        self,
        objective: Objective,
        logits: Tensor,
        ids: Tensor,
        old: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of n tokens, all [n], from the logits [n + 1, V] before them and a row that nothing follows."""
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
        return loss, stats | {"entropy": float(entropy.double().sum()) / max(1, len(ids))}

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._autocast)


class _Head(torch.nn.Module):
    """The vocabulary head's own weights, as a module that is called once a micro-batch."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, getattr(head, "bias", None)

    def forward(self, hidden: Tensor, piece_loss: PieceLoss) -> Tensor:
        loss: Tensor = _Pieces.apply(hidden, self.weight, self.bias, piece_loss)  # type: ignore[no-untyped-call]
        return loss


class _Pieces(torch.autograd.Function):
    """The sum of the losses of all pieces of the hidden states [N, D].

    The forward pass takes each piece's gradient at once, so that one piece of logits is held at a time; the backward
    pass hands on what lies ready.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, piece_loss: PieceLoss) -> Tensor:
        size = max(1, MAX_LOGITS // weight.shape[0])
        parts = [part.requires_grad_() for part in torch.split(hidden.detach(), size)]
        own = weight.detach().requires_grad_(weight.requires_grad)
        shift = bias.detach().requires_grad_(bias.requires_grad) if bias is not None else None
        total = torch.zeros((), device=hidden.device)
        with torch.enable_grad():
            for index, part in enumerate(parts):
                loss = piece_loss(part, own, shift, slice(index * size, (index + 1) * size))
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        states = torch.cat([part.grad for part in parts if part.grad is not None])
        ctx.gradients = (states, own.grad, shift.grad if shift is not None else None)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if value is None else value.mul_(scale) for value in ctx.gradients), None)


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


def passes(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Micro-batches by falling size, dealt out: pass k has one for each rank, in the last pass [] for some.

    Ranks wait for each other after every pass, so those of a pass should be alike.
    """
    found = sorted(microbatches(lengths, budget), key=lambda part: -len(part) * lengths[part[0]])
    found += [[]] * (-len(found) % ranks)
    return [found[k : k + ranks] for k in range(0, len(found), ranks)]


def decay_groups(parameters: Mapping[str, torch.nn.Parameter], optim: Optim) -> list[dict[str, Any]]:
    """Weight decay on matrices only: on biases and norms it would pull the model's scale, not its size."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def check_samples(samples: Sequence[Sample]) -> None:
    """Raises ``ValueError`` naming a sample that trains nothing."""
    if not samples:
        raise ValueError("a step needs samples")
    for sample in samples:
        if sample.weight == 0 or not any(sample.loss_mask):
            raise ValueError(f"sample {sample.key}: no token of it trains")
        if sample.loss_mask[0]:
            raise ValueError(f"sample {sample.key}: nothing comes before its first token, so it cannot train")


def aligned(first_square: float, second_square: float, product: float) -> dict[str, float]:
    """``Trainer.alignment`` of two gradients g1, g2 with |g1|^2, |g2|^2 and g1 g2."""
    norms = {"first_norm": first_square**0.5, "second_norm": second_square**0.5}
    scale = norms["first_norm"] * norms["second_norm"]
    return norms | ({"cosine": product / scale} if scale else {})


def dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Over all tensors of both, in float64."""
    products = (torch.dot(a.flatten().double(), b.flatten().double()) for a, b in zip(first, second, strict=True))
    return float(sum(products))
