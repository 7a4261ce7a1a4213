"""Whole files and whole folders: what exists is complete. Records as Parquet, everything else as JSON; never pickle."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from mempo import arrow

Record = TypeVar("Record")
M = TypeVar("M", bound=BaseModel)


# --- whole or not at all ---------------------------------------------------------------------------------------------


class Overtaken(OSError):
    """Another process began to write the same path: the half-written file of this one was taken away."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write the yielded path; at success it is flushed to the disk and becomes ``path``, at failure it goes.

    Of two writers of one path the later one goes on, the other raises ``Overtaken``. A killed write leaves
    ``.name.<hex>.tmp`` beside it: no reader looks at it, the next write removes it.
    """
    with _beside(path, Path.touch) as temporary:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    _flush(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill the yielded folder; at success it becomes ``path``, in one step where a former ``path`` stands."""
    with _beside(path, Path.mkdir) as temporary:
        yield temporary
        for item in [*temporary.rglob("*"), temporary]:
            _flush(item)
        try:
            os.replace(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _exchange(temporary, path)
    _flush(path.parent)


def replaceable(folder: Path, names: Collection[str]) -> bool:
    """Whether ``whole_folder`` would remove nothing but files and folders of these names."""
    return not folder.exists() or (folder.is_dir() and {item.name for item in folder.iterdir()} <= set(names))


def same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def is_leftover(name: str) -> bool:
    """Whether a file or folder of this name is, or was, one that somebody writes: no data."""
    return name.startswith(".") and name.endswith(".tmp")


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights, as transformers names them; a trainer's moments may lie beside them."""
    return sorted(folder.glob("model*.safetensors"))


@contextmanager
def _beside(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    _take_away_others(path)
    temporary = _temporary(path)
    make(temporary)
    try:
        yield temporary
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number in (errno.ENOENT, errno.ESTALE) and not temporary.exists():
            raise Overtaken(f"{path}: another process began to write it too, this one's half is gone") from error
        if number and not getattr(error, "filename", None):
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    finally:
        _remove(temporary)


def _error_number(error: Exception) -> int | None:
    """The system's own number, which safetensors puts into its text. No library names the file that it writes."""
    told = re.search(r"os error (\d+)", str(error))
    return error.errno if isinstance(error, OSError) else int(told[1]) if told else None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _take_away_others(path: Path) -> None:
    """What killed writes left, and what slower writers hold: renamed first, so that none is published half removed."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.tmp")
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        taken = _temporary(path)
        with suppress(FileNotFoundError):  # its writer, or a third one, was faster
            os.replace(path.with_name(name), taken)
            _remove(taken)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # what two remove at once; the next write removes what is left
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: POSIX rename cannot replace a folder that holds files, Linux can swap two in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), exchange):
            return
        if (code := ctypes.get_errno()) not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(new))
    # On NFS and elsewhere two renames; a kill between them leaves the former folder whole under its second name.
    aside = old.with_name(f".{old.name}.old.tmp")
    _remove(aside)
    os.replace(old, aside)
    try:
        os.replace(new, old)
    except OSError:
        os.replace(aside, old)
        raise
    _remove(aside)


def content_hash(path: Path) -> str:
    """sha256 of a file, or of a folder's relative names and contents; leftovers of killed writes do not count."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder")
    total = hashlib.sha256()
    for item in sorted(item for item in path.rglob("*") if item.is_file()):
        name = item.relative_to(path).as_posix()
        if not any(map(is_leftover, Path(name).parts)):
            total.update(f"{name}\0{content_hash(item)}\n".encode())
    return total.hexdigest()


# --- JSON ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Sorted keys. Raises ``ValueError`` for NaN and infinity, which JSON does not have."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, indent=2)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with whole_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Raises ``ValueError`` naming the file where it is not whole JSON."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"{path}: not whole JSON: {error}") from error


def read_as(kind: type[M], path: Path) -> M:
    """A model from a JSON file. Raises ``ValueError`` naming the file and the field that is not of its form."""
    return checked_as(kind, read_json(path), path)


def checked_as(kind: type[M], values: Any, path: Path) -> M:
    """A model from what stands, or is to stand, in ``path``; see ``read_as``."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(": ".join([str(path), *map(str, problem["loc"]), problem["msg"]])) from None


# --- records as Parquet ----------------------------------------------------------------------------------------------


def write_records(path: Path, records: Sequence[Any]) -> None:
    """One row a record, one column a field. No records make a file without columns: it reads as none of any class."""
    with whole_file(path) as temporary:
        arrow.write_parquet(temporary, records)


def read_records(path: Path, cls: type[Record]) -> list[Record]:
    """Raises ``ValueError`` naming the file where it is half-written, damaged, or holds other records."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return arrow.read_parquet(path, cls)
