"""Commands of retrieval: an index of a corpus, a server over it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

retrieval = typer.Typer()


def warn_of_host(host: str, risk: str) -> None:
    """Where others than this machine can reach ``host``, tell what they may do."""
    if host not in ("127.0.0.1", "localhost", "::1"):
        typer.secho(f"mempo: --host {host}: {risk}: keep it inside a network of your own", fg="yellow", err=True)


@retrieval.command()
def index(
    corpus: Annotated[Path, typer.Argument(help='JSON lines of {"id", "contents"}.', exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="The folder of the index; it appears whole.")],
    kind: Annotated[
        Literal["bm25", "dense", "hybrid"], typer.Option(help="hybrid: both, fused by reciprocal rank.")
    ] = "bm25",
    encoder: Annotated[str | None, typer.Option(help="A sentence-transformers folder or hub id.")] = None,
    query_prompt: Annotated[str | None, typer.Option(help='Put before each query; E5: "query: ".')] = None,
    document_prompt: Annotated[str | None, typer.Option(help='Put before each document; E5: "passage: ".')] = None,
) -> None:
    """Index a corpus once, for search.index and mempo serve-retriever."""
    from mempo.search import dense, index as indices

    if encoder is None and (query_prompt or document_prompt):
        raise ValueError("--query-prompt, --document-prompt: need an --encoder")
    spec = None
    if encoder is not None:
        spec = dense.EncoderSpec(model=encoder, query_prompt=query_prompt, document_prompt=document_prompt)
    made = indices.build(corpus, out, kind, spec)
    typer.echo(f"{out}: {made.kind}, {made.num_documents:,} documents of {corpus}, sha256 {made.sha256[:12]}")


@retrieval.command("serve-retriever")
def serve_retriever(
    source: Annotated[Path, typer.Argument(help="An index's folder, or a corpus to index in memory.", exists=True)],
    corpus: Annotated[Path | None, typer.Option(help="The index's corpus, where it has moved.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Documents where a request has no topk.")] = 3,
) -> None:
    """Answer searches over HTTP as Search-R1's retrieval server does, until Ctrl-C. For search.urls."""
    from mempo.search import index as indices, server

    warn_of_host(host, "whoever reaches it may search, with no key")
    if corpus is not None and source.is_file():
        raise ValueError(f"--corpus: {source} is a corpus itself")
    retriever = indices.open_index(source, corpus) if source.is_dir() else indices.in_memory(source)
    server.serve(retriever, host, port, top_k, typer.echo)
