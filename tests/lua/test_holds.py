"""Holds on a real store reserve units once, end once, and are booked where they were reserved."""

from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from protocol.identifiers import lane_of, quota_key
from protocol.messages import LeaseReply
from protocol.outcomes import HoldOutcome
from protocol.units import MAX_UNITS
from regional_agent.admission.rules.hold_ids import HoldId, HoldPart
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    Fenced,
    HoldState,
    LeaseLost,
    Operation,
    OperationConflict,
    PartUnits,
    RateCharge,
    StoreIncarnation,
)
from tests.lua.script_helpers import (
    QUOTA,
    RATE,
    ask_for_hold,
    available,
    charge_of,
    install,
    lease_reply,
    set_aside,
    take,
    take_rate,
)
from tests.lua.test_conversation import batch_of, freeze
from tests.lua.test_periods import AHEAD, NOW, OVER, pass_ms, reported

pytestmark = pytest.mark.anyio

DAY_MS, HOUR_MS = 24 * 3_600_000, 3_600_000


def lasting(quota: str = QUOTA, **changed: Any) -> LeaseReply:
    """Install a lease that outlasts the holds."""
    return lease_reply(quota, expires_in_ms=HOUR_MS, **changed)


async def change_hold(
    scripts: Scripts, incarnation: StoreIncarnation, hold: HoldId, action: str, amount: int = 0
) -> HoldState:
    return await scripts.update_hold(incarnation.fingerprint, hold, action, amount)


async def totals(scripts: Scripts, incarnation: StoreIncarnation) -> tuple[int, int, int]:
    """Return the units that are available, held and consumed."""
    fields = await scripts.lease_fields(incarnation, QUOTA)
    return await available(scripts, incarnation), int(fields.get("held", 0)), int(fields.get("consumed", 0))


