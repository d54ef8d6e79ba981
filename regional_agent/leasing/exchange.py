"""One exchange: freeze the batches of its lanes, call the coordinator, settle the replies.

A batch is frozen in the store before it is sent. It stays there, byte for byte, until its receipt arrives: an agent may
die at any point, and this or any other agent of the region sends the same bytes again. One call is under way at a time.
It takes along all lanes that have something to report or to request.
"""

import asyncio
from collections.abc import Sequence

from protocol.clock import Clock
from regional_agent.leasing.coordinator_client import CoordinatorClient
from regional_agent.leasing.delivery import Delivery, split_into_calls
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.lane_faults import FrozenLane, LaneFaults
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.lanes import LaneId, Lanes
from regional_agent.leasing.settlement import Settlement
from regional_agent.metrics import AgentMetrics
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation
from regional_agent.traces.agent_traces import AgentTraces

MOST_QUOTAS = 100
MOST_ROUNDS = 10_000
# A batch takes along the reports that are due so soon after it: keys of one lane are then reported together.
TAKEN_ALONG_MS = 10_000
EVERYTHING_MS = 10**12  # more than any report waits


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
        traces: AgentTraces | None = None,
    ) -> None:
        self._traces = traces
        self._scripts = scripts
        self._quotas = quotas
        self._epochs = epochs
        self._pacing = pacing
        self._clock = clock
        self.lanes = Lanes()
        self._unreported_since_ms: dict[LaneId, int] = {}  # the oldest usage that is not booked, of lanes that have any
        self.faults = LaneFaults(self.lanes, quotas, epochs, metrics, clock)
        self.settlement = Settlement(scripts, quotas, epochs, self.lanes, self.faults, pacing, metrics)
        self.delivery = Delivery(coordinator, self.settlement, quotas, self.faults, pacing, metrics, clock, traces)

    def unreported_ms(self) -> int:
        """Return the age of the oldest usage that is not booked, as far as it is due; 0 if there is none."""
        now_ms = self._clock.monotonic_ms()
        return max((now_ms - since_ms for since_ms in self._unreported_since_ms.values()), default=0)

    async def run(
        self,
        incarnation: StoreIncarnation,
        requested: dict[int, list[str]],
        *,
        reports: bool,
        taken_along_ms: int = TAKEN_ALONG_MS,
    ) -> bool:
        """Exchange for all lanes that have something to send. Return False if there was nothing.

        `requested` has the quotas to request grants of, by lane. With `reports`, every lane is looked at.
        """
        lanes = range(incarnation.lanes) if reports else sorted({*requested, *self.lanes.unacknowledged})
        freezing = (self._freeze(incarnation, lane, requested.get(lane, []), taken_along_ms) for lane in lanes)
        frozen = await asyncio.gather(*freezing)
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
            if not await self.run(incarnation, {}, reports=True, taken_along_ms=EVERYTHING_MS):
                return

    async def resume_resolved_lanes(self, incarnation: StoreIncarnation) -> None:
        """Resume stopped lanes whose batch was accepted meanwhile: then the store's number is another one."""
        for (epoch, lane), stop in list(self.lanes.stopped.items()):
            stopped = incarnation._replace(epoch=epoch, lanes=max(incarnation.lanes, lane + 1))
            if await self._scripts.frozen_seq(stopped, lane) != stop.seq:
                self.faults.resume(stopped, lane)

    async def _freeze(
        self, incarnation: StoreIncarnation, lane: int, requested: list[str], taken_along_ms: int
    ) -> FrozenLane | None:
        now_ms = self._clock.monotonic_ms()
        if not self.lanes.may_send((incarnation.epoch, lane), now_ms):
            self._refuse_requests(requested, self.lanes.paused_for_ms((incarnation.epoch, lane), now_ms))
            return None
        is_sending = bool(requested) or (lane == 0 and self._pacing.begin_region_check())
        takes_along = is_sending or taken_along_ms == EVERYTHING_MS
        due = await self._due_quotas(incarnation, lane, taken_along_ms, is_sending=takes_along)
        if not (due or is_sending or await self._awaits_receipt(incarnation, lane)):
            return None
        quotas = [*due, *(quota for quota in requested if quota not in due)]
        batch = await self._scripts.freeze(incarnation, lane, quotas)
        if incarnation == self._epochs.current:
            for quota, units in batch.held.items():
                self._quotas.set_held(quota, units)
        causes = self._traces.usage.take(quotas) if self._traces else ()
        return FrozenLane(lane, batch, requested, causes)

    async def _due_quotas(
        self, incarnation: StoreIncarnation, lane: int, taken_along_ms: int, *, is_sending: bool
    ) -> Sequence[str]:
        due = await self._scripts.due_quotas(
            incarnation, lane, MOST_QUOTAS, is_sending=is_sending, taken_along_ms=taken_along_ms
        )
        if due.oldest_ms:
            self._unreported_since_ms[incarnation.epoch, lane] = self._clock.monotonic_ms() - due.oldest_ms
        else:
            self._unreported_since_ms.pop((incarnation.epoch, lane), None)
        return due.quotas

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
