"""The timeout of decisions follows the store's own latency, within its bound."""

import pytest

from regional_agent.store.rules.decision_timeout import ENOUGH, WINDOW, DecisionTimeout


def after(*round_trips_ms: float, shortest_ms: int = 5, longest_ms: int = 50) -> DecisionTimeout:
    timeout = DecisionTimeout(shortest_ms, longest_ms)
    timeout.note(each / 1000 for each in round_trips_ms)
    return timeout


@pytest.mark.parametrize(
    ("round_trips_ms", "seconds", "is_too_short"),
    [
        ([], 0.005, False),
        ([9] * (ENOUGH - 1), 0.005, False),
        ([1] * WINDOW, 0.005, False),
        ([9] * ENOUGH, 0.018, True),
        ([1] * 236 + [8] * 20, 0.016, True),
        ([900] * WINDOW, 0.050, True),
        ([900] * WINDOW + [1] * WINDOW, 0.005, False),
    ],
)
def test_the_timeout_is_twice_a_high_percentile_of_the_latency(
    round_trips_ms: list[float], seconds: float, is_too_short: bool
) -> None:
    timeout = after(*round_trips_ms)
    assert timeout.seconds == pytest.approx(seconds)
    assert timeout.is_too_short is is_too_short


def test_the_timeout_is_never_below_its_setting_and_fixed_without_a_range() -> None:
    assert after(*[1] * 64, shortest_ms=20, longest_ms=5).seconds == pytest.approx(0.02)
    assert after(*[900] * 64, shortest_ms=5, longest_ms=5).seconds == pytest.approx(0.005)
