"""The policy loss: a weighted sum over tokens, so that micro-batches, accumulation and ranks add up to one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from mempo.mismatch import MAX_LOG_RATIO

ENTROPY_TOKENS = 1024
_LARGEST = ("ratio_max", "log_ratio_max")


@overload
def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, entropy: Literal[False] = False
) -> Tensor: ...
@overload
def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """log p(token t | tokens before t) [B, T], column 0 is 0, from logits [B, T, V] / temperature. The one shift.

    Half precision is raised to float32; float32 logits at temperature 1 are used as they are, and logit - logsumexp
    keeps no [B, T, V] output of its own. ``entropy`` adds the entropy in nats of the distribution that token t was
    drawn from [B, T], without gradient.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    before = logits[:, :-1]
    chosen = before.gather(-1, token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    logprobs = _from_column_one(chosen - torch.logsumexp(before, dim=-1))
    return (logprobs, _from_column_one(_entropy(before))) if entropy else logprobs


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """sum over [B, T] of weight * (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3).

    r = exp(logprobs - old), k3 = exp(d) - d - 1 with d = ref - logprobs. Both exponents are clamped to +-20: a token
    beyond has a finite loss and no gradient, and shows in ``ratio_max``, which is not clamped. NaN stays NaN. Tokens of
    weight 0 are not read at all. Stats over the others: loss (sum), num_tokens, clip_fraction, approx_kl (of old from
    new, k3), ref_kl (with a reference), ratio_max, log_ratio_max (largest |log r|). Raises ``ValueError`` on a KL term
    without a reference.
    """
    on = weights != 0
    logprobs, old_logprobs, advantages, weights = (x[on] for x in (logprobs, old_logprobs, advantages, weights))
    log_ratio = logprobs - old_logprobs
    ratio = _clamped(log_ratio).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    terms = -torch.minimum(plain, clipped)
    ref_kl = _k3(ref_logprobs[on] - logprobs) if ref_logprobs is not None else None
    if kl_coef:
        if ref_kl is None:
            raise ValueError("kl_coef > 0 needs ref_logprobs")
        terms = terms + kl_coef * ref_kl
    loss = (weights * terms).sum()
    with torch.no_grad():
        figures = {"clip_fraction": (clipped < plain).double(), "approx_kl": _k3(log_ratio)}
        if ref_kl is not None:
            figures["ref_kl"] = ref_kl
        return loss, _stats(loss, figures, log_ratio)


def sft_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, float]]:
    """sum of -weight * logprob over [B, T]; weight 0 = no loss. Stats: loss (sum), nll (mean), num_tokens."""
    on = weights != 0
    logprobs, weights = logprobs[on], weights[on]
    loss = -(weights * logprobs).sum()
    return loss, _stats(loss, {"nll": -logprobs.detach()})


def merge_stats(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Statistics of micro-batches or ranks as of one batch: sums of loss and num_tokens, the largest ratio_max and
    log_ratio_max, means over tokens of the rest. A NaN anywhere stays NaN.
    """
    total = sum(part["num_tokens"] for part in stats)
    merged: dict[str, float] = {}
    for name in {name: None for part in stats for name in part}:
        values = [part.get(name, 0.0) for part in stats]
        if name in ("loss", "num_tokens"):
            merged[name] = sum(values)
        elif name in _LARGEST:
            merged[name] = torch.tensor(values, dtype=torch.float64).max().item()
        else:
            tokens = (part["num_tokens"] for part in stats)
            merged[name] = sum(n * value for n, value in zip(tokens, values, strict=True)) / max(total, 1.0)
    return merged


def _stats(loss: Tensor, figures: dict[str, Tensor], log_ratio: Tensor | None = None) -> dict[str, float]:
    """Means of the per-token ``figures``; 0 where no token has a weight."""
    num_tokens = next(iter(figures.values())).numel()
    stats = {"loss": loss.item(), "num_tokens": float(num_tokens)}
    stats |= {name: values.double().sum().item() / max(num_tokens, 1) for name, values in figures.items()}
    if log_ratio is not None:
        stats["ratio_max"] = log_ratio.max().double().exp().item() if num_tokens else 0.0
        stats["log_ratio_max"] = log_ratio.abs().max().item() if num_tokens else 0.0
    return stats


def _k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1 >= 0: an unbiased estimate of KL(p || q) from samples of p, d = log q - log p (Schulman, 2020)."""
    difference = _clamped(difference)
    return torch.expm1(difference) - difference


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _from_column_one(values: Tensor) -> Tensor:
    """[B, T - 1] to [B, T] with zeros in column 0."""
    return torch.nn.functional.pad(values, (1, 0))


@torch.no_grad()
def _entropy(logits: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, some tokens at a time: no second [B, T, V] tensor."""
    chunks = torch.split(logits.flatten(0, 1), ENTROPY_TOKENS)
    return torch.cat([torch.special.entr(chunk.softmax(dim=-1)).sum(dim=-1) for chunk in chunks]).view(logits.shape[:2])
