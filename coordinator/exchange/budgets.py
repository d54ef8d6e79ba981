"""Budgets: how much one region may make the coordinator keep or inspect in a minute.

A region's token is enough to name quotas, periods and epochs, and to send evidence for people. Each of these costs rows
that stay. A budget is a token bucket for each region that holds what a minute brings. Honest regions do not reach it: a
thousand tenants that begin in the same second are a tenth of the default for new keys.

Each coordinator counts for itself, so a region that calls several of them has as many budgets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from coordinator.exchange.rules.budget import Budget
from protocol.messages import FrozenBatch, FrozenLease

MINUTE_MS = 60_000
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Bucket:
    level: float
    at_ms: int
    warned_at_ms: int | None = None


class Budgets:
    def __init__(
        self,
        per_minute: Mapping[Budget, int],
        monotonic_ms: Callable[[], int],
        on_exceeded: Callable[[str, Budget, int], None],
    ) -> None:
        self._per_minute = per_minute
        self._monotonic_ms = monotonic_ms
        self._on_exceeded = on_exceeded
        self._buckets: dict[tuple[str, Budget], _Bucket] = {}  # as many as there are regions with a token

    def take(self, region: str, budget: Budget, amount: int) -> int:
        """Take up to an amount from a region's budget and return how much of it was there."""
        bucket = self._filled(region, budget)
        taken = min(amount, max(0, int(bucket.level)))
        bucket.level -= taken
        self._note(region, budget, bucket, amount - taken)
        return taken

    def may_take(self, region: str, budget: Budget, amount: int) -> bool:
        """Take an amount whole, if anything is left: one that is larger than the budget is paid off by waiting."""
        bucket = self._filled(region, budget)
        if bucket.level < 1:
            self._note(region, budget, bucket, amount)
            return False
        bucket.level -= amount
        return True

    def kept_of(self, region: str, evidence: FrozenLease) -> str | None:
        """Return what of a region's evidence is kept: beyond its bytes only the totals, beyond its rows nothing."""
        whole = msgspec.json.encode(evidence).decode()
        if not self.take(region, Budget.QUARANTINE_ROWS, 1):
            return None
        if self.may_take(region, Budget.QUARANTINE_BYTES, len(whole)):
            return whole
        totals = msgspec.to_builtins(msgspec.structs.replace(evidence, lines=[]))
        return msgspec.json.encode(totals | {"lines_left_out": len(evidence.lines)}).decode()

    def may_keep(self, region: str, batch: FrozenBatch) -> bool:
        """Tell whether a batch is kept whole."""
        is_within_bytes = self.may_take(region, Budget.QUARANTINE_BYTES, len(msgspec.json.encode(batch)))
        return is_within_bytes and self.take(region, Budget.QUARANTINE_ROWS, 1) == 1

    def retry_after_s(self, region: str, budget: Budget) -> int:
        """Return after how many seconds a region may take one again."""
        missing = 1 - self._filled(region, budget).level
        return max(1, -int(-missing * 60 // max(1, self._per_minute[budget])))

    def _filled(self, region: str, budget: Budget) -> _Bucket:
        now_ms, most = self._monotonic_ms(), self._per_minute[budget]
        bucket = self._buckets.setdefault((region, budget), _Bucket(most, now_ms))
        bucket.level = min(most, bucket.level + most * max(0, now_ms - bucket.at_ms) / MINUTE_MS)
        bucket.at_ms = now_ms
        return bucket

    def _note(self, region: str, budget: Budget, bucket: _Bucket, refused: int) -> None:
        """Count what was refused, and log it once a minute."""
        if not refused:
            return
        self._on_exceeded(region, budget, refused)
        if bucket.warned_at_ms is None or bucket.at_ms - bucket.warned_at_ms >= MINUTE_MS:
            bucket.warned_at_ms = bucket.at_ms
            _log.warning("region_over_budget", region=region, budget=budget.value, refused=refused)


def without_limits() -> Budgets:
    """Return budgets that no region reaches."""
    return Budgets(dict.fromkeys(Budget, 2**62), lambda: 0, lambda *_: None)
