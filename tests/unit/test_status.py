"""``mempo status`` on run folders that are alive, killed, finished and damaged, against figures known by hand."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mempo import history, journal, rounds, status
from mempo.cli import app
from mempo.params import ConfigError
from mempo.store import Store
from tests.flow.run_folder import make_run, write_round

log = logging.getLogger("tasks.something")


def test_a_run_that_was_stopped_in_a_round(tiny_policy: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_policy, finished=4)
    write_round(run, 4, until="update")
    with pytest.raises(OSError), journal.kept(run.folder, run.name):
        raise OSError("No space left on device")
    found = status.of(run.folder)
    assert (found.state, found.phase, found.done, found.total) == ("stopped", "round 4, update", 4, 6)
    made = [rounds.read_round(run.round(i)).trajectories for i in range(4)]
    tokens = sum(len(turn.response_ids) for of in made for trajectory in of for turn in trajectory.turns)
    assert (found.seconds_a_round, found.tokens_per_s) == (10.0, tokens / 40.0)
    assert found.eta_s is None and found.worker is None
    assert (found.em, found.dev_em) == (0.3, 0.4)  # of round 3, and of the check after round 2
    assert found.errors[0].endswith("ERROR run: failed: OSError: No space left on device")
    assert found.disk_bytes == sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file())


def test_a_run_that_somebody_works_on_has_an_end_in_sight(tiny_policy: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_policy, finished=4)
    other = make_run(tmp_path / "other", tiny_policy, finished=6)
    with run.alone(), journal.kept(run.folder, run.name):
        found = status.of(run.folder)
        assert found.state == "at work" and found.worker and f"process {os.getpid()}" in found.worker
        assert found.eta_s == 2 * 10.0
    assert status.of(run.folder).state == "stopped"
    assert status.of(other.folder).state == "finished"


def test_the_lock_of_a_process_that_was_killed_is_nobodys(tiny_policy: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_policy, finished=1)
    code = """
import os, sys
from pathlib import Path
from mempo import lease
from mempo.store import Store
with lease.held(Store(Path(sys.argv[1])), "runs/mempo.lock", 60, what="it"):
    os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert Store(tmp_path).read("runs/mempo.lock")
    assert status.of(run.folder).state == "stopped"


@pytest.mark.parametrize("name", ["config.json", "mlflow.json", "round_0001/rollout.json"])
def test_a_damaged_folder_is_told_by_the_file(tiny_policy: Path, tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, tiny_policy, finished=2)
    (run.folder / name).write_text('{"half')
    found = status.of(run.folder)
    assert found.state == "damaged" and name in found.phase and found.disk_bytes


def test_the_command_finds_runs_by_path_by_policy_and_all(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, tiny_policy, finished=2)
    (tmp_path / "runs" / "grpo-0123abcd").mkdir()
    (tmp_path / "runs" / "mempo.lock").write_text("x")
    monkeypatch.chdir(tmp_path)

    def asked(*words: str) -> list[tuple[str, str]]:
        done = CliRunner().invoke(app, ["status", "--json", *words])
        assert done.exit_code == 0, done.output
        return [(one["run"], one["state"]) for one in json.loads(done.output)]

    mine = (run.folder.name, "stopped")
    assert asked() == [("grpo-0123abcd", "damaged"), mine]
    assert asked("mempo") == asked(str(run.folder)) == [mine]
    shown = CliRunner().invoke(app, ["status"]).output
    assert "round 2, rollout" in shown and "2/6" in shown
    refused = CliRunner().invoke(app, ["status", "nobody"])
    assert refused.exit_code == 1 and "nobody: no run folder" in refused.output


@pytest.mark.parametrize("name", ["results/mempo", "runs/mempo-1a2b3c4"])
def test_log_again_takes_run_folders_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"config": {}, "inputs": {}, "versions": {}}')
    with pytest.raises(ConfigError, match=f"^{folder}: no run folder: its name would end in a key"):
        history.recorded_run(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
