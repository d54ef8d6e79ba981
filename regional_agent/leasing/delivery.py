"""The call that carries frozen batches to the coordinator.

A call that is refused as a whole is halved until the lane, or the grant request, that is at fault stands alone. That
one is set aside, and the rest goes on.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from protocol.clock import Clock
from protocol.messages import Exchange, ExchangeRequest, ExchangeResponse, LiveState
from protocol.outcomes import ExchangeOutcome
from regional_agent.leasing.coordinator_client import (
    CoordinatorClient,
    CoordinatorFailed,
    CoordinatorRefused,
)
from regional_agent.leasing.lane_faults import FrozenLane, LaneFaults
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.reply_timeout import reply_timeout_ms
from regional_agent.leasing.settlement import Settlement
from regional_agent.metrics import AgentMetrics
from regional_agent.store.types import StoreIncarnation
from regional_agent.traces.agent_traces import AgentTraces

MOST_CALL_BYTES = 4 * 1024 * 1024  # of frozen batches in one call: the coordinator reads 16 MiB
# After this many answers of 500 in a row, and then every eighth time, the parts of the message are tried one by one.
SUSPICIOUS_FAILURES, TRY_PARTS_EVERY = 2, 8
PAUSE_AFTER_FAILURE_MS = 30_000  # of a lane that alone is answered with 500


Culprit = tuple[FrozenLane, CoordinatorRefused | CoordinatorFailed]


class Delivery:
    def __init__(
        self,
        coordinator: CoordinatorClient,
        settlement: Settlement,
        quotas: Quotas,
        faults: LaneFaults,
        pacing: Pacing,
        metrics: AgentMetrics,
        clock: Clock,
        traces: AgentTraces | None = None,
    ) -> None:
        self._traces = traces
        self._coordinator = coordinator
        self._settlement = settlement
        self._quotas = quotas
        self._faults = faults
        self._pacing = pacing
        self._metrics = metrics
        self._clock = clock
        self._failures = 0  # answers of 500 in a row

    async def deliver(self, incarnation: StoreIncarnation, frozen_lanes: list[FrozenLane]) -> None:
        """Deliver one call and settle its replies. Set aside what it is refused for."""
        doubts_itself = (self._failures + 1) % TRY_PARTS_EVERY == SUSPICIOUS_FAILURES
        try:
            culprits = await self._deliver_or_halve(incarnation, frozen_lanes, doubts_itself=doubts_itself)
        except CoordinatorFailed:
            self._failures += 1
            raise
        if len(culprits) == len(frozen_lanes) and isinstance(culprits[0][1], CoordinatorFailed):
            self._failures += 1
            raise culprits[0][1]  # all lanes fail alike: it is an outage, and none of them is the cause
        for frozen, error in culprits:
            if isinstance(error, CoordinatorFailed):
                self._faults.pause(incarnation, frozen, PAUSE_AFTER_FAILURE_MS, str(error))
            else:
                self._faults.refuse(incarnation, frozen, ExchangeOutcome.REFUSED, reason=str(error))
        self._failures = 0

    async def _deliver_or_halve(
        self, incarnation: StoreIncarnation, frozen_lanes: list[FrozenLane], *, doubts_itself: bool
    ) -> list[Culprit]:
        """Halve a call that is refused as a whole, until a lane stands alone, and then its grant requests.

        Return the lanes whose batch is refused even alone. A grant request that is refused alone is set aside. With
        `doubts_itself` an answer of 500 counts as a refusal: the coordinator may have a fault with this call only.
        """
        halve = partial(self._deliver_or_halve, incarnation, doubts_itself=doubts_itself)
        try:
            response, sent_ms = await self._call(incarnation, frozen_lanes)
        except (CoordinatorRefused, CoordinatorFailed) as error:
            if not (error.is_about_content if isinstance(error, CoordinatorRefused) else doubts_itself):
                raise
            if len(frozen_lanes) > 1:
                middle = len(frozen_lanes) // 2
                return await halve(frozen_lanes[:middle]) + await halve(frozen_lanes[middle:])
            [frozen] = frozen_lanes
            if not frozen.requested:
                return [(frozen, error)]
            culprits = await halve([frozen.with_half_of_requests()])
            if len(frozen.requested) == 1 and not culprits:
                self._faults.set_quota_aside(frozen.requested[0], str(error))
            return culprits
        await self._settlement.settle_response(incarnation, frozen_lanes, response, sent_ms)
        return []

    async def _call(
        self, incarnation: StoreIncarnation, frozen_lanes: list[FrozenLane]
    ) -> tuple[ExchangeResponse, int]:
        """Return the response, and when the request was sent."""
        exchanges = [
            Exchange(
                frozen=frozen.batch.bytes,
                live=LiveState(demands=[self._quotas.grant_request(quota) for quota in frozen.requested]),
            )
            for frozen in frozen_lanes
        ]
        request = ExchangeRequest(fingerprint=incarnation.fingerprint, exchanges=exchanges)
        sent_ms = self._clock.monotonic_ms()
        timeout_ms = reply_timeout_ms(self._pacing.backoff, self._quotas.round_trip_ms)
        causes = [cause for frozen in frozen_lanes for cause in frozen.causes]
        with self._traces.around_exchange(causes) if self._traces else nullcontext():
            response = await self._coordinator.exchange(request, timeout_ms / 1000)
        self._quotas.round_trip_ms = self._clock.monotonic_ms() - sent_ms
        self._metrics.exchange_seconds.observe(self._quotas.round_trip_ms / 1000)
        return response, sent_ms


def split_into_calls(frozen_lanes: Sequence[FrozenLane]) -> list[list[FrozenLane]]:
    """Return the lanes by the calls in which they travel, each as long as a call may be."""
    calls: list[list[FrozenLane]] = []
    room = 0
    for frozen in frozen_lanes:
        size = len(frozen.batch.bytes)
        if not calls or size > room:
            calls.append([])
            room = MOST_CALL_BYTES
        calls[-1].append(frozen)
        room -= size
    return calls
