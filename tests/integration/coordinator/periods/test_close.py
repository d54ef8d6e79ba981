"""A month closes: first nothing is granted in it, then it never changes, and late usage is a correction."""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from coordinator.access.rules.audit import Actor
from coordinator.exchange.expire_leases import expire_leases
from coordinator.exchange.recall import recall_suspense
from coordinator.periods.close import CloseRequest, PeriodClose, close_period, continue_closing
from coordinator.proof.seal import seal
from coordinator.proof.verify import verify
from coordinator.usage.reconcile import read_settled
from protocol.identifiers import lane_of
from protocol.messages import Signal
from protocol.outcomes import ExchangeOutcome
from tests.integration.coordinator.agent_harness import EXPORTS, MAILS, PERIOD, Agent, AgentHarness, lease, leased, want
from tests.integration.coordinator.fixtures import connected, put_off

pytestmark = pytest.mark.anyio

DECEMBER = datetime(2026, 12, 1, 6, tzinfo=UTC)
NEXT = "2026-12"
GRACE = timedelta(minutes=15)


async def closed(agent_harness: AgentHarness, period: str = PERIOD, **body: Any) -> httpx.Response:
    client = await agent_harness.client("period:close")
    return await client.post(f"/v1/periods/{period}:close", json=body)


async def close_at_last(agent_harness: AgentHarness, **body: Any) -> dict[str, Any]:
    """Request the close, wait for it, and return it closed."""
    first = await closed(agent_harness, **body)
    assert first.status_code == 202, first.text
    agent_harness.clock.move(minutes=16)
    answer = await closed(agent_harness, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def use(agent_harness: AgentHarness, agent: Agent, units: int = 10, used: int = 7) -> None:
    """Lease so many units in November, and report a part of them as used."""
    await agent.say(1, demands=[want(waiting=units)])
    await agent.say(2, lease(granted=units, consumed=used))


async def expire(agent_harness: AgentHarness) -> None:
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        await expire_leases(coordinator, agent_harness.clock.now())


async def in_december(agent_harness: AgentHarness, *, in_suspense: bool) -> None:
    agent_harness.clock.time = DECEMBER
    if in_suspense:
        await expire(agent_harness)


async def word(agent_harness: AgentHarness, period: str) -> tuple[str, list[Any]]:
    client = await agent_harness.client("usage:read")
    found = (await client.get(f"/v1/periods/{period}/reconciliation")).json()
    balance = (await client.get(f"/v1/periods/{period}/trial-balance")).json()
    assert found["status"] == balance["status"]
    return found["status"], found["findings"]


async def is_proven(agent_harness: AgentHarness) -> None:
    async with agent_harness.owner.transaction(isolation="repeatable_read", readonly=True):
        found = await verify(agent_harness.owner, agent_harness.clock.now())
    assert found.intact, found.fault
    for period in (PERIOD, NEXT):
        if await agent_harness.one("SELECT count(*) FROM period WHERE id = $1", period):
            assert await word(agent_harness, period) == ("balanced", [])


async def pool(agent_harness: AgentHarness, period: str, quota: str = EXPORTS) -> dict[str, int]:
    row = await agent_harness.owner.fetchrow("SELECT * FROM pool WHERE quota = $1 AND period = $2", quota, period)
    assert row is not None
    return {name: units for name, units in row.items() if isinstance(units, int) and units}


async def correction(agent_harness: AgentHarness) -> dict[str, Any]:
    row = await agent_harness.owner.fetchrow("SELECT * FROM correction")
    assert row is not None
    return {name: value for name, value in row.items() if value}


async def late_transfers(agent_harness: AgentHarness) -> list[tuple[str, str, str, int]]:
    rows = await agent_harness.owner.fetch(
        "SELECT src, dst, cause, units FROM transfer WHERE charge_period <> period ORDER BY id"
    )
    return [tuple(row.values()) for row in rows]


# --- the close --------------------------------------------------------------------------------------------------------


async def test_a_month_is_closed_and_shown_as_closed(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, returned=3))
    await in_december(agent_harness, in_suspense=False)
    body = await close_at_last(agent_harness)
    assert (body["period"]["state"], body["missing"], body["suspense_carried"]) == ("closed", [], [])
    assert body["period"]["closed_at"] == "2026-12-01T06:16:00Z"
    assert (body["period"]["transfers"], len(body["period"]["root"])) == (4, 64)
    client = await agent_harness.client("usage:read")
    assert (await client.get(f"/v1/periods/{PERIOD}")).json() == body["period"]
    reconciled = (await client.get(f"/v1/periods/{PERIOD}/reconciliation")).json()
    assert (reconciled["status"], reconciled["state"]) == ("balanced", "closed")
    assert reconciled["closed_by"] == body["period"]["closed_by"]
    assert (await agent_harness.lease(agent))["state"] == "closed"
    assert (await closed(agent_harness)).json() == body
    audit = await (await agent_harness.client("audit:read")).get(f"/v1/audit?object={PERIOD}")
    assert {each["action"] for each in audit.json()["data"]} == {"period.closing", "period.closed"}
    await is_proven(agent_harness)


