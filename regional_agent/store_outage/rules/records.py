"""The records of an outage journal, each with a checksum, and the batches that book them.

A journal is written in segments. Each is booked as a whole, in an epoch of its own: the segment's name is the nonce
that opens it. So it does not matter how often it is sent, nor whether the store comes back.

A record is a line: the checksum of its text, and the text. Records do not depend on each other, so a damaged one costs
itself only. The last one may be torn, if its writer was killed: then no request was answered on it.

The store may have charged an operation of the journal as well: it was asked first, did not reply in time, and executed
the script later. So before a segment is booked the store is asked, and what it has charged is written into the segment
(`decided`). Only from then on is it certain what is booked, and the same each time.
"""

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Struct

from protocol.identifiers import lane_of
from protocol.messages import FrozenBatch, FrozenLease, UsageLine

# Of one batch. The coordinator reads more than twice of each; what a release before made within them stays the same.
MOST_LEASES = 400
MOST_LINES = 5_000
MOST_BYTES = 2 * 1024 * 1024
LINE_BYTES, LEASE_BYTES = 80, 256  # at most, beside the dimensions of a line and the key of a quota
_CHECKSUM_BYTES = 8


OperationIdentity = tuple[str, str]  # an operation's digest and body


class Entry(Struct, array_like=True, frozen=True):
    """Units of one policy's requests in one minute."""

    quota: str
    period: str
    minute: int
    dimensions: str  # JSON, keys in order
    units: int


class AdmittedOperation(Struct, array_like=True, frozen=True):
    """An operation that was admitted: its retry is not charged again."""

    digest: str
    body: str
    remembered_ms: int
    entries: list[Entry] = []  # what was admitted of it

    @property
    def identity(self) -> OperationIdentity:
        return self.digest, self.body


class Record(Struct, array_like=True, frozen=True):
    """The entries that were admitted together, or the operations of the segment that the store had charged itself."""

    entries: list[Entry]
    operations: list[AdmittedOperation]
    decided: list[OperationIdentity] | None = None
    owner: str = ""  # of the segment, in its first record: see `owner_of`


class ReadSegment(NamedTuple):
    records: list[Record]
    damaged: int  # records that are not what was written; a torn end is none of them

    @property
    def entries(self) -> Iterator[Entry]:
        """Yield what is to be booked: each operation once, without those that the store has charged."""
        charged = self.charged
        yield from (entry for record in self.records for entry in record.entries)
        for operation in self.operations:
            if operation.identity not in charged:
                yield from operation.entries

    @property
    def admitted(self) -> Iterator[Entry]:
        """Yield everything that was admitted, also what is not to be booked."""
        for record in self.records:
            yield from record.entries
            for operation in record.operations:
                yield from operation.entries

    @property
    def operations(self) -> list[AdmittedOperation]:
        """Return each operation once, however often it was admitted."""
        first: dict[OperationIdentity, AdmittedOperation] = {}
        for record in self.records:
            for operation in record.operations:
                first.setdefault(operation.identity, operation)
        return list(first.values())

    @property
    def charged(self) -> set[OperationIdentity]:
        return {identity for record in self.records for identity in record.decided or ()}

    @property
    def owner(self) -> str:
        """Return the segment's owner; empty if an earlier release wrote it."""
        return next((record.owner for record in self.records if record.owner), "")

    @property
    def is_decided(self) -> bool:
        """Return whether it is certain what is to be booked."""
        return not self.operations or any(record.decided is not None for record in self.records)


def owner_of(region: str, hold_key: bytes) -> str:
    """Name a region of one installation: each has a key of its own, which never changes."""
    return f"{region}/{hashlib.sha256(hold_key).hexdigest()[:16] if hold_key else ''}"


def is_foreign(written: str, owner: str) -> bool:
    """Return whether a segment belongs to another region or installation, as far as both are known."""
    (region, _, ledger), (own_region, _, own_ledger) = written.partition("/"), owner.partition("/")
    return bool(written) and (region != own_region or bool(ledger and own_ledger and ledger != own_ledger))


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode


def packed(record: Record) -> bytes:
    return _checked(_encode(record)) + b"\n"


def read(raw: bytes) -> ReadSegment:
    *lines, torn = raw.split(b"\n")
    records = [_record(line) for line in lines]
    while records and records[-1] is None and not torn:
        records.pop()  # its end was written before its beginning: a disk may do that
    whole = [record for record in records if record is not None]
    return ReadSegment(whole, damaged=len(records) - len(whole))


def _record(line: bytes) -> Record | None:
    text = line[_CHECKSUM_BYTES + 1 :]
    return _decode(text) if line == _checked(text) else None


def _checked(text: bytes) -> bytes:
    return b"%08x %s" % (zlib.crc32(text), text)


def summed(entries: Iterable[Entry]) -> list[Entry]:
    """Return one entry for each usage line, in order."""
    units: dict[tuple[str, str, int, str], int] = defaultdict(int)
    for entry in entries:
        units[entry.quota, entry.period, entry.minute, entry.dimensions] += entry.units
    return [Entry(*line, total) for line, total in sorted(units.items())]


def batches(entries: Iterable[Entry], epoch: int, lanes: int) -> Iterator[FrozenBatch]:
    """Return the batches that the coordinator gets, the same each time; each lane's are numbered from 1 on.

    A lease may be in several batches, each with some of its lines. Its consumed total grows with them.
    """
    by_lane: dict[int, list[Entry]] = defaultdict(list)
    for entry in summed(entries):
        by_lane[lane_of(entry.quota, lanes)].append(entry)
    for lane, lane_entries in sorted(by_lane.items()):
        consumed: dict[tuple[str, str], int] = defaultdict(int)
        for seq, piece in enumerate(_pieces(lane_entries), start=1):
            leases = [_lease(quota, period, lines, consumed) for (quota, period), lines in piece.items()]
            yield FrozenBatch(epoch=epoch, lane=lane, seq=seq, leases=leases)


def _pieces(entries: Iterable[Entry]) -> Iterator[dict[tuple[str, str], list[Entry]]]:
    """Divide the entries of a lane into batches, each bounded in leases, lines and bytes."""
    piece: dict[tuple[str, str], list[Entry]] = {}
    lines = size = 0
    for entry in entries:
        lease, length = (entry.quota, entry.period), len(entry.dimensions) + LINE_BYTES
        length += 0 if lease in piece else len(entry.quota) + LEASE_BYTES
        is_full = (
            lines == MOST_LINES or size + length > MOST_BYTES or (lease not in piece and len(piece) == MOST_LEASES)
        )
        if is_full:
            yield piece
            piece, lines, size = {}, 0, 0
        piece.setdefault(lease, []).append(entry)
        lines, size = lines + 1, size + length
    if piece:
        yield piece


def _lease(quota: str, period: str, entries: Iterable[Entry], consumed: dict[tuple[str, str], int]) -> FrozenLease:
    """Return a lease without grants: the coordinator covers what was consumed."""
    lines = [_line(entry) for entry in entries]
    consumed[quota, period] += sum(line.units for line in lines)
    total = consumed[quota, period]
    return FrozenLease(quota=quota, period=period, granted=0, overage=0, consumed=total, returned=0, lines=lines)


def _line(entry: Entry) -> UsageLine:
    dimensions = msgspec.json.decode(entry.dimensions, type=dict[str, str])
    return UsageLine(minute=entry.minute, dimensions=dimensions, units=entry.units)
