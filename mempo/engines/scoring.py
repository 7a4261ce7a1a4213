"""Log-probabilities of the target tokens of token trees, in two layouts that must agree.

``packed``: a tree is one row, each token attends to itself and its ancestors, its position is its depth.
``padded``: every run of targets is written out alone with all its ancestors, as an ordinary left-padded row. It asks
nothing special of a model, costs the shared prefixes again for every run, and is the oracle of the packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mempo.packing import TokenTree

MAX_BATCH_TOKENS = 4096  # more is slower: the activations of a batch leave the processor's cache
MAX_MASK_ENTRIES = 2**24
MAX_LOGITS = 2**22


def runs(tree: TokenTree) -> list[tuple[int, int, int]]:
    """Maximal chains of a tree as ``(start, end, parent)``: token ``start`` follows ``parent``, the rest each other."""
    parents = np.asarray(tree.parents, dtype=np.int64)
    starts = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    starts = np.union1d(starts, [0]) if len(parents) else starts
    ends = [*starts[1:].tolist(), len(parents)]
    return [(start, end, tree.parents[start]) for start, end in zip(starts.tolist(), ends, strict=False)]


def is_chain(tree: TokenTree) -> bool:
    return len(runs(tree)) <= 1


def ancestry(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """``mask`` [T, T] bool, true where the column is the row itself or an ancestor; ``positions`` [T], the depths."""
    length = len(tree)
    mask = np.zeros((length, length), dtype=bool)
    positions = np.zeros(length, dtype=np.int64)
    for start, end, parent in runs(tree):
        if parent >= 0:
            mask[start:end, :start] = mask[parent, :start]
        mask[start:end, start:end] = np.tri(end - start, dtype=bool)
        positions[start:end] = np.arange(end - start) + (positions[parent] + 1 if parent >= 0 else 0)
    return mask, positions


def tree_inputs(trees: Sequence[TokenTree], device: Any, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Model inputs for a batch of B trees, padded right to T: ids and positions [B, T], additive mask [B, 1, T, T].

    Plain chains need no mask: causal attention hides the padding on their right.
    """
    width = max(map(len, trees))
    token_ids = np.zeros((len(trees), width), dtype=np.int64)
    for row, tree in enumerate(trees):
        token_ids[row, : len(tree)] = tree.token_ids
    if all(map(is_chain, trees)):
        return {"input_ids": torch.from_numpy(token_ids).to(device), "position_ids": None, "attention_mask": None}
    # A padding token sees itself alone: a row with nothing to see would be NaN.
    visible = np.broadcast_to(np.eye(width, dtype=bool), (len(trees), width, width)).copy()
    positions = np.zeros((len(trees), width), dtype=np.int64)
    for row, tree in enumerate(trees):
        visible[row, : len(tree), : len(tree)], positions[row, : len(tree)] = ancestry(tree)
    allowed = torch.from_numpy(visible).to(device)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))
    return {
        "input_ids": torch.from_numpy(token_ids).to(device),
        "position_ids": torch.from_numpy(positions).to(device),
        "attention_mask": mask[:, None],
    }


def packed_logprobs(model: Any, trees: Sequence[TokenTree], temperature: float) -> list[list[float]]:
    """One forward for each batch of trees; only the tokens before targets go through the vocabulary head."""
    results: list[list[float]] = [[] for _ in trees]
    chains = [index for index, tree in enumerate(trees) if is_chain(tree)]
    others = [index for index, tree in enumerate(trees) if not is_chain(tree)]
    lengths = [len(tree) for tree in trees]
    batches = [*_batches(chains, lengths, _few_tokens), *_batches(others, lengths, _small_mask)]
    for batch in batches:
        chosen = [trees[index] for index in batch]
        inputs = tree_inputs(chosen, model.device, model.dtype)
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        rows = [row for row, tree in enumerate(chosen) for _ in tree.targets]
        before = [tree.parents[target] for tree in chosen for target in tree.targets]
        wanted = [tree.token_ids[target] for tree in chosen for target in tree.targets]
        values = head_logprobs(model.get_output_embeddings(), hidden[rows, before], wanted, temperature)
        position = 0
        for index in batch:
            results[index] = values[position : position + len(trees[index].targets)]
            position += len(trees[index].targets)
    return results


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
    logprobs = (logits.float() / temperature).log_softmax(-1)  # as the sampler does: on a CPU faster than logsumexp
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


def _small_mask(rows: int, width: int) -> bool:
    return rows * width <= MAX_BATCH_TOKENS and rows * width * width <= MAX_MASK_ENTRIES


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