async def test_a_month_that_has_not_ended_is_not_closed(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    answer = await closed(agent_harness)
    assert answer.status_code == 409
    assert [each["what"] for each in answer.json()["missing"]] == ["not_over"]
    assert answer.json()["detail"] == "The period has not ended."
    assert await agent_harness.one("SELECT state FROM period") == "open"
    assert (await closed(agent_harness, "2027-01")).status_code == 404
    assert (await closed(agent_harness, "soon")).status_code == 404


async def test_a_closing_month_grants_nothing_and_covers_reported_usage(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await use(agent_harness, agent)
    agent_harness.clock.time = DECEMBER - timedelta(hours=7)  # no lease ahead yet
    await agent.say(3, lease(granted=10, consumed=7, units=0))
    await agent_harness.owner.execute(
        "UPDATE period SET state = 'closing', close_requested_at = now(), close_requested_by = 'x'"
    )
    reply = await agent.say(4, lease(granted=10, consumed=7, units=0), demands=[want(waiting=5)])
    assert (leased(reply).granted, leased(reply).refusal, leased(reply).final) == (10, "period_not_open", True)
    reply = await agent.say(5, lease(granted=10, consumed=25, units=18))
    assert (leased(reply).granted, leased(reply).overage) == (25, 0)
    await agent.say(6, lease(granted=25, consumed=1005, units=980))
    found = await agent_harness.pool()
    assert (found["consumed"], found["overage"], found["unallocated"]) == (1005, 5, 0)


async def test_a_close_waits_for_outstanding_units(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    agent_harness.clock.time = DECEMBER
    agent_harness.clock.move(minutes=-1)
    await agent.say(3, lease(granted=10, consumed=7, units=0))
    agent_harness.clock.time = DECEMBER
    first = (await closed(agent_harness)).json()
    assert [each["what"] for each in first["missing"]] == ["grace", "held"]
    assert first["missing"][1] | {"reason": "", "until": None} == {
        "what": "held",
        "reason": "",
        "until": None,
        "quota": EXPORTS,
        "region": "us-east",
        "epoch": agent.epoch,
        "charge_period": PERIOD,
        "units": 3,
    }
    await agent.say(4, lease(granted=10, consumed=8, returned=2, units=1))
    agent_harness.clock.move(minutes=16)
    assert (await closed(agent_harness)).status_code == 200
    assert await pool(agent_harness, PERIOD) == {"funded": 1000, "unallocated": 992, "consumed": 8}
    await is_proven(agent_harness)


async def test_suspense_is_resolved_or_carried(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    before = await agent_harness.owner.fetch("SELECT * FROM period, pool, lease")
    answer = await closed(agent_harness)
    assert answer.status_code == 409
    (missing,) = [each for each in answer.json()["missing"] if each["what"] == "suspense"]
    assert (missing["quota"], missing["region"], missing["epoch"], missing["units"]) == (
        EXPORTS,
        "us-east",
        agent.epoch,
        3,
    )
    assert await agent_harness.owner.fetch("SELECT * FROM period, pool, lease") == before
    body = await close_at_last(agent_harness, carry_suspense=True)
    assert [(each["quota"], each["units"]) for each in body["suspense_carried"]] == [(EXPORTS, 3)]
    assert await pool(agent_harness, PERIOD) == {
        "funded": 1000,
        "unallocated": 990,
        "consumed": 7,
        "suspense_carried_out": 3,
    }
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "suspense_carried": 3}
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_carried_suspense_is_never_granted(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    await agent.say(3, demands=[want(waiting=5000)])
    assert await pool(agent_harness, NEXT) == {
        "suspense_carried_in": 3,
        "suspense_carried": 3,
        "funded": 1000,
        "outstanding": 1000,
    }


async def test_a_dry_run_reports_and_changes_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    answer = await closed(agent_harness, dry_run=True, carry_suspense=True)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["is_dry_run"], body["period"]["state"], [each["units"] for each in body["suspense_carried"]]) == (
        True,
        "open",
        [3],
    )
    assert [each["what"] for each in body["missing"]] == ["grace"]
    assert await agent_harness.one("SELECT count(*) FROM audit WHERE action LIKE 'period%'") == 0
    assert await agent_harness.one("SELECT state FROM period") == "open"


async def test_quarantine_and_open_proposals_block_a_close(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, units=6))
    await in_december(agent_harness, in_suspense=False)
    answer = await closed(agent_harness, carry_suspense=True)
    assert {each["what"] for each in answer.json()["missing"]} >= {"quarantine", "unbalanced"}
    proposal = {"epoch": agent.epoch, "quota": EXPORTS, "period": PERIOD, "kind": "unattributed", "reason": "why"}
    proposed = await (await agent_harness.client("adjust:propose")).post("/v1/suspense:propose", json=proposal)
    answer = await closed(agent_harness, carry_suspense=True)
    assert "proposal" in {each["what"] for each in answer.json()["missing"]}
    await (await agent_harness.client("adjust:approve")).post(f"/v1/suspense/{proposed.json()['id']}:approve")
    await close_at_last(agent_harness, carry_suspense=True)
    assert (await pool(agent_harness, PERIOD))["consumed"] == 7


@pytest.mark.extended
@pytest.mark.parametrize("is_proposed_before", [False, True])
async def test_a_quarantine_of_a_retired_epoch_can_be_resolved_and_blocks_no_close(
    agent_harness: AgentHarness, agent: Agent, *, is_proposed_before: bool
) -> None:
    """Usage that its region had reported is booked, and its returns free nothing: they go to suspense."""
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, returned=1, units=6))
    before = await proposed(agent_harness, agent, "unattributed") if is_proposed_before else None
    allocator = await agent_harness.client("alloc:write")
    assert (await allocator.post(f"/v1/epochs/{agent.epoch}:retire", json={"reason": "why"})).status_code == 200
    assert (await agent_harness.lease(agent))["state"] == "quarantined"
    assert (
        await approved(agent_harness, before or await proposed(agent_harness, agent, "unattributed"))
    ).status_code == 200
    mine = await agent_harness.lease(agent)
    assert (mine["state"], mine["consumed"], mine["returned"], mine["suspense"]) == ("retired", 7, 0, 3)
    await in_december(agent_harness, in_suspense=False)
    await close_at_last(agent_harness, carry_suspense=True)
    assert ((await pool(agent_harness, PERIOD))["consumed"], (await pool(agent_harness, NEXT))["suspense_carried"]) == (
        7,
        3,
    )


