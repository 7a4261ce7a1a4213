"""Flow runs know the process that they run in, so that those of a killed one do not stay Running for ever."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import TagsContext
from prefect.runtime import flow_run
from prefect.states import Crashed

from mempo import lease

# This boot of this machine, by no clock: a step of it must not make a live process look dead.
HERE, PROCESS = f"machine:{lease.machine()}", "process:"
AT_WORK = [StateType.PENDING, StateType.RUNNING]
RUNS = FlowRunFilterState(name=None, type=FlowRunFilterStateType(any_=AT_WORK))
OVER = FlowRunFilterState(name=None, type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
TASKS = TaskRunFilter(state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=AT_WORK)))


def sign() -> None:
    """From here on the flow runs of this process carry it and its machine as tags; what others left is put right."""
    if not lease.machine():
        return
    put_right()
    mine = f"{PROCESS}{os.getpid()}@{lease.started(os.getpid())}"
    TagsContext(current_tags={HERE, mine}).__enter__()  # until the process ends


def put_right() -> None:
    """Flow runs of processes of this machine that have ended become Crashed, with their tasks.

    Prefect may learn of a task when its process is dead and its flow run Crashed already: those are looked at again.
    """
    if not lease.machine():
        return
    here = FlowRunFilterTags(all_=[HERE])
    with get_client(sync_client=True) as client:
        left = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=here, state=RUNS))
        left += client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=here, state=OVER), task_run_filter=TASKS)
        for run in left:
            if not any(_alive(tag) for tag in run.tags if tag.startswith(PROCESS)):
                _crashed(client, run)


def _alive(tag: str) -> bool:
    pid, _, began = tag.removeprefix(PROCESS).partition("@")
    return lease.started(int(pid)) == began


def take_over(now: datetime) -> None:
    """Of a flow run that goes on after its machine was lost: the tasks that were at work there become Crashed, those
    that began before ``now``.
    """
    if (flow_run.run_count or 1) > 1:
        with get_client(sync_client=True) as client:
            _crash_tasks(client, UUID(flow_run.id), "its machine was lost", before=now)


def _crashed(client: SyncPrefectClient, left: FlowRun) -> None:
    why = f"its process was killed; seen by process {os.getpid()} on {platform.node()}"
    _crash_tasks(client, left.id, why)
    state: Any = Crashed(message=why)
    if not (left.state and left.state.is_final()):
        client.set_flow_run_state(left.id, state, force=True)


def _crash_tasks(client: SyncPrefectClient, flow_run_id: UUID, why: str, *, before: datetime | None = None) -> None:
    state: Any = Crashed(message=why)
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    for task in client.read_task_runs(flow_run_filter=mine, task_run_filter=TASKS):
        if before is None or (task.created and task.created < before):
            client.set_task_run_state(task.id, state, force=True)
