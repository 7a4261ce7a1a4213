"""Whatever is wrong with somebody's file is said in one line a row, with the row and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo import transcript_file
from mempo.transcript_file import read_transcripts
from mempo.transcripts import ChatTranscript, TextTranscript, TokenTranscript

TURNS = [{"response": "<think>a</think><search>b</search>", "observation": "c"}, {"response": "<mem>d</mem>"}]
TEXT = {"id": "q", "question": "Where is Ulm?", "golden_answers": "Germany", "turns": TURNS}
CHAT = [
    {"role": "user", "content": "Where is Ulm?"},
    {"role": "assistant", "content": "<think>a</think><search>b</search>"},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "<mem>d</mem>"},
]
TOKENS = {
    "prompt_ids": [1, 2],
    "turns": [{"response_ids": [3], "observation_ids": [4]}, {"response_ids": [5, 6], "marks": [1, 2]}],
}


def head(**fields: Any) -> dict[str, Any]:
    return {"id": "q", "question": "Where is Ulm?", "golden_answers": "Germany"} | fields


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(tmp_path: Path, row: Any) -> str:
    path = written(tmp_path / "rows.jsonl", [TEXT, row])
    with pytest.raises(ValueError) as caught:
        read_transcripts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 2: ") and "\n" not in message
    return message.removeprefix(f"{path}, line 2: ")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([TEXT], "expected an object with id, question and golden_answers, found list"),
        (None, "expected an object with id, question and golden_answers, found NoneType"),
        ({key: TEXT[key] for key in TEXT if key != "question"}, "question: missing"),
        (TEXT | {"question": None}, "question: missing"),
        (TEXT | {"question": ""}, "question: String should have at least 1 character, got ''"),
        (TEXT | {"id": 7}, "id: Input should be a valid string, got 7"),
        (TEXT | {"id": "\ud800"}, "id: Input should be a valid string, unable to parse raw data as a unicode string"),
        (TEXT | {"sample_index": 1.0}, "sample_index: Input should be a valid integer, got 1.0"),
        (TEXT | {"sample_index": -1}, "sample_index: Input should be greater than or equal to 0, got -1"),
        (TEXT | {"golden_answers": 5}, "golden_answers: expected a string, a list of strings"),
        (TEXT | {"golden_answers": [["a", 5]]}, "golden_answers: expected a string, a list of strings"),
        (TEXT | {"golden_answers": []}, "golden_answers: every objective needs a non-empty golden answer"),
        (TEXT | {"golden_answers": ["a", " "]}, "golden_answers: every objective needs a non-empty golden answer"),
        (TEXT | {"golden_answers": ["a; b", "c"]}, "golden_answers: a golden answer of several holds ';'"),
        (TEXT | {"turns": []}, "turns: List should have at least 1 item"),
        (TEXT | {"turns": "x"}, "turns: Input should be a valid list, got 'x'"),
        (TEXT | {"turns": [{"respnse": "x"}]}, "turns[0].response: missing; turns[0].respnse: unknown key"),
        (TEXT | {"turns": [TURNS[1], TURNS[1]]}, "turns[0].observation: missing, and another turn follows"),
        (TEXT | {"turns": [{"response": "x" * (10**6 + 1)}]}, "turns[0].response: String should have at most 1000000"),
        (TEXT | {"turns": TURNS[:1] * 257}, "turns: List should have at most 256 items"),
        (TEXT | {"messages": CHAT}, "messages: a record has messages, or turns, or prompt_ids with turns"),
        (head(), "turns: missing; a record has turns, or messages, or prompt_ids"),
        (head(messages=CHAT[1:]), "messages: expected a user message and then an assistant message"),
        (head(messages=CHAT[:1] * 2), "messages: expected a user message and then an assistant message"),
        (head(messages=[*CHAT[:2], CHAT[1]]), "messages[2]: an assistant message right after another"),
        (head(messages=[{"role": "developer", "content": ""}, CHAT[1]]), "messages[0].role: Input should be 'system'"),
        (head(messages=[CHAT[0], CHAT[1] | {"tool_calls": [1]}]), "messages[1].tool_calls: unknown key"),
        (head(prompt_ids=[1]), "turns: missing"),
        (head(**TOKENS | {"prompt_ids": [-1]}), "prompt_ids[0]: Input should be greater than or equal to 0"),
        (head(**TOKENS | {"prompt_ids": [1.5]}), "prompt_ids[0]: Input should be a valid integer, got 1.5"),
        (
            head(**TOKENS | {"turns": [{"response_ids": [1]}] * 2}),
            "turns[0].observation_ids: missing, and another turn",
        ),
        (head(**TOKENS | {"turns": [{"response_ids": [1], "marks": [0, 0]}]}), "turns[0]: 2 marks for 1 response_ids"),
        (head(**TOKENS | {"turns": [{"response_ids": [1], "marks": [3]}]}), "turns[0].marks[0]: Input should be 0, 1"),
        (head(**TOKENS | {"turns": [{"response_ids": [1, 1], "marks": [2, 1]}]}), "turns[0]: marks do not pair up"),
        (TEXT | {"sample_index": 0}, "sample_index: 0 of id 'q' is in 1 already"),
        (TEXT | {"question": "Where is Bonn?"}, "question: another than in 1, which has the same id 'q'"),
        (TEXT | {"golden_answers": "Austria"}, "golden_answers: another than in 1, which has the same id 'q'"),
    ],
)
def test_a_bad_record_is_named_by_row_and_field(tmp_path: Path, row: Any, said: str) -> None:
    assert refusal(tmp_path, row).startswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id": NaN}\n', "not whole JSON: NaN is not JSON"),
        (b'{"id": 1e999, "x": Infinity}\n', "not whole JSON: Infinity is not JSON"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b'{"turns": ' + b"[" * 50 + b"]" * 50 + b"}\n", "nested too deeply"),
        (b'{"id": "\xff"}\n', "not UTF-8: invalid start byte at byte 8"),
        (b'{"id": "a", "question": "Where is\n', "not whole JSON: Unterminated string"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", "not whole JSON: Exceeds the limit"),
    ],
)
def test_lines_that_are_no_json(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(TEXT).encode() + b"\n\n" + line)
    with pytest.raises(ValueError) as caught:
        read_transcripts(path)
    assert str(caught.value).startswith(f"{path}, line 3: {said}")  # the empty line counts as a line


def test_a_cut_download_names_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(TEXT) + "\n") * 2 + json.dumps(TEXT)[:60])
    with pytest.raises(ValueError, match=r"line 3: not whole JSON: .* \(the file ends here: was it cut off\?\)"):
        read_transcripts(path)
    assert len(read_transcripts(path, limit=2)) == 2


def test_several_bad_rows_are_told_together(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [TEXT, *[TEXT | {"id": n} for n in range(12)]])
    with pytest.raises(ValueError) as caught:
        read_transcripts(path)
    lines = str(caught.value).split("\n")
    assert [line.split(":")[0].split()[-1] for line in lines[:10]] == [str(n) for n in range(2, 12)]
    assert lines[10:] == ["and 2 more bad lines"]


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError) as caught:
            read_transcripts(tmp_path / name)
        return str(caught.value)

    assert said("a.jsonl", b"") == f"{tmp_path}/a.jsonl: no trajectory in it"
    assert said("a.jsonl", b"\n \n") == f"{tmp_path}/a.jsonl: no trajectory in it"
    assert said("a.csv", b"id") == f"{tmp_path}/a.csv: expected a file that ends in .jsonl or .parquet"
    assert "a.parquet: not a whole Parquet file" in said("a.parquet", b"PAR1 and no more")
    assert "a.parquet: not a whole Parquet file" in said("a.parquet", b"")
    with pytest.raises(FileNotFoundError, match=r"none.jsonl: no such file"):
        read_transcripts(tmp_path / "none.jsonl")
    monkeypatch.setattr(transcript_file, "MAX_LINE", 100)
    assert said("a.jsonl", b"x" * 200) == f"{tmp_path}/a.jsonl, line 1: longer than 100 bytes"


def test_parquet_rows_are_the_same_records(tmp_path: Path) -> None:
    rows = [TEXT, head(messages=CHAT), head(**TOKENS)]
    expected = [read_transcripts(written(tmp_path / "rows.jsonl", [row]))[0].record for row in rows]
    assert [type(record) for record in expected] == [TextTranscript, ChatTranscript, TokenTranscript]
    for row, record in zip(rows, expected, strict=True):
        pd.DataFrame([row]).assign(source="somebody").to_parquet(tmp_path / "rows.parquet")
        assert [found.record for found in read_transcripts(tmp_path / "rows.parquet")] == [record]
    # Text and messages in one file: the columns that a row does not have are null.
    mixed = pd.DataFrame([TEXT | {"golden_answers": ["Germany"]}, head(messages=CHAT, golden_answers=["Germany"])])
    mixed.to_parquet(tmp_path / "rows.parquet")
    found = read_transcripts(tmp_path / "rows.parquet")
    assert [attempt.record for attempt in found] == expected[:2]
    assert [(attempt.row, attempt.sample_index) for attempt in found] == [(1, 0), (2, 1)]


def test_bad_parquet_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame([TEXT, TEXT | {"question": None}]).to_parquet(path)
    with pytest.raises(ValueError, match=r"rows.parquet, row 2: question: missing$"):
        read_transcripts(path)
    pd.DataFrame([TEXT | {"id": 5}]).to_parquet(path)
    with pytest.raises(ValueError, match=r"rows.parquet, row 1: id: Input should be a valid string, got 5$"):
        read_transcripts(path)
    pd.DataFrame({"name": ["x"]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"rows.parquet, row 1: turns: missing"):
        read_transcripts(path)


def test_golden_answers_are_read_as_objectives_and_aliases(tmp_path: Path) -> None:
    for given, expected in [
        ("a; b", [["a; b"]]),
        (["a", "b"], [["a"], ["b"]]),
        ([["a", "A"], "b"], [["a", "A"], ["b"]]),
        ([["", "a"]], [["a"]]),
    ]:
        path = written(tmp_path / "rows.jsonl", [TEXT | {"golden_answers": given}])
        assert read_transcripts(path)[0].record.golden_answers == expected


def test_a_damaged_string_in_a_parquet_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    text = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"id": text, "turns": pa.array([[1], [2]])}), path)
    with pytest.raises(ValueError, match=r"rows.parquet, row 2: .*can't decode byte 0xff"):
        read_transcripts(path)
