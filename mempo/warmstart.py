"""The warm start: supervised fine-tuning on demonstrations, so that reinforcement learning finds the protocol known."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mempo import lora, scratch, storage
from mempo.config import Config, Optim
from mempo.data.geo import build_world
from mempo.data.lessons import Teacher
from mempo.engines.loader import load_tokenizer
from mempo.trainers import Trainer, open_trainer
from mempo.workspace import Run


def warm_start(run: Run, *, progress: Callable[..., None] | None = None) -> Path:
    """Train the starting policy and publish it; returns its folder, ``checkpoints/warmstart/final``.

    Every ``save_every`` steps the trainer's whole state goes to the run folder. A killed warm start goes on from there
    and ends in the same bits, since the lessons of a step depend on its number alone.
    """
    config = run.config
    num_steps = config.warmstart.num_steps
    done, folder = last_saved(run)
    # A policy of the hub is no folder yet: it is written out even where no step is asked.
    if done < num_steps or not folder.is_dir():
        runtime = config.runtime.model_copy(update={"num_threads": config.warmstart.num_threads})
        trainer = open_trainer(folder, optim(config), config.loss, runtime)
        teacher = Teacher(load_tokenizer(folder), build_world(config.data), config)
        for step in range(done, num_steps):
            stats = trainer.step(teacher.lessons(step), objective="sft")
            if progress:
                progress(step + 1, loss=stats["loss"])
            if (step + 1) % config.warmstart.save_every == 0 or step + 1 == num_steps:
                folder = save(trainer, run.folder, step + 1)
        if not folder.is_dir():
            folder = save(trainer, run.folder, 0)
        trainer.close()
    published = run.workspace.checkpoint("warmstart")
    with storage.whole_folder(published) as temporary:
        # Without the optimiser's state: reinforcement learning begins with moments of its own.
        shutil.copytree(folder, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns("trainer.*"))
    return published


def last_saved(run: Run) -> tuple[int, Path]:
    """Steps done so far and the folder that has them; the untrained policy where there are none."""
    saved = sorted(run.folder.glob("step_*"))
    if saved:
        return int(saved[-1].name.removeprefix("step_")), saved[-1]
    if run.config.model.path:
        if lora.is_adapter(run.config.model.path):
            raise ValueError(f"model.path: {run.config.model.path} holds a LoRA adapter; merge it into its base first")
        return 0, Path(run.config.model.path)
    folder = run.folder / "untrained"
    if not folder.exists():
        scratch.build_policy(run.config.model, run.workspace.data / "tokenizer.json", folder, run.config.warmstart.seed)
    return 0, folder


def save(trainer: Trainer, run_folder: Path, num_steps: int) -> Path:
    """The trainer's state after ``num_steps`` steps; former ones go once it is whole."""
    former = list(run_folder.glob("step_*"))
    folder = run_folder / f"step_{num_steps:06d}"
    trainer.save(folder, policy_version=0)
    for old in former:
        shutil.rmtree(old)
    return folder


def optim(config: Config) -> Optim:
    rates = config.warmstart
    return Optim(learning_rate=rates.learning_rate, warmup_steps=rates.warmup_steps, decay_steps=rates.num_steps)
