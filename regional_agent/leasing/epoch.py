"""The incarnation of the region's store, and the epoch that belongs to it.

A store that restarted, failed over or lost its data is another incarnation, and may have forgotten what it admitted. So
its fingerprint is compared with the one written in its fence. If they differ, a new epoch is opened before anything is
admitted again. The same happens to a store that was put back to an older state below its fingerprint, once an exchange
has shown it.

One kind of store keeps its epoch across a restart: a single one without replicas that fsyncs every write (an *exempt*
store). It must have been so throughout the incarnation before, as its fence says, and be so now. Settings can be
changed at any moment, so they prove nothing of the last moment before a crash: in such an epoch a script's reply counts
only once the store has said that the write is on disk (`WAITAOF`). What a crash may lose was never answered.

Two ends of an epoch certainly forget nothing: the coordinator ended the epoch of an exempt store, or another store's
epoch replaced one whose incarnation is still there. Then the coordinator is told that no data was lost: what the epoch
has left is returned and free at once. Of all other ends the worst is assumed.
"""

import asyncio
import secrets
from collections.abc import Callable

import structlog

from protocol.compatibility.releases import RELEASE
from protocol.messages import OpenEpoch, RebindEpoch
from protocol.outcomes import EpochRefusal
from regional_agent.cluster.rules.cells import CELLS
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.store import keys
from regional_agent.store.connection import KEEPS_ALL, Store, StoreError, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fence, StoreIncarnation

log = structlog.get_logger()

PAUSE_S = 0.1
REFUSED_PAUSE_S = 2.0
WATCH_S = 5.0  # how often the store's settings are looked at

