"""Tracking: one flat MLflow run a training, resumable, and never in training's way.

A server that is down costs seconds: a call is two short tries, then nothing is tried for twenty times as long as it
took, so an outage takes at most 5 % of the time. What was missed is logged later, from the files (``catch_up``).
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from matplotlib.figure import Figure
from mlflow.entities import Metric, Param, RunTag, Span, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient

from mempo import local, storage
from mempo.config import digest
from tasks import chart_view
from tasks.names import PASSWORD_IN_URL, flat_params, metric_name
from tasks.traces import Trace

log = logging.getLogger(__name__)

_MAX_PARAMS, _MAX_METRICS = 100, 1000  # MLflow's limits of a call

Round = tuple[int, Mapping[str, float], int]


@dataclass(slots=True)
class TrackedRun:
    """A run, found in the store by the ``key`` in its tag; ``state_file`` keeps key and last step across restarts."""

    name: str
    experiment: str
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    state_file: Path
    key: str
    run_id: str | None = None
    last_logged: int = -1
    open: bool = False
    silent_until: float = 0.0

    def save(self) -> None:
        known = {"key": self.key, "last_logged": self.last_logged, "store": digest(mlflow.get_tracking_uri())}
        storage.write_json(self.state_file, known)


def open_tracking(
    run_name: str, config: Mapping[str, Any], tags: Mapping[str, str], state_file: Path, *, experiment: str = "mempo"
) -> TrackedRun:
    """The run that ``state_file`` names, running again, or a new one with ``config`` as its params.

    Params are those of the first start: ``section.key``, secrets left out, values cut to 6000 characters.
    """
    known = storage.read_json(state_file) if state_file.exists() else {}
    if known.pop("store", None) != digest(mlflow.get_tracking_uri()):
        known = {"key": uuid.uuid4().hex}  # another store has no such run: everything is logged there anew
    state_file.parent.mkdir(parents=True, exist_ok=True)
    run = TrackedRun(run_name, experiment, config, tags, state_file, **known)
    run.save()
    _attempt(run, lambda run_id: None)
    return run


def log_metrics(run: TrackedRun, metrics: Mapping[str, float], step: int, timestamp_ms: int) -> bool:
    """One point a metric; the same values, step and time again add none. Whether it was logged.

    Values that are not finite are left out and counted as ``not_finite``; see ``metric_name`` for names.
    """
    finite = {metric_name(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
    if len(metrics) > len(finite):
        finite["not_finite"] = float(len(metrics) - len(finite))
    points = [Metric(name, value, timestamp_ms, step) for name, value in finite.items()]

    def send(run_id: str) -> None:
        for first in range(0, len(points), _MAX_METRICS):
            mlflow.MlflowClient().log_batch(run_id, metrics=points[first : first + _MAX_METRICS])

    return _attempt(run, send)


def catch_up(run: TrackedRun, rounds: Iterable[Round]) -> bool:
    """Log what is not logged yet of all rounds so far, each (round, metrics, time of its file in ms), in order."""
    for step, metrics, timestamp_ms in sorted(rounds, key=lambda entry: entry[0]):
        if step > run.last_logged:
            if not log_metrics(run, metrics, step, timestamp_ms):
                return False
            run.last_logged = step
            run.save()
    return True


def log_table(run: TrackedRun, name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
    """The table ``name``.json at the artifact root, replacing the former one (``mlflow.log_table`` would append)."""
    cells = [
        [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in c] for c in columns.values()
    ]
    rows = list(zip(*cells, strict=True))

    def send(run_id: str) -> None:
        client = mlflow.MlflowClient()
        client.log_dict(run_id, {"columns": list(columns), "data": rows}, f"{name}.json")
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([{"path": f"{name}.json", "type": "table"}]))

    return _attempt(run, send)


def log_figure(run: TrackedRun, figure: Figure, name: str) -> bool:
    """The picture ``name`` at the artifact root: there, under one name in all runs, the compare page shows it."""
    return _attempt(run, lambda run_id: mlflow.MlflowClient().log_figure(run_id, figure, name))


def log_trace(run: TrackedRun, trace: Trace, timestamp_ms: int) -> bool:
    """``trace`` in the run's experiment, linked to the run; the same key again is the same trace."""
    trace_id = f"tr-{digest([run.key, trace.key], 32)}"

    def send(run_id: str) -> None:
        place = TraceLocation.from_experiment_id(mlflow.MlflowClient().get_run(run_id).info.experiment_id)
        info = TraceInfo(trace_id, place, timestamp_ms, TraceState.OK, **trace.summary(run_id))
        # The store itself: the public way hands spans to a queue that swallows failures, each after tries of its own.
        client = TracingClient()
        client.log_spans(info.experiment_id, [Span.from_dict(span) for span in trace.rows(trace_id, timestamp_ms)])
        client.start_trace(info)

    return _attempt(run, send)


