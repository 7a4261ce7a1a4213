"""What a round must do, phase by phase, from the settings alone: tokens, matrix products, bytes to move; see ``floor``.

Attention, norms, sampling, tools and what devices send each other are left out: real work is more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mempo.config import Config
from mempo.footprint import kv_bytes, longest_turn, number_size, turn_tokens
from mempo.shapes import Shape, num_parameters, shape_of

PROBE_TOKENS = 64  # of one scored wording of the answer, its frame included


@dataclass(frozen=True, slots=True)
class Phase:
    """``flops`` and ``bytes`` that a phase of a round must spend, shared out to ``devices`` without a remainder."""

    name: str
    devices: int
    flops: float
    bytes: float


def prompt_lengths(config: Config) -> list[int]:
    """Tokens of a trajectory's prompts, turn by turn: the first prompt, and what the context rule keeps of turns."""
    r = config.rollout
    kept = r.max_turns if r.context == "full" else r.kept_turns
    return [r.max_prompt_tokens + min(done, kept) * turn_tokens(config) for done in range(r.max_turns)]


def round_tokens(config: Config) -> dict[str, int]:
    """Upper bounds for one round: no prefix is cached, and every trajectory has ``rollout.max_turns`` full turns."""
    trajectories = config.loop.questions_per_round * config.loop.group_size
    prompts = trajectories * sum(prompt_lengths(config))
    generated = trajectories * config.rollout.max_turns * config.rollout.max_response_tokens
    again = (prompts + generated) * _response_passes(config)
    return {
        "prompt": prompts,
        "generated": generated,
        "scored": _probed_tokens(config) + again,
        "trained": prompts + generated,
    }


def _response_passes(config: Config) -> int:
    """How often every response is scored after its prompt: by the reference policy, by the actor once more."""
    return (config.loss.kl_coef > 0) + (config.loss.old_logprobs == "recomputed")


def _num_probes(config: Config) -> int:
    """Of each side: one a turn from the second on."""
    turns = config.rollout.max_turns - 1 if config.uses_memory_reward else 0
    return config.loop.questions_per_round * config.loop.group_size * turns


def _probed_tokens(config: Config) -> int:
    """Token trees (docs/algorithm.md, "One scoring pass") read each history once, and a question's first prompt once
    for all of its memories; vLLM reads every path of a tree by itself.
    """
    r, probes = config.rollout, _num_probes(config)
    if not probes:
        return 0
    turn, turns = turn_tokens(config), r.max_turns - 1
    trajectories, branch = probes // turns, r.max_response_tokens + PROBE_TOKENS
    if config.runtime.engine == "vllm":
        read = turns * (r.max_prompt_tokens + PROBE_TOKENS) + turn * turns * (turns + 1) // 2
        return trajectories * read + probes * (r.max_prompt_tokens + branch)
    read = r.max_prompt_tokens + turns * (turn + PROBE_TOKENS)
    return trajectories * read + config.loop.questions_per_round * r.max_prompt_tokens + probes * branch


def product_flops(shape: Shape, tokens: float, head_tokens: float) -> float:
    """Forward: 2 a weight and token through the body, and through the vocabulary head for ``head_tokens`` (arXiv
    2001.08361, section 2.1). Gradients of what flows through cost the same again, those of the weights once more.
    """
    head = shape.vocab * shape.hidden
    body = num_parameters(shape) - head * (1 if shape.tied else 2)
    return 2.0 * (body * tokens + head * head_tokens)


def phases(config: Config, cache_tokens: float = math.inf) -> list[Phase]:
    """Of one round at most, see ``round_tokens``; ``cache_tokens``: the contexts that an engine's cache holds.

    Bytes: all weights of an engine once for the prompts and once for each token of a batch of turns, the cache of its
    own context for each token generated, the weights three times for each micro-batch of the update.
    """
    shape, tokens, runtime, r = shape_of(config.model), round_tokens(config), config.runtime, config.rollout
    weights = float(num_parameters(shape) * number_size(runtime))
    engines, split = _engines(config)
    batches = r.max_turns * engines * _waves(config, engines, cache_tokens)  # decoded to their end, of all engines
    contexts = sum(length + r.max_response_tokens / 2 for length in prompt_lengths(config)) / r.max_turns
    read = tokens["generated"] * contexts * split * kv_bytes(shape, runtime)
    probed = 2 * _num_probes(config) * PROBE_TOKENS + tokens["generated"] * _response_passes(config)
    trained = product_flops(shape, tokens["trained"], tokens["generated"]) * (2 if config.lora.rank else 3)
    if runtime.gradient_checkpointing:
        trained += product_flops(shape, tokens["trained"], 0)
    return [
        Phase("prompts", engines * split, product_flops(shape, tokens["prompt"], 0), weights * batches),
        Phase(
            "decoding",
            engines * split,
            product_flops(shape, tokens["generated"], tokens["generated"]),
            weights * batches * r.max_response_tokens + read,
        ),
        Phase(
            "score",
            engines * split,
            product_flops(shape, tokens["scored"], probed),
            weights * engines if tokens["scored"] else 0.0,
        ),
        Phase(
            "update",
            runtime.deepspeed.ranks if runtime.trainer == "deepspeed" else 1,
            trained,
            3 * weights * math.ceil(tokens["trained"] / config.optim.tokens_per_microbatch),
        ),
    ]


def _engines(config: Config) -> tuple[int, int]:
    """Engines that work at a time, and devices of each."""
    runtime, shards = config.runtime, config.shards
    if runtime.engine == "vllm" and runtime.vllm.servers:
        return len(runtime.vllm.servers), runtime.vllm.tensor_parallel
    count = shards.count if shards.deployment else 1
    return count, runtime.vllm.tensor_parallel if runtime.engine == "vllm" else 1


def _waves(config: Config, engines: int, cache_tokens: float) -> int:
    """How often an engine fills its batch for one turn of all of its trajectories."""
    trajectories = math.ceil(config.loop.questions_per_round * config.loop.group_size / engines)
    at_once = min(config.runtime.max_batch, cache_tokens / longest_turn(config))
    if config.runtime.engine == "hf":
        at_once = min(at_once, config.rollout.block_questions * config.loop.group_size)
    return math.ceil(trajectories / max(1, int(at_once)))
