"""Find customers whose usage has suddenly grown, and allowances that have been used up for a while.

Each finding is one event, however often it is found: growth once for a tenant, quota and day, and an allowance that is
used up once for its period. How many there are now is shown as a metric by all coordinators.
"""

from collections import Counter
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event
from protocol.identifiers import quota_key

PAST = timedelta(days=28)
MIN_HOURS = 24  # with usage, of the past that usage is compared with
MOST_COMPARED = 500  # tenants and quotas with the highest usage
MOST_USED_UP = 1000
RECENT = timedelta(minutes=20)  # what was used up before was found before


class SignalTerms(NamedTuple):
    """When growth is sudden, and for how long an allowance must be used up. A factor of zero finds no growth."""

    growth_factor: int
    growth_floor_units: int
    used_up_after: timedelta


async def find_signals(connection: Connection, terms: SignalTerms, now: datetime) -> None:
    grown = await _find_growth(connection, terms, now) if terms.growth_factor else Counter[str]()
    used_up = await _find_used_up(connection, terms, now)
    await connection.execute(_SHOW, msgspec.json.encode({"growing": grown, "used_up": used_up}).decode())


async def _find_growth(connection: Connection, terms: SignalTerms, now: datetime) -> Counter[str]:
    """Compare the usage of this hour and the one before with the hours of the past in which there was any."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    rows = await connection.fetch(
        _GROWN,
        *(hour - timedelta(hours=1), hour - PAST, terms.growth_floor_units, MOST_COMPARED),
        *(MIN_HOURS, terms.growth_factor),
    )
    events = [
        event(
            EventKind.USAGE_GROWN,
            {
                "quota": quota_key(row["name"], [("tenant", row["tenant"])]),
                "hour": row["begins_at"].isoformat().replace("+00:00", "Z"),
                "units": row["units"],
                "usual_units": row["usual_units"],
            },
            *(row["tenant"], row["name"], row["begins_at"].date()),
        )
        for row in rows
    ]
    await enqueue(connection, events, now)
    return Counter(row["name"] for row in {(each["tenant"], each["name"]): each for each in rows}.values())


async def _find_used_up(connection: Connection, terms: SignalTerms, now: datetime) -> Counter[str]:
    """Find keys that have nothing left in the current period, and were last used so long ago."""
    used_until = now - terms.used_up_after
    rows = await connection.fetch(_USED_UP, now, used_until - RECENT, used_until, MOST_USED_UP)
    events = [
        event(
            EventKind.ALLOWANCE_USED_UP,
            {
                "quota": row["quota"],
                "period": row["period"],
                "consumed": row["consumed"],
                "used_up_at": row["used_up_at"].isoformat().replace("+00:00", "Z"),
            },
            *(row["quota"], row["period"]),
        )
        for row in rows
        if row["is_recent"]
    ]
    await enqueue(connection, events, now)
    return Counter(row["name"] for row in rows)


_GROWN = """
WITH lately AS (
    SELECT tenant, name, begins_at, sum(units) AS units FROM usage_hour
    WHERE begins_at >= $1 AND tenant IS NOT NULL GROUP BY tenant, name, begins_at
    HAVING sum(units) >= $3 ORDER BY units DESC LIMIT $4
)
SELECT lately.*, past.usual_units FROM lately CROSS JOIN LATERAL (
    SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY units) AS usual_units, count(*) AS hours FROM (
        SELECT sum(units) AS units FROM usage_hour
        WHERE tenant = lately.tenant AND begins_at >= $2 AND begins_at < $1 AND name = lately.name GROUP BY begins_at
    ) AS each_hour
) AS past
WHERE past.hours >= $5 AND lately.units >= $6 * past.usual_units
ORDER BY tenant, name, begins_at
"""
# Nothing is left where no region holds any units, and none may be granted. The last minute of usage is when it ended.
_USED_UP = """
WITH spent AS (
    SELECT quota, period, name, consumed FROM pool JOIN period ON period.id = pool.period
    WHERE period.starts_at <= $1 AND period.ends_at > $1 AND consumed > 0
        AND unallocated = 0 AND outstanding = 0 AND suspense = 0
    LIMIT $4
), recent AS (
    SELECT quota, max(window_at) AS used_at FROM transfer WHERE dst = 'consumed' AND window_at > $2 GROUP BY quota
)
SELECT spent.*, recent.used_at AS used_up_at, recent.used_at IS NOT NULL AS is_recent
FROM spent LEFT JOIN recent USING (quota) WHERE recent.used_at IS NULL OR recent.used_at <= $3
ORDER BY quota, period
"""
_SHOW = "UPDATE measurement SET figures = figures || $1::text::jsonb"
