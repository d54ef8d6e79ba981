"""The removal of a guard is found, even if no row was changed."""

import pytest

from coordinator.proof.rules import FaultKind
from coordinator.proof.verify import GUARDS_UNKNOWN, verify
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.proof.history import IN_DECEMBER

pytestmark = pytest.mark.anyio

REPLACED = """CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN RETURN coalesce(NEW, OLD); END'"""
# The change, and the guard that is named.
REMOVED = {
    "trigger_dropped": ("DROP TRIGGER seal_is_append_only ON seal", "trigger seal.seal_is_append_only"),
    "trigger_disabled": (
        "ALTER TABLE audit DISABLE TRIGGER audit_is_append_only",
        "trigger audit.audit_is_append_only",
    ),
    "all_triggers_disabled": ("ALTER TABLE report DISABLE TRIGGER ALL", "trigger report.report_is_append_only"),
    "trigger_replaced": (
        """DROP TRIGGER period_stays_closed ON period;
        CREATE TRIGGER period_stays_closed BEFORE UPDATE OR DELETE ON period
        FOR EACH ROW WHEN (OLD.state = 'never') EXECUTE FUNCTION refuse_reopening()""",
        "trigger period.period_stays_closed",
    ),
    "trigger_added": (
        "CREATE TRIGGER zz BEFORE INSERT ON transfer FOR EACH ROW EXECUTE FUNCTION refuse_change()",
        "trigger transfer.zz",
    ),
    "function_replaced": (REPLACED, "function refuse_change()"),
    "trigger_of_a_partition_dropped": (
        'DROP TRIGGER transfer_is_of_a_closed_period ON "transfer_2026-11"',
        "trigger transfer_2026-11.transfer_is_of_a_closed_period by refuse_transfer",
    ),
    "trigger_of_a_partition_disabled": (
        'ALTER TABLE "transfer_2026-12" DISABLE TRIGGER transfer_is_append_only',
        "trigger transfer_2026-12.transfer_is_append_only by refuse_change",
    ),
    "check_dropped": ("ALTER TABLE pool DROP CONSTRAINT pool_balances", "constraint pool.pool_balances"),
    "check_replaced": (
        """ALTER TABLE lease DROP CONSTRAINT lease_balances, ADD CONSTRAINT lease_balances CHECK (granted >= 0)""",
        "constraint lease.lease_balances",
    ),
    "check_not_valid": (
        """ALTER TABLE adjustment DROP CONSTRAINT adjustment_has_two_people,
            ADD CONSTRAINT adjustment_has_two_people CHECK (approved_by <> proposed_by) NOT VALID""",
        "constraint adjustment.adjustment_has_two_people",
    ),
    "foreign_key_dropped": ("ALTER TABLE pool DROP CONSTRAINT pool_period_fkey", "constraint pool.pool_period_fkey"),
    "not_null_dropped": ("ALTER TABLE seal ALTER hash DROP NOT NULL", "column seal.hash"),
    "unique_index_dropped": (
        "DROP INDEX resolution_open",
        "index resolution.resolution_open",
    ),
    "coordinator_may_delete": (
        "GRANT DELETE ON transfer TO leasehold_coordinator",
        "privilege transfer.DELETE",
    ),
    "coordinator_may_change_a_column": (
        "GRANT UPDATE (units) ON transfer TO leasehold_coordinator",
        "privilege transfer.units.UPDATE",
    ),
    "coordinator_may_not_insert": (
        "REVOKE INSERT ON audit FROM leasehold_coordinator",
        "privilege audit.INSERT",
    ),
    "everybody_may_change": ("GRANT UPDATE ON seal TO PUBLIC", "privilege seal.UPDATE to PUBLIC"),
    "everybody_may_change_a_partition": (
        'GRANT INSERT ON "transfer_2026-12" TO PUBLIC',
        "privilege transfer_2026-12.INSERT to PUBLIC",
    ),
    "rule_added": ("CREATE RULE quiet AS ON DELETE TO audit DO INSTEAD NOTHING", "switch rule quiet"),
    "row_security": ("ALTER TABLE transfer ENABLE ROW LEVEL SECURITY", "switch row security of transfer"),
    "foreign_keys_disabled": (
        """ALTER TABLE lane DISABLE TRIGGER ALL""",
        "switch foreign keys of lane",
    ),
}


@pytest.mark.parametrize(("change", "guard"), REMOVED.values(), ids=REMOVED)
async def test_a_removed_guard_is_named(history: str, change: str, guard: str) -> None:
    async with connected(history) as owner:
        transaction = owner.transaction()
        await transaction.start()
        await owner.execute(change)
        found = await verify(owner, IN_DECEMBER)
        await transaction.rollback()
    assert found.fault is not None
    assert (found.fault.kind, found.fault.key) == (FaultKind.GUARD_CHANGED, guard)


async def test_triggers_that_a_setting_silences_are_found(database: str) -> None:
    async with connected(database) as owner:
        name = await owner.fetchval("SELECT quote_ident(current_database())")
        await owner.execute(f"ALTER DATABASE {name} SET session_replication_role = replica")
        async with owner.transaction():
            found = await verify(owner, IN_DECEMBER)
    assert found.fault is not None
    assert found.fault.key == "switch setting session_replication_role=replica"


async def test_foreign_objects_in_the_schema_are_not_tampering(history: str) -> None:
    async with connected(history) as owner:
        transaction = owner.transaction()
        await transaction.start()
        await owner.execute(
            """CREATE TABLE report_of_mine (id bigint PRIMARY KEY CHECK (id > 0));
            GRANT ALL ON report_of_mine TO PUBLIC;
            GRANT SELECT ON transfer TO PUBLIC; CREATE INDEX of_mine ON transfer (charge_period);
            CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'"""
        )
        found = await verify(owner, IN_DECEMBER)
        await transaction.rollback()
    assert found.fault is None


async def test_the_schema_of_another_release_is_reported_as_not_compared(history: str) -> None:
    """During an upgrade the database is newer than some programs."""
    async with connected(history) as owner:
        transaction = owner.transaction()
        await transaction.start()
        await owner.execute("UPDATE alembic_version SET version_num = '9999'; DROP TRIGGER seal_is_append_only ON seal")
        found = await verify(owner, IN_DECEMBER)
        await transaction.rollback()
    assert (found.fault, found.not_compared) == (None, [GUARDS_UNKNOWN])
