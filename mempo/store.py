"""Bytes under names on what fsspec reaches: a local folder, NFS, S3 and its like. The only file that imports fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from mempo.storage import whole_file


class Store:
    """A local folder, or the folder or prefix at a URL; credentials come from the environment alone.

    What is written is whole at once. A store that is away for a moment is asked again by its own client (S3: for about
    12 s). Every failure is an ``OSError`` naming the place; a missing extra or an unknown protocol a ``ValueError``.
    """

    def __init__(self, place: Path | str) -> None:
        self.place = str(place)
        self._files: Any
        if isinstance(place, Path):
            self._files, self._base = LocalFileSystem(), str(place.absolute())
            return
        try:
            self._files, self._base = url_to_fs(place, use_listings_cache=False)
        except ImportError as error:
            raise ValueError(f"storage.url: {place}: {error}") from None

    def read(self, name: str) -> bytes | None:
        """None where the store has no such file."""
        with self._told(name) as at:
            try:
                return bytes(self._files.cat_file(at))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._told(name) as at:
            if self._is_local:
                with whole_file(Path(at)) as temporary:
                    temporary.write_bytes(data)
            else:
                self._files.pipe_file(at, data)

    def create(self, name: str, data: bytes) -> bool:
        """False where the file is there already: of two that create it, one does (S3: ``If-None-Match``)."""
        with self._told(name) as at:
            if self._is_local:
                Path(at).parent.mkdir(parents=True, exist_ok=True)
            try:
                # pipe_file(mode="create") looks first and writes then on a local path: two would get through.
                with self._files.open(at, "xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
            return True

    def remove(self, name: str) -> None:
        with self._told(name) as at:
            self._files.rm_file(at)

    def upload(self, source: Path, name: str) -> None:
        with self._told(name) as at:
            if self._is_local:
                with whole_file(Path(at)) as temporary:
                    self._files.get_file(str(source), str(temporary))
            else:
                self._files.put_file(str(source), at)

    def download(self, name: str, target: Path) -> None:
        with self._told(name) as at:
            self._files.get_file(at, str(target))

    def names(self, below: str) -> list[str]:
        """Of all files below a folder of the store, relative to it and sorted."""
        with self._told(below) as at:
            prefix = f"{at.rstrip('/')}/"
            return sorted(str(found).removeprefix(prefix) for found in self._files.find(at))

    @property
    def _is_local(self) -> bool:
        return isinstance(self._files, LocalFileSystem)

    @contextmanager
    def _told(self, name: str) -> Iterator[str]:
        """Yields where ``name`` lies. Each store's library has errors of its own, which its users need not know."""
        try:
            yield f"{self._base.rstrip('/')}/{name}"
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.place}/{name}: {error}") from error
        except Exception as error:
            raise OSError(f"{self.place}/{name}: {error}") from error
