"""Answers of a server are hostile until they are parsed: what is damaged is refused, with what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mempo.engines import vllm_replies as replies

# As vLLM 0.32 answers, fields that are not read left out.
SAMPLED: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [7, 3],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 3, "logprob": -1.25}]},
            "weight_versions": [{"version": "w", "start": 0, "end": 2}],
        }
    ],
    "prompt_logprobs": None,
}


def changed(**choice: Any) -> bytes:
    return json.dumps(SAMPLED | {"choices": [SAMPLED["choices"][0] | choice]}).encode()


def with_logprob(value: Any) -> bytes:
    return changed(token_ids=[7], logprobs={"content": [{"token_id": 7, "logprob": value}]})


def scored(places: Any) -> bytes:
    return json.dumps(SAMPLED | {"prompt_logprobs": places}).encode()


def test_tokens_and_logprobs_come_out_as_they_were_sampled() -> None:
    assert replies.sampled(changed(), "w", 8) == ([7, 3], [-0.5, -1.25])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>502 Bad Gateway</html>", "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b"[" * 10_000, "Invalid JSON"),
        (b"{}", "choices: Field required"),
        (json.dumps({"choices": []}).encode(), "choices: List should have at least 1 item"),
        (json.dumps({"choices": SAMPLED["choices"] * 2}).encode(), "choices: List should have at most 1 item"),
        (changed(token_ids=[7]), "1 tokens with the log-probabilities of 2 others"),
        (changed(token_ids=[7, 4]), "2 tokens with the log-probabilities of 2 others"),
        (changed(logprobs=None), "2 tokens with the log-probabilities of 0 others"),
        (changed(token_ids=[], logprobs={"content": []}), "0 tokens"),
        (changed(token_ids=[-1, 3]), "greater than or equal to 0"),
        (changed(token_ids=["7", None]), "token_ids"),
        (with_logprob(float("nan")), "finite number"),
        (with_logprob(float("-inf")), "finite number"),
        (with_logprob(replies.UNKNOWN), "greater than"),
        (with_logprob(0.5), "less than or equal to"),
        (with_logprob(None), "valid number"),
        (changed(weight_versions=None), "weight_versions"),
        (changed(weight_versions=[]), "weight_versions"),
    ],
)
def test_a_damaged_answer_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replies.sampled(content, "w", 8)


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 7 of a vocabulary of 7"):
        replies.sampled(changed(), "w", 7)


def test_the_answer_of_other_weights_or_of_a_server_that_broke_off_is_asked_again() -> None:
    spans = [{"version": "w", "start": 0, "end": 1}, {"version": "v", "start": 1, "end": 2}]
    for content in (changed(weight_versions=spans), changed(finish_reason="abort")):
        with pytest.raises(replies.Unfinished):
            replies.sampled(content, "w", 8)
    with pytest.raises(replies.Unfinished, match="other weights"):
        replies.sampled(changed(), "default", 8)


def test_scores_are_those_of_the_prompts_own_tokens() -> None:
    places = [None, {"5": {"logprob": -0.25}, "9": {"logprob": -3.0}}, {"5": {"logprob": -2.0}}]
    assert replies.scored(scored(places), "w", [4, 5, 5]) == [None, {5: -0.25}, {5: -2.0}]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (None, "at 0 places of a prompt of 2"),
        ([None], "at 1 places of a prompt of 2"),
        ([None, None], "no log-probability of the prompt's token 5"),
        ([None, {"6": {"logprob": -1.0}}], "no log-probability of the prompt's token 5"),
        ([None, {"5": {"logprob": float("nan")}}], "finite number"),
        ([None, {"five": {"logprob": -1.0}}], "valid integer"),
    ],
)
def test_damaged_scores_are_refused(places: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replies.scored(scored(places), "w", [4, 5])


def test_messages_of_errors_are_short_and_of_one_line() -> None:
    assert replies.error_message(b'{"error": {"message": "two\\nlines", "code": 400}}') == "two lines"
    assert replies.error_message(b"<h1>\xff" + b"x" * 10_000).startswith("<h1>\ufffdxxx")
    assert len(replies.error_message(b"x" * 10_000)) == replies.MAX_MESSAGE
    assert replies.error_message(b'{"error": "text"}') == '{"error": "text"}'


def test_weight_version_and_cache() -> None:
    assert replies.weight_version(b'{"weight_version": "3-a"}') == "3-a"
    assert replies.cache_was_reset(b'{"success": true}') and not replies.cache_was_reset(b'{"success": false}')
    with pytest.raises(ValueError, match="weight_version: Field required"):
        replies.weight_version(b"{}")
