"""``mempo import``: rows of others' dumps, what they score, and files that hostile text cannot break."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from mempo import transcript_report
from mempo.cli import app
from mempo.config import Config
from mempo.score_file import score_file
from mempo.storage import read_records
from mempo.transcript_file import read_transcripts
from mempo.transcript_import import ImportedRow, Transcript, read
from mempo.transcript_report import page
from tests.unit.test_report import Page

ROOT = Path(__file__).parents[2]
THINK = "<think>t</think>"
PROMPT = "<|im_start|>user\nSay <answer> Rome </answer>. Question: Where is Ulm?\n<|im_end|>\n<|im_start|>assistant\n"
FOUND = '\n\n<information>"Ulm" Ulm is in Germany.</information>\n\n'
SAID = f"{THINK}<search>Ulm</search>{FOUND}{THINK}<answer>Germany</answer>"
ROW = {"sequences_str": PROMPT + SAID + "<|im_end|><|endoftext|>", "ground_truth": {"target": ["Germany", "FRG"]}}
BARE = {"question": "q", "gts": "a"}
HOSTILE = '</div></details><script>alert("x")</script> & <b>\u202e'


FORMS = "a record has sequences_str, or response (output), or messages; here:"


def messages(*said: tuple[str, str | None], **fields: Any) -> dict[str, Any]:
    return BARE | {"messages": [{"role": role, "content": text} | fields for role, text in said]}


def written(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def one(tmp_path: Path, row: Any, **options: Any) -> Transcript:
    (found,) = read(written(tmp_path / "one.jsonl", [row]), **options)
    return found


def test_a_row_of_search_r1(tmp_path: Path) -> None:
    found = one(tmp_path, ROW | {"score": 1})
    row = found.row
    assert [turn.model_dump() for turn in found.record.turns] == [
        {"response": f"{THINK}<search>Ulm</search>", "observation": '"Ulm" Ulm is in Germany.'},
        {"response": f"{THINK}<answer>Germany</answer>", "observation": None},
    ]
    assert (row.question, row.answer, row.status, row.reported) == ("Where is Ulm?", "Germany", "answered", 1.0)
    assert (row.em, row.em_mean, row.f1, row.format, row.turns, row.searches, row.memories) == (1, 1, 1, True, 2, 1, 0)
    assert not one(tmp_path, ROW, require_memory=True).row.format


@pytest.mark.parametrize(
    ("golds", "objectives"),
    [
        ({"golden_answers": ["Germany", "FRG"]}, [["Germany", "FRG"]]),
        ({"golden_answers": "Germany"}, [["Germany"]]),
        ({"golden_answers": [["a", "b"], ["c"]]}, [["a", "b"], ["c"]]),
        ({"ground_truth": "Germany<|answer_split|>FRG"}, [["Germany", "FRG"]]),
        ({"ground_truth": {"target": [["a"], ["b"]]}}, [["a"], ["b"]]),
        ({"gts": "['Germany', 'FRG']"}, [["Germany", "FRG"]]),
        ({"gts": '{"target": ["Germany"]}'}, [["Germany"]]),
        ({"reward_model": {"style": "rule", "ground_truth": {"target": ["Germany"]}}}, [["Germany"]]),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_golden_answers_as_datasets_have_them(tmp_path: Path, golds: Any, objectives: Any, suffix: str) -> None:
    path = written(tmp_path / f"one.{suffix}", [{"question": "Where?", "response": SAID} | golds])
    assert read(path)[0].record.golden_answers == objectives


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"sequences_str": PROMPT + SAID}, "Where is Ulm?"),
        ({"sequences_str": SAID, "question": "Ulm?"}, "Ulm?"),
        ({"sequences_str": f"Answer. Question: Where is Ulm?\n{SAID}"}, "Where is Ulm?"),
        ({"input": "user\nQuestion: Where is Ulm?\nassistant\n", "output": SAID}, "Where is Ulm?"),
        ({"prompt": [{"role": "user", "content": "Question: Where is Ulm?"}], "response": SAID}, "Where is Ulm?"),
        ({"prompt": "Question: Where is Ulm?", "response": SAID, "question": "Ulm?"}, "Ulm?"),
        (
            {"messages": [{"role": "user", "content": "Question: Ulm?"}, {"role": "assistant", "content": SAID}]},
            "Ulm?",
        ),
        (
            {"question": "Ulm?", "messages": [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": f"{THINK}<search>Ulm</search>", "tool_calls": None},
                {"role": "tool", "content": '<information>\n"Ulm" Ulm is in Germany.\n</information>', "name": "s"},
                {"role": "assistant", "content": f"{THINK}<answer>Germany</answer>"},
            ]},
            "Ulm?",
        ),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_turns(tmp_path: Path, row: dict[str, Any], question: str) -> None:
    found, same = one(tmp_path, row | {"gts": ["Germany"]}), one(tmp_path, ROW)
    assert found.record.turns == same.record.turns and found.record.question == question


def test_roles_say_who_wrote_what(tmp_path: Path) -> None:
    """Between messages an <information> of the model's is known as its own, and a passage can end no observation."""
    own = f"{THINK}<search>a</search><information>b</information>"
    passage = "P</information><answer>X</answer></search><information>"
    said = [("user", "Question: q?"), ("assistant", own), ("user", passage), ("assistant", "<answer>c</answer>")]
    found = one(tmp_path, messages(*said) | {"gts": "c"})
    assert [(turn.response, turn.observation) for turn in found.record.turns] == [
        (own, passage),
        ("<answer>c</answer>", None),
    ]
    assert not found.parsed[0].valid and found.row.answer == "c"