async def test_an_unbalanced_period_is_not_closed(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    async with agent_harness.owner.transaction():
        await agent_harness.owner.execute("SET LOCAL session_replication_role = replica")
        await agent_harness.owner.execute("UPDATE lease SET region_consumed = 8")
    answer = await closed(agent_harness, carry_suspense=True)
    (missing,) = [each for each in answer.json()["missing"] if each["what"] == "unbalanced"]
    assert (answer.status_code, missing["region"], missing["epoch"]) == (409, "us-east", agent.epoch)
    assert "drift" in missing["reason"]
    async with agent_harness.owner.transaction():
        await agent_harness.owner.execute("SET LOCAL session_replication_role = replica")
        await agent_harness.owner.execute("UPDATE lease SET region_consumed = 7")


async def test_a_close_continues_by_itself(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    assert (await closed(agent_harness, carry_suspense=True)).status_code == 202
    database = agent_harness.app.state.coordinator.database
    await continue_closing(database, agent_harness.clock, GRACE)
    assert await agent_harness.one("SELECT state FROM period WHERE id = $1", PERIOD) == "closing"
    agent_harness.clock.move(minutes=16)
    await continue_closing(database, agent_harness.clock, GRACE)
    assert await agent_harness.one("SELECT state FROM period WHERE id = $1", PERIOD) == "closed"
    closer = await agent_harness.one("SELECT close_requested_by FROM period WHERE id = $1", PERIOD)
    assert await agent_harness.one("SELECT actor FROM audit WHERE action = 'period.closed'") == closer


@pytest.mark.extended
async def test_outstanding_units_are_recalled_repeatedly(agent_harness: AgentHarness, agent: Agent) -> None:
    """The region keeps its lease of the new month."""
    await use(agent_harness, agent)
    database = agent_harness.app.state.coordinator.database
    agent_harness.clock.time = DECEMBER - timedelta(seconds=30)
    await agent.say(3, lease(granted=10, consumed=7, units=0), demands=[want(demand_milli=1000)])
    ahead = await agent_harness.one("SELECT outstanding FROM lease WHERE period = $1", NEXT)
    assert ahead > 0
    agent_harness.clock.time = DECEMBER - timedelta(seconds=30) + timedelta(seconds=60)
    expected = {Signal(kind="recall", quota=EXPORTS, keep=ahead)}
    with agent_harness.hub.subscribe("us-east") as heard, agent_harness.hub.subscribe("eu-west") as other:
        assert (await closed(agent_harness)).status_code == 202
        for _ in range(2):
            await continue_closing(database, agent_harness.clock, GRACE)
            assert set(await heard.take(10) or ()) == expected
        held = await agent_harness.one("SELECT outstanding FROM lease WHERE period = $1", PERIOD)
        await agent.say(4, lease(granted=7 + held, consumed=7, returned=held, units=0))
        await continue_closing(database, agent_harness.clock, GRACE)
        agent_harness.clock.move(minutes=16)
        await continue_closing(database, agent_harness.clock, GRACE)
        assert await other.take(0.01) == []
    assert await agent_harness.one("SELECT state FROM period WHERE id = $1", PERIOD) == "closed"


async def recall(agent_harness: AgentHarness) -> int:
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        return await recall_suspense(coordinator, agent_harness.clock.now())


@pytest.mark.extended
@pytest.mark.parametrize("is_carried", [True, False])
async def test_suspense_is_requested_from_its_region_until_it_reports(
    agent_harness: AgentHarness, agent: Agent, is_carried: bool
) -> None:
    """After its agent died, no agent reads the store's lease, which would stay in suspense for ever."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    if is_carried:
        await close_at_last(agent_harness, carry_suspense=True)
    await agent.say(1, demands=[want(MAILS)], quota=MAILS)  # it is connected, and reports something else
    with agent_harness.hub.subscribe("us-east") as heard:
        for _ in range(2):
            assert await recall(agent_harness) == 1
            assert await heard.take(10) == [Signal(kind="recall", quota=EXPORTS, keep=0)]
    await agent.say(3, lease(granted=10, consumed=7, returned=3, units=0))
    assert await recall(agent_harness) == 0


@pytest.mark.extended
async def test_suspense_of_an_ended_epoch_is_not_requested(agent_harness: AgentHarness, agent: Agent) -> None:
    """Its region reports it by itself, or cannot."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await agent.open()
    assert await recall(agent_harness) == 0
    await close_at_last(agent_harness, carry_suspense=True)
    assert await recall(agent_harness) == 0


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_close_covers_transfers_read_before_and_after_its_seal(
    agent_harness: AgentHarness, agent: Agent, is_sealed: bool
) -> None:
    """Transfers below a seal are read before the period is locked, and not again."""
    await put_off(agent_harness.owner, "seal", "close_periods")
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, returned=3))
    await in_december(agent_harness, in_suspense=False)
    await closed(agent_harness)
    agent_harness.clock.move(minutes=16)
    async with connected(agent_harness.url) as coordinator:
        if is_sealed:
            async with coordinator.transaction():
                await seal(coordinator, agent_harness.clock.now())
        settled = await read_settled(coordinator, PERIOD)
        assert settled.transfers == (4 if is_sealed else 0)
        said = await agent.say(3, lease(granted=10, consumed=9, returned=3, units=2))
        assert said.outcome is ExchangeOutcome.APPLIED, said
        async with coordinator.transaction():
            request = CloseRequest(Actor("somebody"))
            answer = await close_period(coordinator, PERIOD, request, settled, GRACE, agent_harness.clock.now())
    assert isinstance(answer, PeriodClose)
    assert (answer.missing, answer.period.state, answer.period.transfers) == ([], "closed", 6)
    assert await pool(agent_harness, PERIOD) == {"funded": 1000, "unallocated": 991, "consumed": 9}
    await is_proven(agent_harness)


# --- a closed period is final -----------------------------------------------------------------------------------------

MOVED = f"""(id, period, quota, src, dst, units, cause, movement_id, charge_period, recorded_at)
    OVERRIDING SYSTEM VALUE VALUES (1, '{PERIOD}', '{EXPORTS}', 'funding', 'unallocated', 1, 'funded',
        gen_random_uuid(), '{PERIOD}', now())"""
