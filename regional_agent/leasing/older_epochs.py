"""The epochs that the region's store had before: they are reported to the end, and then forgotten.

Units that are held in an older epoch stay reserved until each hold has ended. No script admits in it any more, so
everything that is not held is returned.
"""

from regional_agent.leasing.exchange import LaneExchange
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation


class OlderEpochs:
    def __init__(self, scripts: Scripts, exchange: LaneExchange) -> None:
        self._scripts = scripts
        self._exchange = exchange
        self._requests = 0  # how often there was a reason to report them
        self._reported_requests = -1

    def request_report(self) -> None:
        """Report them with the next turn: one may have usage again, for a hold in it was committed."""
        self._requests += 1

    @property
    def is_report_requested(self) -> bool:
        return self._requests != self._reported_requests

    async def report(self, incarnation: StoreIncarnation, *, is_draining: bool) -> None:
        """Report all older epochs, and forget those of which nothing is left."""
        requests = self._requests
        for older in await self._scripts.older_epochs(incarnation):
            held = await self._scripts.held_units(older)  # read before the epoch is closed: holds may end meanwhile
            await self._close(older)
            if not held and not self._exchange.lanes.has_stopped(older.epoch):
                await self._scripts.forget_epoch(older)
        if is_draining:
            await self._exchange.settlement.return_everything(incarnation)
        self._reported_requests = requests

    async def _close(self, older: StoreIncarnation) -> None:
        """Return what is idle and report the final totals. A reply that says that more was granted returns that too."""
        await self._exchange.settlement.return_everything(older)
        await self._exchange.report_everything(older)
