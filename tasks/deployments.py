"""What a Prefect server must know of this project: automations for lost runs, and deployments."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, temporary_settings
from prefect.workers.process import ProcessWorker
from ruamel.yaml import YAML

from mempo.services import ServiceError


class ServerHangs(ServiceError):
    """Prefect 3.7's server on SQLite, sometimes, as an automation is written: the commit waits for a lock that its own
    loop holds (``prefect/server/events/models/automations.py``). What was written is there after another start.
    """


def install_automations(file: Path, patience_s: float = 20.0) -> None:
    """The automations of ``file``, each once by its name; one that is there as it stands in the file is not written."""
    try:
        with temporary_settings({PREFECT_API_REQUEST_TIMEOUT: patience_s}):
            for specification in YAML(typ="safe", pure=True).load(file)["automations"]:
                _install(Automation(**specification))
    except httpx.TimeoutException:
        raise ServerHangs(f"the Prefect server does not answer within {patience_s:.0f} s") from None
    except httpx.TransportError as error:
        raise ServiceError(f"PREFECT_API_URL: no Prefect server answers there: {error}") from None


def _install(wanted: Automation) -> None:
    try:
        known = Automation.read(name=wanted.name)
    except ValueError:
        wanted.create()
        return
    if _content(known) != _content(wanted):
        wanted.id = known.id
        wanted.update()


def _content(automation: Automation) -> dict[str, Any]:
    return automation.model_dump(exclude={"id"}, exclude_defaults=True)


def make_pools(*names: str) -> None:
    """Work pools of processes, where there are none of these names; one of another type stays."""
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        for name in names:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def deploy(file: Path) -> None:
    """The deployments of ``file`` as they stand there. Raises ``ServiceError`` with what Prefect says against it.

    A server on SQLite answers 503 while somebody else writes: then it is asked again.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file.name]
    for pause_s in (2.0, 10.0, None):
        done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said = (done.stdout + done.stderr).strip()
        if pause_s is None or "503 Service Unavailable" not in said:
            raise ServiceError(f"{file}: {said}")
        time.sleep(pause_s)
