"""The memory advantage inside TRL: real trainings of the tiny policy on a CPU (``make test-adapters``)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed here; make test-adapters has an environment with it")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mempo.adapters.trl import MemPOTrainer
from mempo.advantages import memory_advantages
from mempo.config import Advantage, MemReward, Scoring
from mempo.engines.loader import load_model, load_tokenizer
from mempo.prompts import PROBE_HEAD, PROBE_TAIL
from mempo.records import ProbeScore, TurnScore
from mempo.runtime import Runtime

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "memory_advantage.json").read_text(encoding="utf-8"))
ROWS = [
    {"prompt": [{"role": "user", "content": "Capital of France?"}], "golden_answers": [["Paris"]]},
    {"prompt": [{"role": "user", "content": "Currency of Japan?"}], "golden_answers": [["Yen", "JPY"]]},
]
SEARCH = "<think>I need to search.</think><search>capital</search>"
TOOL = "<information>Paris; Yen; <mem>a tool</mem></information>"
RESULT = f"<|im_end|>\n<|im_start|>user\n{TOOL}<|im_end|>\n<|im_start|>assistant\n"
# Two attempts a question, as (text, whether the model wrote it).
ATTEMPTS = [
    [(SEARCH, 1), (RESULT, 0), ("<mem>Paris</mem><think>done</think><answer>Paris</answer>", 1)],
    [(SEARCH, 1), (RESULT, 0), ("<mem>unknown</mem><think>done</think><answer>Ulm</answer>", 1)],
    [(SEARCH, 1), (RESULT, 0), ("<mem>Yen</mem><think>a</think><mem>Japan</mem><answer>Yen</answer>", 1)],
    [("<mem>first</mem><answer>Ulm</answer>", 1)],
]


def right(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [0.1 * len(text) % 1.0 + ("Paris" in text) for text in texts]


class Seen:
    """Mixin that keeps what the loss was given and what it gave."""

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        self.seen = [*getattr(self, "seen", []), (inputs, loss.detach().clone())]
        return loss


class Plain(Seen, GRPOTrainer):
    pass


class Mempo(Seen, MemPOTrainer):
    pass


def attempts_of(tokenizer: Any, attempts: list[Any]) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A rollout_func that gives the same attempts every time."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids, masks = [], []
        for attempt in attempts:
            parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in attempt]
            ids.append([token for part in parts for token in part])
            masks.append([by for part, (_, by) in zip(parts, attempt, strict=True) for _ in part])
        prompt_ids = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) for prompt in prompts
        ]
        logprobs = [[0.0] * len(row) for row in ids]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs, "env_mask": masks}

    return rollout


@pytest.fixture
def make(tiny_policy: Path, tmp_path: Path) -> Callable[..., Any]:
    def trainer(
        kind: Any, attempts: list[Any] | None = None, rows: list[Any] = ROWS, settings: Any = (), **options: Any
    ) -> Any:
        tokenizer = load_tokenizer(tiny_policy)
        values = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 2 * len(rows),
            "num_generations": 2,
            "max_steps": 2,
            "max_completion_length": 24,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "shuffle_dataset": False,
            "disable_tqdm": True,
        }
        if attempts is not None:
            options["rollout_func"] = attempts_of(tokenizer, attempts)
        return kind(
            model=load_model(tiny_policy, Runtime()),
            reward_funcs=right,
            args=GRPOConfig(**(values | dict(settings))),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **options,
        )

    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def moved(trainer: Any) -> dict[str, torch.Tensor]:
    """The weights after training from the same random numbers: TRL samples and shuffles."""
    torch.manual_seed(0)
    trainer.train()
    return weights(trainer)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("attempts", [None, ATTEMPTS], ids=["sampled by TRL", "with tools"])
def test_weight_zero_is_grpo_to_the_bit(make: Any, attempts: Any) -> None:
    plain, mempo = make(Plain, attempts), make(Mempo, attempts, advantage=Advantage(mem_weight=0.0))
    before = weights(plain)
    assert same(before, weights(mempo))
    after = moved(plain)
    assert not same(before, after), "two steps of 1e-2 move the weights"
    assert same(after, moved(mempo))
    assert [loss for _, loss in plain.seen] == [loss for _, loss in mempo.seen]


def test_without_segments_token_advantages_are_grpo_to_the_bit(make: Any) -> None:
    attempts = [[(f"<think>{i}</think><answer>Paris</answer>" * (i + 1), 1)] for i in range(4)]
    plain, mempo = make(Plain, attempts), make(Mempo, attempts)
    assert same(moved(plain), moved(mempo))
    assert mempo.seen[0][0]["advantages"].dim() == 2 and plain.seen[0][0]["advantages"].dim() == 1


def by_completion(inputs: dict[str, Any]) -> dict[tuple[int, ...], int]:
    """Row of each completion: TRL shuffles a generation batch."""
    masks = inputs["completion_mask"].bool()
    rows = zip(inputs["completion_ids"], masks, strict=True)
    return {tuple(ids[mask].tolist()): row for row, (ids, mask) in enumerate(rows)}


def test_only_memory_tokens_differ_and_by_the_memory_advantage(make: Any, tiny_policy: Path) -> None:
    """Against p_mem and p_full from whole sequences, one after the other, through the model alone."""
    options = {"mem_reward": MemReward(mask="none")}
    plain, mempo = make(Plain, ATTEMPTS), make(Mempo, ATTEMPTS, **options)
    tokenizer, model = load_tokenizer(tiny_policy), load_model(tiny_policy, Runtime())
    moved(plain)
    moved(mempo)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def p(context: str, gold: str) -> float:
        probe, before = ids(PROBE_HEAD + gold + PROBE_TAIL), ids(context)
        with torch.no_grad():
            logprobs = model(torch.tensor([before + probe])).logits[0].log_softmax(-1)
        core, head = ids(gold), len(ids(PROBE_HEAD))
        assert probe[head : head + len(core)] == core
        at = len(before) + head
        return math.exp(sum(logprobs[at + k - 1, token].item() for k, token in enumerate(core)) / len(core))

    heads = [f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n" for row in ROWS]
    searched = SEARCH + RESULT
    rewards = [
        [p(heads[0] + "<mem>Paris</mem>", "Paris") - p(heads[0] + searched, "Paris")],
        [p(heads[0] + "<mem>unknown</mem>", "Paris") - p(heads[0] + searched, "Paris")],
        [
            p(heads[1] + "<mem>Yen</mem>", "Yen") - p(heads[1] + searched, "Yen"),
            p(heads[1] + "<mem>Japan</mem>", "Yen") - p(heads[1] + searched + "<mem>Yen</mem><think>a</think>", "Yen"),
        ],
        [],  # a segment with which the completion begins has no history
    ]
    expected = memory_advantages(rewards, ["q0", "q0", "q1", "q1"])
    assert all(abs(value) > 0.1 for row in expected for value in row)

    inputs, rows = mempo.seen[0][0], by_completion(mempo.seen[0][0])
    reference, plain_rows = plain.seen[0][0]["advantages"], by_completion(plain.seen[0][0])
    for attempt, values in zip(ATTEMPTS, expected, strict=True):
        completion = tuple(token for text, _ in attempt for token in ids(text))
        found = inputs["advantages"][rows[completion]] - reference[plain_rows[completion]]
        written = [token for text, by in attempt for token in (ids(text) if by else [-1] * len(ids(text)))]
        opening, closing = ids("<mem>")[0], ids("</mem>")[0]
        wanted, queue, inside = [0.0] * len(found), list(values), 0.0
        for t, token in enumerate(written):
            if token == opening and queue:
                inside = queue.pop(0)
            wanted[t] = inside
            inside = 0.0 if token == closing else inside
        assert found.tolist() == pytest.approx(wanted, abs=2e-4)
    logged = {key: value for entry in mempo.state.log_history for key, value in entry.items() if "memory/" in key}
    assert logged["memory/scored"] == pytest.approx(0.8), "4 of 5: the first has no history"
    assert set(logged) == {f"memory/{name}" for name in ("reward", "p_mem", "p_full", "scored")}
    assert mempo.model.training


def mean_of_rows(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (terms.sum(-1) / mask.sum(-1)).mean()


AGGREGATIONS = {
    "grpo": mean_of_rows,
    "bnpo": lambda terms, mask: terms.sum() / mask.sum(),
    "dr_grpo": lambda terms, mask: terms.sum() / (len(terms) * 24),
    "dapo": lambda terms, mask: terms.sum() / mask.sum(),
    "luspo": lambda terms, mask: terms.sum(-1).mean(),
    "cispo": None,  # weighs log-probabilities
    "sapo": None,  # weighs by the advantage's sign
}


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_loss_types_take_token_advantages(make: Any, loss_type: str) -> None:
    """At ratio 1 a clipped loss is -A summed with the weights of its type: the memory term adds its own share alone."""
    settings, options = {"loss_type": loss_type, "max_steps": 1}, {"mem_reward": MemReward(mask="none")}
    plain, mempo = make(Plain, ATTEMPTS, settings=settings), make(Mempo, ATTEMPTS, settings=settings, **options)
    assert not same(moved(plain), moved(mempo))
    (inputs, loss), (reference, plain_loss) = mempo.seen[0], plain.seen[0]
    assert torch.equal(inputs["completion_ids"], reference["completion_ids"]), "the same order of rows"
    assert loss != plain_loss and torch.isfinite(loss)
    if AGGREGATIONS[loss_type] is not None:
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        terms = (inputs["advantages"] - reference["advantages"].unsqueeze(1)) * mask
        expected = -AGGREGATIONS[loss_type](terms, mask).item()
        assert abs(expected) > 1e-3 and (loss - plain_loss).item() == pytest.approx(expected, abs=1e-5)


class Given(Mempo):
    """The golden file's rewards as log-probabilities, p_full = 0.5 and p_mem = 0.5 + reward, on its own spans."""

    case: Any = None

    def _score_segments(self, inputs: Any, output: Any) -> Any:
        def turn(row: int, number: int, reward: float) -> TurnScore:
            sides = [math.log(0.5)], [math.log(0.5 + reward)]
            probe = ProbeScore("x", [(0, 1)], [1], [0], [1], 1, *sides, [], [])
            return TurnScore(str(row), row, number, 0, [probe], 1, 1, "actor@0", None, [0.0], [0.0])

        scores = [[turn(i, j + 2, r) for j, r in enumerate(row)] for i, row in enumerate(self.case["rewards"])]
        return scores, self.case["spans"]


