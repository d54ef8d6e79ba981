"""What is told to whom, how it is signed, and when it is told again.

An event is written with what it tells, in one transaction, and delivered at least once: whoever receives it twice knows
it by its id. No order is promised. What is answered with anything but success is told again, ever later, until it is a
dead letter; 410 says that nobody wants it any more.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import UUID, uuid4, uuid5

from coordinator.exchange.rules.balances import Account, Entry, Key, Lease, Pool
from protocol.limits.document import Portion


class EventKind(StrEnum):
    THRESHOLD_REACHED = "threshold.reached"
    PERIOD_CLOSED = "period.closed"
    ADJUSTMENT_APPROVED = "adjustment.approved"
    SUSPENSE_NEW = "suspense.new"
    DRIFT_FOUND = "drift.found"
    ALLOWANCE_OVERDRAWN = "allowance.overdrawn"


class Event(NamedTuple):
    id: UUID
    kind: EventKind
    data: dict[str, object]


_EVENTS = UUID("0d3c3d0e-52a5-4f0b-9f0e-7765626f6f6b")


def event(kind: EventKind, data: dict[str, object], *once_for: object) -> Event:
    """What is told once for something has an id that follows from it."""
    return Event(uuid5(_EVENTS, "/".join(map(str, (kind, *once_for)))) if once_for else uuid4(), kind, data)


def suspense_events(entries: Sequence[Entry]) -> list[Event]:
    """Of what comes into suspense with these entries: one for each lease."""
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


def overdrawn_event(lease: Lease, was: int) -> Event:
    """A region was heard again that went on beyond its lease meanwhile."""
    total = lease.overdrawn
    about = {**lease.key._asdict(), "region": lease.region, "epoch": lease.epoch}
    told: dict[str, object] = {**about, "units": total - was, "overdrawn": total, "overdraft": lease.overdraft}
    return event(EventKind.ALLOWANCE_OVERDRAWN, told, lease.epoch, *lease.key, total)


# --- thresholds -------------------------------------------------------------------------------------------------------


class Used(NamedTuple):
    """Of a pool: so much of what can be spent in its period."""

    consumed: int
    spendable: int

    def reaches(self, threshold: Portion) -> bool:
        if threshold.units is not None:
            return self.consumed >= threshold.units
        return self.spendable > 0 and 100 * self.consumed >= (threshold.percent or 0) * self.spendable


def used_of(pool: Pool) -> Used:
    return Used(pool.used, pool.spendable)


def thresholds_reached(pool: Pool, was: Used, thresholds: Iterable[Portion]) -> list[Event]:
    """By what was consumed since, or by a limit that was lowered. A threshold has one event in a period, however
    often it is passed.
    """
    reached = used_of(pool)
    if reached == was:
        return []
    data: dict[str, object] = {**pool.key._asdict(), "consumed": pool.used, "limit": pool.spendable}
    return [
        event(EventKind.THRESHOLD_REACHED, data | _told(each), *pool.key, *_name(each))
        for each in thresholds
        if reached.reaches(each) and not was.reaches(each)
    ]


def _told(threshold: Portion) -> dict[str, object]:
    return {word: value for word, value in threshold._asdict().items() if value is not None}


def _name(threshold: Portion) -> tuple[object, ...]:
    """By which the event is known for ever: 80 percent of a thing, or 80 of its units."""
    return (threshold.percent,) if threshold.units is None else ("units", threshold.units)


# --- where to -------------------------------------------------------------------------------------------------------


def canonical_url(url: str) -> str:
    """Return the URL with its scheme in lower case, as RFC 3986 wants it compared."""
    scheme, separator, rest = url.partition("://")
    return scheme.lower() + separator + rest


def fault_of_url(url: str) -> str | None:
    """Why nothing is told there. Who registers it is an admin: a private address is theirs to name."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        return "it names no host, or has characters that a URL has not"
    if parts.username is not None or parts.fragment:
        return "it names a user or a fragment"
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host)):
        return None
    return "it begins with https://; http:// is for this machine alone"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- signatures -----------------------------------------------------------------------------------------------------

SIGNATURE = "Leasehold-Signature"
ROTATES_FOR = timedelta(hours=24)


def signature(secrets: Sequence[str], at: datetime, body: bytes) -> str:
    """One for each secret that is valid: whoever checks needs one of them to be right."""
    second = int(at.timestamp())
    signed = f"{second}.".encode() + body
    made = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in secrets]
    return ",".join([f"t={second}", *(f"v1={each}" for each in made)])


# --- again ----------------------------------------------------------------------------------------------------------

AT_MOST_ATTEMPTS = 15  # about a day and a half
_FIRST, _LONGEST = timedelta(seconds=5), timedelta(hours=6)


def rests_for(attempts: int, jitter: float) -> timedelta:
    """Twice as long after each attempt, and between a half of that and all of it (`jitter`: from 0 to 1)."""
    longest = min(_FIRST * (1 << min(attempts, 30) - 1), _LONGEST)
    return longest * (0.5 + jitter / 2)


def is_dead(attempts: int, status: int | None) -> bool:
    return attempts >= AT_MOST_ATTEMPTS or status == 410
