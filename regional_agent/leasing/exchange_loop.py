"""The loop that exchanges with the coordinator: when, and what to do after a failure."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable

import structlog

from protocol.clock import Clock
from protocol.identifiers import lane_of
from protocol.outcomes import ExchangeOutcome
from regional_agent.leasing.coordinator_client import CoordinatorRefused, CoordinatorUnavailable, NoReply
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.exchange import MOST_QUOTAS, LaneExchange
from regional_agent.leasing.older_epochs import OlderEpochs
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.metrics import AgentMetrics
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced, LeaseLost, StoreIncarnation
from regional_agent.store_outage.booking import JournalBooking

log = structlog.get_logger()

OFFER_AGAIN_MS = 30_000  # batches that another agent left behind or that were refused: people may have resolved them
FAILURES = (CoordinatorUnavailable, CoordinatorRefused, StoreUnavailable, StoreError)


class ExchangeLoop:
    def __init__(
        self,
        *,
        scripts: Scripts,
        exchange: LaneExchange,
        quotas: Quotas,
        epochs: EpochManager,
        journal: JournalBooking,
        pacing: Pacing,
        metrics: AgentMetrics,
        clock: Clock,
    ) -> None:
        self._scripts = scripts
        self._exchange = exchange
        self._older_epochs = OlderEpochs(scripts, exchange)
        self._quotas = quotas
        self._epochs = epochs
        self._journal = journal
        self._pacing = pacing
        self._metrics = metrics
        self._clock = clock
        self._resumed: StoreIncarnation | None = None  # the incarnation whose leases and lanes were taken over
        self._offered_at_ms = clock.monotonic_ms()
        self.offer_again_ms = OFFER_AGAIN_MS

    async def run(self) -> None:
        while True:
            await self._pacing.wait(self._quotas.next_due_in_ms())
            await self._turn()

    @property
    def stopped_lanes(self) -> dict[tuple[int, int], ExchangeOutcome]:
        """The outcomes that stopped lanes, by epoch and lane."""
        return {lane: stop.outcome for lane, stop in self._exchange.lanes.stopped.items()}

    @property
    def is_pausing(self) -> bool:
        """Return whether an exchange failed, and the next one waits for the back-off."""
        return self._pacing.backoff.pause > 0

    def report_now(self) -> None:
        self._pacing.report_now()

    def report_older_epochs(self) -> None:
        """Report older epochs at once: work was committed to a hold in one of them."""
        self._older_epochs.request_report()
        self.report_now()

    def check_region(self) -> None:
        """Ask the coordinator for the region's status at once, though there may be nothing to report."""
        self._pacing.check_region_in(0)
        self.report_now()

    async def _turn(self) -> None:
        incarnation, began_ms = self._epochs.current, self._clock.monotonic_ms()
        try:
            await self._journal.book(incarnation)
            if incarnation is None:
                await self._wait_for_epoch()
            else:
                await self._take_over(incarnation)
                await self._exchange_due(incarnation)
            self._pacing.backoff.succeeded()
            self._metrics.partition.reached_coordinator()
            self._quotas.on_coordinator_reached()
            self._log_recovery()
        except LeaseLost as error:
            self._close_epoch(incarnation, str(error))
        except Fenced:
            self._epochs.invalidate()
        except FAILURES as error:
            self._back_off(error, began_ms)
            if isinstance(error, CoordinatorUnavailable) and incarnation is not None:
                await self._mark_coordinator_lost(incarnation)

    def _back_off(self, error: Exception, began_ms: int) -> None:
        if self.is_pausing or not isinstance(error, NoReply):  # one message may get lost
            self._quotas.on_coordinator_lost()
        self._pacing.backoff.failed(began_ms)
        self._metrics.exchange_failures.inc()
        if isinstance(error, (CoordinatorUnavailable, CoordinatorRefused)):
            is_refused = isinstance(error, CoordinatorRefused)
            self._quotas.contact.failed(self._clock.monotonic_ms(), str(error), is_refused=is_refused)
        log.warning("exchange failed", reason=str(error), next_pause_ms=self._pacing.backoff.pause)

    def _log_recovery(self) -> None:
        failed_ms = self._quotas.contact.reached(self._clock.monotonic_ms())
        if failed_ms is not None:
            log.info("coordinator reached again", failed_ms=failed_ms)

    def _close_epoch(self, incarnation: StoreIncarnation | None, reason: str) -> None:
        """Open another epoch. What this one had outstanding goes to suspense."""
        if incarnation is not None and incarnation == self._epochs.current:
            self._metrics.epochs.lost.inc()
            log.error("epoch closed: the store lost data", epoch=incarnation.epoch, reason=reason)
            self._epochs.on_data_loss(incarnation)

    async def _mark_coordinator_lost(self, incarnation: StoreIncarnation) -> None:
        """Write it into the store for all agents. The first agent that gets an answer takes it back there."""
        with contextlib.suppress(StoreUnavailable, StoreError, Fenced):  # handled by the loops that need the store
            self._metrics.partition.show(await self._scripts.note_coordinator_lost(incarnation))

    async def _wait_for_epoch(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pacing.interval_ms / 1000):
                await self._epochs.established.wait()

    async def _take_over(self, incarnation: StoreIncarnation) -> None:
        """Report older epochs first, for their usage is evidence. In a new incarnation, then take over its leases."""
        self._offer_again(incarnation)
        if self._older_epochs.is_report_requested or self._resumed != incarnation:
            await self._older_epochs.report(incarnation, is_draining=self._quotas.contact.is_draining)
        if self._resumed == incarnation:
            return
        for quota in await self._scripts.leased_quotas(incarnation):
            self._quotas.schedule_renewal(quota, renew_at_ms=0)  # left by an agent that is gone: renewed at once
        self._exchange.resend_all(incarnation)
        self._resumed = incarnation

    def _offer_again(self, incarnation: StoreIncarnation) -> None:
        """Look at all lanes from time to time: an agent that died may have left a batch in a lane that is idle."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._offered_at_ms + self.offer_again_ms:
            self._offered_at_ms = now_ms
            self._exchange.resend_all(incarnation)
            self._older_epochs.request_report()
            self._exchange.lanes.offer_again(now_ms)

    async def _exchange_due(self, incarnation: StoreIncarnation) -> None:
        await self._return_untaken(incarnation)
        now_ms = self._clock.monotonic_ms()
        reports = self._pacing.begin_report(now_ms)
        if reports:
            await self._exchange.resume_resolved_lanes(incarnation)
        requested = _by_lane(incarnation, self._quotas.due(MOST_QUOTAS))
        await self._exchange.run(incarnation, requested, reports=reports)

    async def _return_untaken(self, incarnation: StoreIncarnation) -> None:
        """Return units of central quotas that no request took: a caller that hung up leaves some."""
        for quota in self._quotas.take_surplus():
            if await self._scripts.return_units(incarnation, quota, 0):
                self._pacing.report_with_next_exchange()


def _by_lane(incarnation: StoreIncarnation, quotas: Iterable[str]) -> dict[int, list[str]]:
    by_lane: dict[int, list[str]] = defaultdict(list)
    for quota in quotas:
        by_lane[lane_of(quota, incarnation.lanes)].append(quota)
    return by_lane