# Refusals after which the epoch does not go on. After EPOCH_OVER its data is whole all the same.
_REBIND_REFUSED = {
    EpochRefusal.NOT_ISSUED,
    EpochRefusal.STORE_BEHIND,
    EpochRefusal.ANOTHER_INCARNATION,
    EpochRefusal.EPOCH_OVER,
}
_NOT_FOUND = (404, 405)  # a coordinator of an older release


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
        self.refused = ""  # why the coordinator opened no epoch at the last attempt
        self.fault = ""  # why there was none at the last attempt, in words

    def invalidate(self) -> None:
        """Look at the fence again: the store may be another incarnation. Nothing is admitted until it is known."""
        self.current = None
        self.established.clear()
        self._invalidated.set()

    def on_epoch_closed(self, incarnation: StoreIncarnation) -> None:
        """Begin another incarnation in the same store: the epoch is closed, though the store has not restarted."""
        if incarnation == self.current:
            self._ended_nonce = self._nonce
            self.invalidate()

    def on_data_loss(self, incarnation: StoreIncarnation) -> None:
        """Begin another incarnation, and report lost data: the store has forgotten what it reported."""
        if incarnation == self.current:
            self._lost_nonce = self._nonce
            self.on_epoch_closed(incarnation)

    def on_wrong_fingerprint(self, incarnation: StoreIncarnation) -> None:
        """Act on the coordinator's answer that the epoch belongs to another incarnation.

        If the exchange came from this very incarnation, its epoch is closed.
        """
        if incarnation.fingerprint == self._store.fingerprint:
            self.on_epoch_closed(incarnation)
        elif incarnation == self.current:
            self.invalidate()

    async def run(self) -> None:
        while True:
            if not await self._wait_for_invalidation():
                await self._watch_settings()
                continue
            self._invalidated.clear()
            if not self._store.connected:
                continue  # a new connection invalidates again
            try:
                await self._establish()
            except (StoreUnavailable, StoreError, CoordinatorUnavailable) as error:
                self.fault = str(error)
                log.warning("no epoch yet", reason=self.fault)
                await self._retry_after(PAUSE_S)
            except CoordinatorRefused as error:
                log.error("epoch refused by the coordinator", reason=str(error))
                self.refused, self.fault = error.refusal, str(error)
                await self._retry_after(error.retry_after_s or REFUSED_PAUSE_S)

    async def _wait_for_invalidation(self) -> bool:
        try:
            async with asyncio.timeout(WATCH_S):
                return await self._invalidated.wait()
        except TimeoutError:
            return False

    @property
    def may_evict(self) -> bool:
        """Return whether the store may evict leases. Such a store admits no allowance."""
        return self._store.eviction_policy != KEEPS_ALL

    async def _watch_settings(self) -> None:
        """Notice changed settings of the store, or a new replica."""
        if self.current is None:
            return
        try:
            await self._watch_eviction()
            await self._watch_exemption()
        except (StoreUnavailable, StoreError) as error:
            log.warning("store settings unreadable", reason=str(error))

    async def _watch_eviction(self) -> None:
        before, policy = self._store.eviction_policy, await self._store.read_eviction_policy()
        if policy == before:
            return
        if policy == KEEPS_ALL:
            log.info("store eviction policy restored: allowances are admitted", maxmemory_policy=policy)
        else:
            log.error("store may evict leases: allowances are not admitted", maxmemory_policy=policy)

    async def _watch_exemption(self) -> None:
        """Close the epoch of a store that does not fsync every write any more.

        The ledger refuses to rebind a closed epoch. A mark in the fence would not do: the next crash may lose it, with
        everything else that was not fsynced.
        """
        incarnation = self.current
        if incarnation is not None and self.is_exempt and not await self._store.is_exempt():
            self.is_exempt = False
            log.warning("store no longer fsyncs every write: opening another epoch", epoch=incarnation.epoch)
            self.on_epoch_closed(incarnation)

    async def _retry_after(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._invalidated.set()

    async def _establish(self) -> None:
        self._store.prove_durability(is_wanted=False)
        # Read again: the connection may have outlived its store's place in the topology.
        fingerprint = await self._store.read_fingerprint()
        if fingerprint != self._store.fingerprint:
            self._store.reconnect()
            raise StoreUnavailable("the store restarted below an open connection")
        fence = await self._begin(fingerprint)
        assert fence.nonce is not None
        self._nonce = fence.nonce
        if fence.epoch is None or fence.lanes is None:
            incarnation = await self._open(fence.nonce, fingerprint, fence.kept_epoch)
        else:
            incarnation = StoreIncarnation(fingerprint, fence.epoch, fence.lanes, self._scripts.cell)
            self.is_exempt = fence.is_exempt
        if 0 < self._newest_epoch < incarnation.epoch:
            log.warning("epoch closed", epoch=self._newest_epoch, next_epoch=incarnation.epoch)
        self._newest_epoch = incarnation.epoch
        if self._invalidated.is_set():
            raise StoreUnavailable("the store may have restarted while its fence was read")
        self._store.prove_durability(is_wanted=self.is_exempt)
        self.current = incarnation
        self.refused = self.fault = ""
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
            raise StoreUnavailable("the store restarted while its epoch was opened")
        log.info("epoch opened", epoch=opened.epoch, lanes=opened.lanes, whole=whole, is_exempt=is_exempt)
        self.is_exempt = is_exempt
        return StoreIncarnation(fingerprint, opened.epoch, opened.lanes, cell)

    async def _begin(self, fingerprint: str) -> Fence:
        before = await self._scripts.read_fence()
        _refuse_newer_format(before)
        whole = await self._whole_epoch(before, fingerprint)
        fence = await self._scripts.begin_incarnation(fingerprint, secrets.token_hex(16), self._ended_nonce, whole)
        _refuse_newer_format(fence)
        if fence.epoch is not None and fence.epoch < self._newest_epoch:
            # The address leads to an older store again: its old epoch does not come back.
            assert fence.nonce is not None
            return await self._scripts.begin_incarnation(fingerprint, secrets.token_hex(16), fence.nonce, fence.epoch)
        return fence

    async def _whole_epoch(self, fence: Fence, fingerprint: str) -> int | None:
        """Return the fence's epoch if everything that it ever admitted is certainly in the store."""
        if fence.epoch is None or fence.nonce == self._lost_nonce:
            return None
        if fence.fingerprint == fingerprint:
            return fence.epoch
        return await self._rebind(fence, fingerprint) if fence.is_exempt and await self._store.is_exempt() else None

    async def _rebind(self, fence: Fence, fingerprint: str) -> int | None:
        """Rebind the fence's epoch, if the coordinator lets it. Return the epoch if its data is whole."""
        assert fence.epoch is not None
        assert fence.lanes is not None
        assert fence.nonce is not None
        assert fence.fingerprint is not None
        seqs = await self._scripts.last_seqs(fence.epoch, fence.lanes)
        request = RebindEpoch(nonce=fence.nonce, previous=fence.fingerprint, fingerprint=fingerprint, seqs=seqs)
        try:
            await self._coordinator.rebind_epoch(fence.epoch, request)
        except CoordinatorRefused as refused:
            if refused.refusal not in _REBIND_REFUSED and refused.status not in _NOT_FOUND:
                raise
            log.warning("epoch rebind refused", epoch=fence.epoch, reason=str(refused))
            return fence.epoch if refused.refusal == EpochRefusal.EPOCH_OVER else None
        if not await self._scripts.rebind_epoch(fence, fingerprint):
            raise StoreUnavailable("the store restarted while its epoch was rebound")
        log.info("epoch rebound", epoch=fence.epoch)
        return fence.epoch


def _refuse_newer_format(fence: Fence) -> None:
    """Raise StoreUnavailable if a newer release has changed the store's keys in a way that this one cannot read."""
    if fence.format > keys.FORMAT:
        raise StoreUnavailable(
            f"the store's keys have the format {fence.format} of a newer release, and this agent (release {RELEASE}) "
            f"knows the format {keys.FORMAT}: upgrade the agent"
        )
