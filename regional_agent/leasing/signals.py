"""The listener on the coordinator's event stream.

A signal is a hint: it never carries state. A lost signal costs time only, for the next exchange says the same.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from protocol.messages import Signal
from regional_agent.cluster.cell import Cell
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.types import Fenced

log = structlog.get_logger()

PAUSE_S = 0.2
LOG_AGAIN_S = 60.0


class SignalListener:
    def __init__(
        self, *, coordinator: CoordinatorClient, cells: Sequence[Cell], cell_of: Callable[[str], Cell]
    ) -> None:
        self._coordinator = coordinator
        self._cells = cells
        self._cell_of = cell_of
        self._failed_attempts = 0  # since the last signal
        self._logged_at_s = -LOG_AGAIN_S

    async def run(self) -> None:
        while True:
            try:
                async for signal in self._coordinator.signals():
                    self._log_recovery()
                    await self._handle(signal)
            except (CoordinatorUnavailable, CoordinatorRefused) as error:
                self._log_loss(str(error))
            await asyncio.sleep(PAUSE_S)

    def _log_loss(self, reason: str) -> None:
        """Log the first failure, and then one line a minute for all attempts."""
        now_s = asyncio.get_running_loop().time()
        self._failed_attempts += 1
        if now_s >= self._logged_at_s + LOG_AGAIN_S:
            log.warning("signal stream lost", reason=reason, failed_attempts=self._failed_attempts)
            self._logged_at_s = now_s

    def _log_recovery(self) -> None:
        if self._failed_attempts:
            log.info("signal stream reconnected", failed_attempts=self._failed_attempts)
            self._failed_attempts, self._logged_at_s = 0, -LOG_AGAIN_S

    async def _handle(self, signal: Signal) -> None:
        if signal.kind == "recall" and signal.quota is not None:
            await self._answer_recall(self._cell_of(signal.quota), signal.quota, signal.keep)
        elif signal.kind == "grant" and signal.quota is not None:
            self._cell_of(signal.quota).quotas.retry(signal.quota)
        elif signal.kind == "fetch" and signal.quota is not None:
            self._cell_of(signal.quota).quotas.fetch(signal.quota)
        elif signal.kind == "rate" and signal.quota is not None:
            self._cell_of(signal.quota).share_loop.request_report(signal.quota)
        elif signal.kind == "drain":
            for cell in self._cells:
                cell.exchange_loop.check_region()
        elif signal.kind in ("grant", "policies"):
            for cell in self._cells:
                cell.quotas.retry_all()  # a limit may have been raised

    async def _answer_recall(self, cell: Cell, quota: str, keep: int) -> None:
        """Return idle units, and report at once even if there are none: what was spent is booked."""
        incarnation = cell.epochs.current
        if incarnation is None:
            return
        try:
            await cell.exchange.settlement.answer_recall(incarnation, quota, keep)
        except Fenced:
            cell.epochs.invalidate()
        except (StoreUnavailable, StoreError) as error:
            log.warning("recall failed", quota=quota, reason=str(error))
        cell.exchange_loop.report_now()
