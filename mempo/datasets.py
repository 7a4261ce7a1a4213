"""Commands for question files and corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mempo.choices import Layout

datasets = typer.Typer(help="Question files and corpora.", no_args_is_help=True)


@datasets.command()
def check(
    file: Annotated[str, typer.Argument(help="A path, or hf://datasets/OWNER/NAME/PATH.")],
    source: Annotated[Literal[Layout, "corpus"], typer.Option(help="The layout of its rows.")],
    rejected: Annotated[Path | None, typer.Option(help="Write every rejected row to this .jsonl file.")] = None,
) -> None:
    """Read a whole file as training would: counts, rejected rows by reason, answers that no gold paragraph holds."""
    from mempo import storage
    from mempo.data import files
    from mempo.data.check import check_corpus, check_questions
    from mempo.data.questions import write_rejected

    path = files.local_file(file)
    if rejected is not None and storage.same_file(rejected, path):
        raise ValueError(f"--rejected {rejected}: is the file that is read")
    found = check_corpus(path) if source == "corpus" else check_questions(path, source)
    for line in [*found.lines, *(f"  missing: {miss}" for miss in found.misses)]:
        typer.echo(line)
    if rejected is not None:
        write_rejected(rejected, found.rejected)


@datasets.command()
def recall(
    folder: Annotated[Path, typer.Argument(help="A dataset folder that mempo prepare made of question files.")],
    top_k: Annotated[int, typer.Option(min=1, max=1000, help="So many documents for each question.")] = 5,
    index: Annotated[Path | None, typer.Option(help="An index of its corpus; without it, BM25 in memory.")] = None,
) -> None:
    """How many of the questions' gold paragraphs are among the best documents for the question's own text."""
    from rich.console import Console

    from mempo.data import recall as recalls

    Console().print(recalls.table(recalls.measure(folder, top_k, index), top_k))
