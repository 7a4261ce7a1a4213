"""How far the policy is from the sampler that drew its tokens, what corrects for it, and when to stop.

One policy in two programs is two distributions: other kernels, another dtype, stale weights (Yao et al., 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training", https://fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

Correction = Literal["none", "token", "sequence"]

# e^20 = 4.9e8. Beyond it a float32 ratio overflows to inf, and the gradient of a clipped inf is NaN.
MAX_LOG_RATIO = 20.0


class Mismatch(ValueError):
    """The policy that trains is not the policy that sampled."""


def sampler_weights(
    old: Sequence[float], sampling: Sequence[float], *, correction: Correction, cap: float
) -> list[float]:
    """Truncated importance weights [R] of a turn's response: min(exp(old - sampling), cap), or 1 where ``none``.

    ``sequence``: the same weight for all R tokens, from the sum of their log-ratios. verl calls them ``rollout_is``,
    TRL ``token_truncate`` and ``sequence_truncate``. Exponents are clamped to +-20, so no weight is 0. NaN stays NaN.
    """
    if correction == "none":
        return [1.0] * len(old)
    gaps = [a - b for a, b in zip(old, sampling, strict=True)]
    if correction == "sequence":
        gaps = [math.fsum(gaps)] * len(gaps)
    return [min(ratio_of(gap), cap) for gap in gaps]


def mismatch_figures(old: Sequence[float], sampling: Sequence[float], *, cap: float) -> dict[str, float]:
    """Figures of N response tokens, with d = old - sampling clamped to +-20; none where N is 0.

    ``kl``: KL(sampler || policy) in nats a token, the mean of k3 = exp(d) - d - 1, in which gaps of either sign add up.
    ``ratio_max``: exp(max |d|), the largest ratio either way. ``above_cap``: share of tokens with exp(d) > cap.
    """
    gaps = [_clamped(a - b) for a, b in zip(old, sampling, strict=True)]
    if not gaps:
        return {}
    return {
        "kl": math.fsum(math.expm1(gap) - gap for gap in gaps) / len(gaps),
        "ratio_max": ratio_of(max(map(abs, gaps))),
        "above_cap": sum(ratio_of(gap) > cap for gap in gaps) / len(gaps),
    }


def refuse_mismatch(figures: Mapping[str, float], limit: float | None, *, round_index: int) -> None:
    """Raises ``Mismatch`` where the KL in ``figures`` is above ``limit`` or no number; ``limit`` None: never."""
    if limit is not None and figures and not figures["kl"] <= limit:
        raise Mismatch(
            f"round {round_index}: the policy is not the one that sampled: KL {figures['kl']:.3g} nats a token "
            f"(loss.max_mismatch: {limit:g}), largest ratio {figures['ratio_max']:.3g}. "
            "Likely causes: stale weights in the engine, another dtype, another temperature"
        )


def ratio_of(gap: float) -> float:
    """exp(gap), the log-ratio clamped to +-20."""
    return math.exp(_clamped(gap))


def _clamped(gap: float) -> float:
    # In this order NaN stays NaN.
    return min(max(gap, -MAX_LOG_RATIO), MAX_LOG_RATIO)
