"""A run's rewards under other settings, from its files alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mempo import storage
from mempo.config import Config
from mempo.params import ConfigError
from mempo.rescore import refuse_other_passes, rescore, summary
from mempo.workspace import Run, Workspace, recorded
from tests.unit.builders import question, trajectory, turn, turn_score

LYON = [("Lyon", "France")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """One finished round: a memory that holds France (p_mem 0.9) and one that does not (0.2); p_full 0.8 in both."""
    made = Workspace(tmp_path).run("mempo", Config.model_validate({"mem_reward": {"mask": "none"}}), {"data": "a"})
    first = turn(3, 2, observation="Lyon: country France.")
    pair = [
        trajectory([first, turn(5, 4, (1, 3), memory="country France")], sample=0),
        trajectory([first, turn(5, 4, (1, 3), memory="nothing")], sample=1, answer="Rome"),
    ]
    scores = [turn_score(of, 1) for of in pair]
    scores += [turn_score(of, 2, [math.log(0.8)], [math.log(p)]) for of, p in zip(pair, (0.9, 0.2), strict=True)]
    folder = made.round(0)
    storage.write_records(folder / "questions.parquet", [question()])
    storage.write_records(folder / "rollouts.parquet", pair)
    storage.write_records(folder / "scores.parquet", scores)
    storage.write_json(folder / "advantage.json", {})
    return made


def test_another_variant_from_the_same_files(run: Run):
    table = rescore(run.folder, recorded(run.folder), {"q": [LYON]})
    assert table["mem_reward"].dropna().tolist() == pytest.approx([0.1, -0.6])
    assert table["quality"].dropna().tolist() == [1.0, 0.0]
    found = summary(table)
    assert found["correlation"] == pytest.approx(1.0) and found["complete"] > 0 > found["incomplete"]
    published = Config.model_validate({"mem_reward": {"mask": "independent", "threshold": 0.5}})
    # 0.2 is under the threshold and nothing is kept: the published rule pays the empty memory 1 - 0.8
    filtered = rescore(run.folder, published, {"q": [LYON]})
    assert filtered["mem_reward"].dropna().tolist() == pytest.approx([0.1, 0.2])
    assert summary(filtered)["correlation"] == pytest.approx(-1.0)


def test_a_setting_that_needs_another_pass_is_refused_by_name():
    asked = Config.model_validate({"scoring": {"baseline": "seen"}})
    with pytest.raises(ConfigError, match=r"scoring\.baseline: 'seen' needs other forward passes"):
        refuse_other_passes(Config(), asked)
    refuse_other_passes(Config(), Config.model_validate({"mem_reward": {"kind": "log_ratio"}}))


def test_a_folder_without_rounds_or_of_another_version(run: Run, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no finished round"):
        rescore(tmp_path / "empty", Config(), {})
    written = storage.read_json(run.config_file)
    written["config"]["loop"]["nmu_rounds"] = 3
    storage.write_json(run.config_file, written)
    with pytest.raises(ConfigError, match=r"another version: loop\.nmu_rounds"):
        recorded(run.folder)
