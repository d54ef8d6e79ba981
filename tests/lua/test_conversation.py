"""freeze.lua, settle.lua and give_back.lua on a real store make the region's half of numbered exchanges."""

import msgspec
import pytest
from msgspec import structs

from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply, FrozenBatch
from protocol.outcomes import ExchangeOutcome
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import MAX_LINES, Scripts
from regional_agent.store.types import AllowanceCharge, Fenced, FrozenBytes, StoreIncarnation
from tests.lua.script_helpers import DIMENSIONS, QUOTA, available, install, lease_reply, take

pytestmark = pytest.mark.anyio

MOST_BATCH_BYTES = 256 * 1024  # as in lua/freeze.lua


def batch_of(frozen: FrozenBytes) -> FrozenBatch:
    return msgspec.json.decode(frozen.bytes, type=FrozenBatch)


async def freeze(scripts: Scripts, incarnation: StoreIncarnation) -> FrozenBytes:
    return await scripts.freeze(incarnation, lane_of(QUOTA, incarnation.lanes), [QUOTA])


async def acknowledge(scripts: Scripts, incarnation: StoreIncarnation, seq: int) -> None:
    lane = lane_of(QUOTA, incarnation.lanes)
    reply = ExchangeReply(lane=lane, seq=seq, outcome=ExchangeOutcome.APPLIED)
    await scripts.settle(incarnation, lane, 0, reply)


async def dirty(scripts: Scripts, incarnation: StoreIncarnation) -> list[str]:
    return await scripts.dirty_quotas(incarnation, lane_of(QUOTA, incarnation.lanes), 10)


