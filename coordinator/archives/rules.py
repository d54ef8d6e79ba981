"""What an archive of a period consists of: its files, the rows in each, and the manifest that names them.

    reports     every report with lines in the period, with the head before it, in the order of the ledger
    transfers   the lines of these reports that are booked in the period: they leave the database
    others      the lines of these reports that are booked in other periods, so that each report can be hashed again
    heads       every report that the seals cover, as a seal hashes it
    movements   every transfer without a report that the seals cover; those of the period stay in the database
    seals       from the one that covers the period's first line to the one that covers its last

The manifest is written last: without one there is no archive.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.proof.rules import ReportRow, Seal, TransferRow

FORMAT = 1
MANIFEST = "manifest.json"


class ArchivedTransfer(NamedTuple):
    """A transfer, with the position of its report. Its columns are those of TransferRow in the same order."""

    position: int | None
    id: int
    period: str
    quota: str
    src: str
    dst: str
    units: int
    cause: str
    region: str | None
    epoch: int | None
    lane: int | None
    seq: int | None
    line: int | None
    part: int
    movement_id: str | None
    window_at: datetime | None
    dimensions: str | None
    charge_period: str
    reverses: int | None
    recorded_at: datetime


class ArchivedReport(NamedTuple):
    position: int
    region: str
    epoch: int
    lane: int
    seq: int
    body_hash: bytes
    previous: bytes | None  # the head of the lane's report before; None for its first
    head: bytes
    lines: int
    recorded_at: datetime

    @property
    def row(self) -> ReportRow:
        return ReportRow(self.epoch, self.lane, self.seq, self.body_hash, self.head, self.lines, self.recorded_at)


class ArchivedHead(NamedTuple):
    position: int
    epoch: int
    lane: int
    seq: int
    head: bytes


class ArchivedSeal(NamedTuple):
    number: int
    previous: bytes
    position: int
    transfer: int
    audit: int
    reports: int
    reports_hash: bytes
    movements: int
    movements_hash: bytes
    entries: int
    entries_hash: bytes
    balances: str  # JSON
    sealed_at: datetime
    hash: bytes

    @property
    def seal(self) -> Seal:
        values = self._asdict() | {"balances": msgspec.json.decode(self.balances)}
        return Seal(**{name: values[name] for name in Seal._fields})


FILES: Mapping[str, type[tuple[Any, ...]]] = {
    "reports": ArchivedReport,
    "transfers": ArchivedTransfer,
    "others": ArchivedTransfer,
    "heads": ArchivedHead,
    "movements": ArchivedTransfer,
    "seals": ArchivedSeal,
}


def transfer_row(row: ArchivedTransfer) -> TransferRow:
    return TransferRow._make(row[1:])


def movement_entry(row: ArchivedTransfer) -> list[object]:
    """Return a movement as a seal hashes it: by content, and not by how its JSON was written."""
    entry = row._asdict()
    del entry["position"]
    return [*(entry | {"dimensions": row.dimensions and msgspec.json.decode(row.dimensions)}).values()]


class ArchivedFile(Struct, frozen=True, forbid_unknown_fields=True):
    rows: int
    bytes: int
    sha256: str


class SealRange(Struct, frozen=True, forbid_unknown_fields=True):
    """The seals of an archive, and what the seal before the first covers."""

    first: int
    last: int
    before_position: int
    before_transfer: int
    position: int
    transfer: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The files of an archive, and what they must add up to. The audit has the SHA-256 of its bytes."""

    format: int
    period: str
    closed_at: datetime
    root: str  # of the close
    transfers: int  # of the period: those of reports and movements
    transfers_sha256: str  # over the rows of the file `transfers`, as the database had them
    usage_sha256: str  # over the rows of the hourly and daily usage, which stay in the database
    first_position: int
    last_position: int
    last_transfer: int
    seals: SealRange
    seal_hash: str  # of the last seal: compare it with one that was kept elsewhere
    written_at: datetime
    files: dict[str, ArchivedFile]


def encoded_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def parse_manifest(content: bytes) -> Manifest:
    """Return the manifest. Raise ValueError if it is none, or of a newer release."""
    manifest = msgspec.json.decode(content, type=Manifest)
    if manifest.format != FORMAT or manifest.files.keys() != FILES.keys():
        raise ValueError(f"it is of format {manifest.format}, and this release reads format {FORMAT}")
    return manifest
