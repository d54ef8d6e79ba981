"""What happens to a lane whose batch the coordinator did not book, and to a quota that it refused.

The batch stays in the store in any case, as evidence of its epoch. The lane stops, or pauses, or its epoch is closed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from protocol.clock import Clock
from protocol.messages import ExchangeFault
from protocol.outcomes import ExchangeOutcome
from protocol.traces.trace_context import TraceContext
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.lanes import Lanes
from regional_agent.metrics import AgentMetrics
from regional_agent.store.types import FrozenBytes, StoreIncarnation

log = structlog.get_logger()

# The store has forgotten what it reported: its epoch is closed, and another is opened.
EVIDENCE_OF_LOSS = {ExchangeOutcome.CONFLICT, ExchangeOutcome.STORE_REGRESSED}


@dataclass(frozen=True, slots=True)
class FrozenLane:
    """One lane's part of a call: its frozen batch, and the quotas that it requests grants of."""

    lane: int
    batch: FrozenBytes
    requested: list[str]
    causes: Sequence[TraceContext] = ()  # sampled requests that it grants or books units for

    def with_half_of_requests(self) -> "FrozenLane":
        return replace(self, requested=self.requested[: len(self.requested) // 2])


class LaneFaults:
    def __init__(self, lanes: Lanes, quotas: Quotas, epochs: EpochManager, metrics: AgentMetrics, clock: Clock) -> None:
        self._lanes = lanes
        self._quotas = quotas
        self._epochs = epochs
        self._metrics = metrics
        self._clock = clock

    def refuse(
        self,
        incarnation: StoreIncarnation,
        frozen: FrozenLane,
        outcome: ExchangeOutcome,
        expected_seq: int | None = None,
        reason: str = "",
    ) -> None:
        """Stop a lane whose batch was refused, or close the epoch if the outcome proves that the store lost data."""
        if outcome in EVIDENCE_OF_LOSS and incarnation == self._epochs.current:
            self._metrics.epochs.lost.inc()
            self._epochs.on_data_loss(incarnation)
            consequence = "epoch closed: the store lost data"
        else:
            lane, now_ms = (incarnation.epoch, frozen.lane), self._clock.monotonic_ms()
            self._lanes.stop(lane, frozen.batch.seq, outcome, reason, now_ms)
            consequence = "lane stopped"
        if outcome is ExchangeOutcome.REFUSED:
            self._metrics.refusals.items.labels("lane").inc()
        log.error(
            consequence,
            epoch=incarnation.epoch,
            lane=frozen.lane,
            seq=frozen.batch.seq,
            outcome=outcome.value,
            expected_seq=expected_seq,
            reason=reason,
        )

    def refuse_for_fault(self, incarnation: StoreIncarnation, frozen: FrozenLane, fault: ExchangeFault | None) -> None:
        """Stop a lane whose exchange was refused by itself, or pause it if the fault says when to send it again."""
        reason = "" if fault is None else f"{fault.field}: {fault.reason}" if fault.field else fault.reason
        if fault is not None and fault.again_in_ms is not None:
            self.pause(incarnation, frozen, fault.again_in_ms, reason)
        else:
            self.refuse(incarnation, frozen, ExchangeOutcome.REFUSED, reason=reason or "no reason was given")

    def pause(self, incarnation: StoreIncarnation, frozen: FrozenLane, for_ms: int, reason: str) -> None:
        """Send the same bytes again after a while: something else stood in the way."""
        self._lanes.pause((incarnation.epoch, frozen.lane), self._clock.monotonic_ms(), for_ms)
        for quota in frozen.requested:
            self._quotas.postpone(quota, for_ms)
        log.warning(
            "lane paused",
            epoch=incarnation.epoch,
            lane=frozen.lane,
            seq=frozen.batch.seq,
            ms=for_ms,
            reason=reason,
        )

    def resume(self, incarnation: StoreIncarnation, lane: int) -> None:
        if self._lanes.resume((incarnation.epoch, lane)):
            log.info("lane resumed", epoch=incarnation.epoch, lane=lane)
            self._quotas.retry_all()

    def set_quota_aside(self, quota: str, reason: str) -> None:
        """Stop requesting grants of a quota that the coordinator refused as it is."""
        self._metrics.refusals.items.labels("demand").inc()
        log.error("grant request refused: the quota is set aside", quota=quota, reason=reason)
        self._quotas.set_quota_aside(quota, reason)
