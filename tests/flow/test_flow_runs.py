"""Flow runs and tasks of processes that were killed do not stay at work; all others are left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Completed, Crashed, Running, State

from mempo import lease
from tasks import flow_runs

pytestmark = pytest.mark.usefixtures("prefect_server")
DEAD, ALIVE = "process:1@never", f"process:{os.getpid()}@{lease.started(os.getpid())}"
keys = count()


@flow(name="of-a-test")
def nothing() -> None:
    """Never run: what the server knows of it is all there is."""


@task
def step() -> None:
    """Never run either."""


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as found:
        yield found


def made(client: SyncPrefectClient, state: State, *tags: str) -> tuple[UUID, UUID]:
    """A flow run in ``state`` and a task of it that is at work, as far as the server knows."""
    run = client.create_flow_run(nothing, tags=tags, state=state).id
    return run, client.create_task_run(step, run, str(next(keys)), state=Running()).id


def states(client: SyncPrefectClient, of: tuple[UUID, UUID]) -> tuple[str, str]:
    run, task_run = client.read_flow_run(of[0]).state, client.read_task_run(of[1]).state
    assert run and task_run
    return run.type.value, task_run.type.value


def test_of_a_killed_process_flow_run_and_task_become_crashed(client: SyncPrefectClient) -> None:
    left = made(client, Running(), flow_runs.HERE, DEAD)
    flow_runs.put_right()
    assert states(client, left) == ("CRASHED", "CRASHED")


def test_a_task_that_the_server_learns_of_too_late_does_too(client: SyncPrefectClient) -> None:
    left = made(client, Crashed(message="its process was killed"), flow_runs.HERE, DEAD)
    flow_runs.put_right()
    assert states(client, left) == ("CRASHED", "CRASHED")
    state = client.read_flow_run(left[0]).state
    assert state and state.message == "its process was killed"  # what it crashed of is not told anew


@pytest.mark.parametrize(
    ("state", "tags"),
    [
        (Running(), (flow_runs.HERE, ALIVE)),  # at work
        (Running(), ("machine:another", DEAD)),  # perhaps at work there
        (Completed(), (flow_runs.HERE, DEAD)),  # ended well: the end of its task is still on its way
    ],
)
def test_others_are_left_alone(client: SyncPrefectClient, state: State, tags: tuple[str, ...]) -> None:
    left = made(client, state, *tags)
    flow_runs.put_right()
    assert states(client, left) == (state.type.value, "RUNNING")