def close(run: TrackedRun, status: str = "FINISHED") -> bool:
    """End the run as FINISHED, FAILED or KILLED; tried even where the server was down a moment ago."""
    run.silent_until = 0.0
    return _attempt(run, lambda run_id: mlflow.MlflowClient().set_terminated(run_id, status))


def charts_url(server: str, experiment: str = "mempo", view: str = "mempo") -> str:
    """The page of ``experiment`` on ``server`` with one of the prebuilt views, see ``chart_view``."""
    return f"{server}/#/experiments/{_experiment_id(experiment)}/runs?{chart_view.query(view)}"


def _attempt(run: TrackedRun, send: Callable[[str], object]) -> bool:
    """``send(run id)`` on an open run; a failure is a warning and a pause, never an error."""
    began = time.monotonic()
    if began < run.silent_until:
        return False
    try:
        if not run.open:
            _open(run)
        assert run.run_id is not None
        send(run.run_id)
    except Exception as error:  # whatever a store, a network or a disk raises: training goes on
        now = time.monotonic()
        run.silent_until = now + 20 * (now - began)
        reason = PASSWORD_IN_URL.sub(r"\1:***@", str(error)).partition("\n")[0]
        log.warning("tracking: %s; logged later from the files", reason[:200])
        return False
    return True


def _open(run: TrackedRun) -> None:
    experiment_id = _experiment_id(run.experiment)
    client = mlflow.MlflowClient()
    found = client.search_runs([experiment_id], f"tags.`mempo.key` = '{run.key}'", max_results=1)
    if not found:
        run.last_logged = -1
        found = [client.create_run(experiment_id, tags={"mempo.key": run.key}, run_name=run.name)]
    run.run_id = str(found[0].info.run_id)
    if not found[0].data.params:
        params = [Param(name, value) for name, value in flat_params(run.config).items()]
        for first in range(0, len(params), _MAX_PARAMS):
            client.log_batch(run.run_id, params=params[first : first + _MAX_PARAMS])
    client.update_run(run.run_id, status="RUNNING", name=run.name)
    client.log_batch(run.run_id, tags=[RunTag(name, str(value)) for name, value in run.tags.items()])
    run.open = True


def _experiment_id(name: str) -> str:
    # The first client makes the SQLite store, and two processes that make one at once fail.
    with local.locked("mlflow"):
        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(name)
        if found is None:
            # The default would be ./mlruns, which is gone with a temporary copy of the repository.
            sqlite = mlflow.get_tracking_uri().startswith("sqlite")
            location = (local.state_folder() / "artifacts" / metric_name(name)).as_uri() if sqlite else None
            found = client.get_experiment(client.create_experiment(name, artifact_location=location))
        for tag, view in chart_view.tags().items():
            if tag not in found.tags:  # a view that somebody rearranged stays
                client.set_experiment_tag(found.experiment_id, tag, view)
        return str(found.experiment_id)
