"""List who is billed in a period: each tenant with lines, as of one position. Needs a snapshot."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from msgspec import Struct

from coordinator.archives.refusal import Archived
from coordinator.archives.statements import hold_archives
from coordinator.database.connection import Connection
from coordinator.periods.read_periods import read_period
from coordinator.proof.seal import Sealed
from coordinator.tenants.operations import read_tenants_by_id
from coordinator.usage.read_amounts import Books, read_amounts
from coordinator.usage.read_statement import NoStatement, find_books_end
from coordinator.usage.rules.statement import Amount, StatementId, StatementLine, lines_of

MOST_LINES = 100_000  # of a page: of more, a page with fewer tenants is asked for


class ListedStatement(Struct, frozen=True, kw_only=True):
    """A tenant's statement in a list, with the name and ids that are registered now."""

    id: str
    tenant: str
    name: str | None
    external_ids: dict[str, str]
    period: str
    billed: int
    is_final: bool
    as_of: int
    path: str
    lines: list[StatementLine] | None = None  # on request


class StatementsPage(NamedTuple):
    """A page of statements. `last` is the last tenant that it covers, if there may be more after it."""

    statements: list[ListedStatement]
    is_final: bool
    as_of: int
    last: str | None


async def list_statements(
    connection: Connection, period_id: str, as_of: int | datetime | None, after: str, count: int, *, with_lines: bool
) -> StatementsPage | NoStatement | Archived:
    """Return the statements of up to `count` tenants by name, from the one after `after`.

    Which statements there are depends only on the period and the position, as their lines do: a tenant without lines
    has none here.
    """
    await hold_archives(connection)
    period = await read_period(connection, period_id)
    if period is None:
        return NoStatement.NO_PERIOD
    sealed = await find_books_end(connection, as_of, [period.id], is_closed=period.state == "closed")
    if isinstance(sealed, NoStatement | Archived):
        return sealed
    position = (period.position or 0) if sealed is None else sealed.position
    tenants = [row["tenant"] for row in await connection.fetch(_TENANTS, period_id, after, count + 1)]
    last = tenants[count - 1] if len(tenants) > count else None
    amounts = await _amounts(connection, period_id, tenants[:count], sealed)
    if sum(map(len, amounts.values())) > MOST_LINES:
        return NoStatement.TOO_LONG
    registered = await read_tenants_by_id(connection, list(amounts))
    statements = []
    for tenant, its in sorted(amounts.items()):
        of, known = StatementId(period_id, tenant), registered.get(tenant)
        statements.append(
            ListedStatement(
                id=str(of),
                tenant=tenant,
                name=known.name if known else None,
                external_ids=known.external_ids if known else {},
                period=period_id,
                billed=sum(each.units for each in its),
                is_final=sealed is None,
                as_of=position,
                path=f"/v1/statements/{of}" + ("" if sealed is None else f"?as_of={position}"),
                lines=lines_of(of, its, sealed and sealed.position) if with_lines else None,
            )
        )
    return StatementsPage(statements, sealed is None, position, last)


async def _amounts(
    connection: Connection, period: str, tenants: Sequence[str], sealed: Sealed | None
) -> dict[str, list[Amount]]:
    amounts = defaultdict[str, list[Amount]](list)
    for each in await read_amounts(connection, Books([period], tenants, sealed), MOST_LINES + 1):
        amounts[each.tenant].append(each.amount)
    return amounts


# By the same order as Python's, whatever the database's collation is.
_TENANTS = """
(SELECT DISTINCT tenant COLLATE "C" AS tenant FROM pool
    WHERE period = $1 AND tenant COLLATE "C" > $2 ORDER BY 1 LIMIT $3)
UNION
(SELECT DISTINCT tenant COLLATE "C" AS tenant FROM usage_day
    WHERE period = $1 AND tenant COLLATE "C" > $2 ORDER BY 1 LIMIT $3)
ORDER BY 1 LIMIT $3
"""
