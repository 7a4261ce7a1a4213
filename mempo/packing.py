"""Token trees: many sequences that share prefixes, laid out in one row.

A token sees itself and its ancestors. With ``parents`` given, everything else follows: the position of a token is its
depth, the attention mask is ancestry, and the token before t in its own sequence is ``parents[t]``. The scoring pass
(docs/algorithm.md, "One scoring pass") puts a trajectory once into a tree and hangs one copy of the probe on each turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

PAYS = 0.6  # a path of a smaller share of the tokens saves less than a second call of the model costs


@dataclass(slots=True)
class TokenTree:
    """A growing row of T tokens.

    >>> tree = TokenTree()
    >>> question = tree.add([5, 6])                      # tokens 0, 1
    >>> tree.add([7, 8], parent=question, target=True)   # tokens 2, 3 follow token 1
    3
    >>> tree.add([9], parent=question, target=True)      # token 4 follows token 1 too, and does not see 2, 3
    4
    >>> tree.parents, tree.positions(), tree.targets
    ([-1, 0, 1, 2, 1], [0, 1, 2, 3, 2], [2, 3, 4])
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], *, parent: int = -1, target: bool = False) -> int:
        """Append a run of tokens after token ``parent`` (-1: at the root); returns the index of its last token.

        ``target`` tokens are those whose log-probability the tree is scored for.
        """
        for token_id in token_ids:
            index = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(parent)
            if target:
                self.targets.append(index)
            parent = index
        return parent

    def positions(self) -> list[int]:
        """Depth of each token [T]: the position id of the rotary embedding."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def path(self, index: int) -> list[int]:
        """Indices from the root to ``index``: the sequence this token ends, were it written out alone."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.parents[index]
        return path[::-1]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tree in two parts: ``trunk``, its deepest path where that ``PAYS``, and ``rest``, all others in their order."""

    trunk: np.ndarray
    rest: np.ndarray
    depths: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, tree: TokenTree) -> Layout:
        depths = np.asarray(tree.positions(), dtype=np.int64)
        path = tree.path(int(depths.argmax())) if len(tree) else []
        trunk = np.asarray(path if len(path) > PAYS * len(tree) else [], dtype=np.int64)
        rest = np.setdiff1d(np.arange(len(tree)), trunk, assume_unique=True)
        return cls(trunk, rest, depths, np.asarray(tree.parents, dtype=np.int64))

    def columns(self, width: int) -> np.ndarray:
        """Where each token lies [T], once the trunk is padded to ``width`` and the rest follows."""
        found = np.empty(len(self.depths), dtype=np.int64)
        found[self.trunk] = np.arange(len(self.trunk))
        found[self.rest] = width + np.arange(len(self.rest))
        return found

    def visible(self, width: int) -> np.ndarray:
        """[R, width + R] bool for the R tokens of ``rest``: true where the column is the row itself or an ancestor."""
        columns, rest = self.columns(width), self.rest
        mask = np.zeros((len(rest), width + len(rest)), dtype=bool)
        starts = np.flatnonzero(self.parents[rest] != np.concatenate(([-2], rest[:-1])))
        for start, end in pairwise([*starts, len(rest)]):
            parent = self.parents[rest[start]]
            if parent >= 0 and columns[parent] < width:
                mask[start:end, : self.depths[parent] + 1] = True
            elif parent >= 0:
                mask[start:end] = mask[columns[parent] - width]
            mask[start:end, width + start : width + end] = np.tri(end - start, dtype=bool)
        return mask


def chain(token_ids: Sequence[int], first_target: int) -> TokenTree:
    """An ordinary sequence as a tree whose targets are the tokens from ``first_target`` on."""
    tree = TokenTree()
    last = tree.add(token_ids[:first_target])
    tree.add(token_ids[first_target:], parent=last, target=True)
    return tree
