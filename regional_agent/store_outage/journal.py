"""The outage journal: units of allowances that an agent admits while its store is unavailable.

They are on disk before the request is answered. Entries of one turn of the event loop, and those that arrive while the
disk is busy, are written together and flushed once. When the store is available again the segment is *sealed*: nothing
is added to it any more, and it is booked (`booking.py`). Segments of an agent that was killed are taken over by any
agent that runs, or starts, in the same directory.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import structlog
from msgspec.structs import replace

from protocol.clock import Clock
from regional_agent.admission.rules.generational_cache import GenerationalCache
from regional_agent.metrics import JournalMetrics
from regional_agent.store_outage.rules.records import (
    AdmittedOperation,
    Entry,
    OperationIdentity,
    ReadSegment,
    Record,
    is_foreign,
    packed,
    read,
    summed,
)

log = structlog.get_logger()

MAX_WAITING = 10_000
MAX_OPERATIONS = 10_000
NAME_BYTES = 16
SUFFIX, DAMAGED, DRAFT = ".journal", ".damaged", ".new"

OnKept = Callable[[bool], None]


class Segment(Protocol):
    name: str

    @property
    def size_bytes(self) -> int: ...

    async def append(self, data: bytes) -> None:
        """Write data durably. Raises OSError; then none of it is written."""

    async def content(self) -> ReadSegment: ...

    def read(self) -> ReadSegment:
        """Read the content, blocking: for use before the event loop has other work."""

    def remove(self, *, keep_a_copy: bool) -> None: ...

    def release(self) -> None:
        """Unlock it for the next agent of the directory."""


class Disk(Protocol):
    def left(self) -> Sequence[Segment]:
        """Return segments whose agent has ended."""

    async def begin(self, owner: str) -> Segment: ...


class Journal:
    def __init__(
        self, disk: Disk | None, clock: Clock, metrics: JournalMetrics, *, most_bytes: int, most_ms: int
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._most_ms = most_ms
        self._segment: Segment | None = None
        self._bytes = 0
        self._began_at_ms = 0
        self._waiting: list[tuple[list[Entry], AdmittedOperation | None, OnKept]] = []
        self._writer: asyncio.Task[None] | None = None
        self._operations: GenerationalCache[str, str] = GenerationalCache(MAX_OPERATIONS)
        self._left: set[str] = set()  # segments of another agent, or of an earlier process of this one
        self.sealed: list[Segment] = []
        self.fault: str | None = None
        self.owner: str | None = None  # known once the coordinator has sent the installation's id
        self.foreign: set[str] = set()  # segments of other regions or installations in this directory

    @property
    def stored_bytes(self) -> int:
        """Return the size of everything on disk that is not booked yet."""
        current = [] if self._segment is None else [self._segment]
        return sum(segment.size_bytes for segment in (*self.sealed, *current))

    def belong_to(self, owner: str) -> None:
        """Set the region and installation to write for, and take over the segments that were left here for it."""
        is_first, self.owner = self.owner is None, owner
        if is_first:
            self.recover()

    def recover(self) -> None:
        """Take over the segments that agents of this region have left here, and remember their operations."""
        if self._disk is None or self.owner is None:
            return
        try:
            left = self._disk.left()
        except OSError as error:
            self._failed(f"the journal's directory cannot be read: {error}")
            return
        found, foreign = 0, set[str]()
        for segment in left:
            content = segment.read()
            if is_foreign(content.owner, self.owner):
                foreign.add(segment.name)
                self._ignore(segment, content.owner)
                continue
            found += 1
            self._left.add(segment.name)
            self.sealed.append(segment)
            for operation in content.operations:
                self._operations.put(operation.digest, operation.body)
        self.foreign = foreign
        if found:
            log.warning("outage journal segments recovered", segments=found)

    def is_own(self, segment: Segment, content: ReadSegment) -> bool:
        """Return whether a sealed segment is this region's; if not, ignore it from now on."""
        if self.owner is None or not is_foreign(content.owner, self.owner):
            return True
        self.sealed.remove(segment)
        self._ignore(segment, content.owner)
        self.foreign.add(segment.name)
        return False

    def _ignore(self, segment: Segment, owner: str) -> None:
        if segment.name not in self.foreign:
            log.error("outage journal of another region or installation ignored", segment=segment.name, owner=owner)
        segment.release()

    # --- admitting ----------------------------------------------------------------------------------------------------

    def keep(self, entries: list[Entry], operation: AdmittedOperation | None, on_kept: OnKept) -> None:
        """Write entries. `on_kept` gets True once they are durable, False if they are not and will never be."""
        reason = self._refusal()
        if reason is not None:
            self._failed(reason)
            on_kept(False)
            return
        self._waiting.append((entries, operation, on_kept))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="journal")

    def body_of(self, operation: str) -> str | None:
        """Return the body's digest of an operation that was admitted here; None if it is not known."""
        return self._operations.get(operation)

    def _refusal(self) -> str | None:
        if self._disk is None:
            return "this agent has no journal: LEASEHOLD_AGENT_JOURNAL_DIR is not set"
        if len(self._waiting) >= MAX_WAITING:
            return "too many requests wait for the journal's disk"
        if self._segment is not None and self._clock.monotonic_ms() >= self._began_at_ms + self._most_ms:
            return "the store has been unavailable for longer than the journal is kept"
        return None

    async def _write(self) -> None:
        await asyncio.sleep(0)  # the rest of this turn goes along
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                is_kept = await self._flush(waiting)
                for entries, operation, on_kept in waiting:
                    if is_kept:
                        self._kept(entries, operation)
                    on_kept(is_kept)
        finally:
            self._writer = None

    async def _flush(self, waiting: Sequence[tuple[list[Entry], AdmittedOperation | None, OnKept]]) -> bool:
        entries = summed(entry for entries, operation, _ in waiting if operation is None for entry in entries)
        operations = [replace(operation, entries=entries) for entries, operation, _ in waiting if operation is not None]
        data = packed(Record(entries, operations))
        try:
            await self._append(data)
        except OSError as error:
            self._failed(f"the journal cannot be written: {error}")
            return False
        self.fault = None
        self._metrics.flushes.inc()
        return True

    async def _append(self, data: bytes) -> None:
        assert self._disk is not None
        if self._segment is None:
            self._segment, self._bytes, self._began_at_ms = (
                await self._disk.begin(self.owner or ""),
                0,
                self._clock.monotonic_ms(),
            )
        if self._bytes + len(data) > self._most_bytes:
            raise OSError(f"it is full: more than {self._most_bytes} bytes since the store became unavailable")
        await self._segment.append(data)
        self._bytes += len(data)

    def _kept(self, entries: list[Entry], operation: AdmittedOperation | None) -> None:
        self._metrics.units.inc(sum(entry.units for entry in entries))
        if operation is not None:
            self._operations.put(operation.digest, operation.body)

    def _failed(self, reason: str) -> None:
        self._metrics.failures.inc()
        if reason != self.fault:
            log.error("allowances fail closed", reason=reason)
        self.fault = reason

    # --- booking ------------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Seal the current segment, which is booked then. Later entries go into another one."""
        self.fault = None
        if self._segment is not None and self._writer is None:
            self.sealed.append(self._segment)
            self._segment = None

    async def decide(self, segment: Segment, charged: Sequence[OperationIdentity]) -> ReadSegment:
        """Write down which operations of a sealed segment the store has charged. Raises OSError."""
        self._metrics.charged.inc(len(charged))
        await segment.append(packed(Record([], [], list(charged))))
        return await segment.content()

    async def settle(self) -> None:
        """Wait for the write under way, and seal the segment: the agent shuts down."""
        while self._writer is not None:
            await asyncio.wait([self._writer])
        self.seal()

    def drop(self, segment: Segment, content: ReadSegment) -> bool:
        """Remove a segment that is booked. Return whether this process has written it."""
        self.sealed.remove(segment)
        self._metrics.booked.inc(sum(entry.units for entry in content.admitted))
        if content.damaged:
            log.error("outage journal records are damaged", segment=segment.name, records=content.damaged)
        segment.remove(keep_a_copy=content.damaged > 0)
        return segment.name not in self._left

    def release(self) -> None:
        """Unlock the segments that are not booked for the next agent: this one has shut down."""
        for segment in self.sealed:
            log.warning("outage journal segment left for the next agent", segment=segment.name)
            segment.release()
        self.sealed.clear()


