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
    needed = [value for chain in chains if (value := _furthest(chain, observations)) is not None]
    if not needed:
        return None
    return sum(_holds(memory, value) for value in needed) / len(needed)


def _furthest(chain: Chain, observations: Sequence[str]) -> str | None:
    known = None
    for entity, value in chain:
        if not any(_holds(text, entity) and _holds(text, value) for text in observations):
            break
        known = value
    return known


def _holds(text: str, name: str) -> bool:
    """Whether ``name`` stands in ``text`` as whole words."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
