"""Trainings on workers (``mempo up``): a worker that dies alone, a machine that is lost with what runs on it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil

from mempo import services
from tests.crash.experiment import PATIENCE_S, Experiment, Training
from tests.crash.table import Table
from tests.flow.small import awaited

BLOCKS = ("loop.num_rounds=2", "loop.questions_per_round=4", "rollout.block_questions=1", "diagnose.every=0")
SHARDS = ("shards.deployment=shard/shard", "shards.count=4")
FLOW = "PREFECT__FLOW_RUN_ID"


class Deployed(Training):
    """A training that a deployment's run makes, and that one command in this process would make to the bit."""

    def __init__(self, made_by: Experiment, kind: str, deployment: str, *more: str) -> None:
        super().__init__(made_by, kind, *BLOCKS)
        self._deployment, self._given = deployment, [*BLOCKS, *more]

    def _command(self) -> list[str]:
        overrides: dict[str, dict[str, object]] = {}
        for setting in self._given:
            name, _, value = setting.partition("=")
            section, _, key = name.partition(".")
            overrides.setdefault(section, {})[key] = int(value) if value.isdigit() else value
        given = ["-p", f"root={self.root}", "-p", f"overrides={json.dumps(overrides)}", "--watch"]
        return [sys.executable, "-m", "prefect", "deployment", "run", self._deployment, *given]


def workers(experiment: Experiment, table: Table) -> None:
    """Two workers of the pool gpu, one of cpu. What dies is not started again before the training has ended."""
    sharded = Deployed(experiment, "worker", "train/driver", *SHARDS)
    _lose(experiment, table, sharded, "a worker, SIGKILL", "round_0000/parts/rollout_*.json", with_flow=False)
    whole = Deployed(experiment, "host", "train/train")
    _lose(experiment, table, whole, "worker and training, SIGKILL", "round_0001/rollout.json", with_flow=True)
    sharded = Deployed(experiment, "shard", "train/driver", *SHARDS)
    _lose(experiment, table, sharded, "worker and shard, SIGKILL", "round_0000/parts/rollout_*.json", with_flow=True)


def _lose(experiment: Experiment, table: Table, training: Deployed, what: str, moment: str, *, with_flow: bool) -> None:
    experiment.must([sys.executable, "-m", "mempo.cli", "up", "--workers", "2"])
    state = experiment.state
    server = {"PREFECT_API_URL": f"{services.alive(state)['prefect'].url}/api", "PREFECT_HOME": f"{state}/prefect"}
    with training.started(**server) as process:
        assert training.reaches(moment, process), "it ended before anything could be killed"
        flow = _at_work(state)
        worker = next(p for p in flow.parents() if "worker" in p.cmdline())
        worker.kill()
        if with_flow:
            flow.kill()
        killed, before = time.monotonic(), len(_made(training.root))
        awaited(process, lambda: len(_made(training.root)) > before, PATIENCE_S)
        goes_on = time.monotonic() - killed
    table.kill(what, f"{moment} is there; the next file of the run {goes_on:.0f} s later", [])
    table.ended(what, process.returncode, training)


def _at_work(state: Path) -> psutil.Process:
    """A flow run of the pool gpu: what a worker of it has started."""
    while True:
        for name, service in services.alive(state).items():
            process = service.process()
            for child in process.children(recursive=True) if name.startswith("gpu") and process else []:
                if FLOW in child.environ():
                    return child
        time.sleep(0.05)


def _made(root: Path) -> list[Path]:
    return [path for path in root.glob("runs/mempo-*/round_*/**/*.json")]
