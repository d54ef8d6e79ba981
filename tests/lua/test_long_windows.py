"""Windows of days and weeks, and rates of a few units a week, are counted exactly on a real store, even the longest.

The oracle is that of the short ones (test_algorithms.py): the promise, in exact fractions.
"""

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.limits.rates import MAX_BURST, MAX_LOG, WINDOWS, Rate, RateAlgorithm, base_rate, parse_rate
from protocol.limits.windows import DAY_MS, CalendarWindow, calendar_window
from regional_agent.store.types import PolicyDecision, RateCharge
from tests.budget import examples
from tests.conftest import Server
from tests.lua.script_helpers import RATE
from tests.lua.test_algorithms import ALGORITHMS, LIFE, STEADY, Admitted, Clocked, _asks_again_in_time, fits
from tests.lua.wire import at_once

WEEK_MS = 7 * DAY_MS
TIMES = ["10 minutes", "day", "36 hours", "week", "4 weeks", "53 weeks"]
UNITS = [1, 2, 7, 1_000, MAX_LOG, 999_983, MAX_BURST]


def limit_of(name: str, units: int, time: str, burst: int) -> Rate:
    if name in WINDOWS:
        return parse_rate(f"{min(units, MAX_LOG if name == RateAlgorithm.SLIDING_LOG else units)} per {time}", name)
    return parse_rate(f"{units} per {time}, burst {burst}")


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(
    data=st.data(), units=st.sampled_from(UNITS), time=st.sampled_from(TIMES), part=st.sampled_from([(1, 1), (1, 3)])
)
def test_a_long_window_admits_exactly_what_it_promises(
    store_server: Server, name: str, data: st.DataObject, units: int, time: str, part: tuple[int, int]
) -> None:
    burst = data.draw(st.integers(max(1, units // 9), units))  # nine times 53 weeks to come back: under ten years
    limit = base_rate(limit_of(name, units, time, burst), *part)
    span_us = (limit.window_ms or int(limit.burst * 1_000_000_000 / limit.rate_micro)) * 1000
    with closing(Clocked(store_server, name)) as clocked:
        clocked.advance(data.draw(st.integers(0, 10**12)))
        admitted: Admitted = []
        for _ in range(data.draw(st.integers(5, 25))):
            clocked.advance(data.draw(st.one_of(st.integers(0, span_us // 4), st.integers(0, 5_000_000))))
            cost = data.draw(st.one_of(st.integers(1, limit.burst), st.just(limit.burst)))
            expected = fits(name, admitted, clocked.now_us, cost, limit)
            decision = clocked.take(cost, limit)
            assert decision.allowed == expected, (limit, admitted, clocked.now_us, cost)
            if decision.allowed:
                admitted.append((clocked.now_us, cost))
            else:
                _asks_again_in_time(clocked, name, admitted, cost, limit, decision.retry_after_ms)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("time", ["week", "53 weeks"])
def test_a_key_is_kept_for_as_long_as_its_window_has_an_effect(store_server: Server, name: str, time: str) -> None:
    limit = limit_of(name, MAX_LOG, time, MAX_LOG)
    with closing(Clocked(store_server, name)) as clocked:
        decision = clocked.take(limit.burst, limit)
        names = clocked.wire.ask("KEYS", "*:rate*")
        assert {clocked.wire.forgets_in_ms(each) for each in names} == {decision.reset_ms + 1}
        assert decision.reset_ms >= WEEK_MS


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("text", ["1/week", "5/week, burst 5", "1 per 53 weeks", "0.25/day, burst 3"])
def test_a_slow_bucket_refills_on_time_however_often_it_is_asked(store_server: Server, name: str, text: str) -> None:
    """Asked at each of 2,000 odd moments: what a refill rounds away would be missing at the end."""
    limit = parse_rate(text)
    assert limit.is_slow
    unit_ms = int(1_000_000_000 / limit.rate_micro)
    with closing(Clocked(store_server, name)) as clocked:
        assert clocked.take(limit.burst, limit).allowed
        for _ in range(2_000):
            clocked.advance(unit_ms * 1000 // 2_001 + 1)
            assert clocked.take(0, limit, "adjust").remaining == 0  # it writes the state
        clocked.advance(unit_ms * 1000 // 2_001 + 2_000)
        assert clocked.take(1, limit).allowed
        assert not clocked.take(1, limit).allowed


def test_adjustments_beyond_all_limits_do_not_overflow(store_server: Server) -> None:
    for name in ALGORITHMS:
        limit = limit_of(name, MAX_LOG, "53 weeks", MAX_LOG)
        with closing(Clocked(store_server, name)) as clocked:
            for _ in range(3):
                assert clocked.take(9_000_000_000, limit, "adjust").allowed
            peek = clocked.take(1, limit, "peek")
            assert (peek.allowed, peek.remaining) == (False, 0)
            assert peek.retry_after_ms > 0
            clocked.advance(10**9)
            assert not clocked.take(1, limit).allowed


# --- windows of the calendar ------------------------------------------------------------------------------------------


class OnCalendar(Clocked):
    """One key that is counted in windows of the calendar."""

    def __init__(self, server: Server, window_ms: int, zone: str = "UTC", units: int = 10) -> None:
        super().__init__(server, RateAlgorithm.FIXED_WINDOW)
        self.limit, self.zone = Rate(0, units, window_ms), zone

    def window(self, at_us: int) -> CalendarWindow:
        return calendar_window(self.limit.window_ms, self.zone, datetime.fromtimestamp(at_us / 1e6, UTC))

    def take_now(self, cost: int = 1, **charged: Any) -> PolicyDecision:
        charge = RateCharge(RATE, cost, 0, self.limit.burst, self.algorithm, self.limit.window_ms)
        charge = replace(charge, **({"calendar": self.window(self.now_us)} | charged))
        return at_once(self.scripts.check(LIFE, "enforce", [charge])).policies[0]

    def go_to(self, text: str) -> None:
        self.advance(int(datetime.fromisoformat(text).timestamp() * 1e6) - self.now_us)


@pytest.mark.parametrize(
    ("window_ms", "zone", "at", "begins", "ends"),
    [
        (60_000, "UTC", "2026-11-20T09:30:17Z", "2026-11-20T09:30:00Z", "2026-11-20T09:31:00Z"),
        (900_000, "UTC", "2026-11-20T09:44:59Z", "2026-11-20T09:30:00Z", "2026-11-20T09:45:00Z"),
        (3_600_000, "Asia/Kolkata", "2026-11-20T09:44:59Z", "2026-11-20T09:00:00Z", "2026-11-20T10:00:00Z"),
        (DAY_MS, "UTC", "2026-11-20T09:30:17Z", "2026-11-20T00:00:00Z", "2026-11-21T00:00:00Z"),
        (DAY_MS, "Europe/Berlin", "2026-11-20T23:30:00Z", "2026-11-20T23:00:00Z", "2026-11-21T23:00:00Z"),
        (DAY_MS, "Europe/Berlin", "2026-03-29T12:00:00Z", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"),
        (DAY_MS, "Europe/Berlin", "2026-10-25T12:00:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"),
        (WEEK_MS, "UTC", "2026-11-20T09:30:17Z", "2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z"),
        (WEEK_MS, "Europe/Berlin", "2026-10-25T23:30:00Z", "2026-10-25T23:00:00Z", "2026-11-01T23:00:00Z"),
    ],
)
def test_a_window_of_the_calendar_begins_and_ends_with_it(
    store_server: Server, window_ms: int, zone: str, at: str, begins: str, ends: str
) -> None:
    with closing(OnCalendar(store_server, window_ms, zone)) as key:
        key.go_to(at)
        left_ms = int(datetime.fromisoformat(ends).timestamp() * 1000) - key.now_us // 1000
        assert key.take_now(9).reset_ms == left_ms
        (name,) = key.wire.ask("KEYS", "*:rate*")
        assert key.wire.forgets_in_ms(name) == left_ms + 1
        key.go_to(begins)
        assert key.take_now(1).allowed, "the same window, where the clock went back"
        key.go_to(ends)
        key.advance(-1000)
        denied = key.take_now()
        assert (denied.allowed, denied.retry_after_ms) == (False, 1)
        key.advance(1000)
        assert key.take_now(10).allowed
        assert not key.take_now().allowed


def test_an_agent_that_did_not_look_at_the_calendar_since_counts_the_same_window(store_server: Server) -> None:
    with closing(OnCalendar(store_server, DAY_MS)) as key:
        key.go_to("2026-11-20T09:00:00Z")
        old = key.window(key.now_us)
        assert key.take_now(10, calendar=old).allowed
        key.go_to("2026-11-22T09:00:00Z")
        assert key.take_now(4, calendar=old).allowed
        assert key.take_now(6).allowed
        assert not key.take_now(1, calendar=old).allowed


@pytest.mark.parametrize("day", ["2026-11-20", "2026-03-29", "2026-10-25"])
def test_agents_whose_clocks_differ_begin_a_window_once(store_server: Server, day: str) -> None:
    """One agent is ahead and names the next day a moment before the store has it. It begins then, for all agents."""
    with closing(OnCalendar(store_server, DAY_MS, "Europe/Berlin")) as key:
        key.go_to(f"{day}T12:00:00Z")
        today = key.window(key.now_us)
        key.go_to(datetime.fromtimestamp(today.ends_ms / 1000, UTC).isoformat())
        tomorrow = key.window(key.now_us)
        key.advance(-5_000)
        assert key.take_now(10, calendar=today).allowed
        taken = sum(key.take_now(calendar=tomorrow if turn % 2 else today).allowed for turn in range(40))
        key.advance(10_000)
        taken += sum(key.take_now(calendar=today if turn % 2 else tomorrow).allowed for turn in range(40))
        assert taken == 10, "one window more, not two"


def test_another_alignment_begins_anew(store_server: Server) -> None:
    with closing(OnCalendar(store_server, DAY_MS)) as key:
        assert key.take_now(10).allowed
        assert key.take(10, key.limit).allowed
        assert key.take_now(10).allowed
