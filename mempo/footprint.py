"""Bytes that one device holds, from the settings and the sizes of the model alone; see ``plan``.

Upper bounds: every turn is as long as the settings let it be, and the device is that of the rank with most to hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mempo.config import Config
from mempo.runtime import Runtime
from mempo.shapes import Shape, num_parameters
from mempo.vllm_program import GIB, MAX_STEP_TOKENS

PIECE = 2**24  # numbers in the logits of one piece of a micro-batch (trainers/gradient.py)
LIVE = 10**9  # weights that ZeRO stage 3 gathers at a time: stage3_max_live_parameters in DeepSpeed's documentation
BUCKET = 5 * 10**8  # numbers of the gradient that ZeRO adds up over the ranks at a time: reduce_bucket_size, there too

Phase = Literal["rollout and scoring", "update", "warm start"]
ROLLOUT: Phase = "rollout and scoring"
UPDATE: Phase = "update"
WARMSTART: Phase = "warm start"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that one device holds throughout ``phase``, and the setting that they depend on most."""

    phase: Phase
    name: str
    bytes: float
    setting: str


def turn_tokens(config: Config) -> int:
    """What a turn adds to a history: its response and observation."""
    return config.rollout.max_response_tokens + config.search.max_observation_tokens


def longest_turn(config: Config) -> int:
    """Tokens of a turn's prompt and response: first prompt, the responses and observations it keeps, response."""
    r = config.rollout
    if r.context == "full":
        return longest_history(config)
    return r.max_prompt_tokens + r.kept_turns * turn_tokens(config) + r.max_response_tokens


def longest_history(config: Config) -> int:
    """Tokens of a whole trajectory, which the full side of the scoring pass reads."""
    r = config.rollout
    return r.max_prompt_tokens + r.max_turns * turn_tokens(config)


# --- rollout and scoring ---------------------------------------------------------------------------------------------


def kv_bytes(shape: Shape, runtime: Runtime) -> float:
    """Keys and values of one token on one device: 2 x layers x key-value heads x head size, less tensor parallel."""
    split = min(runtime.vllm.tensor_parallel, shape.kv_heads) if runtime.engine == "vllm" else 1
    return 2 * shape.layers * shape.key * number_size(runtime) / split


def engine_parts(shape: Shape, config: Config, memory: float) -> list[Part]:
    """vLLM takes its share of the device whole: what weights and logits leave of it is cache. Servers lie elsewhere.

    The engine ``hf`` holds weights, and the cache of ``max_batch`` turns.
    """
    runtime = config.runtime
    weights = float(num_parameters(shape) * number_size(runtime))
    if runtime.engine == "hf":
        cache = runtime.max_batch * longest_turn(config) * kv_bytes(shape, runtime)
        return [
            Part(ROLLOUT, "weights", weights, "runtime.dtype"),
            Part(ROLLOUT, "logits", 4.0 * PIECE, "runtime.engine"),
            Part(ROLLOUT, "cache", cache, "runtime.max_batch"),
        ]
    if runtime.vllm.servers:
        return []
    weights /= runtime.vllm.tensor_parallel
    logits = 4.0 * MAX_STEP_TOKENS * shape.vocab
    left = runtime.vllm.gpu_memory_utilization * memory - weights - logits
    cache = float(runtime.vllm.kv_cache_gib * GIB) if runtime.device == "cpu" else max(0.0, left)
    return [
        Part(ROLLOUT, "weights", weights, "runtime.vllm.tensor_parallel"),
        Part(ROLLOUT, "logits", logits, "runtime.engine"),
        Part(ROLLOUT, "cache", cache, cache_setting(runtime)),
    ]


def cache_setting(runtime: Runtime) -> str:
    return "runtime.vllm.kv_cache_gib" if runtime.device == "cpu" else "runtime.vllm.gpu_memory_utilization"


# --- update ----------------------------------------------------------------------------------------------------------


