"""Does the advantage follow what a memory is truly worth (``quality.memory_quality``)? Where the facts are known."""

from __future__ import annotations

import pandas as pd

from mempo import stats

COLUMNS = ["round", "n", "quality", "reward", "advantage", "outcome", "complete", "incomplete"]


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """Mean quality of all memories, and its correlation (Pearson) with the normalised advantage of the scored ones."""
    known = _known(rows)
    return {
        "truth/quality": float(known["quality"].mean()),
        "truth/correlation": stats.correlation(known["mem_advantage"], known["quality"]),
    }


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a round: correlations of quality with raw reward, memory advantage, outcome advantage.

    ``complete`` and ``incomplete``: mean memory advantage of memories that hold all they should, and of the others.
    """
    found = []
    for index, known in _known(rows).groupby("round"):
        whole = known["quality"] == 1.0
        found.append(
            [index, len(known), known["quality"].mean()]
            + [stats.correlation(known[name], known["quality"])
               for name in ("mem_reward", "mem_advantage", "outcome_advantage")]
            + [known.loc[whole, "mem_advantage"].mean(), known.loc[~whole, "mem_advantage"].mean()]
        )  # fmt: skip
    return pd.DataFrame(found, columns=COLUMNS)


def _known(rows: pd.DataFrame) -> pd.DataFrame:
    """Memories whose quality is known; one that was not scored has no memory advantage (NaN), rather than 0."""
    known = rows[rows["quality"].notna()]
    return known.assign(mem_advantage=known["mem_advantage"].where(known["mem_reward"].notna()))
