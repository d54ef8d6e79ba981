"""Which incarnation the region's store lives, and the epoch that belongs to it.

A store that restarted, failed over or lost its data is another incarnation, and may have forgotten what it admitted. So
its fingerprint is compared with the one that it has written down; if they differ, a new epoch is opened before
anything is admitted again. The same happens to a store that was put back to an older state below its fingerprint, once
the conversation with the coordinator has shown it.

One store goes on in its epoch: a single one without replicas that fsyncs every write. It must have been so all through
the incarnation before, as that life's fence says, and be so now. Settings can be changed at any moment, so they prove
nothing of the last moment before a crash: in such an epoch each script's reply counts only once the store has said that
what it wrote is on disk (`WAITAOF`). What a crash may lose was never answered.

Of two ends of an epoch it is certain that nothing was forgotten: that of the exempt store where the coordinator ended
its epoch meanwhile, and that of an epoch which another store's has replaced while this one lives on in the same
incarnation. Then the coordinator is told so: what the epoch has left is given back and free at once. Of all others the
worst is assumed.
"""

import asyncio
import secrets
from collections.abc import Callable

import structlog

from protocol.messages import OpenEpoch, RebindEpoch
from protocol.outcomes import EpochRefusal
from regional_agent.cluster.rules.cells import CELLS
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.store.connection import Store, StoreError, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fence, StoreIncarnation

log = structlog.get_logger()

PAUSE_S = 0.1
REFUSED_PAUSE_S = 2.0
WATCH_S = 5.0  # how often the store's settings are looked at
KEEPS_ALL = "noeviction"  # the only eviction policy that loses no lease

# The coordinator's answers after which nobody goes on in an epoch; after the last its data is whole all the same.
_REFUSED = {
    EpochRefusal.NOT_ISSUED,
    EpochRefusal.STORE_BEHIND,
    EpochRefusal.ANOTHER_INCARNATION,
    EpochRefusal.EPOCH_OVER,
}
_UNHEARD_OF = (404, 405)  # by a coordinator of a release before


