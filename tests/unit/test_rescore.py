"""A run's rewards under other settings, from its files alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mempo import storage
from mempo.config import Config
from mempo.params import ConfigError
from mempo.records import TurnScore
from mempo.rescore import other_passes, rescore, summary
from mempo.workspace import Run, Workspace, recorded
from tests.unit.builders import probe_score, question, trajectory, turn, turn_score

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


@pytest.mark.parametrize(
    ("made", "asked", "named"),
    [
        ({}, {"scoring": {"baseline": "seen"}}, "scoring.baseline: 'seen' needs other forward passes"),
        ({}, {"scoring": {"full_scorer": "reference"}}, "scoring.full_scorer: 'reference'"),
        ({}, {"scoring": {"lookahead": 1}}, "scoring.lookahead: 1"),
        ({}, {"scoring": {"aliases": "best"}}, "scoring.aliases: 'best'"),
        ({"advantage": {"mem_weight": 0.0}}, {"advantage": {"mem_weight": 1.0}}, "advantage.mem_weight"),
        # What a wider pass has stored answers a narrower one.
        ({"scoring": {"full_scorer": "reference"}}, {}, None),
        ({"scoring": {"lookahead": 2}}, {"scoring": {"lookahead": 1}}, None),
        ({"scoring": {"aliases": "best"}}, {"scoring": {"aliases": "mean"}}, None),
        ({"scoring": {"aliases": "best"}}, {}, None),
        ({}, {"scoring": {"mode": "padded"}}, None),  # the same values in another layout
        ({}, {"mem_reward": {"kind": "log_ratio"}, "advantage": {"mem_weight": 0.0}}, None),
    ],
)
def test_a_setting_that_needs_another_pass_is_named(made: Any, asked: Any, named: str | None):
    found = other_passes(Config.model_validate(made), Config.model_validate(asked))
    assert found is None if named is None else found is not None and found.startswith(named)


def test_a_setting_that_needs_other_rollouts_is_refused_by_name():
    asked = Config.model_validate({"rollout": {"temperature": 0.5}})
    with pytest.raises(ConfigError, match=r"rollout\.temperature: 0\.5 needs other rollouts than the run's 1\.0"):
        other_passes(Config(), asked)


def test_wider_scores_answer_narrower_questions(run: Run):
    """Two wordings, two steps of look-ahead, a reference: each is left out by name."""
    logs = [[math.log(p)] for p in (0.8, 0.2, 0.3, 0.6, 0.5)]
    first = probe_score(logs[0], logs[1], ahead_logprobs=[logs[2], logs[3]], actor_logprobs=logs[4])
    other = probe_score([math.log(0.9)], [math.log(0.9)], ahead_logprobs=[[-0.1], [-0.1]], actor_logprobs=[-0.1])
    file = run.round(0) / "scores.parquet"
    scores = storage.read_records(file, TurnScore)
    storage.write_records(file, [replace(s, probes=[first, other]) if s.probes else s for s in scores])

    def p(**scoring: Any) -> tuple[float, float]:
        found = rescore(run.folder, Config.model_validate({"mem_reward": {"mask": "none"}, "scoring": scoring}), {})
        row = found.dropna(subset=["p_mem"]).iloc[0]
        return row["p_full"], row["p_mem"]

    assert p() == pytest.approx((0.5, 0.2))  # the actor's p_full, the memory alone, the first wording
    assert p(full_scorer="reference") == pytest.approx((0.8, 0.2))
    assert p(lookahead=1) == pytest.approx((0.5, 0.3))
    assert p(lookahead=2) == pytest.approx((0.5, 0.45))  # (.3 + .6) / 2
    assert p(aliases="best", full_scorer="reference") == pytest.approx((0.9, 0.9))


def test_a_folder_without_rounds_or_of_another_version(run: Run, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no finished round"):
        rescore(tmp_path / "empty", Config(), {})
    written = storage.read_json(run.config_file)
    written["config"]["loop"]["nmu_rounds"] = 3
    storage.write_json(run.config_file, written)
    with pytest.raises(ConfigError, match=r"another version: loop\.nmu_rounds"):
        recorded(run.folder)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        recorded(tmp_path)


def test_the_published_preset_is_not_forgotten(run: Run):
    from mempo.params import overridden

    asked = overridden(recorded(run.folder), ["preset=published"])
    assert (asked.mem_reward.mask, asked.mem_reward.answer_tokens) == ("independent", "last_four")
    with pytest.raises(ConfigError, match=r"format\.require_memory: False needs other rollouts"):
        other_passes(recorded(run.folder), asked)


@pytest.mark.parametrize("setting", ["search.top_k=3", "loop.group_size=2", "warmstart.num_steps=0"])
def test_what_the_rollouts_depend_on_is_refused(run: Run, setting: str):
    from mempo.params import overridden

    made = recorded(run.folder)
    with pytest.raises(ConfigError, match=rf"{setting.split('=')[0]}: .* needs other rollouts"):
        other_passes(made, overridden(made, [setting]))


def test_a_round_without_its_scores_is_named(run: Run):
    (run.round(0) / "scores.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"round_0000: scores\.parquet is missing"):
        rescore(run.folder, recorded(run.folder), {})
