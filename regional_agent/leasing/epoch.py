"""The incarnation of the region's store, and the epoch that belongs to it.

A store that restarted, failed over or lost its data is another incarnation, and may have forgotten what it admitted. So
its fingerprint is compared with the one written in its fence. If they differ, a new epoch is opened before anything is
admitted again. The same happens to a store that was put back to an older state below its fingerprint, once an exchange
has shown it.

One kind of store keeps its epoch across a restart: a single one without replicas that fsyncs every write (an *exempt*
store). It must have been so throughout the incarnation before, as its fence says, and be so now. Settings can be
changed at any moment, so they prove nothing of the last moment before a crash: in such an epoch a script's reply counts
only once the store has said that the write is on disk (`WAITAOF`). What a crash may lose was never answered.

Where a setting asks for it, the store's replicas confirm each reply in the same way (`WAIT`). The fingerprint of the
incarnation names them, so the fence and the ledger do, and an agent that knows of others is fenced by every script. If
one of them becomes the primary, it has all that was answered, and proves it: it is named, it has not restarted since,
and it goes on with the former primary's history. When a replica comes or goes, another epoch is opened, which names the
present ones.

Three ends of an epoch certainly forget nothing: the coordinator ended the epoch of an exempt store, another store's
epoch replaced one whose incarnation is still there, or a replica that confirmed every reply was promoted. Then the
coordinator is told that no data was lost: what the epoch has left is returned and free at once. Of all other ends the
worst is assumed.
"""

import asyncio
import secrets
from collections.abc import Callable

import msgspec
import structlog

