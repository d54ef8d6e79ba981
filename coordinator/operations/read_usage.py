"""Sum usage up, as finance asked. Wants a snapshot.

An answer is pinned to a ledger position, `as_of`: only reports up to it count, so that the pages of one answer add up
while usage goes on being booked. What is still missing for an answer that stays the same *for ever*: positions are
handed out when a report is written, not when it is committed, so a report that was being committed at that very moment
may join later below the position. Seals (a later part) give positions that nothing can join any more; until then the
doors do not take an `as_of` from callers.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import asyncpg
from msgspec import Struct, field

from coordinator.database.connection import Connection
from coordinator.domain.usage import Dimension, UsageQuestion


class UsageRow(Struct, frozen=True):
    start: datetime = field(name="from")
    end: datetime = field(name="to")
    dimensions: Mapping[Dimension, str | None]  # None: it was booked without one
    units: int


class UsagePage(NamedTuple):
    rows: list[UsageRow]
    as_of: int


async def read_usage(
    connection: Connection, question: UsageQuestion, as_of: int | None, skip: int, count: int
) -> UsagePage:
    """At most so many rows, as of a position or, without one, as of now. A piece without usage has no row."""
    position: int = await connection.fetchval(_POSITION) if as_of is None else as_of
    filters = [question.filters.get(dimension) for dimension in Dimension]
    rows = await connection.fetch(_usage(question), question.boundaries, position, *filters, count, skip)
    return UsagePage([_row(question, row) for row in rows], position)


def _row(question: UsageQuestion, row: asyncpg.Record) -> UsageRow:
    start, end = question.boundaries[row["bucket"] - 1 : row["bucket"] + 1]
    return UsageRow(start, end, {dimension: row[dimension] for dimension in question.group_by}, row["units"])


# What each dimension is in the books. A quota that is counted by tenant knows it; of others the usage line may tell.
_COLUMNS = {
    Dimension.TENANT: "coalesce(pool.tenant, transfer.dimensions ->> 'tenant')",
    Dimension.QUOTA: "pool.name",
    Dimension.REGION: "transfer.region",
    Dimension.POLICY: "transfer.dimensions ->> 'policy'",
}
_FIRST_FILTER = 3
_FILTERS = "\n".join(
    f"    AND (${number}::text[] IS NULL OR {_COLUMNS[dimension]} = ANY (${number}::text[]))"
    for number, dimension in enumerate(Dimension, _FIRST_FILTER)
)


def _usage(question: UsageQuestion) -> str:
    """Nothing of a caller becomes SQL: the columns are the table's above."""
    columns = "".join(f"{_COLUMNS[dimension]} AS {dimension}, " for dimension in question.group_by)
    # By place, for a bare name would be the table's column of that name.
    groups = ", ".join(str(place) for place in range(1, len(question.group_by) + 2))
    return f"""
SELECT width_bucket(transfer.window_at, $1::timestamptz[]) AS bucket, {columns}
    sum(transfer.units)::bigint AS units
FROM transfer JOIN pool USING (quota, period) JOIN report USING (epoch, lane, seq)
WHERE transfer.cause = 'usage'
    AND transfer.window_at >= ($1::timestamptz[])[1]
    AND transfer.window_at < ($1::timestamptz[])[cardinality($1::timestamptz[])]
    AND report.position <= $2
{_FILTERS}
GROUP BY {groups} ORDER BY {groups} LIMIT $7 OFFSET $8
"""  # noqa: S608


_POSITION = "SELECT coalesce(max(position), 0) FROM report"
