"""Section ``suites`` and who answers; the questions made for a suite; figures and differences by hand; its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mempo import data as datasets, evaluation, storage, suite_report, suite_results
from mempo.agents import read_suite
from mempo.config import Config
from mempo.data import read_truth
from mempo.data.asked import majority, prepare_asked
from mempo.data.geo import build_world, heldout_countries
from mempo.params import ConfigError, checked
from mempo.records import Question
from mempo.suite import Asked
from mempo.suite_results import ALL, Results
from tests.unit.builders import question, trajectory, turn

PARAMS = """
policies:
  mempo: {rollout: {max_turns: 5}}
  full: {rollout: {context: full}, format: {require_memory: false}}
suites:
  far:
    datasets: {own: {split: test}}
    settings: {rollout: {max_turns: 9}}
    agents:
      memory: {policy: mempo}
      all: {policy: full, rollout: {max_turns: 7}}
      start: {policy: warmstart}
      theirs: {policy: some/model}
      cut: {policy: full, rollout: {context: recent}}
"""


def write(root: Path, text: str = PARAMS) -> Path:
    (root / "params.yaml").write_text(text)
    return root


def test_an_agent_is_a_policy_and_its_settings(tmp_path: Path) -> None:
    suite, agents = read_suite(write(tmp_path), "far", ["search.top_k=3"])
    assert [agent.name for agent in agents] == list(suite.agents)
    assert [agent.config.rollout.max_turns for agent in agents] == [9, 7, 9, 9, 9]  # the agent's own, else the suite's
    assert [agent.config.rollout.context for agent in agents] == ["memory", "full", "memory", "memory", "recent"]
    assert {agent.config.search.top_k for agent in agents} == {3}
    checkpoints = tmp_path / "checkpoints"
    assert [agent.policy for agent in agents] == [
        *(checkpoints / name / "final" for name in ("mempo", "full", "warmstart")),
        Path("some/model"),
        checkpoints / "full" / "final",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("far:", "near:", "suites.far: no such suite; did you mean near?"),
        (
            "policy: mempo",
            "policy: mempoo",
            "suites.far.agents.memory.policy: 'mempoo' is no policy and no path",
        ),
        ("policy: mempo", "policy: pretrained", "suites.far.agents.memory.policy: pretrained: model.path is null"),
        ("policy: warmstart", "rollout: {}", "suites.far: agents.start.policy: expected the name of a policy"),
        (
            "{max_turns: 7}",
            "{max_turn: 7}",
            "suites.far.agents.all: rollout.max_turn: unknown key; did you",
        ),
        ("rollout: {max_turns: 9}", "data: {seed: 1}", "suites.far.settings.data: one for all agents"),
        (
            "policy: some/model",
            "policy: some/model, evaluation: {seed: 1}",
            "suites.far.agents.theirs.evaluation: one",
        ),
        ("{split: test}", "{split: test, hops: 1}", "suites.far.datasets.own: hops: does nothing under split: test"),
        ("{split: test}", "{source: geo}", "suites.far.datasets.own: source: geo needs max_questions"),
        (
            "{split: test}",
            "{source: geo, max_questions: 9, objectives: {11: 1}}",
            "suites.far.datasets.own: source: geo needs max_questions, and objectives up to 10",
        ),
        ("{split: test}", "{files: [a.json]}", "suites.far.datasets.own: name a split of the experiment's own data"),
        ("{split: test}", "{source: verl, files: [a]}", "suites.far.datasets.own.corpus: rows of flashrag and verl"),
        ("own:", "Own:", "suites: 'Own': small letters"),
        ("datasets:", "greedy: false\n    samples: 0\n    datasets:", "suites.far: samples: 0 and greedy: false leave"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert PARAMS.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read_suite(write(tmp_path, PARAMS.replace(old, new)), "far")
    assert str(caught.value).startswith(message)


def test_what_an_agent_decides_is_not_overridden_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--set rollout\.max_turns: suites\.far\.settings decides"):
        read_suite(write(tmp_path), "far", ["rollout.max_turns=3"])


def test_suites_change_no_run_folder() -> None:
    from mempo.workspace import result_parameters

    with_suite = checked(
        {"suites": {"a": {"datasets": {"own": {"split": "test"}}, "agents": {"x": {"policy": "a/b"}}}}}
    )
    assert result_parameters(with_suite) == result_parameters(Config())


# --- the questions ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "geo"
    config = Config.model_validate({"data": {"num_train": 20, "num_dev": 5, "num_test": 6}})
    datasets.prepare(config.data, config.model, folder, [])
    return folder


def test_a_split_is_asked_from_its_beginning(own: Path, tmp_path: Path) -> None:
    folder, questions = prepare_asked(Asked(split="test", max_questions=4), Config(), own, tmp_path)
    assert folder == own and questions == storage.read_records(own / "test.parquet", Question)[:4]
    with pytest.raises(ValueError, match="max_questions: 7, and there are 6"):
        prepare_asked(Asked(split="test", max_questions=7), Config(), own, tmp_path)


def test_geo_asks_for_more_objectives_than_training_and_for_held_out_places_alone(own: Path, tmp_path: Path) -> None:
    asked = Asked.model_validate({"source": "geo", "max_questions": 13, "objectives": {1: 1, 4: 1, 10: 2}, "hops": 2})
    folder, questions = prepare_asked(asked, Config(), own, tmp_path)
    counts = [len(one.golden_answers) for one in questions]
    assert {number: counts.count(number) for number in (1, 4, 10)} == {1: 4, 4: 3, 10: 6}
    world = build_world(Config().data)
    heldout = heldout_countries(world, Config().data)
    truth = read_truth(folder / "truth.parquet")
    for one in questions:
        chains = truth[one.question_id]
        assert [chain.values[-1] for chain in chains] == [golds[0] for golds in one.golden_answers]
        assert all(world[name].country in heldout for chain in chains for name in chain.entities)
        assert {len(chain.values) for chain in chains} <= {1, 2}
        if len(chains) == 10:
            assert "; tenth the " in one.question
    assert (folder / "corpus.jsonl").read_bytes() == (own / "corpus.jsonl").read_bytes()
    assert set(majority(folder, asked)) == {"1", "4", "10"}
    assert prepare_asked(asked, Config(), own, tmp_path) == (folder, questions)  # from its folder


def test_files_are_asked_with_their_own_paragraphs(own: Path, tmp_path: Path) -> None:
    paragraph = {"title": "Danube", "text": "Ulm lies on it.", "gold": True}
    rows = [
        {"id": str(i), "question": f"What lies there, {i}?", "golden_answers": ["Ulm"], "paragraphs": [paragraph]}
        for i in range(4)
    ]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = Asked.model_validate({"source": "jsonl", "files": [str(file)], "objectives": {2: 1}, "max_questions": 2})
    folder, questions = prepare_asked(asked, Config(), own, tmp_path / "home")
    assert [len(one.golden_answers) for one in questions] == [2, 2]
    assert "Ulm lies on it." in (folder / "corpus.jsonl").read_text()
    assert not (folder / "tokenizer.json").exists() and not (folder / "train.parquet").exists()
    file.write_text("".join(json.dumps(row | {"golden_answers": ["Bonn"]}) + "\n" for row in rows))
    other, _ = prepare_asked(asked, Config(), own, tmp_path / "home")
    assert other != folder  # another file under the same name is another dataset


# --- figures ---------------------------------------------------------------------------------------------------------


def answered(agent: str, dataset: str, right: list[bool], size: int, *, status: str = "answered") -> pd.DataFrame:
    """One sampled answer a question; every second question has two objectives, of which the first is always right."""
    asked = [question(f"q{i}", [["Ulm"], ["Rome"]][: 1 + i % 2]) for i in range(len(right))]
    given = []
    for i, ok in enumerate(right):
        said = ("Ulm; Rome" if ok else "Ulm; Bonn") if i % 2 else "Ulm" if ok else "Bonn"
        given.append(trajectory([turn(size, 10)], f"q{i}", answer=said, status=status))
    rows = evaluation.rows(agent, given, {q.question_id: q for q in asked}, Config(), greedy=False)
    return pd.DataFrame([storage_row(row) for row in rows]).assign(dataset=dataset, attempts="sampled")


def storage_row(row: evaluation.EvaluationRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__ if name != "greedy"}


@pytest.fixture(scope="module")
def results() -> Results:
    rows = [
        answered("memory", "a", [True, True, True, False], 40),
        answered("full", "a", [True, False, False, False], 190),
        answered("memory", "b", [True, False], 40),
        answered("full", "b", [True, False], 90),
    ]
    seconds = {(agent, dataset): 8.0 for agent in ("memory", "full") for dataset in ("a", "b")}
    majority = {"1": 0.25, "2": 0.125}
    return Results("far", ["memory", "full"], pd.concat(rows), seconds, {"a": majority, "b": majority})


def test_figures_by_hand(results: Results) -> None:
    figures = suite_results.table(results).set_index(["dataset", "agent", "objectives"])
    row = figures.loc["a", "memory", ALL]
    assert (row["questions"], row["em"], row["em_mean"]) == (4, 0.75, (1 + 1 + 1 + 0.5) / 4)
    assert (row["total_tokens"], row["peak_tokens"], row["dependency"]) == (50, 50, 10 * (40 + 5))
    assert (row["seconds"], row["status/answered"], row["turns"]) == (2.0, 1.0, 1.0)
    assert 0 <= row["em_low"] < 0.75 < row["em_high"] <= 1
    assert figures.loc["a", "memory", "1"]["em"] == 1.0 and figures.loc["a", "memory", "2"]["em"] == 0.5
    assert figures.loc["a", "full", "2"]["em_mean"] == 0.5


def test_a_failed_tool_is_counted_and_is_no_wrong_answer(results: Results) -> None:
    failed = answered("memory", "a", [False] * 4, 40, status="tool_failed")
    failed["sample_index"] = 1
    both = Results("far", ["memory"], pd.concat([results.rows, failed]), results.seconds, results.majority)
    row = suite_results.table(both).set_index(["dataset", "objectives"]).loc["a", ALL]
    assert (row["em"], row["status/tool_failed"]) == (0.75, 0.5)


def test_differences_are_paired_by_question(results: Results) -> None:
    found = {(one.dataset, one.measure): one for one in suite_results.comparisons(results)}
    one = found["a", "em"]
    assert (one.first, one.second, one.num_questions, one.token_ratio) == ("full", "memory", 4, 4.0)
    assert one.difference.value == pytest.approx(-0.5)
    # Gaps 0 -1 -1 0: of four draws all are 0 with probability 1/16, so that the interval reaches 0.
    assert (one.difference.low, one.difference.high) == (-1.0, 0.0)
    assert one.difference.p_value != one.difference.p_value  # of fewer than five questions there is none
    assert found["b", "em"].difference.value == 0.0 and found["b", "em"].token_ratio == 2.0


def test_the_same_answers_differ_in_nothing_and_better_ones_do() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(200) < 0.3
    tables = [answered(name, "a", list(map(bool, right)), 40) for name, right in
              (("base", base), ("same", base), ("better", base | (rng.random(200) < 0.3)))]  # fmt: skip
    results = Results("s", ["base", "same", "better"], pd.concat(tables), {}, {})
    found = {one.first: one.difference for one in suite_results.comparisons(results) if one.measure == "em"}
    assert (found["same"].low, found["same"].high, found["same"].p_value) == (0.0, 0.0, 1.0)
    assert found["better"].low > 0.1 and found["better"].p_value == pytest.approx(1e-4)


def test_files_and_page(results: Results, tmp_path: Path) -> None:
    suite_results.write(results, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["figures"]) == 12 and len(summary["comparisons"]) == 6
    assert len(pd.read_parquet(tmp_path / "rows.parquet")) == 12
    page = suite_report.page(results)
    assert page.count("<img") == 2 and 'src="http' not in page
    tables = suite_report.render(results)
    assert [table.title for table in tables] == [
        "a: 4 questions", "a: difference to memory, and tokens as a share of its own",
        "b: 2 questions", "b: difference to memory, and tokens as a share of its own",
    ]  # fmt: skip


def test_curves_go_through_the_figures(results: Results) -> None:
    figures = suite_results.table(results)
    panel = suite_report.curves(figures[figures["dataset"] == "a"], results.agents).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert drawn == {"memory": [1.0, 0.5], "full": [0.5, 0.0]}
