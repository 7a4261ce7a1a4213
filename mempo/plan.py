"""Does it fit, and what does a round cost? From the settings alone (``mempo plan``). See ``footprint``, ``floor``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from mempo.config import Config
from mempo.cost import PROBE_TOKENS, Phase, phases, round_tokens
from mempo.floor import Device, table
from mempo.footprint import (
    WARMSTART,
    Part,
    cache_setting,
    engine_parts,
    host_bytes,
    kv_bytes,
    longest_history,
    longest_turn,
    update_parts,
)
from mempo.scoring import needs_reference
from mempo.shapes import Shape, num_parameters, num_trained, shape_of
from mempo.vllm_program import GIB

# A GPU's context, NCCL's buffers and what an allocator cannot use; an allowance, not a measurement.
RESERVE = 2 * GIB


@dataclass(frozen=True, slots=True)
class Plan:
    """``parts`` lie on a device, ``host`` bytes in the memory of the CPU; every line of ``problems`` names a setting.

    ``cache_tokens``: the context that the engine's cache holds. ``lengths``: of a turn, a trajectory and the window, in
    tokens. ``tokens`` and ``phases`` are of one round.
    """

    parameters: int
    trained: int
    parts: list[Part]
    host: float
    cache_tokens: int
    lengths: dict[str, int]
    tokens: dict[str, int]
    phases: list[Phase]
    problems: list[str]


def plan(config: Config, memory: float) -> Plan:
    """``config`` on devices of ``memory`` bytes each. The engine sleeps during the update: the phases take turns.

    Raises ``ValueError`` where the sizes of ``model.path`` are not known, or ``memory`` is not finite.
    """
    if not math.isfinite(memory):
        raise ValueError(f"--gpu-memory: expected GiB of one device, found {memory / GIB}")
    shape, runtime = shape_of(config.model), config.runtime
    total, trained = num_parameters(shape), num_trained(shape, config.lora)
    engine = engine_parts(shape, config, memory)
    parts = [*engine, *update_parts(shape, trained, config)]
    if needs_reference(config) and runtime.engine == "hf" and not config.lora.rank:  # vLLM runs both in turns
        parts += [replace(part, name=f"{part.name} of the reference") for part in engine]
    if config.lora.rank and config.warmstart.num_steps:  # the warm start trains all weights
        parts += [replace(part, phase=WARMSTART) for part in update_parts(shape, total, config)]
    room = int(sum(part.bytes for part in engine if part.name == "cache") / kv_bytes(shape, runtime))
    return Plan(
        parameters=total,
        trained=trained,
        parts=parts,
        host=host_bytes(total, trained, runtime),
        cache_tokens=room,
        lengths={
            "longest turn": longest_turn(config),
            "longest trajectory and a probe": longest_history(config) + PROBE_TOKENS,
            "model's window": shape.window,
        },
        tokens=round_tokens(config),
        phases=phases(config, room if engine else math.inf),
        problems=[*_misfits(shape, config, room), *_too_large(parts, memory)],
    )


def _misfits(shape: Shape, config: Config, cache_tokens: int) -> list[str]:
    runtime, turn = config.runtime, longest_turn(config)
    longest = max(turn, longest_history(config) + PROBE_TOKENS)
    parallel, found = runtime.vllm.tensor_parallel, []
    if turn > shape.window:  # a whole trajectory may be longer: scoring counts it and goes on
        setting = "max_turns" if config.rollout.context == "full" else "max_response_tokens"
        found.append(f"rollout.{setting}: a turn takes up to {turn} tokens, the window holds {shape.window}")
    if runtime.engine == "vllm" and not runtime.vllm.servers:
        if shape.heads % parallel:
            found.append(f"runtime.vllm.tensor_parallel: {shape.heads} attention heads do not divide by {parallel}")
        if cache_tokens < longest:
            told = f"the cache holds {cache_tokens} tokens, a trajectory takes up to {longest}"
            found.append(f"{cache_setting(runtime)}: {told}")
    return found


def _too_large(parts: Sequence[Part], memory: float) -> list[str]:
    found = []
    for phase, held in _by_phase(parts).items():
        need = sum(part.bytes for part in held) + RESERVE
        if need > memory:
            worst = max(held, key=lambda part: part.bytes)
            figures = f"{need / GIB:.1f} GiB, the device has {memory / GIB:.1f}"
            found.append(f"{worst.setting}: {phase} needs {figures}; most of it is {worst.name}")
    return found


def _by_phase(parts: Sequence[Part]) -> dict[str, list[Part]]:
    return {phase: [part for part in parts if part.phase == phase] for phase in dict.fromkeys(p.phase for p in parts)}


def tables(made: Plan, memory: float, device: Device, shares: Mapping[str, float]) -> list[Table]:
    """For a terminal: bytes by phase, tokens, and the seconds of a round on such devices (``floor.table``)."""
    counts = f"{made.parameters / 1e9:.3f} B weights, {made.trained / 1e9:.3f} B trained"
    held = Table(title=counts, title_justify="left")
    held.add_column("on each device")
    held.add_column("GiB", justify="right")
    held.add_column("changed by")
    for phase, parts in _by_phase(made.parts).items():
        for part in parts:
            held.add_row(f"{phase}: {part.name}", f"{part.bytes / GIB:.2f}", part.setting)
        whole = sum(part.bytes for part in parts) + RESERVE
        held.add_row(f"{phase}: all and {RESERVE / GIB:.0f} in reserve", f"{whole / GIB:.2f}", f"of {memory / GIB:.0f}")
        held.add_section()
    held.add_row("memory of the CPU", f"{made.host / GIB:.2f}", "runtime.deepspeed.ranks")
    cost = Table(title="a round, at most", title_justify="left")
    cost.add_column("")
    cost.add_column("", justify="right")
    for name, count in made.lengths.items():
        cost.add_row(f"tokens of the {name}", f"{count:,}")
    for name, count in made.tokens.items():
        cost.add_row(f"tokens {name}", f"{count:,}")
    cost.add_row("tokens that the cache holds", f"{made.cache_tokens:,}")
    return [held, cost, table(made.phases, device, shares)]
