"""Each lock of the coordinator, where it alone keeps two transactions apart: without it the test fails.

What waits is seen to wait; what must not wait has a bound.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from coordinator.access.idempotency_records import Attempt, claim, delete_expired
from coordinator.adjustments.adjust import ProposedAdjustment, approve_adjustment, propose_adjustment
from coordinator.adjustments.rules import AdjustmentKind, AdjustmentRefusal, Terms
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
from tests.integration.coordinator.agents.conftest import EXPORTS, MAILS, PERIOD, Agent, Stand, lease, receipt, want
from tests.integration.coordinator.agents.racing import (
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
from tests.integration.coordinator.standing import connected

pytestmark = pytest.mark.anyio
Makes = Callable[[Stand, Agent], Step[Any]]
NONCE = "0123456789abcdef"


def rebinds(stand: Stand, agent: Agent) -> Step[Any]:
    request = RebindEpoch(nonce=NONCE, previous=agent.fingerprint, fingerprint="the next", seqs=[1, 1, 1, 1])
    return lambda c: rebind_epoch(c, agent.region, agent.epoch, request, somebody(), stand.clock.now())


def loses(stand: Stand, agent: Agent) -> Step[Any]:
    return lambda c: fence_lost(c, agent.region, [agent.epoch], stand.clock.now())


def expires(stand: Stand) -> Step[Expired]:
    return lambda c: expire_leases(c, stand.clock.now())


# --- lanes ------------------------------------------------------------------------------------------------------------


async def test_the_next_number_waits_for_the_one_before(stand: Stand, agent: Agent) -> None:
    """Two coordinators on one lane: what the second one would read before is a gap."""
    first, second = await one_after_the_other(stand, says(stand, agent, 1), says(stand, agent, 2))
    assert (first.outcome, second.outcome) == (ExchangeOutcome.APPLIED, ExchangeOutcome.APPLIED)


async def test_lanes_are_locked_in_their_order_whatever_a_call_says(stand: Stand, agent: Agent) -> None:
    """Or two calls could each hold what the other waits for."""
    low, high = sorted((EXPORTS, MAILS), key=lambda quota: lane_of(quota, agent.lanes))
    both = says_all(stand, agent, [Exchange(frozen=agent.frozen(1, quota=quota)) for quota in (high, low)])
    held, free = ("SELECT FROM lane WHERE lane = $1 FOR UPDATE" + wait for wait in ("", " NOWAIT"))
    async with connected(stand.url) as busy:
        async with busy.transaction():
            await busy.execute(held, lane_of(low, agent.lanes))
            waiting = asyncio.create_task(committed(stand, both))
            await until_it_waits(stand.owner, waiting)
            await stand.owner.execute(free, lane_of(high, agent.lanes))
        await asyncio.wait_for(waiting, 20)


async def test_pools_are_locked_in_their_order_whatever_a_batch_says(stand: Stand, agent: Agent) -> None:
    await stand.owner.execute("UPDATE region_epoch SET lanes = 1")
    await stand.owner.execute("INSERT INTO subscription (tenant, plan, changed_at) VALUES ('acme', 'pro', now())")
    agent.lanes = 1
    quotas = [MAILS, EXPORTS]
    await agent.say(1, wants=[want(quota, waiting=5) for quota in quotas])
    held, free = ("SELECT FROM pool WHERE quota = $1 FOR UPDATE" + wait for wait in ("", " NOWAIT"))
    async with connected(stand.url) as busy:
        async with busy.transaction():
            await busy.execute(held, EXPORTS)
            report = says(stand, agent, 2, *(lease(quota, granted=5, consumed=1) for quota in quotas))
            waiting = asyncio.create_task(committed(stand, report))
            await until_it_waits(stand.owner, waiting)
            await stand.owner.execute(free, MAILS)
        assert (await asyncio.wait_for(waiting, 20)).outcome is ExchangeOutcome.APPLIED


# --- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ends", "state"), [(retires, "retired"), (opens, "lost")])
async def test_a_lease_that_is_being_made_while_its_epoch_ends_ends_with_it(
    stand: Stand, agent: Agent, ends: Makes, state: str
) -> None:
    """Nobody sees it before it is committed, so the epoch has to be waited for; and never in a circle."""
    makes = says(stand, agent, 1, wants=[want(waiting=10)])
    await in_the_middle(stand, makes, balances._INSERT_LEASES, ends(stand, agent))
    mine = await stand.lease(agent)
    assert (mine["granted"], mine["state"]) == (10, state)


@pytest.fixture
async def waiting(stand: Stand, agent: Agent) -> Agent:
    """Another region, that waits for 5 of the units that the agent holds."""
    other = await stand.agent("eu-west")
    await agent.say(1, wants=[want(waiting=1000)])
    await other.say(1, wants=[want(waiting=5)])
    return other


RETURNS = lease(granted=1000, returned=10)


async def test_an_epoch_stays_current_while_something_is_pushed_to_it(
    stand: Stand, agent: Agent, waiting: Agent
) -> None:
    await in_the_middle(stand, says(stand, agent, 2, RETURNS), balances._WRITE_BOOKED, opens(stand, waiting))
    theirs = await stand.lease(waiting)
    assert (theirs["granted"], theirs["state"]) == (5, "lost")


async def test_nothing_is_pushed_to_an_epoch_that_is_being_ended_and_nobody_waits_for_it(
    stand: Stand, agent: Agent, waiting: Agent
) -> None:
    """It comes out of the order of locks: whoever waited here could wait in a circle."""
    async with connected(restricted(stand.url)) as connection, connection.transaction():
        await opens(stand, waiting)(connection)
        async with asyncio.timeout(20):
            reply = await committed(stand, says(stand, agent, 2, RETURNS))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert ((await stand.lease(waiting))["granted"], (await stand.pool())["unallocated"]) == (0, 10)


@pytest.mark.parametrize("does", [opens, loses, retires, rebinds])
async def test_what_changes_a_regions_epochs_is_done_one_after_the_other(
    stand: Stand, agent: Agent, does: Makes
) -> None:
    """Each may change several of them: the region's row comes first, so none waits for another in a circle."""
    async with connected(stand.url) as busy:
        async with busy.transaction():
            await busy.execute("SELECT FROM region FOR NO KEY UPDATE")  # as they do: whoever refers to it goes on
            waiting = asyncio.create_task(committed(stand, does(stand, agent)))
            await until_it_waits(stand.owner, waiting)
        await asyncio.wait_for(waiting, 20)


