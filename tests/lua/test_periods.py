"""One period follows the other in a real store, on its own clock."""

import pytest
from msgspec import structs

from protocol.identifiers import lane_of
from protocol.messages import MAX_LEASES_PER_EXCHANGE, FrozenLease, LeaseReply
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import LeaseLost, StoreIncarnation
from tests.lua.script_helpers import QUOTA, available, install, lease_reply, set_aside, take
from tests.lua.test_conversation import batch_of, dirty, freeze

pytestmark = pytest.mark.anyio

NOW = lease_reply(granted=100, ends_in_ms=60_000)
AHEAD = lease_reply(
    period="2026-12", granted=10, starts_in_ms=60_000, expires_in_ms=120_000, ends_in_ms=3_600_000, first_minute=50_000
)
BEGUN = structs.replace(AHEAD, starts_in_ms=0)
OVER = structs.replace(NOW, expires_in_ms=0, ends_in_ms=0)


async def pass_ms(connection: StoreConnection, ms: int) -> None:
    """Set the store's clock: the time since `last` is added to `mono` by the next script of any kind."""
    await connection.call("HINCRBY", keys.FENCE, "mono", ms * 1000)


async def reported(scripts: Scripts, incarnation: StoreIncarnation) -> dict[str, FrozenLease]:
    return {lease.period: lease for lease in batch_of(await freeze(scripts, incarnation)).leases}


