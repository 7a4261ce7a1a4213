"""What is broken off, and when. Each kind takes a training to its end and writes a line a kill into the table."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import psutil

from mempo import services
from tests.crash.experiment import PATIENCE_S, Experiment, Training
from tests.crash.table import Table
from tests.flow.small import awaited, members
from tests.served import Served

SHORT = ("loop.num_rounds=2", "diagnose.every=0")
RANK = "deepspeed_worker"
DEEPSPEED = ("runtime.trainer=deepspeed", "runtime.deepspeed.ranks=2", *SHORT)


def every_change(experiment: Experiment, table: Table, part: str = "0/1") -> None:
    """SIGKILL right before each change of a file: between any two of them, inside every write that is not yet whole."""
    training = Training(experiment, "change")
    while (code := training.run(CRASH_DO="kill", CRASH_PART=part)) == -signal.SIGKILL:
        table.kill("driver, SIGKILL", training.last_point(), training.so_far())
    table.ended("driver, SIGKILL at a change of a file", code, training)


def disk_full(experiment: Experiment, table: Table, part: str = "0/1") -> None:
    """ENOSPC for every write from one on, then room again."""
    training = Training(experiment, "full")
    while (code := training.run(CRASH_DO="full", CRASH_PART=part)) == 1:
        table.kill("disk full", training.last_point(), [*one_line(training, "No space left"), *training.so_far()])
    table.ended("disk full", code, training)


def small_files(experiment: Experiment, table: Table) -> None:
    """RLIMIT_FSIZE: the system itself refuses to write on, inside the libraries' own writes too."""
    training = Training(experiment, "limit")
    for kilobytes in (1, 6, 24, 100, 200):
        code = training.run("prlimit", f"--fsize={kilobytes * 1024}")
        wrong = [*one_line(training, "File too large"), *training.so_far()] if code == 1 else [f"exit code {code}"]
        table.kill("RLIMIT_FSIZE", f"files of at most {kilobytes} KiB", wrong)
    table.ended("RLIMIT_FSIZE", training.run(), training)


def random_moments(experiment: Experiment, table: Table, dice: random.Random, seconds: float, kills: int) -> None:
    """A signal to the process group or to the driver alone, ``seconds`` being a straight run's; chained."""
    training, code = Training(experiment, "random"), -1
    for _ in range(kills):
        sent, group = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]), dice.random() < 0.5
        after = dice.uniform(0.5, seconds)
        with training.started() as process:
            try:
                code = process.wait(after)
                break  # it was faster
            except subprocess.TimeoutExpired:
                (os.killpg if group else os.kill)(process.pid, sent)
        table.kill(f"{'group' if group else 'driver'}, {sent.name}", f"after {after:.1f} s", training.so_far())
    table.ended("random moments", code if code == 0 else training.run(), training)


def ranks(experiment: Experiment, table: Table, dice: random.Random) -> None:
    """DeepSpeed's ranks in mid-update: one of them, torchrun, the driver over them."""
    for what, word in {"a rank": RANK, "torchrun": "torch.distributed.run", "driver over ranks": ""}.items():
        training = Training(experiment, "ranks", *DEEPSPEED)
        with training.started() as process:
            awaited(process, lambda: _family(process, RANK), PATIENCE_S)
            after = dice.uniform(0, 12)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                for victim in (_family(process, word) if word else [process])[-1:]:
                    victim.kill()
        table.kill(f"{what}, SIGKILL", f"{after:.1f} s after the ranks began", training.so_far())
        table.ended("ranks of deepspeed", training.run(), training)


def prefect_server(experiment: Experiment, table: Table) -> None:
    _server(experiment, table, "prefect", ("round_0000/rollouts.parquet", "round_0001/update.json"))


def mlflow_server(experiment: Experiment, table: Table) -> None:
    """It is started again before the command is given again: what was missed is logged then."""
    url = _ui(experiment)
    _server(experiment, table, "mlflow", ("round_0000/update.json",), MLFLOW_TRACKING_URI=url)


