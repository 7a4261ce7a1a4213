"""Log-probabilities of the target tokens of token trees, in two layouts that must agree.

``packed``: every token of a tree once, attending to itself and its ancestors, its position its depth. The deepest path
is read first, as an ordinary causal row, for which no mask is made and half the products are; then its branches, rows
that attend to the path's keys (``packing.Layout``).
``padded``: every run of targets is written out alone with all its ancestors, as an ordinary left-padded row. It asks
nothing special of a model, costs the shared prefixes again for every run, and is the oracle of the packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mempo.engines.decoders import Cache
from mempo.packing import Layout, TokenTree

MAX_BATCH_TOKENS = 4096  # more is slower: the activations of a batch leave the processor's cache
MAX_LOGITS = 2**22


def packed_logprobs(model: Any, trees: Sequence[TokenTree], temperature: float) -> list[list[float]]:
    """Trunks of a batch of trees in one forward, branches in others; what a target follows meets the head."""
    results: list[list[float]] = [[] for _ in trees]
    layouts = {index: Layout.of(tree) for index, tree in enumerate(trees) if tree.targets}
    lengths = [len(layouts[index].trunk) if index in layouts else 0 for index in range(len(trees))]
    alike: dict[int, list[int]] = {}  # branches hold a trunk as wide as their batch's widest: none is twice another
    for index in layouts:
        alike.setdefault(lengths[index].bit_length(), []).append(index)
    for batch in chain.from_iterable(_batches(some, lengths, _few_tokens) for some in alike.values()):
        chosen = [trees[index] for index in batch]
        hidden, places = _hidden(model, chosen, [layouts[index] for index in batch])
        before = [places[row][tree.parents[target]] for row, tree in enumerate(chosen) for target in tree.targets]
        wanted = [tree.token_ids[target] for tree in chosen for target in tree.targets]
        values = head_logprobs(model.get_output_embeddings(), hidden[before], wanted, temperature)
        position = 0
        for index in batch:
            results[index] = values[position : position + len(trees[index].targets)]
            position += len(trees[index].targets)
    return results


def _hidden(model: Any, trees: Sequence[TokenTree], layouts: Sequence[Layout]) -> tuple[Tensor, list[np.ndarray]]:
    """Last hidden states [N, D] of all that is read of B trees, and for each tree which of them its tokens have."""
    width = max(len(one.trunk) for one in layouts)
    rows = [(owner, row) for owner, one in enumerate(layouts) for row in one.rows]
    places = [np.zeros(len(tree), dtype=np.int64) for tree in trees]
    token_ids = torch.zeros(len(trees), width, dtype=torch.long)
    for owner, one in enumerate(layouts):
        token_ids[owner, : len(one.trunk)] = torch.tensor([trees[owner].token_ids[index] for index in one.trunk])
        places[owner][one.trunk] = owner * width + np.arange(len(one.trunk))
    cache = Cache(width) if rows else None
    states = model.base_model(
        token_ids.to(model.device), past_key_values=cache, use_cache=cache is not None
    ).last_hidden_state.flatten(0, 1)
    parts = [states]
    if cache is not None:
        cache.length = width
        for some in _batches(list(range(len(rows))), [len(row) for _, row in rows], partial(_few_keys, width)):
            chosen = [rows[index] for index in some]
            start, more = sum(map(len, parts)), len(chosen[0][1])
            for line, (owner, row) in enumerate(chosen):
                places[owner][row] = start + line * more + np.arange(len(row))
            parts.append(_branches(model, trees, layouts, chosen, cache))
    return torch.cat(parts), places


def _branches(
    model: Any,
    trees: Sequence[TokenTree],
    layouts: Sequence[Layout],
    rows: Sequence[tuple[int, np.ndarray]],
    trunks: Cache,
) -> Tensor:
    """Hidden states [n R, D] of rows (tree, its tokens), the longest first, each after the trunk of its tree.

    What pads a trunk or a row stands on its right, and no line of the mask names it.
    """
    width, more = trunks.length, len(rows[0][1])
    token_ids, positions = (torch.zeros(len(rows), more, dtype=torch.long) for _ in range(2))
    visible = torch.zeros(len(rows), more, width + more, dtype=torch.bool)
    visible[:, range(more), range(width, width + more)] = True  # a token with nothing to see would be NaN
    for line, (owner, row) in enumerate(rows):
        token_ids[line, : len(row)] = torch.tensor([trees[owner].token_ids[index] for index in row])
        positions[line, : len(row)] = torch.from_numpy(layouts[owner].depths[row])
        visible[line, : len(row), : width + len(row)] = torch.from_numpy(layouts[owner].visible(row, width))
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=model.device)
    mask.masked_fill_(~visible.to(model.device), float("-inf"))
    owners = torch.tensor([owner for owner, _ in rows], device=model.device)
    states: Tensor = model.base_model(
        token_ids.to(model.device),
        attention_mask=mask[:, None],
        position_ids=positions.to(model.device),
        past_key_values=trunks.spread(owners, width + more),
        use_cache=True,
    ).last_hidden_state
    return states.flatten(0, 1)


def padded_logprobs(model: Any, trees: Sequence[TokenTree], temperature: float) -> list[list[float]]:
    """The same numbers, every run of targets alone in its row; ``positions = max(cumulative mask - 1, 0)``."""
    rows = [(index, run) for index, tree in enumerate(trees) for run in _target_runs(tree)]
    paths = [trees[index].path(run[-1]) for index, run in rows]
    found: list[dict[int, float]] = [{} for _ in trees]
    keep = max((len(run) for _, run in rows), default=0) + 1
    max_rows = max(1, MAX_LOGITS // (keep * model.config.get_text_config().vocab_size))
    lengths = [len(path) for path in paths]

    def fits(count: int, width: int) -> bool:
        return count <= max_rows and _few_tokens(count, width)

    for batch in _batches(list(range(len(rows))), lengths, fits):
        width = lengths[batch[0]]
        token_ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for place, row in enumerate(batch):
            ids = [trees[rows[row][0]].token_ids[index] for index in paths[row]]
            token_ids[place, width - len(ids) :] = torch.tensor(ids)
            mask[place, width - len(ids) :] = 1
        logits = model(
            input_ids=token_ids.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0).to(model.device),
            logits_to_keep=keep,
            use_cache=False,
        ).logits
        for place, row in enumerate(batch):
            index, run = rows[row]
            wanted = [trees[index].token_ids[target] for target in run]
            values = _gathered(logits[place, -len(run) - 1 : -1], wanted, temperature)
            found[index].update(zip(run, values, strict=True))
    return [[values[target] for target in tree.targets] for tree, values in zip(trees, found, strict=True)]


def check_targets(trees: Iterable[TokenTree]) -> None:
    """Raises ``ValueError`` for a target at a root: nothing comes before it, so it has no log-probability."""
    for number, tree in enumerate(trees):
        if any(tree.parents[target] < 0 for target in tree.targets):
            raise ValueError(f"tree {number}: a target at the root of a tree has no log-probability")


def head_logprobs(head: Any, hidden: Tensor, ids: Sequence[int], temperature: float) -> list[float]:
    """Log-softmax of ``head(hidden) / temperature`` at ``ids`` in float32, [N, D] -> N, by bounded pieces of logits."""
    size = max(1, MAX_LOGITS // head.out_features)
    values: list[float] = []
    for start in range(0, len(ids), size):
        values += _gathered(head(hidden[start : start + size]), ids[start : start + size], temperature)
    return values


def _gathered(logits: Tensor, ids: Sequence[int], temperature: float) -> list[float]:
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    logprobs = scaled.log_softmax(-1)  # as the sampler does: on a CPU faster than logsumexp
    return list(logprobs.gather(1, torch.tensor(ids, device=logprobs.device)[:, None])[:, 0].tolist())


def _target_runs(tree: TokenTree) -> Iterator[list[int]]:
    run: list[int] = []
    for target in tree.targets:
        if run and tree.parents[target] != run[-1]:
            yield run
            run = []
        run.append(target)
    if run:
        yield run


def _few_tokens(rows: int, width: int) -> bool:
    return rows * width <= MAX_BATCH_TOKENS


def _few_keys(trunk: int, rows: int, width: int) -> bool:
    """Rows of branches hold a copy of their trunk's keys."""
    return rows * (trunk + width) <= 2 * MAX_BATCH_TOKENS


def _batches(indices: list[int], lengths: Sequence[int], fits: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Indices by falling length, cut where the padded batch of ``(rows, width)`` would not fit; one row always does."""
    batch: list[int] = []
    for index in sorted(indices, key=lambda index: -lengths[index]):
        if batch and not fits(len(batch) + 1, lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
