"""A Parquet file holds the lines it was given, with types, in memory that does not grow with their number."""

import gc
import io
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pyarrow
import pyarrow.parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.exports.rules import ExportRow, ParquetFile
from tests.budget import examples

TEXTS = st.one_of(st.none(), st.text(st.characters(codec="utf-8"), max_size=5))
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TIMES = st.integers(0, 2**50).map(lambda us: datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us))
FIRST = datetime(2026, 11, 1, tzinfo=UTC)
ROWS = st.builds(
    ExportRow,
    minute=TIMES,
    tenant=TEXTS,
    policy=TEXTS,
    route_class=TEXTS,
    api_key=TEXTS,
    degraded=TEXTS,
    labels=TEXTS,
    **dict.fromkeys(("period", "charge_period", "quota", "quota_key", "region", "cause", "counted_as"), st.text("a=b")),
    **dict.fromkeys(("transfer", "units", "part"), NUMBERS),
    **dict.fromkeys(("epoch", "lane", "seq", "line"), st.one_of(st.none(), NUMBERS)),
)


@settings(max_examples=examples(30))  # each batch opens a writer of its own
@given(chunks=st.lists(st.lists(ROWS, max_size=5), max_size=5), row_group=st.integers(1, 9))
def test_a_file_has_every_line_unchanged(chunks: list[list[ExportRow]], row_group: int) -> None:
    file = ParquetFile({"period": "2026-11"}, row_group)
    body = b"".join([*map(file.add, chunks), file.end()])
    table = pyarrow.parquet.read_table(io.BytesIO(body))
    assert [ExportRow(**row) for row in table.to_pylist()] == [row for chunk in chunks for row in chunk]
    assert table.schema.metadata[b"leasehold.period"] == b"2026-11"


def test_columns_have_types() -> None:
    file = ParquetFile({}, 1)
    schema = pyarrow.parquet.read_schema(io.BytesIO(file.end()))
    dictionary = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    expected = dict.fromkeys(ExportRow._fields, dictionary)
    expected |= dict.fromkeys(("transfer", "units", "epoch", "lane", "seq", "line", "part"), pyarrow.int64())
    assert {field.name: field.type for field in schema} == expected | {"minute": pyarrow.timestamp("us", tz="UTC")}
    may_be_missing = {"tenant", "policy", "route_class", "api_key", "degraded", "labels"}
    may_be_missing |= {"epoch", "lane", "seq", "line"}
    assert {field.name for field in schema if field.nullable} == may_be_missing


def test_texts_of_several_chunks_have_one_dictionary() -> None:
    """Without a dictionary, a column of a thousand tenants would be many times as large."""
    file = ParquetFile({}, 4000)
    body = b"".join([*(file.add(rows) for rows in _chunks(4, 1000)), file.end()])
    column = pyarrow.parquet.ParquetFile(io.BytesIO(body)).metadata.row_group(0).column(4)
    assert column.path_in_schema == "tenant"
    assert set(column.encodings) == {"RLE", "RLE_DICTIONARY", "PLAIN"}  # plain is the dictionary itself
    assert column.total_uncompressed_size < 4000 * 6


def test_more_lines_take_no_more_memory() -> None:
    few, many = _peak(40), _peak(160)
    assert many < 1.5 * few


def _peak(chunks: int) -> int:
    """Return the peak memory of Python and of the library while a file of so many thousand lines is written."""
    gc.collect()  # what earlier tests of this process left is not counted
    before = pyarrow.total_allocated_bytes()
    file, most, size, [rows] = ParquetFile({}, 20_000), 0, 0, _chunks(1, 1000)
    tracemalloc.start()
    try:
        for _ in range(chunks):
            size += len(file.add(rows))
            most = max(most, pyarrow.total_allocated_bytes() - before)
        size += len(file.end())
        assert size > 1_000 * chunks
        return most + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _chunks(count: int, size: int) -> Iterator[list[ExportRow]]:
    for chunk in range(count):
        yield [_line(n) for n in range(chunk * size, (chunk + 1) * size)]


def _line(n: int) -> ExportRow:
    """Yield lines of a thousand tenants in random order."""
    what = (FIRST + timedelta(minutes=n), "2026-11", "2026-11", f"tenant {n * 7919 % 1009}", "exports", "exports:")
    units = n * 7919 % 10_007
    return ExportRow(n, *what, "eu-west", "x", None, None, None, units, "usage", 1, 0, n, 0, 0, "included", None)
