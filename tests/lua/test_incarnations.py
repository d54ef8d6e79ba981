"""begin_incarnation.lua, adopt_epoch.lua and the connection's fingerprint work on a real store."""

import asyncio

import pytest

from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection, StoreError, StoreUnavailable
from regional_agent.store.opening import Server
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation

pytestmark = pytest.mark.anyio


async def test_the_fingerprint_is_read_before_anything_else(connection: StoreConnection) -> None:
    run_id, _, replid = (connection.fingerprint or "").partition(":")
    assert len(run_id) == len(replid) == 40
    assert connection.eviction_policy == "noeviction"


async def test_an_incarnation_keeps_its_nonce_however_often_it_begins(scripts: Scripts) -> None:
    first = await scripts.begin_incarnation("life-1", "a" * 16)
    again = await scripts.begin_incarnation("life-1", "b" * 16)
    assert (first.nonce, again.nonce, again.epoch) == ("a" * 16, "a" * 16, None)


async def test_another_incarnation_clears_the_epoch_and_has_another_nonce(scripts: Scripts) -> None:
    await scripts.begin_incarnation("life-1", "a" * 16)
    assert await scripts.adopt_epoch("life-1", "a" * 16, 7, 4)
    begun = await scripts.begin_incarnation("life-2", "b" * 16)
    assert (begun.nonce, begun.epoch) == ("b" * 16, None)
    assert await scripts.read_fence() == begun, "nothing is admitted until another epoch is adopted"


async def test_a_fence_of_a_newer_format_stays_as_it_is(scripts: Scripts, connection: StoreConnection) -> None:
    await scripts.begin_incarnation("life-1", "a" * 16)
    assert (await scripts.read_fence()).format == keys.FORMAT
    await connection.call("HSET", keys.FENCE, "format", keys.FORMAT + 1)
    before = await scripts.read_fence()
    assert await scripts.begin_incarnation("life-2", "b" * 16) == before
    assert await scripts.read_fence() == before


async def test_an_incarnation_with_data_loss_is_replaced_once(scripts: Scripts) -> None:
    await scripts.begin_incarnation("life-1", "a" * 16)
    await scripts.adopt_epoch("life-1", "a" * 16, 7, 4)
    begun = [await scripts.begin_incarnation("life-1", nonce * 16, "a" * 16) for nonce in "bc"]
    assert [fence.nonce for fence in begun] == ["b" * 16, "b" * 16]
    assert (await scripts.read_fence()).epoch is None
    assert not await scripts.adopt_epoch("life-1", "a" * 16, 7, 4), "the epoch that is over does not come back"


async def test_an_epoch_for_an_ended_incarnation_is_not_adopted(scripts: Scripts) -> None:
    await scripts.begin_incarnation("life-1", "a" * 16)
    await scripts.begin_incarnation("life-2", "b" * 16)
    assert not await scripts.adopt_epoch("life-1", "a" * 16, 7, 4)
    assert not await scripts.adopt_epoch("life-2", "a" * 16, 7, 4)
    assert (await scripts.read_fence()).epoch is None


async def test_older_epochs_stay_known_until_they_are_forgotten(scripts: Scripts) -> None:
    for number, incarnation in enumerate(("life-1", "life-2", "life-3"), start=7):
        await scripts.begin_incarnation(incarnation, f"{number:016x}")
        await scripts.adopt_epoch(incarnation, f"{number:016x}", number, 4)
    current = StoreIncarnation("life-3", 9, 4)
    assert [older.epoch for older in await scripts.older_epochs(current)] == [7, 8]
    await scripts.forget_epoch(StoreIncarnation("life-3", 7, 4))
    assert [older.epoch for older in await scripts.older_epochs(current)] == [8]


async def test_a_fence_survives_with_its_clock(connection: StoreConnection, scripts: Scripts) -> None:
    await connection.call("HSET", keys.FENCE, "mono", 12345)
    await scripts.begin_incarnation("life-1", "a" * 16)
    assert await scripts.read_mono_us() == 12345


async def test_a_wrong_command_is_a_store_error_and_affects_no_other_call(connection: StoreConnection) -> None:
    with pytest.raises(StoreError):
        await connection.call("HGET", "too", "many", "arguments")
    assert await connection.call("PING") == b"PONG"


@pytest.mark.extended
async def test_a_stalled_store_is_unavailable_and_its_late_reply_goes_to_no_other_call(store: str) -> None:
    connected = asyncio.Event()
    connection = StoreConnection(Server.at(store), timeout_ms=100, on_connected=connected.set)
    connection.keep()
    try:
        await asyncio.wait_for(connected.wait(), 60)
        with pytest.raises(StoreUnavailable):
            await connection.call(
                "EVAL", "local t = redis.call('TIME')[1] while redis.call('TIME')[1] - t < 2 do end", 0
            )
        for _ in range(100):
            try:
                assert await connection.call("ECHO", "mine") == b"mine"
                return
            except StoreUnavailable:
                continue
        pytest.fail("the store never came back")
    finally:
        await connection.close()


async def test_an_epoch_goes_on_in_another_incarnation_of_an_exempt_store_only(
    scripts: Scripts, connection: StoreConnection
) -> None:
    await scripts.begin_incarnation("life-1", "a" * 16)
    await scripts.adopt_epoch("life-1", "a" * 16, 7, 4)
    fence = await scripts.read_fence()
    assert not await scripts.rebind_epoch(fence, "life-2"), "it may have forgotten something"
    await connection.call("HSET", keys.FENCE, "exempt", 1)
    fence = await scripts.read_fence()
    for other in ({"fingerprint": "life-0"}, {"nonce": "b" * 16}, {"epoch": 6}):
        assert not await scripts.rebind_epoch(fence._replace(**other), "life-2"), other
    assert await scripts.read_fence() == fence, "nothing was changed"
    for _ in range(2):
        assert await scripts.rebind_epoch(fence, "life-2")
    assert await scripts.read_fence() == fence._replace(fingerprint="life-2")
