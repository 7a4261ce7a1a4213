"""A share of a round's heavy work, as a worker of a Prefect work pool does it (``shards.deployment``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect import flow

from mempo import journal
from mempo.config import Config
from mempo.workspace import Run, Workspace
from tasks import parts
from tasks.diagnose import diagnose_round
from tasks.parts import MAKERS, Figures, Part, Phase, signed
from tasks.round import check_policy, train_policy

WHOLE: dict[Phase, Callable[[Run, int], Figures]] = {
    "update": lambda run, index: train_policy(run, index, run.policy(index)),
    "check": check_policy,
    "diagnose": diagnose_round,
}


@flow(name="shard", flow_run_name="{name} {round_index} {phase}", persist_result=False)
def shard(
    name: str, round_index: int, phase: Phase, ranges: list[tuple[int, int]], config: Config, root: str = "."
) -> None:
    """Questions ``ranges`` of a round of the run folder ``name`` under ``phase``; ``config`` is that of its driver."""
    workspace = Workspace(Path(root))
    run = Run(name.rpartition("-")[0], workspace.root / "runs" / name, config, workspace)
    stands_on = workspace.data, run.policy(0)
    run.share.fetch(*stands_on, run.config_file)
    run.share.agree(*stands_on)
    if phase != "check":
        run.share.fetch(run.policy(round_index))
    run.share.fetch_below(run.round(round_index))
    asked = [Part(phase, first, end) for first, end in ranges]
    with journal.kept(run.folder, run.name, f"shard {phase}", round=round_index):
        if phase in MAKERS:
            parts.make(run, round_index, run.policy(round_index), asked)
        else:
            for part in parts.missing(run, round_index, asked):
                with signed(part, run, round_index) as figures:
                    figures |= WHOLE[phase](run, round_index)
    # What says that a part is whole comes last.
    records = [part.records(run, round_index) for part in asked]
    run.share.send(*([run.round(round_index) / "controls.parquet"] if phase == "diagnose" else records))
    run.share.send(*(part.made(run, round_index) for part in asked))
