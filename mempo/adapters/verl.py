"""The memory advantage as an advantage estimator of verl, in the form that ``register_adv_est`` registers.

Written against verl 0.9.1 (PyPI), ``verl.trainer.ppo.core_algos``. ``compute_advantage`` there calls an estimator that
was registered by name with ``token_level_rewards``, ``response_mask``, ``config`` and, as ``index``, the uids, and uses
the pair it returns as advantages and returns. It hands ``non_tensor_batch``, in which the memory rewards come, to its
own ``gdpo`` alone: the two lines that change this stand in docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mempo import advantages
from mempo.adapters.completions import refuse_changed
from mempo.config import Advantage
from mempo.memory_signal import memory_signal

SEGMENTS = "mem_segments"
ADVANTAGE = {
    "normalize_std": "algorithm.norm_adv_by_std_in_grpo decides",
    "aggregation": "actor.loss_agg_mode decides",
    "anneal_rounds": "an estimator is not told the step",
    "flat_groups": "verl keeps them",
    "cut_off": "verl keeps them",
}
Segment = tuple[int, int, float | None]
Estimator = Callable[..., tuple[Tensor, Tensor]]


def memory_estimator(options: Advantage = Advantage()) -> Estimator:
    """The estimator under ``options``: ``register_adv_est("mempo")(memory_estimator())``.

    Raises ``ValueError`` naming an option that verl decides or cannot know.
    """
    refuse_changed(options, ADVANTAGE, "advantage")

    def compute_memory_advantage(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Sequence[Any],
        config: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, both [B, T]: (score - group mean) / (group std + 1e-6) on every response token, plus
        ``mem_weight`` times the memory advantage on the tokens of each segment; 0 where ``response_mask`` is 0.

        ``token_level_rewards`` [B, T]: their sum over a row is its score. ``index`` [B]: rows of one group have equal
        entries. ``non_tensor_batch["mem_segments"]`` [B]: for each row a list of (start, end, memory reward), token
        positions in the response, half-open, in the order of the turns; a reward of None has no signal. Raises
        ``ValueError`` where the segments are missing or outside the response.
        """
        segments = _segments(non_tensor_batch, response_mask)
        scores = [float(score) for score in token_level_rewards.double().sum(dim=-1)]
        groups = [str(entry) for entry in index]
        normalize = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
        outcome = advantages.outcome_advantages(scores, groups, normalize_std=normalize)
        rewards = [[reward for _, _, reward in row] for row in segments]
        turns = [list(range(len(row))) for row in rewards]
        weight = options.mem_weight
        terms = memory_signal(
            rewards, groups, options, outcomes=scores, outcome_advantages=outcome, weight=weight, turns=turns
        )[1]
        length = response_mask.shape[-1]
        tokens = [
            [base + value for value in advantages.span_advantages(length, [(s, e) for s, e, _ in row], values)]
            for base, row, values in zip(outcome, segments, terms, strict=True)
        ]
        on_tokens = torch.tensor(tokens, dtype=token_level_rewards.dtype, device=token_level_rewards.device)
        on_tokens = on_tokens * response_mask
        return on_tokens, on_tokens

    return compute_memory_advantage


def _segments(non_tensor_batch: Mapping[str, Any] | None, response_mask: Tensor) -> list[list[Segment]]:
    if non_tensor_batch is None or SEGMENTS not in non_tensor_batch:
        raise ValueError(
            f"non_tensor_batch[{SEGMENTS!r}] is missing, see docs/adapters.md: verl gives it to gdpo alone"
        )
    rows, length = list(non_tensor_batch[SEGMENTS]), response_mask.shape[-1]
    if len(rows) != len(response_mask):
        raise ValueError(f"{SEGMENTS} has {len(rows)} rows, the batch {len(response_mask)}")
    for number, row in enumerate(rows):
        for start, end, _ in row:
            if not 0 <= start < end <= length:
                raise ValueError(f"{SEGMENTS}, row {number}: ({start}, {end}) is outside its {length} response tokens")
    return [[(start, end, reward) for start, end, reward in row] for row in rows]