async def test_an_epoch_goes_on_elsewhere_only_with_all_numbers_that_are_being_booked(
    stand: Stand, agent: Agent
) -> None:
    await agent.open(NONCE)
    await agent.say(1)
    _, answer = await one_after_the_other(stand, says(stand, agent, 2), rebinds(stand, agent))
    assert answer is EpochRefusal.STORE_BEHIND
    assert await stand.one("SELECT fingerprint FROM region_epoch WHERE epoch = $1", agent.epoch) == "one life"


# --- expiry, resolution, close ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["region_epoch", "period", "pool"])
async def test_what_somebody_else_holds_expires_with_the_next_turn(stand: Stand, agent: Agent, table: str) -> None:
    await agent.say(1, wants=[want(waiting=10)])
    stand.clock.move(seconds=70)
    async with connected(stand.url) as busy, busy.transaction():
        await busy.execute(f"SELECT FROM {table} FOR UPDATE")
        async with asyncio.timeout(20):
            assert (await committed(stand, expires(stand))).leases == 0
    assert (await committed(stand, expires(stand))).units == 10


async def test_a_pool_stands_still_while_something_of_it_expires(stand: Stand, agent: Agent) -> None:
    """What others book of it meanwhile would be lost."""
    other = await stand.agent("eu-west")
    await agent.say(1, wants=[want(waiting=10)])
    stand.clock.move(seconds=60)
    await other.say(1, wants=[want(waiting=20)])
    stand.clock.move(seconds=10)
    report = says(stand, other, 2, lease(granted=20, consumed=9))
    await in_the_middle(stand, expires(stand), balances._WRITE_BALANCES, report)
    pool = await stand.pool()
    assert (pool["consumed"], pool["suspense"], pool["outstanding"]) == (9, 10, 11)


