"""``mempo score`` as a user calls it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mempo.cli import app
from mempo.config import Config
from mempo.params import load_config
from mempo.score_file import ScoredTurn, score_file
from mempo.storage import read_records
from tests.tiny import make_tokenizer
from tests.unit.transcript_rows import rollouts, rows_of, written

ROOT = Path(__file__).parents[2]


def test_the_command_from_end_to_end(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("mem_reward: {empty: zero, typo: 1}")  # not read: it was not asked for
    path = written(tmp_path / "a.jsonl", rows_of(rollouts(make_tokenizer()), "turns"))
    arguments = [
        "score",
        str(path),
        "--model",
        str(tiny_policy),
        "--out",
        "out.parquet",
        "--set",
        "mem_reward.mask=none",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = read_records(tmp_path / "out.parquet", ScoredTurn)
    assert rows == score_file(path, tiny_policy, load_config(None, ["mem_reward.mask=none"]))
    assert "5 rows: out.parquet" in done.stdout and f"{rows[1].p_mem:.3f}" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--limit", "1"])
    assert done.exit_code == 0 and "3 turns of 1 trajectories" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--params", "params.yaml"])
    assert done.exit_code == 1 and "mem_reward.typo: unknown key" in done.stderr


def test_the_command_refuses_in_a_line_before_a_model_is_loaded(tmp_path: Path) -> None:
    good = written(tmp_path / "a.jsonl", rows_of(rollouts(make_tokenizer()), "turns"))
    bad = written(tmp_path / "b.jsonl", [{"id": "x"}, {"id": 2}])
    empty = tmp_path / "folder"
    empty.mkdir()
    for arguments, said in [
        ([bad, "--model", empty], "b.jsonl, line 1: turns: missing"),
        ([good, "--model", empty], "folder: no tokenizer can be read from it"),
        ([good, "--model", tmp_path / "none"], "none: no such folder"),
        ([good, "--model", empty, "--out", tmp_path / "x.csv"], "x.csv: expected a file that ends in .parquet"),
        ([good, "--model", empty, "--set", "mem_reward.emty=one"], "mem_reward.emty: unknown key; did you mean empty?"),
    ]:
        done = CliRunner().invoke(app, ["score", *map(str, arguments)])
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.output
        assert done.stderr.startswith("mempo: ") and said in done.stderr.replace("\n", " ")


def test_the_command_needs_no_pipeline(tiny_policy: Path, tmp_path: Path) -> None:
    """A new process in which prefect, mlflow and dvc cannot be imported."""
    path = written(tmp_path / "a.jsonl", rows_of(rollouts(make_tokenizer()), "turns"))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('prefect', 'mlflow', 'dvc', 'tasks', 'flows')));"
        f"from mempo.cli import app; app(['score', {str(path)!r}, '--model', {str(tiny_policy)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "5 turns of 2 trajectories" in done.stdout


def test_the_example_in_the_documentation_runs(tiny_policy: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "score.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```jsonl\n(.*?)```", page, re.DOTALL)
    (tmp_path / "a.jsonl").write_text(example, encoding="utf-8")
    rows = score_file(tmp_path / "a.jsonl", tiny_policy, Config())
    assert [(row.id, row.sample_index) for row in rows if row.turn == 1] == [
        ("ulm", 0),
        ("ulm", 1),
        ("two", 0),
        ("ids", 0),
    ]
    assert all(row.p_mem is not None for row in rows if row.turn > 1)
    for column in ScoredTurn.__dataclass_fields__:
        assert f"`{column}`" in page
