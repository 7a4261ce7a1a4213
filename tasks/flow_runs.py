"""Flow runs know the process that they run in, so that those of a killed one do not stay Running for ever."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil
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
from prefect.states import Crashed

HOST, PROCESS = f"host:{platform.node()}", "process:"
AT_WORK = [StateType.PENDING, StateType.RUNNING]
RUNS = FlowRunFilterState(name=None, type=FlowRunFilterStateType(any_=AT_WORK))
TASKS = TaskRunFilter(state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=AT_WORK)))


def sign() -> None:
    """From here on the flow runs of this process carry it and its host as tags. Those of processes of this host that
    have ended become Crashed, with their tasks.
    """
    with get_client(sync_client=True) as client:
        here = FlowRunFilter(tags=FlowRunFilterTags(all_=[HOST]), state=RUNS)
        for left in client.read_flow_runs(flow_run_filter=here):
            if not any(_alive(tag) for tag in left.tags if tag.startswith(PROCESS)):
                _crashed(client, left)
    mine = f"{PROCESS}{os.getpid()}@{psutil.Process().create_time():.2f}"
    TagsContext(current_tags={HOST, mine}).__enter__()  # until the process ends


def _alive(tag: str) -> bool:
    pid, _, began = tag.removeprefix(PROCESS).partition("@")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(began)) < 1.0
    except psutil.NoSuchProcess:
        return False


def _crashed(client: SyncPrefectClient, left: FlowRun) -> None:
    state: Any = Crashed(message=f"its process was killed; seen by process {os.getpid()} on {platform.node()}")
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[left.id]))
    for task in client.read_task_runs(flow_run_filter=mine, task_run_filter=TASKS):
        client.set_task_run_state(task.id, state, force=True)
    client.set_flow_run_state(left.id, state, force=True)
