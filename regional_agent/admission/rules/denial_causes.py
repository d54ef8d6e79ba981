"""The cause of a denial as services see it, and when the request may pass."""

from typing import NamedTuple

from protocol.check import DenialCause
from protocol.outcomes import DenialReason

RETRY_MS = 1_000  # what may change at any moment: units arrive, the coordinator or the store comes back
RETRY_WHEN_DRAINED_MS = 5_000  # people restore a region


class LeaseOutlook(NamedTuple):
    """An agent's knowledge of an allowance in addition to its lease."""

    is_exhausted: bool = False  # the coordinator said that nothing is left in the period
    is_cut_off: bool = False
    is_draining: bool = False


_WITHOUT_LEASE: dict[str, DenialCause] = {
    DenialReason.RATE_EXCEEDED: DenialCause.LIMIT,
    DenialReason.SLOTS_TAKEN: DenialCause.LIMIT,
    DenialReason.COST_ABOVE_LIMIT: DenialCause.NEVER,
    DenialReason.HOLD_NEEDED: DenialCause.NEVER,
}


def cause_of(reason: str, outlook: LeaseOutlook) -> DenialCause:
    """Return the cause for a reason of the store's script. For a lack of units it depends on why there are none."""
    if reason in _WITHOUT_LEASE:
        return _WITHOUT_LEASE[reason]
    if outlook.is_draining:
        return DenialCause.DRAINED
    if outlook.is_exhausted:
        return DenialCause.LIMIT
    if outlook.is_cut_off:
        return DenialCause.CUT_OFF
    return DenialCause.EXPIRED if reason == DenialReason.LEASE_EXPIRED else DenialCause.NO_LEASE


def retry_after_ms(cause: DenialCause, certain_ms: int) -> int | None:
    """Return when the request may pass: `certain_ms` as far as time alone decides it, None if it never can."""
    if cause is DenialCause.NEVER:
        return None
    if cause is DenialCause.LIMIT:
        return certain_ms or RETRY_MS
    return RETRY_WHEN_DRAINED_MS if cause is DenialCause.DRAINED else RETRY_MS
