"""What is asked of vLLM and read from its answers, without vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mempo.engines import Sampling
from mempo.engines.decoding import make_stops
from mempo.engines.vllm_requests import (
    MAX_SEED,
    generation,
    room,
    sampling_fields,
    score_paths,
    target_logprobs,
)
from mempo.packing import TokenTree, chain
from mempo.prompts import encode_frame
from tests.tiny import make_tokenizer


def branching() -> TokenTree:
    """5 6 then either 7 8 (targets), 8 followed by 1 (target), or 9 (no target)."""
    tree = TokenTree()
    question = tree.add([5, 6])
    answer = tree.add([7, 8], parent=question, target=True)
    tree.add([1], parent=answer, target=True)
    tree.add([9], parent=question)
    return tree


def test_a_path_within_another_is_not_asked_twice() -> None:
    assert score_paths([branching()], temperature=1, window=5) == [(0, [0, 1, 2, 3, 4])]
    two = branching()
    two.add([3], parent=1, target=True)
    assert score_paths([TokenTree(), two], temperature=1, window=5) == [(1, [0, 1, 6]), (1, [0, 1, 2, 3, 4])]


def test_values_return_to_their_targets() -> None:
    tree = branching()
    tree.add([3], parent=1, target=True)
    trees = [tree, TokenTree()]
    paths = score_paths(trees, temperature=1, window=5)
    answers = [
        [None, {6: -9.0}, {3: -0.5}],
        [None, {6: -9.0}, {7: -1.0, 2: -3.0}, {8: -2.0}, {1: -4.0}],  # vLLM may add the most probable token
    ]
    assert target_logprobs(trees, paths, answers) == [[-1.0, -2.0, -4.0, -0.5], []]


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.6 is asked: take rollout\.temperature 1, or runtime\.engine hf"):
        score_paths([], temperature=0.6, window=5)
    with pytest.raises(ValueError, match="tree 1: deeper than the window of 4 tokens"):
        score_paths([chain([1, 2], 1), branching()], temperature=1, window=4)
    with pytest.raises(ValueError, match="tree 0: a target at the root"):
        score_paths([chain([1, 2], 0)], temperature=1, window=4)


def test_room() -> None:
    sampling = Sampling(1.0, 8)
    assert [room([1] * length, sampling, 16) for length in (1, 8, 9, 15)] == [8, 8, 7, 1]
    for prompt in ([], [1] * 16):
        with pytest.raises(ValueError, match=f"a prompt of {len(prompt)} tokens leaves no room in a window of 16"):
            room(prompt, sampling, 16)
    with pytest.raises(ValueError, match="-1 is no token id"):
        room([3, -1], sampling, 16)


def test_the_distribution_is_written_out() -> None:
    fields = sampling_fields(
        Sampling(0.6, 8, top_p=0.9, top_k=3), seed=2**64 - 1, max_tokens=5, end_ids=frozenset({9, 2})
    )
    assert (fields["temperature"], fields["top_p"], fields["top_k"], fields["min_p"]) == (0.6, 0.9, 3, 0.0)
    assert (fields["seed"], fields["max_tokens"]) == (MAX_SEED, 5)
    assert fields["stop_token_ids"] == [2, 9]
    assert fields["stop"] == ["</search>", "</answer>"]


@pytest.fixture(scope="module")
def plain() -> Any:
    return make_tokenizer(tags=False)


def ended(tokenizer: Any, ids: list[int], max_tokens: int = 99) -> tuple[list[int], list[float], str]:
    stops = make_stops(tokenizer, frozenset({tokenizer.eos_token_id}), ("</answer>",))
    made = generation(ids, [-float(index) for index in range(len(ids))], stops, max_tokens=max_tokens)
    return made.token_ids, made.logprobs, made.finish_reason


def test_what_ends_a_turn(plain: Any) -> None:
    answer = encode_frame(plain, "Ulm</answer>")
    assert ended(plain, answer) == (answer, [-float(index) for index in range(len(answer))], "stop")
    assert ended(plain, [*answer, 30, 31])[0] == answer  # tokens that came after the stop go
    word = encode_frame(plain, "Ulm")
    assert ended(plain, [*word, plain.eos_token_id])[::2] == ([*word, plain.eos_token_id], "eos")
    assert ended(plain, word, max_tokens=len(word))[2] == "length"


def test_an_answer_cut_without_a_reason_is_refused(plain: Any) -> None:
    word = encode_frame(plain, "Ulm")
    with pytest.raises(ValueError, match=f"{len(word)} of 99 tokens, and nothing in them ends a turn"):
        ended(plain, word)
    with pytest.raises(ValueError, match="2 tokens with 1 log-probabilities"):
        generation([1, 2], [-1.0], make_stops(plain, frozenset(), ("</answer>",)), max_tokens=2)


def test_it_needs_no_vllm() -> None:
    code = "import sys, mempo.engines.vllm_requests, mempo.engines.vllm; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
