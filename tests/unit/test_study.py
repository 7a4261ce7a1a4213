"""An ablation compared: the worked numbers stand beside the expected ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st

from mempo import resampling, storage, study, study_report
from mempo.evaluation import EvaluationRow
from mempo.matrix import matrix
from mempo.params import ConfigError, load_config


def write_cell(
    folder: Path, variant: str, seed: int, ems: list[float], curve: list[float], mix: str = "easy", shared: str = "s"
) -> None:
    cell = folder / mix / f"seed_{seed}" / variant
    cell.mkdir(parents=True)
    made = {"mix": mix, "seed": seed, "variant": variant, "run": f"{variant}-1", "shared": shared, "quality": 0.5}
    (cell / "cell.json").write_text(json.dumps(made))
    rounds = {"round": range(len(curve)), "em": curve, "trajectories": 64, "cpu/rollout_s": 2.0, "cpu/check_s": 9.0}
    pd.DataFrame(rounds).to_parquet(cell / "rounds.parquet")
    rewards = {"round": [0, 0, 1], "turn": [2, 3, 2], "mem_reward": [0.1, None, -0.2]}
    pd.DataFrame(rewards).to_parquet(cell / "rewards.parquet")
    rows = [
        EvaluationRow(
            variant,
            greedy,
            f"q{i}",
            "?",
            "geo",
            1,
            0,
            None,
            1.0 if greedy else em,
            0.0,
            0.0,
            True,
            "answered",
            1,
            1,
            1,
            1.0,
        )
        for i, em in enumerate(ems)
        for greedy in (False, True)
    ]
    storage.write_records(cell / "evaluation.parquet", rows)


def test_reaches_is_linear_between_rounds() -> None:
    assert study.reaches([64, 128, 192], [0.2, 0.6, 0.8], 0.7) == pytest.approx(160.0)  # half way from .6 to .8
    assert study.reaches([64, 128], [0.9, 0.1], 0.7) == 64.0
    assert study.reaches([64, 128], [0.1, 0.2], 0.7) == math.inf
    # The first two rounds have no running mean of three.
    assert study.reaches([64, 128, 192, 256], [math.nan, math.nan, 0.5, 0.9], 0.7) == pytest.approx(224.0)


def test_holm_on_worked_values() -> None:
    # Sorted .01 .03 .04, times 3, 2, 1: .03 .06 .04, and a later one is never below an earlier: .06.
    assert resampling.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert resampling.holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_never_lowers_a_p_value_and_keeps_the_order(p_values: list[float]) -> None:
    corrected = resampling.holm(p_values)
    assert all(after >= before for before, after in zip(p_values, corrected, strict=True))
    ranks = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [corrected[i] for i in ranks] == sorted(corrected)


def test_resampled_means_have_the_mean_and_spread_of_crossed_draws() -> None:
    values = np.array([[1.0, 0.0], [1.0, 0.0]])  # seeds agree: only the draw of questions matters
    means = resampling.resampled_means(values, 20_000, seed=1)
    assert means.mean() == pytest.approx(0.5, abs=0.01)
    assert means.std() == pytest.approx(0.5 / math.sqrt(2), abs=0.01)  # two draws of a fair coin
    assert resampling.resampled_means(np.full((3, 4), 0.25), 10, seed=1) == pytest.approx(0.25)


def test_cells_become_costs_curves_and_comparisons(tmp_path: Path) -> None:
    for seed in range(5):
        write_cell(tmp_path, "grpo", seed, [0.0] * 40, [0.1, 0.2, 0.3, 0.4, 0.5])
        write_cell(tmp_path, "better", seed, [1.0] * 30 + [0.0] * 10, [0.3, 0.5, 0.7, 0.9, 0.9])
    cells = study.read_cells(tmp_path)
    table = study.tables(
        cells, study.costs_to_target(study.learning_curves(cells), {"easy": 0.6}), ["grpo", "not there"]
    )["easy"]
    # Means of three: better .5 .7 .833 after 192, 256, 320 rollouts -> .6 half way to 256; grpo ends at .4.
    assert table.loc["better", "rollouts"] == pytest.approx(224.0)
    assert table.loc["better", "cpu_seconds"] == pytest.approx(7.0)  # 2 s a round, checks stay out
    assert table.loc["grpo", "rollouts"] == math.inf
    assert table.loc["grpo", "reached"] == 0 and table.loc["better", "reached"] == 5
    assert table.loc["better", "em"] == pytest.approx(0.75)
    assert math.isnan(table.loc["grpo", "em_to_grpo_value"])
    assert table.loc["better", "em_to_grpo_value"] == pytest.approx(0.75)
    found = resampling.compare(study.answers(cells, greedy=False), "grpo")["better"]
    assert 0.55 < found.low < 0.7 < 0.8 < found.high < 0.95  # +- 2 * sqrt(.75 * .25 / 40) = .137
    assert found.p_value == pytest.approx(1e-4)
    assert table.loc["better", "rollouts_to_grpo_value"] == 0.0  # grpo never gets there


def test_cost_ratios_are_paired_by_seed_and_hold_infinity() -> None:
    pairs = [(100.0, 200.0), (150.0, math.inf), (math.inf, math.inf), (90.0, 60.0)]
    spent = pd.DataFrame(
        [(seed, name, pair[i]) for seed, pair in enumerate(pairs) for i, name in enumerate(("new", "grpo"))],
        columns=["seed", "variant", "rollouts"],
    ).assign(mix="easy")  # fmt: skip
    found = resampling.cost_ratios(spent, "grpo", "rollouts")["new"]
    assert found.value == 0.5  # of 0.5, 0 and 1.5; the third seed tells nothing
    assert (found.low, found.high) == (0.0, 1.5)
    ranks = study.mean_ranks(spent)
    # Seeds: 1 | 1 | 1.5 (tie) | 2 for new.
    assert ranks["new"] == pytest.approx(5.5 / 4) and ranks["grpo"] == pytest.approx(6.5 / 4)


def test_p_values_of_all_mixes_are_corrected_together() -> None:
    tables = {
        mix: pd.DataFrame({"em_to_grpo_p_value": [p, math.nan], "rollouts_to_grpo_p_value": 0.5}, index=["a", "grpo"])
        for mix, p in (("easy", 0.01), ("hard", 0.04))
    }
    found = study.corrected(tables, "em")
    assert found["easy"].loc["a", "em_to_grpo_p_value"] == pytest.approx(0.02)
    assert found["hard"].loc["a", "em_to_grpo_p_value"] == pytest.approx(0.04)
    assert found["easy"].loc["a", "rollouts_to_grpo_p_value"] == 0.5


def test_only_seeds_that_both_have_are_compared(tmp_path: Path) -> None:
    write_cell(tmp_path, "grpo", 0, [0.0, 1.0], [0.1])
    write_cell(tmp_path, "other", 0, [0.0, 1.0], [0.1])
    write_cell(tmp_path, "other", 1, [1.0, 1.0], [0.1])
    found = resampling.compare(study.answers(study.read_cells(tmp_path), greedy=False), "grpo")["other"]
    assert found.value == 0.0 and math.isnan(found.p_value)  # one seed has no spread


def test_cells_on_other_questions_are_refused(tmp_path: Path) -> None:
    write_cell(tmp_path, "grpo", 0, [0.0, 1.0], [0.1])
    write_cell(tmp_path, "other", 0, [0.0, 1.0, 1.0], [0.1])
    with pytest.raises(ValueError, match="different questions"):
        study.answers(study.read_cells(tmp_path), greedy=False)


def test_an_empty_study_names_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mempo ablate"):
        study.read_cells(tmp_path)


def test_the_page_holds_every_variant_and_nothing_from_outside(tmp_path: Path) -> None:
    for variant in ("grpo", "better"):
        for seed in (0, 1):
            write_cell(tmp_path / "ablation", variant, seed, [1.0, 0.0], [0.1, 0.2, 0.5, 0.6])
    asked = {"targets": {"easy": 0.3}, "baselines": ["grpo"], "variants": ["grpo", "better"]}
    (tmp_path / "ablation" / "study.json").write_text(json.dumps(asked))
    page = study_report.page(study.read(tmp_path / "ablation"))
    assert page.count('<td class="text">better</td>') == 2  # what it reached, and against grpo
    assert "1.00 (1.00 1.00)" in page  # both take the same number of rollouts
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
    assert page.count("data:image/png;base64,") == 4  # curves, final EM, the ridges of both


VARIANTS = """
data: {num_train: 8}
ablate:
  mixes: [easy, hard]
  seeds: [3, 4]
  variants:
    a: {advantage: {mem_weight: 0.0}}
    b: {mem_reward: {mask: none}}
