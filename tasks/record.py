"""What a run leaves behind: figures to MLflow and Prefect round by round, outputs to DVC at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run

from mempo import diagnoses, figures as drawing, lora, rounds, storage, viewer
from mempo.engines.loader import load_tokenizer
from mempo.rescore import chains
from mempo.samples import TurnReward
from mempo.workspace import Run
from tasks import traces, tracking
from tasks.diagnose import controls_table
from tasks.round import PROCESS, Figures, remake, truth

TRACED = 4  # trajectories of a round with pictures
DIAGNOSED = 8  # last rounds whose diagnoses the report shows together
STEPS = ("rollout", "score", "advantage", "diagnose", "update", "check")
PREFIXES = {"diagnose": "control/", "check": "dev/"}
SHOWN = (
    *("em", "reward/mean", "format_rate", "turns", "dev/em_greedy"),
    *("mem_reward/p05", "mem_reward/p50", "mem_reward/p95", "p_mem/mean", "p_full/mean"),
    *("diagnose/truth/correlation", "diagnose/filter/flips_none"),
    *("approx_kl", "clip_fraction", "grad_norm", "entropy", "mismatch/kl"),
)


@contextmanager
def tracked(run: Run, tags: Mapping[str, str]) -> Iterator[tracking.TrackedRun]:
    """The MLflow run of ``run``: one flat run, resumed by the id in its folder, ended as what it came to."""
    opened = tracking.open_tracking(
        run.name,
        run.config.model_dump(mode="json", exclude={"policies", "ablate"}),
        _provenance(run) | dict(tags),
        run.folder / "mlflow.json",
        experiment=run.config.tracking.experiment,
    )
    try:
        yield opened
    except KeyboardInterrupt:
        tracking.close(opened, "KILLED")
        raise
    except Exception:
        tracking.close(opened, "FAILED")
        raise
    tracking.close(opened)


def _provenance(run: Run) -> dict[str, str]:
    """Where a run's figures come from: tags by which MLflow's table is searched and its charts are grouped."""
    made = storage.read_json(run.config_file)
    return {
        "policy": run.name,
        "run_folder": run.folder.name,
        "context": run.config.rollout.context,
        "seed": str(run.config.loop.seed),
        "config_hash": run.folder.name.rpartition("-")[2],
        "data_hash": str(made["inputs"]["data"])[:12],
        "git_commit": made["versions"].get("commit", "unknown"),
        "flow_run_id": str(flow_run.id or ""),
    }


@task(task_run_name="log {round_index}", persist_result=False)
def log_round(run: Run, opened: tracking.TrackedRun, round_index: int) -> None:
    """Distributions of mem_reward to MLflow, a table artifact to Prefect; then old policies leave the run folder."""
    started = time.perf_counter()
    missed = range(opened.last_logged + 1, round_index + 1)
    tracking.catch_up(opened, [(i, round_figures(run, i), _finished_ms(run, i)) for i in missed])
    last = round_index == run.config.loop.num_rounds - 1
    if last or (round_index + 1) % run.config.tracking.figure_every == 0:
        _log_pictures(run, opened, round_index)
    found = round_figures(run, round_index)
    create_table_artifact(
        key=f"{run.name.replace('_', '-')}-round-{round_index:04d}",
        table=[{"figure": name, "value": found[name]} for name in SHOWN if name in found],
        description=f"{run.name}, round {round_index}",
    )
    _prune(run, round_index)
    logged = run.round(round_index) / "log.json"
    if not logged.exists():
        seconds = time.perf_counter() - started
        storage.write_json(logged, {"seconds": seconds, "finished": time.time(), "process": PROCESS})


def _log_pictures(run: Run, opened: tracking.TrackedRun, round_index: int) -> None:
    table = pd.DataFrame([{"round": i} | round_figures(run, i) for i in range(round_index + 1)])
    columns = ["round", *(name for name in SHOWN if name in table)]
    tracking.log_table(opened, "rounds", {name: table[name].tolist() for name in columns})
    rewards = rewards_table(run, round_index)
    tracking.log_figure(opened, drawing.mem_reward_box(rewards), "mem_reward_box.png")
    tracking.log_figure(opened, drawing.mem_reward_by_turn(rewards), "mem_reward_by_turn.png")
    for traced in _traces(run, round_index):
        tracking.log_trace(opened, traced, _finished_ms(run, round_index))


def _traces(run: Run, round_index: int) -> list[traces.Trace]:
    """A few of the round's trajectories, one of each kind that the report's viewer shows."""
    made = rounds.read_round(run.round(round_index))
    scenes = viewer.scenes(
        made.trajectories, made.questions, made.scores, made.table, run.config.mem_reward, count=TRACED
    )
    tokenizer = load_tokenizer(run.policy(0))
    prompts = [[tokenizer.decode(view.turn.prompt_ids) for view in scene.turns] for scene in scenes]
    return [traces.trace(scene, texts, round_index) for scene, texts in zip(scenes, prompts, strict=True)]


def rewards_table(run: Run, last_round: int) -> pd.DataFrame:
    """Every turn's reward of rounds 0 to ``last_round``, one row a turn."""
    files = [run.round(i) / "rewards.parquet" for i in range(last_round + 1)]
    tables = [rounds.reward_frame(storage.read_records(file, TurnReward)) for file in files]
    return pd.concat([table.assign(round=i) for i, table in enumerate(tables)], ignore_index=True)


