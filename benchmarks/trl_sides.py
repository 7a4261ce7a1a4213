"""A round of ours and a step of TRL's GRPOTrainer, timed: ``python -m benchmarks.trl_sides SIZE FOLDER``.

Both have the same untrained policy, whose end of text no logit belongs to: every answer has all its tokens. Ours is a
round as flows/train.py makes it: the engine reads the policy, answers, rewards, advantages, a trainer that reads the
policy, updates and saves it. TRL keeps its model, and is set to its fastest on a CPU: one batch of generation and of
training, no gradient checkpointing, no filters of tokens, constant learning rate, nothing saved or reported.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.synthetic import NARROW, SMOLLM2, random_policy
from benchmarks.timing import timed
from mempo.config import Config
from mempo.engines import Engine, Sampling, open_engine
from mempo.engines.loader import load_model, load_tokenizer
from mempo.records import Question, Trajectory, Turn
from mempo.runtime import Runtime
from mempo.samples import build
from mempo.scoring import score
from mempo.trainers import open_trainer
from mempo.update import update

SIZES = {"4 layers of width 128": (NARROW, 8, 2), "SmolLM2-135M's sizes": (SMOLLM2, 4, 2)}  # policy, questions, repeats
GROUP_SIZE, NEW_TOKENS, RATE = 8, 48, 1e-5
CONFIG = Config.model_validate(
    {"advantage": {"mem_weight": 0.0}, "optim": {"minibatches": 1, "learning_rate": RATE}, "loop": {"group_size": 8}}
)
Found = dict[str, Any]


def main(measure: Callable[[str, Path], tuple[Found, Found]]) -> None:
    """Write to ``found.json`` in the folder of the command line what was found of ours and of TRL."""
    torch.set_num_threads(1)
    size, folder = sys.argv[1], Path(sys.argv[2])
    (folder / "found.json").write_text(json.dumps(measure(size, folder)), encoding="utf-8")


def ask(count: int) -> list[str]:
    return [f"What is the capital of the country of the city number {i}?" for i in range(count)]


def told(place: int) -> str:
    """Every second answer of a group is right."""
    return str(place % 2)


def _measure(size: str, folder: Path) -> tuple[Found, Found]:
    sizes, questions, repeats = SIZES[size]
    policy, prompts = random_policy(folder, sizes), ask(questions)
    ours = fastest(partial(_round, policy, folder / "next", prompts), repeats)
    return ours, grpo(policy, folder, prompts, repeats, {"max_completion_length": NEW_TOKENS})


def fastest(one_round: Callable[[], Found], repeats: int) -> Found:
    """What a round found and the CPU-seconds of the fastest of ``repeats``, after one that does not count."""
    found = [timed(one_round) for _ in range(1 + repeats)]
    return found[-1][1] | {"seconds": min(seconds for seconds, _ in found[1:])}


def _round(policy: Path, after: Path, prompts: list[str]) -> Found:
    engine = open_engine(policy, Runtime())
    sampling = Sampling(temperature=1.0, max_tokens=NEW_TOKENS, stop=())
    ids = [engine.tokenizer(prompt)["input_ids"] for prompt in prompts for _ in range(GROUP_SIZE)]

    async def together() -> list[Any]:
        return await asyncio.gather(*(engine.generate(p, seed=i, sampling=sampling) for i, p in enumerate(ids)))

    answers = asyncio.run(together())
    made = [_trajectory(place, prompt, answer) for place, (prompt, answer) in enumerate(zip(ids, answers, strict=True))]
    return learn(engine, policy, after, made, prompts)


def _trajectory(place: int, prompt: list[int], answer: Any) -> Trajectory:
    turn = Turn(
        prompt, answer.token_ids, answer.logprobs, "", True, None, None, "answer", told(place), None, [],
        answer.finish_reason,
    )  # fmt: skip
    return finished(place, [turn])


def finished(place: int, turns: list[Turn]) -> Trajectory:
    return Trajectory(f"q{place // GROUP_SIZE}", place % GROUP_SIZE, 0, turns, told(place), "answered")


def learn(engine: Engine, policy: Path, after: Path, made: Sequence[Trajectory], prompts: Sequence[str]) -> Found:
    """What comes after the rollout. ``held``: tokens of the trajectories; ``read``: of the samples made of them."""
    questions = {f"q{i}": Question(f"q{i}", prompt, [["1"]]) for i, prompt in enumerate(prompts)}
    scores = score(engine, made, questions, CONFIG)
    samples, _ = build(made, questions, scores, CONFIG, round_index=0)
    engine.close()
    with closing(open_trainer(policy, CONFIG.optim, CONFIG.loss, Runtime())) as trainer:
        stats = update(trainer, samples, CONFIG, round_index=0)
        trainer.save(after, policy_version=1)
    held = sum(len(last.prompt_ids) + len(last.response_ids) for last in (trajectory.turns[-1] for trajectory in made))
    read = sum(len(sample.token_ids) for sample in samples)
    return {"sampled": stats["num_tokens"], "held": held, "read": read, "entropy": stats["entropy"]}


def grpo(policy: Path, folder: Path, prompts: Sequence[Any], repeats: int, settings: Found, **given: Any) -> Found:
    """The fastest of ``repeats`` steps of GRPOTrainer, which is ``given`` more, after one that does not count."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    seconds: list[float] = []
    written: list[int] = []  # tokens after the prompts, whoever wrote them

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.append(-time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] += time.process_time()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        written.append(sum(map(len, completion_ids)))
        return [float(told(place)) for place in range(len(completion_ids))]

    answers = len(prompts) * GROUP_SIZE
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=answers, num_generations=GROUP_SIZE,
        max_steps=1 + repeats, temperature=1.0, top_k=0, beta=0.0, learning_rate=RATE, lr_scheduler_type="constant",
        gradient_checkpointing=False, use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=load_model(policy, Runtime()),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[Clock()],
        **({"processing_class": load_tokenizer(policy)} | given),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    sampled = answers * logs[-1]["completions/mean_length"]  # it leaves out what tools wrote, as ``num_tokens`` does
    return {
        "seconds": min(seconds[1:]),
        "sampled": sampled,
        "held": logs[0]["num_tokens"] - sampled + written[0],
        "entropy": logs[0]["entropy"],
        "version": trl.__version__,
    }


if __name__ == "__main__":
    main(_measure)
