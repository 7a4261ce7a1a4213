"""What the memory reward of a round does, read from its records alone: no model runs here.

``bias`` by turn, ``filters`` against each other, ``truth`` where the facts are known, ``strategies`` that a policy may
fall into, ``balance`` of the two advantages on ``<mem>`` tokens, ``variance`` by question, trajectory and turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mempo.config import Config
from mempo.diagnoses import balance, bias, filters, strategies, truth, variance
from mempo.quality import Chain
from mempo.rescore import qualities
from mempo.rounds import RoundRecords, reward_frame

Facts = Mapping[str, list[Chain]]
KEYS = ["question_id", "sample_index", "turn"]


def figures(records: RoundRecords, config: Config, facts: Facts) -> dict[str, float]:
    """The diagnoses of one round as flat figures ``diagnose/...``; what cannot be measured in it is left out."""
    rows, audit = turn_rows([records], config, facts), filters.audit(records.scores, config)
    found = (
        bias.figures(rows)
        | filters.figures(audit)
        | truth.figures(rows)
        | strategies.figures(strategies.turns([records], facts))
        | balance.figures(rows, config.advantage.gate)
        | variance.figures(rows)
    )
    return {f"diagnose/{name}": value for name, value in found.items() if math.isfinite(value)}


def tables(rounds: Sequence[RoundRecords], config: Config, facts: Facts) -> dict[str, pd.DataFrame]:
    """The diagnoses over all of ``rounds`` together, a table each; one that has nothing to show is left out."""
    rows = turn_rows(rounds, config, facts)
    # A quantile threshold is a round's own, so each round is audited by itself.
    audits = [
        filters.audit(records.scores, config).merge(qualities(records.trajectories, facts), on=KEYS, how="left")
        for records in rounds
    ]
    found = {
        "bias": bias.table(rows),
        "filters": filters.table(pd.concat(audits, ignore_index=True)),
        "truth": truth.table(rows),
        "strategies": strategies.table(strategies.turns(rounds, facts)),
        "balance": balance.table(rows),
        "quadrants": balance.quadrants(rows),
        "variance": variance.table(rows),
    }
    return {name: table for name, table in found.items() if len(table)}


def summary(rounds: Sequence[RoundRecords], config: Config, facts: Facts) -> dict[str, Any]:
    """``tables`` for a JSON file."""
    found = tables(rounds, config, facts)
    return {"rounds": len(rounds), "tables": {name: plain(table) for name, table in found.items()}}


def plain(table: pd.DataFrame) -> dict[str, list[Any]]:
    """``table`` for a JSON file, columns in their order; what could not be measured is null."""
    rows = table.astype(object).where(table.notna(), None).to_numpy().tolist()
    return {"columns": table.columns.tolist(), "rows": rows}


def turn_rows(rounds: Sequence[RoundRecords], config: Config, facts: Facts) -> pd.DataFrame:
    """``TurnReward`` rows of all rounds with ``round``, true ``quality`` (NaN: unknown) and ``mem_weight``."""
    found = []
    for records in rounds:
        # A round's rollouts are made by the policy of as many updates as there were rounds before it.
        index = records.trajectories[0].policy_version if records.trajectories else 0
        rows = reward_frame(records.table).merge(qualities(records.trajectories, facts), on=KEYS, how="left")
        found.append(rows.assign(round=index, mem_weight=config.advantage.weight_at(index)))
    return pd.concat(found, ignore_index=True)
