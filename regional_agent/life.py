"""Which life the region's store lives, and the epoch that belongs to it.

A store that restarted, failed over or lost its data lives another life, and may have forgotten what it admitted. So
its fingerprint is compared with the one that it has written down; if they differ, a new epoch is opened before
anything is admitted again. The same happens to a store that was put back to an older state below its fingerprint, once
the conversation with the coordinator has shown it.
"""

import asyncio
import secrets

import structlog

from regional_agent.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.store.connection import StoreConnection, StoreError, StoreUnavailable
from regional_agent.store.scripts import Fence, Life, Scripts

log = structlog.get_logger()

PAUSE_S = 0.1
REFUSED_PAUSE_S = 2.0


class LifeKeeper:
    """Holds the current life. None while there is none: then nothing is admitted."""

    def __init__(self, store: StoreConnection, scripts: Scripts, coordinator: CoordinatorClient) -> None:
        self._store = store
        self._scripts = scripts
        self._coordinator = coordinator
        self._doubted = asyncio.Event()
        self._doubted.set()
        self.established = asyncio.Event()
        self.current: Life | None = None
        self._nonce = self._lost_nonce = ""
        self._newest_epoch = 0

    def doubt(self) -> None:
        """The store may live another life: look again. Nothing is admitted until it is known."""
        self.current = None
        self.established.clear()
        self._doubted.set()

    def lost(self, life: Life) -> None:
        """The store has forgotten what it told in this life: it is over, and another begins in the same store."""
        if life == self.current:
            self._lost_nonce = self._nonce
            self.doubt()

    async def run(self) -> None:
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            if not self._store.connected:
                continue  # a new connection is a new doubt
            try:
                await self._establish()
            except (StoreUnavailable, StoreError, CoordinatorUnavailable) as error:
                log.warning("no epoch yet", reason=str(error))
                await self._again(PAUSE_S)
            except CoordinatorRefused as error:
                log.error("the coordinator refuses this region an epoch", reason=str(error))
                await self._again(REFUSED_PAUSE_S)

    async def _again(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._doubted.set()

    async def _establish(self) -> None:
        # Read anew, for a connection may have outlived its store's place in the topology.
        fingerprint = await self._store.read_fingerprint()
        if fingerprint != self._store.fingerprint:
            self._store.reconnect()
            raise StoreUnavailable("the store changed its life below an open connection")
        fence = await self._begin(fingerprint)
        assert fence.nonce is not None
        self._nonce = fence.nonce
        if fence.epoch is None or fence.lanes is None:
            opened = await self._coordinator.open_epoch(fence.nonce, fingerprint)
            if not await self._scripts.adopt_epoch(fingerprint, fence.nonce, opened.epoch, opened.lanes):
                raise StoreUnavailable("the store began another life while its epoch was opened")
            log.info("epoch opened", epoch=opened.epoch, lanes=opened.lanes)
            self.current = Life(fingerprint, opened.epoch, opened.lanes)
        else:
            self.current = Life(fingerprint, fence.epoch, fence.lanes)
        self._newest_epoch = self.current.epoch
        self.established.set()

    async def _begin(self, fingerprint: str) -> Fence:
        fence = await self._scripts.begin_life(fingerprint, secrets.token_hex(16), self._lost_nonce)
        if fence.nonce is not None and fence.epoch is not None and fence.epoch < self._newest_epoch:
            # A store to which the address leads again: what it was before it was left does not come back.
            return await self._scripts.begin_life(fingerprint, secrets.token_hex(16), fence.nonce)
        return fence
