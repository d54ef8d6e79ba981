"""One exchange: freeze the batches of its lanes, call the coordinator, settle the replies.

A batch is frozen in the store before it is sent. It stays there, byte for byte, until its receipt arrives: an agent may
die at any point, and this or any other agent of the region sends the same bytes again. One call is under way at a time.
It takes along all lanes that have something to report or to request.
"""

import asyncio

from protocol.clock import Clock
from regional_agent.leasing.coordinator_client import CoordinatorClient
from regional_agent.leasing.delivery import Delivery, split_into_calls
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.lane_faults import FrozenLane, LaneFaults
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.lanes import Lanes
from regional_agent.leasing.settlement import Settlement
from regional_agent.metrics import AgentMetrics
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation

MOST_QUOTAS = 100
MOST_ROUNDS = 10_000


class LaneExchange:
    def __init__(
        self,
        *,
        scripts: Scripts,
        coordinator: CoordinatorClient,
        quotas: Quotas,
        epochs: EpochManager,
        pacing: Pacing,
        metrics: AgentMetrics,
        clock: Clock,
    ) -> None:
        self._scripts = scripts
        self._quotas = quotas
        self._epochs = epochs
        self._pacing = pacing
        self._clock = clock
        self.lanes = Lanes()
        self.faults = LaneFaults(self.lanes, quotas, epochs, metrics, clock)
        self.settlement = Settlement(scripts, quotas, epochs, self.lanes, self.faults, pacing, metrics)
        self.delivery = Delivery(coordinator, self.settlement, quotas, self.faults, pacing, metrics, clock)

    async def run(self, incarnation: StoreIncarnation, requested: dict[int, list[str]], *, reports: bool) -> bool:
        """Exchange for all lanes that have something to send. Return False if there was nothing.

        `requested` has the quotas to request grants of, by lane. With `reports`, every lane is looked at.
        """
        lanes = range(incarnation.lanes) if reports else sorted({*requested, *self.lanes.unacknowledged})
        frozen = await asyncio.gather(*(self._freeze(incarnation, lane, requested.get(lane, [])) for lane in lanes))
        frozen_lanes = [each for each in frozen if each is not None]
        if not frozen_lanes:
            return False
        self.lanes.unacknowledged |= {each.lane for each in frozen_lanes}
        for call in split_into_calls(frozen_lanes):
            await self.delivery.deliver(incarnation, call)
        return True

    def resend_all(self, incarnation: StoreIncarnation) -> None:
        """Look at every lane for a batch that an agent of the region left without a receipt."""
        self.lanes.unacknowledged = set(range(incarnation.lanes))

    async def report_everything(self, incarnation: StoreIncarnation) -> None:
        for _ in range(MOST_ROUNDS):
            # Each round looks at every lane: another agent may have frozen a batch meanwhile, and died with it.
            self.resend_all(incarnation)
            if not await self.run(incarnation, {}, reports=True):
                return

    async def resume_resolved_lanes(self, incarnation: StoreIncarnation) -> None:
        """Resume stopped lanes whose batch was accepted meanwhile: then the store's number is another one."""
        for (epoch, lane), stop in list(self.lanes.stopped.items()):
            stopped = incarnation._replace(epoch=epoch, lanes=max(incarnation.lanes, lane + 1))
            if await self._scripts.frozen_seq(stopped, lane) != stop.seq:
                self.faults.resume(stopped, lane)

    async def _freeze(self, incarnation: StoreIncarnation, lane: int, requested: list[str]) -> FrozenLane | None:
        now_ms = self._clock.monotonic_ms()
        if not self.lanes.may_send((incarnation.epoch, lane), now_ms):
            self._refuse_requests(requested, self.lanes.paused_for_ms((incarnation.epoch, lane), now_ms))
            return None
        dirty = await self._scripts.dirty_quotas(incarnation, lane, MOST_QUOTAS)
        checks_region = lane == 0 and self._pacing.begin_region_check()
        if not (dirty or requested or checks_region or await self._awaits_receipt(incarnation, lane)):
            return None
        quotas = [*dirty, *(quota for quota in requested if quota not in dirty)]
        batch = await self._scripts.freeze(incarnation, lane, quotas)
        if incarnation == self._epochs.current:
            for quota, units in batch.held.items():
                self._quotas.set_held(quota, units)
        return FrozenLane(lane, batch, requested)

    def _refuse_requests(self, requested: list[str], paused_for_ms: int) -> None:
        """Answer the grant requests of a lane that pauses, or has stopped."""
        for quota in requested:
            if paused_for_ms:
                self._quotas.postpone(quota, paused_for_ms)
            else:
                self._quotas.on_lane_stopped(quota)

    async def _awaits_receipt(self, incarnation: StoreIncarnation, lane: int) -> bool:
        awaits = lane in self.lanes.unacknowledged and await self._scripts.frozen_seq(incarnation, lane) is not None
        if not awaits:
            self.lanes.unacknowledged.discard(lane)
        return awaits
