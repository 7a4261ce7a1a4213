"""Log-probabilities of the target tokens of token trees, in two layouts that must agree.

``packed``: every token of a tree once, attending to itself and its ancestors, its position its depth. The deepest path
is read first, as an ordinary causal row, for which no mask is made and half the products are; then all other tokens, as
one part of a row that attends to both. The tree of a history is nearly all path.
``padded``: every run of targets is written out alone with all its ancestors, as an ordinary left-padded row. It asks
nothing special of a model, costs the shared prefixes again for every run, and is the oracle of the packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """One or two forwards for each batch of trees; only the tokens before targets go through the vocabulary head."""
    results: list[list[float]] = [[] for _ in trees]
    layouts = [Layout.of(tree) for tree in trees]
    lengths = [len(tree) for tree in trees]
    # Alike ones together: a batch pads trunks and rests apart.
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, one in enumerate(layouts):
        if trees[index].targets:
            kinds.setdefault((bool(len(one.trunk)), bool(len(one.rest))), []).append(index)
    for batch in chain.from_iterable(_batches(kind, lengths, _few_tokens) for kind in kinds.values()):
        chosen = [trees[index] for index in batch]
        hidden, columns = _hidden(model, chosen, [layouts[index] for index in batch])
        rows = [row for row, tree in enumerate(chosen) for _ in tree.targets]
        before = [columns[row][tree.parents[target]] for row, tree in enumerate(chosen) for target in tree.targets]
        wanted = [tree.token_ids[target] for tree in chosen for target in tree.targets]
        values = head_logprobs(model.get_output_embeddings(), hidden[rows, before], wanted, temperature)
        position = 0
        for index in batch:
            results[index] = values[position : position + len(trees[index].targets)]
            position += len(trees[index].targets)
    return results


def _hidden(model: Any, trees: Sequence[TokenTree], layouts: Sequence[Layout]) -> tuple[Tensor, list[np.ndarray]]:
    """Last hidden states [B, W + R, D] of B trees, trunks padded to W and rests to R, and each token's column.

    What pads a trunk or a rest stands on its right: no trunk sees it, and no line of a rest's mask names it.
    """
    width, more = max(len(one.trunk) for one in layouts), max(len(one.rest) for one in layouts)
    columns = [one.columns(width) for one in layouts]
    token_ids = torch.zeros(len(trees), width + more, dtype=torch.long)
    for row, tree in enumerate(trees):
        token_ids[row, columns[row]] = torch.tensor(tree.token_ids)
    token_ids = token_ids.to(model.device)
    if not more:
        return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state, columns
    visible = torch.zeros(len(trees), more, width + more, dtype=torch.bool)
    visible[:, range(more), range(width, width + more)] = True  # a token with nothing to see would be NaN
    positions = torch.zeros(len(trees), more, dtype=torch.long)
    for row, one in enumerate(layouts):
        visible[row, : len(one.rest), : width + len(one.rest)] = torch.from_numpy(one.visible(width))
        positions[row, : len(one.rest)] = torch.from_numpy(one.depths[one.rest])
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=model.device)
    mask.masked_fill_(~visible.to(model.device), float("-inf"))
    parts, cache = [], Cache(width + more)
    if width:
        parts.append(model.base_model(token_ids[:, :width], past_key_values=cache, use_cache=True).last_hidden_state)
        cache.length = width
    parts.append(
        model.base_model(
            token_ids[:, width:],
            attention_mask=mask[:, None],
            position_ids=positions.to(model.device),
            past_key_values=cache if width else None,
            use_cache=bool(width),
        ).last_hidden_state
    )
    return torch.cat(parts, 1), columns


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
