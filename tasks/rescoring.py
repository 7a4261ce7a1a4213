"""Stored trajectories scored anew, each round with the policy that sampled it (``mempo rescore --score``)."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from mempo import storage
from mempo.config import Config, digest
from mempo.console import progress
from mempo.rounds import read_round
from mempo.workspace import Run
from tasks import engines
from tasks.parts import scored
from tasks.round import remake


def score_again(run: Run, asked: Config) -> Path:
    """The folder with ``round_<index>.parquet``, the scores of every finished round under ``asked``.

    A round that is there is not scored again. Policies that were pruned are made again, and leave once the rounds that
    need them are done. Raises ``ValueError`` where the warm start is no longer the one that the run began with.
    """
    started = storage.read_json(run.config_file)["inputs"]["warmstart"]
    if storage.content_hash(run.policy(0)) != started:
        raise ValueError(f"{run.policy(0)}: not the policy that {run.folder} started from")
    made_by = [asked.scoring.model_dump(mode="json"), asked.uses_memory_reward, asked.loss.model_dump(mode="json")]
    folder = run.folder / f"rescored-{digest(made_by)}"
    rounds = sorted(path.parent for path in run.folder.glob("round_*/advantage.json"))
    kept = set(run.folder.glob("policy_*"))
    with run.alone(), progress(f"{run.name} score", len(rounds)) as advance:
        for done, source in enumerate(rounds, start=1):
            target = folder / f"{source.name}.parquet"
            if not target.exists():
                policy = remake(run, int(source.name.removeprefix("round_")))
                made = read_round(source)
                storage.write_records(target, scored(run, policy, made.trajectories, made.questions, asked))
                engines.sleep()
                _drop(set(run.folder.glob("policy_*")) - kept - {policy})  # the next one is made from this one
            advance(done)
        _drop(set(run.folder.glob("policy_*")) - kept)
    return folder


def _drop(policies: Iterable[Path]) -> None:
    for policy in policies:
        shutil.rmtree(policy)
