"""Rows of benchmarks: which target is reached, what got worse, and the page they stand in. Nothing is timed here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as program, growth, reward_share, rows, scaling, startup, vllm
from benchmarks.rows import BEGIN, END, Row, Skipped
from benchmarks.update import draw

SPEED = Row("speed", 2.0, "higher", "a against b", 1.5)
COST = Row("cost", 0.6, "lower", "seconds", 0.5, unit="s")


def test_targets_are_reached_in_their_direction() -> None:
    assert (SPEED.reached, COST.reached, Row("x", 1.0, "higher", "").reached) == (True, False, None)


@pytest.mark.parametrize(("now", "worse"), [(1.61, False), (1.59, True), (3.0, False)])
def test_a_ratio_that_fell_by_a_fifth_is_worse(now: float, worse: bool) -> None:
    found = rows.worse([Row("speed", now, "higher", "")], {"speed": SPEED})
    assert bool(found) is worse


def test_one_that_should_be_small_is_worse_when_it_grows() -> None:
    tokens = Row("tokens", 1.0, "lower", "")
    assert rows.worse([Row("tokens", 1.3, "lower", "")], {"tokens": tokens})
    assert not rows.worse([Row("tokens", 1.2, "lower", ""), Row("new", 9.0, "lower", "")], {"tokens": tokens})


def test_seconds_of_another_machine_are_no_regression() -> None:
    assert not rows.worse([Row("cost", 60.0, "lower", "", unit="s")], {"cost": COST})


def test_rows_replace_their_own_and_the_page_keeps_its_text(tmp_path: Path) -> None:
    (tmp_path / "RESULTS.md").write_text(f"before\n{BEGIN}old\n{END}after\n")
    rows.write([SPEED, COST], tmp_path)
    rows.write([Row("speed", 1.0, "higher", "c against d", 1.5)], tmp_path)
    assert set(rows.read(tmp_path / "results.json")) == {"speed", "cost"}
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.startswith(f"before\n{BEGIN}") and page.endswith(f"{END}after\n") and "old" not in page
    assert "| speed: c against d | 1 x | ≥ 1.5 x | **missed** |" in page
    assert page.count("\n| ") == 3  # a head and two rows


def test_rows_are_stamped_with_the_day_and_the_machine() -> None:
    stamped = rows.stamped(SPEED)
    assert len(stamped.date) == 10 and "torch" in stamped.machine and stamped.value == SPEED.value


def test_the_page_of_the_project_has_its_marks() -> None:
    page = (rows.HERE / "RESULTS.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception | None], None]:
    """Make a benchmark of that name, which gives one row and raises."""

    def make(name: str, error: Exception | None) -> None:
        def run(folder: Path, full: bool) -> Iterator[Row]:
            yield replace(SPEED, name=name)
            if error:
                raise error

        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", SimpleNamespace(run=run))

    return make


def test_one_that_raises_costs_no_row_of_the_others(
    known: Callable[[str, Exception | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    known("broken", AssertionError("other tokens"))
    known("absent", Skipped("no such program"))
    known("whole", None)
    found, failed = program.measured(["broken", "absent", "whole"], full=False)
    assert [row.name for row in found] == ["broken", "absent", "whole"] and failed == ["broken"]
    told = capsys.readouterr()
    assert "absent: skipped: no such program" in told.out and "other tokens" in told.err


@pytest.mark.parametrize(("error", "code"), [(AssertionError("x"), 1), (Skipped("x"), 0)])
def test_a_failure_ends_with_one_and_the_rows_are_written(
    known: Callable[[str, Exception | None], None], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    written: list[Row] = []
    known("first", error)
    monkeypatch.setattr(program, "NAMES", ("first",))
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    monkeypatch.setattr(rows, "write", written.extend)
    assert program.main() == code
    assert [row.name for row in written] == ["first"]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law(power: float) -> None:
    sizes = (2, 4, 8, 16)
    assert scaling.exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_a_peak_is_what_an_action_holds_at_a_time() -> None:
    def three_in_turn() -> None:
        for _ in range(3):
            len(b"x" * (64 * growth.MIB))

    assert 60 < growth.peak(three_in_turn) / growth.MIB < 100
    assert growth.peak(lambda: None) < 8 * growth.MIB


def test_an_action_that_fails_has_no_peak() -> None:
    with pytest.raises(AssertionError, match="without a figure"):
        growth.peak(lambda: 1 / 0)


def test_orchestration_is_what_the_steps_leave_of_the_wall() -> None:
    # Ten rounds of 2.25 s on the wall, of which the steps took 1.8 s.
    trained = {"rounds": 10, "seconds": {"rollout": 12.0, "update": 6.0}, "orchestration_share": 0.2}
    assert startup.orchestration(trained) == (pytest.approx(0.45), 0.2)


def test_a_reward_share_of_other_tokens_or_of_no_memory_is_none() -> None:
    drawn, scored, unscored = draw(300, 3, (4, 9), 5), SimpleNamespace(probes=[1]), SimpleNamespace(probes=[])
    outcome = (drawn, [unscored] * 3)
    assert reward_share._agree(outcome, (drawn, [scored, scored, unscored])) == 2
    other = draw(300, 3, (4, 9), 5, seed=1)
    for without, within in ((outcome, outcome), (outcome, (other, [scored])), ((drawn, [scored]), (drawn, [scored]))):
        with pytest.raises(AssertionError):
            reward_share._agree(without, within)


def test_vllm_must_give_the_same_tokens_and_log_probs() -> None:
    ours = [([i, 2], -3.0) for i in range(10)]
    assert vllm._agree(ours, [([9, 9], -1.0), *ours[1:]]) == 9
    for wrong in ([([9, 9], -1.0)] * 2 + ours[2:], [([0, 2], -3.1), *ours[1:]]):
        with pytest.raises(AssertionError):
            vllm._agree(ours, wrong)


def test_drawn_samples_train_their_responses_alone() -> None:
    drawn = draw(300, 4, (4, 9), 5)
    assert all(4 <= len(s.token_ids) - 5 <= 9 and s.loss_mask[-6:] == [0, 1, 1, 1, 1, 1] for s in drawn)
    assert sum(s.weight * sum(s.loss_mask) for s in drawn) == pytest.approx(1.0)