PAIRS = [case for case in GOLDEN["cases"] if case["groups"] in (["q", "q"], ["a", "a", "b", "b"])]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case["name"])
def test_golden_advantages_reach_the_loss(make: Any, case: Any, tiny_policy: Path) -> None:
    tokenizer = load_tokenizer(tiny_policy)
    words = [[("the " * 3 + str(i) + " user" * 20, 1)] for i in range(len(case["groups"]))]
    words = [[(tokenizer.decode(tokenizer(w[0][0])["input_ids"][: case["length"]]), 1)] for w in words]
    rows = ROWS[: len(words) // 2]
    settings = {"max_steps": 1}
    options = {"mem_reward": MemReward(mask="none")}
    plain = make(Plain, words, rows, settings)
    mempo = make(type("Case", (Given,), {"case": case}), words, rows, settings, **options)
    moved(plain)
    moved(mempo)
    found, rows_of = mempo.seen[0][0], by_completion(mempo.seen[0][0])
    reference, plain_rows = plain.seen[0][0]["advantages"], by_completion(plain.seen[0][0])
    for word, expected in zip(words, case["token_advantages"], strict=True):
        key = tuple(tokenizer(word[0][0])["input_ids"])
        difference = found["advantages"][rows_of[key]] - reference[plain_rows[key]]
        assert difference.tolist() == pytest.approx(expected[: len(difference)], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [
        ({"loss_type": "vespo"}, {}, "loss_type"),
        ({"importance_sampling_level": "sequence"}, {}, "importance_sampling_level"),
        ({"off_policy_mask_threshold": 0.5}, {}, "off_policy_mask_threshold"),
        ({}, {"advantage": Advantage(aggregation="turn-mean")}, "advantage.aggregation"),
        ({}, {"advantage": Advantage(gate="outcome_correct")}, "advantage.gate"),
        ({}, {"mem_reward": MemReward(ill_formed="drop")}, "mem_reward.ill_formed"),
        ({}, {"scoring": Scoring(full_scorer="reference")}, "scoring.full_scorer"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(make: Any, settings: Any, options: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(MemPOTrainer, ATTEMPTS, settings=settings, **options)


def test_completions_that_trl_masks_have_no_segments(make: Any) -> None:
    """None of these ends with an end-of-turn token: TRL masks them out, and nothing of them is scored."""
    trainer = make(Mempo, ATTEMPTS, settings={"mask_truncated_completions": True, "max_steps": 1})
    trainer.train()
    advantages = trainer.seen[0][0]["advantages"]
    assert torch.equal(advantages, advantages[:, :1].expand_as(advantages))


def test_a_missing_column_is_named(make: Any) -> None:
    with pytest.raises(ValueError, match=r"no column 'answer'.*golden_answers"):
        make(MemPOTrainer, ATTEMPTS, golden_answers="answer").train()


def test_golden_answers_from_a_function_and_every_scoring_option(make: Any) -> None:
    """Packed and padded rows give the same advantages; aliases and annealing run."""
    found = []
    for mode in ("packed", "padded"):
        options = {
            "golden_answers": lambda row: row["golden_answers"],
            "scoring": Scoring(mode=mode, aliases="mean", lookahead=1),
            "mem_reward": MemReward(mask="none"),
            "advantage": Advantage(anneal_rounds=1, gate="outcome_nonnegative", unit_variance=True),
        }
        trainer = make(Mempo, ATTEMPTS, **options)
        trainer.train()
        found.append(trainer.seen[0][0]["advantages"])
        assert trainer.seen[1][0]["advantages"].dim() == 1, "the weight has fallen to 0 after one step"
    assert torch.allclose(found[0], found[1], atol=2e-4)
