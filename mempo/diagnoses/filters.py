"""What the filter of unsure answer tokens does to the reward: the same log-probabilities under all three masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pandas as pd

from mempo import stats
from mempo.config import Config
from mempo.mem_reward import Mask
from mempo.probe_rewards import memory_rewards
from mempo.records import TurnScore

MASKS: tuple[Mask, ...] = get_args(Mask)
KEYS = {"question_id": str, "sample_index": int, "turn": int}


def audit(scores: Sequence[TurnScore], config: Config) -> pd.DataFrame:
    """One row a probe: p_mem - p_full under each mask (NaN: no reward) and how many tokens each side then kept.

    All other options are the run's, but the reward is always the difference: of another kind the sign says little.
    """
    asked = [score for score in scores if score.reason is None]
    columns: dict[str, list[object]] = {name: [getattr(score, name) for score in asked] for name in KEYS}
    for mask in MASKS:
        options = config.mem_reward.model_copy(update={"mask": mask, "kind": "difference"})
        (probes,), _ = memory_rewards([asked], options, aliases=config.scoring.aliases)
        values = [probe for probe in probes if probe is not None]
        columns[f"reward_{mask}"] = [
            v.p_mem - v.p_full if v.p_mem is not None and v.p_full is not None else None for v in values
        ]
        columns[f"full_{mask}"] = [value.kept_full for value in values]
        columns[f"mem_{mask}"] = [value.kept_mem for value in values]
    return pd.DataFrame(columns).astype(KEYS | {f"reward_{mask}": float for mask in MASKS})


def flips(first: pd.Series[float], second: pd.Series[float]) -> float:
    """Share of the pairs that have both rewards whose signs are opposite; NaN without a pair."""
    signs = (first * second).dropna()
    return float((signs < 0).mean())


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """How often each side filtering by itself turns the sign round, and how often it keeps nothing of a side."""
    alone = rows["reward_independent"]
    return {
        "filter/flips_shared": flips(alone, rows["reward_shared"]),
        "filter/flips_none": flips(alone, rows["reward_none"]),
        "filter/nothing_full": float((rows["full_independent"] == 0).mean()),
        "filter/nothing_mem": float((rows["mem_independent"] == 0).mean()),
    }


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a mask; ``rows`` are audits with the memories' true ``quality``."""
    return pd.DataFrame(
        [
            {
                "mask": mask,
                "n": int(rows[f"reward_{mask}"].notna().sum()),
                "reward": rows[f"reward_{mask}"].mean(),
                "positive": (rows[f"reward_{mask}"] > 0).mean(),
                "flips_shared": flips(rows[f"reward_{mask}"], rows["reward_shared"]),
                "flips_none": flips(rows[f"reward_{mask}"], rows["reward_none"]),
                "nothing_full": (rows[f"full_{mask}"] == 0).mean(),
                "nothing_mem": (rows[f"mem_{mask}"] == 0).mean(),
                "correlation": stats.correlation(rows[f"reward_{mask}"], rows["quality"]),
            }
            for mask in (MASKS if len(rows) else ())
        ]
    )
