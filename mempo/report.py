"""The report step: DVC's outputs become one self-contained page, its figures, metrics/train.json, plot tables."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mempo import figures, ridges, storage, viewer
from mempo.diagnoses.captions import CAPTIONS, label
from mempo.results import START, Results, controlled, differences, read, train_figures
from mempo.style import ordered
from mempo.workspace import Workspace

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

# Columns of plots/<policy>.csv, where the run has them.
PLOTTED = ("round", "em", "reward/mean", "dev/em_greedy", "format_rate", "turns", "response_tokens", "mem_reward/p05",
           "mem_reward/p25", "mem_reward/p50", "mem_reward/p75", "mem_reward/p95", "p_mem/p50", "p_full/p50",
           "mem_weight", "kept/nothing_mem", "group/flat_share", "approx_kl", "clip_fraction", "ratio_max", "grad_norm",
           "entropy", "mismatch/kl", "mismatch/ratio_max", "cpu_seconds")  # fmt: skip


def build(root: Path) -> Path:
    """Write report/, metrics/train.json and plots/ under ``root``; returns report/index.html.

    Raises ``FileNotFoundError`` naming the missing input and the command that makes it.
    """
    workspace, results = Workspace(root), read(root)
    trained = {name: train_figures(frame) for name, frame in results.rounds.items()}
    images = {name: png(figure) for name, figure in _figures(results).items()}
    page = _page(results, trained, images)
    with storage.whole_folder(workspace.report) as folder:
        (folder / "index.html").write_text(page, encoding="utf-8")
        (folder / "trajectories.html").write_text(_trajectories(root, results), encoding="utf-8")
        for name, image in images.items():
            (folder / f"{name}.png").write_bytes(image)
    storage.write_json(workspace.metrics / "train.json", trained)
    for name, frame in results.rounds.items():
        whole = frame.assign(cpu_seconds=figures.training_cpu_seconds(frame))
        with storage.whole_file(root / "plots" / f"{name}.csv") as path:
            whole[[column for column in PLOTTED if column in whole]].to_csv(path, index=False)
    return workspace.report / "index.html"


def table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """metrics/evaluation.json for a terminal: sampled EM with its standard error, greedy EM, F1 both ways, tokens."""
    count = max(int(row["num_questions"]) for row in metrics.values())
    layout: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}  # fits 80 columns
    shown = Table(title=f"{count} held-out questions", title_justify="left", **layout)
    shown.add_column("policy", no_wrap=True)
    for name in ("EM", "greedy", "F1", "greedy", "format", "turns", "tokens", "peak"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ordered(metrics):
        row = metrics[name]
        rates = [f"{row[key]:.3f}" for key in ("em_greedy", "f1", "f1_greedy", "format_rate")]
        sizes = [f"{row['turns']:.1f}", f"{row['total_tokens']:.0f}", f"{row['peak_tokens']:.0f}"]
        shown.add_row(name, f"{row['em']:.3f}±{_error(row):.3f}", *rates, *sizes)
    return shown


def columns(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table for a terminal, ``texts`` to the left and ``numbers`` to the right."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in texts:
        shown.add_column(name, no_wrap=True)
    for name in numbers:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def cells(table: Table) -> dict[str, Any]:
    """A terminal's table for a page; ``is_text`` tells of each column whether it stands to the left."""
    names, found = [column.header for column in table.columns], [column.cells for column in table.columns]
    is_text = [column.justify == "left" for column in table.columns]
    return {"title": table.title, "names": names, "rows": list(zip(*found, strict=True)), "is_text": is_text}


def _error(row: Mapping[str, float]) -> float:
    """Standard error of sampled EM, sqrt(p (1 - p) / n)."""
    return float((row["em"] * (1 - row["em"]) / row["num_questions"]) ** 0.5)


def _figures(results: Results) -> dict[str, Figure]:
    """By the name of their file in report/."""
    drawn = {
        "exact_match": figures.exact_match(results.evaluation, results.majority),
        "learning": figures.learning(results.rounds),
        "health": figures.health(results.rounds),
        "statuses": figures.statuses(results.rounds),
        "cost": figures.cost(results.rounds),
    }
    for name in results.with_memory:
        rewards = results.rewards[name]
        drawn[f"mem_reward_{name}"] = figures.mem_reward_box(rewards)
        drawn[f"mem_reward_by_turn_{name}"] = figures.mem_reward_by_turn(rewards)
        drawn[f"mem_reward_ridges_{name}"] = ridges.over_rounds(rewards)
        drawn[f"mem_reward_ridges_by_turn_{name}"] = ridges.by_turn(rewards)
        drawn[f"probes_{name}"] = figures.probes(rewards)
    return drawn


def png(figure: Figure) -> bytes:
    # The drawing program's version stays out: equal figures are equal files.
    file = BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def embedded(figure: Figure) -> str:
    """The picture as text that a page holds in itself."""
    return base64.b64encode(png(figure)).decode()


def pages() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Autoescape: questions, passages and model text are data, whatever they hold.
    return Environment(
        loader=PackageLoader("mempo"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _trajectories(root: Path, results: Results) -> str:
    """The viewer, a page of its own."""
    policies = {name: viewer.read(root, name, results.rewards[name]) for name in results.rewards}
    shown = [scene for by_round in policies.values() for of_round in by_round.values() for scene in of_round]
    page = pages()
    page.filters["visible"] = viewer.visible
    return page.get_template("trajectories.html").render(
        policies=policies, scale=viewer.scale_end(shown), count=viewer.SHOWN
    )


def _page(results: Results, trained: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    sampled = results.evaluation[~results.evaluation["greedy"]]
    counts = sampled.drop_duplicates("question_id").groupby("num_objectives").size()
    return (
        pages()
        .get_template("report.html")
        .render(
            names=ordered(results.metrics),
            start=START,
            metrics=results.metrics,
            errors={name: _error(row) for name, row in results.metrics.items()},
            counts=counts.to_dict(),
            by_objectives=sampled.groupby(["policy", "num_objectives"])["em"].mean().to_dict(),
            majority=results.majority,
            differences=differences(results.evaluation),
            trained=trained,
            phases=[phase for phase in figures.PHASES if any(phase in entry["seconds"] for entry in trained.values())],
            smooth=figures.SMOOTH,
            with_memory=results.with_memory,
            images={name: base64.b64encode(image).decode() for name, image in images.items()},
            excerpts=results.excerpts,
            diagnoses=results.diagnoses,
            controls={name: controlled(frame) for name, frame in results.rounds.items()},
            captions=CAPTIONS,
            label=label,
        )
    )
