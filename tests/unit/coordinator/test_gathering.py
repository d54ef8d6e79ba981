"""Who waits at the same time goes together, nobody waits long for company, and one call's trouble stays its own."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from coordinator.domain.exchange import Call, Incoming
from coordinator.gathering import MOST_CALLS, Gathering
from coordinator.operations.apply_exchange import Applied
from coordinator.outages import DatabaseUnavailable
from protocol.messages import FrozenBatch, FrozenLease, LeaseWant, LiveState

pytestmark = pytest.mark.anyio


def call(lane: int, epoch: int = 1, wants: Sequence[str] = ()) -> Call:
    live = LiveState(wants=[LeaseWant(quota=quota) for quota in wants])
    return Call("us-east", "f", [Incoming(FrozenBatch(epoch=epoch, lane=lane, seq=1), b"", live)])


class Ledger:
    """Applies when it is let: each call's answer is the call itself, so that it is seen who got which."""

    def __init__(self, *, fails: type[Exception] | None = None, bad_lane: int = -1) -> None:
        self.gathers: list[list[int]] = []
        self.gate = asyncio.Event()
        self.fails, self.bad_lane = fails, bad_lane

    async def apply(self, calls: Sequence[Call]) -> Sequence[Applied]:
        self.gathers.append([each.incoming[0].batch.lane for each in calls])
        await self.gate.wait()
        if self.fails and self.bad_lane in self.gathers[-1]:
            raise self.fails
        return cast("Sequence[Applied]", calls)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def waiting(gathering: Gathering, calls: Sequence[Call]) -> "list[asyncio.Task[Applied]]":
    tasks = [asyncio.create_task(gathering.apply(each)) for each in calls]
    await settled()
    return tasks


async def test_who_is_alone_goes_at_once_and_who_waits_goes_together() -> None:
    ledger = Ledger()
    gathering, calls = Gathering(ledger.apply, places=1), [call(lane) for lane in range(5)]
    tasks = await waiting(gathering, calls)
    assert ledger.gathers == [[0]]
    ledger.gate.set()
    assert list[object](await asyncio.gather(*tasks)) == calls
    assert ledger.gathers == [[0], [1, 2, 3, 4]]


async def answered_together(gathering: Gathering, ledger: Ledger) -> "asyncio.Task[Applied]":
    """0 and the other three took turns; it waits for its next one when they have been answered."""
    tasks = await waiting(gathering, [call(lane) for lane in range(4)])
    ledger.gate.set()
    await tasks[0]
    ledger.gate.clear()
    (again,) = await waiting(gathering, [call(0)])
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1, 2, 3]]
    return again


async def test_who_was_answered_together_is_waited_for() -> None:
    ledger = Ledger()
    gathering = Gathering(ledger.apply, places=1, patience=1e9)
    tasks = [await answered_together(gathering, ledger)]
    for lane in (1, 2):
        tasks += await waiting(gathering, [call(lane)])
        assert len(ledger.gathers) == 2
    tasks += await waiting(gathering, [call(3)])
    await asyncio.gather(*tasks)
    assert ledger.gathers[2:] == [[0, 1, 2, 3]]


async def test_who_does_not_come_again_is_not_waited_for_for_ever() -> None:
    ledger = Ledger()
    async with asyncio.timeout(10):
        await (await answered_together(Gathering(ledger.apply, places=1), ledger))
    assert ledger.gathers[2:] == [[0]]


async def test_after_one_alone_nobody_is_waited_for() -> None:
    ledger = Ledger()
    gathering = Gathering(ledger.apply, places=1, patience=1e9)
    ledger.gate.set()
    for _ in range(2):
        await gathering.apply(call(0))
    assert ledger.gathers == [[0], [0]]


async def test_a_lane_is_once_in_a_gather_and_keeps_its_order() -> None:
    ledger = Ledger()
    gathering = Gathering(ledger.apply, places=1)
    tasks = await waiting(gathering, [call(0), call(1), call(1), call(2), call(1), call(1, epoch=2)])
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1, 2, 1], [1], [1]]


async def test_who_wants_what_another_transaction_is_at_waits_here_and_goes_with_all_that_do() -> None:
    ledger = Ledger()
    gathering = Gathering(ledger.apply)
    tasks = await waiting(gathering, [*(call(lane, wants=["hot"]) for lane in range(4)), call(4, wants=["cold"])])
    assert ledger.gathers == [[0], [4]]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [4], [1, 2, 3]]


async def test_who_reports_what_another_transaction_is_at_waits_likewise() -> None:
    ledger = Ledger()
    frozen = FrozenLease(quota="hot", period="2026-11", granted=0, overage=0, consumed=0, returned=0)
    batch = FrozenBatch(epoch=1, lane=1, seq=1, leases=[frozen])
    reporting = Call("us-east", "f", [Incoming(batch, b"", LiveState())])
    tasks = await waiting(Gathering(ledger.apply), [call(0, wants=["hot"]), reporting])
    assert ledger.gathers == [[0]]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1]]


async def test_who_waits_for_one_of_its_quotas_is_not_overtaken_at_the_other() -> None:
    ledger = Ledger()
    gathering, both = Gathering(ledger.apply), call(1, wants=["hot", "cold"])
    tasks = await waiting(gathering, [call(0, wants=["hot"]), both, call(2, wants=["cold"])])
    assert ledger.gathers == [[0]]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1, 2]]


async def test_a_gather_is_bounded() -> None:
    ledger = Ledger()
    gathering = Gathering(ledger.apply, places=1)
    tasks = await waiting(gathering, [call(0, epoch) for epoch in range(1, MOST_CALLS + 12)])
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert [len(each) for each in ledger.gathers] == [1, MOST_CALLS, 10]


async def test_the_trouble_of_one_is_not_the_trouble_of_others() -> None:
    ledger = Ledger(fails=ValueError, bad_lane=2)
    gathering, calls = Gathering(ledger.apply, places=1), [call(lane) for lane in range(4)]
    tasks = await waiting(gathering, calls)
    ledger.gate.set()
    answers: list[object] = [*await asyncio.gather(*tasks, return_exceptions=True)]
    assert [answers[0], answers[1], answers[3]] == [calls[0], calls[1], calls[3]]
    assert isinstance(answers[2], ValueError)
    assert ledger.gathers == [[0], [1, 2, 3], [1], [2], [3]]


async def test_an_outage_is_everybodys_and_nothing_is_tried_again() -> None:
    ledger = Ledger(fails=DatabaseUnavailable, bad_lane=2)
    gathering = Gathering(ledger.apply, places=1)
    tasks = await waiting(gathering, [call(lane) for lane in range(4)])
    ledger.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, DatabaseUnavailable) for each in answers] == [False, True, True, True]
    assert ledger.gathers == [[0], [1, 2, 3]]


async def test_who_gave_up_before_its_turn_is_left_out() -> None:
    ledger = Ledger()
    gathering = Gathering(ledger.apply, places=1)
    tasks = await waiting(gathering, [call(0), call(1), call(2)])
    tasks[1].cancel()
    ledger.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ledger.gathers == [[0], [2]]