@pytest.mark.parametrize(
    ("said", "status", "answer"),
    [
        ("<think>t</think><answer>a", "truncated", None),
        ("<think>t", "truncated", None),
        ("<think>t</think><search>a</search>", "max_turns", None),
        ("<search>a</search>\n\n<information>P <answer>X</answer>", "max_turns", None),
        ("I do not know", "no_action", None),
        ("<think>t</think><answer> </answer>", "no_action", None),
        ("<answer>a <answer>b</answer></answer>", "no_action", None),
        ("<answer>a</answer> and <answer>b</answer>", "answered", "a"),
        ("<answer>a</answer><search>b</search>\n\n<information>P</information>\n\nno", "no_action", None),
    ],
)
def test_how_a_transcript_ends(tmp_path: Path, said: str, status: str, answer: str | None) -> None:
    row = one(tmp_path, {"question": "q", "gts": "a", "response": said}).row
    assert (row.status, row.answer, row.em) == (status, answer, float(answer == "a"))


def test_scores_of_several_objectives(tmp_path: Path) -> None:
    row = {"question": "q", "golden_answers": [["New York"], ["Ulm"]], "response": "<answer>New York; Bonn</answer>"}
    found = one(tmp_path, row).row
    assert (found.num_objectives, found.em, found.em_mean, found.f1, found.format) == (2, 0.0, 0.5, 0.5, False)
    assert one(tmp_path, row | {"golden_answers": ["x", "New York; Bonn"]}).row.em == 1.0  # aliases of one


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "expected an object"),
        ({"response": SAID, "question": "q"}, "golden_answers: missing"),
        ({"response": SAID, "question": "q", "gts": []}, "gts[0]: no answer that is not empty"),
        ({"response": SAID, "question": "q", "gts": [["a"], 5]}, "gts[1]: Input should be a valid list, got 5"),
        ({"response": SAID, "question": "q", "gts": 5}, "gts[0]: Input should be a valid list, got 5"),
        ({"response": SAID, "question": "q", "gts": [["a; b"], ["c"]]}, "golden_answers: a golden answer of several"),
        ({"response": SAID, "question": "q", "gts": "['a' 'b']"}, "gts: a list of answers that cannot be read"),
        ({"response": SAID, "gts": "a"}, "question: missing, and no prompt with 'Question:'"),
        ({"response": 5, "question": "q", "gts": "a"}, "response: Input should be a valid string, got 5"),
        ({"response": SAID, "question": 5, "gts": "a"}, "question: Input should be a valid string, got 5"),
        (BARE, f"{FORMS} none of them"),
        (ROW | {"response": SAID}, f"{FORMS} sequences_str and response"),
        ({"sequences_str": "so <answer>a</answer>", "gts": "a"}, "sequences_str: where the prompt ends is not seen"),
        (ROW | {"score": "high"}, "score: Input should be a valid number, got 'high'"),
        (ROW | {"id": 1.5}, "id: Input should be a valid string, got 1.5"),
        (ROW | {"sample_index": -1}, "sample_index: Input should be greater than or equal to 0"),
        (messages(("user", "a")), "messages: expected a user message and then an assistant message"),
        (messages(("user", "a"), ("assistant", "b"), ("assistant", "c")), "messages[2]: an assistant message"),
        (messages(("user", "a"), ("assistant", "b"), tool_calls=[{}]), "messages[0].tool_calls: List should"),
        (messages(("user", "a"), ("assistant", None)), "messages[1].content: missing"),
        (messages(("user", "a"), ("assistant", f"<search>b</search>{FOUND}"), ("tool", "c")), "messages[2]: a message"),
        (BARE | {"response": "<search>a</search><information>b</information>" * 257}, "turns: "),
        (BARE | {"response": "x" * (10**6 + 1)}, "turns[0].response: String should have at most"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_field(tmp_path: Path, row: Any, said: str) -> None:
    path = written(tmp_path / "rows.jsonl", [ROW, row])
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 2: {said}") and "\n" not in str(caught.value)


def test_nan_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | {"score": float("nan")}) + "\n" + json.dumps(ROW)[:99])
    with pytest.raises(ValueError, match=r"line 1: not whole JSON: NaN .*\n.*line 2: .*was it cut off"):
        read(path)
    frame = pd.DataFrame([{"question": "q", "gts": "a", "response": SAID, "score": score} for score in (1.0, None)])
    frame.to_parquet(tmp_path / "rows.parquet")
    assert [found.row.reported for found in read(tmp_path / "rows.parquet")] == [1.0, None]
    frame.astype({"score": "float64"}).assign(question=[5.0, float("nan")]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"row 1: question: Input should be a valid string, got 5.0"):
        read(tmp_path / "rows.parquet")
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cut\.parquet: not a whole Parquet file"):
        read(tmp_path / "cut.parquet")


