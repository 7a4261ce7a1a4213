"""What must hold for every input."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from mempo import advantages, mem_reward, rewards, tags
from mempo.batch import Batch, collate
from mempo.loss import policy_loss, sft_loss, token_logprobs
from mempo.records import Sample

settings.register_profile("mempo", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("mempo")

reward = st.floats(-2, 2)
maybe_reward = st.none() | reward
logprob = st.floats(-12, 0)
AGGREGATIONS: list[advantages.Aggregation] = ["token-mean", "turn-mean", "trajectory-mean", "constant"]


@st.composite
def rounds(draw: Any) -> tuple[list[list[float | None]], list[str], list[list[int]]]:
    """Memory rewards of some trajectories, their questions, their turn indices."""
    rewards_ = draw(st.lists(st.lists(maybe_reward, max_size=4), min_size=1, max_size=6))
    groups = [draw(st.sampled_from("ab")) for _ in rewards_]
    return rewards_, groups, [list(range(2, 2 + len(row))) for row in rewards_]


# ---------------------------------------------------------------- advantages


@given(st.lists(reward, min_size=2, max_size=8), st.floats(-5, 5), st.floats(0, 0.2))
def test_a_constant_added_to_a_pool_changes_nothing(values: list[float], constant: float, floor: float) -> None:
    values = [round(value, 3) for value in values]  # a spread of rounding errors alone is no spread
    moved = [value + round(constant, 3) for value in values]
    one = advantages.outcome_advantages(values, ["q"] * len(values))
    assert advantages.outcome_advantages(moved, ["q"] * len(values)) == pytest.approx(one, abs=1e-6)
    pooled = advantages.memory_advantages([values], ["q"])
    assert advantages.memory_advantages([moved], ["q"])[0] == pytest.approx(pooled[0], abs=1e-6)


@given(rounds(), st.randoms(use_true_random=False), st.sampled_from(["question", "question_turn", "batch"]))
def test_a_permutation_of_trajectories_permutes_advantages(found: Any, random: Any, pool: advantages.Pool) -> None:
    values, groups, turns = found
    order = list(range(len(values)))
    random.shuffle(order)
    one = advantages.memory_advantages(values, groups, turns=turns, pool=pool)
    other = advantages.memory_advantages(
        [values[i] for i in order], [groups[i] for i in order], turns=[turns[i] for i in order], pool=pool
    )
    assert other == [one[i] for i in order]
    scores = [row[0] if row else 0.0 for row in values]
    one_outcome = advantages.outcome_advantages(scores, groups)
    assert advantages.outcome_advantages([scores[i] for i in order], [groups[i] for i in order]) == [
        one_outcome[i] for i in order
    ]


@given(rounds())
def test_advantages_have_the_shape_of_the_rewards_and_no_signal_is_zero(found: Any) -> None:
    values, groups, turns = found
    got = advantages.memory_advantages(values, groups, turns=turns, single="zero")
    assert [len(row) for row in got] == [len(row) for row in values]
    pairs = [pair for row, out in zip(values, got, strict=True) for pair in zip(row, out, strict=True)]
    assert all(out == 0 for value, out in pairs if value is None)
    # each pool is centred
    for group in set(groups):
        total = sum(sum(out) for out, of in zip(got, groups, strict=True) if of == group)
        assert total == pytest.approx(0, abs=1e-6)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    reward,
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4), reward), max_size=3),
)
def test_tokens_outside_the_spans_carry_the_outcome_alone(mask: list[int], outcome: float, marks: Any) -> None:
    spans = [(start, min(start + width, len(mask))) for start, width, _ in marks if start < len(mask)]
    values = [value for start, _, value in marks if start < len(mask)]
    memory = advantages.span_advantages(len(mask), spans, values)
    found = advantages.token_advantages(outcome, memory, mask)
    for t, on in enumerate(mask):
        if not on:
            assert found[t] == 0
        elif not any(start <= t < end for start, end in spans):
            assert found[t] == outcome


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abc")), min_size=1, max_size=10))
def test_weights_of_the_means_sum_to_one(rows: list[tuple[int, str]]) -> None:
    counts, owners = [n for n, _ in rows], [owner for _, owner in rows]
    for aggregation in AGGREGATIONS[:3]:
        found = advantages.token_weights(counts, owners, aggregation=aggregation, max_response_tokens=64)
        total = sum(n * weight for n, weight in zip(counts, found, strict=True))
        assert total == pytest.approx(1.0 if any(counts) else 0.0)


# ---------------------------------------------------------------- memory reward


@given(
    st.lists(st.tuples(logprob, logprob, st.integers(0, 1)), max_size=10),
    st.sampled_from(["independent", "shared", "none"]),
    st.sampled_from(["geometric", "arithmetic"]),
    st.sampled_from(["one", "zero", "skip"]),
    st.sampled_from(["difference", "log_ratio"]),
)
def test_swapping_the_sides_turns_the_sign(rows: Any, mask: Any, average: Any, empty: Any, kind: Any) -> None:
    full, mem, on = ([row[i] for row in rows] for i in range(3))
    options = {"mask": mask, "average": average, "empty": empty, "kind": kind}
    one = mem_reward.memory_reward(full, mem, on, **options)
    other = mem_reward.memory_reward(mem, full, on, **options)
    assert (one.p_full, one.kept_full) == (other.p_mem, other.kept_mem)
    assert all(p is None or 0 <= p <= 1 for p in (one.p_full, one.p_mem))
    if one.reward is None:
        assert other.reward is None and empty == "skip"
    else:
        assert other.reward == -one.reward
    # a token outside the mask changes nothing
    assert mem_reward.memory_reward([*full, -3.0], [*mem, -0.1], [*on, 0], **options) == one


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6), st.integers(0, 8), st.floats(0, 1))
def test_a_return_is_a_mean_of_the_rewards(rows: Any, horizon: int, discount: float) -> None:
    sides = ([f for f, _ in rows], [m for _, m in rows], [5] * len(rows), [50] * len(rows))
    plain = mem_reward.turn_rewards(*sides)
    found = mem_reward.turn_rewards(*sides, return_horizon=horizon, discount=discount)
    for t, value in enumerate(found):
        window = plain[t : t + horizon + 1]
        assert min(window) - 1e-9 <= value <= max(window) + 1e-9


# ---------------------------------------------------------------- text


TAGS = [f"<{slash}{name}>" for name in ("mem", "think", "search", "answer", "information") for slash in ("", "/")]
pieces = st.sampled_from([*TAGS, "x", " ", "<|im_end|>", "。", "<", "\n", "mem>", "\x85"])


@given(st.lists(pieces, max_size=14).map("".join), st.integers(1, 3))
def test_parse_turn_says_nothing_that_is_not_in_the_text(text: str, turn: int) -> None:
    parsed = tags.parse_turn(text, turn)
    assert (parsed.action is None) == (parsed.argument is None)
    if parsed.memory_chars is not None:
        assert text[slice(*parsed.memory_chars)] == f"<mem>{parsed.memory}</mem>"
    if parsed.valid:
        assert parsed.action is not None and f"<{parsed.action}>" in text
        assert text.count("<think>") == 1 and "<information>" not in text and "<|im_end|>" not in text


@given(st.lists(pieces, max_size=10), st.lists(pieces, max_size=4))
def test_what_was_read_of_a_turn_stays_when_it_grows(parts: list[str], more: list[str]) -> None:
    one = tags.parse_turn("".join(parts), 2)
    other = tags.parse_turn("".join([*parts, " ", *more]), 2)
    if one.action is not None:
        assert (other.action, other.argument) == (one.action, one.argument)
    if one.memory is not None:
        assert (other.memory, other.memory_chars) == (one.memory, one.memory_chars)


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 30), st.integers(0, 8))
def test_token_span_is_the_tokens_that_overlap(widths: list[int], first: int, width: int) -> None:
    ends = list(accumulate(widths))
    offsets = [(end - w, end) for end, w in zip(ends, widths, strict=True)]
    start, end = tags.token_span(offsets, (first, first + width))
    overlapping = [i for i, (a, b) in enumerate(offsets) if max(a, first) < min(b, first + width)]
    assert all(start <= i < end for i in overlapping)
    assert all(i in overlapping or offsets[i][0] == offsets[i][1] for i in range(start, end))


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(["auto", "squad", "unicode"]))
def test_scores_are_bounded_and_an_answer_matches_itself(one: str, other: str, normalizer: rewards.Normalizer) -> None:
    score = rewards.score_answer(one, [[other]], normalizer)
    assert score.em in (0, 1) and score.em <= score.f1 <= 1
    itself = rewards.score_answer(one, [[one]], normalizer)
    assert itself.em == (1 if one.strip() else 0)


# ---------------------------------------------------------------- loss and padding


class TinyPolicy(torch.nn.Module):
    """A causal policy of 7 tokens: logits from the running mean of the embeddings so far, counted by the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(7, 5, dtype=torch.float64)
        self.head = torch.nn.Linear(5, 7, dtype=torch.float64)

    def forward(self, batch: Batch) -> torch.Tensor:
        mask = batch.attention_mask[..., None]
        seen = (self.embedding(batch.token_ids) * mask).cumsum(dim=1)
        logits: torch.Tensor = self.head(seen / mask.cumsum(dim=1).clamp(min=1))
        return logits


