"""What is asked of vLLM and read from its answers, in this process as over HTTP; vLLM itself is not imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mempo.engines import Generation, Sampling, decoding
from mempo.engines.decoding import Stops
from mempo.engines.scoring import check_targets
from mempo.engines.vllm_replies import Places
from mempo.packing import TokenTree

MAX_SEED = 2**63 - 1  # vLLM takes signed seeds of 64 bits


def sampling_fields(sampling: Sampling, *, seed: int, max_tokens: int, end_ids: frozenset[int]) -> dict[str, Any]:
    """Fields of vLLM's ``SamplingParams``, and of the body of ``/v1/completions``, for one turn.

    All that bends the distribution is written out: a server takes what is left out from the model's own folder. The log
    of the probability of the sampled token alone is asked for (``logprobs`` 0: no others beside it).
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed & MAX_SEED,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(end_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,  # or no stop text made of special tokens would be seen
        "spaces_between_special_tokens": False,
        "logprobs": 0,
    }


def scoring_fields() -> dict[str, Any]:
    """Fields for the log-probabilities of a prompt's own tokens. vLLM cannot do it without sampling a token."""
    return {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}


def room(prompt_ids: Sequence[int], sampling: Sampling, window: int) -> int:
    """``decoding.room``. Raises ``ValueError`` for a negative token id too."""
    left = decoding.room(prompt_ids, sampling, window)
    if min(prompt_ids) < 0:  # vLLM checks the other end alone, and its worker would die of it
        raise ValueError(f"{min(prompt_ids)} is no token id")
    return left


def generation(token_ids: Sequence[int], logprobs: Sequence[float], stops: Stops, *, max_tokens: int) -> Generation:
    """The answer up to the first token that ends the turn. Where that is, is decided here for every engine alike: vLLM
    reads a token that ends within a character only when the character is whole, and so stops a token late.

    Raises ``ValueError`` for an answer that is cut without a reason (an aborted request).
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(f"vLLM gave {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    for end in range(1, len(token_ids) + 1):
        reason = stops.reason(token_ids[:end])
        if reason is not None:
            return Generation(list(token_ids[:end]), list(logprobs[:end]), reason)
    if len(token_ids) != max_tokens:
        raise ValueError(f"vLLM gave {len(token_ids)} of {max_tokens} tokens, and nothing in them ends a turn")
    return Generation(list(token_ids), list(logprobs), "length")


def scored(
    trees: Sequence[TokenTree],
    ask: Callable[[list[list[int]]], Sequence[Places]],
    *,
    temperature: float,
    window: int,
) -> list[list[float]]:
    """``Engine.logprobs``, where ``ask`` gives ``Places`` for each of some prompts. Raises as ``score_paths`` does."""
    paths = score_paths(trees, temperature=temperature, window=window)
    return target_logprobs(trees, paths, ask([[trees[number].token_ids[i] for i in path] for number, path in paths]))


def score_paths(trees: Sequence[TokenTree], *, temperature: float, window: int) -> list[tuple[int, list[int]]]:
    """The prompts that score all targets: (tree, indices of the tokens from its root to a target) with no path inside
    another. Raises ``ValueError`` for a target at a root, a path over the window, and a ``temperature`` other than 1.
    """
    if temperature != 1:
        raise ValueError(
            f"vLLM scores prompts at temperature 1 alone, {temperature} is asked: take rollout.temperature 1, "
            "or runtime.engine hf"
        )
    check_targets(trees)
    paths = []
    for number, tree in enumerate(trees):
        covered: set[int] = set()
        for target in sorted(tree.targets, reverse=True):  # a token's ancestors stand before it
            if target not in covered:
                path = tree.path(target)
                if len(path) > window:
                    raise ValueError(f"tree {number}: deeper than the window of {window} tokens")
                covered.update(path)
                paths.append((number, path))
    return paths


def target_logprobs(
    trees: Sequence[TokenTree],
    paths: Sequence[tuple[int, list[int]]],
    prompt_logprobs: Sequence[Places],
) -> list[list[float]]:
    """Each tree's values in the order of its targets."""
    found: list[dict[int, float]] = [{} for _ in trees]
    for (number, path), places in zip(paths, prompt_logprobs, strict=True):
        tree, wanted = trees[number], set(trees[number].targets)
        for index, place in zip(path, places, strict=True):
            if index in wanted and place is not None:
                found[number][index] = place[tree.token_ids[index]]
    return [[values[target] for target in tree.targets] for tree, values in zip(trees, found, strict=True)]