async def test_held_units_are_not_available_and_a_commit_books_what_was_used(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    assert await totals(scripts, incarnation) == (3, 7, 0)
    assert not (await take(scripts, incarnation, 4)).allowed
    assert await change_hold(scripts, incarnation, hold, "commit", 5) == HoldState(
        HoldOutcome.DONE, "committed", 7, 5, 0, (PartUnits(7, 5),)
    )
    assert await totals(scripts, incarnation) == (5, 0, 5)
    [lease] = batch_of(await freeze(scripts, incarnation)).leases
    assert (lease.consumed, [line.units for line in lease.lines]) == (5, [5])


async def test_a_hold_is_spent_in_full_and_once(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    for _ in range(2):
        assert await change_hold(scripts, incarnation, hold, "spend") == HoldState(
            HoldOutcome.DONE, "committed", 7, 7, 0, (PartUnits(7, 7),)
        )
        assert await totals(scripts, incarnation) == (3, 0, 7)
    assert (await change_hold(scripts, incarnation, hold, "commit", 6)).outcome is HoldOutcome.ENDED


@pytest.mark.parametrize("end", ["release", "time"])
async def test_a_hold_that_ended_cannot_be_spent(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection, end: str
) -> None:
    """Its units may have been granted to another request by now."""
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7, ttl_ms=1_000)
    if end == "time":
        await pass_ms(connection, 1_001)
    else:
        await change_hold(scripts, incarnation, hold, "release")
    assert (await change_hold(scripts, incarnation, hold, "spend")).outcome is HoldOutcome.ENDED
    assert await totals(scripts, incarnation) == (10, 0, 0)


async def test_a_release_leaves_nothing_behind(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    for _ in range(2):
        assert (await change_hold(scripts, incarnation, hold, "release")).state == "released"
        assert await totals(scripts, incarnation) == (10, 0, 0)
    assert (await change_hold(scripts, incarnation, hold, "commit", 1)).outcome is HoldOutcome.ENDED


async def test_a_commit_is_booked_once_and_another_is_refused(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    for _ in range(3):
        assert (await change_hold(scripts, incarnation, hold, "commit", 5)).outcome is HoldOutcome.DONE
    for action, amount in (("commit", 6), ("release", 0), ("extend", 60_000)):
        told = await change_hold(scripts, incarnation, hold, action, amount)
        assert (told.outcome, told.state, told.committed) == (HoldOutcome.ENDED, "committed", 5)
    assert await totals(scripts, incarnation) == (5, 0, 5)


async def test_usage_beyond_the_hold_is_booked_too(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    assert (await change_hold(scripts, incarnation, hold, "commit", 25)).outcome is HoldOutcome.DONE
    assert await totals(scripts, incarnation) == (-15, 0, 25)


async def test_past_usage_is_held_beyond_the_lease_and_spent(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    """No other request is admitted on it meanwhile; without a lease it cannot be booked."""
    await install(scripts, incarnation, lasting(granted=10))
    assert [(await take(scripts, incarnation, 25, mode=mode)).allowed for mode in ("peek", "peek_adjust")] == [
        False,
        True,
    ]
    hold = await set_aside(scripts, incarnation, 25, mode="hold_adjust")
    assert await totals(scripts, incarnation) == (-15, 25, 0)
    assert not (await take(scripts, incarnation, 1)).allowed
    assert (await change_hold(scripts, incarnation, hold, "spend")).outcome is HoldOutcome.DONE
    assert await totals(scripts, incarnation) == (-15, 0, 25)
    none = await scripts.check(incarnation, "peek_adjust", [replace(charge_of(1), quota="exports:tenant=none")])
    assert [policy.reason for policy in none.policies] == ["no_lease"]


async def test_the_first_of_several_charged_parts_is_reported(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    charges = (charge_of(units, on_expiry="charge") for units in (3, 6))
    decision = await ask_for_hold(scripts, incarnation, *charges, ttl_ms=1_000)
    assert decision.hold is not None
    await pass_ms(connection, 1_001)
    told = await change_hold(scripts, incarnation, decision.hold.id, "look")
    assert (told.state, told.units) == ("charged", 3)


async def test_each_part_is_committed_with_the_units_of_its_quota(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    other = next(
        key
        for number in range(1_000)
        if lane_of(key := quota_key("mails", [("tenant", str(number))]), 16) == lane_of(QUOTA, 16)
    )
    await install(scripts, incarnation, lasting(granted=10), lasting(other, granted=10))
    decision = await ask_for_hold(scripts, incarnation, charge_of(7), charge_of(4, other))
    assert decision.hold is not None
    commit = incarnation.fingerprint, decision.hold.id, "commit"
    for _ in range(2):
        told = await scripts.update_hold(*commit, None, {"mails": 9})
        assert (told.outcome, told.parts) == (HoldOutcome.DONE, (PartUnits(7, 7), PartUnits(4, 9)))
        assert await totals(scripts, incarnation) == (3, 0, 7)
    fields = await scripts.lease_fields(incarnation, other)
    assert (fields["consumed"], fields["held"]) == ("9", "0")
    for amount, costs in ((None, {"mails": 8}), (6, {"mails": 9}), (9, {})):
        told = await scripts.update_hold(*commit, amount, costs)
        assert told.outcome is HoldOutcome.ENDED, "another commit"


async def test_no_commit_takes_a_total_out_of_the_range_in_which_lua_counts(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    await take(scripts, incarnation, 100, mode="adjust")
    assert (await change_hold(scripts, incarnation, hold, "commit", MAX_UNITS)).outcome is HoldOutcome.TOO_MANY
    assert await totals(scripts, incarnation) == (-97, 7, 100)
    await take(scripts, incarnation, MAX_UNITS - 107, mode="adjust")
    assert not (await take(scripts, incarnation, 1, mode="adjust")).allowed, "what is held will be consumed"


async def test_the_same_operation_holds_once(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    first = await ask_for_hold(scripts, incarnation, charge_of(7))
    await pass_ms(connection, 20_000)
    again = await ask_for_hold(scripts, incarnation, charge_of(7), ttl_ms=99)
    assert first.hold is not None
    assert again.hold is not None
    assert (again.replayed, again.hold.id) == (True, first.hold.id)
    assert (first.hold.ttl_ms, again.policies) == (60_000, first.policies)
    assert 39_000 < again.hold.ttl_ms <= 40_000
    others = await ask_for_hold(scripts, incarnation, charge_of(7), RateCharge(RATE, 1, 1_000, 10))
    assert others.hold is not None
    assert (others.hold.id, len(others.policies)) == (first.hold.id, 2), "its policies are others by now"
    assert await totals(scripts, incarnation) == (3, 7, 0)


async def test_an_operation_without_a_hold_is_not_mistaken_for_one(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 2, name="one")
    assert hold.parts == (HoldPart("allowance", QUOTA),)
    with pytest.raises(OperationConflict):
        await scripts.check(incarnation, "enforce", [charge_of(2)], Operation("one", "another", 60_000))


async def test_all_policies_hold_or_none_and_a_rate_is_spent(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    mails = next(
        key for i in range(99) if lane_of(key := quota_key("mails", [("tenant", str(i))]), 4) == lane_of(QUOTA, 4)
    )
    await install(scripts, incarnation, lasting(granted=10), lasting(mails, granted=5))
    denied = await ask_for_hold(scripts, incarnation, charge_of(6), charge_of(6, mails), RateCharge(RATE, 4, 1_000, 10))
    assert (denied.allowed, denied.hold) == (False, None)
    assert await totals(scripts, incarnation) == (10, 0, 0)
    held = await ask_for_hold(scripts, incarnation, charge_of(4), charge_of(4, mails), RateCharge(RATE, 4, 1_000, 10))
    assert held.hold is not None
    assert not (await take_rate(scripts, incarnation, 7)).allowed
    assert await available(scripts, incarnation, mails) == 1
    assert (await change_hold(scripts, incarnation, held.hold.id, "commit", 3)).outcome is HoldOutcome.DONE
    assert (await totals(scripts, incarnation), await available(scripts, incarnation, mails)) == ((7, 0, 3), 2)
    assert not (await take_rate(scripts, incarnation, 7)).allowed, "what was spent at once is not given back"


async def test_two_policies_on_one_quota_each_hold_their_part(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    held = await ask_for_hold(
        scripts, incarnation, charge_of(4), replace(charge_of(4), dimensions='{"policy":"other"}')
    )
    assert held.hold is not None
    assert await totals(scripts, incarnation) == (2, 8, 0)
    await change_hold(scripts, incarnation, held.hold.id, "commit", 3)
    assert await totals(scripts, incarnation) == (4, 0, 6)
    [lease] = batch_of(await freeze(scripts, incarnation)).leases
    assert {line.dimensions["policy"]: line.units for line in lease.lines} == {"export": 3, "other": 3}


# --- expiry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("touch", ["check", "peek", "freeze", "give_back", "look", "another hold"])
async def test_the_next_script_of_any_kind_ends_expired_holds(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, touch: str
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold, other = (
        await set_aside(scripts, incarnation, 7),
        await set_aside(scripts, incarnation, 1, name="other", ttl_ms=HOUR_MS),
    )
    await pass_ms(connection, 59_000)
    assert not (await take(scripts, incarnation, 3)).allowed
    await pass_ms(connection, 1_000)
    if touch in ("check", "peek"):
        assert (await take(scripts, incarnation, 9, mode="peek" if touch == "peek" else "enforce")).allowed
    elif touch == "freeze":
        await freeze(scripts, incarnation)
    elif touch == "give_back":
        assert await scripts.return_units(incarnation, QUOTA, 0) == 9
    else:
        await change_hold(scripts, incarnation, hold if touch == "look" else other, "look")
    fields = await scripts.lease_fields(incarnation, QUOTA)
    assert (fields["held"], fields["holds"]) == ("1", "2"), "it may yet be committed to"


@pytest.mark.parametrize(
    ("on_expiry", "state", "at_once", "then"),
    [("release", "lapsed", (10, 0, 0), (1, 0, 9)), ("charge", "charged", (3, 0, 7), (1, 0, 9))],
)
async def test_an_expired_hold_is_freed_or_charged_and_a_late_commit_is_booked(
    connection: StoreConnection,
    scripts: Scripts,
    incarnation: StoreIncarnation,
    on_expiry: str,
    state: str,
    at_once: tuple[int, int, int],
    then: tuple[int, int, int],
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7, on_expiry=on_expiry)
    await pass_ms(connection, 60_000)
    assert (await change_hold(scripts, incarnation, hold, "look")).state == state
    assert await totals(scripts, incarnation) == at_once
    assert (await change_hold(scripts, incarnation, hold, "extend", 60_000)).outcome is HoldOutcome.ENDED
    await pass_ms(connection, DAY_MS - 1_000)
    for _ in range(2):
        assert (await change_hold(scripts, incarnation, hold, "commit", 9)).outcome is HoldOutcome.DONE
        assert await totals(scripts, incarnation) == then
    [lease] = batch_of(await freeze(scripts, incarnation)).leases
    assert (lease.consumed, sum(line.units for line in lease.lines)) == (9, 9)


async def test_a_late_commit_below_the_charge_returns_nothing(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold, other = [await set_aside(scripts, incarnation, 3, on_expiry="charge", name=name) for name in ("a", "b")]
    await pass_ms(connection, 60_000)
    assert (await change_hold(scripts, incarnation, hold, "commit", 1)).outcome is HoldOutcome.DONE
    assert (await change_hold(scripts, incarnation, other, "release")).state == "charged"
    assert await totals(scripts, incarnation) == (4, 0, 6)


async def test_an_extended_hold_lasts_so_much_longer_and_never_shorter(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    await pass_ms(connection, 50_000)
    told = await change_hold(scripts, incarnation, hold, "extend", 60_000)
    assert (told.outcome, told.state, told.expires_in_ms) == (HoldOutcome.DONE, "open", 60_000)
    assert 59_000 < (await change_hold(scripts, incarnation, hold, "extend", 5)).expires_in_ms <= 60_000
    await pass_ms(connection, 30_000)
    assert not (await take(scripts, incarnation, 4)).allowed
    await pass_ms(connection, 30_000)
    assert (await take(scripts, incarnation, 4)).allowed


async def test_one_script_ends_a_bounded_number_of_holds_and_the_next_the_others(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=100))
    for number in range(100):
        await set_aside(scripts, incarnation, 1, name=f"hold {number}")
    await pass_ms(connection, 60_000)
    assert not (await take(scripts, incarnation, 65)).allowed, "the work of one script is bounded"
    assert (await take(scripts, incarnation, 65)).allowed
    assert (await scripts.lease_fields(incarnation, QUOTA))["held"] == "0"


@pytest.mark.parametrize(("action", "remembered_ms"), [("commit", HOUR_MS), ("release", HOUR_MS), ("look", DAY_MS)])
async def test_ended_holds_are_forgotten_after_a_while(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, action: str, remembered_ms: int
) -> None:
    """An ended hold leaves nothing behind, or each would stay in the store's memory for ever."""
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    if action == "look":
        await pass_ms(connection, 60_000)
    await change_hold(scripts, incarnation, hold, action)
    await pass_ms(connection, remembered_ms - 1_000)
    assert (await change_hold(scripts, incarnation, hold, "look")).outcome is HoldOutcome.DONE
    await pass_ms(connection, 1_000)
    await take(scripts, incarnation, 1, mode="peek")
    assert (await change_hold(scripts, incarnation, hold, "commit", 2)).outcome is HoldOutcome.UNKNOWN
    lane = lane_of(QUOTA, incarnation.lanes)
    for key in (keys.holds(lane, incarnation.epoch, QUOTA), keys.hold_deadlines(lane, incarnation.epoch, QUOTA)):
        assert await connection.call("EXISTS", key) == 0
    fields = await scripts.lease_fields(incarnation, QUOTA)
    assert (fields["held"], fields["holds"], "hold_deadline" in fields) == ("0", "0", False)


# --- the end of a period, and of an epoch -----------------------------------------------------------------------------


async def test_a_hold_outlives_its_period_and_is_booked_in_it(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    hold, other = [await set_aside(scripts, incarnation, 20, name=name, ttl_ms=HOUR_MS) for name in ("a", "b")]
    await pass_ms(connection, 60_000)
    assert (await take(scripts, incarnation, 10)).allowed, "the next period has its own units"
    first = (await reported(scripts, incarnation))["2026-11"]
    assert (first.consumed, first.returned) == (0, 60), "what is held is not given back"
    await install(scripts, incarnation, OVER)
    await change_hold(scripts, incarnation, hold, "commit", 15)
    second = await reported(scripts, incarnation)
    assert [(each.consumed, each.returned) for each in second.values()] == [(15, 65), (10, 0)]
    assert [line.units for line in second["2026-11"].lines] == [15]
    await install(scripts, incarnation, OVER, seq=2)
    assert "ended:2026-11" in await scripts.lease_fields(incarnation, QUOTA), "one hold of it is open yet"
    await change_hold(scripts, incarnation, other, "release")
    third = (await reported(scripts, incarnation))["2026-11"]
    assert (third.consumed, third.returned) == (15, 85)
    await install(scripts, incarnation, OVER, seq=3)
    assert "ended:2026-11" not in await scripts.lease_fields(incarnation, QUOTA)
    assert (await change_hold(scripts, incarnation, hold, "commit", 15)).outcome is HoldOutcome.DONE, (
        "a repetition needs no lease"
    )


async def test_a_commit_that_comes_after_the_period_and_the_hold_is_booked_in_it(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    hold = await set_aside(scripts, incarnation, 20)
    await pass_ms(connection, 60_000)
    first = (await reported(scripts, incarnation))["2026-11"]
    assert (first.consumed, first.returned) == (0, 100)
    await install(scripts, incarnation, OVER)
    assert (await change_hold(scripts, incarnation, hold, "commit", 20)).state == "committed"
    late = (await reported(scripts, incarnation))["2026-11"]
    assert (late.consumed, late.returned, [line.units for line in late.lines]) == (20, 100, [20])


async def test_a_late_grant_to_an_ended_period_does_not_affect_its_holds(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await set_aside(scripts, incarnation, 20, ttl_ms=HOUR_MS)
    await take(scripts, incarnation, 90, mode="adjust")
    await pass_ms(connection, 60_000)
    await install(scripts, incarnation, structs.replace(OVER, granted=115))
    late = (await reported(scripts, incarnation))["2026-11"]
    assert (late.granted, late.consumed, late.returned) == (115, 90, 5), "20 are held"


async def test_a_hold_outlives_its_epoch_and_is_booked_in_it(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    newer = await _next_epoch(scripts, incarnation)
    assert await scripts.return_units(incarnation, QUOTA, 0) == 3
    assert not await scripts.forget_epoch(incarnation), "what was given back is not told yet"
    await freeze(scripts, incarnation)
    await install(scripts, incarnation, lease_reply(granted=10))
    assert await scripts.forget_epoch(incarnation)
    assert await scripts.older_epochs(newer) == []
    assert (await change_hold(scripts, incarnation, hold, "commit", 5)).state == "committed"
    assert await scripts.older_epochs(newer) == [incarnation], "it has something to report again"
    assert not await scripts.forget_epoch(incarnation)
    assert await scripts.return_units(incarnation, QUOTA, 0) == 2
    [lease] = batch_of(await freeze(scripts, incarnation)).leases
    assert (lease.consumed, lease.returned) == (5, 5)


async def _next_epoch(scripts: Scripts, incarnation: StoreIncarnation) -> StoreIncarnation:
    fence = await scripts.begin_incarnation(incarnation.fingerprint, "f" * 16, "0123456789abcdef")
    assert fence.nonce is not None
    assert await scripts.adopt_epoch(incarnation.fingerprint, fence.nonce, 8, incarnation.lanes)
    return incarnation._replace(epoch=8)


async def test_a_hold_that_expires_in_an_older_epoch_is_returned(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    await set_aside(scripts, incarnation, 7)
    await _next_epoch(scripts, incarnation)
    assert await scripts.return_units(incarnation, QUOTA, 0) == 3
    await pass_ms(connection, 60_000)
    assert await scripts.return_units(incarnation, QUOTA, 0) == 7


async def test_a_hold_that_the_store_never_had_or_lost_is_unknown(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lasting(granted=10))
    hold = await set_aside(scripts, incarnation, 7)
    with pytest.raises(Fenced):
        await scripts.update_hold("another incarnation", hold, "commit", 5)
    for strange in (
        hold._replace(name="A" * 22),
        hold._replace(epoch=8),
        hold._replace(parts=(HoldPart("gcra", RATE),)),
    ):
        assert (await change_hold(scripts, incarnation, strange, "commit", 5)).outcome is HoldOutcome.UNKNOWN
    await connection.call("DEL", keys.lease(lane_of(QUOTA, incarnation.lanes), incarnation.epoch, QUOTA))
    assert (await change_hold(scripts, incarnation, hold, "commit", 5)).outcome is HoldOutcome.UNKNOWN
    assert await scripts.lease_fields(incarnation, QUOTA) == {}, "a missing lease means no lease, never zeros"


@pytest.mark.parametrize("script", ["settle", "freeze"])
async def test_a_lease_that_is_gone_while_units_of_it_are_held_ends_the_epoch(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, script: str
) -> None:
    """A new installation would have a negative balance and admit more than was granted."""
    await install(scripts, incarnation, lasting(granted=10))
    await set_aside(scripts, incarnation, 7)
    await connection.call("DEL", keys.lease(lane_of(QUOTA, incarnation.lanes), incarnation.epoch, QUOTA))
    with pytest.raises(LeaseLost):
        await (
            freeze(scripts, incarnation) if script == "freeze" else install(scripts, incarnation, lasting(granted=10))
        )
    assert await scripts.lease_fields(incarnation, QUOTA) == {}


@pytest.mark.parametrize(
    ("on_expiry", "cost", "retry_ms"),
    [("release", 4, 10_000), ("release", 8, 20_000), ("release", 12, None), ("charge", 4, None)],
)
async def test_retry_after_of_a_denial_is_when_enough_holds_have_expired(
    scripts: Scripts, incarnation: StoreIncarnation, on_expiry: str, cost: int, retry_ms: int | None
) -> None:
    """Twelve units never return: two were used, and the rest are charged on expiry."""
    await install(scripts, incarnation, lasting(granted=10))
    assert (await take(scripts, incarnation, 2)).allowed
    for units, ttl_ms in ((4, 10_000), (4, 20_000)):
        await set_aside(scripts, incarnation, units, on_expiry=on_expiry, ttl_ms=ttl_ms, name=f"for {ttl_ms}")
    denied = (await take(scripts, incarnation, cost)).policies[0]
    assert denied.reason == "lease_spent"
    if retry_ms is None:
        assert denied.retry_after_ms == denied.reset_ms
    else:
        assert retry_ms - 5_000 < denied.retry_after_ms <= retry_ms
        assert denied.retry_after_ms < denied.reset_ms
