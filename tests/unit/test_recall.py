"""``mempo data recall``: gold paragraphs that a search for the question finds, counted by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mempo import data as datasets
from mempo.cli import app
from mempo.config import Data, Model
from mempo.data.recall import Recall, measure
from mempo.search import index
from tests.real_data import FOLDER, needs_real_data

# Each word stands in one paragraph alone, but "shared", which ranks nothing among those it is in: order decides.
PARAGRAPHS = {name: {"title": name, "text": f"{name} shared", "gold": True} for name in ("ada", "bob", "cat", "dan")}


def row(question: str, gold: str, source: str = "s") -> dict[str, Any]:
    return {"id": question, "question": question, "golden_answers": ["x"], "source": source,
            "paragraphs": [PARAGRAPHS[name] for name in gold.split()]}  # fmt: skip


def prepared(folder: Path, rows: list[dict[str, Any]], objectives: int = 1, **fields: Any) -> Path:
    """All ``rows`` but two in the test split."""
    rows = [row("where was cat", "cat", "train"), row("where was dan", "dan", "dev"), *rows]
    names = []
    for name, part in {"train": rows[:1], "dev": rows[1:2], "test": rows[2:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in part))
        names.append(str(folder / f"{name}.jsonl"))
    train, dev, test = ({"files": [name]} for name in names)
    split = {"train": train, "dev": dev, "test": test | {"objectives": {objectives: 1}}}
    datasets.prepare(Data.model_validate({"source": "jsonl"} | split | fields), Model(path="x"), folder / "geo", [])
    return folder / "geo"


def test_counts_by_hand(tmp_path: Path) -> None:
    rows = [
        row("who is ada", "ada"),  # found at 1
        row("ada or bob", "ada bob"),  # both found at 2, one at 1
        row("who is ada too", "bob ada cat"),  # one of three
        row("who is nobody", "cat"),  # no word of it is in the corpus
        row("who is ada again", ""),  # no gold paragraph: not counted
    ]
    folder = prepared(tmp_path, rows)
    dev, test, train = measure(folder, 2)
    assert test == Recall("s", "test", num_questions=5, num_unmarked=1, num_gold=7, num_found=4, num_whole=2)
    assert test.recall == pytest.approx(4 / 7) and test.whole == pytest.approx(2 / 4)
    assert [(other.source, other.recall, other.whole) for other in (dev, train)] == [("dev", 1, 1), ("train", 1, 1)]
    assert measure(folder, 1)[1] == Recall("s", "test", 5, 1, num_gold=7, num_found=3, num_whole=1)


def test_objectives_are_asked_one_by_one(tmp_path: Path) -> None:
    """A joined question would find one of two paragraphs at most."""
    folder = prepared(tmp_path, [row("who is ada", "ada"), row("who is bob", "bob")], objectives=2)
    assert measure(folder, 1)[1] == Recall(
        "s", "test", num_questions=2, num_unmarked=0, num_gold=2, num_found=2, num_whole=2
    )


def test_splits_of_a_dataset_are_summed(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [row("who is ada", "ada", "train"), row("who is nobody", "bob", "train")])
    rows = {(found.source, found.split): found for found in measure(folder, 1)}
    assert rows["train", "all"] == Recall("train", "all", 3, 0, num_gold=3, num_found=2, num_whole=2)
    assert set(rows) == {("dev", "dev"), ("train", "train"), ("train", "test"), ("train", "all")}


def test_an_index_answers_as_memory_does(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [row("ada or bob", "ada bob")])
    index.build(folder / "corpus.jsonl", tmp_path / "index")
    assert measure(folder, 1, tmp_path / "index") == measure(folder, 1)
    (tmp_path / "other.jsonl").write_text('{"id": "1", "contents": "a\\nb"}\n')
    index.build(tmp_path / "other.jsonl", tmp_path / "other")
    with pytest.raises(ValueError, match="an index of another corpus"):
        measure(folder, 1, tmp_path / "other")


def test_what_has_no_gold_paragraphs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wiki.jsonl").write_text('{"id": "1", "contents": "a\\nb"}\n')
    folder = prepared(tmp_path, [row("who is ada", "ada")], corpus=str(tmp_path / "wiki.jsonl"))
    with pytest.raises(ValueError, match="no gold paragraph of any question is known"):
        measure(folder, 5)
    (folder / "origins.parquet").unlink()
    with pytest.raises(ValueError, match=r"no origins\.parquet"):
        measure(folder, 5)
    with pytest.raises(FileNotFoundError):
        measure(tmp_path / "none", 5)


def test_the_command(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [row("ada or bob", "ada bob"), row("who is nobody", "cat")])
    done = CliRunner().invoke(app, ["data", "recall", str(folder), "--top-k", "1"])
    assert done.exit_code == 0, done.output
    assert "recall@1" in done.stdout and re.search(r"s +test +2 +0 +3 +0\.333 +0\.000", done.stdout)
    done = CliRunner().invoke(app, ["data", "recall", str(tmp_path)])
    assert done.exit_code == 1 and "no origins.parquet" in done.stderr


@needs_real_data
@pytest.mark.parametrize(
    ("name", "source", "found", "gold", "whole"),
    [("hotpot", "hotpotqa", 96, 120, 38), ("musique", "musique", 65, 120, 8), ("2wiki", "2wiki", 91, 156, 14)],
)
def test_real_dev_rows(tmp_path: Path, name: str, source: str, found: int, gold: int, whole: int) -> None:
    """The figures of docs/retrieval.md."""
    file = {"files": [str(FOLDER / "dev" / f"{name}_dev_60.jsonl")]}
    one = file | {"max_questions": 1}
    data = Data.model_validate({"source": source, "train": one, "dev": one, "test": file | {"max_questions": 58}})
    datasets.prepare(data, Model(path="x"), tmp_path / "geo", [])
    row = measure(tmp_path / "geo", 5)[-1]
    assert row == Recall(source, "all", 60, 0, num_gold=gold, num_found=found, num_whole=whole)