class EpochManager:
    """Holds the current life. None while there is none: then nothing is admitted."""

    def __init__(
        self,
        store: Store,
        scripts: Scripts,
        coordinator: CoordinatorClient,
        on_established: Callable[[], None],
    ) -> None:
        self._store = store
        self._scripts = scripts
        self._coordinator = coordinator
        self._on_established = on_established
        self._invalidated = asyncio.Event()
        self._invalidated.set()
        self.established = asyncio.Event()
        self.current: StoreIncarnation | None = None
        self._nonce = self._ended_nonce = self._lost_nonce = ""
        self._newest_epoch = 0
        self.is_exempt = False
        self.refused = ""  # why the coordinator opened no epoch, when it was last asked

    def invalidate(self) -> None:
        """The store may live another incarnation: look again. Nothing is admitted until it is known."""
        self.current = None
        self.established.clear()
        self._invalidated.set()

    def on_epoch_closed(self, incarnation: StoreIncarnation) -> None:
        """The epoch is over, though the store lives on: another incarnation begins in the same store."""
        if incarnation == self.current:
            self._ended_nonce = self._nonce
            self.invalidate()

    def on_data_loss(self, incarnation: StoreIncarnation) -> None:
        """The same, for the store has forgotten what it told."""
        if incarnation == self.current:
            self._lost_nonce = self._nonce
            self.on_epoch_closed(incarnation)

    def on_wrong_fingerprint(self, incarnation: StoreIncarnation) -> None:
        """The coordinator knows the epoch under another incarnation. Of this very one the epoch is over."""
        if incarnation.fingerprint == self._store.fingerprint:
            self.on_epoch_closed(incarnation)
        elif incarnation == self.current:
            self.invalidate()

    async def run(self) -> None:
        while True:
            if not await self._is_invalidated():
                await self._watch_settings()
                continue
            self._invalidated.clear()
            if not self._store.connected:
                continue  # a new connection is a new doubt
            try:
                await self._establish()
            except (StoreUnavailable, StoreError, CoordinatorUnavailable) as error:
                log.warning("no epoch yet", reason=str(error))
                await self._again(PAUSE_S)
            except CoordinatorRefused as error:
                log.error("the coordinator refuses this region an epoch", reason=str(error))
                self.refused = error.refusal
                await self._again(error.retry_after_s or REFUSED_PAUSE_S)

    async def _is_invalidated(self) -> bool:
        try:
            async with asyncio.timeout(WATCH_S):
                return await self._invalidated.wait()
        except TimeoutError:
            return False

    @property
    def may_evict(self) -> bool:
        """Whether the store may drop leases to make room. No allowance is admitted by such a store."""
        return self._store.eviction_policy != KEEPS_ALL

    async def _watch_settings(self) -> None:
        """Notice that somebody has changed the settings of the store, or given it a replica."""
        if self.current is None:
            return
        try:
            await self._watch_eviction()
            await self._watch_exemption()
        except (StoreUnavailable, StoreError) as error:
            log.warning("the store's settings cannot be read", reason=str(error))

    async def _watch_eviction(self) -> None:
        before, policy = self._store.eviction_policy, await self._store.read_eviction_policy()
        if policy == before:
            return
        if policy == KEEPS_ALL:
            log.info("allowances are admitted again", maxmemory_policy=policy)
        else:
            log.error("allowances are not admitted: the store may evict leases", maxmemory_policy=policy)

    async def _watch_exemption(self) -> None:
        """End the epoch of a store that does not flush every write any more.

        The ledger refuses to let an ended epoch go on. The fence alone would not do: that it was changed may be lost
        in the next crash, with everything else that was not flushed.
        """
        incarnation = self.current
        if incarnation is not None and self.is_exempt and not await self._store.is_exempt():
            self.is_exempt = False
            log.warning("the store is not exempt any more: another epoch begins", epoch=incarnation.epoch)
            self.on_epoch_closed(incarnation)

    async def _again(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._invalidated.set()

    async def _establish(self) -> None:
        self._store.prove_durability(is_wanted=False)
        # Read anew, for a connection may have outlived its store's place in the topology.
        fingerprint = await self._store.read_fingerprint()
        if fingerprint != self._store.fingerprint:
            self._store.reconnect()
            raise StoreUnavailable("the store changed its life below an open connection")
        fence = await self._begin(fingerprint)
        assert fence.nonce is not None
        self._nonce = fence.nonce
        if fence.epoch is None or fence.lanes is None:
            incarnation = await self._open(fence.nonce, fingerprint, fence.kept_epoch)
        else:
            incarnation = StoreIncarnation(fingerprint, fence.epoch, fence.lanes, self._scripts.cell)
            self.is_exempt = fence.is_exempt
        if 0 < self._newest_epoch < incarnation.epoch:
            log.warning("the store's epoch has ended", epoch=self._newest_epoch, next_epoch=incarnation.epoch)
        self._newest_epoch = incarnation.epoch
        if self._invalidated.is_set():
            raise StoreUnavailable("the store may have begun another incarnation while this one was looked at")
        self._store.prove_durability(is_wanted=self.is_exempt)
        self.current = incarnation
        self.refused = ""
        self.established.set()
        self._on_established()

    async def _open(self, nonce: str, fingerprint: str, whole: int | None) -> StoreIncarnation:
        cell = self._scripts.cell
        request = OpenEpoch(
            nonce=nonce,
            fingerprint=fingerprint,
            previous=whole,
            lost_data=whole is None,
            cell=cell or 0,
            cells=1 if cell is None else CELLS,
        )
        opened = await self._coordinator.open_epoch(request)
        is_exempt = await self._store.is_exempt()
        is_adopted = await self._scripts.adopt_epoch(
            fingerprint, nonce, opened.epoch, opened.lanes, is_exempt=is_exempt, is_whole=opened.is_whole
        )
        if not is_adopted:
            raise StoreUnavailable("the store began another incarnation while its epoch was opened")
        log.info("epoch opened", epoch=opened.epoch, lanes=opened.lanes, whole=whole, is_exempt=is_exempt)
        self.is_exempt = is_exempt
        return StoreIncarnation(fingerprint, opened.epoch, opened.lanes, cell)

    async def _begin(self, fingerprint: str) -> Fence:
        before = await self._scripts.read_fence()
        whole = await self._kept(before, fingerprint)
        fence = await self._scripts.begin_incarnation(fingerprint, secrets.token_hex(16), self._ended_nonce, whole)
        if fence.epoch is not None and fence.epoch < self._newest_epoch:
            # A store to which the address leads again: what it was before it was left does not come back.
            assert fence.nonce is not None
            return await self._scripts.begin_incarnation(fingerprint, secrets.token_hex(16), fence.nonce, fence.epoch)
        return fence

    async def _kept(self, fence: Fence, fingerprint: str) -> int | None:
        """The epoch of that fence, if all that it ever admitted is certainly here."""
        if fence.epoch is None or fence.nonce == self._lost_nonce:
            return None
        if fence.fingerprint == fingerprint:
            return fence.epoch
        return await self._rebind(fence, fingerprint) if fence.is_exempt and await self._store.is_exempt() else None

    async def _rebind(self, fence: Fence, fingerprint: str) -> int | None:
        """Go on in that epoch, if the coordinator lets it. The epoch, if it was kept whole."""
        assert fence.epoch is not None
        assert fence.lanes is not None
        assert fence.nonce is not None
        assert fence.fingerprint is not None
        seqs = await self._scripts.last_seqs(fence.epoch, fence.lanes)
        request = RebindEpoch(nonce=fence.nonce, previous=fence.fingerprint, fingerprint=fingerprint, seqs=seqs)
        try:
            await self._coordinator.rebind_epoch(fence.epoch, request)
        except CoordinatorRefused as refused:
            if refused.refusal not in _REFUSED and refused.status not in _UNHEARD_OF:
                raise
            log.warning("the store does not go on in its epoch", epoch=fence.epoch, reason=str(refused))
            return fence.epoch if refused.refusal == EpochRefusal.EPOCH_OVER else None
        if not await self._scripts.rebind_epoch(fence, fingerprint):
            raise StoreUnavailable("the store began another incarnation while its epoch was rebound")
        log.info("epoch rebound", epoch=fence.epoch)
        return fence.epoch
