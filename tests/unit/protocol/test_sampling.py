"""Admissions are sampled with the rate of their policy, whatever else is sampled beside them."""

import math
import random

import pytest

from protocol.decision_log.sampling import hazard_of, is_sampled, parse_sample, rate_of
from protocol.identifiers import operation_digest


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_a_hazard_is_a_rate_in_another_form(rate: float) -> None:
    assert math.isclose(rate_of(hazard_of(rate)), rate, abs_tol=1e-12)


def test_requests_of_any_rates_are_sampled_with_their_own() -> None:
    """Three rates by turns: after a sample nothing is left of the distance that was drawn for it."""
    chance, rates, sampled = random.Random(1), (0.5, 0.05, 1.0), [0, 0, 0]
    until_sample, turns = chance.expovariate(1.0), 40_000
    for _ in range(turns):
        for place, rate in enumerate(rates):
            until_sample -= hazard_of(rate)
            if until_sample <= 0:
                sampled[place] += 1
                until_sample = chance.expovariate(1.0)
    for found, rate in zip(sampled, rates, strict=True):
        assert abs(found - turns * rate) <= 5 * math.sqrt(turns * rate * (1 - rate))


def test_an_operation_is_sampled_alike_each_time_and_as_often_as_its_rate() -> None:
    digests = [operation_digest("acme", f"order-{number}") for number in range(20_000)]
    found = [is_sampled(each, 0.1) for each in digests]
    assert found == [is_sampled(each, 0.1) for each in digests]
    assert abs(sum(found) - 2_000) <= 5 * math.sqrt(20_000 * 0.1 * 0.9)
    assert all(is_sampled(each, 1.0) for each in digests)
    assert not any(is_sampled(each, 0.0) for each in digests)


@pytest.mark.parametrize(("text", "rate"), [("0.1%", 0.001), ("100%", 1.0), ("0%", 0.0), (0.25, 0.25), (1, 1.0)])
def test_a_sample_is_a_percentage_or_a_fraction(text: str | float, rate: float) -> None:
    assert math.isclose(parse_sample(text), rate)


@pytest.mark.parametrize("text", ["101%", "-1%", "1", "", "some", 1.5, -0.1, True, math.nan])
def test_anything_else_is_no_sample(text: str | float) -> None:
    with pytest.raises(ValueError, match="is no sample"):
        parse_sample(text)
