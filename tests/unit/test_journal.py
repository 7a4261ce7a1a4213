"""A run's log: whole lines from several writers, with the context they were written in, and no passwords."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path

import pytest

from mempo import journal

log = logging.getLogger("tasks.something")


def test_a_line_says_when_where_and_what(tmp_path: Path) -> None:
    with journal.kept(tmp_path, "mempo"):
        with journal.timed("rollout", round=3):
            log.info("half", extra={"figures": {"em": 0.5}})
        log.warning("no answer from http://me:hunter2@host/x")
    log.warning("the run is closed")
    begins, half, done, warning, end = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (begins["task"], begins["message"], end["message"]) == ("run", "begins", "done")
    assert (half["run"], half["round"], half["task"], half["figures"]) == ("mempo", 3, "rollout", {"em": 0.5})
    assert done["seconds"] >= 0 and (done["task"], done["process"]) == ("rollout", os.getpid())
    assert warning["level"] == "WARNING" and warning["message"] == "no answer from http://me:***@host/x"
    assert "round" not in warning and warning["time"].endswith("+00:00")


def test_a_failed_step_is_a_warning_and_a_failed_run_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError), journal.kept(tmp_path, "mempo"), journal.timed("score", round=0):
        raise ValueError("one\ntwo")
    *_, step, run = journal.last(tmp_path, 10, level=logging.WARNING)
    assert (step["level"], step["task"], step["message"]) == ("WARNING", "score", "failed: ValueError: one")
    assert (run["level"], run["task"]) == ("ERROR", "run")
    assert logging.getLogger("tasks").handlers == [], "the next run has a file of its own"


def write(folder: Path, name: str) -> None:
    with journal.kept(folder, name):
        for index in range(200):
            log.info("line %d %s", index, "x" * 300)


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(tmp_path, name)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for name in ("a", "b", "c"):
        told = [line["message"].split()[1] for line in lines if line["run"] == name and "line" in line["message"]]
        assert told == [str(index) for index in range(200)]


def test_what_a_killed_writer_left_half_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"level": "WARNING", "message": "whole"}\n{"level": "WARNING", "mess')
    assert [line["message"] for line in journal.last(tmp_path, 5)] == ["whole"]
    with journal.kept(tmp_path, "mempo"):
        pass
    assert [line["message"] for line in journal.last(tmp_path, 5)] == ["whole", "begins", "done"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with journal.kept(tmp_path, "mempo"):
        log.warning("lost")
    assert journal.last(tmp_path, 5) == []


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert journal.told(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert journal.told(ValueError("a: b\nc")) == "ValueError: a: b"
