"""The database itself refuses wrong changes, whatever the code does, and metrics count what was booked."""

import asyncpg
import pytest
from alembic.script import ScriptDirectory

from migrations.revisions import is_behind, known_revisions
from migrations.run import alembic_config
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, lease, want

pytestmark = pytest.mark.anyio


async def test_the_ledger_is_append_only(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    for table in ("transfer", "report"):
        for statement in ("UPDATE {} SET epoch = epoch", "DELETE FROM {}", "TRUNCATE {} CASCADE"):
            with pytest.raises(asyncpg.RaiseError, match="append-only"):
                await agent_harness.owner.execute(statement.format(table))


SECOND_EPOCH = """
INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at)
SELECT region, 'another', fingerprint, lanes, opened_at FROM region_epoch
"""
BROKEN = [
    ("UPDATE pool SET unallocated = unallocated + 1", "pool_balances"),
    ("UPDATE pool SET unallocated = -1, outstanding = outstanding + unallocated + 1", "pool_unallocated"),
    ("UPDATE lease SET granted = granted + 1", "lease_balances"),
    ("UPDATE lease SET consumed = outstanding + 1, outstanding = -1", "lease_outstanding"),
    (SECOND_EPOCH, "region_epoch_current"),
]


async def test_every_identity_is_checked(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    for statement, constraint in BROKEN:
        with pytest.raises(asyncpg.IntegrityConstraintViolationError, match=constraint):
            await agent_harness.owner.execute(statement)


async def test_a_line_of_a_report_is_booked_once(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    columns = "period, quota, src, dst, units, cause, region, epoch, lane, seq, line, part, charge_period, recorded_at"
    with pytest.raises(asyncpg.UniqueViolationError, match="epoch_lane_seq_line_part_period"):
        await agent_harness.owner.execute(f"INSERT INTO transfer ({columns}) SELECT {columns} FROM transfer")


async def test_the_schema_and_the_code_know_each_other(agent_harness: AgentHarness, agent: Agent) -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert known_revisions() == [script.revision for script in scripts.walk_revisions()][::-1]
    assert (await agent.client.get("/readyz")).json() == {"status": "ready", "reasons": []}
    assert is_behind(None)
    assert not is_behind("9999")  # a newer schema than the code's, with which it still runs
    await agent_harness.owner.execute("DROP TABLE alembic_version")
    answer = await agent.client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "not_ready")
    assert [reason["code"] for reason in answer.json()["reasons"]] == ["schema_behind"]


async def test_metrics_count_what_was_booked(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7))
    await agent.say(2, lease(granted=10, consumed=7))
    shown = (await agent_harness.metrics()).splitlines()
    prefix = "leasehold_coordinator_"
    for line in (
        'exchanges_total{outcome="applied"} 2.0',
        'exchanges_total{outcome="replayed"} 1.0',
        "usage_lines_booked_total 1.0",
        "consumed_units_total 7.0",
        "grants_total 1.0",
        "granted_units_total 10.0",
        'units{account="outstanding",quota="exports"} 3.0',
        "exchange_duration_seconds_count 3.0",
    ):
        assert prefix + line in shown
    assert not any("acme" in line for line in shown)
