"""What ``mempo import`` leaves: a table, scores and trajectories as files, a page (docs/transcripts.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mempo import storage
from mempo.asking import plain
from mempo.excerpts import Piece, pieces
from mempo.report import pages
from mempo.tags import ParsedTurn
from mempo.transcript_import import ImportedRow, Transcript
from mempo.viewer import visible

MAX_SHOWN = 100  # transcripts of the table and of the page
MAX_CHARS = 20_000  # of one text on the page
FILES = {"scores.parquet", "trajectories.jsonl", "trajectories.html"}


@dataclass(frozen=True, slots=True)
class TurnShown:
    pieces: list[Piece]
    observation: str | None
    parsed: ParsedTurn


def write(folder: Path, transcripts: Sequence[Transcript], source: str) -> None:
    """``scores.parquet``, ``trajectories.jsonl`` for ``mempo score``, ``trajectories.html``; the folder appears whole.

    Raises ``ValueError`` where ``folder`` holds something else, which it would replace.
    """
    with storage.whole_folder(folder) as temporary:
        storage.write_records(temporary / "scores.parquet", [transcript.row for transcript in transcripts])
        with (temporary / "trajectories.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(_line(transcript) for transcript in transcripts)
        (temporary / "trajectories.html").write_text(page(transcripts, source), encoding="utf-8")


def refuse_folder(folder: Path, path: Path) -> None:
    """Raises ``ValueError`` where writing ``folder`` would remove something that no import made, or ``path`` itself."""
    if not storage.replaceable(folder, FILES):
        raise ValueError(f"--out {folder}: holds something that is no import, and would be replaced")
    if path.resolve().parent == folder.resolve():
        raise ValueError(f"--out {folder}: {path} lies in it, and would be removed")


def _line(transcript: Transcript) -> str:
    record = transcript.record
    values = {
        "id": record.id,
        "sample_index": transcript.row.sample_index,
        "question": record.question,
        "golden_answers": record.golden_answers,
        "turns": [turn.model_dump(exclude_none=True) for turn in record.turns],
    }
    return json.dumps(values, ensure_ascii=False) + "\n"


def page(transcripts: Sequence[Transcript], source: str) -> str:
    """One self-contained page without scripts; texts of the file are escaped, and cut after ``MAX_CHARS``."""
    html = pages()
    html.filters["visible"] = visible
    html.filters["short"] = _short
    shown = [(transcript, _turns(transcript)) for transcript in transcripts[:MAX_SHOWN]]
    return html.get_template("transcripts.html").render(shown=shown, count=len(transcripts), source=source)


def _turns(transcript: Transcript) -> list[TurnShown]:
    return [
        TurnShown(pieces(turn.response, number), turn.observation, parsed)
        for number, (turn, parsed) in enumerate(zip(transcript.record.turns, transcript.parsed, strict=True), start=1)
    ]


def _short(text: str) -> str:
    more = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} … {more} more characters" if more > 0 else text


def table(transcripts: Sequence[Transcript]) -> Table:
    """The first ``MAX_SHOWN`` transcripts and the means of all; texts of the file are printed as plain text."""
    rows = [transcript.row for transcript in transcripts]
    reported = [row.reported for row in rows if row.reported is not None]
    shown = Table(caption=_caption(rows), caption_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    shown.add_column("transcript", overflow="fold", min_width=12)
    shown.add_column("answer", overflow="ellipsis", no_wrap=True, max_width=24)
    names = ["EM", "EM mean", "F1", "format", "turns", *["theirs"] * bool(reported)]
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("status", no_wrap=True)
    for row in rows[:MAX_SHOWN]:
        theirs = ["-" if row.reported is None else f"{row.reported:.3g}"] * bool(reported)
        shown.add_row(
            Text(plain(f"{row.id}/{row.sample_index}")),
            Text("-" if row.answer is None else plain(row.answer)),
            *(f"{value:.3g}" for value in (row.em, row.em_mean, row.f1, row.format, row.turns)),
            *theirs,
            row.status,
        )
    shown.add_section()
    columns = [[float(getattr(row, name)) for row in rows] for name in ("em", "em_mean", "f1", "format", "turns")]
    means = [f"{fmean(column):.3f}" for column in [*columns, *[reported] * bool(reported)]]
    shown.add_row(f"mean of {len(rows)}", "", *means, "", style="bold")
    return shown


def _caption(rows: Sequence[ImportedRow]) -> str:
    counts = Counter(row.status for row in rows)
    parts = [f"{len(rows)} transcripts of {len({row.id for row in rows})} questions"]
    parts += [f"{count} {status}" for status, count in counts.most_common()]
    parts += [f"the first {MAX_SHOWN} shown, --out has all"] if len(rows) > MAX_SHOWN else []
    return "; ".join(parts)