TAMPERING = {
    "transfer": f"INSERT INTO transfer {MOVED}",
    "partition": f'INSERT INTO "transfer_{PERIOD}" {MOVED}',
    "transfer_changed": f"UPDATE transfer SET units = units + 1 WHERE period = '{PERIOD}'",
    "transfer_deleted": f'DELETE FROM "transfer_{PERIOD}"',
    "pool_changed": f"UPDATE pool SET funded = funded + 1, unallocated = unallocated + 1 WHERE period = '{PERIOD}'",
    "pool_added": f"INSERT INTO pool (quota, period, name) VALUES ('new', '{PERIOD}', 'new')",
    "pool_moved": f"UPDATE pool SET period = '{PERIOD}', quota = 'other' WHERE quota = 'alone'",
    "lease_changed": f"UPDATE lease SET demand_milli = 1 WHERE period = '{PERIOD}'",
    "lease_deleted": f"DELETE FROM lease WHERE period = '{PERIOD}'",
    "lease_added": f"""INSERT INTO lease (epoch, quota, period, region, reported_at, expires_at)
        SELECT epoch, '{MAILS}', '{PERIOD}', region, now(), now() FROM region_epoch LIMIT 1""",
    "period_reopened": f"UPDATE period SET state = 'open' WHERE id = '{PERIOD}'",
    "period_changed": f"UPDATE period SET root = '' WHERE id = '{PERIOD}'",
    "period_deleted": f"DELETE FROM period WHERE id = '{PERIOD}'",
}


@pytest.mark.parametrize("statement", TAMPERING.values(), ids=TAMPERING)
async def test_the_database_refuses_every_change_to_a_closed_month_even_of_the_owner(
    agent_harness: AgentHarness, agent: Agent, statement: str
) -> None:
    """Each statement succeeds while the month is open, except those that the ledger never allows."""
    await use(agent_harness, agent)
    await agent_harness.owner.execute("INSERT INTO pool (quota, period, name) VALUES ($1, $2, 'mails')", MAILS, PERIOD)
    await in_december(agent_harness, in_suspense=True)
    await agent_harness.owner.execute(
        "INSERT INTO period (id, kind, starts_at, ends_at) VALUES ('2027-01', 'month', '2027-01-01', '2027-02-01')"
    )
    await agent_harness.owner.execute("INSERT INTO pool (quota, period, name) VALUES ('alone', '2027-01', 'alone')")
    await close_at_last(agent_harness, carry_suspense=True)
    with pytest.raises(asyncpg.RaiseError, match=r"closed|append-only"):
        await agent_harness.owner.execute(statement)


