"""The memory advantage in TRL's GRPOTrainer (TRL 1.16): ``MemPOTrainer``, or ``MemoryAdvantage`` over your subclass.

TRL gives a completion one advantage and lets a subclass hand its loss a [B, T] tensor instead. Here that tensor is
TRL's own advantage on every token plus ``mem_weight`` times the memory advantage on the tokens of ``<mem>..</mem>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from mempo.adapters.completions import read_completion, refuse_changed
from mempo.advantages import span_advantages
from mempo.config import Advantage, Config, MemReward, Scoring
from mempo.engines import engine_of
from mempo.memory_signal import memory_signal
from mempo.probe_rewards import memory_rewards
from mempo.records import Question, TurnScore
from mempo.scoring import score

TOKEN_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
ADVANTAGE = {
    "normalize_std": "scale_rewards decides",
    "aggregation": "loss_type decides",
    "flat_groups": "TRL keeps them",
    "cut_off": "mask_truncated_completions decides",
}
MEM_REWARD = {"ill_formed": "a completion of TRL has no prescribed form"}
SCORING = {"full_scorer": "p_full is of the model in training"}


class MemoryAdvantage:
    """Mixin before a GRPOTrainer. ``golden_answers``: a dataset column, or a function of the row.

    It holds one entry an objective, each an answer or a list of its aliases; a bare string is one objective. A turn
    begins where the model begins to write (after a tool's result) and at each segment. p_full: the prompt and all of
    the completion before the segment; p_mem: the prompt and the segment alone; both by the model in training. A segment
    with which the completion begins has no history behind it and gets none, like a first turn of ``mempo``. Rounds of
    ``anneal_rounds`` are optimiser steps. Logs ``memory/reward``, ``p_mem``, ``p_full`` and ``scored``, a share of the
    segments.

    Raises ``ValueError`` naming a setting under which token advantages would not stay on their tokens, or be wrong.
    """

    def __init__(
        self,
        *args: Any,
        golden_answers: str | Callable[[dict[str, Any]], Any] = "golden_answers",
        mem_reward: MemReward = MemReward(),
        advantage: Advantage = Advantage(),
        scoring: Scoring = Scoring(),
        **kwargs: Any,
    ) -> None:
        self._mempo = Config(mem_reward=mem_reward, advantage=advantage, scoring=scoring)
        self._golden_answers = golden_answers
        refuse_changed(advantage, ADVANTAGE, "advantage")
        refuse_changed(mem_reward, MEM_REWARD, "mem_reward")
        refuse_changed(scoring, SCORING, "scoring")
        if advantage.gate == "outcome_correct":
            raise ValueError("advantage.gate: 'outcome_correct' needs outcomes of 0 or 1, rewards here have any scale")
        super().__init__(*args, **kwargs)
        refuse_settings(self)

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        weight = self._mempo.advantage.weight_at(self.state.global_step)
        if weight > 0:
            output["advantages"] = output["advantages"].unsqueeze(1) + self._on_segments(inputs, output, weight)
        return output

    def _on_segments(self: Any, inputs: list[dict[str, Any]], output: dict[str, Any], weight: float) -> torch.Tensor:
        """[B, T]: what each segment's tokens get beside the outcome advantage, 0 elsewhere."""
        scores, spans = self._score_segments(inputs, output)
        everyone: list[list[TurnScore]] = gather_object(scores)  # a group may be spread over processes
        outcome: list[float] = gather_object(output["advantages"].tolist())
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        probes, rewards = memory_rewards(everyone, self._mempo.mem_reward, aliases=self._mempo.scoring.aliases)
        _, terms = memory_signal(
            rewards,
            [str(row // size) for row in range(len(everyone))],
            self._mempo.advantage,
            outcomes=outcome,
            outcome_advantages=outcome,
            weight=weight,
            turns=[[turn.turn for turn in row] for row in everyone],
        )
        self._log_memory(mode, everyone, probes, rewards)
        first, length = self.accelerator.process_index * len(inputs), output["completion_ids"].size(1)
        rows = [span_advantages(length, row, terms[first + i]) for i, row in enumerate(spans)]
        return torch.tensor(rows, dtype=output["advantages"].dtype, device=output["advantages"].device)

    def _score_segments(
        self: Any, inputs: list[dict[str, Any]], output: dict[str, Any]
    ) -> tuple[list[list[TurnScore]], list[list[tuple[int, int]]]]:
        """For each completion the scores of its turns and the token spans of their segments."""
        tool_mask = output.get("tool_mask")
        names: dict[Any, str] = {}
        questions, trajectories, spans = {}, [], []
        for i, row in enumerate(inputs):
            prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
            length = int(output["completion_mask"][i].sum())
            written = tool_mask[i][:length].tolist() if tool_mask is not None else None
            golds = self._golds(row)
            name = names.setdefault((tuple(prompt), repr(golds)), str(len(names)))
            questions[name] = Question(name, "", golds)
            completion = output["completion_ids"][i][:length].tolist()
            trajectory, of_turns = read_completion(
                self.processing_class, prompt, completion, written, question_id=name, sample_index=i
            )
            trajectories.append(trajectory)
            spans.append(of_turns)
        training = self.model.training
        self.model.eval()  # no dropout, no checkpointing in a pass without gradient
        try:
            scores = iter(score(engine_of(self.model, self.processing_class), trajectories, questions, self._mempo))
        finally:
            self.model.train(training)
        return [[next(scores) for _ in trajectory.turns] for trajectory in trajectories], spans

    def _golds(self, row: dict[str, Any]) -> list[Any]:
        source = self._golden_answers
        if not callable(source) and source not in row:
            raise ValueError(f"golden_answers: the dataset has no column {source!r}, only {sorted(row)}")
        golds = source(row) if callable(source) else row[source]
        return [golds] if isinstance(golds, str) else list(golds)

    def _log_memory(self: Any, mode: str, turns: list[list[TurnScore]], probes: list[Any], rewards: list[Any]) -> None:
        found = [reward for row in rewards for reward in row if reward is not None]
        segments = sum(score.mem_tokens > 0 for row in turns for score in row)
        logged = {"reward": found, "scored": [len(found) / segments] if segments else []}
        for side in ("p_mem", "p_full"):
            values = [getattr(probe, side) for row in probes for probe in row if probe is not None]
            logged[side] = [value for value in values if value is not None]
        for name, values in logged.items():
            if values:
                self._metrics[mode][f"memory/{name}"].append(sum(values) / len(values))


def refuse_settings(trainer: Any) -> None:
    """Raises ``ValueError`` for settings of a GRPOTrainer that cannot carry or cannot compute token advantages."""
    args = trainer.args
    refused = {
        f"loss_type: {args.loss_type!r} weighs a sequence as a whole": args.loss_type not in TOKEN_LOSSES,
        "importance_sampling_level: one ratio a sequence spreads every token's advantage over all of them": (
            args.importance_sampling_level != "token"
        ),
        "off_policy_mask_threshold: drops a sequence by the sign of its one advantage": (
            args.off_policy_mask_threshold is not None
        ),
        "use_liger_kernel: the model's layers are exchanged, its scores are untested": args.use_liger_kernel,
        "fsdp or deepspeed: the scoring pass needs whole weights": (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        ),
        "peft: the scoring pass needs a plain model": hasattr(trainer.model, "peft_config"),
        "processing_class: text models alone are scored": trainer._is_vlm,
    }
    for message, holds in refused.items():
        if holds:
            raise ValueError(message)


class MemPOTrainer(MemoryAdvantage, GRPOTrainer):  # type: ignore[misc]
    """``trl.GRPOTrainer`` with the memory advantage on ``<mem>`` tokens; see ``MemoryAdvantage``."""
