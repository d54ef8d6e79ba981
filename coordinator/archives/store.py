"""The place where archives are: a directory, or a bucket that speaks the S3 protocol.

pyarrow reads and writes both. Its calls block, so they run in threads. A file that was written to a directory is on the
disk when `write` returns, and one that was written to a bucket is stored.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from coordinator.archives.rules import FILES, ArchivedFile
from coordinator.exports.rules import ParquetFile

ROWS_AT_ONCE = 5_000
ROW_GROUP = 100_000
CHUNK = 1 << 20
S3 = "s3://"

Row = TypeVar("Row", bound=tuple[Any, ...])


class ArchiveUnreadable(Exception):
    """A file of an archive is missing, cannot be read, or has no such rows; the message says which and why."""


def can_archive() -> bool:
    """Return whether this process can read and write archives: they need pyarrow, an extra of 170 MB."""
    return find_spec("pyarrow") is not None


class ArchiveStore:
    """Archives below one directory or one prefix of a bucket. Names are relative to it."""

    def __init__(self, location: str) -> None:
        """`location` is a directory, or s3://BUCKET/PREFIX with the options of pyarrow's file systems."""
        self.location = location.partition("?")[0].rstrip("/")
        self._given = location
        self._directory = None if location.startswith(S3) else Path(os.path.abspath(location))

    @cached_property
    def _files(self) -> Any:
        """The file system, made at its first use: a bucket's region may have to be looked up."""
        files = import_module("pyarrow.fs")
        if self._directory is not None:
            return files.SubTreeFileSystem(str(self._directory), files.LocalFileSystem())
        whole, root = files.FileSystem.from_uri(self._given)
        return files.SubTreeFileSystem(root, whole)

    def writer(self, folder: str, name: str) -> "ArchiveWriter":
        """Begin a Parquet file of an archive."""
        self._make_folder(folder)
        return ArchiveWriter(name, self._files.open_output_stream(f"{folder}/{name}.parquet"))

    def _make_folder(self, folder: str) -> None:
        if self._directory is not None:
            self._files.create_dir(folder, recursive=True)

    def put(self, folder: str, name: str, content: bytes) -> None:
        self._make_folder(folder)
        with self._files.open_output_stream(f"{folder}/{name}") as stream:
            stream.write(content)

    def flush(self, folder: str) -> None:
        """Write what a directory has of this folder to the disk, with its name and those of its files."""
        if self._directory is None:
            return
        whole = self._directory / folder
        for path in (*whole.iterdir(), whole, whole.parent, self._directory):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def get(self, folder: str, name: str) -> bytes:
        try:
            with self._files.open_input_stream(f"{folder}/{name}") as stream:
                return bytes(stream.read())
        except OSError as error:
            raise ArchiveUnreadable(f"{name} of {self.location}/{folder}: {error}") from error

    def sha256(self, folder: str, name: str) -> tuple[int, str]:
        """Return the size of a file and the SHA-256 of its bytes."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._files.open_input_stream(f"{folder}/{name}") as stream:
                while piece := stream.read(CHUNK):
                    digest.update(piece)
                    size += len(piece)
        except OSError as error:
            raise ArchiveUnreadable(f"{name} of {self.location}/{folder}: {error}") from error
        return size, digest.hexdigest()

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder, relative to it."""
        selector = import_module("pyarrow.fs").FileSelector(folder, recursive=True, allow_not_found=True)
        found = self._files.get_file_info(selector)
        return sorted(os.path.relpath(each.path, folder or ".") for each in found if each.is_file)

    def delete(self, folder: str) -> None:
        """Delete a folder with its files, if it exists."""
        if self.names(folder):
            self._files.delete_dir(folder)

    async def rows(
        self,
        folder: str,
        name: str,
        columns: type[Row],
        after: int = 0,
        where: Mapping[str, Sequence[str]] | None = None,
    ) -> AsyncIterator[Row]:
        """Return the rows of a file, some thousand at a time, in its order.

        `after` leaves out groups of rows whose first column is not greater, and `where` rows with other texts.
        """
        batches = await asyncio.to_thread(self._batches, f"{folder}/{name}.parquet", columns, after, where or {})
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for row in batch:
                yield row

    def _batches(
        self, path: str, columns: type[Row], after: int, where: Mapping[str, Sequence[str]]
    ) -> Iterator[Sequence[Row]]:
        arrow, make = import_module("pyarrow"), columns._make  # type: ignore[attr-defined]  # of a NamedTuple
        try:
            with self._files.open_input_file(path) as stream:
                file = import_module("pyarrow.parquet").ParquetFile(stream)
                if tuple(file.schema_arrow.names) != columns._fields:  # type: ignore[attr-defined]
                    raise ArchiveUnreadable(f"{path}: it has other columns than an archive of this release")
                groups = [number for number in range(file.num_row_groups) if _ends_after(file, number, after)]
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=groups):
                    found = reduce(_filtered, where.items(), batch)
                    yield [make(row) for row in zip(*(each.to_pylist() for each in found.columns), strict=True)]
        except (OSError, arrow.ArrowException) as error:
            raise ArchiveUnreadable(f"{path}: {error}") from error


def _ends_after(file: Any, group: int, after: int) -> bool:
    """Return whether a row group may have a value beyond `after` in its first column. One without statistics may."""
    statistics = file.metadata.row_group(group).column(0).statistics
    has_numbers = statistics is not None and statistics.has_min_max and isinstance(statistics.max, int)
    return not has_numbers or statistics.max > after


def _filtered(batch: Any, condition: tuple[str, Sequence[str]]) -> Any:
    """Keep the rows with one of these texts in a column."""
    arrow, (column, texts) = import_module("pyarrow"), condition
    known = arrow.array(texts, arrow.string())
    return batch.filter(import_module("pyarrow.compute").is_in(batch.column(column).cast(known.type), value_set=known))


class ArchiveWriter:
    """A Parquet file that is written row group by row group, counted and hashed on the way."""

    def __init__(self, name: str, stream: Any) -> None:
        self._stream = stream
        self._file = ParquetFile({"archive": name}, ROW_GROUP, FILES[name])
        self._digest, self._rows, self.bytes = hashlib.sha256(), 0, 0

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self._rows += len(rows)
            self._write(self._file.add(rows))

    def end(self) -> ArchivedFile:
        self._write(self._file.end())
        self._stream.close()
        return ArchivedFile(self._rows, self.bytes, self._digest.hexdigest())

    def _write(self, content: bytes) -> None:
        self._digest.update(content)
        self.bytes += len(content)
        self._stream.write(content)


def open_store(location: str) -> ArchiveStore | None:
    """Return the place of a setting, or None without one or without pyarrow."""
    return ArchiveStore(location) if location and can_archive() else None


def is_location(text: str) -> bool:
    """Return whether a setting names a directory by its whole path, or a bucket without a password in the address."""
    if text.startswith(S3):
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.password is None
    return os.path.isabs(text)
