"""A partitioned region may spend a bounded overdraft beyond its lease, once, in every case."""

import pytest
from msgspec import structs

from protocol.identifiers import quota_key
from protocol.messages import FrozenLease, LeaseReply
from regional_agent.admission.rules.hold_ids import HoldId
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced, RequestRun, StoreDecision, StoreIncarnation, StoreRequest
from tests.lua.script_helpers import (
    QUOTA,
    ask_for_hold,
    available,
    charge_of,
    install,
    lease_reply,
    set_aside,
    take,
)
from tests.lua.test_conversation import batch_of, freeze
from tests.lua.test_periods import pass_ms

pytestmark = pytest.mark.anyio

LEASE = lease_reply(granted=10, overdraft=8)


async def is_cut_off(connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await scripts.note_coordinator_lost(incarnation)
    await pass_ms(connection, 5_000)
    assert (await scripts.note_coordinator_lost(incarnation)).is_partitioned


async def owed(scripts: Scripts, incarnation: StoreIncarnation) -> tuple[int, int]:
    fields = await scripts.lease_fields(incarnation, QUOTA)
    return int(fields.get("overdrawn", "0")), int(fields.get("owed", "0"))


async def reported(scripts: Scripts, incarnation: StoreIncarnation) -> FrozenLease:
    (lease,) = batch_of(await freeze(scripts, incarnation)).leases
    return lease


async def end(scripts: Scripts, incarnation: StoreIncarnation, hold: HoldId, action: str, amount: int = 0) -> None:
    await scripts.update_hold(incarnation.fingerprint, hold, action, amount)


async def test_a_partitioned_region_admits_its_overdraft_and_no_more(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    assert (await take(scripts, incarnation, 7)).allowed
    assert (await take(scripts, incarnation, 5)).allowed, "three of the lease, two beyond"
    assert await owed(scripts, incarnation) == (2, 2)
    assert not (await take(scripts, incarnation, 7)).allowed, "six are left"
    assert (await take(scripts, incarnation, 6)).allowed
    assert not (await take(scripts, incarnation, 1)).allowed
    assert await owed(scripts, incarnation) == (8, 8)
    assert (await scripts.note_coordinator_lost(incarnation)).overdrawn == 8
    told = await reported(scripts, incarnation)
    assert (told.consumed, told.overdrawn, sum(line.units for line in told.lines)) == (18, 8, 18)


async def test_a_connected_region_is_denied_when_its_lease_is_spent(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, LEASE)
    assert (await take(scripts, incarnation, 10)).allowed
    assert not (await take(scripts, incarnation, 1)).allowed, "nobody found the coordinator silent"
    assert not (await scripts.note_coordinator_lost(incarnation)).is_partitioned, (
        "one call without an answer is not enough"
    )
    await pass_ms(connection, 4_900)
    assert not (await take(scripts, incarnation, 1)).allowed
    await install(scripts, incarnation, LEASE, seq=2)
    await pass_ms(connection, 5_000)
    assert not (await take(scripts, incarnation, 1)).allowed, "somebody was answered meanwhile"
    await is_cut_off(connection, scripts, incarnation)
    await pass_ms(connection, 31_000)
    assert not (await take(scripts, incarnation, 1)).allowed, "nobody tries any more: that says nothing of today"
    assert not (await scripts.note_coordinator_lost(incarnation)).is_partitioned, "it is counted anew"


async def test_an_expired_lease_has_its_overdraft_and_nothing_else(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    await pass_ms(connection, 60_000)
    await is_cut_off(connection, scripts, incarnation)
    assert not (await take(scripts, incarnation, 9)).allowed, "ten units lie in it, and must not be spent any more"
    assert (await take(scripts, incarnation, 8)).allowed
    assert not (await take(scripts, incarnation, 1)).allowed
    assert await owed(scripts, incarnation) == (8, 8)


async def test_an_overdraft_ends_with_its_period(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, structs.replace(LEASE, ends_in_ms=20_000, expires_in_ms=20_000))
    await is_cut_off(connection, scripts, incarnation)
    await pass_ms(connection, 15_000)
    assert not (await take(scripts, incarnation, 1)).allowed


async def test_each_period_has_its_own_overdraft(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    old = structs.replace(LEASE, ends_in_ms=20_000)
    new = lease_reply(
        period="2026-12", granted=1, overdraft=3, starts_in_ms=20_000, ends_in_ms=90_000, first_minute=50_000
    )
    await install(scripts, incarnation, old, new)
    await is_cut_off(connection, scripts, incarnation)
    assert (await take(scripts, incarnation, 15)).allowed
    await pass_ms(connection, 15_000)
    assert not (await take(scripts, incarnation, 5)).allowed
    assert (await take(scripts, incarnation, 4)).allowed
    assert await owed(scripts, incarnation) == (3, 3)
    was, now = batch_of(await freeze(scripts, incarnation)).leases
    assert [(each.period, each.consumed, each.overdrawn) for each in (was, now)] == [
        ("2026-11", 15, 5),
        ("2026-12", 4, 3),
    ]


async def test_an_overdraft_is_settled_as_far_as_units_cover_it(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """Units granted later cover the overdraft; units booked as overage do not restore it."""
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    assert (await take(scripts, incarnation, 18)).allowed
    await install(scripts, incarnation, LEASE, seq=2)
    assert await owed(scripts, incarnation) == (8, 8), "heard, and not settled yet"
    await is_cut_off(connection, scripts, incarnation)
    assert not (await take(scripts, incarnation, 1)).allowed
    await install(scripts, incarnation, structs.replace(LEASE, granted=15, overage=3), seq=3)
    assert await owed(scripts, incarnation) == (8, 0)
    await is_cut_off(connection, scripts, incarnation)
    assert not (await take(scripts, incarnation, 6)).allowed
    assert (await take(scripts, incarnation, 5)).allowed, "eight, less three that are overage"
    await install(scripts, incarnation, structs.replace(LEASE, granted=10), seq=2)  # an old reply, late
    assert await owed(scripts, incarnation) == (13, 5)


async def test_units_held_beyond_the_lease_are_owed_until_their_hold_ends(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    hold = await set_aside(scripts, incarnation, 16)
    assert await owed(scripts, incarnation) == (6, 6)
    await install(scripts, incarnation, LEASE, seq=2)
    await is_cut_off(connection, scripts, incarnation)
    assert await owed(scripts, incarnation) == (6, 6), "sixteen are held, ten were granted"
    assert not (await take(scripts, incarnation, 3)).allowed
    await end(scripts, incarnation, hold, "release")
    await install(scripts, incarnation, LEASE, seq=3)
    assert await owed(scripts, incarnation) == (6, 0)


async def test_parts_of_one_hold_are_counted_once(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    assert (await ask_for_hold(scripts, incarnation, charge_of(9), charge_of(8))).allowed
    assert await owed(scripts, incarnation) == (7, 7)
    assert await available(scripts, incarnation) == -7


async def test_policies_and_repetitions_of_one_call_share_an_overdraft(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    told: list[StoreDecision | Exception] = []
    request = StoreRequest("enforce", [charge_of(2), charge_of(1)])
    scripts.checks.send(incarnation, [RequestRun(request, 7, told.extend)], lambda _: None)
    while len(told) < 7:
        await take(scripts, incarnation, 1, mode="peek")
    assert [isinstance(each, StoreDecision) and each.allowed for each in told] == [True] * 6 + [False]
    assert await owed(scripts, incarnation) == (8, 8)


async def test_all_policies_overdraw_or_none(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    other = quota_key("exports", [("tenant", "globex")])
    await install(scripts, incarnation, LEASE)
    await is_cut_off(connection, scripts, incarnation)
    decision = await scripts.check(incarnation, "enforce", [charge_of(15), charge_of(1, other)])
    assert not decision.allowed, "of the other there is no lease"
    assert await owed(scripts, incarnation) == (0, 0)
    assert await available(scripts, incarnation) == 10
    assert (await take(scripts, incarnation, 15, mode="peek")).allowed
    assert await owed(scripts, incarnation) == (0, 0), "who peeks takes nothing"
    assert (await take(scripts, incarnation, 40, mode="adjust")).allowed
    assert await owed(scripts, incarnation) == (0, 0), "what is told afterwards is no overdraft"


@pytest.mark.parametrize("changed", [{"overdraft": 0}, {"overage": 8}])
async def test_without_an_overdraft_a_request_is_denied(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, changed: dict[str, int]
) -> None:
    lease: LeaseReply = structs.replace(LEASE, **changed)
    await install(scripts, incarnation, lease)
    await is_cut_off(connection, scripts, incarnation)
    assert (await take(scripts, incarnation, 10 + changed.get("overage", 0))).allowed
    assert not (await take(scripts, incarnation, 1)).allowed


async def test_an_older_incarnation_does_not_affect_this_one(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    with pytest.raises(Fenced):
        await scripts.note_coordinator_lost(incarnation._replace(epoch=6))
