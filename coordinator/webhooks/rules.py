"""Webhook events, their signatures, and when a failed delivery is tried again.

An event is written in the transaction of the change that it is about, and delivered at least once. A receiver knows an
event that comes twice by its id. No order is promised. A delivery that is not answered with success is tried again with
exponential back-off until it is a dead letter; 410 makes it one at once. Deliveries are signed as Standard Webhooks
(https://www.standardwebhooks.com) specifies.
"""

import hashlib
import hmac
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from secrets import token_bytes
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID, uuid4, uuid5

from coordinator.exchange.rules.balances import Account, Key, Lease, Pool
from coordinator.exchange.rules.posting import Entry
from protocol.addresses import is_loopback
from protocol.identifiers import parse_quota_key
from protocol.limits.document import Portion


class EventKind(StrEnum):
    THRESHOLD_REACHED = "threshold.reached"
    USAGE_SEALED = "usage.sealed"
    PERIOD_CLOSED = "period.closed"
    ADJUSTMENT_APPROVED = "adjustment.approved"
    SUSPENSE_NEW = "suspense.new"
    DRIFT_FOUND = "drift.found"
    ALLOWANCE_OVERDRAWN = "allowance.overdrawn"
    ALLOWANCE_USED_UP = "allowance.used_up"
    USAGE_GROWN = "usage.grown"


class Event(NamedTuple):
    id: UUID
    kind: EventKind
    data: dict[str, object]


_EVENTS = UUID("0d3c3d0e-52a5-4f0b-9f0e-7765626f6f6b")


def event(kind: EventKind, data: dict[str, object], *once_for: object) -> Event:
    """Make an event. With `once_for` its id follows from these values, so that equal events are one."""
    return Event(uuid5(_EVENTS, "/".join(map(str, (kind, *once_for)))) if once_for else uuid4(), kind, data)


def tenant_of(data: Mapping[str, Any]) -> str | None:
    """Return the tenant of the quota key that an event is about, or None if it is about none."""
    try:
        return parse_quota_key(str(data.get("quota")))[1].get("tenant")
    except ValueError:
        return None


def suspense_events(entries: Sequence[Entry]) -> list[Event]:
    """Return an event for each lease of which these entries move units into suspense."""
    units: dict[tuple[Key, int | None, str | None], int] = {}
    for entry in entries:
        for each in entry.transfers:
            if each.dst is Account.SUSPENSE:
                lease = each.key, entry.epoch, entry.region
                units[lease] = units.get(lease, 0) + each.units
    return [
        event(EventKind.SUSPENSE_NEW, {**key._asdict(), "epoch": epoch, "region": region, "units": count})
        for (key, epoch, region), count in units.items()
    ]


def overdrawn_event(lease: Lease, reported_before: int) -> Event:
    """Return the event of a region that reported an overdraft after it was cut off."""
    total = lease.overdrawn
    name = {**lease.key._asdict(), "region": lease.region, "epoch": lease.epoch}
    data: dict[str, object] = {
        **name,
        "units": total - reported_before,
        "overdrawn": total,
        "overdraft": lease.overdraft,
    }
    return event(EventKind.ALLOWANCE_OVERDRAWN, data, lease.epoch, *lease.key, total)


# --- thresholds -------------------------------------------------------------------------------------------------------


class PoolUsage(NamedTuple):
    """The units of a pool that were consumed, of those that can be spent in its period."""

    consumed: int
    spendable: int

    def reaches(self, threshold: Portion) -> bool:
        if threshold.units is not None:
            return self.consumed >= threshold.units
        return self.spendable > 0 and 100 * self.consumed >= (threshold.percent or 0) * self.spendable

    def units_to_next(self, thresholds: Iterable[Portion]) -> int | None:
        """Return how many units more reach the next threshold, or None if all are reached."""
        levels = (
            each.units if each.units is not None else -(-(each.percent or 0) * self.spendable // 100)
            for each in thresholds
            if not self.reaches(each)
        )
        return min((max(1, level - self.consumed) for level in levels), default=None)


def usage_of(pool: Pool) -> PoolUsage:
    return PoolUsage(pool.used, pool.spendable)


def thresholds_reached(pool: Pool, before: PoolUsage, thresholds: Iterable[Portion]) -> list[Event]:
    """Return events of the thresholds that a pool has reached since, by consumption or by a lower limit.

    A threshold has one event in a period, however often it is reached.
    """
    usage = usage_of(pool)
    if usage == before:
        return []
    data: dict[str, object] = {**pool.key._asdict(), "consumed": pool.used, "limit": pool.spendable}
    return [
        event(EventKind.THRESHOLD_REACHED, data | _threshold_data(each), *pool.key, *_threshold_id(each))
        for each in thresholds
        if usage.reaches(each) and not before.reaches(each)
    ]


def _threshold_data(threshold: Portion) -> dict[str, object]:
    return {name: value for name, value in threshold._asdict().items() if value is not None}


def _threshold_id(threshold: Portion) -> tuple[object, ...]:
    """Return what identifies a threshold within its quota: a percentage, or a number of units."""
    return (threshold.percent,) if threshold.units is None else ("units", threshold.units)


# --- URLs -------------------------------------------------------------------------------------------------------


def canonical_url(url: str) -> str:
    """Return a URL with its scheme in lower case, as RFC 3986 compares it."""
    scheme, separator, rest = url.partition("://")
    return scheme.lower() + separator + rest


def fault_of_url(url: str) -> str | None:
    """Return why no events can be sent to a URL, or None. Private addresses are allowed: only admins register URLs."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        return "The URL has no host, or characters that are not allowed in URLs."
    if parts.username is not None or parts.fragment:
        return "The URL has a user name or a fragment. Leave them out."
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)):
        return None
    return "The URL must begin with https://. Only to this machine http:// is allowed."


# --- signatures -----------------------------------------------------------------------------------------------------

SECRET_PREFIX = "whsec_"  # noqa: S105 - no secret itself
SECRET_BYTES = 32
ROTATES_FOR = timedelta(hours=24)


def new_secret() -> str:
    return SECRET_PREFIX + b64encode(token_bytes(SECRET_BYTES)).decode()


def signature_headers(event_id: UUID, secrets: Sequence[str], at: datetime, body: bytes) -> dict[str, str]:
    """Return the headers that sign a delivery, with a signature for each valid secret.

    The package `standardwebhooks` verifies these headers in the tests. It does not make them: it signs text and not
    bytes, and the three lines are cheaper than a dependency.
    """
    timestamp = str(int(at.timestamp()))
    signed = b".".join((str(event_id).encode(), timestamp.encode(), body))
    keys = [b64decode(secret.removeprefix(SECRET_PREFIX)) for secret in secrets]
    signatures = [b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": str(event_id),
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


# --- retries ----------------------------------------------------------------------------------------------------------

MAX_ATTEMPTS = 15  # about a day and a half
_FIRST, _LONGEST = timedelta(seconds=5), timedelta(hours=6)


def retry_delay(attempts: int, jitter: float) -> timedelta:
    """Return the exponential back-off after so many attempts, less up to a half of it by `jitter` (0 to 1)."""
    longest = min(_FIRST * (1 << min(attempts, 30) - 1), _LONGEST)
    return longest * (0.5 + jitter / 2)


def is_dead(attempts: int, status: int | None) -> bool:
    return attempts >= MAX_ATTEMPTS or status == 410
