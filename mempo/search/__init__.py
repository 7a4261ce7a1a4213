"""The search tool: documents in a JSON-lines file, a searcher over them, and the observation they become.

What a searcher returns is untrusted text; it is tokenised as plain text later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mempo.config import Search

NOTHING_FOUND = "No document found."


@dataclass(frozen=True, slots=True)
class Document:
    doc_id: str
    title: str
    text: str


class ToolError(RuntimeError):
    """The tool could not be asked: the trajectory is in no statistic. Finding nothing is an ordinary observation."""


class Searcher(Protocol):
    async def search(self, query: str) -> str:
        """The observation for ``query``. Raises ``ToolError``."""
        ...


def open_searcher(corpus: Path, config: Search) -> Searcher:
    """The searcher over the documents of ``corpus``."""
    from mempo.search.bm25 import BM25Searcher

    return BM25Searcher(read_corpus(corpus), top_k=config.top_k)


def read_corpus(path: Path) -> list[Document]:
    """Documents of a JSON-lines file of ``{"id", "contents"}``; contents: a title, quoted or not, a line break, text.

    Raises ``ValueError`` naming the file and line of a row that is cut or lacks something.
    """
    documents = [_document(path, number, line) for number, line in _lines(path)]
    if not documents:
        raise ValueError(f"{path}: no documents in it")
    return documents


def render(documents: Sequence[Document]) -> str:
    """An observation: title and text of each document, one below the other."""
    return "\n".join(f"{document.title}\n{document.text}" for document in documents) or NOTHING_FOUND


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    # Bytes, for a text line may end at other marks than "\n" (U+0085, U+2028) that a document is free to hold.
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _document(path: Path, number: int, line: bytes) -> Document:
    try:
        row = json.loads(line)
        doc_id, contents = row["id"], row["contents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: not a document: {error!r}") from None
    if not isinstance(doc_id, str | int) or not isinstance(contents, str) or not contents.strip():
        raise ValueError(f"{path}, line {number}: a document needs an id and contents that are text")
    # Half of a surrogate pair is JSON but no text, and no tokenizer takes it.
    contents = contents.encode(errors="replace").decode().strip("\n")
    title, _, text = contents.partition("\n")
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Document(str(doc_id), title, text)
