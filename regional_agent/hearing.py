"""What the agent hears without asking: hints from the coordinator.

A hint never carries truth. One that is lost costs time, for the next exchange says the same.
"""

import asyncio

import structlog

from protocol.messages import Signal
from regional_agent.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.leasing import Leasing
from regional_agent.life import LifeKeeper
from regional_agent.reporting import Conversation
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import Fenced, Scripts

log = structlog.get_logger()

PAUSE_S = 0.2


class SignalListener:
    def __init__(
        self,
        *,
        coordinator: CoordinatorClient,
        scripts: Scripts,
        life: LifeKeeper,
        leasing: Leasing,
        conversation: Conversation,
    ) -> None:
        self._coordinator = coordinator
        self._scripts = scripts
        self._life = life
        self._leasing = leasing
        self._conversation = conversation

    async def run(self) -> None:
        while True:
            try:
                async for signal in self._coordinator.signals():
                    await self._heed(signal)
            except (CoordinatorUnavailable, CoordinatorRefused) as error:
                log.warning("signals are silent", reason=str(error))
            await asyncio.sleep(PAUSE_S)

    async def _heed(self, signal: Signal) -> None:
        if signal.kind == "recall" and signal.quota is not None:
            await self._give_back(signal.quota, signal.keep)
        elif signal.kind == "grant":
            self._leasing.hint(signal.quota)
        elif signal.kind == "policies":
            self._leasing.hint(None)  # a limit may have been raised

    async def _give_back(self, quota: str, keep: int) -> None:
        """A recall is always answered, even where there is nothing to give: what was spent is booked at once."""
        life = self._life.current
        if life is None:
            return
        try:
            await self._scripts.give_back(life, quota, keep)
        except Fenced:
            self._life.doubt()
        except (StoreUnavailable, StoreError) as error:
            log.warning("a recall could not be answered", quota=quota, reason=str(error))
        self._conversation.report_now()
