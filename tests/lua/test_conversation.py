"""freeze.lua, settle.lua and give_back.lua on a real store: the region's half of the numbered conversation."""

import msgspec
import pytest
from msgspec import structs

from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply, FrozenBatch
from protocol.outcomes import ExchangeOutcome
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Fenced, Frozen, Life, Scripts
from tests.lua.saying import QUOTA, available, install, lease_reply, take

pytestmark = pytest.mark.anyio


def batch_of(frozen: Frozen) -> FrozenBatch:
    return msgspec.json.decode(frozen.bytes, type=FrozenBatch)


async def freeze(scripts: Scripts, life: Life) -> Frozen:
    return await scripts.freeze(life, lane_of(QUOTA, life.lanes), [QUOTA])


async def acknowledge(scripts: Scripts, life: Life, seq: int) -> None:
    lane = lane_of(QUOTA, life.lanes)
    reply = ExchangeReply(lane=lane, seq=seq, outcome=ExchangeOutcome.APPLIED)
    await scripts.settle(life, lane, 0, reply)


async def dirty(scripts: Scripts, life: Life) -> list[str]:
    return await scripts.dirty(life, lane_of(QUOTA, life.lanes), 10)


async def test_a_batch_holds_totals_and_lines_that_agree(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=100))
    for cost in (5, 7):
        await take(scripts, life, cost)
    batch = batch_of(await freeze(scripts, life))
    assert (batch.epoch, batch.lane, batch.seq) == (life.epoch, lane_of(QUOTA, life.lanes), 1)
    lease = batch.leases[0]
    assert (lease.quota, lease.period, lease.granted, lease.consumed) == (QUOTA, "2026-11", 100, 12)
    assert sum(line.units for line in lease.lines) == 12
    assert {tuple(line.dimensions.items()) for line in lease.lines} == {(("policy", "export"),)}


async def test_no_batch_has_more_lines_than_a_message_carries(
    scripts: Scripts, life: Life, connection: StoreConnection
) -> None:
    """Of keys there may be any number: beyond what can be told, they are not told apart."""
    await install(scripts, life, lease_reply(granted=100_000))
    await take(scripts, life, 50_001)
    lines = keys.lines(lane_of(QUOTA, life.lanes), life.epoch, QUOTA)
    await connection.call(b"DEL", lines)

    def field(number: int) -> bytes:
        return b'2026-11|%d|{"api_key":"%016x","policy":"export"}' % (1000 + number % 2, number)

    as_many_as_can_be = [part for number in range(50_000) for part in (field(number), b"1")]
    await connection.call(b"HSET", lines, *as_many_as_can_be)
    (lease,) = batch_of(await freeze(scripts, life)).leases
    assert (
        len({line.dimensions["api_key"] for line in lease.lines}) == sum(line.units for line in lease.lines) == 50_000
    )
    await acknowledge(scripts, life, 1)
    await connection.call(b"HSET", lines, *as_many_as_can_be, field(50_000), b"1")
    (lease,) = batch_of(await freeze(scripts, life)).leases
    assert [(line.minute, line.dimensions, line.units) for line in lease.lines] == [
        (1000, {"policy": "export"}, 25_001),
        (1001, {"policy": "export"}, 25_000),
    ]


async def test_the_same_bytes_until_they_are_acknowledged(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=100))
    await take(scripts, life, 5)
    first = await freeze(scripts, life)
    await take(scripts, life, 7)
    assert (await freeze(scripts, life)).bytes == first.bytes
    await acknowledge(scripts, life, 1)
    second = batch_of(await freeze(scripts, life))
    assert (second.seq, second.leases[0].consumed) == (2, 12)
    assert [line.units for line in second.leases[0].lines] == [7]


async def test_a_receipt_of_another_seq_drops_nothing(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=100))
    await take(scripts, life, 5)
    frozen = await freeze(scripts, life)
    for seq in (2, 99):
        await acknowledge(scripts, life, seq)
    assert (await freeze(scripts, life)).bytes == frozen.bytes


async def test_what_is_used_while_a_batch_is_under_way_is_in_the_next(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=100))
    await take(scripts, life, 5)
    await freeze(scripts, life)
    assert await dirty(scripts, life) == []
    await take(scripts, life, 5)
    assert await dirty(scripts, life) == [QUOTA]


async def test_big_totals_are_written_digit_by_digit(scripts: Scripts, life: Life) -> None:
    granted = 2**53 - 1
    await install(scripts, life, lease_reply(granted=granted))
    await take(scripts, life, 2**52 + 1, mode="adjust")
    lease = batch_of(await freeze(scripts, life)).leases[0]
    assert (lease.granted, lease.consumed, lease.lines[0].units) == (granted, 2**52 + 1, 2**52 + 1)


async def test_a_lease_that_no_reply_named_is_not_in_the_batch(scripts: Scripts, life: Life) -> None:
    assert batch_of(await freeze(scripts, life)).leases == []


async def test_replies_only_move_totals_forward(scripts: Scripts, life: Life) -> None:
    assert await install(scripts, life, lease_reply(granted=100)) == {QUOTA: 100}
    assert await install(scripts, life, lease_reply(granted=150, overage=3)) == {QUOTA: 50}
    assert await install(scripts, life, lease_reply(granted=120, expires_in_ms=0)) == {QUOTA: 0}
    assert await available(scripts, life) == 153
    assert (await take(scripts, life)).allowed, "an older, shorter reply does not end the lease"


async def test_a_lease_expires_counted_from_before_the_request(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(expires_in_ms=60_000))
    expires_us = int((await scripts.lease_fields(life, QUOTA))["expires"])
    assert expires_us == 60_000_000, "the clock stood at zero when the request was made"