def units_of(content: ReadSegment) -> int:
    return sum(entry.units for entry in content.entries)


# --- files ------------------------------------------------------------------------------------------------------------


class FileSegment:
    """A file that its agent keeps locked. Another agent that finds it unlocked may take it over."""

    def __init__(self, path: Path, file: int, end: int) -> None:
        self.name = path.stem
        self._path = path
        self._file = file
        self._end = end

    @property
    def size_bytes(self) -> int:
        return self._end

    async def append(self, data: bytes) -> None:
        await asyncio.to_thread(self._append, data)

    def _append(self, data: bytes) -> None:
        """Append data, or truncate what was written of it, so that no entry is found later that was not admitted."""
        try:
            written = 0
            while written < len(data):  # after a partial write, the next one raises the reason
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            os.fdatasync(self._file)
            raise
        self._end += len(data)

    async def content(self) -> ReadSegment:
        return await asyncio.to_thread(self.read)

    def read(self) -> ReadSegment:
        return read(self._path.read_bytes())

    def remove(self, *, keep_a_copy: bool) -> None:
        if keep_a_copy:
            self._path.rename(self._path.with_suffix(DAMAGED))
        else:
            self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        os.close(self._file)


class JournalDirectory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def left(self) -> list[FileSegment]:
        self._path.mkdir(parents=True, exist_ok=True)
        return [segment for path in sorted(self._path.glob(f"*{SUFFIX}")) if (segment := _taken_over(path))]

    async def begin(self, owner: str) -> FileSegment:
        return await asyncio.to_thread(self._begin, owner)

    def _begin(self, owner: str) -> FileSegment:
        """Create a segment. It gets its name once it is locked: other agents take over any named one that is not.

        Its first record has the owner, and is flushed with the second one.
        """
        path = self._path / f"{secrets.token_hex(NAME_BYTES)}{SUFFIX}"
        draft = path.with_suffix(DRAFT)
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = packed(Record([], [], owner=owner))
        os.pwrite(file, head, 0)
        draft.rename(path)
        directory = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return FileSegment(path, file, len(head))


def end_of_records(raw: bytes) -> int:
    """Return the offset of the next record: it replaces one that was torn when its writer was killed."""
    return raw.rfind(b"\n") + 1


def _taken_over(path: Path) -> FileSegment | None:
    """Take over a segment. None if another agent has it, or has just booked it."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return FileSegment(path, file, end_of_records(path.read_bytes()))
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None
