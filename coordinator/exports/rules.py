"""The lines of an export: every usage line of a period, with the report that it came in."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from io import RawIOBase
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from coordinator.usage.rules.sheet import csv_file, csv_of


class ExportFormat(StrEnum):
    CSV = "csv"
    NDJSON = "ndjson"
    PARQUET = "parquet"


class ExportRow(NamedTuple):
    """A line, in the order of the columns. `transfer` is its place in the ledger."""

    transfer: int
    minute: datetime
    period: str
    charge_period: str
    tenant: str | None
    quota: str
    quota_key: str
    region: str
    policy: str | None
    route_class: str | None
    api_key: str | None
    degraded: str | None
    units: int
    cause: str
    epoch: int | None
    lane: int | None
    seq: int | None
    line: int | None
    part: int
    counted_as: str
    labels: str | None


_encoder = msgspec.json.Encoder()


def heading(format_: ExportFormat) -> bytes:
    return csv_file([ExportRow._fields]) if format_ is ExportFormat.CSV else b""


def encoded(format_: ExportFormat, rows: Sequence[ExportRow]) -> bytes:
    if format_ is ExportFormat.CSV:
        return csv_of(rows).encode()
    return _encoder.encode_lines([row._asdict() for row in rows])


# --- Parquet ----------------------------------------------------------------------------------------------------------


def can_be_written(format_: ExportFormat) -> bool:
    """Return whether this coordinator can write the format. Parquet needs pyarrow, an extra of 170 MB."""
    return format_ is not ExportFormat.PARQUET or find_spec("pyarrow") is not None


class ParquetFile:
    """A file that is written row group by row group. Finished bytes are taken away at once, to bound the memory."""

    def __init__(self, facts: Mapping[str, str], row_group: int, columns: type[tuple[Any, ...]] = ExportRow) -> None:
        """Begin a file. `facts` are written into its metadata, and `columns` is the NamedTuple of a row."""
        self._row_group = row_group
        self._arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        self._schema = _schema(self._arrow, facts, columns)
        self._done = _Done()
        self._writer = parquet.ParquetWriter(self._done, self._schema, compression="zstd")
        self._batches: list[Any] = []

    def add(self, rows: Sequence[tuple[Any, ...]]) -> bytes:
        """Add rows. Return the bytes that were finished."""
        columns = zip(*rows, strict=True)
        arrays = [self._arrow.array(each, field.type) for each, field in zip(columns, self._schema, strict=False)]
        if arrays:
            self._batches.append(self._arrow.RecordBatch.from_arrays(arrays, schema=self._schema))
        if sum(batch.num_rows for batch in self._batches) >= self._row_group:
            self._write()
            return self._done.taken()
        return b""

    def end(self) -> bytes:
        if self._batches:
            self._write()
        self._writer.close()
        return self._done.taken()

    def _write(self) -> None:
        # Batches have their own dictionaries. A row group needs one for all, or the writer would write plain texts.
        table = self._arrow.Table.from_batches(self._batches, self._schema).unify_dictionaries()
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches = []


def _schema(arrow: Any, facts: Mapping[str, str], columns: type[tuple[Any, ...]]) -> Any:
    """Return the schema: numbers and times as such, texts by dictionary, since most of them repeat."""
    types = {
        int: arrow.int64(),
        bytes: arrow.binary(),
        datetime: arrow.timestamp("us", tz="UTC"),
        str: arrow.dictionary(arrow.int32(), arrow.string()),
    }
    fields = []
    for name, hint in get_type_hints(columns).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        fields.append(arrow.field(name, types[kinds[0]], nullable=type(None) in kinds))
    return arrow.schema(fields, metadata={f"leasehold.{name}": value for name, value in facts.items()})


class _Done(RawIOBase):
    """The sink that the writer writes to."""

    def __init__(self) -> None:
        self._bytes, self._at = bytearray(), 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self._bytes += piece
        return len(piece)

    def tell(self) -> int:
        return self._at + len(self._bytes)

    def taken(self) -> bytes:
        taken, self._bytes = bytes(self._bytes), bytearray()
        self._at += len(taken)
        return taken
