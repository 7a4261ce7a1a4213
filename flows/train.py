"""Train one policy: the paper's algorithm as one loop (``mempo train NAME``)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from mempo.overrides import Overrides
from tasks.data import open_run
from tasks.diagnose import diagnose
from tasks.record import log_round, publish, tracked
from tasks.round import advantage, check, rollout, score, update


@flow(name="train", flow_run_name="{name}", persist_result=False)
def train(
    name: str = "mempo", overrides: Overrides = None, root: str = ".", tags: dict[str, str] | None = None
) -> Path:
    """Rounds of rollout -> score -> advantage -> update (arXiv 2603.00680); returns the folder of the last policy."""
    run = open_run(name, overrides or [], Path(root))
    with run.alone(), tracked(run, tags or {}) as opened:
        policy = run.policy(0)
        for round_index in range(run.config.loop.num_rounds):
            rollout(run, round_index, policy)  # a group of trajectories for each question
            score(run, round_index, policy)  # log-probs of the answer with the memory, and with everything
            advantage(run, round_index)  # outcome on all tokens + memory on <mem> tokens
            diagnose(run, round_index)  # every few rounds: known good and bad memories, gradients of both signals
            policy = update(run, round_index, policy)
            check(run, round_index)  # greedy exact match on dev questions, every few rounds
            log_round(run, opened, round_index)  # distributions of mem_reward to MLflow
        publish(run)
    return policy
