"""Documents in a JSON-lines file of ``{"id", "contents"}``; contents: a title, quoted or not, a line break, text."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from mempo.search import Document


def read_corpus(path: Path) -> list[Document]:
    """All documents. Raises ``ValueError`` naming the file and line of a row that is cut or lacks something."""
    return [found for _, found in rows(path)]


def rows(path: Path) -> Iterator[tuple[int, Document]]:
    """The byte at which each document's line begins, and the document; see ``read_corpus``."""
    start, empty = 0, True
    # Bytes, for a text line may end at other marks than "\n" (U+0085, U+2028) that a document is free to hold.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                empty = False
                yield start, _read(line, f"{path}, line {number}")
            start += len(line)
    if empty:
        raise ValueError(f"{path}: no documents in it")


class Corpus(Sequence[Document]):
    """The documents of a file, read when they are asked for; ``starts``: the byte at which each one's line begins."""

    def __init__(self, path: Path, starts: Sequence[int]) -> None:
        self._path, self._starts = path, starts
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> list[Document]: ...
    def __getitem__(self, place: int | slice) -> Document | list[Document]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        start = int(self._starts[place])
        end = self._bytes.find(b"\n", start)
        return _read(self._bytes[start : end if end >= 0 else None], f"{self._path}, byte {start}")


def from_contents(doc_id: str, contents: str) -> Document:
    """
    >>> from_contents("7", '"Ulm"\\nA city.')
    Document(doc_id='7', title='Ulm', text='A city.', quoted=True)
    """
    title, _, text = plain(contents).strip("\n").partition("\n")
    quoted = len(title) > 1 and title[0] == title[-1] == '"'
    return Document(doc_id, title[1:-1] if quoted else title, text, quoted)


def contents(document: Document) -> str:
    """As its row has them, line breaks at the ends apart."""
    mark = '"' if document.quoted else ""
    return f"{mark}{document.title}{mark}\n{document.text}"


def plain(text: str) -> str:
    """Half of a surrogate pair is JSON but no text, and no tokenizer takes it: "?" stands for it."""
    return text.encode(errors="replace").decode()


def _read(line: bytes, where: str) -> Document:
    try:
        row: dict[str, Any] = json.loads(line)
        doc_id, told = row["id"], row["contents"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: not a document: {error!r}") from None
    if not isinstance(doc_id, str | int) or not isinstance(told, str) or not told.strip():
        raise ValueError(f"{where}: a document needs an id and contents that are text")
    return from_contents(plain(str(doc_id)), told)
