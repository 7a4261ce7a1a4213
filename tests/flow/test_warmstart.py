"""The warm start, really killed: it goes on from the last whole state and ends in the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mempo import data
from mempo.config import Config, Data, Warmstart
from mempo.data.lessons import Teacher
from mempo.runtime import Runtime
from mempo.storage import content_hash
from mempo.warmstart import last_saved, warm_start
from mempo.workspace import Workspace

CONFIG = Config(
    data=Data(num_train=8, num_dev=8, num_test=8),
    warmstart=Warmstart(num_steps=7, copy_steps=2, batch_size=6, save_every=2, warmup_steps=2),
    runtime=Runtime(num_threads=1),
)
SCRIPT = """
import sys
from pathlib import Path
from mempo.config import Config
from mempo.warmstart import warm_start
from mempo.workspace import Workspace

def progress(done, **figures):
    print(done, flush=True)
    if done == 5:
        sys.stdin.read()  # for ever: the test kills it here, a step past the state of step 4

config = Config.model_validate_json(sys.argv[2])
warm_start(Workspace(Path(sys.argv[1])).run("warmstart", config, {}), progress=progress)
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "geo"
    data.prepare(CONFIG.data, CONFIG.model, folder)
    return folder


def workspace(root: Path, dataset: Path) -> Workspace:
    (root / "data").mkdir(parents=True)
    (root / "data" / "questions").symlink_to(dataset)
    return Workspace(root)


def test_killed_and_run_again_it_ends_in_the_same_bits(tmp_path: Path, dataset: Path) -> None:
    straight = warm_start(workspace(tmp_path / "straight", dataset).run("warmstart", CONFIG, {}))

    space = workspace(tmp_path / "killed", dataset)
    command = [sys.executable, "-c", SCRIPT, str(space.root), CONFIG.model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "5":
                break
        process.kill()
    run = space.run("warmstart", CONFIG, {})
    assert last_saved(run) == (4, run.folder / "step_000004")
    assert not space.checkpoint("warmstart").exists()

    done: list[int] = []
    resumed = warm_start(run, progress=lambda step, **_: done.append(step))
    assert done == [5, 6, 7]
    assert content_hash(resumed) == content_hash(straight)
    assert not list(resumed.glob("trainer.*"))

    # A finished one trains no more, and puts a lost publication back.
    assert warm_start(run, progress=lambda step, **_: done.append(step)) == resumed
    assert done == [5, 6, 7] and content_hash(resumed) == content_hash(straight)


def test_fewer_steps_than_copying_takes_teach_copying_alone_and_none_teach_nothing(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_demonstration(*_: object) -> None:
        raise AssertionError("the format was taught")

    monkeypatch.setattr(Teacher, "_world_lessons", no_demonstration)
    found = {}
    for steps in (0, 2):
        taught = CONFIG.warmstart.model_copy(update={"num_steps": steps, "copy_steps": 2})
        config = CONFIG.model_copy(update={"warmstart": taught})
        run = workspace(tmp_path / str(steps), dataset).run("warmstart", config, {})
        found[steps] = content_hash(warm_start(run))
        untrained = content_hash(run.folder / "untrained")
        assert (found[steps] == untrained) == (steps == 0)
