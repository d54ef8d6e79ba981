"""Each algorithm of a rate keeps its promise on a real store: never more, never less, and an exact time to retry.

The oracle of an algorithm is its promise, written over the list of all that was admitted, in exact fractions, without
state. The store runs the real scripts on the test's clock (see wire.py).
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from protocol.identifiers import lane_of
from protocol.limits.rates import WINDOWS, Rate, RateAlgorithm
from protocol.messages import RateShare
from regional_agent.store import keys
from regional_agent.store.check_calls import CheckBatcher
from regional_agent.store.connection import Argument, Reply, StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import AgentRateDemand, PolicyDecision, RateCharge, StoreIncarnation, StoreRequest
from tests.budget import examples
from tests.conftest import Server
from tests.lua.script_helpers import RATE, breaker, give_share
from tests.lua.wire import Wire, at_once
from tests.simulation.simulated.scripted_store import LocalConnection, ScriptedStore

ALGORITHMS = sorted(RateAlgorithm)
LIFE = StoreIncarnation("life-1", 7, 4)
STEADY = [RateAlgorithm.TOKEN_BUCKET, RateAlgorithm.GCRA, RateAlgorithm.LEAKY_BUCKET]
START_US = 1_000_000_000_000_000


class Clocked:
    """One key of one algorithm on a real store, at times that the test sets."""

    def __init__(self, server: Server, algorithm: str) -> None:
        self.wire = Wire(server)
        self.scripts = Scripts(Straight(self.wire))
        self.algorithm = algorithm
        self.now_us = START_US
        self.advance(0)
        at_once(self.scripts.begin_incarnation("life-1", "a" * 16))
        at_once(self.scripts.adopt_epoch("life-1", "a" * 16, 7, 4))

    def advance(self, us: int) -> None:
        self.now_us += us
        self.wire.ask("HSET", "clock", "s", self.now_us // 1_000_000, "us", self.now_us % 1_000_000)

    def close(self) -> None:
        self.wire.ask("FLUSHALL")
        self.wire.close()

    def take(self, cost: int, limit: Rate, mode: str = "enforce") -> PolicyDecision:
        charge = RateCharge(RATE, cost, limit.rate_micro, limit.burst, self.algorithm, limit.window_ms)
        return at_once(self.scripts.check(LIFE, mode, [charge])).policies[0]


class Straight(LocalConnection):
    """Properties of one algorithm, for which every command goes to the real store."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(ScriptedStore())
        self.fingerprint, self._wire = "real", wire

    async def _ask(self, *arguments: Argument) -> Reply:
        return self._wire.ask_on_the_tests_time(*arguments)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clocked(store_server: Server, algorithm: str) -> Iterator[Clocked]:
    with closing(Clocked(store_server, algorithm)) as clocked:
        yield clocked


def limit_of(algorithm: str, units: int = 10) -> Rate:
    """Return a limit of so many units at once, and a hundred a second where there is a rate; a window is a second."""
    return Rate(units * 1_000_000, units, 1_000) if algorithm in WINDOWS else Rate(100_000_000, units)


# --- the promises -----------------------------------------------------------------------------------------------------

Admitted = list[tuple[int, int]]  # at, units


def fits(algorithm: str, admitted: Admitted, at: int, cost: int, limit: Rate) -> bool:
    """Return whether one more may pass, by the words of the algorithm's promise alone."""
    if cost > limit.burst:
        return False
    if algorithm in STEADY:
        return _in_bucket(admitted, at, limit) + cost <= limit.burst
    if algorithm == RateAlgorithm.SLIDING_LOG:
        return cost + sum(units for moment, units in admitted if moment > at - limit.window_ms * 1000) <= limit.burst
    current, previous, left = _in_windows(admitted, at, limit, tiles=algorithm == RateAlgorithm.SLIDING_WINDOW)
    return current + previous * left + cost <= limit.burst