"""


def test_the_matrix_is_every_seed_mix_and_variant_with_whole_settings(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(VARIANTS)
    cells = matrix(tmp_path)
    assert [cell.label for cell in cells[:4]] == ["easy/3/a", "easy/3/b", "hard/3/a", "hard/3/b"] and len(cells) == 8
    assert len({cell.home for cell in cells}) == 4 and len({cell.folder for cell in cells}) == 8
    config = load_config(tmp_path / "params.yaml", cells[-1].settings, policy="b")
    assert (config.data.mix, config.warmstart.seed, config.loop.seed, config.mem_reward.mask) == ("hard", 4, 4, "none")
    assert [cell.label for cell in matrix(tmp_path, quick=True)] == ["easy/3/a", "easy/3/b"]
    assert [cell.label for cell in matrix(tmp_path, seeds=[9], mixes=["hard"], variants=["b"])] == ["hard/9/b"]


@pytest.mark.parametrize(
    ("variant", "message"),
    [("{mem_reward: {maks: none}}", "did you mean mask"), ("{data: {seed: 1}}", "one for all policies")],
)
def test_a_wrong_variant_stops_the_matrix_before_any_work(tmp_path: Path, variant: str, message: str) -> None:
    (tmp_path / "params.yaml").write_text(VARIANTS + f"    c: {variant}\n")
    with pytest.raises(ConfigError, match=message):
        matrix(tmp_path)


def test_an_unknown_variant_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(VARIANTS)
    with pytest.raises(ConfigError, match="known: a, b"):
        matrix(tmp_path, variants=["z"])


def test_a_folder_without_study_json_is_named(tmp_path: Path) -> None:
    write_cell(tmp_path, "grpo", 0, [0.0], [0.1])
    with pytest.raises(FileNotFoundError, match=r"study\.json is missing; `mempo ablate`"):
        study.read(tmp_path)


def test_a_cell_cut_in_half_is_named(tmp_path: Path) -> None:
    write_cell(tmp_path, "grpo", 0, [0.0], [0.1])
    (tmp_path / "easy" / "seed_0" / "grpo" / "cell.json").write_text('{"mix": "ea')
    with pytest.raises(ValueError, match=r"cell\.json"):
        study.read_cells(tmp_path)


def test_a_mix_without_a_target_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(VARIANTS)
    with pytest.raises(ConfigError, match=r"ablate\.targets: no EM .* 'general'"):
        matrix(tmp_path, mixes=["general"])


def test_the_median_of_an_even_number_of_seeds_lies_between_the_two_in_the_middle() -> None:
    rows = [
        (seed, name, cost) for seed in range(10) for name, cost in (("new", 40.0 + 50 * (seed % 2)), ("grpo", 100.0))
    ]
    spent = pd.DataFrame(rows, columns=["seed", "variant", "rollouts"])
    # Five seeds at .4 and five at .9: .65, and not the lower one of the two.
    assert resampling.cost_ratios(spent, "grpo", "rollouts")["new"].value == pytest.approx(0.65)


def asked_for(folder: Path, *variants: str) -> None:
    asked = {"targets": {"easy": 0.3}, "baselines": ["grpo"], "variants": list(variants)}
    (folder / "study.json").write_text(json.dumps(asked))


def test_cells_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_cell(tmp_path, "grpo", seed, [0.0], [0.1])
    write_cell(tmp_path, "new", 0, [1.0], [0.1], shared="other")
    asked_for(tmp_path, "grpo", "new")
    with pytest.raises(ValueError, match="seed_0/new: made under other settings"):
        study.read(tmp_path)


def test_a_variant_that_is_no_longer_asked_for_is_left_out(tmp_path: Path) -> None:
    for variant in ("grpo", "new", "gone"):
        write_cell(tmp_path, variant, 0, [0.0], [0.1])
    asked_for(tmp_path, "grpo", "new")
    assert sorted(study.read(tmp_path).tables["easy"].index) == ["grpo", "new"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"mix": 3}'])
def test_a_file_that_is_no_cell_or_no_study_is_named(tmp_path: Path, text: str) -> None:
    write_cell(tmp_path, "grpo", 0, [0.0], [0.1])
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(ValueError, match=r"study\.json: "):
        study.read(tmp_path)
    (tmp_path / "easy" / "seed_0" / "grpo" / "cell.json").write_text(text)
    with pytest.raises(ValueError, match=r"cell\.json: "):
        study.read(tmp_path)


def test_a_damaged_cell_is_not_taken_for_made(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(VARIANTS)
    cell = matrix(tmp_path)[0]
    write_cell(cell.study, cell.variant, cell.seed, [0.0], [0.1], shared=cell.shared)
    assert study.is_made(cell, "a-1") and not study.is_made(cell, "a-2")
    other = matrix(tmp_path, ["loop.num_rounds=3"])[0]
    assert not study.is_made(other, "a-1"), "made under other settings"
    whole = (cell.folder / "cell.json").read_text()
    (cell.folder / "cell.json").write_text(whole[:9])
    assert not study.is_made(cell, "a-1")
    (cell.folder / "cell.json").write_text(whole)
    (cell.folder / "rounds.parquet").unlink()
    assert not study.is_made(cell, "a-1")
    with pytest.raises(FileNotFoundError, match=r"rounds\.parquet is missing; `mempo ablate`"):
        study.read_cells(cell.study)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("advantage.mem_weight=0.5", "variant a decides advantage.mem_weight"),
        ("advantage={mem_weight: 0.5}", "variant a decides advantage.mem_weight"),
        ("data.mix=hard", "ablate.mixes decides data.mix"),
        ("loop.seed=9", "ablate.seeds decides loop.seed"),
        ("ablate.baselines=[nope]", "no variant 'nope'"),
        ("ablate.variants={}", "there is none"),
        ("ablate.targets={foo: 0.5}", "ablate.targets"),
        ("ablate.variants.b={loop: {seed: 3}}", "ablate.seeds decides it"),
    ],
)
def test_settings_that_would_change_what_a_cell_is_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    (tmp_path / "params.yaml").write_text(VARIANTS)
    with pytest.raises(ConfigError, match=message):
        matrix(tmp_path, [setting])
    assert len(matrix(tmp_path, ["advantage.std_floor=0.1"], variants=["b", "b"])) == 4  # what nobody decides