def round_figures(run: Run, round_index: int) -> Figures:
    """All figures of a finished round, seconds per step included, under the names MLflow shows."""
    found: Figures = {}
    for name in STEPS:
        if made := _entry(run, round_index, name):
            prefix = PREFIXES.get(name, "")
            found |= {f"{prefix}{key}": value for key, value in made["figures"].items()}
            found |= {f"time/{name}_s": made["seconds"], f"cpu/{name}_s": made["cpu_seconds"]}
    return found


def _finished_ms(run: Run, round_index: int) -> int:
    # The time of the file, not of the call: a point that is logged twice is then the same point.
    return int((run.round(round_index) / "update.json").stat().st_mtime * 1000)


def _prune(run: Run, round_index: int) -> None:
    """Keep the policies that a resume, the best dev check or ``keep_every`` needs; the rest is scratch."""
    every = run.config.loop.keep_every
    keep = {round_index, round_index + 1, best_version(run, round_index)}
    for version in range(1, round_index):
        if version not in keep and not (every and version % every == 0):
            shutil.rmtree(run.policy(version), ignore_errors=True)


def best_version(run: Run, last_round: int) -> int:
    """The policy version with the best greedy dev score so far, the latest of equals; 0 where none was checked."""
    best, version = float("-inf"), 0
    for index in range(last_round + 1):
        checked = _entry(run, index, "check")
        if checked and checked["figures"]["em_greedy"] >= best:
            best, version = checked["figures"]["em_greedy"], index + 1
    return version


@task(persist_result=False)
def publish(run: Run) -> None:
    """What DVC keeps: ``checkpoints/<name>/`` (final, best, kept rounds) and ``results/<name>/`` (figures and rows)."""
    workspace, last = run.workspace, run.config.loop.num_rounds - 1
    kept = {"final": last + 1, "best": best_version(run, last) or last + 1}
    if every := run.config.loop.keep_every:
        kept |= {f"round_{version:04d}": version for version in range(every, last + 1, every)}
    with storage.whole_folder(workspace.checkpoint(run.name).parent) as folder:
        for label, version in kept.items():
            copy_policy(remake(run, version), folder / label)
    with storage.whole_folder(workspace.results(run.name)) as folder:
        by_round = [{"round": i} | round_figures(run, i) | round_clock(run, i) for i in range(last + 1)]
        pd.DataFrame(by_round).to_parquet(folder / "rounds.parquet")
        rewards_table(run, last).to_parquet(folder / "rewards.parquet")
        last_rounds = [rounds.read_round(run.round(i)) for i in range(max(0, last + 1 - DIAGNOSED), last + 1)]
        storage.write_json(folder / "diagnoses.json", diagnoses.summary(last_rounds, run.config, chains(truth(run))))
        if not (controls := controls_table(run, last)).empty:
            controls.to_parquet(folder / "controls.parquet")
        shutil.copyfile(run.config_file, folder / "config.json")
        (folder / "trajectories").mkdir()
        for index in {0, last}:
            for name in ("rollouts", "questions", "scores"):
                source = run.round(index) / f"{name}.parquet"
                shutil.copyfile(source, folder / "trajectories" / f"{name}_{index:04d}.parquet")


def copy_policy(source: Path, target: Path) -> None:
    """The policy without its optimiser's moments: what runs it needs no more. An adapter is merged into its base."""
    if lora.is_adapter(source):
        lora.write_merged(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("trainer.safetensors"))


def round_clock(run: Run, round_index: int) -> Figures:
    """Wall clock of a round, from the end of the one before, and of its steps; the rest is orchestration.

    A round that a kill cut in two has no wall.
    """
    made = {name: entry for name in (*STEPS, "log") if (entry := _entry(run, round_index, name))}
    if len({entry["process"] for entry in made.values()}) > 1:
        return {}
    before = _entry(run, round_index - 1, "log")
    follows = before is not None and before["process"] == made["log"]["process"]
    began = before["finished"] if before and follows else made["rollout"]["started"]
    work = sum(entry["seconds"] for name, entry in made.items() if name != "log")
    return {"wall_s": made["log"]["finished"] - began, "work_s": work}


def _entry(run: Run, round_index: int, name: str) -> dict[str, Any] | None:
    path = run.round(round_index) / f"{name}.json"
    return storage.read_json(path) if path.exists() else None
