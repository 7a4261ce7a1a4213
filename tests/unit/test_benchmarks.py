"""Rows of benchmarks: which target is reached, what got worse, and the page they stand in. Nothing is timed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.rows import BEGIN, END, Row

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