async def test_giving_back_is_out_of_reach_before_it_is_told(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=100))
    await take(scripts, life, 30)
    await freeze(scripts, life)
    await acknowledge(scripts, life, 1)
    assert await scripts.give_back(life, QUOTA, 20) == 50
    assert await available(scripts, life) == 20
    assert await dirty(scripts, life) == [QUOTA]
    lease = batch_of(await freeze(scripts, life)).leases[0]
    assert (lease.consumed, lease.returned, lease.lines) == (30, 50, [])


async def test_there_is_nothing_to_give_back_twice(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=100))
    assert [await scripts.give_back(life, QUOTA, 0) for _ in range(2)] == [100, 0]
    assert await scripts.give_back(life, "exports:tenant=nobody", 0) == 0


async def test_what_is_below_zero_is_not_given_back(scripts: Scripts, life: Life) -> None:
    await install(scripts, life, lease_reply(granted=10))
    await take(scripts, life, 25, mode="adjust")
    await freeze(scripts, life)
    assert await scripts.give_back(life, QUOTA, 0) == 0
    assert (await scripts.lease_fields(life, QUOTA)).get("returned", "0") == "0"
    assert await dirty(scripts, life) == []


async def test_a_new_period_ends_the_old_one_and_both_are_reported(scripts: Scripts, life: Life) -> None:
    old, new = lease_reply(granted=100), lease_reply(period="2026-12", granted=10, first_minute=50_000)
    await install(scripts, life, old)
    await take(scripts, life, 30)
    await install(scripts, life, old, new)
    assert await available(scripts, life) == 10
    await take(scripts, life, 4)
    leases = {lease.period: lease for lease in batch_of(await freeze(scripts, life)).leases}
    assert (leases["2026-11"].consumed, leases["2026-11"].returned) == (30, 70)
    assert (leases["2026-12"].consumed, leases["2026-12"].returned) == (4, 0)
    assert {period: sum(line.units for line in lease.lines) for period, lease in leases.items()} == {
        "2026-11": 30,
        "2026-12": 4,
    }


async def test_an_old_period_is_forgotten_once_it_is_booked_and_has_ended_for_the_coordinator_too(
    scripts: Scripts, life: Life
) -> None:
    old, new = lease_reply(granted=100), lease_reply(period="2026-12", granted=10, first_minute=50_000)
    await install(scripts, life, old)
    await install(scripts, life, new)
    await freeze(scripts, life)
    await install(scripts, life, old, new, seq=1)
    assert [lease.period for lease in batch_of(await freeze(scripts, life)).leases] == ["2026-11", "2026-12"]
    await install(scripts, life, structs.replace(old, ends_in_ms=0), new, seq=2)
    assert [lease.period for lease in batch_of(await freeze(scripts, life)).leases] == ["2026-12"]


async def test_evidence_of_an_older_epoch_is_frozen_and_acknowledged_and_all_that_it_was_given_is_given_back(
    connection: StoreConnection, scripts: Scripts, life: Life
) -> None:
    await install(scripts, life, lease_reply(granted=100))
    await take(scripts, life, 30)
    await connection.call("HSET", keys.FENCE, "epoch", 8)
    assert batch_of(await freeze(scripts, life)).leases[0].consumed == 30
    assert await install(scripts, life, lease_reply(granted=500), seq=1) == {}
    assert (await scripts.lease_fields(life, QUOTA))["granted"] == "500"
    await connection.call("HSET", keys.lease(lane_of(QUOTA, 4), 7, QUOTA), "held", 20)
    assert await scripts.held(life) == 20
    assert await scripts.give_back(life, QUOTA, 0) == 450, "a hold is reserved until it has ended"
    assert batch_of(await freeze(scripts, life)).leases[0].returned == 450
    await install(scripts, life, lease_reply(granted=500), seq=2)
    assert await scripts.frozen_seq(life, lane_of(QUOTA, life.lanes)) is None
    assert await scripts.give_back(life, QUOTA, 0) == 0
    assert await dirty(scripts, life) == [QUOTA], "it is final, and told"
    with pytest.raises(Fenced):
        await take(scripts, life)
    assert await scripts.frozen_seq(life, lane_of(QUOTA, life.lanes)) is None


async def test_the_conversation_of_another_life_is_refused(scripts: Scripts, life: Life) -> None:
    other = life._replace(fingerprint="another:life")
    for attempt in (freeze(scripts, other), install(scripts, other, lease_reply()), scripts.give_back(other, QUOTA, 0)):
        with pytest.raises(Fenced):
            await attempt


async def test_a_batch_of_enough_lines_leaves_the_rest_for_the_next(
    connection: StoreConnection, scripts: Scripts, life: Life
) -> None:
    lane = lane_of(QUOTA, life.lanes)
    others = [f"exports:tenant=t{i}" for i in range(40)]
    neighbours = [quota for quota in others if lane_of(quota, life.lanes) == lane][:2]
    for quota in (QUOTA, *neighbours):
        await install(scripts, life, lease_reply(quota))
        line_key = keys.lines(lane, life.epoch, quota)
        for minute in range(600):
            await connection.call("HSET", line_key, f'2026-11|{minute}|{{"policy":"export"}}', 1)
        await connection.call("HSET", keys.lease(lane, life.epoch, quota), "consumed", 600)
        await connection.call("SADD", keys.dirty(lane, life.epoch), quota)
    frozen = await scripts.freeze(life, lane, [QUOTA, *neighbours])
    assert len(batch_of(frozen).leases) == 2
    assert await dirty(scripts, life) == [neighbours[1]]
