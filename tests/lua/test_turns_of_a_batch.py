"""A large batch is planned and decided over many turns of the event loop, on a real store: others wait for a part."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol.check import MAX_BATCH, BatchAnswer, Check, Subject
from protocol.clock import SystemClock
from protocol.limits.document import LimitsDocument, PolicyBundle
from regional_agent.admission.plan import CheckPlan
from regional_agent.http.batch import CHECKS_A_TURN, PendingBatch
from regional_agent.store.connection import StoreConnection
from regional_agent.store.types import StoreIncarnation
from tests.simulation.test_slices import Agent

pytestmark = pytest.mark.anyio

MOST_IN_A_TURN = 64  # checks, which take some milliseconds
DOCUMENT = {
    "quotas": [{"name": "exports", "kind": "allowance", "limit": 1000, "period": "month"}],
    "policies": [{"name": "export", "quota": "exports", "by": ["tenant"], "wait": "0s"}],
}


@pytest.fixture
def agent(connection: StoreConnection, incarnation: StoreIncarnation) -> Agent:
    bundle = PolicyBundle(
        version=1, document=msgspec.convert(DOCUMENT, LimitsDocument), subscriptions={}, weight=1, total_weight=1
    )
    region: Any = SimpleNamespace(clock=SystemClock(), bundle=bundle)
    store: Any = connection
    return Agent(region, store, incarnation)


async def test_a_batch_of_new_allowances_leaves_turns_of_the_loop_to_others(agent: Agent) -> None:
    loop, turn, planned = asyncio.get_running_loop(), 0, Counter[int]()
    answered: asyncio.Future[BatchAnswer] = loop.create_future()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not answered.done():
            loop.call_soon(count_turns)

    def plan(number: int) -> CheckPlan:
        planned[turn] += 1
        return agent.admission.plan_check(Check(subject=Subject(tenant=f"tenant-{number}")))

    count_turns()
    batch = PendingBatch(agent.admission, plan, answered.set_result)
    batch.submit(range(MAX_BATCH))
    answer = await asyncio.wait_for(answered, 60)
    assert {item.status for item in answer.items} == {429}, "no lease was granted"
    assert sum(planned.values()) == MAX_BATCH
    assert max(planned.values()) <= MOST_IN_A_TURN


async def test_the_answers_of_a_batch_keep_the_order_of_its_checks(agent: Agent) -> None:
    """A run of equal checks is cut where a turn ends, and a check that is refused answers its own place."""
    numbers = [0] * (CHECKS_A_TURN + 9) + [1, 2, -1, 2] + [3] * CHECKS_A_TURN
    plans = {each: agent.admission.plan_check(Check(subject=Subject(tenant=f"tenant-{each}"))) for each in range(4)}
    answered: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
    PendingBatch(agent.admission, plans.__getitem__, answered.set_result).submit(numbers)
    answer = await asyncio.wait_for(answered, 60)
    assert [item.status for item in answer.items] == [500 if each < 0 else 429 for each in numbers]
