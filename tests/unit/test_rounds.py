"""Which questions a round asks, and what a round reports."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from mempo import storage
from mempo.records import Status
from mempo.rounds import by_question, questions_of_round, read_round, reward_figures, reward_frame, rollout_figures
from mempo.samples import TurnReward
from mempo.sources import Phase
from tests.unit.builders import question, trajectory, turn, turn_score


def ids(round_index: int, count: int = 10, per_round: int = 4, seed: int = 0) -> list[str]:
    pool = [question(str(i)) for i in range(count)]
    return [q.question_id for q in questions_of_round(pool, round_index, per_round, seed)]


def test_every_question_comes_once_an_epoch():
    drawn = [name for index in range(5) for name in ids(index)]  # 5 rounds x 4 = 2 epochs of 10
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(str(i) for i in range(10))
    assert drawn[:10] != drawn[10:]


def test_a_round_depends_on_its_index_and_seed_alone():
    assert ids(3) == ids(3)
    assert ids(3) != ids(3, seed=1)


@pytest.mark.parametrize(("count", "per_round"), [(4, 3), (5, 4), (7, 4), (10, 4), (12, 12), (30, 7)])
def test_a_round_over_the_end_of_an_epoch_asks_nothing_twice(count: int, per_round: int):
    drawn = [ids(index, count, per_round) for index in range(40)]
    assert all(len(set(names)) == per_round for names in drawn)
    flat = [name for names in drawn for name in names]
    for start in range(0, len(flat) - count, count):
        assert len(set(flat[start : start + count])) == count


def test_a_round_needs_as_many_questions():
    with pytest.raises(ValueError, match=r"loop\.questions_per_round: 4, and train has 3 questions$"):
        ids(0, count=3)


def test_a_curriculum_asks_of_the_objectives_of_its_phase():
    pool = [question(f"{number}-{i}", [["A"]] * number) for number in (1, 2, 4) for i in range(6)]
    phases = [Phase(from_round=0, objectives=(1,)), Phase(from_round=3, objectives=(2, 4))]

    def asked(round_index: int) -> list[str]:
        return [q.question_id for q in questions_of_round(pool, round_index, 2, 0, phases)]

    first = [name for index in range(3) for name in asked(index)]
    later = [name for index in range(3, 9) for name in asked(index)]
    assert sorted(first) == [f"1-{i}" for i in range(6)]  # 3 rounds x 2: one epoch of the first phase
    assert sorted(later) == [f"{number}-{i}" for number in (2, 4) for i in range(6)]
    assert asked(3) == [q.question_id for q in questions_of_round(pool[6:], 0, 2, 0)]
    with pytest.raises(ValueError, match=r"questions_per_round: 2, and train has 0 questions of \[3\] objectives"):
        questions_of_round(pool, 0, 2, 0, [Phase(from_round=0, objectives=(3,))])


def test_a_question_id_twice_is_refused():
    with pytest.raises(ValueError, match="'a' occurs 2 times"):
        by_question([question("a"), question("b"), question("a")])


def reward(sample: int, turn_index: int, value: float | None, score: float = 1.0, **fields: object) -> TurnReward:
    values = {
        "question_id": "q", "status": "answered", "valid": True, "outcome_advantage": 0.0,
        "reason": None if value is not None else "first_turn", "p_full": 0.5, "p_mem": 0.5, "kept_full": 1,
        "kept_mem": 0, "answer_tokens": 2, "mem_advantage": 0.0, "mem_tokens": 4, "context_tokens": 9,
        "response_tokens": 5,
    }  # fmt: skip
    return TurnReward(sample_index=sample, turn=turn_index, mem_reward=value, score=score, **(values | fields))  # type: ignore[arg-type]


def test_reward_figures():
    table = [reward(0, 1, None), reward(0, 2, 0.1), reward(1, 1, None, score=0.0), reward(1, 2, 0.3, score=0.0)]
    figures = reward_figures(table)
    assert figures["reward/mean"] == 0.5
    assert figures["group/flat_share"] == 0.0
    assert figures["mem_reward/n"] == 2
    assert figures["mem_reward/p50"] == pytest.approx(0.2)
    assert figures["mem_reward/turn_2/mean"] == pytest.approx(0.2)
    assert figures["kept/full"] == 0.5 and figures["kept/nothing_mem"] == 1.0
    assert figures["no_signal/first_turn"] == 0.5


def test_rollout_figures_count_statuses():
    found = [trajectory([turn(3, 2), turn(5, 4)]), trajectory([turn(3, 2, valid=False)], sample=1, status="no_action")]
    figures = rollout_figures(found)
    assert figures["turns"] == 1.5
    assert figures["format_rate"] == 0.5
    assert figures["status/no_action"] == 0.5
    assert figures["response_tokens"] == 8 and figures["peak_tokens"] == 9


@pytest.mark.parametrize("status", get_args(Status))
def test_every_status_has_its_count(status: str):
    found = [trajectory([turn(3, 2)], status=status), trajectory([], sample=1, status="tool_failed", answer=None)]
    shares = {name: value for name, value in rollout_figures(found).items() if name.startswith("status/")}
    assert set(shares) == {f"status/{name}" for name in get_args(Status)}
    assert shares[f"status/{status}"] == (1.0 if status == "tool_failed" else 0.5)
    assert sum(shares.values()) == 1.0


def test_a_round_in_which_no_context_fits_is_counted():
    figures = reward_figures([reward(0, 1, None), reward(0, 2, None, reason="overflow")])
    assert figures["no_signal/overflow"] == 0.5 and figures["mem_reward/n"] == 0
    assert all(math.isfinite(value) for value in figures.values())


def test_what_is_skipped_for_nothing_kept_is_counted_as_that():
    """``mem_reward.empty: skip``: three probes, of which one kept nothing after the memory and one nothing at all."""
    table = [
        reward(0, 2, 0.1, kept_full=2, kept_mem=1),
        reward(1, 2, None, reason=None, kept_full=1, kept_mem=0, p_mem=None),
        reward(2, 2, None, reason=None, kept_full=0, kept_mem=0, p_full=None, p_mem=None),
    ]
    figures = reward_figures(table)
    assert figures["mem_reward/n"] == 1 and figures["p_full/n"] == 2 and figures["p_full/turn_2/mean"] == 0.5
    assert figures["kept/nothing_full"] == pytest.approx(1 / 3) and figures["kept/nothing_mem"] == pytest.approx(2 / 3)
    assert figures["kept/full"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert all(math.isfinite(value) for value in reward_figures(table[1:]).values())


def test_a_round_is_read_as_far_as_its_steps_have_written_it(tmp_path: Path):
    of = trajectory([turn(3, 2), turn(5, 4, (1, 3))])
    storage.write_records(tmp_path / "rollouts.parquet", [of])
    storage.write_records(tmp_path / "questions.parquet", [question("q")])
    made = read_round(tmp_path)
    assert (made.trajectories, made.questions, made.scores, made.table) == ([of], {"q": question("q")}, [], [])
    scores, table = [turn_score(of, 1), turn_score(of, 2, [-0.1], [-0.2])], [reward(0, 1, None), reward(0, 2, 0.1)]
    storage.write_records(tmp_path / "scores.parquet", scores)
    storage.write_records(tmp_path / "rewards.parquet", table)
    made = read_round(tmp_path)
    assert (made.scores, made.table) == (scores, table)
    (tmp_path / "scores.parquet").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"scores\.parquet"):
        read_round(tmp_path)
    (tmp_path / "rollouts.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"rollouts\.parquet"):
        read_round(tmp_path)


def test_a_reward_frame_has_its_columns_without_rows():
    whole, empty = reward_frame([reward(0, 1, None), reward(0, 2, 0.1)]), reward_frame([])
    assert whole.columns.tolist() == empty.columns.tolist() == list(asdict(reward(0, 1, None)))
    assert math.isnan(whole["mem_reward"][0]) and whole["turn"].tolist() == [1, 2]
    assert empty.dtypes["question_id"] == whole.dtypes["question_id"] and empty.dtypes["turn"] == whole.dtypes["turn"]
