"""What an agent admits of allowances while it cannot ask its store: on disk before anybody is answered.

What is admitted in one turn, and while the disk is at work, is written together and flushed once. When the store
decides again the segment is *sealed*: nothing is added to it any more, and it is booked (`booking.py`). What an agent
that was killed has left is found by whichever agent starts in that directory, or lives there.
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
    Entry,
    Known,
    OperationIdentity,
    Read,
    Record,
    is_foreign,
    packed,
    read,
    summed,
)

log = structlog.get_logger()

MOST_WAITING = 10_000
MOST_OPERATIONS = 10_000
NAME_BYTES = 16
SUFFIX, DAMAGED, DRAFT = ".journal", ".damaged", ".new"

OnKept = Callable[[bool], None]


class Segment(Protocol):
    name: str

    async def append(self, data: bytes) -> None:
        """When it returns the data are durable. Raises OSError; then none of them are."""

    async def content(self) -> Read: ...

    def read(self) -> Read:
        """The same, at once: before there is anybody to wait for."""

    def remove(self, *, keep_a_copy: bool) -> None: ...

    def release(self) -> None:
        """Leave it to the next agent of the directory."""


class Disk(Protocol):
    def left(self) -> Sequence[Segment]:
        """Segments that nobody writes to any more."""

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
        self._waiting: list[tuple[list[Entry], Known | None, OnKept]] = []
        self._writer: asyncio.Task[None] | None = None
        self._operations: GenerationalCache[str, str] = GenerationalCache(MOST_OPERATIONS)
        self._left: set[str] = set()  # by another agent, or an earlier life of this one
        self.sealed: list[Segment] = []
        self.fault: str | None = None
        self.owner: str | None = None  # once the coordinator has said which installation it is
        self.foreign: set[str] = set()  # segments that lie here, of other regions or installations

    def belong_to(self, owner: str) -> None:
        """Write for this region of this installation from now on, and take over what was left here for it."""
        is_first, self.owner = self.owner is None, owner
        if is_first:
            self.recover()

    def recover(self) -> None:
        """Take over the segments that agents of this region have left here, and know their operations again."""
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
                self._leave_alone(segment, content.owner)
                continue
            found += 1
            self._left.add(segment.name)
            self.sealed.append(segment)
            for operation in content.operations:
                self._operations.put(operation.digest, operation.body)
        self.foreign = foreign
        if found:
            log.warning("a journal was left here, and is booked now", segments=found)

    def is_own(self, segment: Segment, content: Read) -> bool:
        """Whether a sealed segment is this region's; if not, it is left alone from now on."""
        if self.owner is None or not is_foreign(content.owner, self.owner):
            return True
        self.sealed.remove(segment)
        self._leave_alone(segment, content.owner)
        self.foreign.add(segment.name)
        return False

    def _leave_alone(self, segment: Segment, owner: str) -> None:
        if segment.name not in self.foreign:
            log.error("a journal of another region or installation is left alone", segment=segment.name, owner=owner)
        segment.release()

    # --- admitting ----------------------------------------------------------------------------------------------------

    def keep(self, entries: list[Entry], operation: Known | None, on_kept: OnKept) -> None:
        """Told True once it is durable. False: it is not there, and never will be."""
        reason = self._why_not()
        if reason is not None:
            self._failed(reason)
            on_kept(False)
            return
        self._waiting.append((entries, operation, on_kept))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="journal")

    def body_of(self, operation: str) -> str | None:
        """Of an operation that was admitted here; None if it is not known."""
        return self._operations.get(operation)

    def _why_not(self) -> str | None:
        if self._disk is None:
            return "this agent has no journal: LEASEHOLD_AGENT_JOURNAL_DIR is not set"
        if len(self._waiting) >= MOST_WAITING:
            return "too many requests wait for the journal's disk"
        if self._segment is not None and self._clock.monotonic_ms() >= self._began_at_ms + self._most_ms:
            return "the store has been away for longer than the journal is kept"
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

    async def _flush(self, waiting: Sequence[tuple[list[Entry], Known | None, OnKept]]) -> bool:
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
            raise OSError(f"it is full: more than {self._most_bytes} bytes since the store went away")
        await self._segment.append(data)
        self._bytes += len(data)

    def _kept(self, entries: list[Entry], operation: Known | None) -> None:
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
        """The store decides: what was admitted until now is booked, and what comes goes into another segment."""
        self.fault = None
        if self._segment is not None and self._writer is None:
            self.sealed.append(self._segment)
            self._segment = None

    async def decide(self, segment: Segment, charged: Sequence[OperationIdentity]) -> Read:
        """Write down which operations of a sealed segment the store has charged. Raises OSError."""
        self._metrics.charged.inc(len(charged))
        await segment.append(packed(Record([], [], list(charged))))
        return await segment.content()

    async def settle(self) -> None:
        """Wait for what is being written: the agent leaves."""
        while self._writer is not None:
            await asyncio.wait([self._writer])
        self.seal()

    def drop(self, segment: Segment, content: Read) -> bool:
        """All of it is booked. True if it was admitted in this incarnation."""
        self.sealed.remove(segment)
        self._metrics.booked.inc(sum(entry.units for entry in content.admitted))
        if content.damaged:
            log.error("records of a journal are damaged", segment=segment.name, records=content.damaged)
        segment.remove(keep_a_copy=content.damaged > 0)
        return segment.name not in self._left

    def release(self) -> None:
        """Leave what is not booked to the next agent: this one has left."""
        for segment in self.sealed:
            log.warning("a journal stays on disk for the next agent of its directory", segment=segment.name)
            segment.release()
        self.sealed.clear()


def units_of(content: Read) -> int:
    return sum(entry.units for entry in content.entries)


# --- files ------------------------------------------------------------------------------------------------------------


class FileSegment:
    """Locked as long as its agent lives: who finds it unlocked may have it."""

    def __init__(self, path: Path, file: int, end: int) -> None:
        self.name = path.stem
        self._path = path
        self._file = file
        self._end = end

    async def append(self, data: bytes) -> None:
        await asyncio.to_thread(self._append, data)

    def _append(self, data: bytes) -> None:
        """What was written in part is taken back, so that nothing is found there later that nobody was told of."""
        try:
            written = 0
            while written < len(data):  # a disk that takes a part only says at the next try why
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            os.fdatasync(self._file)
            raise
        self._end += len(data)

    async def content(self) -> Read:
        return await asyncio.to_thread(self.read)

    def read(self) -> Read:
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
        """It gets its name when it is locked: others look for what has one, and take what is not.

        Whose it is stands in its first record, which is flushed with the second one.
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
    """Return where the next record begins: in place of one that was torn when its writer was killed."""
    return raw.rfind(b"\n") + 1


def _taken_over(path: Path) -> FileSegment | None:
    """None if another agent lives that writes to it, or has just booked it."""
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
