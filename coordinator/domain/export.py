"""What an export is, line by line: every usage line of a period, with the report that it came in."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from coordinator.domain.sheet import csv_of


class ExportFormat(StrEnum):
    CSV = "csv"
    NDJSON = "ndjson"


class ExportRow(NamedTuple):
    """In the order of the columns. `transfer` is where it stands in the ledger."""

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


_encoder = msgspec.json.Encoder()


def heading(format_: ExportFormat) -> bytes:
    return csv_of([ExportRow._fields]).encode() if format_ is ExportFormat.CSV else b""


def encoded(format_: ExportFormat, rows: Sequence[ExportRow]) -> bytes:
    if format_ is ExportFormat.CSV:
        return csv_of(rows).encode()
    return _encoder.encode_lines([row._asdict() for row in rows])
