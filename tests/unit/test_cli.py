"""What a user does wrong ends with one line that names it, exit code 1 and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mempo import local
from mempo.cli import app
from mempo.workspace import Workspace


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError("a server was started before the inputs were checked")

    monkeypatch.setattr(local, "start", refuse)
    monkeypatch.setattr(local, "settle", lambda: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text("policies: {mempo: {}}")
    return tmp_path


def call(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--root", str(root)])


def said(root: Path, *arguments: str) -> str:
    found = call(root, *arguments)
    assert found.exit_code == 1 and isinstance(found.exception, SystemExit), found.output
    assert found.stderr.startswith("mempo: ") and "Traceback" not in found.stderr
    return found.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    "arguments", [("warmstart",), ("train",), ("evaluate",), ("evaluate", "mempo"), ("ask", "q?"), ("report",)]
)
def test_a_missing_input_is_named_with_what_makes_it(root: Path, arguments: tuple[str, ...]) -> None:
    assert "`mempo prepare` makes it" in said(root, *arguments) or arguments == ("report",)


def test_each_command_names_what_it_lacks(root: Path) -> None:
    Workspace(root).data.mkdir(parents=True)
    assert "`mempo warmstart` makes it" in said(root, "train")
    assert "`mempo warmstart` makes it" in said(root, "ask", "q?", "--policy", "warmstart")
    assert "`mempo train mempo` makes it" in said(root, "ask", "q?")
    assert "`mempo train mempo` makes it" in said(root, "evaluate", "mempo")
    assert "`mempo evaluate` makes it" in said(root, "report")


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("name", ["mempoo", "../mempo", "/etc"])
def test_another_policy_is_refused_with_the_nearest(root: Path, command: str, name: str) -> None:
    message = said(root, command, name)
    assert f"policies.{name}: no such policy" in message and "mempo" in message
    assert sorted(path.name for path in root.iterdir()) == ["params.yaml"]


@pytest.mark.parametrize("command", ["prepare", "warmstart", "train", "evaluate"])
def test_settings_come_before_everything(root: Path, command: str) -> None:
    assert "loop.group_sise: unknown key; did you mean group_size?" in said(root, command, "--set", "loop.group_sise=8")
    (root / "params.yaml").write_bytes(b"loop: {\xff")
    assert "params.yaml" in said(root, command)
    (root / "params.yaml").unlink()
    assert "params.yaml: no such file" in said(root, command)


def test_a_folder_that_is_no_policy_and_a_damaged_corpus_are_named(root: Path, tiny_policy: Path) -> None:
    data = Workspace(root).data
    data.mkdir(parents=True)
    (root / "folder").mkdir()
    (data / "corpus.jsonl").write_text('{"id": "1", "conte')
    for name in ("folder", "missing"):
        assert str(root / name) in said(root, "ask", "q?", "--policy", str(root / name))
    assert "corpus.jsonl, line 1: not a document" in said(root, "ask", "q?", "--policy", str(tiny_policy))