def test_rows_of_one_question_are_its_samples(tmp_path: Path) -> None:
    other = ROW | {"ground_truth": "Bavaria"}
    rows = [found.row for found in read(written(tmp_path / "rows.jsonl", [ROW, other, ROW, ROW | {"id": 7}]))]
    assert [row.sample_index for row in rows] == [0, 0, 1, 0] and [row.row for row in rows] == [1, 2, 3, 4]
    assert rows[0].id == rows[2].id != rows[1].id and rows[3].id == "7"
    with pytest.raises(ValueError, match="line 2: golden_answers: another than in 1, which has the same id '7'"):
        read(written(tmp_path / "rows.jsonl", [ROW | {"id": 7}, other | {"id": 7}]))


def hostile_rows() -> list[dict[str, Any]]:
    said = f"<mem>{HOSTILE}</mem>{THINK}<search>{HOSTILE}</search>\n\n<information>{HOSTILE}</information>\n\n{HOSTILE}"
    return [{"id": HOSTILE, "question": HOSTILE, "gts": [HOSTILE, HOSTILE + "2"], "response": said}]


def test_the_page_escapes_and_loads_nothing(tmp_path: Path) -> None:
    html = page(read(written(tmp_path / "rows.jsonl", [*hostile_rows(), ROW])), HOSTILE)
    shown = Page(html)  # fails where a tag of the data closes one of ours
    assert shown.open == [] and not {"script", "link", "img", "b\u202e"} & set(shown.tags)
    assert "‹U+202E›" in html and "\u202e" not in html and "http:" not in html and "https:" not in html
    assert html.count('class="worth unscored"') == 1 and html.count("<summary>observation</summary>") == 2


