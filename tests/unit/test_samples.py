"""The advantage step: which token carries which signal, and what is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest

from mempo.batch import collate
from mempo.config import Config
from mempo.mismatch import Mismatch
from mempo.records import Sample, Trajectory
from mempo.samples import TurnReward, build, mismatch
from tests.unit.builders import question, trajectory, turn, turn_score

PUBLISHED = {"threshold": 0.5, "mask": "independent", "empty": "one", "kind": "difference"}


def config(**sections: object) -> Config:
    return Config.model_validate({"mem_reward": PUBLISHED} | sections)


def two_trajectories(**second: object) -> list[Trajectory]:
    """One right answer with a memory on tokens 1..2 of turn 2, one wrong answer with a memory on tokens 0..3."""
    right = trajectory([turn(3, 2), turn(5, 4, (1, 3))], sample=0)
    wrong = trajectory([turn(3, 3), turn(4, 5, (0, 4))], sample=1, answer="Rome", **second)
    return [right, wrong]


def run(
    trajectories: list[Trajectory],
    chosen: Config,
    probes: dict[tuple[int, int], tuple[float, float]],
    round_index: int = 0,
) -> tuple[dict[str, Sample], list[TurnReward]]:
    """Build with one-token probes: (sample, turn) -> (full, mem) log-probability."""
    scores = []
    for of in trajectories:
        for index in range(1, len(of.turns) + 1):
            full, mem = probes.get((of.sample_index, index), (None, None))
            scores.append(turn_score(of, index, None if full is None else [full], None if mem is None else [mem]))
    samples, table = build(trajectories, {"q": question()}, scores, chosen, round_index=round_index)
    return {sample.key: sample for sample in samples}, table


PROBES = {(0, 2): (math.log(0.8), math.log(0.9)), (1, 2): (math.log(0.9), math.log(0.6))}


def test_memory_tokens_carry_both_signals_and_all_others_the_outcome():
    samples, table = run(two_trajectories(), config(), PROBES)
    # scores 1, 0: mean 0.5, std sqrt(0.5) -> +-0.5 / 0.70711 = +-0.70711
    outcome = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert samples["q/0/1"].outcome_advantage == pytest.approx(outcome)
    assert samples["q/1/2"].outcome_advantage == pytest.approx(-outcome)
    # rewards 0.1, -0.3: mean -0.1, std sqrt(0.08) = 0.28284 -> +-0.2 / 0.28284 = +-0.70711
    memory = 0.2 / (math.sqrt(0.08) + 1e-6)
    assert samples["q/0/1"].memory_advantages == [0.0] * 5
    assert samples["q/0/2"].memory_advantages == pytest.approx([0.0] * 5 + [0.0, memory, memory, 0.0])
    assert samples["q/1/2"].memory_advantages == pytest.approx([0.0] * 4 + [-memory] * 4 + [0.0])
    assert samples["q/0/2"].loss_mask == [0] * 5 + [1] * 4
    # token-mean: 2 + 4 + 3 + 5 = 14 loss tokens
    assert {sample.weight for sample in samples.values()} == {1 / 14}
    assert [row.mem_reward for row in table] == [None, pytest.approx(0.1), None, pytest.approx(-0.3)]


def test_weight_scales_and_anneals_the_memory_signal():
    half, _ = run(two_trajectories(), config(advantage={"mem_weight": 0.5}), PROBES)
    whole, _ = run(two_trajectories(), config(), PROBES)
    assert half["q/0/2"].memory_advantages == pytest.approx([0.5 * v for v in whole["q/0/2"].memory_advantages])
    annealed = config(advantage={"mem_weight": 1.0, "anneal_rounds": 4})
    last, _ = run(two_trajectories(), annealed, PROBES, round_index=3)  # 1 - 3/4
    assert last["q/0/2"].memory_advantages == pytest.approx([0.25 * v for v in whole["q/0/2"].memory_advantages])
    gone, _ = run(two_trajectories(), annealed, PROBES, round_index=9)
    assert set(gone["q/0/2"].memory_advantages) == {0.0}


@pytest.mark.parametrize("gate", ["outcome_nonnegative", "outcome_correct"])
def test_a_gate_silences_the_memory_of_a_wrong_trajectory(gate: str):
    samples, _ = run(two_trajectories(), config(advantage={"gate": gate}), PROBES)
    assert any(samples["q/0/2"].memory_advantages)
    assert not any(samples["q/1/2"].memory_advantages)


def test_a_failed_tool_leaves_both_statistics():
    trajectories = [*two_trajectories(), trajectory([turn(3, 2), turn(5, 4, (0, 2))], sample=2, status="tool_failed")]
    probes = PROBES | {(2, 2): (-0.1, -0.2)}
    samples, table = run(trajectories, config(), probes)
    alone, alone_table = run(two_trajectories(), config(), PROBES)
    assert samples == alone and table == alone_table


def test_a_flat_group_dropped_keeps_only_its_memory_tokens():
    trajectories = [trajectory(t.turns, sample=t.sample_index) for t in two_trajectories()]  # both right
    kept, _ = run(trajectories, config(), PROBES)
    assert {s.outcome_advantage for s in kept.values()} == {0.0}
    assert kept["q/0/1"].weight == 1 / 14
    dropped, _ = run(trajectories, config(advantage={"flat_groups": "drop"}), PROBES)
    assert dropped["q/0/1"].weight == 0.0 and not any(dropped["q/0/1"].loss_mask)
    assert dropped["q/0/2"].loss_mask == [0] * 5 + [0, 1, 1, 0]
    assert dropped["q/0/2"].weight == 1 / 6  # 2 + 4 memory tokens


def test_cut_off_trajectories_can_be_left_out_of_the_loss_but_not_of_the_group():
    trajectories = two_trajectories(status="truncated")
    dropped, _ = run(trajectories, config(advantage={"cut_off": "drop"}), PROBES)
    assert dropped["q/1/1"].weight == dropped["q/1/2"].weight == 0.0
    assert dropped["q/0/1"].outcome_advantage == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert dropped["q/0/1"].weight == 1 / 6  # 2 + 4 tokens


def test_nothing_kept_can_be_skipped():
    probes = {(0, 2): (math.log(0.4), math.log(0.3)), (1, 2): (math.log(0.9), math.log(0.6))}
    skip = config(mem_reward={"mask": "shared", "empty": "skip"})
    samples, table = run(two_trajectories(), skip, probes)
    assert [row.mem_reward for row in table] == [None, None, None, pytest.approx(-0.3)]
    assert not any(samples["q/0/2"].memory_advantages)
    assert samples["q/1/2"].memory_advantages[4] == pytest.approx(-0.3, abs=1e-5)  # a pool of one keeps its raw reward


def test_a_cap_clips_the_final_reward():
    capped = config(mem_reward=PUBLISHED | {"reward_cap": 0.2})
    _, table = run(two_trajectories(), capped, PROBES)
    assert [row.mem_reward for row in table if row.mem_reward is not None] == [pytest.approx(0.1), -0.2]


RECOMPUTED = {"old_logprobs": "recomputed", "sampler_cap": 2.0}


def sampled_otherwise() -> list[Trajectory]:
    """The policy gives every token -0.5. The sampler gave the memory turn of sample 0 other log-probs."""
    right, wrong = two_trajectories()
    uneven = replace(
        right.turns[1], sampling_logprobs=[-0.5, -0.5 - math.log(1.5), -0.5 - math.log(3), -0.5 + math.log(4)]
    )
    return [replace(right, turns=[right.turns[0], uneven]), wrong]


@pytest.mark.parametrize(
    ("correction", "expected"),
    # ratios 1, 1.5, 3, 1/4: capped at 2 a token; their product is 1.125
    [("none", [1, 1, 1, 1]), ("token", [1, 1.5, 2, 0.25]), ("sequence", [1.125] * 4)],
)
def test_the_samplers_weights_stand_on_the_response(correction: str, expected: list[float]):
    chosen = config(loss=RECOMPUTED | {"sampler_correction": correction})
    samples, table = run(sampled_otherwise(), chosen, PROBES)
    plain, plain_table = run(sampled_otherwise(), config(), PROBES)
    assert samples["q/0/2"].sampler_weights == pytest.approx([0] * 5 + expected)
    assert samples["q/1/2"].sampler_weights == [0] * 4 + [1] * 5
    assert table == plain_table
    batch = collate([samples["q/0/2"]], pad_id=9)
    assert batch.weights[0].tolist() == pytest.approx([0] * 5 + [w / 14 for w in expected])
    # nothing else of a sample changes
    assert {key: replace(s, sampler_weights=[]) for key, s in samples.items()} == {
        key: replace(s, sampler_weights=[]) for key, s in plain.items()
    }


def test_recomputed_logprobs_are_compared_with_the_samplers():
    trajectories = sampled_otherwise()
    scores = [turn_score(t, i + 1) for t in trajectories for i in range(len(t.turns))]
    # k3 of the ratios 1.5, 3, 1/4 over 14 response tokens: 0.0945 + 0.9014 + 0.6363
    kl = (0.5 - math.log(1.5) + 2 - math.log(3) - 0.75 + math.log(4)) / 14
    loose = config(loss=RECOMPUTED | {"max_mismatch": 0.2})
    assert mismatch(trajectories, scores, loose, round_index=3) == pytest.approx(
        {"mismatch/kl": kl, "mismatch/ratio_max": 4.0, "mismatch/above_cap": 1 / 14}
    )
    with pytest.raises(Mismatch, match=r"^round 3: .*KL 0\.117 .*max_mismatch: 0\.1\), largest ratio 4\. .*stale"):
        mismatch(trajectories, scores, config(loss=RECOMPUTED), round_index=3)
    assert mismatch(trajectories, scores, config(), round_index=3) == {}


@pytest.mark.parametrize("side", ["left", "right"])
def test_from_turns_to_tensors_each_token_has_its_own_signal(side: Literal["left", "right"]):
    samples, _ = run(two_trajectories(), config(), PROBES)
    batch = collate([samples["q/0/1"], samples["q/0/2"]], pad_id=9, side=side)
    # turn 1: 3 + 2 tokens, turn 2: 5 + 4 with a memory on response tokens 1 and 2; both 0.70711, see the test above
    outcome, memory = 0.5 / (math.sqrt(0.5) + 1e-6), 0.2 / (math.sqrt(0.08) + 1e-6)
    padding = [0.0] * 4
    first, second = [0.0] * 3 + [outcome] * 2, [0.0] * 5 + [outcome, outcome + memory, outcome + memory, outcome]
    rows = [padding + first if side == "left" else first + padding, second]
    assert batch.advantages.tolist() == [pytest.approx(row) for row in rows]
    assert (batch.weights != 0).tolist() == [[value != 0 for value in row] for row in rows]
    assert batch.advantages.sum().item() == pytest.approx(6 * outcome + 2 * memory)
    assert (batch.old_logprobs != 0).tolist() == (batch.weights != 0).tolist()


def test_groups_are_by_id_however_they_are_mixed_and_whatever_they_ask():
    """Two ids with one text: each is compared with its own group, in blocks and interleaved alike."""
    answers = {"a": ["Paris", "Rome"], "b": ["Paris", "Paris"]}
    found = [
        trajectory([turn(3, 2), turn(5, 4, (0, 2))], name, sample=i, answer=answer)
        for name, group in answers.items()
        for i, answer in enumerate(group)
    ]
    scores = {t.key: [turn_score(t, 1), turn_score(t, 2, [-0.1], [-0.1 * (i + 1)])] for i, t in enumerate(found)}
    questions = {name: replace(question(), question_id=name) for name in answers}

    def built(order: list[int]) -> dict[str, Sample]:
        chosen = [found[index] for index in order]
        flat = [score for t in chosen for score in scores[t.key]]
        return {sample.key: sample for sample in build(chosen, questions, flat, config(), round_index=0)[0]}

    apart, mixed = built([0, 1, 2, 3]), built([2, 0, 3, 1])
    assert apart == mixed
    outcome = 0.5 / (math.sqrt(0.5) + 1e-6)  # a: 1 and 0
    assert [apart[f"{key}/1"].outcome_advantage for key in ("a/0", "a/1")] == pytest.approx([outcome, -outcome])
    assert [apart[f"{key}/1"].outcome_advantage for key in ("b/0", "b/1")] == [0.0, 0.0]


@pytest.mark.parametrize("status", ["tool_failed", "context_overflow"])
def test_a_batch_with_nothing_to_train_on(status: str):
    nothing = [trajectory([], sample=i, status=status, answer=None) for i in range(2)]
    assert run(nothing, config(), {}) == ({}, [])


@pytest.mark.parametrize("status", ["no_action", "max_turns", "truncated", "context_overflow"])
def test_a_trajectory_without_an_answer_is_a_wrong_one(status: str):
    unanswered = trajectory([turn(3, 2), turn(5, 4, (0, 2))], sample=1, status=status, answer=None)
    samples, table = run([two_trajectories()[0], unanswered], config(), PROBES)
    assert {row.score for row in table if row.sample_index == 1} == {0.0}
    assert samples["q/1/2"].outcome_advantage == pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-6))