from protocol.compatibility.releases import RELEASE
from protocol.identifiers import MAX_REPLICAS, links_made_of, name_of, replicas_of, store_of, with_replicas
from protocol.messages import OpenEpoch, PromotedReplica, RebindEpoch
from protocol.outcomes import EpochRefusal
from regional_agent.cluster.rules.cells import CELLS
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.store import keys
from regional_agent.store.connection import KEEPS_ALL, Store, StoreError, StoreUnavailable
from regional_agent.store.durability import Durability, InReplicas, OnDisk, Replicas
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
        *,
        confirms_in_replicas: bool = False,
    ) -> None:
        self._store = store
        self._confirms_in_replicas = confirms_in_replicas
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
        self._confirmed: InReplicas | None = None  # what replicas confirmed to this agent in its last such epoch
        self._confirmed_by = ""  # the fingerprint of that epoch's incarnation
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
        if store_of(incarnation.fingerprint) == self._store.fingerprint:
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
            await self._watch_replicas()
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

    async def _watch_replicas(self) -> None:
        """Open another epoch when other replicas than its own follow the store.

        While one of its own is missing, no reply counts. One that came later may be promoted, and confirmed nothing.
        """
        incarnation = self.current
        if incarnation is None:
            return
        named = replicas_of(incarnation.fingerprint)
        if not named and not self._confirms_in_replicas:
            return
        replicas = await self._store.find_replicas()
        is_complete = not self._confirms_in_replicas or len(named) == min(len(replicas.by_run_id), MAX_REPLICAS)
        if is_complete and _are_linked(incarnation.fingerprint, replicas):
            return
        log.warning("replicas of the store changed: opening another epoch", epoch=incarnation.epoch)
        self.on_epoch_closed(incarnation)
        self._store.reconnect()  # calls that wait for a replica would delay what follows

    async def _retry_after(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._invalidated.set()

    async def _establish(self) -> None:
        # Read again: the connection may have outlived its store's place in the topology.
        fingerprint = await self._store.read_fingerprint()
        if fingerprint != self._store.fingerprint:
            self._store.reconnect()
            raise StoreUnavailable("the store restarted below an open connection")
        fence = await self._begin(fingerprint)
        assert fence.nonce is not None
        self._nonce = fence.nonce
        if fence.epoch is None or fence.lanes is None:
            incarnation = await self._open(fence)
        else:
            assert fence.fingerprint is not None
            incarnation = StoreIncarnation(fence.fingerprint, fence.epoch, fence.lanes, self._scripts.cell)
            self.is_exempt = fence.is_exempt
        durability = await self._durability(incarnation)
        if 0 < self._newest_epoch < incarnation.epoch:
            log.warning("epoch closed", epoch=self._newest_epoch, next_epoch=incarnation.epoch)
        self._newest_epoch = incarnation.epoch
        if self._invalidated.is_set():
            raise StoreUnavailable("the store may have restarted while its fence was read")
        self._store.prove_durability(durability)
        self.current = incarnation
        self.refused = self.fault = ""
        self.established.set()
        self._on_established()

    async def _durability(self, incarnation: StoreIncarnation) -> Durability | None:
        """Return how the store confirms the replies of its epoch. Raise StoreUnavailable if it cannot."""
        if self.is_exempt:
            return OnDisk()
        named = replicas_of(incarnation.fingerprint)
        if not named:
            return None
        replicas = await self._store.find_replicas()
        if not _are_linked(incarnation.fingerprint, replicas):
            self._ended_nonce = self._nonce
            raise StoreUnavailable("a replica that is to confirm the replies of the epoch was linked again, or is gone")
        links = [replicas.by_run_id[run_id] for run_id in named]
        self._confirmed_by = incarnation.fingerprint
        self._confirmed = InReplicas(links, replicas.links_made, self._scripts.confirmed_key)
        return self._confirmed

    async def _open(self, fence: Fence) -> StoreIncarnation:
        fingerprint, nonce, whole, cell = fence.fingerprint, fence.nonce, fence.kept_epoch, self._scripts.cell
        assert fingerprint is not None
        assert nonce is not None
        request = OpenEpoch(
            nonce=nonce,
            fingerprint=fingerprint,
            previous=whole,
            lost_data=whole is None or bool(fence.promoted),  # an older coordinator ignores the proof
            cell=cell or 0,
            cells=1 if cell is None else CELLS,
            promoted=msgspec.json.decode(fence.promoted, type=PromotedReplica) if fence.promoted else None,
        )
        opened = await self._coordinator.open_epoch(request)
        is_exempt = not replicas_of(fingerprint) and await self._store.is_exempt()
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
        identity = await self._identity(before, fingerprint)
        promoted = await self._promotion(before, fingerprint)
        whole = before.epoch if promoted else await self._whole_epoch(before, fingerprint)
        nonce, ended = secrets.token_hex(16), self._ended_nonce
        fence = await self._scripts.begin_incarnation(identity, nonce, ended, whole, promoted)
        _refuse_newer_format(fence)
        if fence.epoch is not None and fence.epoch < self._newest_epoch:
            # The address leads to an older store again: its old epoch does not come back.
            assert fence.nonce is not None
            return await self._scripts.begin_incarnation(identity, secrets.token_hex(16), fence.nonce, fence.epoch)
        return fence

    async def _identity(self, fence: Fence, fingerprint: str) -> str:
        """Return the fingerprint of the store's incarnation, with the replicas that are to confirm its replies.

        What the fence says of this store goes on, whatever this agent's settings are, so that all agents do the same.
        """
        if fence.fingerprint and store_of(fence.fingerprint) == fingerprint and fence.nonce != self._ended_nonce:
            return fence.fingerprint
        if not self._confirms_in_replicas:
            return fingerprint
        replicas = await self._store.find_replicas()
        return with_replicas(fingerprint, sorted(replicas.by_run_id)[:MAX_REPLICAS], replicas.links_made)

    async def _whole_epoch(self, fence: Fence, fingerprint: str) -> int | None:
        """Return the fence's epoch if everything that it ever admitted is certainly in the store."""
        if fence.epoch is None or fence.nonce == self._lost_nonce:
            return None
        if store_of(fence.fingerprint or "") == fingerprint:
            return fence.epoch
        return await self._rebind(fence, fingerprint) if fence.is_exempt and await self._store.is_exempt() else None

    async def _promotion(self, fence: Fence, fingerprint: str) -> str:
        """Return the proof (JSON) that this store is a replica with all that was answered in the fence's epoch, or "".

        Its own word for how far it has the history must not be behind what this agent has seen confirmed.
        """
        is_over = fence.epoch is None or fence.lanes is None or fence.nonce in (None, self._lost_nonce)
        if is_over or not fence.fingerprint or name_of(fingerprint).run_id not in replicas_of(fence.fingerprint):
            return ""
        assert fence.epoch is not None
        assert fence.lanes is not None
        assert fence.nonce is not None
        shared = await self._store.read_shared_history()
        if shared is None or shared.history != name_of(fence.fingerprint).history:
            return ""
        if self._confirmed_offset(fence.fingerprint) > shared.offset:
            log.error("promoted replica lacks writes that it had confirmed", epoch=fence.epoch)
            return ""
        seqs = await self._scripts.last_seqs(fence.epoch, fence.lanes)
        proof = PromotedReplica(nonce=fence.nonce, history=shared.history, offset=shared.offset, seqs=seqs)
        return msgspec.json.encode(proof).decode()

    def _confirmed_offset(self, fingerprint: str) -> int:
        return self._confirmed.confirmed_offset if self._confirmed and self._confirmed_by == fingerprint else 0

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


def _are_linked(fingerprint: str, replicas: Replicas) -> bool:
    """Return whether all replicas that a fingerprint names have followed the store all the time."""
    has_changed = replicas.links_made != links_made_of(fingerprint) and bool(replicas_of(fingerprint))
    return not has_changed and replicas_of(fingerprint).issubset(replicas.by_run_id)


def _refuse_newer_format(fence: Fence) -> None:
    """Raise StoreUnavailable if a newer release has changed the store's keys in a way that this one cannot read."""
    if fence.format > keys.FORMAT:
        raise StoreUnavailable(
            f"the store's keys have the format {fence.format} of a newer release, and this agent (release {RELEASE}) "
            f"knows the format {keys.FORMAT}: upgrade the agent"
        )
