"""What a vLLM server answers, checked before anything of it is used. Pure: bytes in, values out.

The server's ``/inference/v1/generate`` takes and gives token ids, and says of every answer which weights made it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

UNKNOWN = -9999.0  # what vLLM writes for a log-probability that is -inf or no number
MAX_MESSAGE = 300

Logprob = Annotated[FiniteFloat, Field(gt=UNKNOWN, le=1e-3)]  # above 0 by rounding alone
TokenId = Annotated[int, Field(ge=0)]


class _Token(BaseModel):
    token_id: TokenId
    logprob: Logprob


class _Tokens(BaseModel):
    content: list[_Token]


class _Weights(BaseModel):
    version: str


class _Choice(BaseModel):
    token_ids: list[TokenId]
    logprobs: _Tokens | None = None
    finish_reason: str
    weight_versions: Annotated[list[_Weights], Field(min_length=1)]


class _Place(BaseModel):
    logprob: Logprob


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    prompt_logprobs: list[dict[int, _Place] | None] | None = None


class _WeightInfo(BaseModel):
    weight_version: str


class _CacheReset(BaseModel):
    success: bool


class Unfinished(RuntimeError):
    """The server broke off, or answered with other weights than it was given: the same question may be asked again."""


class ServerError(Unfinished):
    """The server says that it failed (5xx)."""


Model = TypeVar("Model", bound=BaseModel)
Places = list[dict[int, float] | None]  # at each place of a prompt {token id: log-probability}; None at the first


def sampled(content: bytes, weights: str, vocabulary: int) -> tuple[list[int], list[float]]:
    """Sampled tokens and their log-probabilities, by the weights named ``weights``.

    Raises ``ValueError`` for an answer that is damaged or holds ids outside of ``vocabulary``, ``Unfinished``.
    """
    (choice,) = _answer(content, weights).choices
    tokens = choice.logprobs.content if choice.logprobs else []
    if [token.token_id for token in tokens] != choice.token_ids or not tokens:
        raise ValueError(f"{len(choice.token_ids)} tokens with the log-probabilities of {len(tokens)} others")
    if (largest := max(choice.token_ids)) >= vocabulary:
        raise ValueError(f"token {largest} of a vocabulary of {vocabulary}")
    return choice.token_ids, [token.logprob for token in tokens]


def scored(content: bytes, weights: str, prompt_ids: Sequence[int]) -> Places:
    """At each place of the prompt the log-probability of its own token, ``{token id: value}``; None at the first.

    Raises ``ValueError`` for an answer that is damaged or of another prompt, ``Unfinished``.
    """
    places = _answer(content, weights).prompt_logprobs or []
    if len(places) != len(prompt_ids):
        raise ValueError(f"log-probabilities at {len(places)} places of a prompt of {len(prompt_ids)} tokens")
    values: Places = [None]
    for token_id, place in zip(prompt_ids[1:], places[1:], strict=True):
        if place is None or token_id not in place:
            raise ValueError(f"no log-probability of the prompt's token {token_id}")
        values.append({token_id: place[token_id].logprob})
    return values


def weight_version(content: bytes) -> str:
    """The name of the weights that a server holds. Raises ``ValueError``."""
    return _parsed(_WeightInfo, content).weight_version


def cache_was_reset(content: bytes) -> bool:
    """Whether the prefix cache is empty; it is not while a request holds a part of it. Raises ``ValueError``."""
    return _parsed(_CacheReset, content).success


def error_message(content: bytes) -> str:
    """The message of an error of vLLM's, or the beginning of whatever else came."""
    text = content[: 10 * MAX_MESSAGE].decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(content)["error"]["message"])
    return " ".join(text.split())[:MAX_MESSAGE]


def _answer(content: bytes, weights: str) -> _Answer:
    answer = _parsed(_Answer, content)
    (choice,) = answer.choices
    if choice.finish_reason not in ("stop", "length"):
        raise Unfinished(f"the answer ended by {choice.finish_reason[:MAX_MESSAGE]!r}")
    if {span.version for span in choice.weight_versions} != {weights}:
        raise Unfinished("the answer is of other weights than the server was given")
    return answer


def _parsed(model: type[Model], content: bytes) -> Model:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place or 'the answer'}: {first['msg']}, in {content[:80]!r}") from None
