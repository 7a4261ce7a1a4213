"""The policy loss: hand-worked tokens, extremes, and sums that add up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mempo.loss import merge_stats, policy_loss, sft_loss, token_logprobs


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


# ---------------------------------------------------------------- token_logprobs


def test_index_t_speaks_of_token_t() -> None:
    logits = torch.log(torch.tensor([[[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]]))
    found = token_logprobs(logits, torch.tensor([[0, 1, 0]]))
    # token 1 from logits 0: log 0.8; token 2 from logits 1: log 0.5; column 0 has nothing before it
    assert found.tolist() == [pytest.approx([0.0, math.log(0.8), math.log(0.5)])]
    assert token_logprobs(logits[:, :1], torch.tensor([[1]])).tolist() == [[0.0]]


def test_entropy_and_temperature() -> None:
    logits = torch.log(torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]))
    found, entropy = token_logprobs(logits, torch.tensor([[0, 1]]), temperature=0.5, entropy=True)
    # squared and normalised: 0.04 / 0.68 and 0.64 / 0.68
    p = 0.64 / 0.68
    assert found[0, 1].item() == pytest.approx(math.log(p))
    assert entropy[0].tolist() == pytest.approx([0.0, -p * math.log(p) - (1 - p) * math.log(1 - p)])
    assert not entropy.requires_grad


def test_entropy_of_many_tokens_and_of_impossible_ones() -> None:
    logits = torch.randn(3, 700, 5, generator=torch.Generator().manual_seed(0))
    logits[..., 4] = -math.inf
    entropy = token_logprobs(logits, torch.zeros(3, 700, dtype=torch.long), entropy=True)[1]
    reference = torch.distributions.Categorical(logits=logits[:, :-1, :4]).entropy()
    assert torch.allclose(entropy[:, 1:], reference, atol=1e-6)


def test_half_precision_is_raised_and_float32_is_not_copied() -> None:
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = torch.tensor([[1, 2, 3, 4], [8, 7, 6, 5]])
    found = token_logprobs(logits, ids)
    reference = torch.log_softmax(logits.float(), dim=-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert found.dtype == torch.float32
    assert torch.allclose(found[:, 1:], reference, atol=1e-6)

    # float32: of all that backward keeps, only the logits themselves are [B, T, V] large
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() > 2 * 32 * 500:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    leaf = torch.randn(2, 64, 500, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(leaf, torch.zeros(2, 64, dtype=torch.long))
    assert kept == {leaf.untyped_storage().data_ptr()}


# ---------------------------------------------------------------- policy_loss


def test_no_update_yet_is_ratio_one() -> None:
    loss, stats = policy_loss(row(-1, -2), row(-1, -2), row(0.5, -0.5), row(0.5, 0.25))
    assert loss.item() == pytest.approx(-0.125)  # -(0.5 * 0.5) - (0.25 * -0.5)
    unmoved = {"clip_fraction": 0.0, "approx_kl": 0.0, "ratio_max": 1.0, "log_ratio_max": 0.0}
    assert stats == {"loss": -0.125, "num_tokens": 2.0} | unmoved


def test_a_negative_advantage_is_not_clipped_from_above() -> None:
    ratio = math.log(2.0)
    loss, stats = policy_loss(row(ratio, ratio), row(0, 0), row(1, -1), row(1, 1))
    # A = 1: min(2, 1.2) = 1.2; A = -1: min(-2, -1.2) = -2, not -1.2
    assert loss.item() == pytest.approx(-1.2 + 2.0)
    assert stats["clip_fraction"] == 0.5
    assert stats["ratio_max"] == pytest.approx(2.0)
    assert stats["approx_kl"] == pytest.approx(2 - math.log(2) - 1)


def test_a_clipped_token_has_no_gradient_and_another_has_weight_times_ratio_times_advantage() -> None:
    logprobs = row(math.log(2.0), math.log(1.1)).requires_grad_()
    policy_loss(logprobs, row(0, 0), row(1, 3), row(0.5, 0.5))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([0.0, -0.5 * 1.1 * 3])]


def test_k3_to_the_reference() -> None:
    d = math.log(0.5)  # reference half as probable
    loss, stats = policy_loss(row(-1), row(-1), row(0), row(1), row(-1 + d), kl_coef=0.1)
    # k3 = 0.5 - log 0.5 - 1 = 0.1931
    assert loss.item() == pytest.approx(0.1 * (0.5 - d - 1))
    assert stats["ref_kl"] == pytest.approx(0.5 - d - 1)
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(row(-1), row(-1), row(0), row(1), kl_coef=0.1)


def test_tokens_without_weight_may_hold_anything() -> None:
    logprobs = row(-1, math.nan, -math.inf).requires_grad_()
    loss, stats = policy_loss(logprobs, row(-1, 0, 0), row(1, 1, math.inf), row(1, 0, 0), row(-1, 0, 0), kl_coef=1.0)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert stats["num_tokens"] == 1


@pytest.mark.parametrize("log_ratio", [30.0, 100.0, 1e4, -30.0, -1e4, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite_and_show_in_ratio_max(log_ratio: float, advantage: float) -> None:
    logprobs = row(log_ratio).requires_grad_()
    loss, stats = policy_loss(logprobs, row(0), row(advantage), row(1), row(0), kl_coef=0.1)
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0.0]]
    assert math.isfinite(stats["approx_kl"]) and math.isfinite(stats["ref_kl"])
    unclamped = math.exp(log_ratio) if log_ratio < 700 else math.inf
    assert stats["ratio_max"] == pytest.approx(unclamped)
    assert stats["log_ratio_max"] == pytest.approx(abs(log_ratio))


def test_nan_is_not_hidden() -> None:
    loss, stats = policy_loss(row(math.nan, -1), row(0, -1), row(1, 1), row(1, 1))
    assert math.isnan(loss.item()) and math.isnan(stats["approx_kl"])
    fine = policy_loss(row(-1), row(-1), row(1), row(1))[1]
    for parts in ([stats, fine], [fine, stats]):
        assert all(math.isnan(merge_stats(parts)[name]) for name in ("ratio_max", "log_ratio_max"))


def test_no_token_at_all() -> None:
    logprobs = row(-1, -2).requires_grad_()
    loss, stats = policy_loss(logprobs, row(0, 0), row(1, 1), row(0, 0))
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0.0, 0.0]]
    assert set(stats.values()) == {0.0}


# ---------------------------------------------------------------- sums


def test_stats_of_micro_batches_merge_into_those_of_the_batch() -> None:
    draw = torch.Generator().manual_seed(0)
    logprobs, old, advantages, ref = (torch.randn(4, 9, generator=draw) for _ in range(4))
    weights = (torch.rand(4, 9, generator=draw) > 0.4) / 7.0
    whole = policy_loss(logprobs, old, advantages, weights, ref, kl_coef=0.1)[1]
    parts = [
        policy_loss(logprobs[i], old[i], advantages[i], weights[i], ref[i], kl_coef=0.1)[1] for i in ([0], [1, 2], [3])
    ]
    assert merge_stats(parts) == pytest.approx(whole, rel=1e-5)
    assert merge_stats([]) == {}


def test_sft_loss_is_the_weighted_negative_log_likelihood() -> None:
    loss, stats = sft_loss(row(-1, -2, -9), row(0.5, 0.25, 0))
    assert loss.item() == 1.0  # 0.5 * 1 + 0.25 * 2
    assert stats == {"loss": 1.0, "num_tokens": 2.0, "nll": 1.5}
