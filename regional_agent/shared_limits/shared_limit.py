"""One rate, or the slots of one quota, that regions share by demand, as this agent knows it.

Slots are counted in millionths, so that one set of rules serves both.
"""

from typing import NamedTuple

from msgspec import Struct

from protocol.limits.rates import Rate
from protocol.messages import RateShare, SlotShare
from regional_agent.shared_limits.rules import DeniedUnits, RateDemand, requested_micro
from regional_agent.store.types import SlotCharge

SLOT_MICRO = 1_000_000


class LastReport(NamedTuple):
    """The demand and share that were reported last."""

    at_ms: int = 0
    local_micro: int = 0  # this agent's request
    demand_micro: int = 0  # the demand of all agents of the region
    previous_share_micro: int = 0  # the share that was in force then


class CurrentShare(NamedTuple):
    """The share that the coordinator granted last."""

    micro: int = 0
    expires_ms: int = 0
    is_contended: bool = False
    bound_milli: int = 0  # units beyond limit and burst that all regions together may admit in the worst case
    overshoot_milli: int = 0  # and have admitted at most so far

    @classmethod
    def granted(cls, share: RateShare | SlotShare, sent_ms: int) -> "CurrentShare":
        expires_ms = sent_ms + share.expires_in_ms
        if isinstance(share, SlotShare):
            return cls(share.units * SLOT_MICRO, expires_ms, share.contended)
        return cls(share.rate_micro, expires_ms, share.contended, share.bound_milli, share.overshoot_milli)


class SharedLimit(Struct, eq=False, gc=False):
    quota: str
    terms: Rate | SlotCharge  # the base share: what the region has while it is cut off
    demand: RateDemand  # of the requests of this agent
    denied_slots: DeniedUnits | None = None  # likewise, of slots
    nano_units: int = 0  # in the bucket, as the store said last
    report: LastReport = LastReport()
    share: CurrentShare = CurrentShare()
    due_ms: int | None = None  # when to report it; None: it need not be reported
    refused_until_ms: int = 0  # it is not reported before that
    check_fall_ms: int = 0  # when to compare its demand with what was reported

    @property
    def base_share_micro(self) -> int:
        return int(self.terms.rate_micro) if isinstance(self.terms, Rate) else self.terms.base_share * SLOT_MICRO

    def demand_micro(self, now_ms: int) -> int:
        return self.demand.per_second_micro(now_ms)

    def note_denied_slots(self, units: int, now_ms: int) -> None:
        if self.denied_slots is None:
            self.denied_slots = DeniedUnits()
        self.denied_slots.note(units, now_ms)

    def waiting_slots(self, now_ms: int) -> int:
        """Return the slots that this agent could not get lately."""
        return 0 if self.denied_slots is None else self.denied_slots.recent(now_ms)

    @property
    def may_fall(self) -> bool:
        """Return whether others wait for what this agent reported, and may need no more."""
        return self.share.is_contended and self.report.local_micro > 0 and self.due_ms is not None

    def local_micro(self, now_ms: int) -> int:
        """Return the rate that this agent requests."""
        if not isinstance(self.terms, Rate):
            return 0
        return requested_micro(self.demand_micro(now_ms), self.nano_units, self.terms.burst, self.share.is_contended)
