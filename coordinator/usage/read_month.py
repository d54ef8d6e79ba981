"""Read a tenant's statement of a month: all its periods of that month together. Needs a snapshot.

A period belongs to the month in which it ends on the clock of its own time zone. So each belongs to exactly one month,
whatever zones others have and whatever zone the tenant is shown times in.
"""

from collections import defaultdict
from datetime import UTC, datetime, timedelta

from coordinator.archives.refusal import Archived
from coordinator.archives.statements import hold_archives
from coordinator.database.connection import Connection
from coordinator.periods.read_periods import BookedPeriod, read_some_periods
from coordinator.usage.read_amounts import BookedAmount, Books, question_of, read_amounts
from coordinator.usage.read_statement import NoStatement, find_books_end
from coordinator.usage.read_usage import read_unaccounted
from coordinator.usage.rules.statement import MonthPeriod, MonthStatement, StatementId, month_lines
from protocol.limits.document import PeriodKind
from protocol.periods import period_of
from protocol.zones import zone_of

MOST_AMOUNTS = 100_000
FARTHEST = timedelta(hours=26)  # that a zone's clock can be away from UTC


async def read_month_statement(
    connection: Connection, tenant: str, month: datetime, as_of: int | datetime | None, now: datetime
) -> MonthStatement | NoStatement | Archived:
    """Return the statement. It is final when the month is over in all zones and each of its periods is closed."""
    await hold_archives(connection)
    following = (month + timedelta(days=31)).replace(day=1)
    ids = [row["id"] for row in await connection.fetch(_ENDING, tenant, month - FARTHEST, following + FARTHEST)]
    periods = [each for each in await read_some_periods(connection, ids) if month_of(each.id) == f"{month:%Y-%m}"]
    if not periods:
        return NoStatement.NO_TENANT
    is_over = now >= following + FARTHEST and all(each.state == "closed" for each in periods)
    sealed = await find_books_end(connection, as_of, ids, is_closed=is_over)
    if isinstance(sealed, NoStatement | Archived):
        return sealed
    books = Books([each.id for each in periods], [tenant], sealed)
    amounts = await read_amounts(connection, books, MOST_AMOUNTS + 1)
    if len(amounts) > MOST_AMOUNTS:
        return NoStatement.TOO_LONG
    lines = month_lines(each.amount for each in amounts)
    return MonthStatement(
        tenant=tenant,
        month=f"{month:%Y-%m}",
        is_final=sealed is None,
        as_of=max(each.position or 0 for each in periods) if sealed is None else sealed.position,
        billed=sum(line.units for line in lines),
        unaccounted=await read_unaccounted(connection, question_of(books), *(sealed or (None, None))),
        periods=_summed(periods, amounts, tenant),
        lines=lines,
    )


def month_of(period_id: str) -> str:
    """Return the month in which a period ends, such as 2026-11."""
    period = period_of(period_id)
    if period.calendar.kind is not PeriodKind.ANNIVERSARY:
        return period.label[:7]
    return f"{(period.ends_at - timedelta(microseconds=1)).astimezone(zone_of(period.calendar.zone)):%Y-%m}"


def _summed(periods: list[BookedPeriod], amounts: list[BookedAmount], tenant: str) -> list[MonthPeriod]:
    billed = defaultdict[str, int](int)
    for each in amounts:
        billed[each.period] += each.amount.units
    return [
        MonthPeriod(
            period=each.id,
            starts_at=each.starts_at,
            ends_at=each.ends_at,
            is_closed=each.state == "closed",
            billed=billed[each.id],
            path=f"/v1/statements/{StatementId(each.id, tenant)}",
        )
        for each in sorted(periods, key=lambda each: (each.starts_at, each.ends_at, each.id))
    ]


def parse_month(text: str) -> datetime:
    """Return the beginning of a month in UTC. Raises ValueError for what is no month."""
    month = datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC)
    if f"{month:%Y-%m}" != text:
        raise ValueError("write it as 2026-11")
    return month


_ENDING = """
SELECT id FROM period WHERE ends_at > $2 AND ends_at <= $3 AND (
    EXISTS (SELECT FROM pool WHERE pool.period = period.id AND pool.tenant = $1)
    OR EXISTS (SELECT FROM usage_day WHERE usage_day.period = period.id AND usage_day.tenant = $1))
"""
