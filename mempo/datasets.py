"""Commands for question files and corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mempo.sources import Layout

datasets = typer.Typer(help="Question files and corpora.", no_args_is_help=True)


@datasets.callback()
def _group() -> None:
    """A group of one command stays a group."""


@datasets.command()
def check(
    file: Annotated[str, typer.Argument(help="A path, or hf://datasets/OWNER/NAME/PATH.")],
    source: Annotated[Literal[Layout, "corpus"], typer.Option(help="The layout of its rows.")],
    rejected: Annotated[Path | None, typer.Option(help="Write every rejected row to this .jsonl file.")] = None,
) -> None:
    """Read a whole file as training would: counts, rejected rows by reason, answers that no gold paragraph holds."""
    from mempo.data import files
    from mempo.data.check import check_corpus, check_questions
    from mempo.data.questions import write_rejected

    path = files.local_file(file)
    found = check_corpus(path) if source == "corpus" else check_questions(path, source)
    for line in [*found.lines, *(f"  missing: {miss}" for miss in found.misses)]:
        typer.echo(line)
    if rejected is not None:
        write_rejected(rejected, found.rejected)
