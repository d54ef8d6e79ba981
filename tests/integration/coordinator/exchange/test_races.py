"""Two transactions run at the same moment on real connections: the second waits, and then decides on current rows.

One is held open before its commit, so the order does not depend on luck.
"""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from coordinator.database.connection import Connection
from coordinator.exchange.expire_leases import expire_leases
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.statements import pools
from coordinator.periods.close import CloseRefused
from coordinator.proof import seal as seal_module
from coordinator.proof.seal import seal
from coordinator.suspense.resolve import Proposal, Resolution, approve_resolution, propose_resolution
from coordinator.suspense.rules import ResolutionKind
from protocol.messages import ExchangeReply
from protocol.outcomes import ExchangeOutcome
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import (
    EXPORTS,
    MAILS,
    PERIOD,
    Agent,
    AgentHarness,
    lease,
    receipt,
    want,
)
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.interleaving import (
    Overtaken,
    Step,
    closes,
    committed,
    in_transaction,
    one_after_the_other,
    retires,
    says,
    somebody,
    until_it_waits,
)

pytestmark = pytest.mark.anyio

COPIES, CONNECTIONS = 64, 16


# --- exchanges --------------------------------------------------------------------------------------------------------


async def test_many_copies_over_many_connections_are_booked_once(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    step = says(agent_harness, agent, 2, lease(granted=10, consumed=7))

    async def some() -> list[ExchangeReply]:
        async with connected(restricted(agent_harness.url)) as connection:
            return [await in_transaction(connection, step) for _ in range(COPIES // CONNECTIONS)]

    replies = [reply for each in await asyncio.gather(*(some() for _ in range(CONNECTIONS))) for reply in each]
    outcomes = Counter(reply.outcome for reply in replies)
    assert outcomes == {ExchangeOutcome.APPLIED: 1, ExchangeOutcome.REPLAYED: COPIES - 1}
    assert len({receipt(reply) for reply in replies}) == 1
    assert (await agent_harness.pool())["consumed"] == 7
    assert await agent_harness.one("SELECT count(*) FROM report WHERE seq = 2") == 1


async def test_two_coordinators_on_one_lane_book_each_number_once(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=100)])

    async def conversation() -> list[ExchangeOutcome]:
        reports = [lease(granted=100, consumed=3 * seq, units=3) for seq in range(1, 21)]
        steps = [says(agent_harness, agent, seq, report) for seq, report in enumerate(reports, start=2)]
        async with connected(restricted(agent_harness.url)) as connection:
            return [(await in_transaction(connection, step)).outcome for step in steps]

    one, other = await asyncio.gather(conversation(), conversation())
    for outcomes in zip(one, other, strict=True):
        assert outcomes.count(ExchangeOutcome.APPLIED) == 1
        assert set(outcomes) <= {ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED, ExchangeOutcome.STALE}
    assert (await agent_harness.pool())["consumed"] == 60


async def test_the_second_of_two_copies_waits_for_the_first(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    step = says(agent_harness, agent, 2, lease(granted=10, consumed=7))
    first, second = await one_after_the_other(agent_harness, step, step)
    assert (first.outcome, second.outcome) == (ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED)
    assert receipt(first) == receipt(second)


# --- retiring ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def spent(agent_harness: AgentHarness, agent: Agent) -> Step[ExchangeReply]:
    """Return an agent with 10 units that has 7 to report."""
    await agent.say(1, demands=[want(waiting=10)])
    return says(agent_harness, agent, 2, lease(granted=10, consumed=7))


async def test_evidence_that_comes_while_its_epoch_is_retired_is_kept_for_people(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply]
) -> None:
    _, reply = await one_after_the_other(agent_harness, retires(agent_harness, agent), spent)
    assert reply.outcome is ExchangeOutcome.RETIRED
    assert await agent_harness.one("SELECT count(*) FROM quarantine WHERE reason = 'epoch_retired'") == 1
    assert ((await agent_harness.lease(agent))["state"], (await agent_harness.pool())["consumed"]) == ("retired", 0)


async def test_an_epoch_retired_during_its_report_is_retired_afterwards(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply]
) -> None:
    reply, _ = await one_after_the_other(agent_harness, spent, retires(agent_harness, agent))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert ((await agent_harness.lease(agent))["state"], (await agent_harness.pool())["consumed"]) == ("retired", 7)


# --- expiry and resolution --------------------------------------------------------------------------------------------


async def test_a_report_that_comes_while_its_lease_expires_drains_what_was_set_aside(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply]
) -> None:
    agent_harness.clock.move(seconds=70)
    expired, reply = await one_after_the_other(
        agent_harness, lambda c: expire_leases(c, agent_harness.clock.now()), spent
    )
    assert (expired.units, reply.outcome) == (10, ExchangeOutcome.APPLIED)
    mine = await agent_harness.lease(agent)
    assert (mine["consumed"], mine["outstanding"], mine["suspense"], mine["state"]) == (7, 0, 3, "expired")


async def test_a_lease_that_is_being_reported_is_not_set_aside(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply]
) -> None:
    agent_harness.clock.move(seconds=70)
    async with connected(restricted(agent_harness.url)) as connection, connection.transaction():
        await spent(connection)
        async with asyncio.timeout(20):
            expired = await committed(agent_harness, lambda c: expire_leases(c, agent_harness.clock.now()))
    assert expired.leases == 0
    assert ((await agent_harness.lease(agent))["outstanding"], (await agent_harness.lease(agent))["state"]) == (
        3,
        "active",
    )


