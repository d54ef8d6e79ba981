"""Exchanges that wait at the same time share a transaction, none waits long for others, and one failure affects one
exchange.
"""

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.exchange.batcher import MOST_CALLS, ExchangeBatcher
from coordinator.exchange.rules.submissions import ExchangeCall, Submission
from coordinator.exchange.transaction import Applied
from coordinator.outages import DatabaseUnavailable, TransactionFailed
from protocol.messages import (
    ExchangeReply,
    ExchangeResponse,
    FrozenBatch,
    FrozenLease,
    LeaseDemand,
    Versions,
)
from protocol.outcomes import ExchangeOutcome
from tests.waiting import BOUND_S

pytestmark = pytest.mark.anyio


def call(lane: int, epoch: int = 1, demands: Sequence[str] = ()) -> ExchangeCall:
    leases = [LeaseDemand(quota=quota) for quota in demands]
    return ExchangeCall("us-east", "f", [Submission(FrozenBatch(epoch=epoch, lane=lane, seq=1), b"", leases)])


VERSIONS = Versions(policies=3, blocks=4)


class Ledger:
    """A fake transaction that completes when the test releases it.

    Each reply names its lane, to show which exchange got it.
    """

    def __init__(self, *, fails: type[Exception] | None = None, bad_lane: int = -1) -> None:
        self.gathers: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gates: dict[tuple[int, ...], asyncio.Event] = {}  # lanes of exchanges that were applied alone
        self.fails, self.bad_lane = fails, bad_lane
        self.fails_alone = fails

    async def apply(self, calls: Sequence[ExchangeCall]) -> Sequence[Applied]:
        lanes = [incoming.batch.lane for each in calls for incoming in each.submissions]
        self.gathers.append(lanes)
        await self.gate.wait()
        if gate := self.gates.get(tuple(lanes)):
            await gate.wait()
        fails = self.fails if len(lanes) > 1 else self.fails and self.fails_alone
        if fails and self.bad_lane in lanes:
            raise fails
        return [applied(each) for each in calls]


def applied(call: ExchangeCall) -> Applied:
    replies = [
        ExchangeReply(outcome=ExchangeOutcome.APPLIED, lane=each.batch.lane, seq=each.batch.seq)
        for each in call.submissions
    ]
    for place, reply in call.refused:
        replies.insert(place, reply)
    return Applied(ExchangeResponse(replies=replies, versions=VERSIONS), (), 0, (), ())


def outcomes(answer: Applied) -> list[str]:
    return [reply.outcome.value for reply in answer.response.replies]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def waiting(batcher: ExchangeBatcher, calls: Sequence[ExchangeCall]) -> "list[asyncio.Task[Applied]]":
    tasks = [asyncio.create_task(batcher.apply(each)) for each in calls]
    await settled()
    return tasks


async def test_a_lone_exchange_goes_at_once_and_waiting_ones_go_together() -> None:
    ledger = Ledger()
    batcher, calls = ExchangeBatcher(ledger.apply, slots=1), [call(lane) for lane in range(5)]
    tasks = await waiting(batcher, calls)
    assert ledger.gathers == [[0]]
    ledger.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [answer.response.replies[0].lane for answer in answers] == list(range(5))
    assert ledger.gathers == [[0], [1, 2, 3, 4]]


async def answered_together(batcher: ExchangeBatcher, ledger: Ledger) -> "asyncio.Task[Applied]":
    """Lane 0 and the other three took turns; lane 0 waits for its next exchange after they have been answered."""
    tasks = await waiting(batcher, [call(lane) for lane in range(4)])
    ledger.gate.set()
    await tasks[0]
    ledger.gate.clear()
    (again,) = await waiting(batcher, [call(0)])
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1, 2, 3]]
    return again


async def test_lanes_that_were_answered_together_are_waited_for() -> None:
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply, slots=1, patience=1e9)
    tasks = [await answered_together(batcher, ledger)]
    for lane in (1, 2):
        tasks += await waiting(batcher, [call(lane)])
        assert len(ledger.gathers) == 2
    tasks += await waiting(batcher, [call(3)])
    await asyncio.gather(*tasks)
    assert ledger.gathers[2:] == [[0, 1, 2, 3]]


async def test_a_lane_that_stays_away_is_waited_for_only_briefly() -> None:
    ledger = Ledger()
    async with asyncio.timeout(10):
        await (await answered_together(ExchangeBatcher(ledger.apply, slots=1), ledger))
    assert ledger.gathers[2:] == [[0]]


async def test_after_a_lone_exchange_there_is_no_wait() -> None:
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply, slots=1, patience=1e9)
    ledger.gate.set()
    for _ in range(2):
        await batcher.apply(call(0))
    assert ledger.gathers == [[0], [0]]


async def test_a_lane_is_in_a_batch_once_and_keeps_its_order() -> None:
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    tasks = await waiting(batcher, [call(0), call(1), call(1), call(2), call(1), call(1, epoch=2)])
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1, 2, 1], [1], [1]]


async def test_wants_of_quotas_in_another_transaction_wait_and_go_together() -> None:
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply)
    tasks = await waiting(batcher, [*(call(lane, demands=["hot"]) for lane in range(4)), call(4, demands=["cold"])])
    assert ledger.gathers == [[0], [4]]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [4], [1, 2, 3]]


async def test_exchanges_that_report_a_locked_quota_wait_too() -> None:
    ledger = Ledger()
    frozen = FrozenLease(quota="hot", period="2026-11", granted=0, overage=0, consumed=0, returned=0)
    batch = FrozenBatch(epoch=1, lane=1, seq=1, leases=[frozen])
    reporting = ExchangeCall("us-east", "f", [Submission(batch, b"", [])])
    tasks = await waiting(ExchangeBatcher(ledger.apply), [call(0, demands=["hot"]), reporting])
    assert ledger.gathers == [[0]]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1]]


