"""The lock with an owner and a lease, on a local path and on S3 (a real server of it), with real processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mempo.lease import Owner, held
from mempo.store import Store
from tests.served import ROOT, until

HOUR = 3600.0  # a lease that no test waits for
on_both = pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
on_a_path = pytest.mark.parametrize("url", ["file"], indirect=True)  # where the kind of store makes no difference

PROGRAM = """
import sys, time
from pathlib import Path
from mempo.lease import held
from mempo.store import Store
url, lease_s, seconds, log = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
with held(Store(url), "runs/x.lock", lease_s, what="the run x"):
    with log.open("a") as file:
        print("in", file=file, flush=True)
        print("held", flush=True)
        time.sleep(seconds)
        print("out", file=file, flush=True)
"""


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that takes the lock for ``seconds``; it writes ``in`` and ``out`` to the log."""
    started = []

    def begin(lease_s: float = HOUR, seconds: float = 60.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, url, str(lease_s), str(seconds), str(tmp_path / "log")]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"COLUMNS": "400"}, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def reads(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def foreign(beat: int = 1, token: str = "another") -> bytes:
    owner = Owner(token=token, beat=beat, host="far", machine="another", pid=os.getpid(), started="1", flow_run="f")
    return owner.model_dump_json().encode()


@on_both
def test_the_second_waits_for_the_first_and_a_killed_one_lets_go_at_once(
    url: str, start: Callable[..., subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, entered = start(), threading.Event()
    assert reads(first) == "held\n"
    owner = json.loads(Store(url).read("runs/x.lock") or b"")
    assert owner["pid"] == first.pid and owner["beat"] == 1 and not {"time", "at", "until"} & set(owner)

    def second() -> None:
        with held(Store(url), "runs/x.lock", HOUR, what="the run x"):
            entered.set()

    waiting = threading.Thread(target=second)
    waiting.start()
    with held(Store(url), "runs/y.lock", HOUR, what="the run y"):
        pass
    assert not entered.wait(0.8)
    first.kill()  # not reaped: a zombie is no owner
    waiting.join(30)
    assert entered.is_set()
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("waiting for") == 1 and f"waiting for process {first.pid} on {owner['host']}, which works" in told
    assert Store(url).names("runs") == []


@on_a_path
def test_beats_keep_a_lock_and_one_that_stands_still_is_taken_over(url: str) -> None:
    store, entered, over = Store(url), threading.Event(), threading.Event()
    store.write("runs/x.lock", foreign(0))
    found: list[bool] = []

    def beat() -> None:
        while not over.wait(0.1):
            found.append(store.read("runs/x.lock") == foreign(len(found)))
            store.write("runs/x.lock", foreign(len(found)))

    def wait() -> None:
        with held(store, "runs/x.lock", 0.6, what="the run x"):
            entered.set()

    beating, waiting = threading.Thread(target=beat), threading.Thread(target=wait)
    beating.start()
    waiting.start()
    assert not entered.wait(1.5)
    over.set()
    beating.join()
    assert len(found) > 3 and all(found)
    assert entered.wait(30)
    waiting.join()


@on_a_path
def test_what_no_owner_wrote_lapses_too(url: str) -> None:
    Store(url).write("runs/x.lock", b'{"pid": ')
    with held(Store(url), "runs/x.lock", 0.5, what="the run x"):
        pass


@on_both
def test_of_many_that_wait_for_a_dead_owner_one_works_at_a_time(
    url: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    first = start()
    assert reads(first) == "held\n"
    waiters = [start(seconds=0.2) for _ in range(4)]
    time.sleep(1.0)  # most of them wait by now
    first.kill()
    for waiter in waiters:
        _, errors = waiter.communicate(timeout=120)
        assert waiter.returncode == 0, errors
    assert (tmp_path / "log").read_text().split() == ["in"] + 4 * ["in", "out"]


@on_both
def test_who_finds_another_owner_in_the_lock_ends_and_leaves_it(
    url: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start(lease_s=0.6)
    assert reads(first) == "held\n"
    Store(url).write("runs/x.lock", foreign())
    _, errors = first.communicate(timeout=60)
    assert first.returncode == -signal.SIGTERM
    assert "the lock on the run x is lost: process " in errors and "on far (flow run f) has taken it over" in errors
    assert Store(url).read("runs/x.lock") == foreign()


@on_a_path
def test_a_lock_that_was_cleaned_up_is_written_again(url: str) -> None:
    store = Store(url)
    with held(store, "runs/x.lock", 0.3, what="the run x"):
        store.remove("runs/x.lock")
        until(lambda: store.read("runs/x.lock") is not None, 60)
    assert store.read("runs/x.lock") is None


def test_a_store_that_is_away_for_less_than_a_lease_does_no_harm(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/s")
    with held(store, "runs/x.lock", 3.0, what="the run x"):
        before = store.read("runs/x.lock")
        (tmp_path / "s").rename(tmp_path / "away")
        (tmp_path / "s").write_text("no folder: every access fails")
        time.sleep(1.3)  # one renewal
        (tmp_path / "s").unlink()
        (tmp_path / "away").rename(tmp_path / "s")
        until(lambda: store.read("runs/x.lock") != before, 60)


@on_a_path
def test_a_store_that_is_away_for_a_lease_ends_the_owner(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    first = start(lease_s=0.6)
    assert reads(first) == "held\n"
    runs = tmp_path / "a store" / "runs"
    runs.rename(tmp_path / "away")
    runs.write_text("no folder: every access fails")
    _, errors = first.communicate(timeout=60)
    assert first.returncode == -signal.SIGTERM and "is lost: not renewed for 0.6 s: " in errors


@on_a_path
def test_a_store_that_refuses_the_take_over_is_an_error(url: str) -> None:
    """As on a disk that is full or read-only after the owner was killed."""
    store = Store(url)
    store.write("runs/x.lock", foreign())
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, former[1]))
    try:
        with pytest.raises(OSError, match=r"x\.lock.*File too large"), held(store, "runs/x.lock", 0.1, what="x"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert store.read("runs/x.lock") == foreign()