async def test_verify_finds_changes_made_without_triggers(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    await is_proven(agent_harness)
    async with agent_harness.owner.transaction():
        await agent_harness.owner.execute("SET LOCAL session_replication_role = replica")
        await agent_harness.owner.execute(f"UPDATE lease SET last_grant = 99 WHERE period = '{PERIOD}'")
    async with agent_harness.owner.transaction(isolation="repeatable_read", readonly=True):
        found = await verify(agent_harness.owner, agent_harness.clock.now())
    assert found.fault is not None
    assert (found.fault.kind, found.fault.period) == ("closed_period_changed", PERIOD)


@pytest.mark.extended
async def test_fencing_and_retiring_do_not_change_a_closed_period(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    before = await agent_harness.lease(agent)
    epoch, agent.fingerprint = agent.epoch, "another incarnation"
    assert (await agent.open()).status_code == 200
    client = await agent_harness.client("alloc:write")
    assert (await client.post(f"/v1/epochs/{epoch}:retire", json={"reason": "why"})).status_code == 200
    agent.epoch = epoch
    assert await agent_harness.lease(agent) == before


# --- late usage -------------------------------------------------------------------------------------------------------


async def test_late_usage_drains_carried_suspense_and_the_rest_is_a_correction(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    november = await agent_harness.owner.fetch("SELECT * FROM transfer WHERE period = $1 ORDER BY id", PERIOD)
    reply = await agent.say(3, lease(granted=10, consumed=12, units=5))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await late_transfers(agent_harness) == [
        ("suspense_carried_in", "suspense_carried", "suspense_carried", 3),
        ("suspense_carried", "consumed", "usage", 3),
        ("correction", "consumed", "usage", 2),
    ]
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "correction": 2, "consumed": 5}
    assert (await correction(agent_harness))["region_consumed"] == 12
    assert await agent_harness.owner.fetch("SELECT * FROM transfer WHERE period = $1 ORDER BY id", PERIOD) == november
    await is_proven(agent_harness)
    again = await agent.say(3, lease(granted=10, consumed=12, units=5))
    assert (again.outcome, await pool(agent_harness, NEXT)) == (
        ExchangeOutcome.REPLAYED,
        await pool(agent_harness, NEXT),
    )


@pytest.mark.extended
async def test_late_usage_replaces_an_estimate_and_then_a_write_off(agent_harness: AgentHarness, agent: Agent) -> None:
    """Check that billed is consumed + estimated - replaced: 7 + 2, then 8 more of which 2 replace the estimate."""
    await agent.say(1, demands=[want(waiting=13)])
    await agent.say(2, lease(granted=13, consumed=7))
    await in_december(agent_harness, in_suspense=True)
    proposal = {"epoch": agent.epoch, "quota": EXPORTS, "period": PERIOD, "kind": "estimate", "units": 2}
    proposed = await (await agent_harness.client("adjust:propose")).post(
        "/v1/suspense:propose", json=proposal | {"reason": "why"}
    )
    await (await agent_harness.client("adjust:approve")).post(f"/v1/suspense/{proposed.json()['id']}:approve")
    await close_at_last(agent_harness)
    await agent.say(3, lease(granted=13, consumed=15, units=8))
    assert await late_transfers(agent_harness) == [
        ("correction", "consumed", "replaces_estimate", 2),
        ("correction", "consumed", "replaces_write_off", 4),
        ("correction", "consumed", "usage", 2),
    ]
    found = await correction(agent_harness)
    assert (found["replaced"], found["recovered"], found["consumed"]) == (2, 4, 8)
    await is_proven(agent_harness)
    await agent.say(4, lease(granted=13, consumed=16, units=1))
    assert (await late_transfers(agent_harness))[-1] == ("correction", "consumed", "usage", 1)


async def test_late_returns_free_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    await agent.say(3, lease(granted=10, consumed=8, returned=2, units=1), demands=[want()])
    found = await pool(agent_harness, NEXT)
    assert (found["suspense_carried_in"], found["consumed"], found["written_off"], found["funded"]) == (3, 1, 2, 1000)
    assert found["unallocated"] + found["outstanding"] == 1000
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_late_returns_of_an_epoch_with_data_loss_stay_in_suspense(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    epoch = agent.epoch
    assert (await agent.open()).status_code == 200  # it does not claim that no data was lost
    agent.epoch = epoch
    await agent.say(3, lease(granted=10, consumed=8, returned=2, units=1))
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "suspense_carried": 2, "consumed": 1}


@pytest.mark.extended
async def test_evidence_of_loss_counts_in_a_closed_month_too(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    await agent.say(3, lease(granted=10, consumed=9, units=2))
    regressed = await agent.say(4, lease(granted=10, consumed=8, units=1))
    assert regressed.outcome is ExchangeOutcome.STORE_REGRESSED
    assert (await pool(agent_harness, NEXT))["consumed"] == 2


@pytest.mark.parametrize(
    ("totals", "days", "reason"),
    [
        ({"consumed": 9, "units": 1}, 1, "lines_disagree"),
        ({"consumed": 9, "units": 2, "returned": 5}, 1, "returned_too_much"),
        ({"consumed": 9, "units": 2}, 36, "too_late"),
    ],
)
async def test_reports_that_cannot_be_booked_are_kept_and_acknowledged(
    agent_harness: AgentHarness, agent: Agent, totals: dict[str, Any], days: int, reason: str
) -> None:
    """Later reports of it are kept too, until people have resolved it."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    agent_harness.clock.move(days=days)
    units = totals.pop("units")
    reply = await agent.say(3, lease(granted=10, units=units, **totals))
    assert (reply.outcome, reply.receipt is not None) == (ExchangeOutcome.APPLIED, True)
    later = totals | {"consumed": totals["consumed"] + 1}
    assert (await agent.say(4, lease(granted=10, units=1, **later))).outcome is ExchangeOutcome.APPLIED
    kept = await agent_harness.owner.fetch("SELECT seq, reason, evidence FROM quarantine ORDER BY seq")
    assert [(row["seq"], row["reason"]) for row in kept] == [(3, reason), (4, "quarantined_before")]
    assert await agent_harness.one("SELECT sum(consumed) FROM correction") == 0
    assert await agent_harness.one("SELECT sum(suspense_carried) FROM correction") == 3


@pytest.mark.extended
async def test_work_without_a_lease_in_a_closed_month_is_booked(agent_harness: AgentHarness, agent: Agent) -> None:
    """There was neither a pool nor a lease of it, and none is created."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    reply = await agent.say(1, lease(MAILS, consumed=4), quota=MAILS)
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await pool(agent_harness, NEXT, MAILS) == {"correction": 4, "consumed": 4}
    assert await agent_harness.one("SELECT count(*) FROM pool WHERE period = $1", PERIOD) == 1


@pytest.mark.extended
async def test_suspense_is_carried_on_when_the_next_month_closes(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    await agent.say(3, lease(granted=10, consumed=8, units=1))
    agent_harness.clock.time = datetime(2027, 1, 1, 6, tzinfo=UTC)
    await closed(agent_harness, NEXT, carry_suspense=True)
    agent_harness.clock.move(minutes=16)
    assert (await closed(agent_harness, NEXT, carry_suspense=True)).status_code == 200
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "consumed": 1, "suspense_carried_out": 2}
    assert await pool(agent_harness, "2027-01") == {"suspense_carried_in": 2, "suspense_carried": 2}
    await agent.say(4, lease(granted=10, consumed=10, units=2))
    assert await pool(agent_harness, "2027-01") == {"suspense_carried_in": 2, "consumed": 2}
    await is_proven(agent_harness)
    assert await word(agent_harness, "2027-01") == ("balanced", [])


@pytest.mark.extended
async def test_late_usage_is_booked_against_carry_over_until_that_month_closes(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """It is January, and November's three units wait in December; otherwise they would wait there for ever."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    agent_harness.clock.time = datetime(2027, 1, 1, 6, tzinfo=UTC)
    await agent.say(3, lease(granted=10, consumed=9, units=2))
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "suspense_carried": 1, "consumed": 2}
    await closed(agent_harness, NEXT, carry_suspense=True)
    agent_harness.clock.move(minutes=16)
    assert (await closed(agent_harness, NEXT, carry_suspense=True)).status_code == 200
    await agent.say(4, lease(granted=10, consumed=11, units=2))
    assert await pool(agent_harness, "2027-01") == {"suspense_carried_in": 1, "correction": 1, "consumed": 2}
    await is_proven(agent_harness)
    assert await word(agent_harness, "2027-01") == ("balanced", [])


@pytest.mark.extended
async def test_a_lane_resumes_after_the_ledger_lost_data_of_a_closed_month(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Two reports and ten granted units were lost: their usage is a correction."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    said = lease(granted=20, consumed=16, returned=4, units=2)
    assert (await agent.say(5, said)).outcome is ExchangeOutcome.GAP
    november = await agent_harness.lease(agent)
    proposal = {"epoch": agent.epoch, "lane": lane_of(EXPORTS, agent.lanes), "kind": "rebase", "reason": "why"}
    proposed = await (await agent_harness.client("adjust:propose")).post("/v1/suspense:propose", json=proposal)
    approver = await agent_harness.client("adjust:approve")
    approved = await approver.post(f"/v1/suspense/{proposed.json()['id']}:approve")
    assert approved.status_code == 200, approved.text
    assert (await agent.say(5, said)).outcome is ExchangeOutcome.APPLIED
    assert await agent_harness.lease(agent) == november
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "correction": 6, "consumed": 9}
    assert (await correction(agent_harness))["region_consumed"] == 16
    await is_proven(agent_harness)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("quota", "said"),
    list(itertools.product([EXPORTS, MAILS], [lease(granted=37), lease(granted=37, consumed=5)])),
    ids=["idle", "used", "idle, no pool", "used, no pool"],
)
async def test_a_lost_grant_of_a_closed_month_does_not_stop_a_lane(
    agent_harness: AgentHarness, agent: Agent, quota: str, said: dict[str, Any]
) -> None:
    """The ledger that lost it cannot restore it, with a lease or a pool missing."""
    await use(agent_harness, await agent_harness.agent("eu-west"))
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    assert (await agent.say(1, said | {"quota": quota}, quota=quota)).outcome is ExchangeOutcome.APPLIED
    assert (await agent.say(2, demands=[want(quota, waiting=1)], quota=quota)).outcome is ExchangeOutcome.APPLIED
    await is_proven(agent_harness)


async def test_usage_names_its_own_period_and_the_billed_one(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)
    await agent.say(3, lease(granted=10, consumed=12, units=5))
    client = await agent_harness.client("usage:read")
    query = "from=2026-11-01&to=2026-12-01"
    answer = (await client.get(f"/v1/usage?{query}&group_by=period,charge_period")).json()
    assert [(row["dimensions"], row["units"]) for row in answer["data"]] == [
        ({"period": PERIOD, "charge_period": PERIOD}, 7),
        ({"period": NEXT, "charge_period": PERIOD}, 5),
    ]
    (row,) = (await client.get(f"/v1/usage?{query}")).json()["data"]
    assert row["units"] == 12
    (row,) = (await client.get(f"/v1/usage?{query}&period={PERIOD}")).json()["data"]
    assert row["units"] == 7


# --- resolutions ------------------------------------------------------------------------------------------------------


async def proposed(
    agent_harness: AgentHarness, agent: Agent, kind: str, quota: str = EXPORTS, **more: Any
) -> httpx.Response:
    body = {"epoch": agent.epoch, "quota": quota, "period": PERIOD, "kind": kind, "reason": "why"} | more
    return await (await agent_harness.client("adjust:propose")).post("/v1/suspense:propose", json=body)


async def approved(agent_harness: AgentHarness, proposal: httpx.Response) -> httpx.Response:
    assert proposal.status_code == 201, proposal.text
    return await (await agent_harness.client("adjust:approve")).post(f"/v1/suspense/{proposal.json()['id']}:approve")


async def waiting(agent_harness: AgentHarness) -> list[tuple[str, str, str, int, bool]]:
    rows = (await (await agent_harness.client("usage:read")).get("/v1/suspense")).json()["data"]
    return [(row["period"], row["waits_in"], row["state"], row["suspense"], bool(row["proposal"])) for row in rows]


@pytest.fixture
async def carried(agent_harness: AgentHarness, agent: Agent) -> None:
    """Carry three units of November in suspense to December."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await close_at_last(agent_harness, carry_suspense=True)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "more", "estimated", "written_off"),
    [("write_off", {}, 0, 3), ("charge", {}, 3, 0), ("estimate", {"units": 2}, 2, 1)],
)
async def test_carried_suspense_is_resolved_in_its_new_period(
    agent_harness: AgentHarness,
    agent: Agent,
    carried: None,
    kind: str,
    more: dict[str, Any],
    estimated: int,
    written_off: int,
) -> None:
    """Late evidence replaces an estimate."""
    assert await waiting(agent_harness) == [(PERIOD, NEXT, "closed", 3, False)]
    proposal = await proposed(agent_harness, agent, kind, **more)
    assert await waiting(agent_harness) == [(PERIOD, NEXT, "closed", 3, True)]
    assert (await approved(agent_harness, proposal)).status_code == 200
    found = await pool(agent_harness, NEXT)
    assert (found.get("suspense_carried", 0), found.get("estimated", 0), found.get("written_off", 0)) == (
        0,
        estimated,
        written_off,
    )
    assert await waiting(agent_harness) == []
    await is_proven(agent_harness)
    await agent.say(3, lease(granted=10, consumed=10, units=3))
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "consumed": 3}
    await is_proven(agent_harness)


@pytest.mark.extended
@pytest.mark.parametrize("evidence_first", [False, True])
async def test_late_evidence_has_the_same_result_before_and_after_the_approval(
    agent_harness: AgentHarness, agent: Agent, carried: None, evidence_first: bool
) -> None:
    proposal = await proposed(agent_harness, agent, "estimate", units=2)
    if not evidence_first:
        await approved(agent_harness, proposal)
    await agent.say(3, lease(granted=10, consumed=8, units=1))
    if evidence_first:
        await approved(agent_harness, proposal)
    assert await pool(agent_harness, NEXT) == {
        "suspense_carried_in": 3,
        "consumed": 1,
        "estimated": 1,
        "written_off": 1,
    }
    await is_proven(agent_harness)


async def test_the_proposer_cannot_approve_a_late_resolution(
    agent_harness: AgentHarness, agent: Agent, carried: None
) -> None:
    both = await agent_harness.client("adjust:propose", "adjust:approve")
    body = {"epoch": agent.epoch, "quota": EXPORTS, "period": PERIOD, "kind": "charge", "reason": "why"}
    proposal = await both.post("/v1/suspense:propose", json=body)
    answer = await both.post(f"/v1/suspense/{proposal.json()['id']}:approve")
    assert (answer.status_code, answer.json()["refusal"]) == (409, "same_person")
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "suspense_carried": 3}


@pytest.mark.parametrize(
    ("kind", "more", "status", "refusal"),
    [
        ("unattributed", {}, 409, "not_quarantined"),
        ("estimate", {"units": 4}, 409, "more_than_in_suspense"),
        ("charge", {"quota": MAILS}, 404, None),
        ("charge", {"epoch": 99}, 404, None),
    ],
)
async def test_invalid_late_resolutions_are_refused(
    agent_harness: AgentHarness,
    agent: Agent,
    carried: None,
    kind: str,
    more: dict[str, Any],
    status: int,
    refusal: str | None,
) -> None:
    answer = await proposed(agent_harness, agent, kind, **more)
    assert (answer.status_code, answer.json().get("refusal")) == (status, refusal)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("said", "days", "left"),
    [
        ({"consumed": 9, "units": 1}, 1, {"suspense_carried": 1}),  # lines that disagree
        ({"consumed": 9, "units": 2}, 36, {"suspense_carried": 1}),  # too late
        ({"consumed": 9, "units": 2, "returned": 5}, 1, {"written_off": 1}),  # more returned than there was
        ({"consumed": 8, "units": 0, "returned": 2}, 1, {"written_off": 2}),
        ({"consumed": 15, "units": 9}, 1, {"correction": 5}),  # more than there was
    ],
)
async def test_a_late_quarantine_ends_with_one_line_without_a_policy(
    agent_harness: AgentHarness, agent: Agent, carried: None, said: dict[str, Any], days: int, left: dict[str, int]
) -> None:
    agent_harness.clock.move(days=days)
    await agent.say(3, lease(granted=10, **said))
    assert await waiting(agent_harness) == [(PERIOD, NEXT, "quarantined", 3, False)]
    assert (await proposed(agent_harness, agent, "charge")).json()["refusal"] == "quarantined"
    assert (await approved(agent_harness, await proposed(agent_harness, agent, "unattributed"))).status_code == 200
    booked = await agent_harness.one("SELECT sum(units) FROM transfer WHERE dimensions ->> 'policy' = 'unattributed'")
    assert booked == said["consumed"] - 7
    found = await correction(agent_harness)
    assert {name: found[name] for name in ("suspense_carried", "written_off", "correction") if name in found} == left
    kept = (await (await agent_harness.client("usage:read")).get("/v1/quarantine?evidence=true")).json()["data"]
    assert [row["is_open"] for row in kept] == [False]
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_a_late_quarantined_report_without_a_lease_is_resolved_too(
    agent_harness: AgentHarness, agent: Agent, carried: None
) -> None:
    await agent.say(1, lease(MAILS, consumed=4, units=3), quota=MAILS)
    assert (
        await approved(agent_harness, await proposed(agent_harness, agent, "unattributed", MAILS))
    ).status_code == 200
    assert await pool(agent_harness, NEXT, MAILS) == {"correction": 4, "consumed": 4}
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_the_next_close_waits_for_open_resolutions_of_this_period(
    agent_harness: AgentHarness, agent: Agent, carried: None
) -> None:
    """The blocker names the month."""
    await agent.say(3, lease(granted=10, consumed=9, units=1))
    agent_harness.clock.time = datetime(2027, 1, 1, 6, tzinfo=UTC)
    for what in ("quarantine", "proposal"):
        answer = await closed(agent_harness, NEXT, carry_suspense=True)
        found = {each["what"]: each.get("charge_period") for each in answer.json()["missing"]}
        assert (answer.status_code, found[what]) == (409, PERIOD)
        proposal = await proposed(agent_harness, agent, "unattributed")
    await approved(agent_harness, proposal)
    assert (await closed(agent_harness, NEXT, carry_suspense=True)).status_code == 202
    agent_harness.clock.move(minutes=16)
    assert (await closed(agent_harness, NEXT, carry_suspense=True)).status_code == 200
    assert await pool(agent_harness, "2027-01") == {"suspense_carried_in": 1, "suspense_carried": 1}
    await is_proven(agent_harness)


