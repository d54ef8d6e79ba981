"""Equal checks of one turn of the event loop share a call, and each gets its own outcome. Runs on virtual time."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from protocol.check import Check, Subject
from regional_agent.admission.answers import Verdict
from regional_agent.admission.plan import CheckPlan
from tests.simulation.simulated.virtual_time import VirtualLoop
from tests.simulation.test_slices import Agent, Region

LIMIT, TIMES = "1/hour, burst 6", 10
CHECK = Check(subject=Subject(tenant="acme"))


def live(what: Callable[[Agent], Coroutine[Any, Any, None]], *, limit: str = LIMIT, slices: bool = False) -> None:
    async def lives() -> None:
        region = Region(loop, limit, "token_bucket", slices=slices)
        await region.begin(1)
        await what(region.agents[0])
        await region.end()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(lives())
    finally:
        loop.close()


@dataclass
class Hearer:
    on_verdict: Callable[[Verdict | Exception], None]
    has_disconnected: bool = False
    trace_context: None = None


async def ask_at_once(
    agent: Agent, times: int = TIMES, deaf: int | None = None, asked: CheckPlan | None = None
) -> list[Verdict]:
    """Run the checks, and wait for a second of virtual time."""
    told: list[Verdict] = []

    def hear(number: int, outcome: Verdict | Exception) -> None:
        assert isinstance(outcome, Verdict)
        told.append(outcome)
        if number == deaf:
            raise RuntimeError("a hearer's own fault")

    asked = asked or agent.admission.plan_check(CHECK)
    for number in range(times):
        agent.admission.decide_in_store(asked, Hearer(partial(hear, number)))
    assert len(agent.batcher._runs) == 1, "sent as a run"
    await agent.rest(1)
    return told


def test_equal_checks_of_one_turn_are_one_call_with_each_its_own_remainder() -> None:
    async def crowd(agent: Agent) -> None:
        before = agent.connection.calls
        told = await ask_at_once(agent)
        assert agent.connection.calls == before + 1
        assert [each.answer.allowed for each in told] == [True] * 6 + [False] * 4
        assert [each.answer.policies[0].remaining for each in told] == [5, 4, 3, 2, 1, *[0] * 5]
        assert [bool(each.answer.retry_after_ms) for each in told] == [False] * 6 + [True] * 4

    live(crowd)


@pytest.mark.parametrize("times", [4, TIMES])
def test_an_error_of_one_listener_does_not_affect_the_others(times: int) -> None:
    """Check it where all checks were admitted and where some were denied."""

    async def crowd(agent: Agent) -> None:
        assert len(await ask_at_once(agent, times, deaf=1)) == times

    live(crowd)


def test_each_check_of_a_batch_counts() -> None:
    """Check counts in metrics, in the demand that is reported, and in the heat of a key."""

    async def crowd(agent: Agent) -> None:
        told = await ask_at_once(agent)
        assert [each.answer.allowed for each in told] == [True] * TIMES
        (hot,) = agent.keys.hottest(1)
        assert hot.demand_milli > 5_000, "units a second, as an average of a second has it"
        assert agent.metrics.registry.get_sample_value("leasehold_check_duration_seconds_count") == TIMES
        assert agent.slices.taken == 1, "ten requests within 100 ms are hot"

    live(crowd, limit="1/hour, burst 900", slices=True)


def test_checks_of_the_next_turn_are_another_call() -> None:
    async def two_crowds(agent: Agent) -> None:
        before, asked = agent.connection.calls, agent.admission.plan_check(CHECK)
        assert [len(await ask_at_once(agent, 2, asked=asked)) for _ in range(2)] == [2, 2]
        assert agent.connection.calls == before + 2
        assert agent.admission._last is not None
        assert len(agent.admission._last.callers) == 2, "who was told is forgotten"

    live(two_crowds)


def test_checks_beyond_the_size_of_a_call_are_answered_too() -> None:
    async def crowd(agent: Agent) -> None:
        told = await ask_at_once(agent, 150)
        assert [each.answer.allowed for each in told] == [True] * 6 + [False] * 144

    live(crowd)
