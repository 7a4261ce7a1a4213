"""How good a memory truly is, where the data knows the facts: what share of what it should hold does it hold?"""

from __future__ import annotations

import re
from collections.abc import Sequence

Chain = Sequence[tuple[str, str]]  # the facts behind one objective: (entity, value) for each hop


def memory_quality(memory: str, chains: Sequence[Chain], observations: Sequence[str]) -> float | None:
    """Share of the objectives' latest known values that stand in ``memory``; None while nothing is known.

    A value is known once an observation held both it and its entity; an objective needs the value of its furthest hop
    that is known along with all hops before it.

    >>> lyon = [("Lyon", "France"), ("France", "Euro")]
    >>> norway = [("Norway", "Oslo")]
    >>> memory_quality("country France", [lyon, norway], ["Lyon: country France."])
    1.0
    >>> memory_quality("country France", [lyon, norway], ["Lyon: country France.", "Norway: capital Oslo."])
    0.5
    """
    needed = [chain[hops - 1][1] for chain in chains if (hops := known_hops(chain, observations))]
    if not needed:
        return None
    return sum(_holds(memory, value) for value in needed) / len(needed)


def known_hops(chain: Chain, observations: Sequence[str]) -> int:
    """How many hops from the first on are known."""
    for hops, (entity, value) in enumerate(chain):
        if not any(_holds(text, entity) and _holds(text, value) for text in observations):
            return hops
    return len(chain)


def _holds(text: str, name: str) -> bool:
    """Whether ``name`` stands in ``text`` as whole words."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
