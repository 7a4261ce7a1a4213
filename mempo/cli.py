"""The command line. Commands import what they need when they run, so ``mempo --help`` answers at once."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from mempo.bench import bench
from mempo.datasets import datasets
from mempo.operations import operations
from mempo.retrieval import retrieval
from mempo.stages import Set, stages
from mempo.standalone import standalone
from mempo.studies import studies


class Commands(TyperGroup):
    """Errors that are messages for the user end the program with that message and exit code 1, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        from mempo.demo import StageFailed
        from mempo.services import ServiceError

        try:
            return super().invoke(ctx)
        except (ValueError, ServiceError, StageFailed, OSError) as error:
            typer.secho(f"mempo: {error}", fg="red", err=True)
            raise typer.Exit(1) from None
        except Exception as error:
            httpx: Any = sys.modules.get("httpx")
            server = os.environ.get("PREFECT_API_URL")
            if httpx is None or server is None or not isinstance(error, httpx.TransportError):
                raise
            typer.secho(
                f"mempo: Prefect at {server} does not answer ({error}): the same command goes on later",
                fg="red",
                err=True,
            )
            sys.stderr.flush()
            os._exit(1)  # else Prefect tries to tell its server of every event, one by one, for minutes


app = typer.Typer(
    cls=Commands,
    help="Train agents that write their own memory, by reinforcement learning (MemPO, arXiv 2603.00680).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(stages)
app.add_typer(studies)
app.add_typer(standalone)
app.add_typer(operations)
app.add_typer(retrieval)
app.add_typer(bench, name="bench")
app.add_typer(datasets, name="data")


@app.command()
def up(
    workers: Annotated[
        int | None, typer.Option(min=0, help="On the pool gpu; default: one a GPU, one without any.")
    ] = None,
) -> None:
    """Start servers and workers on this machine and deploy the flows. Whatever runs already stays.

    PREFECT_API_URL and MLFLOW_TRACKING_URI name servers that run elsewhere: then only the workers are started here.
    """
    from mempo.up import up as start

    for line in start(workers, status_line()):
        typer.echo(line)


@app.command()
def worker(
    pool: Annotated[str, typer.Argument(help="cpu or gpu.")],
    once: Annotated[bool, typer.Option("--once", help="Take what is there now, do it, and end.")] = False,
) -> None:
    """Be a worker of a pool, in the foreground: in a Slurm job, or under systemd. Ctrl-C ends it."""
    from mempo import local
    from mempo.up import worker_command

    local.settle()
    words = worker_command(pool, f"{pool}-{os.getpid()}") + ["--run-once"] * once
    os.execv(sys.executable, [sys.executable, "-m", *words])


@app.command()
def down() -> None:
    """Stop the workers and servers that were started from this project, with all that they run, and only those."""
    from mempo import local

    _tell(local.stop(), "nothing was running")


@app.command()
def ui(
    experiment: Annotated[str, typer.Option(help="MLflow experiment; an ablation's is mempo-ablation.")] = "mempo",
    view: Annotated[
        Literal["mempo", "ablation"], typer.Option(help="ablation: variants side by side, seeds as bands.")
    ] = "mempo",
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Start the MLflow server (unless MLFLOW_TRACKING_URI names one) and open the charts of all runs."""
    from mempo import local

    server = local.start_ui(say=status_line())
    from tasks.tracking import charts_url

    url = charts_url(server, experiment, view)
    typer.echo(f"{url}\nIt stays up until `mempo down`.")
    if browser and sys.stdout.isatty() and (sys.platform == "darwin" or os.environ.get("DISPLAY")):
        webbrowser.open(url)


@app.command()
def clean() -> None:
    """Stop the servers and remove state, runs, DVC outputs and caches."""
    from mempo import local

    _tell(local.clean(), "nothing to remove")


@app.command()
def doctor() -> None:
    """Look at this machine: what is there, what is missing, how to mend it. Exit code 1 where something blocks."""
    from mempo.doctor import report

    raise typer.Exit(1 if report() else 0)


@app.command()
def config(
    policy: Annotated[str | None, typer.Option(help="A name under `policies`.")] = None,
    settings: Set = None,
    params: Annotated[Path, typer.Option(help="The file with the parameters.")] = Path("params.yaml"),
) -> None:
    """Print the resolved configuration as YAML."""
    from ruamel.yaml import YAML

    from mempo.params import load_config

    values = load_config(params, settings or (), policy=policy).model_dump(mode="json")
    printer = YAML(typ="safe", pure=True)
    printer.default_flow_style = False
    printer.dump(values, sys.stdout)


def status_line() -> Callable[[str], None]:
    """Says how a start goes on: one line that is rewritten on a terminal, every tenth second elsewhere."""
    told: set[str] = set()

    def say(line: str) -> None:
        on_its_way = "..." in line
        if sys.stderr.isatty():
            typer.echo(f"\r{line}\x1b[K", nl=not on_its_way, err=True)
        elif line not in told and (not on_its_way or line.endswith("0 s")):
            told.add(line)
            typer.echo(line, err=True)

    return say


def _tell(lines: list[str], nothing: str) -> None:
    for line in lines or [nothing]:
        typer.echo(line)


if __name__ == "__main__":
    app()
