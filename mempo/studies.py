"""Commands of the ablation: run the matrix, read what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mempo.stages import HERE, Root, Set, ready

studies = typer.Typer()


@studies.command()
def ablate(
    quick: Annotated[bool, typer.Option("--quick", help="First mix and seed, six variants, eight rounds.")] = False,
    mix: Annotated[list[str] | None, typer.Option(help="Of ablate.mixes; may be repeated.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Any number; may be repeated.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Of ablate.variants; may be repeated.")] = None,
    settings: Set = None,
    root: Root = HERE,
) -> None:
    """Train and evaluate every variant of the memory reward, side by side. Only what is missing runs; it resumes."""
    from mempo.matrix import matrix, study_folder

    cells = matrix(root, settings or (), quick=quick, mixes=mix, seeds=seed, variants=variant)
    typer.echo(f"{len(cells)} cells; those that were made under the same settings stay as they are")
    ready(root, settings)
    from flows.ablate import ablate as flow

    failed = flow(settings, str(root), quick, mix, seed, variant)
    if len(failed) < len(cells):
        _show(study_folder(root, quick))
    typer.echo("charts: `mempo ui --experiment mempo-ablation --view ablation`")
    for label, error in failed.items():
        typer.secho(f"failed: {label}: {error}", fg="red", err=True)
    if failed:
        raise typer.Exit(1)


@studies.command()
def rescore(
    run: Annotated[Path, typer.Argument(help="A run folder, runs/<name>-<key>.", exists=True, file_okay=False)],
    score: Annotated[
        bool, typer.Option("--score", help="Score the stored trajectories anew where that is needed.")
    ] = False,
    settings: Set = None,
    root: Annotated[Path | None, typer.Option(help="The run's workspace; default: where its folder lies.")] = None,
) -> None:
    """Recompute a run's memory rewards under other settings, from its stored log-probabilities.

    What is told ends at the normalised memory advantage: weight, gate and unit_variance come after it.
    """
    import pandas as pd

    from mempo import local, rescore as rescoring
    from mempo.data import read_truth
    from mempo.params import ConfigError, overridden
    from mempo.workspace import Run, Workspace, recorded

    made = recorded(run)
    asked = overridden(made, settings or ())
    needed = rescoring.other_passes(made, asked)
    if needed and not score:
        raise ConfigError(f"{needed}; --score makes them")
    workspace = Workspace(root or run.resolve().parents[1])
    truth = rescoring.chains(read_truth(workspace.data / "truth.parquet"))
    found = {"as run": rescoring.summary(rescoring.rescore(run, made, truth))}
    if settings:
        scored = None
        if needed:
            local.settle()
            from tasks.rescoring import score_again

            scored = score_again(Run(run.name.rpartition("-")[0], run, made, workspace), asked)
        found[", ".join(settings)] = rescoring.summary(rescoring.rescore(run, asked, truth, scored))
    typer.echo(pd.DataFrame(found).round(3).to_string())
    if not truth:
        typer.echo(f"no truth.parquet in {workspace.data}: nothing is known of the memories' true quality")


@studies.command()
def compare(folder: Annotated[Path, typer.Argument(help="Of a study.")] = Path("ablation")) -> None:
    """The tables and the page of an ablation, from its folder alone: costs, EM, differences to the baselines."""
    _show(folder)


def _show(folder: Path) -> None:
    import pandas as pd

    from mempo import storage, study, study_report
    from mempo.console import console

    found = study.read(folder)
    for tables in study_report.render(found).values():
        for table in tables:
            console.print(table)
    ranks = study.mean_ranks(found.spent)
    console.print("mean rank of rollouts to target: " + ", ".join(f"{name} {rank:.1f}" for name, rank in ranks.items()))
    pd.concat(found.tables, names=["mix"]).to_csv(folder / "table.csv")
    with storage.whole_file(folder / "index.html") as path:
        path.write_text(study_report.page(found), encoding="utf-8")
    console.print(f"all figures: {folder / 'table.csv'}, with pictures: {folder / 'index.html'}")
