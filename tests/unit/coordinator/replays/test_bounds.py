"""What a limit cannot admit: never more than a real bucket denies, close to it, and estimated from samples."""

import math
import random
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.replays.rules.bounds import FEWEST_SAMPLES, Capacity, Demand, Estimate

DAY_S = 86_400


def demand_of(arrivals: Sequence[tuple[float, int]], weight: float = 1.0) -> Demand:
    demand = Demand()
    for at_s, cost in arrivals:
        demand.add(int(at_s), weight * cost, weight * (weight - 1) * cost**2)
    return demand


def denied_units(arrivals: list[tuple[float, int]], capacity: Capacity) -> int:
    """Decide each arrival by a token bucket, to the microsecond."""
    level, last, denied = capacity.burst, 0.0, 0
    for at_s, cost in arrivals:
        level = min(capacity.burst, level + (at_s - last) * capacity.per_second)
        last = at_s
        if cost <= level:
            level -= cost
        else:
            denied += cost
    return denied


@given(
    st.lists(st.tuples(st.floats(0, 300), st.integers(1, 5)), min_size=1, max_size=200),
    st.floats(0, 10),
    st.integers(5, 50),
)
def test_of_a_whole_log_the_bound_is_never_above_what_a_bucket_denies(
    arrivals: list[tuple[float, int]], per_second: float, burst: int
) -> None:
    arrivals.sort()
    capacity = Capacity(per_second, burst)
    beyond = demand_of(arrivals).beyond(capacity, 301)
    assert beyond is not None
    assert beyond.low == beyond.middle == beyond.high
    assert beyond.middle <= denied_units(arrivals, capacity) + 1e-6


def test_of_a_whole_log_the_bound_is_close_where_bursts_are_longer_than_a_second() -> None:
    chance = random.Random(1)
    at_s, arrivals = 0.0, []
    while at_s < 3_600:
        at_s += chance.expovariate(30.0 if int(at_s) % 600 < 60 else 5.0)  # a minute of every ten is busy
        arrivals.append((at_s, 1))
    capacity = Capacity(10.0, 20)
    beyond = demand_of(arrivals).beyond(capacity, 3_601)
    assert beyond is not None
    assert 0.97 * denied_units(arrivals, capacity) <= beyond.middle <= denied_units(arrivals, capacity)


def test_from_a_sample_the_interval_holds_what_the_whole_log_gives() -> None:
    """Six hours at 20 a second, of which a limit admits 15; of 200 one is logged. Of 40 samples two may miss."""
    chance, held = random.Random(2), 0
    arrivals = [(number / 20, 1) for number in range(20 * DAY_S // 4)]
    capacity = Capacity(15.0, 30)
    whole = demand_of(arrivals).beyond(capacity, DAY_S // 4)
    assert whole is not None
    for _ in range(40):
        found = demand_of(list(sampled(arrivals, 200, chance)), 200.0).beyond(capacity, DAY_S // 4)
        assert found is not None
        held += found.low <= whole.middle <= found.high
    assert held >= 38


def sampled(arrivals: list[tuple[float, int]], one_of: int, chance: random.Random) -> Iterator[tuple[float, int]]:
    """Yield each arrival with the probability 1 / one_of."""
    place = -1
    while (place := place + 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / one_of))) < len(arrivals):
        yield arrivals[place]


def test_a_demand_below_the_limit_is_not_said_to_be_denied_for_the_noise_of_its_sample() -> None:
    """Half of the limit is requested. In windows of a second, every sample would be beyond it."""
    chance = random.Random(3)
    sampled = [(at_s, 1) for at_s in range(DAY_S) if chance.random() < 0.01]
    found = demand_of(sampled, 1_000.0).beyond(Capacity(20.0, 20), DAY_S)
    assert found == Estimate()


def test_nothing_is_said_of_a_few_samples_unless_the_limit_is_far_away() -> None:
    few = [(100.0 * number, 1) for number in range(FEWEST_SAMPLES - 1)]
    assert demand_of(few, 1_000.0).beyond(Capacity(0.3, 10), DAY_S) is None
    assert demand_of(few, 1_000.0).beyond(Capacity(10.0, 10), DAY_S) == Estimate()
    assert demand_of(few).beyond(Capacity(0.0, 10), DAY_S) == Estimate(19, 19, 19)


def test_windows_are_as_long_as_the_sample_needs() -> None:
    arrivals = [(number / 10, 1) for number in range(1_000)]
    assert demand_of(arrivals).window_s(Capacity(10.0, 10), DAY_S) == 1
    assert demand_of(arrivals, 2.0).window_s(Capacity(10.0, 10), DAY_S) == 9
    assert demand_of(arrivals, 1_000.0).window_s(Capacity(10.0, 10), DAY_S) == 9_989
    assert demand_of(arrivals, 1_000.0).window_s(Capacity(0.001, 10), DAY_S) == DAY_S
