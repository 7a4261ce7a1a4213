"""Which beginnings a batch of prompts shares: what is read once and then spread over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def shared_starts(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Beginnings of prompts, each to be read once, and for each prompt the number of its own: never a whole prompt.

    Neighbours in sorted order share most. A prompt that shares with nobody is cut so that its rest is as long as the
    longest of the others, for the rests are padded to that.
    """
    order = sorted(range(len(prompts)), key=lambda index: prompts[index])
    common = [_common(prompts[a][:-1], prompts[b][:-1]) for a, b in pairwise(order)]
    segments = _segments(common)
    shared = [min(common[start : end - 1], default=0) for start, end in segments]
    pairs = zip(segments, shared, strict=True)
    rests = [max(len(prompts[i]) for i in order[a:b]) - size for (a, b), size in pairs if b - a > 1]
    rest = max(rests, default=1)
    starts: list[list[int]] = []
    group_of = [0] * len(prompts)
    for number, ((start, end), size) in enumerate(zip(segments, shared, strict=True)):
        first = prompts[order[start]]
        starts.append(first[:size] if end - start > 1 else first[: max(0, len(first) - rest)])
        for index in order[start:end]:
            group_of[index] = number
    return starts, group_of


def _segments(common: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a row of neighbours, of which i and i + 1 share ``common[i]`` tokens, so that most tokens are read only once.

    A segment of n saves (n - 1) times what all of it share: the smallest ``common`` within.
    """
    saved, begins = [0], [0]
    for end in range(1, len(common) + 2):
        best, begin = saved[end - 1], end - 1
        smallest = None
        for start in range(end - 2, -1, -1):
            smallest = common[start] if smallest is None else min(smallest, common[start])
            if smallest == 0:
                break
            total = saved[start] + (end - start - 1) * smallest
            if total > best:
                best, begin = total, start
        saved.append(best)
        begins.append(begin)
    segments = []
    end = len(common) + 1
    while end:
        segments.append((begins[end], end))
        end = begins[end]
    return segments[::-1]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
