"""Commands that run the pipeline: its stages one by one as DVC calls them, all of it, and what asks the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

stages = typer.Typer()

Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting.")]
Root = Annotated[Path, typer.Option(help="Folder with params.yaml; data, checkpoints and results lie below it.")]
HERE = Path(".")


def ready(
    root: Path, settings: list[str] | None, policies: Sequence[str] = (), *, needs: Sequence[str] | None = None
) -> list[str]:
    """Check the settings, and that the data and the policies ``needs`` are there; then see that Prefect answers, and
    sign the command's flow runs.
    """
    from mempo import cli, local
    from mempo.config import UNTRAINED
    from mempo.params import load_config
    from mempo.workspace import Workspace

    names: list[str | None] = [name for name in policies if name not in UNTRAINED]
    for policy in names or [None]:
        load_config(root / "params.yaml", settings or (), policy=policy)
    if needs is not None:
        Workspace(root).require(*needs)
    local.start(say=cli.status_line())
    from tasks import flow_runs  # brings Prefect, which reads its environment once

    flow_runs.sign()
    return settings or []


@stages.command()
def prepare(settings: Set = None, root: Root = HERE) -> None:
    """Build documents and questions."""
    settings = ready(root, settings)
    from flows.prepare import prepare as flow

    found = flow(settings, str(root))
    sizes = ", ".join(f"{name} {split['num_questions']}" for name, split in found["splits"].items())
    typer.echo(f"{found['num_documents']} documents; questions: {sizes}")
    for name, split in found["splits"].items():
        for reason, count in split.get("left_out", {}).items():
            typer.echo(f"{name}: {count} rows left out: {reason}")
    for path, file in found.get("files", {}).items():
        typer.echo(f"{path}: {file['num_rows']} rows, {sum(file['rejected'].values())} rejected")


@stages.command()
def warmstart(settings: Set = None, root: Root = HERE) -> None:
    """Teach the starting policy the protocol by demonstrations. Goes on where it was stopped."""
    settings = ready(root, settings, needs=[])
    from flows.warmstart import warmstart as flow

    typer.echo(flow(settings, str(root)))


@stages.command()
def train(
    name: Annotated[str, typer.Argument(help="A name under `policies` in params.yaml.")] = "mempo",
    settings: Set = None,
    root: Root = HERE,
) -> None:
    """Rounds of rollout, score, advantage, update. Goes on where it was stopped."""
    settings = ready(root, settings, [name], needs=["warmstart"])
    from flows.train import train as flow

    typer.echo(flow(name, settings, str(root)))


@stages.command()
def evaluate(
    policies: Annotated[list[str] | None, typer.Argument(help="Default: the warm start and all policies.")] = None,
    suite: Annotated[
        str | None, typer.Option(help="A name under `suites` in params.yaml, see docs/evaluation.md.")
    ] = None,
    settings: Set = None,
    root: Root = HERE,
) -> None:
    """Ask every policy the same held-out questions, sampled and greedy; or a suite's agents its datasets."""
    if suite is not None:
        _evaluate_suite(suite, policies, settings, root)
        return
    settings = ready(root, settings, policies or (), needs=policies or ["warmstart"])
    from flows.evaluate import evaluate as flow
    from mempo import report
    from mempo.console import console

    console.print(report.table(flow(policies or None, settings, str(root))))


def _evaluate_suite(name: str, policies: Sequence[str] | None, settings: list[str] | None, root: Path) -> None:
    if policies:
        raise typer.BadParameter(f"{policies[0]}: the suite names its agents")
    from mempo.agents import read_suite

    for agent in read_suite(root, name, settings or ())[1]:
        if agent.policy.is_relative_to(root / "checkpoints") and not agent.policy.exists():
            raise FileNotFoundError(f"{agent.policy}: no such folder; train agent {agent.name}'s policy first")
    settings = ready(root, settings, needs=[])
    from flows.evaluate import suite as flow
    from mempo import suite_report
    from mempo.console import console

    for table in suite_report.render(flow(name, settings, str(root))):
        console.print(table)
    typer.echo(root / "evaluation" / name / "index.html")


@stages.command()
def report(root: Root = HERE) -> None:
    """Write report/index.html from DVC's outputs alone."""
    from mempo import local, report as reports

    local.settle()
    typer.echo(reports.build(root))


@stages.command()
def demo(
    settings: Set = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds of one policy, beside the DVC pipeline.")] = False,
    profile: Annotated[str | None, typer.Option(help="A folder below params/ in the place of the demo.")] = None,
) -> None:
    """The whole pipeline: prepare, warmstart, train, evaluate, report. Only what is out of date runs."""
    from mempo import demo as demos

    if quick and profile:
        raise typer.BadParameter("--quick and --profile do not go together")
    settings = ready(demos.PROFILES / profile if profile else HERE, settings)
    demos.quick(HERE, settings) if quick else demos.full(HERE, settings, profile)


@stages.command()
def ask(
    question: Annotated[str, typer.Argument(help="Best worded as in the data, see README.md.")],
    policy: Annotated[str, typer.Option(help="A policy's name, or a Hugging Face folder.")] = "mempo",
    greedy: Annotated[bool, typer.Option(help="The most probable token instead of a sampled one.")] = True,
    seed: Annotated[int, typer.Option(help="Of a sampled answer.")] = 0,
    settings: Set = None,
    root: Root = HERE,
) -> None:
    """Watch a trained policy answer one question, its memory turn by turn."""
    from rich.console import Console

    from mempo import asking, local
    from mempo.agents import policy_folder
    from mempo.params import load_config
    from mempo.workspace import Workspace

    local.settle()
    shared = load_config(root / "params.yaml", settings or ())
    folder, workspace = policy_folder(root, policy, shared), Workspace(root)
    workspace.require(*([policy] if folder == workspace.checkpoint(policy) else []))
    config = load_config(root / "params.yaml", settings or (), policy=policy if policy in shared.policies else None)
    corpus = workspace.data / "corpus.jsonl"
    Console().print(asking.render(asking.ask(question, folder, corpus, config, seed=seed, greedy=greedy)))


@stages.command("learn-check")
def learn_check(
    seed: Annotated[list[int], typer.Option(help="Each has its own warm start; may be repeated.")] = [0, 1, 2],  # noqa: B006
    settings: Set = None,
    root: Root = HERE,
) -> None:
    """Does training help, and does it need its memory? Several seeds on held-out questions; hours, and it resumes."""
    settings = ready(root, settings)
    from flows.learn import learn

    table = learn(seed, settings, str(root))
    path = root / "runs" / "learn" / "learn.csv"
    table.to_csv(path, index=False)
    columns = ["em", "em_greedy", "f1", "format_rate", "em_joint", "majority_joint"]
    typer.echo(table.groupby("policy", sort=False)[columns].mean().round(3).to_string())
    typer.echo(table.pivot(index="seed", columns="policy", values="em").round(3).to_string())
    typer.echo(f"each seed and figure: {path}")