def _in_bucket(admitted: Admitted, at: int, limit: Rate) -> Fraction:
    """Return what has not drained yet: the maximum over every stretch of the past up to now."""
    level, since = Fraction(0), START_US
    for moment, units in [*admitted, (at, 0)]:
        level = max(Fraction(0), level - Fraction(limit.rate_micro) * (moment - since) / 10**12) + units
        since = moment
    return level


def _in_windows(admitted: Admitted, at: int, limit: Rate, *, tiles: bool) -> tuple[int, int, Fraction]:
    """Return the units of this window and of the one before, and how much of that counts, in whole steps of time."""
    window_us = limit.window_ms * 1000
    started, current, previous = at, 0, 0
    for place, (moment, units) in enumerate([*admitted, (at, 0)]):
        elapsed = moment - started
        if place == 0 or elapsed >= (2 if tiles else 1) * window_us:
            started, current, previous = moment, 0, 0
        elif elapsed >= window_us:
            started, current, previous = started + window_us, 0, current
        current += units
    step_ms = 1000 if limit.window_ms > 3_600_000 else 1
    passed_ms = (at - started) // 1000 // step_ms * step_ms
    return current, previous if tiles else 0, Fraction(limit.window_ms - passed_ms, limit.window_ms)


arrivals = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 30_000), st.integers(60_000, 300_000), st.sampled_from([0, 1, 999, 1000, 999_999])),
        st.integers(1, 6),
    ),
    min_size=20,  # short ones never leave their first window
    max_size=60,
)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(steps=arrivals, units=st.integers(1, 12))
def test_an_algorithm_admits_exactly_what_it_promises(
    store_server: Server, name: str, steps: list[tuple[int, int]], units: int
) -> None:
    limit = limit_of(name, units)
    with closing(Clocked(store_server, name)) as clocked:
        admitted: Admitted = []
        for wait_us, cost in steps:
            clocked.advance(wait_us)
            expected = fits(name, admitted, clocked.now_us, cost, limit)
            decision = clocked.take(cost, limit)
            assert decision.allowed == expected, (admitted, clocked.now_us, cost)
            if decision.allowed:
                admitted.append((clocked.now_us, cost))
            elif cost <= units:
                _asks_again_in_time(clocked, name, admitted, cost, limit, decision.retry_after_ms)


def _asks_again_in_time(
    clocked: Clocked, name: str, admitted: Admitted, cost: int, limit: Rate, retry_after_ms: int
) -> None:
    """Check that `retry_after_ms` is exact: without other requests it is the first whole millisecond at which this one
    passes.
    """
    assert retry_after_ms > 0
    assert fits(name, admitted, clocked.now_us + retry_after_ms * 1000, cost, limit)
    assert not fits(name, admitted, clocked.now_us + (retry_after_ms - 1) * 1000, cost, limit)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_of_200_clients_at_once_exactly_the_limit_passes(
    scripts: Scripts, incarnation: StoreIncarnation, name: str
) -> None:
    # So slow, or so long, that nothing refills while the test runs.
    charge = RateCharge(RATE, 1, 1_000, 120, name, 3_600_000)
    clients = [CheckBatcher(scripts.checks, breaker()) for _ in range(200)]
    decisions = await asyncio.gather(
        *(client.decide(incarnation, StoreRequest("enforce", [charge])) for client in clients)
    )
    assert sum(decision.allowed for decision in decisions) == 120


# --- the traps --------------------------------------------------------------------------------------------------------


def test_the_first_request_finds_all_of_the_limit(clocked: Clocked, algorithm: str) -> None:
    first = clocked.take(10, limit_of(algorithm))
    assert (first.allowed, first.limit, first.remaining, first.delay_ms) == (True, 10, 0, 0)
    assert not clocked.take(1, limit_of(algorithm)).allowed


def test_a_retry_passes_at_the_named_time_and_not_a_millisecond_before(clocked: Clocked, algorithm: str) -> None:
    assert clocked.take(10, limit_of(algorithm)).allowed
    denied = clocked.take(3, limit_of(algorithm))
    clocked.advance((denied.retry_after_ms - 1) * 1000)
    assert not clocked.take(3, limit_of(algorithm)).allowed
    clocked.advance(1000)
    assert clocked.take(3, limit_of(algorithm)).allowed