# --- races ------------------------------------------------------------------------------------------------------------


async def test_a_close_during_reports(agent_harness: AgentHarness) -> None:
    """Sixteen regions report at once, several rounds: November keeps what it had at its close; all else is a
    correction.
    """
    agents = [await agent_harness.agent(f"r{number}") for number in range(16)]
    for agent in agents:
        await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await closed(agent_harness, carry_suspense=True)
    agent_harness.clock.move(minutes=16)
    at_close: list[int] = []

    async def report(agent: Agent) -> None:
        for seq in range(3, 8):
            reply = await agent.say(seq, lease(granted=10, consumed=7 + seq - 2, units=1))
            assert reply.outcome is ExchangeOutcome.APPLIED

    async def close() -> None:
        for _ in range(20):
            if (await closed(agent_harness, carry_suspense=True)).status_code == 200:
                break
            await asyncio.sleep(0)
        at_close.append(await agent_harness.one("SELECT transfers FROM period WHERE id = $1", PERIOD))

    await asyncio.gather(close(), *(report(agent) for agent in agents))
    assert await agent_harness.one("SELECT count(*) FROM transfer WHERE period = $1", PERIOD) == at_close[0]
    booked = await agent_harness.one("SELECT sum(units)::int FROM transfer WHERE dst = 'consumed'")
    assert booked == 16 * (7 + 5)
    assert (
        await agent_harness.one(
            "SELECT sum(units)::int FROM transfer WHERE dst = 'consumed' AND period <> charge_period"
        )
        > 0
    )
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_a_close_during_a_close(agent_harness: AgentHarness, agent: Agent) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    await closed(agent_harness, carry_suspense=True)
    agent_harness.clock.move(minutes=16)

    async def close() -> object:
        async with connected(agent_harness.url) as coordinator, coordinator.transaction():
            request = CloseRequest(Actor("somebody"), carry_suspense=True)
            settled = await read_settled(coordinator, PERIOD)
            return await close_period(coordinator, PERIOD, request, settled, GRACE, agent_harness.clock.now())

    first, *others = await asyncio.gather(*(close() for _ in range(4)))
    assert all(other == first for other in others)
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "suspense_carried": 3}
    assert await agent_harness.one("SELECT count(*) FROM audit WHERE action = 'period.closed'") == 1


