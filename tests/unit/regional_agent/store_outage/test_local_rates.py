"""During a store outage an agent admits at most its part of a rate and names the exact time to retry."""

from hypothesis import given
from hypothesis import strategies as st

from regional_agent.store_outage.rules.local_rates import MOST_BUCKETS, LocalRates, RateRequest

ASK = RateRequest("api:tenant=acme", 1, 2_000_000, 10)  # two a second, ten at once


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 4)), max_size=60))
def test_in_any_time_it_admits_at_most_its_burst_and_its_rate(arrivals: list[tuple[int, int]]) -> None:
    rates, now_ms, admitted = LocalRates(), 0, []
    for pause_ms, cost in arrivals:
        now_ms += pause_ms
        (answer,) = rates.decide([ASK._replace(cost=cost)], now_ms, "enforce")
        if answer.allowed:
            admitted.append((now_ms, cost))
        for begin_ms, _ in admitted:
            units = sum(cost for at_ms, cost in admitted if at_ms >= begin_ms)
            assert units * 1000 <= 10_000 + (now_ms - begin_ms) * 2


@given(st.integers(1, 10), st.integers(1, 9_000_000))
def test_a_denial_names_the_exact_time_to_retry(cost: int, rate_micro: int) -> None:
    rates, ask = LocalRates(), ASK._replace(cost=cost, rate_micro=rate_micro)
    rates.decide([ask._replace(cost=10)], 0, "enforce")
    (denied,) = rates.decide([ask], 0, "enforce")
    assert not rates.decide([ask], denied.retry_after_ms - 1, "enforce")[0].allowed
    assert rates.decide([ask], denied.retry_after_ms, "enforce")[0].allowed


def test_either_all_charges_are_taken_or_none() -> None:
    rates, other = LocalRates(), ASK._replace(key="other", cost=11)
    answers = rates.decide([ASK, other], 0, "enforce")
    assert [answer.allowed for answer in answers] == [True, False]
    assert rates.decide([ASK], 0, "peek")[0].remaining == 9, "nothing was taken"
    twice = rates.decide([ASK._replace(cost=6)] * 2, 0, "enforce")
    assert [answer.allowed for answer in twice] == [True, False], "both are of one bucket"
    assert rates.decide([ASK._replace(cost=12)], 0, "adjust")[0].allowed
    assert rates.decide([ASK], 500, "enforce")[0].retry_after_ms == 1000, "it was taken all the same"


def test_the_number_of_keys_is_bounded() -> None:
    rates = LocalRates()
    for number in range(3 * MOST_BUCKETS):
        rates.decide([ASK._replace(key=number)], 0, "enforce")
    assert len(rates._buckets) <= 2 * MOST_BUCKETS
