"""Many requests of one call are decided one after the other, as if each had come alone."""

import asyncio
import re
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.limits.rates import RateAlgorithm
from protocol.outcomes import DenialReason
from regional_agent.store.check_calls import MAX_REQUESTS, CheckBatcher
from regional_agent.store.connection import StoreConnection, StoreError, StoreUnavailable
from regional_agent.store.opening import Server
from regional_agent.store.scripts import Scripts
from regional_agent.store.sources import LUA
from regional_agent.store.types import (
    AllowanceCharge,
    Charge,
    Operation,
    OperationConflict,
    RateCharge,
    RequestRun,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)
from tests.lua.script_helpers import DIMENSIONS, QUOTA, RATE, available, breaker, install, lease_reply
from tests.waiting import until

pytestmark = pytest.mark.anyio

UNIT = AllowanceCharge(QUOTA, 1, 1000, DIMENSIONS)
TOKEN = RateCharge(RATE, 1, 1_000, 10)


def asked(*charges: Charge, mode: str = "enforce", operation: Operation | None = None) -> StoreRequest:
    return StoreRequest(mode, charges, operation)


async def test_requests_of_one_turn_are_one_call(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await scripts.check(incarnation, "peek", [TOKEN])  # the store knows the script now
    before = connection.calls
    batcher = CheckBatcher(scripts.checks, breaker())
    decisions = await asyncio.gather(*(batcher.decide(incarnation, asked(TOKEN)) for _ in range(MAX_REQUESTS)))
    assert connection.calls == before + 1
    assert [decision.allowed for decision in decisions] == [True] * 10 + [False] * (MAX_REQUESTS - 10)
    assert [decision.policies[0].remaining for decision in decisions[:10]] == list(range(9, -1, -1))


async def test_more_requests_than_a_call_holds_are_several_calls(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await scripts.check(incarnation, "peek", [TOKEN])
    before = connection.calls
    batcher = CheckBatcher(scripts.checks, breaker())
    decisions = await asyncio.gather(*(batcher.decide(incarnation, asked(TOKEN)) for _ in range(3 * MAX_REQUESTS - 1)))
    assert connection.calls == before + 3
    assert sum(decision.allowed for decision in decisions) == 10


async def test_runs_that_fill_a_call_continue_in_the_next(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await scripts.check(incarnation, "peek", [TOKEN])
    before, told, batcher = connection.calls, list[StoreDecision | Exception](), CheckBatcher(scripts.checks, breaker())
    left = 3 * MAX_REQUESTS - 1
    while left:
        run = RequestRun(asked(TOKEN), min(left, batcher.room), told.extend)
        batcher.submit(incarnation, run)
        left -= run.times
    await batcher.decide(incarnation, asked(TOKEN))  # in the last of them
    assert connection.calls == before + 3
    assert [isinstance(each, StoreDecision) and each.allowed for each in told] == [True] * 10 + [False] * (
        len(told) - 10
    )
    assert len(told) == 3 * MAX_REQUESTS - 1


@pytest.mark.parametrize(("is_node", "writes"), [(False, 3), (True, 1)], ids=["single", "node"])
async def test_calls_of_several_cells_to_one_node_are_written_together(
    store: str, monkeypatch: pytest.MonkeyPatch, is_node: bool, writes: int
) -> None:
    """A single store has one call in a turn, which is written at once. A node has one for each of its cells."""
    connection = StoreConnection(Server.at(store), timeout_ms=30_000, is_node=is_node)
    await connection.connect()
    written, replies = list[bytes](), list[object]()
    assert connection._protocol is not None
    transport: Any = connection._protocol._transport
    write = transport.write

    def counted(data: bytes) -> None:
        written.append(data)
        write(data)

    monkeypatch.setattr(transport, "write", counted)
    for _ in range(3):
        connection.send(("PING",), replies.append)
    await until(lambda: len(replies) == 3)
    assert (replies, len(written)) == ([b"PONG"] * 3, writes)
    await connection.close()


RUN: dict[str, Charge] = {
    **{algorithm: RateCharge("run", 2, 1_000, 9, algorithm, 60_000) for algorithm in RateAlgorithm},
    "allowance": AllowanceCharge("run", 2, 1000, DIMENSIONS),
}


@pytest.mark.parametrize("charge", RUN.values(), ids=RUN)
async def test_a_run_of_equal_requests_is_decided_as_if_each_came_alone(
    scripts: Scripts, incarnation: StoreIncarnation, charge: Charge
) -> None:
    """The units of all are written once, denied requests take nothing, and later requests see the result."""
    in_a_run, alone = (replace(charge, quota=f"{each}:tenant=acme") for each in ("run", "alone"))
    leases = [lease_reply(quota=each.quota, granted=9, unallocated=0) for each in (in_a_run, alone)]
    await install(scripts, incarnation, *leases)
    batcher, told, expected = CheckBatcher(scripts.checks, breaker()), list[Any](), list[Any]()
    batcher.submit(incarnation, RequestRun(asked(in_a_run), 6, told.extend))
    batcher.submit(incarnation, RequestRun(asked(replace(in_a_run, cost=1)), 1, told.extend))
    for _ in range(6):
        batcher.submit(incarnation, RequestRun(asked(alone), 1, expected.extend))
    expected.append(await batcher.decide(incarnation, asked(replace(alone, cost=1))))
    assert [each.allowed for each in told] == [True] * 4 + [False] * 2 + [True]
    assert told == expected
    assert (await scripts.check(incarnation, "peek", [in_a_run])).policies[0].remaining == 0


async def test_each_request_of_a_call_is_taken_whole_or_not_at_all(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=5))
    batcher = CheckBatcher(scripts.checks, breaker())
    requests = [asked(UNIT, replace(TOKEN, cost=4)), asked(replace(UNIT, cost=9), TOKEN), asked(UNIT, TOKEN)]
    both, dear, small = await asyncio.gather(*(batcher.decide(incarnation, each) for each in requests))
    assert (both.allowed, dear.allowed, small.allowed) == (True, False, True)
    assert [policy.allowed for policy in dear.policies] == [False, True]
    assert [policy.remaining for policy in small.policies] == [3 + 900, 5]
    assert await available(scripts, incarnation) == 3


async def test_an_operation_that_comes_twice_in_a_call_is_charged_once(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    once = Operation("digest-of-id", "digest-of-body", 60_000)
    batcher = CheckBatcher(scripts.checks, breaker())
    requests = [asked(UNIT, operation=once)] * 3 + [asked(UNIT, operation=once._replace(body="digest-of-more"))]
    *same, other = await asyncio.gather(
        *(batcher.decide(incarnation, each) for each in requests), return_exceptions=True
    )
    assert [isinstance(each, StoreDecision) and each.replayed for each in same] == [False, True, True]
    assert isinstance(other, OperationConflict)
    assert await available(scripts, incarnation) == 99


async def test_an_operation_is_replayed_even_if_its_policies_have_changed(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    once = Operation("digest-of-id", "digest-of-body", 60_000)
    await scripts.check(incarnation, "enforce", [UNIT], once)
    again = await scripts.check(incarnation, "enforce", [UNIT, TOKEN], once)
    assert (again.allowed, again.replayed, len(again.policies)) == (True, True, 2)
    assert await available(scripts, incarnation) == 99
    assert again.policies[1].remaining == 10


async def test_a_request_that_fails_fails_alone(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """A key of another type or a value that no script wrote fails its own request, and its neighbours are decided."""
    spoilt = [replace(TOKEN, quota=f"spoilt:{number}") for number in range(2)]
    await connection.call("LPUSH", spoilt[0].script_args(incarnation)[0][0], "1")
    await connection.call(
        "SET", spoilt[1].script_args(incarnation)[0][0], b"\x06short"
    )  # the number of a layout, and fewer fields than it has
    await install(scripts, incarnation, lease_reply(granted=5))
    once = Operation("digest-of-id", "digest-of-body", 60_000)
    requests = [asked(UNIT), asked(UNIT, spoilt[0], operation=once), asked(spoilt[1], UNIT), asked(UNIT, TOKEN)]
    batcher = CheckBatcher(scripts.checks, breaker())
    answers = await asyncio.gather(*(batcher.decide(incarnation, each) for each in requests), return_exceptions=True)
    first, wrong_type, too_short, last = answers
    assert isinstance(wrong_type, StoreError)
    assert str(wrong_type).startswith("WRONGTYPE")
    assert isinstance(too_short, StoreError)
    assert [isinstance(each, StoreDecision) and each.policies[0].available for each in (first, last)] == [4, 3]
    assert await available(scripts, incarnation) == 3, "nothing of what failed was taken"


async def test_an_error_of_the_store_fails_all_requests_of_the_call(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await connection.call("CONFIG", "SET", "maxmemory", "1")
    try:
        batcher = CheckBatcher(scripts.checks, breaker())
        answers = await asyncio.gather(
            *(batcher.decide(incarnation, asked(TOKEN)) for _ in range(3)), return_exceptions=True
        )
    finally:
        await connection.call("CONFIG", "SET", "maxmemory", "0")
    assert [str(each).partition(" ")[0] for each in answers] == ["OOM"] * 3


async def test_a_request_to_a_closed_store_fails(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    batcher = CheckBatcher(scripts.checks, breaker())
    waiting = [asyncio.create_task(batcher.decide(incarnation, asked(TOKEN))) for _ in range(3)]
    await asyncio.sleep(0)
    connection.reconnect()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreUnavailable}


def test_lua_and_python_number_the_reasons_alike() -> None:
    pairs = re.findall(r"^  (\w+) = (\d+),$", (LUA / "parts" / "reasons.lua").read_text(), re.MULTILINE)
    assert [(name, int(number)) for name, number in pairs] == [
        (reason.value, number) for number, reason in enumerate(DenialReason, start=1)
    ]
