"""The states of a lease and their transitions.

A lease is the right of one epoch to spend part of one quota in one period. It is four totals that only grow, each
with one writer: the coordinator writes `granted` and `overage`, the region writes `consumed` and `returned`. Messages
that are lost, doubled or reordered do no harm, since the next message repeats the totals and a receiver only moves
forward.

What the region has not accounted for yet is *outstanding*. It may be spent at any moment, so it belongs to the region
until a report accounts for it; time alone never frees it. When a lease expires, its outstanding units are set aside in
*suspense*: spending has ended, but it is not known yet what was spent.

The table below says which event a lease may see in which state. An event that is absent is refused. A test compares
the transitions that are made in SQL with it.
"""

from enum import StrEnum


class LeaseState(StrEnum):
    ACTIVE = "active"  # may be granted to
    EXPIRED = "expired"  # its time is over: it returns what is left before it is granted to again
    FENCED = "fenced"  # its epoch is over and its store kept its data: no grants, but all evidence is booked
    LOST = "lost"  # its epoch is over and its store lost data: usage is booked, returns may have been spent
    QUARANTINED = "quarantined"  # its report was contradictory: people resolve it, nothing is granted
    RETIRED = "retired"  # people decided that no more evidence counts: what still comes is kept for them
    CLOSED = "closed"  # its period is closed: late usage is booked in the open one


class LeaseEvent(StrEnum):
    GRANT = "grant"
    REPORT = "report"
    EXPIRE = "expire"  # its time and the margin are over, with units outstanding
    RENEW = "renew"  # nothing is left of it that is not accounted for
    FENCE = "fence"  # its epoch ends, and its store kept its data
    LOSE = "lose"  # its epoch ends, and its store lost data
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
    (LeaseState.EXPIRED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,  # units that a rebase granted again
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
    (LeaseState.QUARANTINED, LeaseEvent.EXPIRE): LeaseState.QUARANTINED,  # units that a rebase granted again
    (LeaseState.QUARANTINED, LeaseEvent.FENCE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.LOSE): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.QUARANTINE): LeaseState.QUARANTINED,
    (
        LeaseState.QUARANTINED,
        LeaseEvent.RESOLVE,
    ): LeaseState.EXPIRED,  # it first returns what is left
    (LeaseState.QUARANTINED, LeaseEvent.RETIRE): LeaseState.QUARANTINED,  # its resolution still waits for its totals
    (LeaseState.RETIRED, LeaseEvent.EXPIRE): LeaseState.RETIRED,
    (LeaseState.RETIRED, LeaseEvent.CLOSE): LeaseState.CLOSED,
}

# States in which a larger `returned` frees units. If a store lost data, what it returned may have been spent as well.
RETURNS_COUNT = frozenset({LeaseState.ACTIVE, LeaseState.EXPIRED, LeaseState.FENCED})


def after(state: LeaseState, event: LeaseEvent) -> LeaseState | None:
    """Return the state that follows, or None if the event is refused."""
    return TRANSITIONS.get((state, event))
