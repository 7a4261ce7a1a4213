"""Five kills of five kinds on one training; `make crash-test` has all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from mempo import services
from tests.crash.experiment import Experiment, Training
from tests.crash.kinds import one_line

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    made = Experiment(tmp_path_factory.mktemp("crash") / "home")
    made.prepare()
    yield made
    made.close()


def test_a_training_that_is_broken_off_five_times_is_the_undisturbed_one(experiment: Experiment) -> None:
    training = Training(experiment, "five")

    # The driver alone, between the last byte and the name of its new policy.
    assert training.run(CRASH_DO="kill", CRASH_AT=r"rename .*/\.policy_0001\.tmp") == -signal.SIGKILL
    assert training.so_far() == []

    # A disk that fills up in mid-round: one line with the path, and on it goes once there is room.
    assert training.run(CRASH_DO="full", CRASH_AT=r"flush .*/\.update\.json\.tmp") == 1
    assert one_line(training, "No space left on device") == [] and training.so_far() == []

    # All of the process group, as a batch system ends a job.
    with training.started() as process:
        assert training.reaches("round_0001/rollouts.parquet", process)
        os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode != 0 and training.so_far() == []

    # The Prefect server, under a training that goes on or is asked for again.
    with training.started() as process:
        assert training.reaches("round_0001/update.json", process)
        psutil.Process(services.alive(experiment.state)["prefect"].pid).kill()
    assert process.returncode in (0, 1) and training.so_far() == []

    # The driver, while it puts its results in the place of nothing.
    assert training.run(CRASH_DO="kill", CRASH_AT="rename results/") == -signal.SIGKILL

    assert training.run() == 0
    assert training.at_the_end() == []
