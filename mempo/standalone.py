"""Commands that stand alone: they need a policy and a file, no pipeline and no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mempo.retrieval import warn_of_host
from mempo.stages import HERE, Root, Set

standalone = typer.Typer()
_REACHED = (
    "Share of the floor that a phase reaches: prompts, decoding, score, update; without it, as measured on a CPU."
)


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
    if out is not None and storage.same_file(out, trajectories):
        raise ValueError(f"--out {out}: that is the file with the trajectories")
    config = load_config(params, settings or ())
    rows = score_file.score_file(trajectories, model, config, reference=reference, limit=limit)
    if out is not None:
        storage.write_records(out, rows)
    Console().print(score_file.table(rows))
    if out is not None:
        typer.echo(f"{len(rows)} rows: {out}")


@standalone.command("import")
def import_transcripts(
    file: Annotated[Path, typer.Argument(help="Others' transcripts: a file that ends in .jsonl or .parquet.")],
    out: Annotated[Path | None, typer.Option(help="The folder of scores, trajectories and a page to read.")] = None,
    tags: Annotated[
        Literal["search-r1", "mem1"], typer.Option(help="mem1: <IS>, <query>, <info> as in MEM1's paper.")
    ] = "search-r1",
    normalizer: Annotated[Literal["auto", "squad", "unicode"], typer.Option(help="As reward.normalizer.")] = "auto",
    require_memory: Annotated[bool, typer.Option("--require-memory", help="As format.require_memory.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many transcripts.")] = None,
) -> None:
    """Transcripts of Search-R1, verl and others: cut into turns, scored anew, made readable. No model is needed.

    A line (or row) has golden_answers (or ground_truth, gts, reward_model.ground_truth) and one of

    sequences_str: prompt and response in one text

    response (or output), with prompt (or input) or question

    messages: [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}, ..]

    OUT/trajectories.jsonl is a file for mempo score. docs/transcripts.md has all the rules.
    """
    from rich.console import Console

    from mempo import transcript_report
    from mempo.transcript_import import read

    if out is not None:
        transcript_report.refuse_folder(out, file)
    found = read(file, tags, normalizer=normalizer, require_memory=require_memory, limit=limit)
    if out is not None:
        transcript_report.write(out, found, file.name)
    Console().print(transcript_report.table(found))
    if out is not None:
        typer.echo(f"{len(found)} transcripts: {out}/trajectories.html, scores.parquet, trajectories.jsonl")


@standalone.command()
def convert(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed Python package that holds one.")],
    folder: Annotated[Path, typer.Argument(help="Where the model goes; it appears whole.")],
) -> None:
    """A pretrained model from a GGUF file as a Hugging Face folder: its weights dequantised, in float32."""
    from mempo import pretrained

    typer.echo(pretrained.convert(pretrained.find_gguf(source), folder))


@standalone.command()
def serve(
    policy: Annotated[Path, typer.Argument(help="The policy: a Hugging Face folder.")],
    count: Annotated[int, typer.Option(min=1, help="How many servers; each takes GPUs of its own.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the first server; the others follow.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    settings: Set = None,
    params: Annotated[Path | None, typer.Option(help="A params.yaml to start from; without it, the defaults.")] = None,
) -> None:
    """Run vLLM servers for runtime.engine=vllm until Ctrl-C. A server that dies is started again.

    VLLM_API_KEY in the environment is asked of who samples. It does not guard the endpoints that change weights.
    """
    from mempo import local, serving
    from mempo.params import load_config

    runtime = load_config(params, settings or ()).runtime
    warn_of_host(host, "whoever reaches it may load weights and run any method of vLLM's workers, with no key")
    with serving.until_signal() as stop:
        logs = local.state_folder() / "logs"
        serving.serve(policy, runtime, logs, count=count, host=host, port=port, say=typer.echo, stop=stop)


@standalone.command()
def plan(
    gpu_memory: Annotated[float, typer.Option(min=1, help="GiB of one device.")] = 80,
    tflops: Annotated[float, typer.Option(min=0.001, help="Matrix products of one device, TFLOP/s.")] = 989,
    gbps: Annotated[float, typer.Option(min=0.001, help="Memory bandwidth of one device, GB/s.")] = 3350,
    reached: Annotated[list[str] | None, typer.Option(metavar="PHASE=SHARE", help=_REACHED)] = None,
    settings: Set = None,
    root: Root = HERE,
) -> None:
    """Does it fit, and what does a round cost? From the settings alone. Exit code 1 where it does not fit.

    The device is NVIDIA's H100 SXM unless told: 80 GB, and bfloat16 without sparsity as its data sheet has it.
    """
    from rich.console import Console

    from mempo import floor, plan as plans
    from mempo.params import load_config
    from mempo.vllm_program import GIB

    memory = gpu_memory * GIB
    made = plans.plan(load_config(root / "params.yaml", settings or ()), memory)
    device = floor.Device(tflops * 1e12, gbps * 1e9)
    Console().print(*plans.tables(made, memory, device, floor.reached(reached or ())), sep="\n")
    for problem in made.problems:
        typer.secho(problem, fg="red", err=True)
    raise typer.Exit(1 if made.problems else 0)
