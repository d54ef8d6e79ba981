"""Each total that the rules change has a column, and each statement writes it."""

import re

import pytest
from sqlalchemy import Table

from coordinator.database import tables
from coordinator.exchange.rules.balances import CORRECTION_COLUMNS, LEASE_COLUMNS, POOL_COLUMNS
from coordinator.exchange.statements import balances


@pytest.mark.parametrize(
    ("table", "columns", "statement"),
    [
        (tables.pool, POOL_COLUMNS, balances._BALANCES.partition("), leases AS (")[0]),
        (tables.lease, LEASE_COLUMNS, balances._BALANCES.partition("), leases AS (")[2]),
        (tables.correction, CORRECTION_COLUMNS, balances._WRITE_CORRECTIONS),
    ],
)
def test_every_total_is_written(table: Table, columns: tuple[str, ...], statement: str) -> None:
    written = re.findall(r"(\w+) = (?:new|excluded)\.\1\b", statement)
    assert set(columns) <= set(written) <= {column.name for column in table.columns}


def test_every_column_of_a_row_that_a_write_names_is_one_of_its_table() -> None:
    named = re.search(r"INSERT INTO transfer \(([^)]*)\)\s+SELECT ([^$]*), \$6", balances._WRITE_BOOKED)
    assert named is not None
    into, selected = (re.findall(r"\w+", part) for part in named.groups())
    assert into == [*selected, "recorded_at"]
    assert set(into) <= {column.name for column in tables.transfer.columns}