@pytest.mark.extended
async def test_a_close_during_expiry_and_retirement(agent_harness: AgentHarness) -> None:
    """In any order nothing is lost, and nothing of November changes after its close."""
    agents = [await agent_harness.agent(f"r{number}") for number in range(8)]
    for agent in agents:
        await use(agent_harness, agent)
    agent_harness.clock.time = DECEMBER
    await closed(agent_harness, carry_suspense=True)
    agent_harness.clock.move(minutes=16)
    retire = await agent_harness.client("alloc:write")

    async def close() -> None:
        while (await closed(agent_harness, carry_suspense=True)).status_code != 200:
            await expire(agent_harness)  # it skips rows that the close had locked

    async def end(agent: Agent) -> None:
        answer = await retire.post(f"/v1/epochs/{agent.epoch}:retire", json={"reason": "why"})
        assert answer.status_code == 200, answer.text
        await expire(agent_harness)

    async with asyncio.timeout(30):
        await asyncio.gather(close(), *(end(agent) for agent in agents), expire(agent_harness))
    found = await pool(agent_harness, PERIOD)
    assert (found["consumed"], found["suspense_carried_out"]) == (56, 24)
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_times_of_periods_have_a_zone_whatever_is_stored(agent_harness: AgentHarness) -> None:
    """A period of the year 1 could once be reported: the database stores its first moment as -infinity."""
    await agent_harness.owner.execute(
        "INSERT INTO period (id, kind, starts_at, ends_at) VALUES ('0001-01', 'month', '-infinity', '0001-02-01Z')"
    )
    reader = await agent_harness.client("usage:read")
    (listed,) = (await reader.get("/v1/periods")).json()["data"]
    assert (listed["from"], listed["to"]) == ("0001-01-01T00:00:00Z", "0001-02-01T00:00:00Z")
    assert (await reader.get("/v1/periods/0001-01")).json() == listed


