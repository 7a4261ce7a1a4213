"""Commands that measure this machine."""

from __future__ import annotations

import typer

from mempo.stages import HERE, Root, Set

bench = typer.Typer(help="What this machine can do.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """A group of one command stays a group."""


@bench.command("floor")
def floor(settings: Set = None, root: Root = HERE) -> None:
    """Measured rates of this CPU, and what a round of these settings costs on it. No weights are read."""
    from rich.console import Console

    from mempo import cost, floor as floors
    from mempo.params import load_config

    config = load_config(root / "params.yaml", settings or ())
    import torch

    torch.set_num_threads(config.runtime.num_threads)
    Console().print(floors.table(cost.phases(config), floors.measure(), floors.REACHED))