def test_a_cost_above_the_capacity_is_distinguished_from_a_denial(clocked: Clocked, algorithm: str) -> None:
    decision = clocked.take(11, limit_of(algorithm))
    assert (decision.reason, decision.remaining, decision.retry_after_ms) == ("cost_above_limit", 10, 0)


def test_two_requests_in_one_millisecond_both_count(clocked: Clocked, algorithm: str) -> None:
    remaining = []
    for _ in range(3):
        remaining.append(clocked.take(1, limit_of(algorithm)).remaining)
        clocked.advance(1)
    assert remaining == [9, 8, 7]


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing(clocked: Clocked, algorithm: str) -> None:
    assert clocked.take(10, limit_of(algorithm)).allowed
    clocked.advance(-3_600_000_000)
    assert not clocked.take(1, limit_of(algorithm)).allowed
    clocked.advance(2_000_000)
    assert clocked.take(10 if algorithm != RateAlgorithm.SLIDING_WINDOW else 9, limit_of(algorithm)).allowed


def test_peek_takes_nothing_and_adjust_is_never_denied(clocked: Clocked, algorithm: str) -> None:
    limit = limit_of(algorithm)
    assert [clocked.take(10, limit, "peek").remaining for _ in range(2)] == [10, 10]
    assert clocked.wire.ask("KEYS", "*rate*") == []
    assert clocked.take(25, limit, "adjust").allowed
    assert not clocked.take(1, limit).allowed
    assert clocked.take(1, limit, "peek").remaining == 0


def test_a_limit_that_is_lowered_and_raised_applies_at_once(clocked: Clocked, algorithm: str) -> None:
    assert clocked.take(8, limit_of(algorithm)).allowed
    assert not clocked.take(3, limit_of(algorithm, 4)).allowed
    remaining = clocked.take(1, limit_of(algorithm), "peek").remaining
    assert remaining == 2
    raised = clocked.take(3, limit_of(algorithm, 40))
    assert raised.allowed is (algorithm != RateAlgorithm.TOKEN_BUCKET), (
        "a bucket keeps its units, others what they used"
    )


def give(clocked: Clocked, number: int, rate_micro: int, after_micro: int = 0, expires_in_ms: int = 8_000) -> int:
    limit = limit_of(clocked.algorithm)
    return at_once(give_share(clocked.scripts, LIFE, number, rate_micro, after_micro, expires_in_ms, limit))


def per_second(clocked: Clocked, seconds: int) -> int:
    """Return what it admits under constant load, after the initial units are spent."""
    limit = limit_of(clocked.algorithm)
    while clocked.take(1, limit).allowed:
        pass
    admitted = 0
    for _ in range(seconds * 10):
        clocked.advance(100_000)
        while clocked.take(1, limit).allowed:
            admitted += 1
    return admitted // seconds


@pytest.mark.parametrize("algorithm", STEADY)
@pytest.mark.parametrize("clocked_at", [0, 333, 999_999])
def test_a_share_lasts_then_falls_back_and_then_is_the_safe_share(
    clocked: Clocked, algorithm: str, clocked_at: int
) -> None:
    clocked.advance(clocked_at)
    assert give(clocked, 1, 40_000_000, after_micro=5_000_000)
    assert per_second(clocked, 8) == 40
    assert per_second(clocked, 32) == 5
    assert per_second(clocked, 10) == limit_of(algorithm).rate_micro // 1_000_000


