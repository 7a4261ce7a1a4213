"""What the tables of the diagnoses are called and how each is read, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caption:
    title: str
    reading: str
    digits: int = 3


CAPTIONS = {
    "bias": Caption(
        "By turn",
        "Means over the scored memories of a turn: where the normalised reward (advantage) moves with the turn while "
        "the true quality does not, writing at that turn is paid by itself.",
    ),
    "filters": Caption(
        "Filters of unsure answer tokens",
        "p_mem − p_full from the same log-probabilities under each filter: flips are shares of memories whose reward "
        "has the opposite sign under the other filter, nothing kept is a probe of which no token was left.",
    ),
    "truth": Caption(
        "Against the true quality of the memory",
        "Correlations with the share of the known facts that the memory holds: near 0, a signal pays no attention to "
        "it; the last two columns are mean memory advantages of memories that hold all they should, and of the others.",
    ),
    "strategies": Caption(
        "Strategies",
        "Shares by turn: copied is the memory before it word for word, unseen is the share of a memory's words that "
        "nothing shown so far holds, distinct pairs tells how differently a question's memories are worded, from "
        "memory are searches for what only the memory held, early are answers before all facts were seen.",
    ),
    "balance": Caption(
        "Two advantages on memory tokens",
        "Standard deviation of each part over the scored memories and their correlation: the larger part decides what "
        "memory tokens learn.",
    ),
    "quadrants": Caption(
        "Right or wrong answer, memory above or below its pool",
        "Mean advantages, and for each gate the share of memories whose tokens are pushed up in sum: right below and "
        "wrong above are where the two signals disagree.",
    ),
    "variance": Caption(
        "Variance of the probabilities",
        "Each row adds up: the question's part is gone in a pool of the question whatever is subtracted, and in the "
        "rest p_full as a baseline helps only where 2 cov is larger than the variance of p_full.",
        digits=4,
    ),
}
HEADINGS = {
    "n": "memories", "mem_tokens": "tokens", "mem_reward": "reward", "mem_advantage": "advantage", "mask": "filter",
    "positive": "above 0", "flips_shared": "flips against shared", "flips_none": "flips against none",
    "nothing_full": "nothing kept, full", "nothing_mem": "nothing kept, memory",
    "distinct_2": "distinct pairs", "memory_only": "from memory", "outcome_std": "outcome", "memory_std": "memory",
    "cov2": "2 cov", "of": "", "p_mem": "p_mem", "p_full": "p_full",
}  # fmt: skip


def label(name: str) -> str:
    """A column or a row label as people read it."""
    return HEADINGS.get(name, name.replace("_", " "))