def _server(experiment: Experiment, table: Table, name: str, moments: tuple[str, ...], **more: str) -> None:
    training = Training(experiment, name)
    for moment in moments:
        with training.started(**more) as process:
            if training.reaches(moment, process):
                for victim in members(services.alive(experiment.state)[name]):
                    victim.kill()
        if name == "mlflow":
            assert _ui(experiment) == more["MLFLOW_TRACKING_URI"]
        wrong = [] if process.returncode in (0, 1) else [f"exit code {process.returncode}"]
        when = f"{moment} is there; the command ended with {process.returncode}"
        table.kill(f"{name} server, SIGKILL", when, [*wrong, *training.so_far()])
    table.ended(f"{name} server", training.run(**more), training)


def _ui(experiment: Experiment) -> str:
    """Start the MLflow server of the local store; its URL."""
    page = experiment.must([sys.executable, "-m", "mempo.cli", "ui", "--no-browser"]).splitlines()[0]
    return page.partition("/#/")[0]


def clock(experiment: Experiment, table: Table, dice: random.Random) -> None:
    """The wall clock jumps by hours, ahead and back, between and inside rounds."""
    training = Training(experiment, "clock")
    offset = experiment.home / f"{training.root.name}.offset"
    offset.write_text("+0s\n")
    fake = {"FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    jumps = 0
    with training.started(LD_PRELOAD="/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", **fake) as process:
        for round_index in range(3):
            for name in ("rollouts.parquet", "scores.parquet", "update.json", "log.json"):
                if training.reaches(f"round_{round_index:04d}/{name}", process):
                    offset.write_text(f"{dice.choice('+-')}{dice.randint(1, 12)}h\n")
                    jumps += 1
    table.kill("clock", f"{jumps} jumps of up to 12 hours", [])
    # Prefect orders the states of a task by the clock of its process: after a step back the first may seem the last.
    table.ended("clock", process.returncode, training, known="Prefect: task run")


def vllm_servers(experiment: Experiment, table: Table) -> None:
    """A server under `mempo serve`, in mid-rollout and in mid-scoring: it is started again and asked again."""
    served = Served(experiment.home / "warm/checkpoints/warmstart/final", experiment.home / "served")
    try:
        servers = ("runtime.engine=vllm", f"runtime.vllm.servers=[{served.urls[0]}]")
        training = Training(experiment, "served", *servers, *SHORT, like=" ".join(SHORT))
        with training.started() as process:
            for moment, doing in (("round_0000/log.json", "rollout"), ("round_0001/rollout.json", "scoring")):
                if training.reaches(moment, process):
                    served.server(served.urls[0]).kill()
                    table.kill("vLLM server, SIGKILL", f"as {doing} of round 1 begins", [])
        table.ended("vLLM server", process.returncode, training)
    finally:
        served.end()


def vllm_driver(experiment: Experiment, table: Table) -> None:
    """The driver over an engine in process: vLLM's own processes must not outlive it."""
    training = Training(experiment, "vllm", "runtime.engine=vllm", *SHORT, like=" ".join(SHORT))
    with training.started() as process:
        if training.reaches("round_0000/score.json", process):
            workers = len(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            when = f"round 0 is scored, {workers} processes below it"
            table.kill("driver over vLLM, SIGKILL", when, training.so_far())
    table.ended("driver over vLLM", training.run(), training)


def one_line(training: Training, reason: str) -> list[str]:
    """A disk that refuses is told in one line, with the path."""
    said = training.said()
    right = len(said) == 1 and reason in said[0] and str(training.root) in said[0]
    return [] if right else [f"said: {' / '.join(said)[-200:]}"]


def _family(process: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if any(word in part for part in child.cmdline())]
    except psutil.NoSuchProcess:
        return []