@pytest.mark.parametrize("algorithm", STEADY)
def test_only_a_newer_share_is_accepted_and_none_that_is_late(clocked: Clocked, algorithm: str) -> None:
    assert [give(clocked, number, 40_000_000) for number in (5, 5, 4, 6)] == [1, 0, 0, 1]
    sent_us = at_once(clocked.scripts.read_mono_us())
    clocked.advance(5_000_001)
    clocked.take(1, limit_of(algorithm), "peek")
    share = RateShare(
        quota=RATE, number=7, rate_micro=1, after_micro=1, expires_in_ms=8_000, refresh_in_ms=1, contended=False
    )
    assert at_once(clocked.scripts.share_rates(LIFE, sent_us, [(limit_of(algorithm), share)])) == 0
    assert at_once(clocked.scripts.share_rates(LIFE, sent_us + 1_000, [(limit_of(algorithm), share)])) == 1


@pytest.mark.parametrize("algorithm", STEADY)
@pytest.mark.parametrize(("old", "new"), [(1_000_000, 90_000_000), (90_000_000, 1_000_000), (7, 11_000_000)])
def test_a_change_of_the_share_keeps_the_units_in_the_bucket(
    clocked: Clocked, algorithm: str, old: int, new: int
) -> None:
    """Neither is the past refilled at the new rate, nor are units already taken counted at another."""
    limit = limit_of(algorithm)
    give(clocked, 1, old)
    assert clocked.take(10, limit).allowed
    clocked.advance(50_000)
    came = 50 * old // 1_000_000_000
    give(clocked, 2, new)
    assert clocked.take(1, limit, "peek").remaining == came
    clocked.advance(100_000)
    assert clocked.take(1, limit, "peek").remaining == min(10, (50 * old + 100 * new) // 1_000_000_000)


@pytest.mark.parametrize("algorithm", STEADY)
def test_unused_units_are_given_up_before_the_report_and_never_raised_here(clocked: Clocked, algorithm: str) -> None:
    give(clocked, 3, 90_000_000, after_micro=30_000_000)

    def told(agent: str, demand_micro: int, is_contended: bool) -> tuple[int, int, int, int]:
        want = AgentRateDemand(RATE, limit_of(algorithm), demand_micro, is_contended)
        (report,) = at_once(clocked.scripts.report_rates(LIFE, agent, [want])).reports
        return report.number, report.rate_micro, report.spent, report.demand_micro

    assert clocked.take(4, limit_of(algorithm)).allowed
    assert told("one", 10_000_000, False) == (3, 90_000_000, 4, 10_000_000)
    # Six of the bucket's ten units are left: one above its half, which is half a unit a second for two seconds.
    assert told("two", 63_000_000, True) == (3, 72_500_000, 4, 72_500_000), "only what is wanted is kept"
    assert told("two", 40_000_000, True) == (3, 49_500_000, 4, 49_500_000)
    assert told("one", 99_000_000, True) == (3, 49_500_000, 4, 138_500_000)
    clocked.advance(8_000_000)
    assert told("two", 10_000_000, False)[1] == 30_000_000
    clocked.advance(5_000_000)
    assert told("two", 10_000_000, False)[3] == 10_000_000, "what the other wanted is long ago"
    clocked.advance(40_000_000)
    assert told("two", 0, False) == (0, limit_of(algorithm).rate_micro, 0, 0)


def test_another_algorithm_starts_without_state(clocked: Clocked, algorithm: str) -> None:
    assert clocked.take(10, limit_of(algorithm)).allowed
    others = [name for name in ALGORITHMS if {name, algorithm} != {RateAlgorithm.GCRA, RateAlgorithm.LEAKY_BUCKET}]
    for other in others:
        if other != algorithm:
            clocked.algorithm = other
            assert clocked.take(10, limit_of(other), "peek").remaining == 10, other


def test_a_state_expires_exactly_when_it_has_no_more_effect(clocked: Clocked, algorithm: str) -> None:
    decision = clocked.take(10, limit_of(algorithm))
    names = [name for name in clocked.wire.ask("KEYS", "*") if b":rate:" in name or b":rate_log:" in name]
    assert len(names) == (2 if algorithm == RateAlgorithm.SLIDING_LOG else 1)
    assert {clocked.wire.forgets_in_ms(name) for name in names} == {decision.reset_ms + 1}
    clocked.advance((decision.reset_ms + 1) * 1000)
    kept = clocked.take(10, limit_of(algorithm), "peek")
    for name in names:
        clocked.wire.ask("DEL", name)
    assert clocked.take(10, limit_of(algorithm), "peek") == kept, "absent says the same"


@pytest.mark.parametrize("name", [RateAlgorithm.FIXED_WINDOW, RateAlgorithm.SLIDING_WINDOW, RateAlgorithm.SLIDING_LOG])
def test_around_a_boundary_only_the_fixed_window_doubles(store_server: Server, name: str) -> None:
    limit = limit_of(name)
    with closing(Clocked(store_server, name)) as clocked:
        assert clocked.take(1, limit).allowed
        clocked.advance(990_000)
        passed = sum(clocked.take(1, limit).allowed for _ in range(20))
        clocked.advance(20_000)
        passed += sum(clocked.take(1, limit).allowed for _ in range(20))
        assert passed == {"fixed_window": 19, "sliding_window": 9, "sliding_log": 10}[name]


@pytest.mark.parametrize("name", STEADY)
def test_refills_are_never_rounded_away(store_server: Server, name: str) -> None:
    """Seven a second do not divide a second evenly; a hundred seconds still give 700 and the burst."""
    limit = Rate(7_000_000, 2)
    with closing(Clocked(store_server, name)) as clocked:
        passed = 0
        for _ in range(3_000):
            passed += clocked.take(1, limit).allowed
            clocked.advance(33_333)
        assert 700 <= passed <= 702


def test_a_log_drops_each_request_at_its_own_time(store_server: Server) -> None:
    with closing(Clocked(store_server, "sliding_log")) as clocked:
        limit = limit_of("sliding_log")
        for _ in range(10):
            assert clocked.take(1, limit).allowed
            clocked.advance(90_000)
        denied = clocked.take(2, limit)
        assert (denied.allowed, denied.remaining, denied.retry_after_ms) == (False, 0, 190)
        clocked.advance(190_000)
        assert clocked.take(2, limit).allowed


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("after_ms", [0, 7, 60, 5_000])
def test_returned_units_count_as_never_taken_and_no_bucket_overflows(
    store_server: Server, name: str, after_ms: int
) -> None:
    limit = Rate(100_000_000, 50)
    with closing(Clocked(store_server, name)) as key:
        key.take(3, limit)
        key.take(20, limit)
        key.advance(after_ms * 1_000)
        back = key.take(-20, limit, "adjust")
        assert back.remaining == min(50, 50 - 3 + after_ms // 10)
        assert back.reset_ms == max(0, 30 - after_ms)
        assert back.available == min(50 * 10**9, 47 * 10**9 + after_ms * 10**8), "what is in it, to the part"
        assert back.last_grant == 100_000_000
        assert key.take(back.remaining, limit).code == 0
        assert key.take(1, limit).code != 0


def test_a_leaky_bucket_names_each_request_its_turn(store_server: Server) -> None:
    limit = Rate(4_000_000, 5)
    with closing(Clocked(store_server, "leaky_bucket")) as clocked:
        queue = [clocked.take(1, limit) for _ in range(6)]
        assert [decision.delay_ms for decision in queue] == [0, 250, 500, 750, 1000, 0]
        assert [decision.allowed for decision in queue] == [True] * 5 + [False]
        assert queue[5].retry_after_ms == 250
        clocked.advance(600_000)
        assert clocked.take(2, limit).delay_ms == 650


@pytest.mark.anyio
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_a_key_takes_less_than_300_bytes(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, name: str
) -> None:
    await scripts.check(incarnation, "enforce", [RateCharge(RATE, 1, 1_000, 120, name, 3_600_000)])
    lane = lane_of(RATE, incarnation.lanes)
    sizes = [
        await connection.call("MEMORY", "USAGE", key) for key in (keys.rate(lane, RATE), keys.rate_log(lane, RATE))
    ]
    assert sum(size or 0 for size in sizes) < 300
