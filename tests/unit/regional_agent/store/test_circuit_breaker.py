"""The circuit breaker of the store opens, lets one trial call through and closes, in any sequence of events."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.circuit_breaker import BreakerState, CircuitBreaker
from protocol.clock import SystemClock
from regional_agent.metrics import AgentMetrics
from regional_agent.store.circuit_breaker import StoreCircuitBreaker, is_store_failure
from regional_agent.store.connection import OnReply, StoreError, StoreUnavailable
from tests.unit.regional_agent.leasing.test_quotas import StandingClock

PAUSE_MS = 1000


def opened(failures: int = 3) -> CircuitBreaker:
    breaker = CircuitBreaker(failures, PAUSE_MS)
    for _ in range(failures):
        assert breaker.may_call(0)
        breaker.failed(0)
    return breaker


def test_it_opens_exactly_at_the_threshold_of_consecutive_failures() -> None:
    breaker = CircuitBreaker(3, PAUSE_MS)
    for outcome in (breaker.failed, breaker.failed, lambda _: breaker.succeeded(), breaker.failed, breaker.failed):
        outcome(0)
        assert breaker.state is BreakerState.CLOSED
    breaker.failed(0)
    assert breaker.state is BreakerState.OPEN


@given(st.lists(st.integers(0, PAUSE_MS - 1), min_size=1, max_size=50))
def test_during_a_trial_call_all_other_calls_are_refused(arrivals_ms: list[int]) -> None:
    breaker = opened()
    assert not any(breaker.may_call(at_ms) for at_ms in arrivals_ms)
    assert breaker.may_call(PAUSE_MS)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not any(breaker.may_call(PAUSE_MS + at_ms) for at_ms in arrivals_ms), "that would be a herd"
    breaker.succeeded()
    assert all(breaker.may_call(PAUSE_MS + at_ms) for at_ms in arrivals_ms)


def test_a_failed_probe_begins_another_pause_and_a_lost_probe_is_replaced() -> None:
    breaker = opened()
    assert breaker.may_call(PAUSE_MS)
    breaker.failed(PAUSE_MS + 100)
    assert (breaker.state, breaker.may_call(2 * PAUSE_MS + 99)) == (BreakerState.OPEN, False)
    assert breaker.may_call(2 * PAUSE_MS + 100), "nobody ever hears of this one"
    assert (breaker.may_call(3 * PAUSE_MS + 99), breaker.may_call(3 * PAUSE_MS + 100)) == (False, True)


@pytest.mark.parametrize(
    ("reply", "cannot"),
    [
        (b"", False),
        (StoreUnavailable("the store did not answer in time"), True),
        (StoreError("OOM command not allowed when used memory > 'maxmemory'."), True),
        (StoreError("MISCONF Errors writing to the AOF file: No space left on device"), True),
        (StoreError("WRONGTYPE Operation against a key holding the wrong kind of value script: 1"), False),
        (StoreError("ERR user_script:1: attempt to compare nil with number"), False),
    ],
)
def test_store_failures_count_and_request_errors_do_not(reply: bytes | Exception, cannot: bool) -> None:
    assert is_store_failure(reply) is cannot


class Probes:
    """Collect calls that probe whether the store is back."""

    def __init__(self) -> None:
        self.waiting: list[OnReply] = []

    def __call__(self, on_reply: OnReply) -> None:
        self.waiting.append(on_reply)

    async def made(self, times: int) -> None:
        for _ in range(3_000):
            if len(self.waiting) == times:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("nobody tries")


@pytest.mark.anyio
async def test_an_outage_begins_once_and_lasts_until_the_circuit_breaker_closes() -> None:
    clock, metrics = StandingClock(), AgentMetrics()
    breaker = StoreCircuitBreaker(CircuitBreaker(2, PAUSE_MS), clock, metrics, Probes(), 60_000)
    for _ in range(4):
        breaker.record_reply(StoreUnavailable("gone"))
        clock.now_ms += 500
    assert metrics.registry.get_sample_value("leasehold_store_circuit_breaker_opened_total") == 1
    assert breaker.degraded_ms() == 1500, "it goes on"
    breaker.record_reply(b"")
    clock.now_ms += 10_000
    assert breaker.degraded_ms() == 1500
    breaker.record_reply(StoreUnavailable("gone"))
    assert breaker.degraded_ms() == 1500, "one failure is no outage"
    breaker.close()


@pytest.mark.anyio
async def test_one_probe_at_a_time_finds_that_the_store_is_back() -> None:
    probes = Probes()
    breaker = StoreCircuitBreaker(CircuitBreaker(1, 1), SystemClock(), AgentMetrics(), probes, 1)
    breaker.record_reply(StoreUnavailable("gone"))
    for times in (1, 2):
        await probes.made(times)
        assert not breaker.allows_calls(), "no request is put at risk"
        breaker.record_reply(StoreUnavailable("gone, and asked before that was known"))
        await asyncio.sleep(0.01)  # some pauses
        assert len(probes.waiting) == times, "while one tries nobody else does"
        probes.waiting[-1](StoreUnavailable("gone"))
    await probes.made(3)
    probes.waiting[-1](b"OK")
    assert breaker.allows_calls()
