"""What a training left, against what an undisturbed one left: files, MLflow, Prefect, processes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import mlflow
import pandas as pd
import psutil

from tests.flow.small import tracked_runs

FOLDERS = ("runs", "checkpoints", "results")
# The name by which MLflow knows the run, when and by whom it was made: of one training, not of its result.
OWN = {"mlflow.json", "log.json", "log.jsonl"}
CLOCKS = {"seconds", "cpu_seconds", "started", "clock", "process", "versions", "shards"}  # when, and where
CLOCK_COLUMNS = re.compile(r"(time|cpu)/.*_s|wall_s|work_s")


def files(root: Path, straight: Path, *, ended: bool, exact: bool = True) -> list[str]:
    """A line a difference. Not ``ended``: the rest may come. Not ``exact``: what the files say may differ."""
    ours, theirs = _files(root), _files(straight)
    lost, left = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    wrong = [f"{what}: {', '.join(names)}" for what, names in (("lost", lost), ("left", left)) if names and ended]
    both = sorted(ours.keys() & theirs.keys()) if exact else []
    return wrong + [f"differs: {name}" for name in both if _other(ours[name], theirs[name])]


def _files(root: Path) -> dict[str, Path]:
    """Paths by their names below ``root``, those of a run folder without its key."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    named = {
        re.sub(r"^runs/mempo-[0-9a-f]{8}/", "runs/mempo/", path.relative_to(root).as_posix()): path for path in found
    }
    return {name: path for name, path in named.items() if path.suffix != ".lock"}


def _other(one: Path, two: Path) -> bool:
    if one.name in OWN or one.read_bytes() == two.read_bytes():
        return False
    if one.suffix == ".json":
        return bool(_timeless(json.loads(one.read_text())) != _timeless(json.loads(two.read_text())))
    if one.name == "rounds.parquet":
        frames = [pd.read_parquet(path) for path in (one, two)]
        negative = (frames[0].filter(regex=CLOCK_COLUMNS) < 0).any(axis=None)
        kept = [frame[[column for column in frame if not CLOCK_COLUMNS.fullmatch(column)]] for frame in frames]
        return bool(negative) or not kept[0].equals(kept[1])
    return True


def _timeless(value: Any) -> Any:
    return {key: _timeless(v) for key, v in value.items() if key not in CLOCKS} if isinstance(value, dict) else value


def tracked(store: str, root: Path, straight: Path, *, exact: bool = True) -> list[str]:
    """One MLflow run, FINISHED, one point a round and metric; ``exact``: the points of the undisturbed run."""
    client = mlflow.MlflowClient(tracking_uri=store)
    found = []
    for folder in (root, straight):
        (file,) = folder.glob("runs/mempo-*/mlflow.json")
        runs = tracked_runs(client, file.parent)
        if [run.info.status for run in runs] != ["FINISHED"]:
            return [f"MLflow: {[(run.info.run_id, run.info.status) for run in runs]}"]
        names = [name for name in runs[0].data.metrics if not CLOCK_COLUMNS.fullmatch(name)]
        found.append({name: client.get_metric_history(runs[0].info.run_id, name) for name in names})
    ours, theirs = ({n: sorted((p.step, repr(p.value)) for p in points) for n, points in f.items()} for f in found)
    twice = [n for n, points in ours.items() if len({step for step, _ in points}) < len(points)]
    other = [n for n in sorted(ours.keys() | theirs.keys()) if exact and ours.get(n) != theirs.get(n)]
    return [*(f"MLflow, twice in a round: {name}" for name in twice), *(f"MLflow: {name}" for name in other)]


def flow_runs(api: str, root: Path) -> list[str]:
    """Flow runs of ``root``, and their task runs, that Prefect takes for running."""
    running = {"state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    with httpx.Client(base_url=api, timeout=60, trust_env=False) as client:
        flows = client.post("/flow_runs/filter", json={"flow_runs": running}).raise_for_status().json()
        tasks = client.post("/task_runs/filter", json={"task_runs": running}).raise_for_status().json()
        over = {task["flow_run_id"]: f"task run {task['name']}" for task in tasks if task["flow_run_id"]}
        named = {flow["id"]: (flow, "flow run") for flow in flows}
        named |= {key: (client.get(f"/flow_runs/{key}").raise_for_status().json(), name) for key, name in over.items()}
    mine = {key: name for key, (flow, name) in named.items() if flow["parameters"].get("root") == str(root)}
    return [f"Prefect: {name} is running, of {key}" for key, name in mine.items()]


def orphans(root: Path, sessions: set[int], servers: set[int], patience_s: float = 15.0) -> list[str]:
    """Processes of these sessions, or with CRASH_ROOT of ``root``, that do not end within seconds; ``servers`` may."""
    until = time.monotonic() + patience_s
    while (
        left := [p for p in psutil.process_iter() if _ours(p, root, sessions) and not _below(p, servers)]
    ) and time.monotonic() < until:
        time.sleep(0.1)
    return [f"orphan: {_said(process)}" for process in left]


def _ours(process: psutil.Process, root: Path, sessions: set[int]) -> bool:
    """Some programs write over their environment, some begin a session of their own; none does both."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getsid(process.pid) in sessions or process.environ().get("CRASH_ROOT") == str(root)
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False


def _below(process: psutil.Process, servers: set[int]) -> bool:
    try:
        return bool(servers & {process.pid, *(parent.pid for parent in process.parents())})
    except psutil.NoSuchProcess:
        return False


def _said(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:150]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}, which has just ended"
