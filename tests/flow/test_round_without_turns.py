"""A round in which every question is longer than its limit: no turn, no reward, and the run goes on to say so."""

from __future__ import annotations

from pathlib import Path

from mempo import figures, storage
from mempo.config import Config
from mempo.history import rewards_table
from mempo.workspace import Workspace


def test_rounds_without_turns_have_an_empty_reward_table_and_pictures(tmp_path: Path):
    run = Workspace(tmp_path).run("mempo", Config(), {"data": "a"})
    for index in (0, 1):
        storage.write_records(run.round(index) / "rewards.parquet", [])

    found = rewards_table(run, 1)

    assert len(found) == 0
    assert {"question_id", "turn", "mem_reward", "round"} <= set(found)
    figures.mem_reward_box(found)
    figures.mem_reward_by_turn(found)
