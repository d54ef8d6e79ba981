"""The balances of an allowance: a pool for each (quota, period), and a lease in it for each epoch that spends of it.

Units only ever move from one account to another, and `posting.py` is the one place where they do: it changes the pool,
the lease and the list of transfers together. So both identities hold after every movement, by construction, and a pool
or a lease is at any time what its transfers add up to:

    pool    funded + soft_cap_extension + carried_over_in + adjustment + overage + suspense_carried_in + correction
            = unallocated + outstanding + suspense + suspense_carried + suspense_carried_out + carried_over_out
              + estimated + consumed + written_off
    lease   granted + overage
            = consumed + returned + outstanding + suspense + suspense_carried_out + estimated + written_off

The left sides are where units come from, and the totals that only grow; the right sides are where units are.
"""

from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from protocol.lease import LeaseState
from protocol.units import MAX_UNITS


class Account(StrEnum):
    FUNDING = "funding"
    UNALLOCATED = "unallocated"
    OUTSTANDING = "outstanding"
    CONSUMED = "consumed"
    SUSPENSE = "suspense"
    ESTIMATED = "estimated"
    WRITTEN_OFF = "written_off"
    OVERAGE = "overage"
    SUSPENSE_CARRIED = "suspense_carried"
    SUSPENSE_CARRIED_IN = "suspense_carried_in"
    SUSPENSE_CARRIED_OUT = "suspense_carried_out"
    CORRECTION = "correction"
    ADJUSTMENT = "adjustment"
    SOFT_CAP_EXTENSION = "soft_cap_extension"
    CARRIED_OVER_IN = "carried_over_in"  # from the period before, where a plan carries over what was left
    CARRIED_OVER_OUT = "carried_over_out"  # to the period after


class Cause(StrEnum):
    FUNDED = "funded"
    DEFUNDED = "defunded"
    GRANT = "grant"
    COVERING = "covering"  # of work that was done already: it admits nothing
    OVERAGE = "overage"
    USAGE = "usage"
    RETURNED = "returned"
    QUARANTINED = "quarantined"
    EXPIRED = "expired"  # set aside: spending has ended, and what was spent is not known yet
    WRITTEN_OFF = "written_off"
    CHARGED = "charged"
    ESTIMATED = "estimated"
    REBASED = "rebased"  # had been given by a ledger that lost it
    SUSPENSE_CARRIED = "suspense_carried"  # out of a period that is closed, and into the open one
    REPLACES_ESTIMATE = "replaces_estimate"  # that a closed period billed: billed is consumed + estimated - replaced
    REPLACES_WRITE_OFF = "replaces_write_off"  # what a closed period had given up was used after all
    CREDITED = "credited"  # by two people, as what follows
    DEBITED = "debited"
    EXTENDED = "extended"  # beyond the limit, because its cap is soft
    RETRACTED = "retracted"
    CARRIED_OVER = "carried_over"  # unused units of a period that is closed, into the one after it


class Key(NamedTuple):
    """Names a pool, and a lease within its epoch."""

    quota: str
    period: str


@dataclass(slots=True)
class Pool:
    key: Key
    funded: int = 0
    overage: int = 0
    suspense_carried_in: int = 0
    correction: int = 0
    unallocated: int = 0
    outstanding: int = 0
    suspense: int = 0
    suspense_carried: int = 0
    suspense_carried_out: int = 0
    estimated: int = 0
    consumed: int = 0
    written_off: int = 0
    adjustment: int = 0  # net: where more was debited than credited it is below zero
    credited: int = 0  # of that, what can be spent
    soft_cap_extension: int = 0  # what can be spent beyond the limit, as far as anybody needed it: the cap is soft
    overage_used: int = 0  # of what was consumed in the period, what is overage: the rest is within the limit
    carried_over_in: int = 0  # what was left of the period before, and can be spent in this one
    carried_over_out: int = 0  # what was left of this one at its close, and can be spent in the one after it
    # Of what was consumed, what belongs to closed periods; and of a closed period, what came late and is within its
    # limit. Counted from the corrections, under the pool's lock.
    late: int = field(default=0, compare=False)
    late_included: int = field(default=0, compare=False)

    @property
    def entitled(self) -> int:
        """The limit with what people have credited and debited. A debit can take of that, and of nothing else."""
        return self.funded + self.credited

    @property
    def spendable(self) -> int:
        """Return the units that may be spent in the period, with what was carried over into it."""
        return self.entitled + self.carried_over_in

    @property
    def used(self) -> int:
        """Usage of the period itself, without late usage of closed periods."""
        return self.consumed - self.late

    @property
    def included_left(self) -> int:
        """Return how much more is within the limit, which is unknown before the first request."""
        if not (self.funded or self.credited or self.soft_cap_extension):
            return MAX_UNITS
        return max(0, self.spendable - self.carried_over_out - (self.used - self.overage_used) - self.late_included)

    @property
    def grantable(self) -> int:
        """Return what may be granted. Overage was spent without funding and is paid back first."""
        return max(0, self.unallocated - self.overage)

    @property
    def balances(self) -> bool:
        came = (
            self.funded
            + self.soft_cap_extension
            + self.adjustment
            + self.overage
            + self.suspense_carried_in
            + self.correction
        )
        came += self.carried_over_in
        waits = self.unallocated + self.outstanding + self.suspense + self.suspense_carried + self.carried_over_out
        return came == waits + self.suspense_carried_out + self.estimated + self.consumed + self.written_off


