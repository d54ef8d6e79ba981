"""Decisions that the log has lost, by the minute: they travel with the next batch, so that answers tell of them."""

from collections.abc import Iterable
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry

from protocol.clock import Clock
from protocol.decision_log.messages import MAX_LOSSES, DecisionsLost
from web.declared_metrics import DeclaredMetrics, counter, gauge

MINUTE_MS = 60_000


class DecisionLogMetrics(DeclaredMetrics):
    sent = counter("leasehold_decision_log_rows_sent", "Rows of the decision log that the coordinator stored.")
    lost = counter(
        "leasehold_decision_log_lost",
        "Decisions that the decision log lost. full: more rows in a second than are kept; overflow: too much waited "
        "for the coordinator; refused: the coordinator did not take them.",
        "reason",
    )
    waiting_bytes = gauge("leasehold_decision_log_waiting_bytes", "Encoded rows that wait for the coordinator.")


class Losses:
    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self.metrics = DecisionLogMetrics(registry)
        self._clock = clock
        self._by_minute: dict[int, int] = {}

    def add(self, count: int, reason: str) -> None:
        """Count decisions of now as lost."""
        self.metrics.lost.labels(reason).inc(count)
        self._keep(DecisionsLost(epoch_ms(self._clock.now()) // MINUTE_MS * MINUTE_MS, count))

    def take(self) -> list[DecisionsLost]:
        """Take all losses, to report them."""
        taken, self._by_minute = self._by_minute, {}
        return [DecisionsLost(minute_ms, count) for minute_ms, count in sorted(taken.items())]

    def add_undelivered(self, decisions_at_ms: Iterable[tuple[int, int]], reason: str) -> None:
        """Count decisions of a batch that was dropped, each a time and how many decisions it stands for."""
        for at_ms, count in decisions_at_ms:
            self.metrics.lost.labels(reason).inc(count)
            self._keep(DecisionsLost(at_ms // MINUTE_MS * MINUTE_MS, count))

    def put_back(self, losses: Iterable[DecisionsLost]) -> None:
        """Keep losses that were counted before and could not be reported."""
        for each in losses:
            self._keep(each)

    def _keep(self, lost: DecisionsLost) -> None:
        """Keep a loss. Beyond a day of minutes it counts for the oldest one."""
        minute_ms = lost.minute_ms
        if minute_ms not in self._by_minute and len(self._by_minute) >= MAX_LOSSES:
            minute_ms = min(self._by_minute)
        self._by_minute[minute_ms] = self._by_minute.get(minute_ms, 0) + lost.count


def epoch_ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)
