"""Question files become a dataset: what is left out, what is joined, which documents there are, what a folder holds."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mempo import data as datasets
from mempo.config import Data, Model
from mempo.data.layouts import Paragraph
from mempo.data.mixing import compose, question_text, splits
from mempo.data.questions import Origin, read_sources
from mempo.data.reading import Entry, Pool, read_source
from mempo.records import Question
from mempo.search.corpus import read_corpus
from mempo.sources import QuestionFile, Split
from mempo.storage import content_hash, read_json, read_records


def row(number: int, **fields: Any) -> dict[str, Any]:
    """A row of our own layout: two paragraphs, the first of them gold."""
    values = {
        "id": f"id{number}",
        "question": f"Who was number {number}?",
        "golden_answers": [f"Name {number}"],
        "paragraphs": [
            {"title": f"Title {number}", "text": f"Name {number} was number {number}.", "gold": True},
            {"title": "Shared", "text": "A paragraph of every row."},
        ],
    }
    return values | fields


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def settings(train: Any, dev: Any, test: Any, **fields: Any) -> Data:
    def split(value: Any) -> Any:
        return value if isinstance(value, dict) else {"files": [value]}

    named = {"train": split(train), "dev": split(dev), "test": split(test)}
    return Data.model_validate({"source": "jsonl"} | named | fields)


def prepared(folder: Path, data: Data) -> dict[str, Any]:
    return datasets.prepare(data, Model(path="somewhere"), folder, [])


def entry(number: int, file: str = "f", **fields: Any) -> Entry:
    values: dict[str, Any] = {
        "file": file, "row": number, "source": "s", "row_id": f"{file}{number}", "question": f"Q{file}{number}?",
        "golden_answers": ["A"], "doc_ids": [], "scope": "s",
    }  # fmt: skip
    return Entry(**(values | fields))


# ---------------------------------------------------------------- joining


def test_questions_are_joined_as_in_mem1() -> None:
    assert question_text(["who was it"]) == "who was it"
    assert question_text(["who was it", "Where?", "多少？"]) == "who was it?; Where?; 多少？"


def split_of(objectives: dict[int, float], weights: tuple[float, ...] = (1.0,), limit: int | None = None) -> Split:
    files = [{"path": str(i), "weight": weight} for i, weight in enumerate(weights)]
    return Split.model_validate({"files": files, "objectives": objectives, "max_questions": limit})


def test_every_number_of_objectives_from_1_to_10() -> None:
    pool = [entry(i) for i in range(2000)]
    numbers = {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0, 8: 1.0, 10: 1.0}
    questions = compose([pool], split_of(numbers), Random(0))
    sizes = Counter(map(len, questions))
    assert set(sizes) == set(numbers)
    used = [e.row_id for objectives in questions for e in objectives]
    assert len(used) == len(set(used)) and len(used) > 2000 - 10  # all, but for the last question that would not fill
    assert questions == compose([pool], split_of(numbers), Random(0))
    assert questions != compose([pool], split_of(numbers), Random(1))


def test_shares_of_objectives_and_of_files() -> None:
    pools = [[entry(i, "a") for i in range(4000)], [entry(i, "b") for i in range(4000)]]
    questions = compose(pools, split_of({1: 3.0, 2: 1.0}, (1.0, 4.0), 3000), Random(0))
    sizes = Counter(map(len, questions))
    assert sizes[1] / 3000 == pytest.approx(3 / 4, abs=0.03)
    files = Counter(e.file for objectives in questions for e in objectives)
    assert files["b"] / files.total() == pytest.approx(4 / 5, abs=0.03)


def test_a_file_that_ends_leaves_the_draw() -> None:
    questions = compose(
        [[entry(0, "a")], [entry(i, "b") for i in range(9)]], split_of({2: 1.0}, (99.0, 1.0)), Random(0)
    )
    assert len(questions) == 5 and sum(e.file == "a" for q in questions for e in q) == 1


# ---------------------------------------------------------------- splits


def test_splits_share_neither_text_nor_id() -> None:
    shared = [
        entry(1, question="Who was it?", row_id="x"),
        entry(2, question="WHO was  it", row_id="y"),
        entry(3, row_id="x"),
    ]
    names = {name: QuestionFile(path=name) for name in ("train", "dev", "test")}
    own = {name: entry(9, name) for name in names}
    read = {names[name]: [*shared, own[name]] for name in names}
    built, left_out = splits(settings("train", "dev", "test"), read)
    asked = {name: sorted(e.question for q in built[name] for e in q) for name in built}
    assert asked == {"test": ["Qtest9?", "Who was it?"], "dev": ["Qdev9?"], "train": ["Qtrain9?"]}
    assert [(r.row, r.reason, r.split) for r in left_out["test"]] == [
        (2, "the same question is in test", "test"),
        (3, "another question with the same id is in test", "test"),
    ]
    assert [r.reason for r in left_out["train"]] == [
        "the same question is in test",
        "the same question is in test",
        "another question with the same id is in test",
    ]


def test_files_that_count_from_0_lose_nothing_to_each_other(tmp_path: Path) -> None:
    """FlashRAG numbers each dataset anew, and a row without an id is one of its file."""
    pool = Pool(io.StringIO())
    row = {"golden_answers": ["A"]}
    found = []
    for folder in ("nq", "hotpot"):
        file = tmp_path / folder / "train.jsonl"
        file.parent.mkdir()
        rows = [{"id": f"train_{i}", "question": f"{folder} {i}?"} | row for i in range(3)]
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))
        found += read_source(str(file), "flashrag", pool, 0.0).entries
    assert len({key for one in found for key in one.keys}) == 12
    wiki = {"_id": "5a", "question": "Who?", "answer": "Ada"}
    both = []
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps([wiki | {"question": f"Who is {name}?"}]))
        both += read_source(str(tmp_path / name), "hotpotqa", pool, 0.0).entries
    assert both[0].keys[1] == both[1].keys[1], "HotpotQA's ids are of the dataset"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Who was it?", "WHO was  it", True),
        ("What is “Ulm”, then?", "what is Ulm then", True),
        ("What is 7 - 5?", "What is 7 + 5?", False),
        ("Who created C++?", "Who created C#?", False),
        ("भारत की राजधानी?", "भारत का राजधानी?", False),
    ],
)
def test_the_same_question(one: str, other: str, same: bool) -> None:
    assert (entry(0, question=one).keys[0] == entry(1, question=other).keys[0]) is same


def test_dev_can_be_drawn_from_the_training_file() -> None:
    file = QuestionFile(path="a")
    data = settings({"files": ["a"]}, {"files": ["a"], "max_questions": 3}, "b")
    read = {file: [entry(i) for i in range(10)], QuestionFile(path="b"): [entry(0, "b")]}
    built, _ = splits(data, read)
    dev, train = ({e.row_id for q in built[name] for e in q} for name in ("dev", "train"))
    assert len(dev) == 3 and len(train) == 7 and not dev & train


@pytest.mark.parametrize("mark", [";", "；"])
def test_golds_with_a_semicolon_are_asked_where_all_are_asked_alone(mark: str) -> None:
    odd = entry(0, golden_answers=["A", f"B{mark} C"])
    read = {QuestionFile(path="f"): [odd, entry(1), entry(2)], QuestionFile(path="g"): [entry(5, "g")]}
    several = settings({"files": ["f"], "objectives": {1: 1.0, 2: 1.0}}, "g", "g")
    built, left_out = splits(several, read)
    assert odd not in [e for q in built["train"] for e in q]
    assert [r.reason for r in left_out["train"]] == [
        "a golden answer holds ';', which separates the answers of several objectives"
    ]
    built, left_out = splits(settings("f", "g", "g"), read)
    assert [odd] in built["train"] and left_out["train"] == []


# ---------------------------------------------------------------- the pool of paragraphs


def test_paragraphs_are_keyed_by_content(tmp_path: Path) -> None:
    with (tmp_path / "corpus.jsonl").open("w", encoding="utf-8") as file:
        pool = Pool(file)
        ids = [
            pool.add(paragraph)
            for paragraph in (
                Paragraph("Ulm", "A city.", True),
                Paragraph("Ulm", "A song.", False),
                Paragraph("Ulm", "A city.", False),
                Paragraph('"Ulm" of\u0085old', "A city.", False),
            )
        ]
    assert ids[0] == ids[2] and len(set(ids)) == 3
    documents = read_corpus(tmp_path / "corpus.jsonl")
    assert [(d.doc_id, d.title, d.text) for d in documents] == [
        (ids[0], "Ulm", "A city."),
        (ids[1], "Ulm", "A song."),
        (ids[3], '"Ulm" of\u0085old', "A city."),
    ]


# ---------------------------------------------------------------- the folder


def test_a_dataset_folder(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [row(i) for i in range(20)])
    test = write(tmp_path / "test.jsonl", [row(i) for i in range(18, 30)])
    data = settings(
        {"files": [train], "objectives": {1: 1, 2: 1}},
        {"files": [train], "max_questions": 2},
        {"files": [{"path": test, "name": "mine"}], "objectives": {3: 1}},
        seed=1,
    )
    stats = prepared(tmp_path / "a", data)
    read = {name: read_records(tmp_path / "a" / f"{name}.parquet", Question) for name in ("train", "dev", "test")}
    assert [q.question_id for q in read["test"]] == ["test-00000", "test-00001", "test-00002", "test-00003"]
    first = read["test"][0]
    numbers = [int(text.split()[-1].strip("?")) for text in first.question.split("; ")]
    assert first.golden_answers == [[f"Name {number}"] for number in numbers] and first.source == "mine"

    origins = [o for o in read_records(tmp_path / "a" / "origins.parquet", Origin) if o.question_id == "test-00000"]
    assert [(o.objective, o.row_id) for o in origins] == [(i, f"id{number}") for i, number in enumerate(numbers)]
    documents = {d.doc_id: d for d in read_corpus(tmp_path / "a" / "corpus.jsonl")}
    assert [documents[o.doc_ids[0]].title for o in origins] == [f"Title {number}" for number in numbers]
    assert len(documents) == stats["num_documents"] == 30 + 1  # rows 18 and 19 stand in both files

    assert stats == read_json(tmp_path / "a" / "stats.json")
    assert stats["splits"]["test"]["num_objectives"] == {"3": 4}
    assert stats["splits"]["train"]["left_out"] == {"the same question is in dev": 2} | {
        "the same question is in test": 2
    }
    assert stats["files"][test] == {
        "sha256": content_hash(Path(test)), "num_rows": 12, "num_unmarked": 0, "rejected": {},
    }  # fmt: skip
    assert not (tmp_path / "a" / "tokenizer.json").exists()  # model.path has one

    prepared(tmp_path / "b", data)
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    prepared(tmp_path / "b", data.model_copy(update={"seed": 2}))
    assert content_hash(tmp_path / "a") != content_hash(tmp_path / "b")


def test_rejected_rows_are_counted_and_listed(tmp_path: Path) -> None:
    bad = [row(90, golden_answers=[]), row(91, question="half \ud800"), {"id": "x"}, row(0, question="Another?")]
    train = write(tmp_path / "train.jsonl", [*(row(i) for i in range(6)), *bad])
    test = write(tmp_path / "test.jsonl", [row(i) for i in range(6, 9)])
    data = settings({"files": [train]}, {"files": [test], "max_questions": 1}, test, max_rejected=0.5)
    with pytest.raises(ValueError, match=r"data\.dev: not one question can be made of its files"):
        prepared(tmp_path / "geo", data)
    assert not (tmp_path / "geo").exists()

    data = settings({"files": [train]}, {"files": [train], "max_questions": 1}, test, max_rejected=0.4)
    stats = prepared(tmp_path / "geo", data)
    lines = [json.loads(line) for line in (tmp_path / "geo" / "rejected.jsonl").read_text("utf-8").splitlines()]
    assert [(r["row"], r["split"]) for r in lines[:4]] == [(7, ""), (8, ""), (9, ""), (10, "")]
    assert (
        lines[0]["reason"] == "golden_answers: no answer that is not empty"
        and "Who was number 90?" in lines[0]["excerpt"]
    )
    assert lines[3]["reason"] == "the id of a row before it"
    assert sum(stats["files"][train]["rejected"].values()) == 4
    assert len(lines) == 4 + stats["splits"]["train"]["left_out"]["the same question is in dev"] == 5


def test_too_many_rejected_rows_stop_with_their_reasons(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", [row(0), row(1), {"id": "a"}, {"id": "b"}, row(2, golden_answers=[""])])
    with pytest.raises(ValueError) as caught:
        prepared(tmp_path / "geo", settings(file, file, file, max_rejected=0.59))
    assert str(caught.value).splitlines() == [
        f"{file}: 3 of 5 rows cannot be used, more than data.max_rejected: 0.59 of them",
        "  2 x question: Field required (first in row 3)",
        "  1 x golden_answers: no answer that is not empty (first in row 5)",
    ]
    with pytest.raises(ValueError, match="no rows in it"):
        prepared(tmp_path / "geo", settings(write(tmp_path / "none.jsonl", []), file, file, max_rejected=1.0))


def test_a_corpus_of_ones_own(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.jsonl", [row(i)]) for i in range(3)]
    corpus = write(tmp_path / "wiki.jsonl", [{"id": "w", "contents": '"Ulm"\nA city.'}])
    stats = prepared(tmp_path / "geo", settings(*files, corpus=corpus))
    assert (tmp_path / "geo" / "corpus.jsonl").read_bytes() == Path(corpus).read_bytes()
    assert stats["num_documents"] == 1
    assert all(o.doc_ids == [] for o in read_records(tmp_path / "geo" / "origins.parquet", Origin))


def test_a_corpus_is_looked_for_before_the_questions_are_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"wiki\.jsonl: no such file"):
        prepared(tmp_path / "geo", settings("a", "b", "c", corpus=str(tmp_path / "wiki.jsonl")))
    broken = write(tmp_path / "wiki.jsonl", [{"id": "w"}])
    with pytest.raises(ValueError, match=rf"{broken}, line 1: not a document"):
        prepared(tmp_path / "geo", settings("a", "b", "c", corpus=broken))


def test_a_file_of_two_names_is_read_once(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", [row(i) for i in range(6)])
    data = settings(
        {"files": [{"path": file, "name": "mine"}]},
        {"files": [file], "max_questions": 1},
        {"files": [{"path": file, "name": "theirs"}], "max_questions": 2},
    )
    with (tmp_path / "pool.jsonl").open("w", encoding="utf-8") as pool:
        first, *others = read_sources(data, Pool(pool)).values()
    assert len(others) == 2 and all(other is first for other in others)
    stats = prepared(tmp_path / "geo", data)
    named = {name: split["datasets"] for name, split in stats["splits"].items()}
    assert named == {"train": {"mine": 3}, "dev": {"jsonl": 1}, "test": {"theirs": 2}}
    assert list(stats["files"]) == [file]


def test_a_file_of_two_layouts_has_the_rejected_rows_of_both(tmp_path: Path) -> None:
    hotpot = {"_id": "h", "question": "Who?", "answer": "Ulm"}
    file = write(tmp_path / "q.jsonl", [*(row(i) for i in range(3)), hotpot])
    train, one = {"files": [{"path": file, "source": "hotpotqa"}]}, {"files": [file], "max_questions": 1}
    data = settings(train, one, one, max_rejected=0.9)
    stats = prepared(tmp_path / "geo", data)
    assert {name: sum(told["rejected"].values()) for name, told in stats["files"].items()} == {
        f"{file} as hotpotqa": 3, f"{file} as jsonl": 1,
    }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "geo" / "rejected.jsonl").read_text("utf-8").splitlines()]
    assert [line["row"] for line in lines if not line["split"]] == [1, 2, 3, 4]


def test_a_tokenizer_learns_from_every_corpus_that_a_search_takes(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.jsonl", [row(i)]) for i in range(3)]
    ulm = {"id": "w", "contents": '"Ulm"\nA city, half \ud800.'}
    corpus = write(tmp_path / "wiki.jsonl", [ulm])
    Path(corpus).write_text("\n" + Path(corpus).read_text() + "\n")
    stats = datasets.prepare(settings(*files, corpus=corpus), Model(vocab_size=400), tmp_path / "geo", [])
    assert stats["num_documents"] == 1 and (tmp_path / "geo" / "tokenizer.json").exists()


def test_questions_for_servers_need_no_document_here(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.jsonl", [row(i, paragraphs=[])]) for i in range(3)]
    scratch = Model(vocab_size=400)
    stats = datasets.prepare(settings(*files), scratch, tmp_path / "geo", [], searched_here=False)
    assert stats["num_documents"] == 0 and (tmp_path / "geo" / "tokenizer.json").exists()


def test_questions_without_a_document_are_refused_where_they_are_searched_here(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.jsonl", [row(i, paragraphs=[])]) for i in range(3)]
    with pytest.raises(ValueError, match=r"data\.corpus: no row of the question files has paragraphs"):
        prepared(tmp_path / "geo", settings(*files))
    assert not (tmp_path / "geo").exists()
    corpus = write(tmp_path / "wiki.jsonl", [{"id": "w", "contents": '"Ulm"\nA city.'}])
    assert prepared(tmp_path / "geo", settings(*files, corpus=corpus))["num_documents"] == 1


def test_a_policy_from_scratch_gets_a_tokenizer(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.jsonl", [row(i)]) for i in range(3)]
    datasets.prepare(settings(*files), Model(vocab_size=400), tmp_path / "geo", ["Be brief."])
    assert (tmp_path / "geo" / "tokenizer.json").exists()
