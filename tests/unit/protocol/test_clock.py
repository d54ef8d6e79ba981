"""Durations are measured by a clock that never goes back and counts sleep."""

import time
from unittest.mock import patch

from protocol.clock import SystemClock


def test_durations_count_the_time_in_which_the_machine_slept() -> None:
    """CLOCK_BOOTTIME counts it on Linux; elsewhere CLOCK_MONOTONIC does, where time.monotonic does not."""
    asked: list[int] = []

    def clock_gettime_ns(clock: int) -> int:
        asked.append(clock)
        return 7_500_000

    with patch.object(time, "clock_gettime_ns", clock_gettime_ns):
        assert SystemClock().monotonic_ms() == 7
    assert asked == [getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)]


def test_the_clock_of_durations_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_ms() for _ in range(1_000)]
    assert readings == sorted(readings)
