"""Commands that stand alone: they need a policy and a file, no pipeline and no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mempo.stages import Set

standalone = typer.Typer()


@standalone.command()
def score(
    trajectories: Annotated[Path, typer.Argument(help="A file that ends in .jsonl or .parquet.")],
    model: Annotated[Path, typer.Option(help="The policy: a Hugging Face folder.")],
    settings: Set = None,
    params: Annotated[Path | None, typer.Option(help="A params.yaml to start from; without it, the defaults.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every row and its tokens to this .parquet file.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many trajectories.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Policy of scoring.full_scorer=reference.")] = None,
) -> None:
    """P_mem, P_full and the memory reward of anyone's trajectories, turn by turn.

    A line (or row) is a trajectory: id, question, golden_answers (a string, a list of strings = one an objective, or a
    list of lists of aliases), and one of

    turns: [{"response": "<mem>..</mem><think>..</think><search>..</search>", "observation": ".."}, ..]

    messages: [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}, ..]

    prompt_ids: [..] with turns: [{"response_ids": [..], "observation_ids": [..], "marks": [0, 1, ..]}, ..]

    Rows of one id are samples of one question (sample_index, else in order). docs/score.md has the whole schema.
    """
    from rich.console import Console

    from mempo import score_file, storage
    from mempo.params import load_config

    if out is not None and (out.suffix != ".parquet" or out.is_dir()):
        raise ValueError(f"--out {out}: expected a file that ends in .parquet")
    if out is not None and out.exists() and trajectories.exists() and out.samefile(trajectories):
        raise ValueError(f"--out {out}: that is the file with the trajectories")
    config = load_config(params, settings or ())
    rows = score_file.score_file(trajectories, model, config, reference=reference, limit=limit)
    if out is not None:
        storage.write_records(out, rows)
    Console().print(score_file.table(rows))
    if out is not None:
        typer.echo(f"{len(rows)} rows: {out}")