# --- holds ------------------------------------------------------------------------------------------------------------


async def hold_into_december(agent_harness: AgentHarness, agent: Agent) -> None:
    """Use 7 and hold 3 of 10 units: when November ends the store keeps the hold, and reports."""
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=False)
    await agent.say(3, lease(granted=10, consumed=7, units=0))


async def commit_late(agent_harness: AgentHarness, agent: Agent) -> None:
    reply = await agent.say(4, lease(granted=10, consumed=10, units=3))
    assert reply.outcome is ExchangeOutcome.APPLIED
    booked = await agent_harness.owner.fetch("SELECT period, charge_period, units FROM transfer WHERE dst = 'consumed'")
    assert sorted(map(tuple, booked)) == [(PERIOD, PERIOD, 7), (NEXT, PERIOD, 3)]
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_a_close_names_open_holds_and_continues_without_them_after_an_hour(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await hold_into_december(agent_harness, agent)
    (_, held) = (await closed(agent_harness)).json()["missing"]
    about = {name: held[name] for name in ("what", "quota", "region", "epoch", "units", "until")}
    until = "2026-12-01T07:15:00Z"
    where = {"quota": EXPORTS, "region": "us-east", "epoch": agent.epoch}
    assert about == {"what": "held", **where, "units": 3, "until": until}
    assert "these units are in open holds" in held["reason"]
    agent_harness.clock.move(minutes=74)
    assert [each["what"] for each in (await closed(agent_harness)).json()["missing"]] == ["held"]
    agent_harness.clock.move(minutes=1)
    await continue_closing(agent_harness.app.state.coordinator.database, agent_harness.clock, GRACE)
    body = (await closed(agent_harness)).json()
    assert (body["period"]["state"], [each["units"] for each in body["suspense_carried"]]) == ("closed", [3])
    await is_proven(agent_harness)
    await commit_late(agent_harness, agent)


@pytest.mark.extended
async def test_people_let_a_close_continue_without_open_holds(agent_harness: AgentHarness, agent: Agent) -> None:
    await hold_into_december(agent_harness, agent)
    asked = await closed(agent_harness)
    assert asked.status_code == 202
    again = await closed(agent_harness, holds="leave")
    assert [each["what"] for each in again.json()["missing"]] == ["grace"]
    agent_harness.clock.move(minutes=16)
    await continue_closing(agent_harness.app.state.coordinator.database, agent_harness.clock, GRACE)
    body = (await closed(agent_harness)).json()
    assert (body["period"]["state"], [each["units"] for each in body["suspense_carried"]]) == ("closed", [3])
    audit = await (await agent_harness.client("audit:read")).get(f"/v1/audit?object={PERIOD}")
    assert {"carry_suspense": False, "holds": "leave"} in [each["details"] for each in audit.json()["data"]]
    await commit_late(agent_harness, agent)


@pytest.mark.extended
async def test_a_hold_that_is_released_after_the_close_frees_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await hold_into_december(agent_harness, agent)
    await close_at_last(agent_harness, holds="leave")
    await agent.say(4, lease(granted=10, consumed=7, returned=3, units=0))
    assert (await pool(agent_harness, NEXT)).get("unallocated", 0) == 0
    await is_proven(agent_harness)


@pytest.mark.extended
async def test_a_hold_without_a_report_since_the_end_of_the_period_is_not_shown(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=False)
    answer = await closed(agent_harness, holds="leave")
    assert [each["what"] for each in answer.json()["missing"]] == ["grace", "outstanding"]
    agent_harness.clock.move(minutes=90)
    assert [each["what"] for each in (await closed(agent_harness)).json()["missing"]] == ["outstanding"]