def gradient(samples: list[Sample], sizes: list[int], side: Literal["left", "right"] = "right") -> torch.Tensor:
    """The gradient accumulated over micro-batches of the given numbers of samples, and the loss at its end."""
    policy = TinyPolicy()
    total = torch.zeros(1, dtype=torch.float64)
    for first, size in zip([0, *accumulate(sizes)], sizes, strict=False):
        batch = collate(samples[first : first + size], pad_id=6, side=side)
        logprobs = token_logprobs(policy(batch), batch.token_ids)
        loss, _ = policy_loss(
            logprobs, batch.old_logprobs, batch.advantages, batch.weights, batch.ref_logprobs, kl_coef=0.1
        )
        loss.backward()
        total += loss.detach()
    return torch.cat([total, *(p.grad.flatten() for p in policy.parameters() if p.grad is not None)])


def samples_of(lengths: list[int], aggregation: advantages.Aggregation, seed: int = 0) -> list[Sample]:
    """One sample for each number of loss tokens, two samples a trajectory."""
    draw = torch.Generator().manual_seed(seed)
    owners = [str(i // 2) for i in range(len(lengths))]
    weights = advantages.token_weights(lengths, owners, aggregation=aggregation, max_response_tokens=1000)
    found = []
    for i, (length, weight) in enumerate(zip(lengths, weights, strict=True)):
        prompt, total = 1 + i % 3, 1 + i % 3 + length
        values = -torch.rand(3, total, generator=draw) * 3
        found.append(
            Sample(
                key=str(i),
                token_ids=torch.randint(0, 6, (total,), generator=draw).tolist(),
                loss_mask=[0] * prompt + [1] * length,
                old_logprobs=values[0].tolist(),
                ref_logprobs=values[1].tolist(),
                outcome_advantage=float(i % 2) - 0.4,
                memory_advantages=values[2].tolist(),
                weight=weight,
            )
        )
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_of_100_and_900_loss_tokens_give_the_gradient_of_one(
    aggregation: advantages.Aggregation,
) -> None:
    samples = samples_of([40, 60, 500, 400], aggregation)
    whole = gradient(samples, [4])
    assert whole.norm() > 1e-3
    for sizes in ([2, 2], [1, 1, 1, 1], [1, 3], [3, 1]):
        assert torch.allclose(gradient(samples, sizes), whole, rtol=1e-5, atol=1e-9), sizes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99), st.sampled_from(AGGREGATIONS))
def test_padding_never_matters(lengths: list[int], seed: int, aggregation: advantages.Aggregation) -> None:
    samples = samples_of(lengths, aggregation, seed)
    alone = gradient(samples, [1] * len(samples))
    for side in ("left", "right"):
        assert torch.allclose(gradient(samples, [len(samples)], side), alone, rtol=1e-5, atol=1e-9)


@given(st.lists(st.tuples(logprob, st.floats(0, 1)), min_size=1, max_size=8))
def test_the_policy_loss_before_any_update_has_the_gradient_of_weighted_likelihood(rows: Any) -> None:
    values = torch.tensor([[p for p, _ in rows]], dtype=torch.float64)
    weights = torch.tensor([[w for _, w in rows]], dtype=torch.float64)
    one, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    policy_loss(one, values, torch.ones_like(values), weights)[0].backward()
    sft_loss(other, weights)[0].backward()
    assert one.grad is not None and other.grad is not None
    assert torch.allclose(one.grad, other.grad)
