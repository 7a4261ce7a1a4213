"""All that this project's deployments need on this machine: servers, automations, workers (``mempo up``)."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from mempo import local, services
from mempo.services import DEADLINE_S, Say, Service

CHECKOUT = Path(__file__).resolve().parents[1]


def up(workers: int | None, say: Say) -> Iterator[str]:
    """Start what is missing, and see that all answer; a line on each. ``workers``: of the pool ``gpu``.

    None: one a GPU, or one where there is none. Raises ``ServiceError`` naming what did not start, and its log.
    """
    url = local.start(say=say)
    from tasks import deployments

    try:
        deployments.install_automations(CHECKOUT / "automations.yaml")
    except deployments.ServerHangs:
        services.stop(local.state_folder(), "prefect")
        local.start(say=say)
        deployments.install_automations(CHECKOUT / "automations.yaml")
    yield f"Prefect   {url.removesuffix('/api')}"
    yield f"MLflow    {local.start_ui(say=say)}"
    deployments.make_pools("cpu", "gpu")
    gpus = visible_gpus()
    number = max(1, len(gpus)) if workers is None else workers
    for pool, index in [("cpu", 0), *(("gpu", index) for index in range(number))]:
        gpu = gpus[index % len(gpus)] if pool == "gpu" and gpus else ""
        worker = start_worker(pool, index, gpu, say)
        yield f"worker    {worker.name}{f', GPU {gpu}' if gpu else ''} (pid {worker.pid})"
    say("deploying ...")
    deployments.deploy(CHECKOUT / "prefect.yaml")
    say("deployed")
    yield f"for Prefect's own commands: export PREFECT_API_URL={url}"


def visible_gpus() -> list[str]:
    """The GPUs that a process of this environment may use, as CUDA names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def start_worker(pool: str, index: int, gpu: str, say: Say) -> Service:
    """Worker ``index`` of a work pool, which sees the device ``gpu`` alone, or none; on return it asks for work."""
    name = f"{pool}-{index}"
    own = {"CUDA_VISIBLE_DEVICES": gpu, "PREFECT_WORKER_WEBSERVER_PORT": services.PORT}
    command = [*worker_command(pool, name), "--with-healthcheck"]
    return services.ensure(local.settle(), name, command, "/health", 0, say=say, deadline_s=DEADLINE_S, environment=own)


def worker_command(pool: str, name: str) -> list[str]:
    """Prefect's worker of ``pool``, one flow run at a time; it makes the pool if need be."""
    own = f"{name}@{platform.node()}"
    return ["prefect", "worker", "start", "--type", "process", "--pool", pool, "--name", own, "--limit", "1"]
