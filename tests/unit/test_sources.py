"""Section ``data`` for question files, the curriculum, ``mempo data check``, and real files through all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mempo import data as datasets
from mempo.cli import app
from mempo.config import Model
from mempo.data.check import check_corpus, check_questions
from mempo.params import ConfigError, checked
from mempo.sources import Layout
from tests.real_data import FOLDER, needs_real_data

FILES: dict[str, Any] = {name: {"files": [f"{name}.json"]} for name in ("train", "dev", "test")}


def refused(data: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked({"data": data} | sections)
    return str(caught.value)


def test_a_path_stands_for_a_file() -> None:
    config = checked(
        {"data": FILES | {"source": "hotpotqa", "test": {"files": ["a", {"path": "b", "source": "verl"}]}}}
    )
    assert [(file.path, file.source) for file in config.data.test.files] == [("a", None), ("b", "verl")]
    assert checked(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {"files": ["a"]}}, "data.train: does nothing where data.source is geo"),
        ({"test": {"objectives": {2: 1}}}, "data.test: does nothing where data.source is geo"),
        ({"corpus": "a"}, "data.corpus: does nothing where data.source is geo"),
        ({"source": "musique"}, "data.train.files: no file named, data.source: musique reads each split's"),
        ({"source": "musique"} | FILES | {"dev": {}}, "data.dev.files: no file named, data.source: musique reads"),
        ({"source": "hotpot"} | FILES, "data.source: Input should be 'geo', 'hotpotqa'"),
        (
            {"source": "verl"} | FILES,
            "data.corpus: rows of flashrag and verl have no paragraphs; name a corpus, or search",
        ),
        (
            {"source": "2wiki"} | FILES | {"dev": {"files": [{"pth": "a"}]}},
            "data.dev.files.0.pth: unknown key; did you",
        ),
        ({"source": "2wiki"} | FILES | {"dev": {"fils": ["a"]}}, "data.dev.fils: unknown key; did you mean files?"),
        (
            {"source": "2wiki"} | FILES | {"dev": {"files": [""]}},
            "data.dev.files.0.path: String should have at least 1",
        ),
        ({"source": "2wiki"} | FILES | {"dev": {"files": ["a"], "objectives": {}}}, "data.dev.objectives: Dictionary"),
        ({"source": "2wiki"} | FILES | {"dev": {"files": ["a"], "objectives": {0: 1}}}, "data.dev.objectives.0"),
        ({"source": "2wiki"} | FILES | {"dev": {"files": ["a"], "objectives": {2: 0}}}, "data.dev.objectives.2"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_by_name(data: dict[str, Any], message: str) -> None:
    assert message in refused(data)


def test_rows_without_paragraphs_need_something_to_search() -> None:
    data = {"source": "verl"} | FILES
    checked({"data": data | {"corpus": "wiki.jsonl"}})
    checked({"data": data, "search": {"urls": ["http://127.0.0.1:8001/retrieve"], "corpus": "wiki-18"}})
    checked({"data": data | {"train": {"files": [{"path": "a", "source": "jsonl"}]}}})


def test_a_curriculum_is_checked_against_the_questions() -> None:
    def phases(*values: tuple[int, list[int]]) -> dict[str, Any]:
        return {"curriculum": [{"from_round": first, "objectives": numbers} for first, numbers in values]}

    hotpot = {"source": "hotpotqa"} | FILES | {"train": {"files": ["a"], "objectives": {1: 1, 2: 1}}}
    checked({"data": hotpot, "loop": phases((0, [1]), (4, [1, 2]))})
    assert refused(hotpot, loop=phases((0, [4]))) == (
        "loop.curriculum: data.train.objectives has no questions of 4 objectives"
    )
    for wrong in (((1, [1]),), ((0, [1]), (0, [2])), ((0, [1]), (5, [2]), (3, [1]))):
        assert "loop.curriculum: from_round must begin at 0 and grow" in refused(hotpot, loop=phases(*wrong))


# ---------------------------------------------------------------- mempo data check


def test_check_tells_what_a_file_holds(tmp_path: Path) -> None:
    rows = [
        {
            "_id": "1",
            "question": "Q1",
            "answer": "Hall",
            "supporting_facts": [["T", 0]],
            "context": [["T", ["Hall's."]]],
        },
        {"_id": "2", "question": "Q2", "answer": "Ulm", "supporting_facts": [["T", 0]], "context": [["T", ["Rome."]]]},
        {"_id": "3", "question": "Q3", "answer": "yes", "supporting_facts": [["T", 0]], "context": [["T", ["Rome."]]]},
        {"_id": "4", "question": "Q4", "answer": "a; b"},
        {"_id": "5", "question": "Q5"},
    ]
    file, report = tmp_path / "q.json", tmp_path / "rejected.jsonl"
    file.write_text(json.dumps(rows))
    done = CliRunner().invoke(app, ["data", "check", str(file), "--source", "hotpotqa", "--rejected", str(report)])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        f"{file}: 4 questions, 1 rows rejected",
        "  1 x answer: Field required (first in row 5)",
        "datasets: hotpotqa 4",
        "4 answers, those of 1 questions with a ';'",
        "3 paragraphs, 1 questions without any",
        "a gold paragraph holds the answer: 0.500 of 2, yes and no left out",
        "  missing: row 2: Q2 Ulm",
    ]
    assert json.loads(report.read_text())["row"] == 5
    before = file.read_bytes()
    lost = CliRunner().invoke(app, ["data", "check", str(file), "--source", "hotpotqa", "--rejected", str(file)])
    assert lost.exit_code == 1 and "is the file that is read" in lost.output and file.read_bytes() == before


def test_check_rejects_what_training_rejects(tmp_path: Path) -> None:
    rows = [{"id": number, "question": f"Q{number}?", "golden_answers": ["A"]} for number in (1, 2, 1, 1)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = check_questions(tmp_path / "q.jsonl", "flashrag")
    assert found.lines[:2] == [
        f"{tmp_path / 'q.jsonl'}: 2 questions, 2 rows rejected",
        "  2 x the id of a row before it (first in row 3)",
    ]
    assert [(row.row, row.excerpt) for row in found.rejected] == [(3, "Q1?"), (4, "Q1?")]


def test_check_refuses_a_damaged_file_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('[{"a": "b')
    done = CliRunner().invoke(app, ["data", "check", str(tmp_path / "q.json"), "--source", "musique"])
    assert done.exit_code == 1 and "q.json, row 1, character 8: not whole JSON" in done.output


# ---------------------------------------------------------------- real files


@needs_real_data
@pytest.mark.parametrize(
    ("name", "layout", "accepted", "rate"),
    [
        ("train/hotpotqa_train.json", "hotpotqa", 100, "1.000"),
        ("train/musique_train.json", "musique", 100, "1.000"),
        ("train/2wiki_train_100.json", "2wiki", 100, "1.000"),
        ("dev/hotpot_dev_60.jsonl", "hotpotqa", 60, "1.000"),
        ("dev/musique_dev_60.jsonl", "musique", 60, "1.000"),
        ("dev/2wiki_dev_60.jsonl", "2wiki", 60, "0.982"),  # 54 of 55: an answer with more names than its paragraph
        ("formats/hotpot_hf_struct_of_lists_20.json", "hotpotqa", 20, "1.000"),
        ("formats/searchr1_nq_test.parquet", "verl", 3610, None),
        ("formats/deepresearcher_dev.parquet", "verl", 875, None),
        ("formats/toolstar_test.parquet", "verl", 180, None),
        ("formats/flashrag_nq_17.jsonl", "flashrag", 17, None),
        ("formats/flashrag_bamboogle.jsonl", "flashrag", 125, None),
    ],
)
def test_real_question_files(name: str, layout: Layout, accepted: int, rate: str | None) -> None:
    found = check_questions(FOLDER / name, layout)
    assert found.lines[0].endswith(f": {accepted} questions, 0 rows rejected")
    told = [line.split(": ")[1].split()[0] for line in found.lines if line.startswith("a gold paragraph")]
    assert told == ([rate] if rate else [])


@needs_real_data
def test_a_real_download_that_was_cut_off() -> None:
    with pytest.raises(
        ValueError, match=r"hotpot_truncated\.json, row 9, character 59996: not whole JSON: Unterminated"
    ):
        check_questions(FOLDER / "formats" / "hotpot_truncated.json", "hotpotqa")


@needs_real_data
def test_real_corpora() -> None:
    assert (
        check_corpus(FOLDER / "corpus" / "wiki18_sample_1000.jsonl")
        .lines[1]
        .startswith("121 titles without quotes, 485 texts with doubled quotes")
    )
    assert "10 documents" in check_corpus(FOLDER / "corpus" / "searchr1_example_10.jsonl").lines[0]


@needs_real_data
def test_a_mixture_of_real_files_becomes_a_dataset(tmp_path: Path) -> None:
    train = [
        {"path": str(FOLDER / "train" / "hotpotqa_train.json"), "weight": 2},
        {"path": str(FOLDER / "train" / "musique_train.json"), "source": "musique"},
        {"path": str(FOLDER / "train" / "2wiki_train_100.json"), "source": "2wiki"},
    ]
    data = checked(
        {
            "data": {
                "source": "hotpotqa",
                "train": {"files": train, "objectives": {1: 1, 2: 2}},
                "dev": {"files": train, "max_questions": 10},
                "test": {"files": [str(FOLDER / "dev" / "hotpot_dev_60.jsonl")], "objectives": {6: 1}},
            }
        }
    ).data
    stats = datasets.prepare(data, Model(path="somewhere"), tmp_path / "geo", [])
    splits = stats["splits"]
    assert splits["test"]["num_objectives"] == {"6": 10} and splits["dev"]["num_questions"] == 10
    assert splits["train"]["left_out"]["the same question is in dev"] == 10
    assert sum(splits["train"]["datasets"].values()) + splits["train"]["num_unused"] == 300 - 10
    assert stats["num_documents"] > 3000 and all(file["num_unmarked"] == 0 for file in stats["files"].values())