async def test_a_lease_ahead_waits_for_its_period_and_then_admits_without_an_exchange(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    assert await install(scripts, incarnation, NOW, AHEAD) == {QUOTA: 100}, (
        "of the next period nothing can be spent yet"
    )
    await take(scripts, incarnation, 30)
    await pass_ms(connection, 50_000)
    assert (await take(scripts, incarnation, 60)).allowed
    assert not (await take(scripts, incarnation, 11)).allowed, "units of the next period are not this one's"
    await pass_ms(connection, 10_000)
    assert (await take(scripts, incarnation, 4)).policies[0].available == 6
    old, new = (await reported(scripts, incarnation)).values()
    assert (old.period, old.consumed, old.returned) == ("2026-11", 90, 10)
    assert (new.period, new.granted, new.consumed, new.returned) == ("2026-12", 10, 4, 0)
    assert [sum(line.units for line in each.lines) for each in (old, new)] == [90, 4]


@pytest.mark.parametrize("touch", ["check", "peek", "freeze", "settle", "give_back"])
async def test_the_next_script_of_any_kind_begins_the_period(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, touch: str
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await take(scripts, incarnation, 30)
    await reported(scripts, incarnation)
    await install(scripts, incarnation, NOW, AHEAD, seq=1)
    assert await dirty(scripts, incarnation) == []
    await pass_ms(connection, 60_000)
    if touch in ("check", "peek"):
        await take(scripts, incarnation, 1, mode="peek" if touch == "peek" else "enforce")
    elif touch == "freeze":
        await freeze(scripts, incarnation)
    elif touch == "settle":
        await install(scripts, incarnation, NOW, seq=9)
    else:
        await scripts.return_units(incarnation, QUOTA, 8)
    fields = await scripts.lease_fields(incarnation, QUOTA)
    assert (fields["period"], fields["granted"], fields["ended:2026-11"][:12]) == ("2026-12", "10", "100 0 30 70 ")
    assert not [name for name in fields if name.startswith("next:")]
    assert QUOTA in await dirty(scripts, incarnation) or touch == "freeze"


async def test_a_period_begins_when_the_coordinator_reports_it(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    assert await install(scripts, incarnation, OVER, structs.replace(BEGUN, granted=15)) == {QUOTA: 5}
    assert (await take(scripts, incarnation, 15)).allowed


async def test_totals_of_a_lease_ahead_only_move_forward(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, structs.replace(AHEAD, granted=20))
    await install(scripts, incarnation, NOW, AHEAD)
    await pass_ms(connection, 60_000)
    await take(scripts, incarnation, 1, mode="peek")
    assert await available(scripts, incarnation) == 20
    await install(scripts, incarnation, NOW, structs.replace(AHEAD, granted=25))
    assert await available(scripts, incarnation) == 25, "a late reply that says it has not begun: but here it has"


async def test_a_slow_request_does_not_begin_a_period_early(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await install(scripts, incarnation, NOW, structs.replace(AHEAD, starts_in_ms=55_000))
    await pass_ms(connection, 56_000)
    assert (await take(scripts, incarnation, 11)).allowed


async def test_only_a_batch_that_reported_a_period_lets_it_be_forgotten(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await take(scripts, incarnation, 30)
    assert (await reported(scripts, incarnation))["2026-11"].consumed == 30
    await take(scripts, incarnation, 5)
    await pass_ms(connection, 60_000)
    await take(scripts, incarnation, 1)
    await install(scripts, incarnation, OVER, BEGUN, seq=1)
    last = (await reported(scripts, incarnation))["2026-11"]
    assert (last.consumed, last.returned, sum(line.units for line in last.lines)) == (35, 65, 5)
    await install(scripts, incarnation, OVER, BEGUN, seq=2)
    assert list(await reported(scripts, incarnation)) == ["2026-12"]


async def test_a_late_grant_to_an_ended_period_is_returned(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await take(scripts, incarnation, 110, mode="adjust")
    await pass_ms(connection, 60_000)
    await reported(scripts, incarnation)
    await install(scripts, incarnation, structs.replace(NOW, granted=107, overage=3), AHEAD, seq=1)
    covered = (await reported(scripts, incarnation))["2026-11"]
    assert (covered.granted, covered.overage, covered.returned) == (107, 3, 0), "it was spent already"
    assert await install(scripts, incarnation, structs.replace(OVER, granted=112, overage=3), BEGUN, seq=2) == {
        QUOTA: 0
    }
    assert await dirty(scripts, incarnation) == [QUOTA]
    assert (await reported(scripts, incarnation))["2026-11"].returned == 5


async def test_usage_between_the_last_report_and_its_receipt_is_reported_first(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """A copy of an older message is answered late, with units granted meanwhile."""
    await install(scripts, incarnation, NOW, AHEAD)
    await pass_ms(connection, 60_000)
    assert (await reported(scripts, incarnation))["2026-11"].returned == 100
    more = structs.replace(OVER, granted=105)
    await install(scripts, incarnation, more, BEGUN, seq=9)
    await install(scripts, incarnation, more, BEGUN, seq=1)
    assert (await reported(scripts, incarnation))["2026-11"].returned == 105
    await install(scripts, incarnation, more, BEGUN, seq=2)
    assert list(await reported(scripts, incarnation)) == ["2026-12"]


async def test_totals_of_an_ended_period_only_move_forward(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, structs.replace(NOW, overage=2), AHEAD)
    await pass_ms(connection, 60_000)
    await install(scripts, incarnation, structs.replace(OVER, granted=90, overage=1), BEGUN)
    old = (await reported(scripts, incarnation))["2026-11"]
    assert (old.granted, old.overage, old.returned) == (100, 2, 102)


async def test_a_period_is_forgotten_with_its_own_batch_and_by_no_copied_receipt(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await pass_ms(connection, 60_000)
    await reported(scripts, incarnation)
    for reply in (NOW, OVER):  # the first drops the batch, and the period has not ended for the coordinator yet
        await install(scripts, incarnation, reply, BEGUN, seq=1)
    assert "ended:2026-11" in await scripts.lease_fields(incarnation, QUOTA)


async def test_a_lease_ahead_is_reported_and_returned_only_at_shutdown(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    assert await scripts.return_units(incarnation, QUOTA, 0) == 100
    ahead = (await reported(scripts, incarnation))["2026-12"]
    assert (ahead.granted, ahead.consumed, ahead.returned) == (10, 0, 0)
    await install(scripts, incarnation, NOW, AHEAD, seq=1)
    assert [await scripts.return_units(incarnation, QUOTA, 0, ahead=True) for _ in range(2)] == [10, 0]
    assert (await reported(scripts, incarnation))["2026-12"].returned == 10


async def test_units_returned_ahead_stay_returned_when_the_period_begins(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await scripts.return_units(incarnation, QUOTA, 0, ahead=True)
    await install(scripts, incarnation, NOW, structs.replace(AHEAD, granted=13))
    await pass_ms(connection, 60_000)
    assert not (await take(scripts, incarnation, 4)).allowed
    assert (await take(scripts, incarnation, 3)).allowed


async def test_no_period_of_an_older_epoch_begins(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    await take(scripts, incarnation, 30)
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    await pass_ms(connection, 60_000)
    old, ahead = (await reported(scripts, incarnation)).values()
    assert (old.consumed, old.returned, ahead.granted, ahead.returned) == (30, 0, 10, 0)


async def test_a_store_that_slept_through_a_period_goes_through_all_of_them(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    after = structs.replace(AHEAD, period="2027-01", granted=7, starts_in_ms=0, first_minute=100_000)
    await install(scripts, incarnation, after)
    told = await reported(scripts, incarnation)
    assert {period: (each.granted, each.returned) for period, each in told.items()} == {
        "2026-11": (100, 100),
        "2026-12": (10, 10),
        "2027-01": (7, 0),
    }


async def test_a_change_of_period_returns_the_waiting_lease(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    """A monthly quota becomes a daily one while the next month's lease waits."""
    await install(scripts, incarnation, NOW, AHEAD)
    await install(scripts, incarnation, lease_reply(period="2026-11-30", granted=5, first_minute=40_000))
    assert await available(scripts, incarnation) == 5
    assert (await reported(scripts, incarnation))["2026-12"].returned == 10
    await install(scripts, incarnation, structs.replace(AHEAD, granted=12), seq=1)
    assert (await reported(scripts, incarnation))["2026-12"].returned == 12


DAY = lease_reply(period="2026-11-30", granted=50, first_minute=40_000, current=True)
MONTH = lease_reply(granted=100, current=True)


async def settled(scripts: Scripts, incarnation: StoreIncarnation, *leases: LeaseReply) -> dict[str, int]:
    """Return the answer to a batch that is reported now."""
    frozen = await freeze(scripts, incarnation)
    return await install(scripts, incarnation, *leases, seq=frozen.seq)


async def test_a_period_that_began_earlier_replaces_the_current_one(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, DAY)
    await take(scripts, incarnation, 20)
    assert await settled(scripts, incarnation, MONTH, structs.replace(DAY, current=False)) == {QUOTA: 100}
    assert (await take(scripts, incarnation, 100)).allowed
    assert not (await take(scripts, incarnation, 1)).allowed
    told = await reported(scripts, incarnation)
    assert {period: (each.consumed, each.returned) for period, each in told.items()} == {
        "2026-11": (100, 0),
        "2026-11-30": (20, 30),
    }


async def test_a_period_that_is_current_again_continues_with_its_totals(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, MONTH)
    await take(scripts, incarnation, 60)
    hold = await set_aside(scripts, incarnation, 10)
    await settled(scripts, incarnation, DAY)
    assert (await reported(scripts, incarnation))["2026-11"].returned == 30
    assert await settled(scripts, incarnation, structs.replace(MONTH, granted=115)) == {QUOTA: 15}
    await scripts.update_hold(incarnation.fingerprint, hold, "commit", 4)
    assert await available(scripts, incarnation) == 15 + 6
    month = (await reported(scripts, incarnation))["2026-11"]
    assert (month.consumed, month.returned, sum(line.units for line in month.lines)) == (64, 30, 4)
    assert (await scripts.lease_fields(incarnation, QUOTA))["held"] == "0"


async def test_a_forgotten_period_continues_with_the_reported_totals(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """A coordinator whose clock was ahead had ended the period."""
    await install(scripts, incarnation, MONTH)
    await take(scripts, incarnation, 60)
    over = structs.replace(MONTH, current=False, ends_in_ms=0, expires_in_ms=0)
    later = lease_reply(period="2027-01", granted=5, first_minute=100_000, current=True)
    await settled(scripts, incarnation, over, later)
    await settled(scripts, incarnation, over, later)
    assert "ended:2026-11" not in await scripts.lease_fields(incarnation, QUOTA)
    assert await settled(scripts, incarnation, structs.replace(MONTH, granted=110, consumed=60, returned=40)) == {
        QUOTA: 10
    }
    assert await available(scripts, incarnation) == 10
    told = await reported(scripts, incarnation)
    assert (told["2026-11"].consumed, told["2026-11"].returned, told["2027-01"].returned) == (60, 40, 5)


async def test_an_overtaken_reply_begins_no_lease(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, DAY)
    for _ in range(2):
        await settled(scripts, incarnation, DAY)
    assert await install(scripts, incarnation, MONTH, seq=1) == {QUOTA: 0}
    assert (await scripts.lease_fields(incarnation, QUOTA))["period"] == "2026-11-30"
    assert await install(scripts, incarnation, structs.replace(DAY, granted=51), seq=1) == {QUOTA: 1}, (
        "it may raise a total"
    )


async def test_a_waiting_lease_becomes_current_when_the_coordinator_reports_it(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, NOW, AHEAD)
    assert await settled(scripts, incarnation, structs.replace(BEGUN, current=True)) == {QUOTA: 10}


async def test_a_grant_of_an_unknown_period_is_returned(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, DAY)
    older = lease_reply(period="2026-10", granted=70, overage=5, consumed=40, returned=10, first_minute=-1)
    assert await settled(scripts, incarnation, older, DAY) == {QUOTA: 0}
    told = (await reported(scripts, incarnation))["2026-10"]
    assert (told.granted, told.overage, told.consumed, told.returned) == (70, 5, 40, 35)


async def test_a_used_lease_never_waits_with_totals_of_zero(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    """Its period had ended and was forgotten; then a reply from before its end arrived for the same batch."""
    await install(scripts, incarnation, MONTH)
    used = structs.replace(DAY, granted=50, consumed=20, returned=30, current=False)
    await settled(scripts, incarnation, MONTH, used)
    assert list(await reported(scripts, incarnation)) == ["2026-11"]
    await settled(scripts, incarnation, MONTH, structs.replace(used, granted=55))
    told = (await reported(scripts, incarnation))["2026-11-30"]
    assert (told.granted, told.consumed, told.returned) == (55, 20, 35), "what was granted since goes back"


async def test_a_lost_lease_is_not_installed_again(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """The ledger shows that it was used, or the store that it had usage to report."""
    lane = lane_of(QUOTA, incarnation.lanes)
    await install(scripts, incarnation, MONTH)
    await take(scripts, incarnation, 60)
    await connection.call("DEL", keys.lease(lane, incarnation.epoch, QUOTA))
    with pytest.raises(LeaseLost):
        await freeze(scripts, incarnation)
    with pytest.raises(LeaseLost):
        await install(scripts, incarnation, MONTH)
    await connection.call("DEL", keys.usage_lines(lane, incarnation.epoch, QUOTA), keys.dirty(lane, incarnation.epoch))
    for used in ({"consumed": 60}, {"returned": 1}):
        with pytest.raises(LeaseLost):
            await install(scripts, incarnation, structs.replace(MONTH, **used))
    assert await scripts.lease_fields(incarnation, QUOTA) == {}
    assert await install(scripts, incarnation, MONTH) == {QUOTA: 100}, "nothing of it was ever used"


async def test_the_rest_of_an_older_epoch_is_reported_even_if_a_lease_is_lost(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, MONTH)
    await take(scripts, incarnation, 60)
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    await connection.call("DEL", keys.lease(lane_of(QUOTA, incarnation.lanes), incarnation.epoch, QUOTA))
    assert await settled(scripts, incarnation, structs.replace(MONTH, consumed=60)) == {}


async def test_only_the_lease_of_the_named_period_is_returned(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, MONTH)
    assert await scripts.return_units(incarnation, QUOTA, 0, period="2026-11-30") == 0
    assert await scripts.return_units(incarnation, QUOTA, 0, period="2026-11", most=30) == 30
    assert await scripts.return_units(incarnation, QUOTA, 50, most=30) == 20


async def test_a_batch_never_holds_more_leases_than_a_message_may(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    quotas = [quota for i in range(1_200) if lane_of(quota := f"exports:tenant=t{i}", incarnation.lanes) == 0][:200]
    for quota in quotas:
        fields = {"period": "2026-12", "granted": "1", "overage": "0", "ended:2026-11": "1 0 0 1 0"}
        fields |= {"next:period": "2027-01", "next:granted": "1", "next:overage": "0"}
        pairs = [each for pair in fields.items() for each in pair]
        await connection.call("HSET", keys.lease(0, incarnation.epoch, quota), *pairs)
        await connection.call("ZADD", keys.dirty(0, incarnation.epoch), 0, quota)
    frozen = batch_of(await scripts.freeze(incarnation, 0, quotas))
    assert 90 < len(frozen.leases) <= 100 < MAX_LEASES_PER_EXCHANGE
    left = await connection.call("ZCARD", keys.dirty(0, incarnation.epoch))
    assert len(frozen.leases) == 3 * (200 - left)
