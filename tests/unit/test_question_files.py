"""Anybody's question files, row by row: every layout, damaged rows, damaged files."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from mempo.data.files import MAX_ROW_BYTES, Unreadable, local_file, read_rows
from mempo.data.ground_truth import gold_list
from mempo.data.layouts import Paragraph, columns_of, read_example
from mempo.sources import Layout


def rows(path: Path, content: bytes) -> list[Any]:
    path.write_bytes(content)
    return list(read_rows(path, ["a"]))


def refusal(path: Path, content: bytes) -> str:
    with pytest.raises(ValueError) as caught:
        rows(path, content)
    assert str(path) in str(caught.value)
    return str(caught.value).removeprefix(str(path))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "content",
    [b'[{"a": 1}, {"a": 2}]', b' \n[\n{"a": 1} ,\n{"a": 2}\n]\n', b'{"a": 1}\n{"a": 2}', b'{"a": 1}\n\n{"a": 2}\r\n\n'],
)
def test_an_array_and_lines_give_the_same_rows(tmp_path: Path, content: bytes) -> None:
    assert rows(tmp_path / "q", content) == [{"a": 1}, {"a": 2}]
    assert rows(tmp_path / "q", BOM_UTF8 + content) == [{"a": 1}, {"a": 2}]


def test_parquet_gives_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [[1, 2], None], "b": ["x", "y"]}), tmp_path / "q")
    assert list(read_rows(tmp_path / "q", ["a", "c"])) == [{"a": [1, 2]}, {"a": None}]


def test_no_rows(tmp_path: Path) -> None:
    assert rows(tmp_path / "q", b"[]") == rows(tmp_path / "q", b"[ ]\n") == rows(tmp_path / "q", b"") == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_an_array_is_the_same_however_it_is_cut_into_chunks(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mempo.data.files._CHUNK", chunk)
    values = [{"a": 'é\u0085"]},{'}, {"a": [[], {"b": None}]}, {"a": -1.5e3}, {}]
    assert rows(tmp_path / "q", json.dumps(values, ensure_ascii=False, indent=1).encode()) == values
    cut = json.dumps(values, ensure_ascii=False)[:-4]
    assert refusal(tmp_path / "q", cut.encode()).startswith(f", row 4, character {len(cut) + 1}: not whole JSON: ")


def test_only_a_line_break_ends_a_row(tmp_path: Path) -> None:
    row = {"a": "next\u0085line\u2028para\u2029graph\x0bvt\x1cfs"}
    assert rows(tmp_path / "q", (json.dumps(row, ensure_ascii=False) + "\n").encode()) == [row]


def test_a_download_that_is_cut_off_is_refused_with_the_place(tmp_path: Path) -> None:
    assert refusal(tmp_path / "q", b'[{"a": 1}, {"a": "b') == (
        ", row 2, character 18: not whole JSON: Unterminated string starting at"
    )
    assert refusal(tmp_path / "q", b'{"a": 1}\n{"a": "b').startswith(", line 2: the file is cut off: ")
    assert ", row 3, " in refusal(tmp_path / "q", b'[{"a": 1}, {"a": 2}, ')
    assert ", row 2, " in refusal(tmp_path / "q", b'[{"a": 1}, {"a": 2}')
    assert "not a whole Parquet file" in refusal(tmp_path / "q", b"PAR1\x00\x00")


def test_a_cut_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "q")
    whole = (tmp_path / "q").read_bytes()
    assert "not a whole Parquet file" in refusal(tmp_path / "q", whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1} {"a": 2}]', "row 1, character 11: not whole JSON: Expecting ',' or ']'"),
        (b'[{"a": NaN}]', "row 1: not readable: NaN is no JSON"),
        (b'[{"a": 1}] [', "text after the end of the array, at character 12"),
        (b'[{"a": "\xff"}]', "not UTF-8"),
        (b"[" * 100_000, "row 1: not readable: maximum recursion depth"),
    ],
)
def test_an_array_that_is_damaged_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refusal(tmp_path / "q", content)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1, }', "not JSON: "),
        (b'{"a": Infinity}', "not readable: Infinity is no JSON"),
        (b'{"a": "\xff"}', "not readable: 'utf-8' codec can't decode byte 0xff"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not readable: maximum recursion depth"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not readable: Exceeds the limit (4300 digits)"),
    ],
)
def test_a_line_that_is_damaged_is_one_row_that_cannot_be_read(tmp_path: Path, line: bytes, reason: str) -> None:
    first, second = rows(tmp_path / "q", line + b'\n{"a": 2}\n')
    assert isinstance(first, Unreadable) and first.reason.startswith(reason) and first.excerpt.startswith('{"a": ')
    assert second == {"a": 2}


def test_a_row_has_a_size_that_it_may_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ROW_BYTES == 16 * 2**20
    monkeypatch.setattr("mempo.data.files.MAX_ROW_BYTES", 20)
    monkeypatch.setattr("mempo.data.files._CHUNK", 8)
    assert "line 2: longer than 20 bytes" in refusal(tmp_path / "q", b'{"a": 1}\n{"a": "' + b"b" * 40 + b'"}\n')
    assert ", row 2, " in refusal(tmp_path / "q", b'[{"a": 1}, {"a": "' + b"b" * 40 + b'"}]')


def test_hub_files_have_an_address_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("hf://a/b/c.jsonl", "hf://datasets/a/b", "hf://datasets/a/b@v1"):
        with pytest.raises(ValueError, match=r"expected hf://datasets/OWNER/NAME/PATH"):
            local_file(wrong)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"mempo-test/none@v1/a/b\.jsonl: not in the cache, and the Hub does not answer"
    ):
        local_file("hf://datasets/mempo-test/none@v1/a/b.jsonl")
    with pytest.raises(FileNotFoundError, match=r"nothing\.json: no such file"):
        local_file("nothing.json")


# ---------------------------------------------------------------- ground truth


@pytest.mark.parametrize(
    ("written", "golds"),
    [
        ("Ulm", ["Ulm"]),
        ("Ulm<|answer_split|>ulm city", ["Ulm", "ulm city"]),
        ('["Ulm", "Nan"]', ["Ulm", "Nan"]),
        ("['Ulm', \"Czisch's\"]", ["Ulm", "Czisch's"]),
        ({"target": ["Ulm"]}, ["Ulm"]),
        ({"target": "Ulm"}, ["Ulm"]),
        ("{'target': ['Ulm']}", ["Ulm"]),
        ('{"target": "Ulm"}', ["Ulm"]),
        (["Ulm"], ["Ulm"]),
        # Answers that begin with a bracket and are no list.
        ("[1, 2)", ["[1, 2)"]),
        ("[1, 2]", ["[1, 2]"]),
        ("{x | x > 1}", ["{x | x > 1}"]),
        ('"Hacksaw Ridge"', ['"Hacksaw Ridge"']),
        ("[__import__('os').system('true')]", ["[__import__('os').system('true')]"]),
        ("[" * 50_000, ["[" * 50_000]),
        # Of a wrong type: the caller's check refuses them.
        (None, None),
        (7, 7),
        ({"other": 1}, None),
    ],
)
def test_answers_in_every_form(written: Any, golds: Any) -> None:
    assert gold_list(written) == golds


@pytest.mark.parametrize("written", ["['Ulm' 'Rome']", "['Ulm\n 'Rome']", "['Ulm'", "{'target': array(['Ulm'])}"])
def test_a_damaged_list_is_no_answer(written: str) -> None:
    # numpy prints ['a' 'b'] without commas; Python would read 'ab', which no one can match.
    with pytest.raises(ValueError, match="a list of answers that cannot be read"):
        gold_list(written)


# ---------------------------------------------------------------- layouts

HOTPOT = {
    "_id": "h1",
    "question": "Who made Eddie&nbsp;famous?\u0085",
    "answer": "George VI\n",
    "supporting_facts": [["Eddie &quot;The Eagle&quot; Edwards", 9], ["Twin", 0]],
    "context": [
        ["Eddie &quot;The Eagle&quot; Edwards", ["One.", " ", " Two."]],
        ["Twin", ["First twin."]],
        ["Twin", ["Second twin."]],
        ["Other", ["Text."]],
    ],
    "type": "bridge",
}


def test_hotpotqa_with_its_oddities() -> None:
    example = read_example("hotpotqa", HOTPOT)
    assert (example.row_id, example.golden_answers) == ("h1", ["George VI"])
    assert example.question == "Who made Eddie&nbsp;famous?"  # white space goes at the ends alone
    assert example.paragraphs == [
        Paragraph('Eddie "The Eagle" Edwards', "One. Two.", True),  # the fact points past the end
        Paragraph("Twin", "First twin.", True),
        Paragraph("Twin", "Second twin.", True),
        Paragraph("Other", "Text.", False),
    ]


@pytest.mark.parametrize("form", ["columns", "records", "text", "text of columns", "other order"])
def test_hotpotqa_as_the_hub_has_it(form: str) -> None:
    titles, sentences = [t for t, _ in HOTPOT["context"]], [s for _, s in HOTPOT["context"]]
    facts = {"title": [t for t, _ in HOTPOT["supporting_facts"]], "sent_id": [n for _, n in HOTPOT["supporting_facts"]]}
    context: Any = {
        "columns": {"title": titles, "sentences": sentences},
        "other order": {"sentences": sentences, "title": titles},
        "records": [{"title": t, "sentences": s} for t, s in HOTPOT["context"]],
        "text": json.dumps(HOTPOT["context"]),
        "text of columns": json.dumps({"title": titles, "sentences": sentences}),
    }[form]
    row = HOTPOT | {"context": context, "supporting_facts": facts, "id": HOTPOT["_id"]}
    del row["_id"]
    assert read_example("hotpotqa", row) == read_example("2wiki", HOTPOT)


def test_rows_without_paragraphs_can_be_asked() -> None:
    for row in (HOTPOT | {"context": None}, {k: v for k, v in HOTPOT.items() if k != "context"}):
        assert read_example("hotpotqa", row).paragraphs == []
    assert read_example("hotpotqa", {"question": "Q", "answer": "None"}).golden_answers == ["None"]


def test_musique() -> None:
    row = {
        "id": "2hop__1_2",
        "question": "Q?",
        "answer": "Norway",
        "answer_aliases": ["NO", "", "Norway"],
        "answerable": True,
        "paragraphs": [
            {"idx": 0, "title": "T", "paragraph_text": "Text.", "is_supporting": True},
            {"idx": 1, "title": "T", "paragraph_text": "Other.", "is_supporting": False},
        ],
    }
    example = read_example("musique", row)
    assert example.golden_answers == ["Norway", "NO"]
    assert example.paragraphs == [Paragraph("T", "Text.", True), Paragraph("T", "Other.", False)]
    with pytest.raises(ValueError, match="answerable: false"):
        read_example("musique", row | {"answerable": False})


def test_verl_questions_from_their_column_or_their_prompt() -> None:
    truth = {"reward_model": {"ground_truth": {"target": ["Ulm"]}, "style": "rule"}, "data_source": "nq"}
    prompt = [{"role": "system", "content": "Question: none"}, {"role": "user", "content": "Do. Question: who?\n"}]
    assert read_example("verl", truth | {"question": "which", "prompt": prompt}).question == "which"
    assert read_example("verl", truth | {"prompt": prompt}).question == "who?"
    assert read_example("verl", truth | {"prompt": [{"role": "user", "content": "who?"}]}).question == "who?"
    assert read_example("verl", truth | {"question": "which"}).source == "nq"
    with pytest.raises(ValueError, match="question: neither in question nor in prompt"):
        read_example("verl", truth)


def test_our_own_layout_takes_no_other_key() -> None:
    row = {
        "id": 7,
        "question": "Q",
        "golden_answers": ["A"],
        "paragraphs": [{"title": "T", "text": "X", "gold": True}],
        "source": "mine",
    }
    example = read_example("jsonl", row)
    assert (example.row_id, example.source, example.paragraphs) == ("7", "mine", [Paragraph("T", "X", True)])
    for wrong, key in (
        ({"answers": []}, "answers"),
        ({"paragraphs": [{"title": "T", "text": "X", "x": 1}]}, "paragraphs.x"),
    ):
        with pytest.raises(ValueError, match=f"^{key}: Extra inputs are not permitted"):
            read_example("jsonl", row | wrong)


@pytest.mark.parametrize(
    ("layout", "row", "reason"),
    [
        ("hotpotqa", {"question": "Q"}, "answer: Field required"),
        ("hotpotqa", {"question": "Q", "answer": ""}, "answer: no answer that is not empty"),
        ("hotpotqa", {"question": " \n", "answer": "A"}, "question: is empty"),
        ("hotpotqa", {"question": "Q", "answer": None}, "answer: Input should be a valid list"),
        ("hotpotqa", {"question": "Q", "answer": float("nan")}, "answer: Input should be a valid list"),
        ("hotpotqa", {"question": "Q", "answer": 1945}, "answer: Input should be a valid list"),
        (
            "hotpotqa",
            {"question": "Q\ud800", "answer": "A"},
            "question: Input should be a valid string, unable to parse raw data",
        ),
        ("hotpotqa", HOTPOT | {"context": [["T"]]}, "context: Field required"),
        ("hotpotqa", HOTPOT | {"context": [["T", "text"]]}, "context: Input should be a valid list"),
        ("hotpotqa", HOTPOT | {"context": {"title": ["T"]}}, "context: expected columns of lists: title, sentences"),
        (
            "hotpotqa",
            HOTPOT | {"context": {"title": ["T"], "sentences": []}},
            "context: zip() argument 2 is shorter than argument 1",
        ),
        ("hotpotqa", HOTPOT | {"context": "[" * 100_000}, "nested too deeply"),
        ("hotpotqa", HOTPOT | {"question": "q" * 100_001}, "question: String should have at most 100000 characters"),
        ("hotpotqa", ["a", "list"], "Input should be a valid dictionary or instance of HotpotRow"),
        ("hotpotqa", None, "Input should be a valid dictionary or instance of HotpotRow"),
        ("musique", {"id": "m", "question": "Q", "answer": "A"}, "paragraphs: Field required"),
        ("flashrag", {"id": "f", "question": "Q", "golden_answers": []}, "golden_answers: no answer that is not empty"),
        # Several objectives in one row, as in MEM1's own files: build them with data.train.objectives instead.
        (
            "verl",
            {"question": "Q; R", "reward_model": {"ground_truth": {"target": [["A"], ["B"]]}}},
            "reward_model.ground_truth: Input should be a valid string",
        ),
        ("verl", {"question": "Q", "reward_model": None}, "reward_model: Input should be a valid dictionary"),
    ],
)
def test_rows_that_cannot_be_asked_say_why(layout: Layout, row: Any, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_example(layout, row)
    assert str(caught.value).startswith(reason)


def test_columns_are_those_of_the_row_with_all_their_names() -> None:
    assert columns_of("hotpotqa") == ["_id", "id", "question", "answer", "context", "supporting_facts"]
    assert "reward_model" in columns_of("verl") and "extra_info" not in columns_of("verl")


# ---------------------------------------------------------------- whatever comes

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["[", "{'a'", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("layout", get_args(Layout))
@given(data=st.data())
def test_any_row_is_read_or_refused(layout: Layout, data: st.DataObject) -> None:
    named = {name: ANYTHING for name in columns_of(layout)}
    known = st.sampled_from([HOTPOT["context"], {"title": ["T"]}, [{"role": "user"}], {"ground_truth": {}}, "text"])
    row = data.draw(ANYTHING | st.fixed_dictionaries({}, optional={name: known | kind for name, kind in named.items()}))
    with suppress(ValueError):
        read_example(layout, row)


@given(content=st.binary(max_size=60) | st.text('[]{}",: \n1\\utrnafN', max_size=40).map(str.encode))
def test_any_bytes_are_rows_or_refused(content: bytes) -> None:
    with TemporaryDirectory() as folder, suppress(ValueError):
        rows(Path(folder) / "q", content)
