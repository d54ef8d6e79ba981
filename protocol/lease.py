"""The law of the house: what a lease is, and which changes it may see.

A lease is the right of one epoch to spend part of one quota in one period. It is four totals that only grow, each
with one writer: the coordinator writes `granted` and `overage`, the region writes `consumed` and `returned`. What is
lost, doubled or reordered on the way does no harm, for the next message repeats the totals and a receiver only
moves forward.

What the region has not accounted for yet is *outstanding*. It may be spent at any moment, so it belongs to the region
until a report says otherwise; time alone never frees it.

The table below says which event a lease may see in which state. An absent cell is the refusal.
"""

from enum import StrEnum

from msgspec import Struct


class LeaseState(StrEnum):
    ACTIVE = "active"  # may be granted to
    FENCED = "fenced"  # its epoch is over: no grants, but evidence is booked
    QUARANTINED = "quarantined"  # its two counts disagreed: people look at it, nothing is granted


class LeaseEvent(StrEnum):
    GRANT = "grant"
    REPORT = "report"
    FENCE = "fence"
    QUARANTINE = "quarantine"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.ACTIVE, LeaseEvent.GRANT): LeaseState.ACTIVE,
    (LeaseState.ACTIVE, LeaseEvent.REPORT): LeaseState.ACTIVE,
    (LeaseState.ACTIVE, LeaseEvent.FENCE): LeaseState.FENCED,
    (LeaseState.ACTIVE, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.FENCED, LeaseEvent.REPORT): LeaseState.FENCED,
    (LeaseState.FENCED, LeaseEvent.FENCE): LeaseState.FENCED,
    (LeaseState.FENCED, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.FENCE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
}


def after(state: LeaseState, event: LeaseEvent) -> LeaseState | None:
    """The state that follows, or None where the law refuses the event."""
    return TRANSITIONS.get((state, event))


class Totals(Struct, frozen=True):
    """The four totals of a lease. Each only grows."""

    granted: int = 0
    overage: int = 0
    consumed: int = 0
    returned: int = 0

    @property
    def unaccounted(self) -> int:
        """What was given and neither spent nor given back, as far as these totals tell."""
        return self.granted + self.overage - self.consumed - self.returned

    def is_behind(self, other: "Totals") -> bool:
        """True if any total is lower than the other's: somebody forgot something."""
        return (
            self.granted < other.granted
            or self.overage < other.overage
            or self.consumed < other.consumed
            or self.returned < other.returned
        )
