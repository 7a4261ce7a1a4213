"""A look at known good and bad memories every few rounds. It changes nothing that training reads."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from mempo import controls, history, rounds, storage
from mempo.records import Sample, Trajectory
from mempo.trainers import open_trainer
from mempo.workspace import Run
from tasks import engines, shards
from tasks.parts import Figures, policy_engine
from tasks.round import remake, step, truth


@step
def _diagnose(run: Run, round_index: int) -> Figures:
    return shards.figures(run, round_index, "diagnose", lambda: diagnose_round(run, round_index))


def diagnose_round(run: Run, round_index: int) -> Figures:
    """Controls of the round's memories, written to ``controls.parquet``, and the gradients of both signals."""
    folder, config = run.round(round_index), run.config
    records = rounds.read_round(folder)
    policy = remake(run, round_index)
    known = truth(run)
    figures, rows = controls.measure(policy_engine(policy, run), records, config, known, round_index=round_index)
    storage.write_records(folder / "controls.parquet", rows)
    return figures | _alignment(run, policy, round_index, records.trajectories)


def _alignment(run: Run, policy: Path, round_index: int, trajectories: list[Trajectory]) -> Figures:
    """Gradients of the outcome's and of the memory's part of the loss on the chosen turns' ``<mem>`` tokens."""
    config = run.config
    built = storage.read_records(run.round(round_index) / "samples.parquet", Sample)
    outcome, memory = controls.signals(built, trajectories, config, round_index)
    if not outcome or not config.uses_memory_reward:
        return {}
    loss = config.loss.model_copy(update={"kl_coef": 0.0})  # the KL term would pull both the same way
    temperature, adapter = config.rollout.temperature, config.lora
    engines.sleep()
    trainer = open_trainer(policy, config.optim, loss, config.runtime, temperature=temperature, adapter=adapter)
    found = trainer.alignment(outcome, memory)
    trainer.close()
    names = {"cosine": "cosine", "first_norm": "outcome_norm", "second_norm": "memory_norm"}
    return {f"gradient/{names[name]}": value for name, value in found.items()}


def diagnose(run: Run, round_index: int) -> None:
    """The controls of rounds 0, ``diagnose.every``, twice that, and so on, where the context holds a memory."""
    if "diagnose" in history.steps_of(run.config, round_index):
        _diagnose(run, round_index)


def controls_table(run: Run, last_round: int) -> pd.DataFrame:
    """The controls of rounds 0 to ``last_round``, one row a memory; empty where none were made."""
    files = {i: run.round(i) / "controls.parquet" for i in range(last_round + 1)}
    tables = [pd.read_parquet(file).assign(round=i) for i, file in files.items() if file.exists()]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