async def proposed(agent_harness: AgentHarness, agent: Agent) -> Step[Any]:
    """Propose to charge what is in suspense, and return the approval."""
    agent_harness.clock.move(seconds=70)
    await committed(agent_harness, lambda c: expire_leases(c, agent_harness.clock.now()))
    proposal = Proposal(agent.epoch, Key(EXPORTS, PERIOD), ResolutionKind.CHARGE, 10, "why")
    made = await committed(
        agent_harness, lambda c: propose_resolution(c, proposal, somebody(), agent_harness.clock.now())
    )
    assert isinstance(made, Resolution)
    return lambda c: approve_resolution(c, made.id, somebody(), agent_harness.clock.now())


@pytest.mark.parametrize("approval_is_first", [True, False])
async def test_a_resolution_and_a_report_at_once_end_alike_in_either_order(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply], approval_is_first: bool
) -> None:
    approves = await proposed(agent_harness, agent)
    await one_after_the_other(agent_harness, *((approves, spent) if approval_is_first else (spent, approves)))
    mine = await agent_harness.lease(agent)
    assert (mine["consumed"], mine["estimated"], mine["suspense"], mine["written_off"]) == (7, 3, 0, 0)


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def ended(agent_harness: AgentHarness, agent: Agent) -> None:
    """Return a month that may be closed, of which the agent has used 7 units and holds none."""
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, returned=3))
    agent_harness.clock.time = datetime(2026, 12, 1, 6, tzinfo=UTC)


async def test_a_close_waits_for_a_report_and_includes_it(
    agent_harness: AgentHarness, agent: Agent, ended: None
) -> None:
    disputed = says(agent_harness, agent, 3, lease(granted=10, consumed=9, returned=3, units=1))
    reply, answer = await one_after_the_other(agent_harness, disputed, closes(agent_harness))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert isinstance(answer, CloseRefused)
    assert "quarantine" in {each.what for each in answer.missing}
    assert await agent_harness.one("SELECT state FROM period") == "open"


@pytest.mark.parametrize("quota", [EXPORTS, MAILS])
async def test_a_report_that_waited_for_a_close_is_a_correction(
    agent_harness: AgentHarness, agent: Agent, ended: None, quota: str
) -> None:
    """This holds for an existing pool, and for one that the report would have created."""
    late = {
        EXPORTS: says(agent_harness, agent, 3, lease(granted=10, consumed=9, returned=3, units=2)),
        MAILS: says(agent_harness, agent, 1, lease(MAILS, consumed=2), quota=MAILS),
    }
    answer, reply = await one_after_the_other(agent_harness, closes(agent_harness), late[quota])
    assert (answer.period.state, reply.outcome) == ("closed", ExchangeOutcome.APPLIED)
    booked = await agent_harness.owner.fetch("SELECT period, units FROM transfer WHERE dst = 'consumed' ORDER BY id")
    assert [tuple(row) for row in booked] == [(PERIOD, 7), ("2026-12", 2)]
    assert await agent_harness.one("SELECT count(*) FROM transfer WHERE period = $1", PERIOD) == answer.period.transfers


async def test_a_report_overtaken_by_a_close_creates_no_pool_in_the_closed_month(
    agent_harness: AgentHarness, agent: Agent, ended: None
) -> None:
    """The report found the month open, and is about to create its pool."""
    late = says(agent_harness, agent, 1, lease(MAILS, consumed=2), quota=MAILS)
    async with connected(restricted(agent_harness.url)) as closing, closing.transaction():
        close = closes(agent_harness)

        async def reports(connection: Connection) -> ExchangeReply:
            return await late(Overtaken(connection, pools._INSERT_POOLS, lambda: close(closing)))  # type: ignore[arg-type]  # as far as a report goes

        waiting = asyncio.create_task(committed(agent_harness, reports))
        await until_it_waits(agent_harness.owner, waiting)
    assert (await asyncio.wait_for(waiting, 20)).outcome is ExchangeOutcome.APPLIED
    booked = await agent_harness.owner.fetch(
        "SELECT period, units FROM transfer WHERE quota = $1 AND dst = 'consumed'", MAILS
    )
    assert [tuple(row) for row in booked] == [("2026-12", 2)]


# --- seals ------------------------------------------------------------------------------------------------------------


async def test_a_report_is_below_the_seal_that_waited_for_it(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply], monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = seal_module._SNAPSHOT_BEHIND_THE_GATE.replace("'1s'", "'20s'")
    monkeypatch.setattr(seal_module, "_SNAPSHOT_BEHIND_THE_GATE", patient)
    reply, sealed = await one_after_the_other(agent_harness, spent, lambda c: seal(c, agent_harness.clock.now()))
    assert sealed.position == receipt(reply).position


async def test_a_report_that_comes_behind_the_gate_is_above_the_seal(
    agent_harness: AgentHarness, agent: Agent, spent: Step[ExchangeReply]
) -> None:
    async with connected(restricted(agent_harness.url)) as sealer, sealer.transaction():
        sealed = await seal(sealer, agent_harness.clock.now())
        async with asyncio.timeout(20):
            reply = await committed(agent_harness, spent)
    assert receipt(reply).position > sealed.position