async def test_a_quarantine_does_not_end_in_an_epoch_that_ends_meanwhile(stand: Stand, agent: Agent) -> None:
    """Its lease would be good again, of an epoch that is over."""
    await agent.say(1, wants=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=5, returned=5, units=4))
    proposal = Proposal(agent.epoch, Key(EXPORTS, PERIOD), ResolutionKind.UNATTRIBUTED, 0, "why")
    made = await committed(stand, lambda c: propose_resolution(c, proposal, somebody(), stand.clock.now()))
    assert isinstance(made, Resolution)

    def approves(connection: Any) -> Any:
        return approve_resolution(connection, made.id, somebody(), stand.clock.now())

    await in_the_middle(stand, approves, balances._WRITE_BALANCES, opens(stand, agent))
    mine = await stand.lease(agent)
    assert (mine["state"], mine["consumed"], mine["returned"]) == ("lost", 5, 5)


async def test_leases_that_leave_with_their_period_are_not_fenced_meanwhile(stand: Stand, agent: Agent) -> None:
    await agent.say(1, wants=[want(waiting=10)])
    stand.clock.time = datetime(2026, 12, 1, 6, tzinfo=UTC)
    await committed(stand, expires(stand))
    close = closes(stand, carry_suspense=True)
    await in_the_middle(stand, close, balances._WRITE_BALANCES, opens(stand, agent))
    assert ((await stand.lease(agent))["state"], (await stand.pool())["suspense_carried_out"]) == ("closed", 10)


# --- seals ------------------------------------------------------------------------------------------------------------


async def test_what_is_booked_while_a_seal_is_read_is_above_it(stand: Stand, agent: Agent) -> None:
    """The later of two positions is there before the sealer has read a row, and the earlier one comes still later."""
    other = await stand.agent("eu-west")
    async with connected(stand.url) as busy, connected(restricted(stand.url)) as slow:
        async with busy.transaction(), slow.transaction():
            await busy.execute("LOCK TABLE seal IN ACCESS EXCLUSIVE MODE")
            sealing = asyncio.create_task(committed(stand, lambda c: seal(c, stand.clock.now())))
            await until_it_waits(stand.owner, sealing)
            earlier = receipt(await says(stand, agent, 1)(slow)).position
            later = receipt(await committed(stand, says(stand, other, 1))).position
        sealed = await asyncio.wait_for(sealing, 20)
    assert sealed.position < earlier < later


# --- what people change -----------------------------------------------------------------------------------------------


async def test_who_blocks_what_is_just_being_blocked_changes_nothing(stand: Stand) -> None:
    """No agent is told twice, and the audit names who was first."""
    wanted = BlockRequest(BlockField.TENANT, "acme", "leaked", None)

    def blocks(connection: Any) -> Any:
        return put_block(connection, wanted, somebody(), stand.clock.now())

    first, second = await one_after_the_other(stand, blocks, blocks)
    assert (first.is_new, second.is_new, second.block) == (True, False, first.block)
    assert await stand.one("SELECT version FROM block_version") == 1


async def test_who_approves_what_is_just_being_approved_hears_that_it_was(stand: Stand) -> None:
    """And fails nowhere half-way: the row of the adjustment is waited for before anything else."""
    terms = Terms(Key(EXPORTS, PERIOD), AdjustmentKind.CREDIT, 100)
    wanted = ProposedAdjustment(UUID(int=1), terms, "an outage", "T-1")
    documents, now = Documents(), stand.clock.now()
    await committed(stand, lambda c: propose_adjustment(c, documents, wanted, somebody(), now))

    def approves(connection: Any) -> Any:
        return approve_adjustment(connection, documents, wanted.id, somebody(), now)

    first, second = await one_after_the_other(stand, approves, approves)
    assert (first.id, first.booked_in, second) == (wanted.id, PERIOD, AdjustmentRefusal.APPROVED_BEFORE)
    assert await stand.one("SELECT credited FROM pool") == 100


async def test_a_key_that_is_being_used_anew_is_not_forgotten_and_not_waited_for(stand: Stand) -> None:
    attempts = [Attempt(UUID(int=1), "k", b"asked", UUID(int=nth)) for nth in (1, 2)]
    await claim(stand.owner, attempts[0], stand.clock.now())
    stand.clock.move(days=2)
    async with connected(restricted(stand.url)) as busy, busy.transaction():
        await claim(busy, attempts[1], stand.clock.now())
        async with asyncio.timeout(10):
            assert await committed(stand, lambda c: delete_expired(c, stand.clock.now())) == 0
    assert await stand.one("SELECT claim FROM idempotency_record") == attempts[1].claim