async def test_an_exchange_that_waits_for_one_quota_keeps_its_place_at_the_other() -> None:
    ledger = Ledger()
    batcher, both = ExchangeBatcher(ledger.apply), call(1, demands=["hot", "cold"])
    tasks = await waiting(batcher, [call(0, demands=["hot"]), both, call(2, demands=["cold"])])
    assert ledger.gathers == [[0]]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert ledger.gathers == [[0], [1, 2]]


async def test_the_size_of_a_batch_is_bounded() -> None:
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    tasks = await waiting(batcher, [call(0, epoch) for epoch in range(1, MOST_CALLS + 12)])
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert [len(each) for each in ledger.gathers] == [1, MOST_CALLS, 10]


@pytest.mark.parametrize("error", [ValueError, TransactionFailed])
async def test_a_failing_exchange_is_refused_and_the_rest_of_its_batch_is_booked(error: type[Exception]) -> None:
    ledger = Ledger(fails=error, bad_lane=2)
    batcher, calls = ExchangeBatcher(ledger.apply, slots=1), [call(lane) for lane in range(4)]
    tasks = await waiting(batcher, calls)
    ledger.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [outcomes(answer) for answer in answers] == [["applied"], ["applied"], ["refused"], ["applied"]]
    fault = answers[2].response.replies[0].fault
    assert fault is not None
    assert fault.rule == ("contention" if error is TransactionFailed else "internal")
    assert fault.again_in_ms is not None
    assert ledger.gathers[:2] == [[0], [1, 2, 3]]
    assert sorted(ledger.gathers[2:]) == [[], [1], [2], [3]]


async def test_only_the_failing_exchange_of_a_single_call_is_refused() -> None:
    ledger = Ledger(fails=ValueError, bad_lane=2)
    ledger.gate.set()
    exchanges = [call(lane).submissions[0] for lane in range(1, 4)]
    malformed = ExchangeReply(outcome=ExchangeOutcome.REFUSED)
    several = ExchangeCall("us-east", "f", exchanges, [(1, malformed)])
    answer = await ExchangeBatcher(ledger.apply).apply(several)
    assert [reply.lane for reply in answer.response.replies] == [1, None, 2, 3]
    assert outcomes(answer) == ["applied", "refused", "refused", "applied"]
    assert answer.response.versions == VERSIONS


async def test_an_exchange_that_waits_for_a_lock_does_not_delay_the_others() -> None:
    """The next batch runs while the exchanges of the failed one run alone."""
    ledger = Ledger(fails=TransactionFailed, bad_lane=2)
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    tasks = await waiting(batcher, [call(lane) for lane in range(4)])
    stuck = ledger.gates[(2,)] = asyncio.Event()
    ledger.gate.set()
    assert outcomes(await tasks[3]) == outcomes(await tasks[1]) == ["applied"]
    assert outcomes(await batcher.apply(call(5))) == ["applied"]
    assert not tasks[2].done()
    stuck.set()
    assert outcomes(await tasks[2]) == ["refused"]


async def test_a_lane_that_failed_alone_is_kept_out_of_batches_for_a_while() -> None:
    ledger = Ledger(fails=ValueError, bad_lane=2)
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    ledger.gate.set()
    assert outcomes(await batcher.apply(call(2))) == ["refused"]
    ledger.gate.clear()
    tasks = await waiting(batcher, [call(lane) for lane in (0, 1, 2, 3)])
    del ledger.gathers[:]
    ledger.gate.set()
    await asyncio.gather(*tasks)
    assert [1, 3] in ledger.gathers
    ledger.fails = None
    assert outcomes(await batcher.apply(call(2))) == ["applied"]
    assert not batcher._suspects.includes("us-east", [(1, 2)], 0.0), "it is as good as any again"


async def test_an_outage_while_an_exchange_runs_alone_is_not_a_refusal() -> None:
    ledger = Ledger(fails=ValueError, bad_lane=2)
    ledger.fails_alone = DatabaseUnavailable
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    tasks = await waiting(batcher, [call(lane) for lane in range(3)])
    ledger.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[2], DatabaseUnavailable)


async def test_an_outage_fails_the_whole_batch_without_a_retry() -> None:
    ledger = Ledger(fails=DatabaseUnavailable, bad_lane=2)
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    tasks = await waiting(batcher, [call(lane) for lane in range(4)])
    ledger.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, DatabaseUnavailable) for each in answers] == [False, True, True, True]
    assert ledger.gathers == [[0], [1, 2, 3]]


async def test_an_exchange_cancelled_before_its_turn_is_left_out() -> None:
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply, slots=1)
    tasks = await waiting(batcher, [call(0), call(1), call(2)])
    tasks[1].cancel()
    ledger.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ledger.gathers == [[0], [2]]


async def test_calls_that_queue_behind_one_that_hangs_end_in_their_own_time() -> None:
    """Their time counts from their arrival, so twenty take no longer than one. None of them is begun later."""
    ledger = Ledger()
    batcher = ExchangeBatcher(ledger.apply, slots=1, answer_within_s=0.01)
    async with asyncio.timeout(BOUND_S):
        answers = await asyncio.gather(*await waiting(batcher, [call(0)] * 20), return_exceptions=True)
    assert [type(each) for each in answers] == [DatabaseUnavailable] * 20
    ledger.gate.set()
    await settled()
    assert ledger.gathers == [[0]]
