"""Records as columns of a Parquet file and back; the schema comes from the type hints of a dataclass.

Columns are built one by one, so that the inner loops run in Arrow: 2,048 trajectories take a second, and 45 by way of
``dataclasses.asdict``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

Record = TypeVar("Record")
_SCALARS: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def write_parquet(path: Path, records: Sequence[Any]) -> None:
    table = pa.table({})
    if records:
        cls = type(records[0])
        table = pa.Table.from_arrays(to_arrow(records, cls).flatten(), schema=schema_of(cls))
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def read_parquet(path: Path, cls: type[Record]) -> list[Record]:
    """Raises ``ValueError`` naming the file where it is half-written, damaged, or holds other records."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file: {error}") from error
    if not table.num_columns:
        return []
    if not table.schema.equals(schema_of(cls)):
        raise ValueError(f"{path}: not {cls.__name__} records: columns {table.schema.names}")
    try:
        return [record for batch in table.to_batches() for record in from_arrow(batch.to_struct_array(), cls)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Each row of anyone's Parquet file as what reads it into plain Python, of ``columns`` those that are there.

    A row that cannot be read raises ``ValueError`` when it is; a damaged file raises it naming the file.
    """
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        wanted = [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=64, columns=wanted):
            for index in range(batch.num_rows):
                yield partial(_plain_row, batch.slice(index, 1))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file: {error}") from error


def _plain_row(row: pa.RecordBatch) -> dict[str, Any]:
    try:
        return {name: row.column(index).to_pylist()[0] for index, name in enumerate(row.schema.names)}
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"not readable: {error}") from error


def schema_of(cls: type) -> pa.Schema:
    """The Arrow schema of a record class, from its type hints; a field is nullable where its type admits ``None``."""
    return pa.schema(_arrow_fields(cls))


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _arrow_fields(cls: type) -> list[pa.Field]:
    return [pa.field(name, _arrow_type(hint), nullable=_optional(hint)) for name, hint in _hints(cls).items()]


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _required(hint: Any) -> Any:
    """``T`` out of ``T | None``; the type of its values out of a ``Literal``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return type(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Literal else hint


def _arrow_type(hint: Any) -> pa.DataType:
    hint = _required(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return pa.struct(_arrow_fields(typing.cast(type, hint)))
    # A span is stored as a list of two: Parquet cannot read back a nullable fixed-size pair inside a struct.
    return pa.list_(pa.field("element", _arrow_type(typing.get_args(hint)[0]), nullable=False))


def to_arrow(values: Sequence[Any], hint: Any) -> pa.Array:
    """One array of ``values``, all of type ``hint``. Raises ``ValueError`` for a missing value in a required field."""
    hint = _required(hint)
    inner = typing.get_args(hint)[:1]
    if is_dataclass(hint):
        cls = typing.cast(type, hint)
        columns = [to_arrow([getattr(value, name) for value in values], kind) for name, kind in _hints(cls).items()]
        return pa.StructArray.from_arrays(columns, fields=_arrow_fields(cls))
    if inner and is_dataclass(inner[0]):
        offsets = [0]
        for value in values:
            offsets.append(offsets[-1] + len(value))
        flat = to_arrow([item for value in values for item in value], inner[0])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=_arrow_type(hint))
    return pa.array(values, _arrow_type(hint))


def from_arrow(array: pa.Array, hint: Any) -> list[Any]:
    """The values of ``array`` as ``hint`` says; the records' own checks run again."""
    hint = _required(hint)
    if is_dataclass(hint):
        cls = typing.cast(Callable[..., Any], hint)
        columns = [from_arrow(array.field(name), kind) for name, kind in _hints(typing.cast(type, hint)).items()]
        return [cls(*row) for row in zip(*columns, strict=True)]
    if not isinstance(array, pa.ListArray):
        fast = array.null_count == 0 and hint in (int, float)
        return typing.cast(list[Any], array.to_numpy().tolist() if fast else array.to_pylist())
    make = tuple if typing.get_origin(hint) is tuple else list
    flat = from_arrow(array.values, typing.get_args(hint)[0])
    rows = [make(flat[start:end]) for start, end in pairwise(array.offsets.to_numpy().tolist())]
    return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]
