"""Each lock of the coordinator is needed: without it a test of two transactions fails.

A test watches a transaction wait for a lock; where it must not wait, it has a bound.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from coordinator.access.idempotency_records import Attempt, claim, delete_expired
from coordinator.adjustments.adjust import ProposedAdjustment, approve_adjustment, propose_adjustment
from coordinator.adjustments.rules import AdjustmentKind, AdjustmentRefusal, AdjustmentTerms
from coordinator.blocks.operations import BlockRequest, put_block
from coordinator.epochs.fence import fence_lost
from coordinator.epochs.rebind import rebind_epoch
from coordinator.exchange.expire_leases import Expired, expire_leases
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.statements import balances
from coordinator.limits.in_force import Documents
from coordinator.proof.seal import seal
from coordinator.suspense.resolve import Proposal, Resolution, approve_resolution, propose_resolution
from coordinator.suspense.rules import ResolutionKind
from protocol.check import BlockField
from protocol.identifiers import lane_of
from protocol.messages import Exchange, RebindEpoch
from protocol.outcomes import EpochRefusal, ExchangeOutcome
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
    Step,
    closes,
    committed,
    in_the_middle,
    one_after_the_other,
    opens,
    retires,
    says,
    says_all,
    somebody,
    until_it_waits,
)

pytestmark = pytest.mark.anyio
Makes = Callable[[AgentHarness, Agent], Step[Any]]
NONCE = "0123456789abcdef"


def rebinds(agent_harness: AgentHarness, agent: Agent) -> Step[Any]:
    request = RebindEpoch(nonce=NONCE, previous=agent.fingerprint, fingerprint="the next", seqs=[1, 1, 1, 1])
    return lambda c: rebind_epoch(c, agent.region, agent.epoch, request, somebody(), agent_harness.clock.now())


def loses(agent_harness: AgentHarness, agent: Agent) -> Step[Any]:
    return lambda c: fence_lost(c, agent.region, [agent.epoch], agent_harness.clock.now())


def expires(agent_harness: AgentHarness) -> Step[Expired]:
    return lambda c: expire_leases(c, agent_harness.clock.now())


# --- lanes ------------------------------------------------------------------------------------------------------------


async def test_the_next_number_waits_for_the_one_before(agent_harness: AgentHarness, agent: Agent) -> None:
    """Two coordinators work on one lane: if the second read first, it would see a gap."""
    first, second = await one_after_the_other(
        agent_harness, says(agent_harness, agent, 1), says(agent_harness, agent, 2)
    )
    assert (first.outcome, second.outcome) == (ExchangeOutcome.APPLIED, ExchangeOutcome.APPLIED)


async def test_lanes_are_locked_in_their_order_whatever_order_a_call_has(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Otherwise two calls could each hold what the other waits for."""
    low, high = sorted((EXPORTS, MAILS), key=lambda quota: lane_of(quota, agent.lanes))
    both = says_all(agent_harness, agent, [Exchange(frozen=agent.frozen(1, quota=quota)) for quota in (high, low)])
    held, free = ("SELECT FROM lane WHERE lane = $1 FOR UPDATE" + wait for wait in ("", " NOWAIT"))
    async with connected(agent_harness.url) as busy:
        async with busy.transaction():
            await busy.execute(held, lane_of(low, agent.lanes))
            waiting = asyncio.create_task(committed(agent_harness, both))
            await until_it_waits(agent_harness.owner, waiting)
            await agent_harness.owner.execute(free, lane_of(high, agent.lanes))
        await asyncio.wait_for(waiting, 20)


