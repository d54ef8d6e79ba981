"""A head covers everything that is billed, so any change of that gives another head."""

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from coordinator.exchange.rules.balances import Account, Cause, Key
from coordinator.exchange.rules.posting import Report, Transfer
from coordinator.proof.rules import genesis_head, next_head

BODY = b"\x01" * 32
NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
TRANSFER = Transfer(
    0,
    Key("exports:tenant=acme", "2026-11"),
    Account.OUTSTANDING,
    Account.CONSUMED,
    7,
    Cause.USAGE,
    29_891_520,
    {"a": "b"},
)


def head(report: Report, previous: bytes = b"", body: bytes = BODY, recorded_at: datetime = NOON) -> bytes:
    return next_head(previous, report, body, recorded_at)


def report(*transfers: Transfer, region: str = "us-east", epoch: int = 1, lane: int = 2, seq: int = 3) -> Report:
    return Report(region, epoch, lane, seq, list(transfers))


def test_the_format_is_fixed() -> None:
    """Check the bytes of a head, because a new format invalidates existing chains."""
    usage = [0, 0, "exports:tenant=acme", "2026-11", "2026-11", "outstanding", "consumed", 7, "usage"]
    minute_us = 29_891_520 * 60_000_000
    noon_us = int(NOON.timestamp()) * 1_000_000
    covered = ["us-east", 1, 2, 3, BODY.hex(), noon_us, [[*usage, minute_us, {"a": "b"}, None, None]]]
    plain = hashlib.sha256(b"leasehold lane 1/2").digest() + json.dumps(covered, separators=(",", ":")).encode()
    assert head(report(TRANSFER), genesis_head(1, 2)) == hashlib.sha256(plain).digest()


@pytest.mark.parametrize(
    "changed",
    [
        replace(TRANSFER, units=8),
        replace(TRANSFER, line=1),
        replace(TRANSFER, part=1),
        replace(TRANSFER, minute=29_891_521),
        replace(TRANSFER, dimensions={"a": "c"}),
        replace(TRANSFER, dimensions=None),
        replace(TRANSFER, cause=Cause.GRANT),
        replace(TRANSFER, src=Account.SUSPENSE),
        replace(TRANSFER, dst=Account.SUSPENSE),
        replace(TRANSFER, key=Key("exports:tenant=globex", "2026-11")),
        replace(TRANSFER, key=Key("exports:tenant=acme", "2026-12")),
    ],
)
def test_every_billed_field_counts(changed: Transfer) -> None:
    assert head(report(changed)) != head(report(TRANSFER))


@pytest.mark.parametrize(
    "other",
    [
        lambda: head(report(TRANSFER, region="eu-west")),
        lambda: head(report(TRANSFER, epoch=9)),
        lambda: head(report(TRANSFER, lane=9)),
        lambda: head(report(TRANSFER, seq=9)),
        lambda: head(report(TRANSFER), body=b"\x02" * 32),
        lambda: head(report(TRANSFER), recorded_at=NOON + timedelta(microseconds=1)),
        lambda: head(report(TRANSFER), previous=b"\x00"),
        lambda: head(report()),
        lambda: head(report(TRANSFER, TRANSFER)),
    ],
)
def test_the_report_and_the_previous_head_count_too(other: Callable[[], bytes]) -> None:
    assert other() != head(report(TRANSFER))


def test_the_order_of_dimensions_does_not_count() -> None:
    one, two = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert head(report(replace(TRANSFER, dimensions=one))) == head(report(replace(TRANSFER, dimensions=two)))
