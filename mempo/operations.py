"""Commands for whoever looks after runs: how they stand, their MLflow pages made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mempo.stages import HERE, Root

operations = typer.Typer()


@operations.command()
def status(
    runs: Annotated[list[str] | None, typer.Argument(help="Run folders or policies; default: all under runs/.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
    root: Root = HERE,
) -> None:
    """How runs stand, from their files alone: step, rate, time left, EM, last errors. Asks no server."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from mempo import status as stands

    found = [stands.of(folder) for folder in stands.find(root, runs or [])]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 120)
    console.print(stands.table(found))
    for line in stands.notes(found):
        console.print(line, soft_wrap=True)


@operations.command("log-again")
def log_again(
    run: Annotated[Path, typer.Argument(help="A run folder, runs/<name>-<key>.")],
) -> None:
    """Make a run's MLflow pages from its files, in the store of MLFLOW_TRACKING_URI; what is there already stays."""
    from tasks import pages

    typer.echo(f"MLflow run {pages.log_again(run)}")