async def test_a_batch_holds_totals_and_lines_that_agree(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    for cost in (5, 7):
        await take(scripts, incarnation, cost)
    batch = batch_of(await freeze(scripts, incarnation))
    assert (batch.epoch, batch.lane, batch.seq) == (incarnation.epoch, lane_of(QUOTA, incarnation.lanes), 1)
    lease = batch.leases[0]
    assert (lease.quota, lease.period, lease.granted, lease.consumed) == (QUOTA, "2026-11", 100, 12)
    assert sum(line.units for line in lease.lines) == 12
    assert {tuple(line.dimensions.items()) for line in lease.lines} == {(("policy", "export"),)}


def line(number: int, period: str = "2026-11") -> bytes:
    return b'%s|%d|{"api_key":"%016x","policy":"export"}' % (period.encode(), 1000 + number % 7, number)


async def plant(connection: StoreConnection, incarnation: StoreIncarnation, lines: dict[bytes, int]) -> None:
    """Write lines of usage as checks would have, all of the current period."""
    lane = lane_of(QUOTA, incarnation.lanes)
    pairs: list[bytes | int] = [part for pair in lines.items() for part in pair]
    for at in range(0, len(pairs), 10_000):
        await connection.call("HSET", keys.usage_lines(lane, incarnation.epoch, QUOTA), *pairs[at : at + 10_000])
    await connection.call("HINCRBY", keys.lease(lane, incarnation.epoch, QUOTA), "consumed", sum(lines.values()))
    await connection.call("ZADD", keys.dirty(lane, incarnation.epoch), 0, QUOTA)


async def freeze_all(scripts: Scripts, incarnation: StoreIncarnation) -> list[FrozenBatch]:
    """Freeze and acknowledge one batch after the other until nothing is left."""
    batches = []
    while True:
        frozen = await freeze(scripts, incarnation)
        batches.append(batch_of(frozen))
        await acknowledge(scripts, incarnation, frozen.seq)
        if not frozen.has_more:
            return batches


def check_counts(batches: list[FrozenBatch]) -> dict[str, int]:
    """Compare the two counts as the coordinator does. Return what was reported of each period in the end."""
    told: dict[str, int] = {}
    for batch in batches:
        for lease in batch.leases:
            assert sum(line.units for line in lease.lines) == lease.consumed - told.get(lease.period, 0)
            told[lease.period] = lease.consumed
    return told


@pytest.mark.parametrize("name_length", [6, 60])
async def test_very_many_lines_are_reported_in_pieces(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection, name_length: int
) -> None:
    await install(scripts, incarnation, lease_reply(granted=1_000_000))
    name = b'"policy":"%s","route_class":"%s"}' % (b"p" * name_length, b"r" * name_length)
    planted = {line(number).replace(b'"policy":"export"}', name): 1 + number % 3 for number in range(20_000)}
    await plant(connection, incarnation, planted)
    batches = await freeze_all(scripts, incarnation)
    assert check_counts(batches) == {"2026-11": sum(planted.values())}
    lines = [line for batch in batches for line in batch.leases[0].lines]
    assert len({line.dimensions["api_key"] for line in lines}) == len(lines) == len(planted), "each exactly once"
    assert max(len(batch.leases[0].lines) for batch in batches) <= MAX_LINES
    assert await dirty(scripts, incarnation) == []


async def test_a_batch_is_bounded_in_bytes(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection
) -> None:
    await install(scripts, incarnation, lease_reply(granted=1_000_000))
    dimensions = b",".join(b'"dimension_%d":"%s"' % (number, b"x" * 256) for number in range(16))
    planted = {b"2026-11|%d|{%s}" % (1000 + number, dimensions): 1 for number in range(MAX_LINES)}
    await plant(connection, incarnation, planted)
    frozen = await freeze(scripts, incarnation)
    assert MOST_BATCH_BYTES / 2 < len(frozen.bytes) < MOST_BATCH_BYTES + 10_000
    await acknowledge(scripts, incarnation, 1)
    assert frozen.has_more
    assert check_counts([batch_of(frozen), *await freeze_all(scripts, incarnation)]) == {"2026-11": MAX_LINES}


async def test_pieces_agree_while_more_is_used_and_a_period_ends(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection
) -> None:
    scripts.max_lines = 10
    await install(scripts, incarnation, lease_reply(granted=1_000_000))
    await plant(connection, incarnation, {line(number): 2 for number in range(35)})
    batches: list[FrozenBatch] = []
    for round_ in range(12):
        frozen = await freeze(scripts, incarnation)
        if round_ == 1:
            await install(
                scripts, incarnation, lease_reply(period="2026-12", granted=1_000, first_minute=50_000), seq=round_
            )
        await take(scripts, incarnation, 5)
        assert (await freeze(scripts, incarnation)).bytes == frozen.bytes
        batches.append(batch_of(frozen))
        await acknowledge(scripts, incarnation, frozen.seq)
    told = check_counts([*batches, *await freeze_all(scripts, incarnation)])
    assert told == {"2026-11": 2 * 35 + 5, "2026-12": 11 * 5} or told == {"2026-11": 2 * 35 + 10, "2026-12": 10 * 5}


async def test_pieces_agree_after_batches_of_a_release_that_did_not_count_them(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection
) -> None:
    """The former release reported all consumed units, and left the counter of this one unchanged."""
    scripts.max_lines = 10
    lane = lane_of(QUOTA, incarnation.lanes)
    await install(scripts, incarnation, lease_reply(granted=1_000_000))
    await plant(connection, incarnation, {line(number): 2 for number in range(5)})
    await freeze(scripts, incarnation)
    await acknowledge(scripts, incarnation, 1)
    # The other release's batch: 7 units, and seq 2.
    await connection.call("HINCRBY", keys.lease(lane, incarnation.epoch, QUOTA), "consumed", 7)
    await connection.call("HSET", keys.lane(lane, incarnation.epoch), "seq", 2)
    await plant(connection, incarnation, {line(number): 2 for number in range(100, 135)})
    told = 5 * 2 + 7
    for batch in await freeze_all(scripts, incarnation):
        [lease] = batch.leases
        assert lease.consumed == told + sum(each.units for each in lease.lines)
        told = lease.consumed
    assert told == 5 * 2 + 7 + 35 * 2


async def test_units_without_a_line_are_reported_with_the_last_piece(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection
) -> None:
    """The two counts disagree, and the coordinator must see that."""
    scripts.max_lines = 10
    await install(scripts, incarnation, lease_reply(granted=1_000_000))
    await plant(connection, incarnation, {line(number): 2 for number in range(35)})
    await connection.call(
        "HINCRBY", keys.lease(lane_of(QUOTA, incarnation.lanes), incarnation.epoch, QUOTA), "consumed", 3
    )
    batches = await freeze_all(scripts, incarnation)
    check_counts(batches[:-1])
    assert batches[-1].leases[0].consumed == 35 * 2 + 3


async def test_a_batch_has_the_same_bytes_until_it_is_acknowledged(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 5)
    first = await freeze(scripts, incarnation)
    await take(scripts, incarnation, 7)
    assert (await freeze(scripts, incarnation)).bytes == first.bytes
    await acknowledge(scripts, incarnation, 1)
    second = batch_of(await freeze(scripts, incarnation))
    assert (second.seq, second.leases[0].consumed) == (2, 12)
    assert [line.units for line in second.leases[0].lines] == [7]


async def test_a_receipt_of_another_seq_drops_nothing(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 5)
    frozen = await freeze(scripts, incarnation)
    for seq in (2, 99):
        await acknowledge(scripts, incarnation, seq)
    assert (await freeze(scripts, incarnation)).bytes == frozen.bytes


async def test_what_is_used_while_a_batch_is_under_way_is_in_the_next(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 5)
    await freeze(scripts, incarnation)
    assert await dirty(scripts, incarnation) == []
    await take(scripts, incarnation, 5)
    assert await dirty(scripts, incarnation) == [QUOTA]


async def test_big_totals_are_written_digit_by_digit(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    granted = 2**53 - 1
    await install(scripts, incarnation, lease_reply(granted=granted))
    await take(scripts, incarnation, 2**52 + 1, mode="adjust")
    lease = batch_of(await freeze(scripts, incarnation)).leases[0]
    assert (lease.granted, lease.consumed, lease.lines[0].units) == (granted, 2**52 + 1, 2**52 + 1)


async def test_a_lease_that_no_reply_contained_is_not_in_the_batch(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    assert batch_of(await freeze(scripts, incarnation)).leases == []


async def test_replies_only_move_totals_forward(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    assert await install(scripts, incarnation, lease_reply(granted=100)) == {QUOTA: 100}
    assert await install(scripts, incarnation, lease_reply(granted=150, overage=3)) == {QUOTA: 50}
    assert await install(scripts, incarnation, lease_reply(granted=120, expires_in_ms=0)) == {QUOTA: 0}
    assert await available(scripts, incarnation) == 153
    assert (await take(scripts, incarnation)).allowed, "an older, shorter reply does not end the lease"


async def test_a_lease_expires_counted_from_before_the_request(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(expires_in_ms=60_000))
    expires_us = int((await scripts.lease_fields(incarnation, QUOTA))["expires"])
    assert expires_us == 60_000_000, "the clock stood at zero when the request was made"


async def test_returned_units_cannot_be_spent_before_they_are_reported(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 30)
    await freeze(scripts, incarnation)
    await acknowledge(scripts, incarnation, 1)
    assert await scripts.return_units(incarnation, QUOTA, 20) == 50
    assert await available(scripts, incarnation) == 20
    assert await dirty(scripts, incarnation) == [QUOTA]
    lease = batch_of(await freeze(scripts, incarnation)).leases[0]
    assert (lease.consumed, lease.returned, lease.lines) == (30, 50, [])


async def test_units_are_returned_once(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    assert [await scripts.return_units(incarnation, QUOTA, 0) for _ in range(2)] == [100, 0]
    assert await scripts.return_units(incarnation, "exports:tenant=nobody", 0) == 0


async def test_a_negative_balance_is_not_returned(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    await take(scripts, incarnation, 25, mode="adjust")
    await freeze(scripts, incarnation)
    assert await scripts.return_units(incarnation, QUOTA, 0) == 0
    assert (await scripts.lease_fields(incarnation, QUOTA)).get("returned", "0") == "0"
    assert await dirty(scripts, incarnation) == []


async def test_a_new_period_ends_the_old_one_and_both_are_reported(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    old, new = lease_reply(granted=100), lease_reply(period="2026-12", granted=10, first_minute=50_000)
    await install(scripts, incarnation, old)
    await take(scripts, incarnation, 30)
    await install(scripts, incarnation, old, new)
    assert await available(scripts, incarnation) == 10
    await take(scripts, incarnation, 4)
    leases = {lease.period: lease for lease in batch_of(await freeze(scripts, incarnation)).leases}
    assert (leases["2026-11"].consumed, leases["2026-11"].returned) == (30, 70)
    assert (leases["2026-12"].consumed, leases["2026-12"].returned) == (4, 0)
    assert {period: sum(line.units for line in lease.lines) for period, lease in leases.items()} == {
        "2026-11": 30,
        "2026-12": 4,
    }


async def test_an_old_period_is_forgotten_once_booked_and_ended_at_the_coordinator(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    old, new = lease_reply(granted=100), lease_reply(period="2026-12", granted=10, first_minute=50_000)
    await install(scripts, incarnation, old)
    await install(scripts, incarnation, new)
    await freeze(scripts, incarnation)
    await install(scripts, incarnation, old, new, seq=1)
    assert [lease.period for lease in batch_of(await freeze(scripts, incarnation)).leases] == ["2026-11", "2026-12"]
    await install(scripts, incarnation, structs.replace(old, ends_in_ms=0), new, seq=2)
    assert [lease.period for lease in batch_of(await freeze(scripts, incarnation)).leases] == ["2026-12"]


async def test_an_older_epochs_usage_is_acknowledged_and_its_grants_are_returned(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 30)
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    assert batch_of(await freeze(scripts, incarnation)).leases[0].consumed == 30
    await connection.call("HSET", keys.lease(lane_of(QUOTA, 4), 7, QUOTA), "held", 20)
    assert await scripts.held_units(incarnation) == 20
    assert await install(scripts, incarnation, lease_reply(granted=500), seq=1) == {}
    told = batch_of(await freeze(scripts, incarnation)).leases[0]
    assert (told.granted, told.returned) == (500, 450), "a hold is reserved until it has ended"
    assert await scripts.return_units(incarnation, QUOTA, 0) == 0
    await install(scripts, incarnation, lease_reply(granted=500), seq=2)
    assert await scripts.frozen_seq(incarnation, lane_of(QUOTA, incarnation.lanes)) is None
    assert await scripts.return_units(incarnation, QUOTA, 0) == 0
    assert await dirty(scripts, incarnation) == [QUOTA], "it is final, and told"
    with pytest.raises(Fenced):
        await take(scripts, incarnation)
    assert await scripts.frozen_seq(incarnation, lane_of(QUOTA, incarnation.lanes)) is None


async def test_a_grant_that_an_older_epoch_never_installed_is_returned_once(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """The store died with the reply, and its copy sends the batch again, in which nothing is said of the lease."""
    assert batch_of(await freeze(scripts, incarnation)).leases == []
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    granted, ahead = lease_reply(granted=40), lease_reply(period="2026-12", granted=7, first_minute=50_000)
    for _ in range(2):
        await install(scripts, incarnation, granted, ahead, seq=1)
    told = batch_of(await freeze(scripts, incarnation)).leases
    assert [(each.granted, each.consumed, each.returned) for each in told] == [(40, 0, 40), (7, 0, 7)]
    booked = [structs.replace(each, returned=each.granted) for each in (granted, ahead)]
    await install(scripts, incarnation, *booked, seq=2)
    assert await dirty(scripts, incarnation) == []
    await connection.call("DEL", keys.lease(lane_of(QUOTA, 4), 7, QUOTA))
    await install(scripts, incarnation, granted, ahead, seq=1)
    assert await dirty(scripts, incarnation) == [], "a copy of the reply comes too late"


async def test_a_grant_to_an_ended_period_of_an_older_epoch_is_returned(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    new = lease_reply(period="2026-12", granted=0, first_minute=50_000)
    await install(scripts, incarnation, lease_reply(granted=10))
    await take(scripts, incarnation, 4)
    await install(scripts, incarnation, new, seq=0)
    await freeze(scripts, incarnation)
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    await install(scripts, incarnation, lease_reply(granted=25, consumed=4, returned=6, ends_in_ms=0), new, seq=1)
    old = batch_of(await freeze(scripts, incarnation)).leases[0]
    assert (old.period, old.granted, old.consumed, old.returned) == ("2026-11", 25, 4, 21)


async def test_a_lost_lease_of_an_older_epoch_returns_nothing(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """Units of it may have been spent: the ledger shows that some were, or the store has usage of it."""
    lane, lease = lane_of(QUOTA, incarnation.lanes), keys.lease(lane_of(QUOTA, 4), 7, QUOTA)
    await install(scripts, incarnation, lease_reply(granted=100), seq=0)
    await freeze(scripts, incarnation)
    await take(scripts, incarnation, 60)
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    await connection.call("DEL", lease)
    await install(scripts, incarnation, lease_reply(granted=100), seq=1)
    assert await scripts.lease_fields(incarnation, QUOTA) == {}, "it has usage to report"
    await freeze(scripts, incarnation)
    await connection.call("DEL", keys.dirty(lane, incarnation.epoch))
    await install(scripts, incarnation, lease_reply(granted=100, consumed=60), seq=2)
    assert await scripts.lease_fields(incarnation, QUOTA) == {}


async def test_an_exchange_of_another_incarnation_is_refused(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    other = incarnation._replace(fingerprint="another:life")
    for attempt in (
        freeze(scripts, other),
        install(scripts, other, lease_reply()),
        scripts.return_units(other, QUOTA, 0),
    ):
        with pytest.raises(Fenced):
            await attempt


async def test_a_quota_with_very_many_lines_does_not_displace_the_others(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    lane = lane_of(QUOTA, incarnation.lanes)
    others = [f"exports:tenant=t{i}" for i in range(40)]
    neighbours = [quota for quota in others if lane_of(quota, incarnation.lanes) == lane][:3]
    await install(scripts, incarnation, lease_reply(granted=1_000_000))
    await plant(connection, incarnation, {line(number): 1 for number in range(2_000)})
    for quota in neighbours:
        await install(scripts, incarnation, lease_reply(quota))
        await scripts.check(incarnation, "enforce", [AllowanceCharge(quota, 1, 1000, DIMENSIONS)])
    batch = batch_of(await scripts.freeze(incarnation, lane, [QUOTA, *neighbours]))
    assert [len(lease.lines) for lease in batch.leases] == [MAX_LINES // 2, 1, 1, 1]
    assert await dirty(scripts, incarnation) == [QUOTA]
