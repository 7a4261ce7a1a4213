"""The heavy work of a round on the workers of a Prefect work pool: each share is a run of ``shards.deployment``.

Runs and driver meet in the files of the run folder alone. A driver that is started again finds what its runs have
made, and those that still work by their keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from mempo import storage
from mempo.config import OF_MANY
from mempo.console import progress
from mempo.services import ServiceError
from mempo.workspace import Run
from tasks import parts
from tasks.parts import Figures, Part, Phase

log = logging.getLogger(__name__)

POLL_S = 1.0
PATIENCE_S = 60.0  # until somebody is told that no worker has taken a run


class ShardFailed(ServiceError):
    """A share of a round that could not be made on any worker; made again by the same command."""


@dataclass(slots=True)
class Share:
    """Neighbouring parts and the run that makes them. ``asked``, ``began``: seconds of this process's clock."""

    parts: list[Part]
    run_id: UUID | None = None
    number: int = 0
    failed: int = 0
    asked: float = 0.0
    began: float | None = None
    told: bool = False

    def __str__(self) -> str:
        return f"{self.parts[0].phase}, questions {self.parts[0].first} to {self.parts[-1].end}"


def records(run: Run, round_index: int, policy: Path, phase: Phase, cls: type) -> list[Any]:
    """What ``phase`` makes of the round with ``policy``, in the order of its questions: here or on workers."""
    asked = parts.split(phase, run.config)
    if run.config.shards.deployment:
        _elsewhere(run, round_index, parts.shares(asked, run.config.shards.count))
    else:
        parts.make(run, round_index, policy, asked)
    return parts.gathered(run, round_index, phase, cls)


def figures(run: Run, round_index: int, phase: Phase, here: Callable[[], Figures]) -> Figures:
    """The figures of a phase that cannot be cut: what it comes to ``here()``, or on a worker."""
    if not run.config.shards.deployment:
        return here()
    (part,) = parts.split(phase, run.config)
    _elsewhere(run, round_index, [[part]])
    found: Figures = storage.read_json(part.made(run, round_index))["figures"]
    return found


def cpu_seconds(run: Run, round_index: int, phase: Phase) -> float:
    """What the workers have spent on ``phase``; 0 where all was done in this process."""
    if not run.config.shards.deployment:
        return 0.0
    made = [part.made(run, round_index) for part in parts.split(phase, run.config)]
    return float(sum(storage.read_json(file)["cpu_seconds"] for file in made if file.exists()))


def _elsewhere(run: Run, round_index: int, wanted: Sequence[list[Part]]) -> None:
    """Returns once all parts are there. Raises ``ShardFailed`` where a share has failed too often."""
    shares = [Share(chosen) for chosen in wanted]
    total = sum(len(share.parts) for share in shares)
    phase = wanted[0][0].phase
    run.share.fetch_below(run.round(round_index))
    with get_client(sync_client=True) as client, progress(f"{run.name} {round_index} {phase}", total) as advance:
        try:
            while left := [share for share in shares if _missing(run, round_index, share)]:
                advance(total - sum(len(_missing(run, round_index, share)) for share in left))
                for share in left:
                    _look_after(client, run, round_index, share)
                time.sleep(POLL_S)
            run.share.fetch_below(run.round(round_index))
            run.share.fetch(run.policy(round_index + 1))
        except BaseException:  # a failure, Ctrl-C: nobody would use what the others are making
            for share in shares:
                if share.run_id and _missing(run, round_index, share):
                    _cancel(client, share, "its round has ended")
            raise
        advance(total)


def _missing(run: Run, round_index: int, share: Share) -> list[Part]:
    return parts.missing(run, round_index, share.parts)


def _look_after(client: SyncPrefectClient, run: Run, round_index: int, share: Share) -> None:
    """One look at a share's run: begin it, give it to another worker, or leave it alone."""
    try:
        if share.run_id is None:
            _ask(run, round_index, share)
        elif why := _lost(client, run, round_index, share):
            share.failed += 1
            if share.failed == run.config.shards.attempts:
                raise ShardFailed(f"round {round_index}, {share}: failed {share.failed} times, at last {why}")
            log.warning("round %d, %s goes to another worker: %s", round_index, share, why)
            share.run_id, share.began, share.number = None, None, share.number + 1
    except httpx.HTTPError as error:  # the runs go on without their server
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
            raise
        log.warning("the Prefect server does not answer: %s", str(error) or type(error).__name__)


def _lost(client: SyncPrefectClient, run: Run, round_index: int, share: Share) -> str | None:
    """Why nothing is to be expected of a share's run any more; None where it may still end well, or has."""
    limits, now = run.config.shards, time.monotonic()
    assert share.run_id is not None
    state = client.read_flow_run(share.run_id).state
    if state and state.is_final():
        run.share.fetch_below(run.round(round_index))
        return f"{state.name}: {state.message}" if _missing(run, round_index, share) else None
    if state and state.is_running():
        share.began = share.began or now
        if now - share.began > limits.deadline_s:
            late = f"not done within shards.deadline_s: {limits.deadline_s:g}"
            _cancel(client, share, late)
            return late
    elif now - share.asked > PATIENCE_S and not share.told:
        share.told = True
        log.warning("%s: no worker was free for %.0f s, or none is there; it waits", share, PATIENCE_S)
    return None


def _ask(run: Run, round_index: int, share: Share) -> None:
    """A new run, or the one that a former driver of this very share has asked for and that has not ended yet."""
    first, last = share.parts[0], share.parts[-1]
    parameters = {
        "name": run.folder.name,
        "round_index": round_index,
        "phase": first.phase,
        "ranges": [[part.first, part.end] for part in share.parts],
        "config": run.config.model_dump(mode="json", exclude=OF_MANY),
        "root": str(run.workspace.root),
    }
    place, name = run.config.storage.url or run.workspace.root.resolve(), str(run.config.shards.deployment)
    share.asked = time.monotonic()
    while share.run_id is None:
        key = f"{place}/{run.folder.name}/{round_index}/{first.phase}/{first.first}-{last.end}/{share.number}"
        try:
            found: FlowRun = run_deployment(name, parameters=parameters, timeout=0, idempotency_key=key)
        except ObjectNotFound:
            raise ValueError(f"shards.deployment: {name}: the Prefect server has none; `mempo up` makes it") from None
        if found.state and found.state.is_final():
            share.number += 1
        else:
            share.run_id = found.id


def _cancel(client: SyncPrefectClient, share: Share, why: str) -> None:
    assert share.run_id is not None
    with suppress(httpx.HTTPError, ObjectNotFound):
        client.set_flow_run_state(share.run_id, Cancelling(message=why), force=True)
