"""Read what a replay needs: the logged checks of a time, and what is in force."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

import asyncpg
import msgspec

from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.decision_log.rules.hashing import KeyHasher
from coordinator.decision_log.store import read_hasher
from coordinator.limits.read_limits import stored_document
from coordinator.limits.rules.entitlement import RegionShare
from coordinator.replays.rules.limits import Circumstances
from coordinator.replays.rules.matching import Matcher
from coordinator.replays.rules.replay import LoggedCheck
from protocol.decision_log.messages import LoggedPolicy
from protocol.limits.document import LimitsDocument, LimitValue

SLICES = 288  # that a time is read in, newest first, so that an answer about a part of it can be given
SHORTEST_SLICE = timedelta(minutes=1)
MOST_VERSIONS = 50  # of the limits document, that may have been in force
A_SECOND = timedelta(seconds=1)


class Traffic(NamedTuple):
    """Which checks are replayed. `end` is exclusive."""

    start: datetime
    end: datetime
    tenant: str | None = None


class InForce(NamedTuple):
    """The state by which checks were decided, as far as a replay needs it besides the document."""

    around: Circumstances
    hasher: KeyHasher
    documents: Sequence[tuple[datetime, LimitsDocument]]  # the newest first


async def read_in_force(connection: Connection, traffic: Traffic, now: datetime) -> InForce:
    hasher = KeyHasher((await read_hasher(connection)).key)
    subscriptions = await connection.fetch(_SUBSCRIPTIONS)
    overrides = {
        row["key"]: msgspec.json.decode(row["value"], type=LimitValue)
        for row in await connection.fetch(_OVERRIDES, now)
    }
    around = Circumstances(
        {row["tenant"]: row["plan"] for row in subscriptions},
        {row["tenant"]: row["began_at"] for row in subscriptions},
        overrides | {hasher.quota(key): limit for key, limit in overrides.items()},
        {row["name"]: RegionShare(row["status"], row["weight"]) for row in await connection.fetch(_REGIONS)},
    )
    versions = await connection.fetch(_VERSIONS, traffic.start, traffic.end, MOST_VERSIONS)
    documents = [(row["applied_at"], stored_document(row["document"], row["version"])) for row in versions]
    return InForce(around, hasher, documents)


async def read_slices(
    database: Database, traffic: Traffic, most_rows: int
) -> AsyncIterator[tuple[datetime, list[asyncpg.Record]]]:
    """Yield the rows of each slice with its beginning, the newest first, until there would be too many."""
    length = max(SHORTEST_SLICE, (traffic.end - traffic.start) / SLICES)
    end, left = traffic.end, most_rows
    while end > traffic.start:
        start = max(traffic.start, end - length)
        rows = await database.read(partial(_read_rows, start=start, end=end, tenant=traffic.tenant, most=left + 1))
        if len(rows) > left:
            return
        yield start, rows
        end, left = start, left - len(rows)


async def _read_rows(
    connection: Connection, start: datetime, end: datetime, tenant: str | None, most: int
) -> list[asyncpg.Record]:
    if tenant is None:
        return await connection.fetch(_ROWS.format(of="true"), start, end, most)
    return await connection.fetch(_ROWS.format(of="tenant = $4"), start, end, most, tenant)


async def read_lost(connection: Connection, start: datetime, end: datetime) -> int:
    """Return how many decisions agents lost then, of all tenants."""
    return int(await connection.fetchval(_LOST, start, end) or 0)


class CheckReader:
    """Makes logged checks of rows. It remembers subjects: most rows repeat one of a few."""

    MOST_REMEMBERED = 20_000

    def __init__(self, in_force: InForce) -> None:
        self._versions = [
            (applied_at, Matcher(document, in_force.hasher.hash, in_force.around.plans))
            for applied_at, document in in_force.documents
        ]
        self._subjects: dict[str, Mapping[str, str]] = {}
        self._own: dict[tuple[str, datetime], Mapping[str, int]] = {}

    def checks(self, row: asyncpg.Record) -> Iterator[LoggedCheck]:
        """Yield the checks of a row. Equal denials are spread over the time from the first to the last of them."""
        text = row["subject"] or "{}"
        subject = self._subjects.get(text)
        if subject is None:
            subject = self._subjects[text] = msgspec.json.decode(text, type=dict[str, str])
            self._forget()
        number = row["times"] * row["weight"]
        check = LoggedCheck(
            row["at"],
            row["tenant"],
            row["region"],
            number,
            row["times"] * row["weight"] * (row["weight"] - 1),
            row["policy"] if row["outcome"] == "denied" else None,
            row["outcome"] == "denied",
            subject,
            text,
            _charged(row),
            self._own_costs(text, subject, row["at"]),
        )
        if row["last_at"] is None:
            yield check
            return
        for at, part in _parts(row["at"], row["last_at"]):
            yield check._replace(at=at, checks=number * part)

    def _own_costs(self, text: str, subject: Mapping[str, str], at: datetime) -> Mapping[str, int]:
        for applied_at, matcher in self._versions:
            if applied_at <= at:
                own = self._own.get((text, applied_at))
                if own is None:
                    own = self._own[text, applied_at] = matcher.own_costs(subject)
                return own
        return {}

    def _forget(self) -> None:
        if len(self._subjects) >= self.MOST_REMEMBERED:
            self._subjects.clear()
            self._own.clear()


def _charged(row: asyncpg.Record) -> dict[str, tuple[str, int]]:
    """Return quota and cost of each policy that charged the check."""
    charged = {row["policy"]: (row["name"], row["cost"])} if row["cost"] is not None else {}
    if row["others"]:
        others = msgspec.json.decode(row["others"], type=list[LoggedPolicy])
        charged |= {each.policy: (each.quota.partition(":")[0], each.cost) for each in others}
    return charged


def _parts(first: datetime, last: datetime) -> Iterator[tuple[datetime, float]]:
    """Yield the seconds of UTC that denials fell into, with the part of them, as if they came evenly."""
    if last <= first:
        yield first, 1.0
        return
    whole, at = last - first, first
    while at < last:
        following = min(last, at.replace(microsecond=0).astimezone(UTC) + A_SECOND)
        yield at, (following - at) / whole
        at = following


_SUBSCRIPTIONS = "SELECT tenant, plan, began_at FROM subscription ORDER BY tenant"
_REGIONS = "SELECT name, status, weight FROM region ORDER BY name"
_OVERRIDES = """
SELECT DISTINCT ON (key) key, value::text FROM limit_override
WHERE valid_from <= $1 AND (valid_until IS NULL OR valid_until > $1) ORDER BY key, created_at DESC, id DESC
"""
_VERSIONS = """
SELECT version, document::text AS document, applied_at FROM limits_version
WHERE applied_at < $2 AND version >= coalesce((SELECT max(version) FROM limits_version WHERE applied_at <= $1), 0)
ORDER BY version DESC LIMIT $3
"""
# Blocks are no part of a document, and work that is already done is never denied.
_ROWS = """
SELECT at, last_at, tenant, region, outcome, policy, name, cost, weight, times, subject::text, others::text
FROM decision
WHERE at >= $1 AND at < $2 AND {of} AND outcome <> 'lost' AND mode IS DISTINCT FROM 'adjust'
    AND reason IS DISTINCT FROM 'blocked'
LIMIT $3
"""
_LOST = "SELECT sum(times) FROM decision WHERE tenant = '' AND outcome = 'lost' AND at >= $1 AND at < $2"
