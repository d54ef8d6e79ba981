"""When usage is due for its report, on a real store: soon after a quiet time, then after pauses that double."""

import pytest

from protocol.identifiers import lane_of, quota_key
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation
from tests.lua.script_helpers import QUOTA, install, lease_reply, take
from tests.lua.test_conversation import acknowledge, freeze

pytestmark = pytest.mark.anyio

SECOND_US = 1_000_000


async def pass_time(connection: StoreConnection, seconds: float) -> None:
    """Move the store's clock forward, as its scripts keep it."""
    await connection.call("HINCRBY", keys.FENCE, "mono", round(seconds * SECOND_US))


async def due(scripts: Scripts, incarnation: StoreIncarnation) -> list[str]:
    return list((await scripts.due_quotas(incarnation, lane_of(QUOTA, incarnation.lanes), 10)).quotas)


async def report(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    frozen = await freeze(scripts, incarnation)
    await acknowledge(scripts, incarnation, frozen.seq)


async def pause_s(scripts: Scripts, connection: StoreConnection, incarnation: StoreIncarnation) -> float:
    """Use a unit, and return how many seconds after the last report the next one is due."""
    await take(scripts, incarnation, 1)
    lane = lane_of(QUOTA, incarnation.lanes)
    moment = await connection.call("ZSCORE", keys.dirty(lane, incarnation.epoch), QUOTA)
    reported, pause = await connection.call(
        "HMGET", keys.lease(lane, incarnation.epoch, QUOTA), "reported", "report_pause"
    )
    assert int(moment) >= int(reported or 0) + int(pause)
    return int(pause) / SECOND_US


async def test_usage_is_due_at_once_after_a_quiet_time_and_later_while_it_goes_on(
    scripts: Scripts, connection: StoreConnection, incarnation: StoreIncarnation
) -> None:
    within_ms = 1_000_000
    await install(scripts, incarnation, lease_reply(report_within_ms=within_ms, expires_in_ms=10**9, ends_in_ms=10**9))
    await pass_time(connection, within_ms / 1000)
    assert await pause_s(scripts, connection, incarnation) == 0
    found = []
    for _ in range(12):
        await report(scripts, incarnation)
        pause = await pause_s(scripts, connection, incarnation)
        found.append(pause)
        await pass_time(connection, pause + 1)
        assert await due(scripts, incarnation) == [QUOTA]
    doubled = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000]
    assert found == doubled
    await report(scripts, incarnation)
    await pass_time(connection, within_ms / 1000)
    assert await pause_s(scripts, connection, incarnation) == 0, "it was quiet for as long as a report may wait"


async def test_further_usage_neither_delays_a_report_nor_hastens_it(
    scripts: Scripts, connection: StoreConnection, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(report_within_ms=3_600_000, expires_in_ms=10**9))
    lane = lane_of(QUOTA, incarnation.lanes)
    moments = set()
    for _ in range(5):
        await take(scripts, incarnation, 1)
        moments.add(await connection.call("ZSCORE", keys.dirty(lane, incarnation.epoch), QUOTA))
        await pass_time(connection, 600)
    assert len(moments) == 1


async def test_a_threshold_makes_a_report_due_at_once(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(report_within_ms=3_600_000, report_at=10, expires_in_ms=10**9))
    await take(scripts, incarnation, 1)
    await report(scripts, incarnation)
    await take(scripts, incarnation, 8)
    assert await due(scripts, incarnation) == [], "nine of ten"
    await take(scripts, incarnation, 3)
    assert await due(scripts, incarnation) == [QUOTA]


async def test_a_recall_makes_a_report_due_at_once_though_nothing_is_returned(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(report_within_ms=3_600_000, expires_in_ms=10**9))
    for _ in range(2):
        await take(scripts, incarnation, 1)
        await report(scripts, incarnation)
    await take(scripts, incarnation, 1)
    assert await due(scripts, incarnation) == []
    assert await scripts.return_units(incarnation, QUOTA, keep=100) == 0
    assert await due(scripts, incarnation) == [QUOTA]


async def test_reports_that_are_due_soon_are_taken_along(
    scripts: Scripts, connection: StoreConnection, incarnation: StoreIncarnation
) -> None:
    lane = lane_of(QUOTA, incarnation.lanes)
    names = (quota_key("exports", [("tenant", f"t{number}")]) for number in range(100))
    others = [name for name in names if lane_of(name, incarnation.lanes) == lane][:2]
    mono_us = await scripts.read_mono_us()
    for name, in_s in zip([QUOTA, *others], (500, 1_000, 5_000), strict=True):
        await connection.call("ZADD", keys.dirty(lane, incarnation.epoch), mono_us + in_s * SECOND_US, name)

    async def found(*, is_sending: bool = False) -> set[str]:
        due = await scripts.due_quotas(incarnation, lane, 10, is_sending=is_sending, taken_along_ms=900_000)
        return set(due.quotas)

    assert await found() == set(), "the first is due in some minutes"
    assert await found(is_sending=True) == {QUOTA}
    await pass_time(connection, 500)
    assert await found() == {QUOTA, others[0]}


async def test_the_oldest_usage_is_old_until_its_receipt_arrives(
    scripts: Scripts, connection: StoreConnection, incarnation: StoreIncarnation
) -> None:
    async def oldest_s() -> int:
        return (await scripts.due_quotas(incarnation, lane_of(QUOTA, incarnation.lanes), 10)).oldest_ms // 1000

    await install(scripts, incarnation, lease_reply(report_within_ms=3_600_000, expires_in_ms=10**9))
    assert await oldest_s() == 0
    await take(scripts, incarnation, 1)
    await pass_time(connection, 1_000)
    assert 1_000 <= await oldest_s() < 2_000
    frozen = await freeze(scripts, incarnation)
    await pass_time(connection, 1_000)
    assert 2_000 <= await oldest_s() < 3_000, "it is frozen, and not booked"
    await acknowledge(scripts, incarnation, frozen.seq)
    assert await oldest_s() == 0
