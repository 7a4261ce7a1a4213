"""The only MLflow file: one flat run a training, found again by its key in any store.

Functions here speak to the store and raise what it raises; ``patience`` keeps that out of training's way.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
from matplotlib.figure import Figure
from mlflow.entities import Metric, Param, RunTag, Span, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient

from mempo import local, storage
from mempo.config import digest
from tasks import chart_view
from tasks.names import flat_params, metric_name
from tasks.traces import Trace

_MAX_PARAMS, _MAX_METRICS = 100, 1000  # MLflow's limits of a call

logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints the trace of what it also raises


@dataclass(slots=True)
class TrackedRun:
    """A run, found in a store by the ``key`` in its tag.

    What is not in the run's other files stands in ``state_file``: key, tags, status, beginning and end in ms since
    1970, ``num_rounds`` asked for, and the last round that each store has whole.
    """

    name: str
    experiment: str
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    state_file: Path
    num_rounds: int | None
    key: str
    started_ms: int
    status: str = "RUNNING"
    ended_ms: int | None = None
    logged: dict[str, int] = field(default_factory=dict)
    run_id: str | None = None
    experiment_id: str | None = None
    saving: Lock = field(default_factory=Lock)  # a job that training no longer waits for saves too

    @property
    def last_logged(self) -> int:
        """The last round that the store of this moment has whole; -1 where it has none."""
        return self.logged.get(_store(), -1)

    def log_through(self, round_index: int) -> None:
        self.logged[_store()] = round_index
        self.save()

    def become(self, status: str) -> None:
        """RUNNING, or FINISHED, FAILED or KILLED from now on."""
        self.status = status
        self.ended_ms = None if status == "RUNNING" else _now_ms()
        self.save()

    def save(self) -> None:
        names = ("key", "tags", "started_ms", "status", "ended_ms", "logged", "num_rounds")
        with self.saving:
            storage.write_json(self.state_file, {name: getattr(self, name) for name in names})


def open_tracking(
    run_name: str,
    config: Mapping[str, Any],
    tags: Mapping[str, str],
    state_file: Path,
    *,
    experiment: str = "mempo",
    num_rounds: int | None = None,
) -> TrackedRun:
    """The run that ``state_file`` names, or a new one with ``config`` as its params. No store is asked.

    Params are those of the first start: ``section.key``, secrets left out, values cut to 6000 characters.
    """
    found = storage.read_json(state_file) if state_file.exists() else {}
    known = {"key": uuid.uuid4().hex, "started_ms": _now_ms()} | {
        name: found[name] for name in ("key", "started_ms", "status", "ended_ms", "logged") if name in found
    }
    run = TrackedRun(run_name, experiment, config, found.get("tags", {}) | tags, state_file, num_rounds, **known)
    run.save()
    return run


def begin(run: TrackedRun) -> str:
    """The id of the run in the store, which is made where it is not there; from now on it has our tags and status."""
    if run.run_id is None:
        experiment_id = _experiment_id(run.experiment)
        client = mlflow.MlflowClient()
        found = client.search_runs([experiment_id], f"tags.`mempo.key` = '{run.key}'", max_results=1)
        if not found:
            run.log_through(-1)
            tags = {"mempo.key": run.key}
            found = [client.create_run(experiment_id, run.started_ms, tags, run.name)]
        run_id = str(found[0].info.run_id)
        if not found[0].data.params:
            params = [Param(name, value) for name, value in flat_params(run.config).items()]
            for first in range(0, len(params), _MAX_PARAMS):
                client.log_batch(run_id, params=params[first : first + _MAX_PARAMS])
        client.update_run(run_id, status=run.status, name=run.name)
        client.log_batch(run_id, tags=[RunTag(name, str(value)) for name, value in run.tags.items()])
        run.run_id, run.experiment_id = run_id, experiment_id
    return run.run_id


def log_metrics(run: TrackedRun, metrics: Mapping[str, float], step: int, timestamp_ms: int) -> None:
    """One point a metric; the same values, step and time again add none.

    Values that are not finite are left out and counted as ``not_finite``; see ``metric_name`` for names.
    """
    finite = {metric_name(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
    if len(metrics) > len(finite):
        finite["not_finite"] = float(len(metrics) - len(finite))
    points = [Metric(name, value, timestamp_ms, step) for name, value in finite.items()]
    for first in range(0, len(points), _MAX_METRICS):
        mlflow.MlflowClient().log_batch(begin(run), metrics=points[first : first + _MAX_METRICS])


def log_table(run: TrackedRun, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """The table ``name``.json at the artifact root, replacing the former one (``mlflow.log_table`` would append)."""
    cells = [
        [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in c] for c in columns.values()
    ]
    rows = list(zip(*cells, strict=True))
    client, run_id = mlflow.MlflowClient(), begin(run)
    client.log_dict(run_id, {"columns": list(columns), "data": rows}, f"{name}.json")
    client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([{"path": f"{name}.json", "type": "table"}]))


def log_figure(run: TrackedRun, figure: Figure, name: str) -> None:
    """The picture ``name`` at the artifact root: there, under one name in all runs, the compare page shows it."""
    mlflow.MlflowClient().log_figure(begin(run), figure, name)


def log_trace(run: TrackedRun, trace: Trace, timestamp_ms: int) -> None:
    """``trace`` in the run's experiment, linked to the run; the same key again is the same trace."""
    trace_id = f"tr-{digest([run.key, trace.key], 32)}"
    run_id = begin(run)
    place = TraceLocation.from_experiment_id(run.experiment_id)
    info = TraceInfo(trace_id, place, timestamp_ms, TraceState.OK, **trace.summary(run_id))
    # The store itself: the public way hands spans to a queue that swallows failures, each after tries of its own.
    client = TracingClient()
    client.log_spans(info.experiment_id, [Span.from_dict(span) for span in trace.rows(trace_id, timestamp_ms)])
    client.start_trace(info)


def end(run: TrackedRun) -> None:
    """Tell the store of the run's status and end."""
    mlflow.MlflowClient().set_terminated(begin(run), run.status, run.ended_ms)


def charts_url(server: str, experiment: str = "mempo", view: str = "mempo") -> str:
    """The page of ``experiment`` on ``server`` with one of the prebuilt views, see ``chart_view``."""
    return f"{server}/#/experiments/{_experiment_id(experiment)}/runs?{chart_view.query(view)}"


def _now_ms() -> int:
    return int(time.time() * 1000)


def _store() -> str:
    return digest(mlflow.get_tracking_uri())


def _experiment_id(name: str) -> str:
    # The first client makes the SQLite store, and two processes that make one at once fail.
    with local.locked("mlflow"):
        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(name)
        if found is None:
            # The default would be ./mlruns, which is gone with a temporary copy of the repository.
            here = local.state_folder() / "artifacts" / metric_name(name)
            location = None if mlflow.get_tracking_uri().startswith("http") else here.as_uri()
            found = client.get_experiment(client.create_experiment(name, artifact_location=location))
        for tag, view in chart_view.tags().items():
            if tag not in found.tags:  # a view that somebody rearranged stays
                client.set_experiment_tag(found.experiment_id, tag, view)
        return str(found.experiment_id)
