"""Every table is proven, or listed with the reason why not, and every column of a proven table is proven."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from coordinator.database.connection import Connection
from coordinator.proof.coverage import COVERAGE, NotProven, Proven
from coordinator.proof.rules import FaultKind
from coordinator.proof.verify import verify
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.proof.conftest import forging
from tests.integration.coordinator.proof.history import IN_DECEMBER

pytestmark = pytest.mark.anyio
AUDITING = Path(__file__).parents[4] / "docs" / "guides" / "auditing.md"
PROVEN = {table: proven for table, proven in COVERAGE.items() if isinstance(proven, Proven)}

# Columns of usage, seals and chains, each of which tests/…/test_forged.py changes, and those of archives.
FORGED_ELSEWHERE = {"transfer", "report", "lane", "seal", "audit", "archive", "archived_sum"}


async def test_every_table_is_proven_or_listed_as_not(database: str) -> None:
    async with connected(database) as owner:
        rows = await owner.fetch(_TABLES)
    assert sorted(COVERAGE) == [row["relname"] for row in rows]


def test_the_guide_for_auditors_names_every_table() -> None:
    text = AUDITING.read_text()
    covered, not_covered = text.split("## What is covered")[1].split("## What is not covered")
    not_covered = not_covered.split("\n## ")[0]
    for table, coverage in COVERAGE.items():
        place = covered if isinstance(coverage, Proven) else not_covered
        assert f"`{table}`" in place, table
        if isinstance(coverage, NotProven):
            assert coverage.because in not_covered, table
        else:
            for column, reason in coverage.but_not.items():
                assert f"`{table}.{column}`" in not_covered, column
                assert reason in not_covered, (table, column)


@pytest.mark.parametrize("table", sorted(PROVEN.keys() - FORGED_ELSEWHERE))
async def test_every_column_of_a_proven_table_is_proven(history: str, table: str) -> None:
    """Change each column alone, in the first row in which it can be changed."""
    await expect_proven(history, table)


async def expect_proven(database: str, table: str) -> None:
    async with forging(database) as forger:
        columns = [row["attname"] for row in await forger.fetch(_COLUMNS, table)]
        assert columns
        assert PROVEN[table].but_not.keys() <= set(columns)
        unseen = [
            column
            for column in columns
            if column not in PROVEN[table].but_not and not await is_found(forger, table, column)
        ]
    assert unseen == []


async def is_found(forger: Connection, table: str, column: str) -> bool:
    savepoint = forger.transaction()
    await savepoint.start()
    try:
        row = await forger.fetchrow(
            f"SELECT ctid, {column} AS value FROM {table} ORDER BY {column} IS NULL, ctid LIMIT 1"
        )
        assert row is not None, f"the history has no row of {table}"
        change = f"UPDATE {table} SET {column} = $1 WHERE ctid = $2"
        assert await forger.execute(change, other(column, row["value"]), row["ctid"]) == "UPDATE 1"
        found = await verify(forger, IN_DECEMBER)
        # Constraints are off here, so a guard is always missing; guards are compared last.
        return found.fault is not None and found.fault.kind is not FaultKind.GUARD_CHANGED
    finally:
        await savepoint.rollback()


def other(column: str, value: Any) -> Any:
    """Return something else that the column can hold."""
    if value is None:
        return OF_NOTHING[column]
    if isinstance(value, str) and value[:1] in ("{", "["):
        return json.dumps({"changed": json.loads(value)})
    return next(change(value) for kind, change in _OTHERS.items() if isinstance(value, kind))


# A bool is an int as well, so it comes first.
_OTHERS: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    str: lambda value: f"{value}x" if not value.isdecimal() else f"{value}1",
    bytes: lambda value: bytes([value[0] ^ 1]) + value[1:],
    list: lambda value: [*value, "admin"],
    UUID: lambda value: UUID(int=value.int ^ 1),
    datetime: lambda value: value + timedelta(microseconds=1),
}
OF_NOTHING: dict[str, Any] = {
    "bulk": UUID(int=7),
    "lane": 1,
    "seq": 7,
    "route_class": "x",
    "api_key": "x",
    "degraded": "open",
    "counted_as": "overage",
    "withdrawn_by": UUID(int=1),
    "withdrawn_at": IN_DECEMBER,
    "valid_until": IN_DECEMBER,
}
_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY relname
"""
_COLUMNS = """
SELECT attname FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
