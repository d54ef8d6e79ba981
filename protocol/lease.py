"""The law of the house: what a lease is, and which changes it may see.

A lease is the right of one epoch to spend part of one quota in one period. It is four totals that only grow, each
with one writer: the coordinator writes `granted` and `overage`, the region writes `consumed` and `returned`. What is
lost, doubled or reordered on the way does no harm, for the next message repeats the totals and a receiver only
moves forward.

What the region has not accounted for yet is *outstanding*. It may be spent at any moment, so it belongs to the region
until a report says otherwise; time alone never frees it. When a lease runs out, its outstanding is set aside in
*suspense*: spending has ended, but nobody knows yet what was spent.

The table below says which event a lease may see in which state. An absent cell is the refusal.
"""

from enum import StrEnum


class LeaseState(StrEnum):
    ACTIVE = "active"  # may be granted to
    EXPIRED = "expired"  # ran out unreported: first it returns what is left of it, then it is granted to again
    FENCED = "fenced"  # its epoch is over and its store kept its data: no grants, but all evidence is booked
    LOST = "lost"  # its epoch is over and its store lost data: usage is booked, returns may have been spent
    QUARANTINED = "quarantined"  # its two counts disagreed: people look at it, nothing is granted
    RETIRED = "retired"  # people decided that no more evidence counts: what still comes is kept for them
    CLOSED = "closed"  # its period is: what still comes is booked in the open one


class LeaseEvent(StrEnum):
    GRANT = "grant"
    REPORT = "report"
    EXPIRE = "expire"  # its time and the margin are over, with units outstanding
    RENEW = "renew"  # nothing is left of it that is not accounted for
    FENCE = "fence"
    LOSE = "lose"  # the same, of a store that lost data
    PROVE = "prove"  # its store is found to have kept its data after all
    QUARANTINE = "quarantine"
    RESOLVE = "resolve"  # people approved how a quarantine ends
    RETIRE = "retire"
    CLOSE = "close"  # its period, with nothing outstanding


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.ACTIVE, LeaseEvent.GRANT): LeaseState.ACTIVE,
    (LeaseState.ACTIVE, LeaseEvent.REPORT): LeaseState.ACTIVE,
    (LeaseState.ACTIVE, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.ACTIVE, LeaseEvent.FENCE): LeaseState.FENCED,
    (LeaseState.ACTIVE, LeaseEvent.LOSE): LeaseState.LOST,
    (LeaseState.ACTIVE, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.ACTIVE, LeaseEvent.RETIRE): LeaseState.RETIRED,
    (LeaseState.ACTIVE, LeaseEvent.CLOSE): LeaseState.CLOSED,
    (LeaseState.EXPIRED, LeaseEvent.REPORT): LeaseState.EXPIRED,
    (LeaseState.EXPIRED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,  # of what a rebase gave it again
    (LeaseState.EXPIRED, LeaseEvent.RENEW): LeaseState.ACTIVE,
    (LeaseState.EXPIRED, LeaseEvent.FENCE): LeaseState.FENCED,
    (LeaseState.EXPIRED, LeaseEvent.LOSE): LeaseState.LOST,
    (LeaseState.EXPIRED, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.EXPIRED, LeaseEvent.RETIRE): LeaseState.RETIRED,
    (LeaseState.EXPIRED, LeaseEvent.CLOSE): LeaseState.CLOSED,
    (LeaseState.FENCED, LeaseEvent.REPORT): LeaseState.FENCED,
    (LeaseState.FENCED, LeaseEvent.EXPIRE): LeaseState.FENCED,
    (LeaseState.FENCED, LeaseEvent.FENCE): LeaseState.FENCED,
    (LeaseState.FENCED, LeaseEvent.LOSE): LeaseState.LOST,
    (LeaseState.FENCED, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.FENCED, LeaseEvent.RETIRE): LeaseState.RETIRED,
    (LeaseState.FENCED, LeaseEvent.CLOSE): LeaseState.CLOSED,
    (LeaseState.LOST, LeaseEvent.REPORT): LeaseState.LOST,
    (LeaseState.LOST, LeaseEvent.EXPIRE): LeaseState.LOST,
    (LeaseState.LOST, LeaseEvent.FENCE): LeaseState.LOST,
    (LeaseState.LOST, LeaseEvent.LOSE): LeaseState.LOST,
    (LeaseState.LOST, LeaseEvent.PROVE): LeaseState.FENCED,
    (LeaseState.LOST, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.LOST, LeaseEvent.RETIRE): LeaseState.RETIRED,
    (LeaseState.LOST, LeaseEvent.CLOSE): LeaseState.CLOSED,
    (LeaseState.QUARANTINED, LeaseEvent.EXPIRE): LeaseState.QUARANTINED,  # likewise
    (LeaseState.QUARANTINED, LeaseEvent.FENCE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.LOSE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.RESOLVE): LeaseState.EXPIRED,  # it returns first what is left, like that one
    (LeaseState.QUARANTINED, LeaseEvent.RETIRE): LeaseState.QUARANTINED,  # its totals are waited for all the same
    (LeaseState.RETIRED, LeaseEvent.EXPIRE): LeaseState.RETIRED,
    (LeaseState.RETIRED, LeaseEvent.CLOSE): LeaseState.CLOSED,
}

# Where a larger `returned` frees units. Of a store that lost data what was returned may have been spent as well.
RETURNS_COUNT = frozenset({LeaseState.ACTIVE, LeaseState.EXPIRED, LeaseState.FENCED})


def after(state: LeaseState, event: LeaseEvent) -> LeaseState | None:
    """The state that follows, or None where the law refuses the event."""
    return TRANSITIONS.get((state, event))
