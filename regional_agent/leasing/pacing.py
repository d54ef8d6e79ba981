"""When an agent exchanges: at once for a grant, once an interval for its report, later after a failure."""

import asyncio
import contextlib

from protocol.clock import Clock
from regional_agent.leasing.rules.reply_timeout import LONGEST_PAUSE_MS, exchange_backoff


class Pacing:
    """The schedule of one cell's exchanges. Setting `wake` ends a wait early."""

    def __init__(self, wake: asyncio.Event, clock: Clock, interval_ms: int) -> None:
        self._wake = wake
        self._clock = clock
        self.interval_ms = interval_ms
        self.backoff = exchange_backoff()
        self._report_at_ms = 0
        self._check_region_at_ms: int | None = None  # when to exchange though there is nothing to report

    def report_now(self) -> None:
        self.report_with_next_exchange()
        self._wake.set()

    def report_with_next_exchange(self) -> None:
        self._report_at_ms = 0

    def begin_report(self, now_ms: int) -> bool:
        """Return whether a report is due, and schedule the one after it."""
        is_due = now_ms >= self._report_at_ms
        if is_due:
            self._report_at_ms = now_ms + self.interval_ms
        return is_due

    async def wait(self, next_request_in_ms: int | None) -> None:
        """Wait until a grant is requested, a report is due, or the pause after a failure is over."""
        if self.backoff.pause:
            await asyncio.sleep(max(0, self.backoff.until - self._clock.monotonic_ms()) / 1000)
            return
        timeout_ms = self._report_at_ms - self._clock.monotonic_ms()
        if next_request_in_ms is not None:
            timeout_ms = min(timeout_ms, next_request_in_ms)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0, timeout_ms) / 1000):
                await self._wake.wait()
        self._wake.clear()

    def wait_longest_for_replies(self) -> None:
        """Give each reply the longest timeout, for a last exchange that is sent only once."""
        self.backoff = exchange_backoff(LONGEST_PAUSE_MS)

    # --- the region's status -----------------------------------------------------------------------------------------

    def check_region_in(self, pause_ms: int | None) -> None:
        """Exchange after a pause even if there is nothing to report: only a reply says that the region is drained."""
        self._check_region_at_ms = None if pause_ms is None else self._clock.monotonic_ms() + pause_ms

    def begin_region_check(self) -> bool:
        """Return whether a check of the region's status is due. It is done once."""
        if self._check_region_at_ms is None or self._clock.monotonic_ms() < self._check_region_at_ms:
            return False
        self._check_region_at_ms = None
        return True
