"""A trajectory as a trace: the question at the root, a span a turn with what it read, wrote and was worth.

MLflow's clock counts tokens here, a millisecond each: no turn has a time of its own, turns are generated in batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mempo.viewer import Scene, TurnScene

PROMPT_TAIL, PREVIEW = 2000, 300  # characters


@dataclass(frozen=True, slots=True)
class Step:
    """A span of a trace: ``start`` and ``end`` in milliseconds from the trace's beginning."""

    name: str
    kind: str
    start: int
    end: int
    inputs: Any
    outputs: Any
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """``key`` names it among the traces of its run; all ``steps`` but the first are the first one's children."""

    key: str
    tags: Mapping[str, str]
    steps: list[Step]

    def summary(self, run_id: str) -> dict[str, Any]:
        """What MLflow's list of traces shows, and the run it belongs to."""
        whole = self.steps[0]
        return {
            "request_preview": str(whole.inputs["question"])[:PREVIEW],
            "response_preview": str(whole.outputs["answer"])[:PREVIEW],
            "execution_duration": whole.end,
            "trace_metadata": {"mlflow.sourceRun": run_id},
            "tags": {"mlflow.traceName": whole.name} | dict(self.tags),
        }

    def rows(self, trace_id: str, began_ms: int) -> list[dict[str, Any]]:
        """The spans in MLflow's form, ids counted from 1."""
        return [_row(step, number, trace_id, began_ms) for number, step in enumerate(self.steps, start=1)]


def _row(step: Step, number: int, trace_id: str, began_ms: int) -> dict[str, Any]:
    own = {"traceRequestId": trace_id, "spanType": step.kind, "spanInputs": step.inputs, "spanOutputs": step.outputs}
    attributes = {f"mlflow.{name}": value for name, value in own.items()} | dict(step.attributes)
    return {
        "trace_id": trace_id,
        "span_id": f"{number:016x}",
        "parent_span_id": f"{1:016x}" if number > 1 else "",
        "name": step.name,
        "start_time_unix_nano": (began_ms + step.start) * 1_000_000,
        "end_time_unix_nano": (began_ms + step.end) * 1_000_000,
        "status": {"code": "STATUS_CODE_OK"},
        "attributes": {name: json.dumps(value) for name, value in attributes.items()},
    }


def trace(scene: Scene, prompts: list[str], round_index: int) -> Trace:
    """``prompts`` are the texts of the turns' prompts; of each the last ``PROMPT_TAIL`` characters are shown."""
    run, first = scene.trajectory, scene.turns[0].reward
    steps, clock = [], 0
    for number, (view, prompt) in enumerate(zip(scene.turns, prompts, strict=True), start=1):
        until = clock + len(view.turn.response_ids)
        steps.append(_turn(view, prompt[-PROMPT_TAIL:], number, clock, until))
        clock = until
    whole = Step(
        run.key,
        "AGENT",
        0,
        clock,
        {"question": scene.question.question, "golden_answers": scene.question.golden_answers},
        {"answer": run.answer, "status": run.status},
        {"score": first.score, "outcome_advantage": first.outcome_advantage, "policy_version": run.policy_version},
    )
    tags = {"round": str(round_index), "chosen": scene.why, "status": run.status, "score": f"{first.score:.3f}"}
    return Trace(f"{round_index}/{run.key}", tags, [whole, *steps])


def _turn(view: TurnScene, prompt: str, number: int, start: int, end: int) -> Step:
    turn, row = view.turn, view.reward
    figures = {"p_mem": row.p_mem, "p_full": row.p_full, "mem_reward": row.mem_reward}
    if row.mem_reward is not None:
        figures["mem_advantage"] = row.mem_advantage
    measured = {name: value for name, value in figures.items() if value is not None}
    sizes = {"prompt_tokens": len(turn.prompt_ids), "response_tokens": len(turn.response_ids), "valid": turn.valid}
    return Step(
        f"turn {number}: {turn.action or 'no action'}",
        "LLM",
        start,
        end,
        {"prompt": prompt},
        {
            "response": turn.text,
            "memory": turn.memory,
            "action": turn.action,
            "argument": turn.argument,
            "observation": turn.observation,
        },
        measured | sizes | ({"no_probe": row.reason} if row.reason else {}),
    )
