"""Another setting is another run folder; a longer run is the same one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mempo import storage
from mempo.config import Config
from mempo.params import ConfigError
from mempo.workspace import Run, Workspace, recorded


def folder(root: Path, inputs: dict[str, str] | None = None, **sections: object) -> str:
    return Workspace(root).run("mempo", Config.model_validate(sections), inputs or {"data": "a"}).folder.name


def test_what_changes_no_result_keeps_the_folder(tmp_path: Path):
    plain = folder(tmp_path)
    assert folder(tmp_path, loop={"num_rounds": 99, "keep_every": 3}) == plain
    assert folder(tmp_path, tracking={"experiment": "x"}, evaluation={"num_questions": 4}) == plain
    assert folder(tmp_path, loss={"max_mismatch": None}) == plain  # a stopped run goes on under another limit


def test_a_retrieval_server_may_move_and_what_it_searches_may_not(tmp_path: Path):
    here, there = ({"urls": [f"http://{host}:8001/retrieve"], "corpus": "wiki-18"} for host in ("here", "there"))
    assert folder(tmp_path, search=here) == folder(
        tmp_path, search=there | {"deadline_s": 9, "retries": 1, "cache_size": 0}
    )
    assert len({folder(tmp_path, search=one) for one in (here, here | {"corpus": "wiki-24"}, {"index": "i"}, {})}) == 4


@pytest.mark.parametrize(
    "sections",
    [{"loop": {"seed": 1}}, {"optim": {"learning_rate": 2e-4}}, {"mem_reward": {"mask": "none"}},
     {"runtime": {"num_threads": 2}}, {"rollout": {"temperature": 0.9}},
     {"loss": {"old_logprobs": "recomputed"}}],
)  # fmt: skip
def test_what_changes_results_starts_another(tmp_path: Path, sections: dict[str, object]):
    assert folder(tmp_path, **sections) != folder(tmp_path)


def test_other_data_starts_another(tmp_path: Path):
    assert folder(tmp_path, {"data": "b"}) != folder(tmp_path)


def test_the_resolved_configuration_is_written_first(tmp_path: Path):
    run = Workspace(tmp_path).run("mempo", Config(), {"data": "a"})
    written = storage.read_json(run.config_file)
    assert written["config"]["loop"]["group_size"] == Config().loop.group_size
    assert written["versions"]["torch"].startswith("2.")


def test_what_is_missing_is_named_with_what_makes_it(tmp_path: Path):
    workspace = Workspace(tmp_path)
    for path, command in (
        (workspace.data, "prepare"),
        (workspace.checkpoint("warmstart"), "warmstart"),
        (workspace.checkpoint("grpo"), "train grpo"),
    ):
        with pytest.raises(FileNotFoundError, match=f"{path} is missing; `mempo {command}` makes it"):
            workspace.require("warmstart", "grpo")
        path.mkdir(parents=True)
    workspace.require("warmstart", "grpo")


HOLDER = """
import sys, time
from pathlib import Path
from mempo.config import Config
from mempo.workspace import Workspace
with Workspace(Path(sys.argv[1])).run("mempo", Config(), {}).alone():
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_never_work_on_one_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # another setting is another run folder, but it would publish to the same checkpoint
    run = Workspace(tmp_path).run("mempo", Config(loop={"seed": 1}), {})  # type: ignore[arg-type]
    entered = threading.Event()

    def second() -> None:
        with run.alone():
            entered.set()

    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        waiting = threading.Thread(target=second)
        waiting.start()
        with Workspace(tmp_path).run("grpo", Config(), {}).alone():
            pass
        assert not entered.wait(0.3)
        holder.kill()  # a killed process lets go
    waiting.join(30)
    assert entered.is_set()
    told = " ".join(capsys.readouterr().err.split())
    assert f"waiting for process {holder.pid} on {socket.gethostname()}, which works on mempo in {tmp_path}" in told
    assert not (tmp_path / "runs" / "mempo.lock").exists()


def filled(run: Run, files: dict[str, str]) -> None:
    for name, text in files.items():
        (run.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / name).write_text(text)


def test_a_host_that_takes_a_run_over_gets_its_rounds_and_newest_policy_and_sends_what_the_store_lacks(tmp_path: Path):
    def host(name: str) -> Run:
        workspace = Workspace(tmp_path / name)
        for path in (workspace.data, workspace.checkpoint("warmstart")):
            path.mkdir(parents=True)
            (path / "file").write_text("the same")
        settings = {"storage": {"url": f"file://{tmp_path}/store"}, "loop": {"num_rounds": 4}}
        return workspace.run("mempo", Config.model_validate(settings), {})

    lost, next_one = host("a"), host("b")
    filled(lost, {f"round_000{i}/{name}": str(i) for i in range(2) for name in ("samples.parquet", "update.json")})
    filled(lost, {"round_0002/rollout.json": "2", **{f"policy_000{i}/weights": str(i) for i in (1, 2)}})
    assert [path.name for path in lost.files(0)] == ["samples.parquet", "update.json"]
    lost.share.send(*lost.files(0), *lost.files(2), lost.policy(1), lost.policy(2))
    lost.join()  # round 1 had not reached the store
    next_one.join()
    assert [path.name for path in next_one.files(1)] == ["samples.parquet", "update.json"]
    assert next_one.files(2)[0].read_text() == "2"
    assert next_one.policy(2).exists() and not next_one.policy(1).exists()
    (next_one.workspace.data / "file").write_text("another")
    with pytest.raises(ValueError, match="data/questions: another one than in"):
        next_one.join()


@pytest.mark.parametrize("text", ["[]", "3", '{"config": []}', "{}"])
def test_a_config_that_is_no_record_of_a_run_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: no record of a run"):
        recorded(tmp_path)


def test_what_names_other_policies_is_no_part_of_a_runs_record(tmp_path: Path):
    suite = {"datasets": {"own": {"split": "test"}}, "agents": {"x": {"policy": "a/b"}}}
    config = Config.model_validate({"policies": {"mempo": {}}, "suites": {"s": suite}})
    run = Workspace(tmp_path).run("mempo", config, {})
    assert recorded(run.folder) == config.model_copy(update={"policies": {}, "suites": {}})
