"""Several rankings as one, by reciprocal rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mempo.search import Ranking

K = 60  # Cormack, Clarke, Büttcher: Reciprocal Rank Fusion, SIGIR 2009
DEPTH = 100  # so many places of each ranking count


class Fused:
    """A document's score is the sum of 1 / (60 + rank) over the rankings that hold it, ranks from 1."""

    def __init__(self, rankings: Sequence[Ranking]) -> None:
        self._rankings = rankings

    def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        each = [ranking.rank(queries, max(DEPTH, top_k)) for ranking in self._rankings]
        return [fused([found[i] for found in each])[:top_k] for i in range(len(queries))]


def fused(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """All places of ``rankings``, best first, equal scores in the order of the corpus.

    >>> fused([[(7, 3.0), (4, 1.0)], [(4, 0.9)]]) == [(4, 1 / 62 + 1 / 61), (7, 1 / 61)]
    True
    """
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, 1):
            scores[place] += 1 / (K + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