def update_parts(shape: Shape, trained: int, config: Config) -> list[Part]:
    """All that a rank holds while a micro-batch goes through it."""
    runtime = config.runtime
    tokens = max(config.optim.tokens_per_microbatch, longest_turn(config))
    held = activation_bytes(shape, tokens, number_size(runtime), checkpointing=runtime.gradient_checkpointing)
    remedy = "optim.tokens_per_microbatch" if runtime.gradient_checkpointing else "runtime.gradient_checkpointing"
    # Logits, their log-softmax and their gradient in float32, and the head's own gradient before it is handed on.
    logits = 3 * 4.0 * PIECE + shape.vocab * shape.hidden * number_size(runtime)
    return [
        *state_parts(num_parameters(shape), trained, runtime),
        Part(UPDATE, "activations", held, remedy),
        Part(UPDATE, "logits", logits, "model.path"),
    ]


def state_parts(total: int, trained: int, runtime: Runtime) -> list[Part]:
    """Weights, gradients and AdamW's state of one rank.

    Mixed precision takes 2 + 4 + 12 bytes a weight (gradients added up in float32; float32 copy, two moments); ZeRO
    stage 1 divides the 12 by the ranks, stage 2 the 4 too, stage 3 the weights too (arXiv 1910.02054, section 3). The
    gradients of one pass lie beside them: all of them in bfloat16 at stage 1, else a ``BUCKET``. ``torch`` keeps
    float32: 4 + 4 + 8, and under autocast a bfloat16 copy of the weights.
    """
    if runtime.trainer == "torch":
        weights = (6.0 if runtime.dtype == "bfloat16" else 4.0) * total
        sizes, setting = (weights, 4.0 * trained, 8.0 * trained), "runtime.trainer"
    else:
        options, size = runtime.deepspeed, number_size(runtime)
        third, second, first = (options.ranks if options.stage >= stage else 1 for stage in (3, 2, 1))
        away = options.offload and options.stage == 3
        own = 0.0 if away else size * total / third
        gathered = size * min(total, LIVE) if options.stage == 3 else 0.0
        optimiser = 0.0 if options.offload else 12.0 * trained / first
        gradients = 0.0 if away else 4.0 * trained / second
        passing = size * (trained if options.stage == 1 and size == 2 else BUCKET)
        sizes = (own + gathered, gradients + passing, optimiser)
        setting = "runtime.deepspeed.stage" if options.stage < 3 else "runtime.deepspeed.ranks"
    names = ("weights", "gradients", "optimiser")
    return [Part(UPDATE, name, size, setting) for name, size in zip(names, sizes, strict=True)]


def activation_bytes(shape: Shape, tokens: int, size: int, *, checkpointing: bool) -> float:
    """What the backward pass needs of ``tokens`` gone forward, counted as in arXiv 2205.05198, section 4.

    A layer, whose attention stores no scores: 7 residuals and norms of width d in float32, and in ``size`` bytes 3 of
    the queries' width, 4 of the keys', 4 of the MLP's. With checkpointing, the input of each layer and one layer whole.
    """
    inner = 3 * shape.query + 4 * shape.key + 4 * shape.intermediate
    layer = float(tokens * (7 * shape.hidden * 4 + inner * size))
    return layer + shape.layers * 4.0 * tokens * shape.hidden if checkpointing else shape.layers * layer


def host_bytes(total: int, trained: int, runtime: Runtime) -> float:
    """Memory of the CPU: what is offloaded, and the float32 weights that every rank of DeepSpeed reads at its start."""
    options = runtime.deepspeed
    if runtime.trainer == "torch":
        return 0.0
    weights = number_size(runtime) * total if options.stage == 3 else 0
    states = 20.0 if options.stage == 3 else 16.0  # stage 3 adds gradients up there too, beside those for AdamW
    return 4.0 * total * options.ranks + (states * trained + weights if options.offload else 0.0)


def number_size(runtime: Runtime) -> int:
    """Bytes of a number in ``runtime.dtype``."""
    return 2 if runtime.dtype == "bfloat16" else 4