async def test_pools_are_locked_in_their_order_whatever_order_a_batch_has(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent_harness.owner.execute("UPDATE region_epoch SET lanes = 1")
    await agent_harness.owner.execute(
        "INSERT INTO subscription (tenant, plan, changed_at) VALUES ('acme', 'pro', now())"
    )
    agent.lanes = 1
    quotas = [MAILS, EXPORTS]
    await agent.say(1, demands=[want(quota, waiting=5) for quota in quotas])
    held, free = ("SELECT FROM pool WHERE quota = $1 FOR UPDATE" + wait for wait in ("", " NOWAIT"))
    async with connected(agent_harness.url) as busy:
        async with busy.transaction():
            await busy.execute(held, EXPORTS)
            report = says(agent_harness, agent, 2, *(lease(quota, granted=5, consumed=1) for quota in quotas))
            waiting = asyncio.create_task(committed(agent_harness, report))
            await until_it_waits(agent_harness.owner, waiting)
            await agent_harness.owner.execute(free, MAILS)
        assert (await asyncio.wait_for(waiting, 20)).outcome is ExchangeOutcome.APPLIED


# --- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ends", "state"), [(retires, "retired"), (opens, "lost")])
async def test_a_lease_created_while_its_epoch_ends_ends_with_it(
    agent_harness: AgentHarness, agent: Agent, ends: Makes, state: str
) -> None:
    """The lease is invisible until commit, so the epoch is locked, and never in a circle."""
    makes = says(agent_harness, agent, 1, demands=[want(waiting=10)])
    await in_the_middle(agent_harness, makes, balances._INSERT_LEASES, ends(agent_harness, agent))
    mine = await agent_harness.lease(agent)
    assert (mine["granted"], mine["state"]) == (10, state)


@pytest.fixture
async def waiting(agent_harness: AgentHarness, agent: Agent) -> Agent:
    """Return another region, which waits for 5 of the units that the agent holds."""
    other = await agent_harness.agent("eu-west")
    await agent.say(1, demands=[want(waiting=1000)])
    await other.say(1, demands=[want(waiting=5)])
    return other


RETURNS = lease(granted=1000, returned=10)


async def test_an_epoch_stays_current_while_something_is_pushed_to_it(
    agent_harness: AgentHarness, agent: Agent, waiting: Agent
) -> None:
    await in_the_middle(
        agent_harness, says(agent_harness, agent, 2, RETURNS), balances._WRITE_BOOKED, opens(agent_harness, waiting)
    )
    theirs = await agent_harness.lease(waiting)
    assert (theirs["granted"], theirs["state"]) == (5, "lost")


async def test_nothing_is_pushed_to_an_epoch_being_ended_nor_is_it_waited_for(
    agent_harness: AgentHarness, agent: Agent, waiting: Agent
) -> None:
    """The epoch's lock is out of order here, so waiting for it could deadlock."""
    async with connected(restricted(agent_harness.url)) as connection, connection.transaction():
        await opens(agent_harness, waiting)(connection)
        async with asyncio.timeout(20):
            reply = await committed(agent_harness, says(agent_harness, agent, 2, RETURNS))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert ((await agent_harness.lease(waiting))["granted"], (await agent_harness.pool())["unallocated"]) == (0, 10)


@pytest.mark.parametrize("does", [opens, loses, retires, rebinds])
async def test_changes_of_a_regions_epochs_are_serialized(
    agent_harness: AgentHarness, agent: Agent, does: Makes
) -> None:
    """Each may change several of them; the region's row is locked first, so they cannot deadlock."""
    async with connected(agent_harness.url) as busy:
        async with busy.transaction():
            await busy.execute(
                "SELECT FROM region FOR NO KEY UPDATE"
            )  # as they do; transactions that only refer to it continue
            waiting = asyncio.create_task(committed(agent_harness, does(agent_harness, agent)))
            await until_it_waits(agent_harness.owner, waiting)
        await asyncio.wait_for(waiting, 20)


async def test_an_epoch_is_rebound_only_after_exchanges_in_progress(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.open(NONCE)
    await agent.say(1)
    _, answer = await one_after_the_other(agent_harness, says(agent_harness, agent, 2), rebinds(agent_harness, agent))
    assert answer is EpochRefusal.STORE_BEHIND
    assert await agent_harness.one("SELECT fingerprint FROM region_epoch WHERE epoch = $1", agent.epoch) == "one life"


# --- expiry, resolution, close ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["region_epoch", "period", "pool"])
async def test_a_locked_lease_expires_with_the_next_run(agent_harness: AgentHarness, agent: Agent, table: str) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.move(seconds=70)
    async with connected(agent_harness.url) as busy, busy.transaction():
        await busy.execute(f"SELECT FROM {table} FOR UPDATE")
        async with asyncio.timeout(20):
            assert (await committed(agent_harness, expires(agent_harness))).leases == 0
    assert (await committed(agent_harness, expires(agent_harness))).units == 10


async def test_a_pool_is_locked_while_its_leases_expire(agent_harness: AgentHarness, agent: Agent) -> None:
    """Otherwise concurrent postings to it would be lost."""
    other = await agent_harness.agent("eu-west")
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.move(seconds=60)
    await other.say(1, demands=[want(waiting=20)])
    agent_harness.clock.move(seconds=10)
    report = says(agent_harness, other, 2, lease(granted=20, consumed=9))
    await in_the_middle(agent_harness, expires(agent_harness), balances._WRITE_BALANCES, report)
    pool = await agent_harness.pool()
    assert (pool["consumed"], pool["suspense"], pool["outstanding"]) == (9, 10, 11)


async def test_a_quarantine_does_not_end_in_an_epoch_that_ends_meanwhile(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Otherwise its lease would become active again in an ended epoch."""
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=5, returned=5, units=4))
    proposal = Proposal(agent.epoch, Key(EXPORTS, PERIOD), ResolutionKind.UNATTRIBUTED, 0, "why")
    made = await committed(
        agent_harness, lambda c: propose_resolution(c, proposal, somebody(), agent_harness.clock.now())
    )
    assert isinstance(made, Resolution)

    def approves(connection: Any) -> Any:
        return approve_resolution(connection, made.id, somebody(), agent_harness.clock.now())

    await in_the_middle(agent_harness, approves, balances._WRITE_BALANCES, opens(agent_harness, agent))
    mine = await agent_harness.lease(agent)
    assert (mine["state"], mine["consumed"], mine["returned"]) == ("lost", 5, 5)


async def test_leases_that_leave_with_their_period_are_not_fenced_meanwhile(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.time = datetime(2026, 12, 1, 6, tzinfo=UTC)
    await committed(agent_harness, expires(agent_harness))
    close = closes(agent_harness, carry_suspense=True)
    await in_the_middle(agent_harness, close, balances._WRITE_BALANCES, opens(agent_harness, agent))
    assert ((await agent_harness.lease(agent))["state"], (await agent_harness.pool())["suspense_carried_out"]) == (
        "closed",
        10,
    )


# --- seals ------------------------------------------------------------------------------------------------------------


async def test_reports_booked_while_a_seal_is_read_are_above_it(agent_harness: AgentHarness, agent: Agent) -> None:
    """The later of two positions is committed before the sealer reads, and the earlier one after it."""
    other = await agent_harness.agent("eu-west")
    async with connected(agent_harness.url) as busy, connected(restricted(agent_harness.url)) as slow:
        async with busy.transaction(), slow.transaction():
            await busy.execute("LOCK TABLE seal IN ACCESS EXCLUSIVE MODE")
            sealing = asyncio.create_task(committed(agent_harness, lambda c: seal(c, agent_harness.clock.now())))
            await until_it_waits(agent_harness.owner, sealing)
            earlier = receipt(await says(agent_harness, agent, 1)(slow)).position
            later = receipt(await committed(agent_harness, says(agent_harness, other, 1))).position
        sealed = await asyncio.wait_for(sealing, 20)
    assert sealed.position < earlier < later


# --- administration ---------------------------------------------------------------------------------------------------


async def test_a_concurrent_second_block_changes_nothing(agent_harness: AgentHarness) -> None:
    """Agents are notified once, and the audit names who was first."""
    wanted = BlockRequest(BlockField.TENANT, "acme", "leaked", None)

    def blocks(connection: Any) -> Any:
        return put_block(connection, wanted, somebody(), agent_harness.clock.now())

    first, second = await one_after_the_other(agent_harness, blocks, blocks)
    assert (first.is_new, second.is_new, second.block) == (True, False, first.block)
    assert await agent_harness.one("SELECT version FROM block_version") == 1


async def test_a_concurrent_second_approval_is_refused(agent_harness: AgentHarness) -> None:
    """It fails before any change, because the adjustment's row is locked first."""
    terms = AdjustmentTerms(Key(EXPORTS, PERIOD), AdjustmentKind.CREDIT, 100)
    wanted = ProposedAdjustment(UUID(int=1), terms, "an outage", "T-1")
    documents, now = Documents(), agent_harness.clock.now()
    await committed(agent_harness, lambda c: propose_adjustment(c, documents, wanted, somebody(), now))

    def approves(connection: Any) -> Any:
        return approve_adjustment(connection, documents, wanted.id, somebody(), now)

    first, second = await one_after_the_other(agent_harness, approves, approves)
    assert (first.id, first.booked_in, second) == (wanted.id, PERIOD, AdjustmentRefusal.APPROVED_BEFORE)
    assert await agent_harness.one("SELECT credited FROM pool") == 100


async def test_a_key_in_use_again_is_neither_deleted_nor_waited_for(agent_harness: AgentHarness) -> None:
    attempts = [Attempt(UUID(int=1), "k", b"asked", UUID(int=nth)) for nth in (1, 2)]
    await claim(agent_harness.owner, attempts[0], agent_harness.clock.now())
    agent_harness.clock.move(days=2)
    async with connected(restricted(agent_harness.url)) as busy, busy.transaction():
        await claim(busy, attempts[1], agent_harness.clock.now())
        async with asyncio.timeout(60):
            assert await committed(agent_harness, lambda c: delete_expired(c, agent_harness.clock.now())) == 0
    assert await agent_harness.one("SELECT claim FROM idempotency_record") == attempts[1].claim
