"""Each way of tampering with what finance reads is found and named at its place, and an honest history is intact.

A case is the SQL of somebody who owns the database and has switched triggers and constraints off.
"""

from typing import NamedTuple

import pytest

from coordinator.domain.proof import Fault, FaultKind
from coordinator.operations.verify import verify
from tests.integration.coordinator.proof.conftest import forging
from tests.integration.coordinator.proof.history import ACME, DAY, DECEMBER, IN_DECEMBER, NOVEMBER
from tests.integration.coordinator.standing import connected

pytestmark = pytest.mark.anyio


class Case(NamedTuple):
    sql: str
    kind: FaultKind
    # Where it is found: only what is not None is compared.
    table: str | None = None
    key: str | None = None
    seal: int | None = None
    period: str | None = None


def is_at(fault: Fault, case: Case) -> bool:
    """Compare the place of a fault with the expected one; a key may be given by its beginning."""
    places = ((fault.table, case.table), (fault.seal, case.seal), (fault.period, case.period))
    key = fault.key or ""
    return all(expected in (None, found) for found, expected in places) and key.startswith(case.key or "")


ROLLED = f"WHERE period = '{NOVEMBER}' AND tenant = 'acme' AND region = 'eu-west'"
IN_EU = f"{ACME} in eu-west from 2026-11-18T"

ROLLUPS = {
    "hourly_usage_raised": Case(
        f"UPDATE usage_hour SET units = units + 1000 {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_hour",
        key=IN_EU,
        period=NOVEMBER,
    ),
    "daily_usage_raised": Case(
        f"UPDATE usage_day SET units = units + 1000 {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_day",
        key=IN_EU,
        period=NOVEMBER,
    ),
    "usage_of_an_open_period_raised": Case(
        f"UPDATE usage_hour SET units = units + 700 WHERE period = '{DECEMBER}'",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_hour",
        period=DECEMBER,
    ),
    "usage_given_to_another_tenant": Case(
        f"UPDATE usage_day SET tenant = 'hooli' {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_day", key=IN_EU
    ),
    "usage_stored_under_another_name": Case(
        f"UPDATE usage_day SET name = 'mails' {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_day", key=IN_EU
    ),
    "usage_moved_to_another_day": Case(
        f"UPDATE usage_day SET begins_at = begins_at + interval '1 day' {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_day",
        key=IN_EU,
    ),
    "usage_deleted": Case(f"DELETE FROM usage_day {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_day", key=IN_EU),
    "usage_invented": Case(
        f"INSERT INTO usage_day SELECT * FROM usage_day {ROLLED} LIMIT 1", FaultKind.ROLLUP_DIFFERS, table="usage_day"
    ),
    "usage_of_a_period_that_is_not_there": Case(
        f"UPDATE usage_hour SET period = '2026-10' {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_hour", key=ACME
    ),
    "pool_given_to_another_tenant": Case(
        f"UPDATE pool SET tenant = 'hooli' WHERE quota = '{ACME}' AND period = '{DECEMBER}'",
        FaultKind.POOL_CHANGED,
        table="pool",
        key=ACME,
        period=DECEMBER,
    ),
    "pool_stored_under_another_name": Case(
        f"UPDATE pool SET name = 'mails' WHERE quota = '{ACME}' AND period = '{DECEMBER}'",
        FaultKind.POOL_CHANGED,
        table="pool",
        key=ACME,
    ),
    "pool_deleted_with_its_leases_and_usage": Case(
        "".join(
            f"DELETE FROM {table} WHERE quota = '{ACME}' AND period = '{DECEMBER}';"
            for table in ("pool", "lease", "correction", "usage_hour", "usage_day")
        ),
        FaultKind.BALANCE,
        key=ACME,
        period=DECEMBER,
    ),
    "lease_deleted": Case(
        f"DELETE FROM lease WHERE quota = '{ACME}' AND period = '{DECEMBER}'", FaultKind.BALANCE, key=ACME
    ),
    "lease_edited": Case(
        f"UPDATE lease SET granted = granted + 1 WHERE quota = '{ACME}' AND period = '{DECEMBER}'",
        FaultKind.BALANCE,
        key=ACME,
    ),
    "correction_edited": Case(
        "UPDATE correction SET consumed = consumed + 1 WHERE consumed > 0", FaultKind.BALANCE, key=ACME
    ),
    "closed_day_edited": Case(
        f"UPDATE lease SET last_grant = 99 WHERE period = '{DAY}'",
        FaultKind.CLOSED_PERIOD_CHANGED,
        table="period",
        key=DAY,
    ),
}
CASES = ROLLUPS


async def test_an_honest_history_is_intact(history: str) -> None:
    async with connected(history) as owner, owner.transaction(isolation="repeatable_read", readonly=True):
        found = await verify(owner, IN_DECEMBER)
    assert found.fault is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_tampering_is_found_and_named_at_its_place(history: str, case: Case) -> None:
    async with forging(history) as forger:
        await forger.execute(case.sql)
        found = await verify(forger, IN_DECEMBER)
    assert found.fault is not None, "it was not found"
    assert found.fault.kind is case.kind, found.fault
    assert is_at(found.fault, case), found.fault
