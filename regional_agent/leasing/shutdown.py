"""The last exchanges of an agent that stops: report what was spent and, if it is set to, return the rest."""

import asyncio

import structlog
import tenacity

from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.exchange import LaneExchange
from regional_agent.leasing.exchange_loop import FAILURES
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced
from regional_agent.store_outage.booking import JournalBooking

log = structlog.get_logger()

TIMEOUT_S = 6.0  # of one attempt with its retries
HELD_PAUSE_S = 0.2
RETRY_S = 0.2


class Shutdown:
    def __init__(
        self,
        *,
        scripts: Scripts,
        exchange: LaneExchange,
        quotas: Quotas,
        epochs: EpochManager,
        journal: JournalBooking,
        pacing: Pacing,
    ) -> None:
        self._scripts = scripts
        self._exchange = exchange
        self._quotas = quotas
        self._epochs = epochs
        self._journal = journal
        self._pacing = pacing
        self.timeout_s = TIMEOUT_S

    async def run(self, *, return_unspent: bool) -> None:
        """Report everything. With `return_unspent`, wait until all holds have ended, and return everything."""
        held = await self._finish_in_time(return_unspent=return_unspent)
        if held:
            log.info("shutdown waits for open holds", units=held, cell=self._scripts.cell)
        while held:
            await asyncio.sleep(HELD_PAUSE_S)
            held = await self._finish_in_time(return_unspent=return_unspent)

    async def _finish_in_time(self, *, return_unspent: bool) -> int:
        """Retry `finish` until it succeeds or time is up. Return the units that are still held."""
        finish = tenacity.retry(
            retry=tenacity.retry_if_exception_type((*FAILURES, Fenced)),
            wait=tenacity.wait_fixed(RETRY_S),
            sleep=asyncio.sleep,
        )(self.finish)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await finish(return_unspent=return_unspent)
        except TimeoutError:
            log.error("shutdown timed out: unreported usage stays in the store", cell=self._scripts.cell)
            return 0

    async def finish(self, *, return_unspent: bool) -> int:
        """Book what was spent, and return the rest if wanted. Return the units that are held, and so stay."""
        incarnation = self._epochs.current
        self._pacing.wait_longest_for_replies()
        await self._journal.book_last(incarnation)
        if incarnation is None:
            return 0
        if return_unspent:
            await self._exchange.settlement.return_everything(incarnation)
        for quota in self._quotas.central_quotas():
            await self._scripts.return_units(incarnation, quota, 0)
        await self._exchange.report_everything(incarnation)
        return await self._scripts.held_units(incarnation) if return_unspent else 0