@dataclass(slots=True)
class Lease:
    key: Key
    epoch: int
    region: str
    reported_at: datetime
    expires_at: datetime
    state: LeaseState = LeaseState.ACTIVE
    granted: int = 0
    overage: int = 0
    consumed: int = 0
    returned: int = 0
    outstanding: int = 0
    suspense: int = 0
    suspense_carried_out: int = 0
    estimated: int = 0
    written_off: int = 0
    region_consumed: int = 0
    region_returned: int = 0
    demand_milli: int = 0
    waiting: int = 0
    last_grant: int = 0
    overdraft: int = 0  # kept for it: how much it may spend beyond its grants while its region is disconnected
    overdrawn: int = 0  # how much it did, as its region reports

    @property
    def charge_period(self) -> str:
        return self.key.period

    @property
    def waiting_account(self) -> Account:
        """The account in which its units wait for evidence or people; they leave the period at its close."""
        return Account.SUSPENSE

    @property
    def to_carry(self) -> int:
        return self.suspense

    @property
    def is_quarantined(self) -> bool:
        return self.state is LeaseState.QUARANTINED

    @property
    def room(self) -> int:
        """Return the headroom before the totals exceed the largest integer that a store counts exactly."""
        return max(0, MAX_UNITS - self.granted - self.overage)

    @property
    def unaccounted(self) -> int:
        """The units that evidence may still account for: usage and returns are drained from them."""
        return self.outstanding + self.suspense + self.estimated + self.written_off

    @property
    def balances(self) -> bool:
        spent = self.consumed + self.returned + self.suspense_carried_out + self.estimated + self.written_off
        return self.granted + self.overage == spent + self.outstanding + self.suspense


@dataclass(slots=True)
class Correction:
    """The changes of a lease of a closed period, booked in an open one: the lease's own row does not change.

    It balances like a lease:

    suspense_carried_in + correction = suspense_carried + suspense_carried_out + estimated + consumed + written_off
    """

    key: Key  # of the pool in which it is booked
    epoch: int
    charge_period: str  # the lease's own
    region: str
    suspense_carried_in: int = 0
    correction: int = 0
    suspense_carried: int = 0
    suspense_carried_out: int = 0
    estimated: int = 0
    consumed: int = 0
    written_off: int = 0
    replaced: int = 0  # of the closed period's estimates: so much was replaced by reports
    recovered: int = 0  # of what the closed period had written off: so much was reported after all
    overage_used: int = 0  # of what was consumed, what is beyond the limit of its own period
    region_consumed: int = 0
    region_returned: int = 0
    quarantined: bool = False

    @property
    def waiting_account(self) -> Account:
        return Account.SUSPENSE_CARRIED

    @property
    def to_carry(self) -> int:
        return self.suspense_carried

    @property
    def is_quarantined(self) -> bool:
        return self.quarantined

    @property
    def balances(self) -> bool:
        ended = self.suspense_carried_out + self.estimated + self.consumed + self.written_off
        return self.suspense_carried_in + self.correction == self.suspense_carried + ended


def _columns(kind: type[Pool | Lease | Correction], first: str) -> tuple[str, ...]:
    """Return the names of the totals: the fields from the first one on, but for those that are added up."""
    names = [each.name for each in fields(kind) if each.compare]
    return tuple(names[names.index(first) :])


# As they are called in the tables as well, in the order in which the root over a closed period takes them in.
POOL_COLUMNS = _columns(Pool, "funded")
LEASE_COLUMNS = _columns(Lease, "granted")
CORRECTION_COLUMNS = _columns(Correction, "suspense_carried_in")