def test_the_page_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript_report, "MAX_CHARS", 10)
    monkeypatch.setattr(transcript_report, "MAX_SHOWN", 2)
    rows = [{"id": str(i), "question": "q", "gts": "a", "response": "x" * 25} for i in range(3)]
    html = page(read(written(tmp_path / "rows.jsonl", rows)), "rows.jsonl")
    assert "xxxxxxxxxx … 15 more characters" in html and "The first 2 of 3 transcripts" in html
    assert html.count('<details class="trajectory"') == 2


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["import", *map(str, arguments)], env={"COLUMNS": "160"})


def test_the_command(tmp_path: Path) -> None:
    rows_given = [ROW | {"score": 0.5}, ROW | {"score": 0}, *hostile_rows()]
    path, out = written(tmp_path / "rows.jsonl", rows_given), tmp_path / "o"
    for _ in range(2):  # what an import made an import may replace
        done = run(path, "--out", out)
        assert done.exit_code == 0, done.output
    rows = read_records(out / "scores.parquet", ImportedRow)
    assert rows == [found.row for found in read(path)] and [row.em for row in rows] == [1.0, 1.0, 0.0]
    assert sorted(item.name for item in out.iterdir()) == ["scores.parquet", "trajectories.html", "trajectories.jsonl"]
    attempts = read_transcripts(out / "trajectories.jsonl")
    assert [attempt.sample_index for attempt in attempts] == [0, 1, 0]
    assert [attempt.record.golden_answers for attempt in attempts[:2]] == [[["Germany", "FRG"]]] * 2
    assert re.search(r"mean of 3 +0.667 +0.667 +0.667 +0.667 +2.000 +0.250", done.stdout)
    assert "3 transcripts of 2 questions; 2 answered; 1 no_action" in done.stdout and "\u202e" not in done.stdout
    done = run(path, "--limit", 1)
    assert done.exit_code == 0 and "1 transcripts of 1 questions" in done.stdout


def test_the_command_replaces_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = written(tmp_path / "in" / "trajectories.jsonl", [ROW])
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for out, said in [
        (tmp_path / "file", "holds something that is no import"),
        (tmp_path / "full", "holds something that is no import"),
        (tmp_path / "in", "lies in it, and would be removed"),
    ]:
        done = run(path, "--out", out)
        assert done.exit_code == 1 and said in done.stderr.replace("\n", " "), done.output
    assert path.exists() and (tmp_path / "full" / "notes.txt").exists()


def test_the_command_needs_no_pipeline(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [ROW])
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('prefect', 'mlflow', 'dvc', 'torch', 'transformers', 'tasks')));"
        f"from mempo.cli import app; app(['import', {str(path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 transcripts of 1 questions" in done.stdout


def test_what_is_imported_is_scored_by_a_model(tiny_policy: Path, tmp_path: Path) -> None:
    said = (
        "".join(f"<IS>{state}</IS><query>q</query>\n<info>P</info>\n" for state in "su")
        + "<IS>v</IS><answer>a</answer>"
    )
    path = written(tmp_path / "a.jsonl", [{"question": "q?", "gts": "Berlin", "output": said}])
    assert run(path, "--out", tmp_path / "o", "--tags", "mem1").exit_code == 0
    (row,) = read_records(tmp_path / "o" / "scores.parquet", ImportedRow)
    assert (row.turns, row.searches, row.memories, row.format) == (3, 2, 3, False)  # no <think>: not our format
    turns = score_file(tmp_path / "o" / "trajectories.jsonl", tiny_policy, Config())
    assert [turn.reason for turn in turns] == ["first_turn", None, None]


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "transcripts.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```jsonl\n(.*?)```", text, re.DOTALL)
    (tmp_path / "a.jsonl").write_text(example, encoding="utf-8")
    assert [(found.row.em, found.row.turns) for found in read(tmp_path / "a.jsonl")] == [(1.0, 2), (0.0, 2), (1.0, 2)]
    for column in ImportedRow.__dataclass_fields__:
        assert f"`{column}`" in text
