"""A share whose run takes too long is taken from its worker: what a driver does at one look at it."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Running

from mempo.config import Config
from mempo.workspace import Run, Workspace
from tasks import parts, shards
from tasks.shards import ShardFailed, Share

pytestmark = pytest.mark.usefixtures("prefect_server")
LIMITS = {"deployment": "shard/shard", "deadline_s": 30.0, "attempts": 2}


@flow(name="share-of-a-test")
def nothing() -> None:
    """Never run: a worker has it, as far as the server knows."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Workspace(tmp_path).run("mempo", Config.model_validate({"shards": LIMITS}), {})


def looked_at(run: Run, *, began_s_ago: float, failed: int = 0) -> tuple[Share, UUID]:
    now = time.monotonic()
    with get_client(sync_client=True) as client:
        given = client.create_flow_run(nothing, state=Running()).id
        share = Share(parts.split("rollout", run.config)[:1], given, failed=failed, asked=now, began=now - began_s_ago)
        shards._look_after(client, run, 0, share)
    return share, given


def state_of(flow_run: UUID) -> str:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
    assert state
    return f"{state.type.value}: {state.message}"


def test_inside_its_deadline_it_is_left_alone(run: Run) -> None:
    share, given = looked_at(run, began_s_ago=20)
    assert (share.run_id, share.failed, share.number) == (given, 0, 0)
    assert state_of(given) == "RUNNING: None"


def test_past_it_the_run_is_cancelled_and_the_share_is_for_another_worker(run: Run) -> None:
    share, given = looked_at(run, began_s_ago=31)
    assert (share.run_id, share.began, share.failed, share.number) == (None, None, 1, 1)
    assert state_of(given) == "CANCELLING: not done within shards.deadline_s: 30"


def test_the_last_attempt_is_told(run: Run) -> None:
    told = r"round 0, rollout, questions 0 to 8: failed 2 times, at last not done within shards\.deadline_s: 30"
    with pytest.raises(ShardFailed, match=f"^{told}$"):
        looked_at(run, began_s_ago=31, failed=1)
