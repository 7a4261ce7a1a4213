"""Token trees: many sequences that share prefixes, laid out in one row.

A token sees itself and its ancestors. With ``parents`` given, everything else follows: the position of a token is its
depth, the attention mask is ancestry, and the token before t in its own sequence is ``parents[t]``. The scoring pass
(docs/algorithm.md, "One scoring pass") puts a trajectory once into a tree and hangs one copy of the probe on each turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np


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

    def read(self) -> list[int]:
        """Indices of the tokens that a model has to read: each comes before some target."""
        wanted = {self.parents[target] for target in self.targets}
        for index in reversed(range(len(self))):
            if index in wanted:
                wanted.add(self.parents[index])
        return sorted(wanted - {-1})

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tree as a model reads it in two calls: ``trunk``, its deepest path, then ``rows`` of the branches off it.

    A row holds whole branches and is no longer than the trunk where it holds more than one: its tokens compare
    themselves with the trunk and with each other, and the second should not cost more than the first. Tokens after
    which no target stands are in neither.
    """

    trunk: np.ndarray
    rows: tuple[np.ndarray, ...]
    depths: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, tree: TokenTree) -> Layout:
        """Raises ``ValueError`` for a tree without targets: nothing of it is read."""
        read = tree.read()
        depths = np.asarray(tree.positions(), dtype=np.int64)
        trunk = tree.path(max(read, key=depths.__getitem__))
        on_trunk, branch = set(trunk), dict[int, int]()
        for index in read:
            if index not in on_trunk:
                branch[index] = branch.get(tree.parents[index], index)
        rows: list[list[int]] = []
        for _, tokens in groupby(sorted(branch, key=branch.__getitem__), key=branch.__getitem__):
            some = list(tokens)
            if not rows or len(rows[-1]) + len(some) > len(trunk):
                rows.append([])
            rows[-1] += some
        return cls(np.asarray(trunk), tuple(map(np.asarray, rows)), depths, np.asarray(tree.parents))

    def visible(self, row: np.ndarray, width: int) -> np.ndarray:
        """[R, width + R] bool for a row after a trunk padded to ``width``: true where the column is its token's own or
        an ancestor's."""
        parents, place = self.parents[row], {token: column for column, token in enumerate(row)}
        mask = np.zeros((len(row), width + len(row)), dtype=bool)
        starts = np.flatnonzero(parents != np.concatenate(([-2], row[:-1])))
        for start, end in pairwise([*starts, len(row)]):
            parent = parents[start]
            if parent in place:
                mask[start:end] = mask[place[parent]]
            elif parent >= 0:
                mask[start:end, : self.depths[parent] + 1] = True
            mask[start:end, width + start : width + end] = np.tri(end - start, dtype=bool)
        return mask


def chain(token_ids: Sequence[int], first_target: int) -> TokenTree:
    """An ordinary sequence as a tree whose targets are the tokens from ``first_target`` on."""
    tree = TokenTree()
    last = tree.add(token_ids[:first_target])
    tree.add(token_ids[first_target:], parent=last, target=True)
    return tree
