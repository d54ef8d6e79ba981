"""The balances of an allowance: a pool for each (quota, period), and a lease in it for each epoch that spends of it.

Units only ever move from one account to another, and `post` is the one place where they do: it changes the pool, the
lease and the list of transfers together. So both identities hold after every movement, by construction, and a pool or a
lease is at any time what its transfers add up to:

    pool    funded + soft_cap_extension + carried_over_in + adjustment + overage + suspense_carried_in + correction
            = unallocated + outstanding + suspense + suspense_carried + suspense_carried_out + carried_over_out
              + estimated + consumed + written_off
    lease   granted + overage
            = consumed + returned + outstanding + suspense + suspense_carried_out + estimated + written_off

The left sides are where units come from, and the totals that only grow; the right sides are where units are.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeAlias
from uuid import UUID, uuid5

from msgspec import Struct

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
        """What may be spent in the whole period, with what was carried over from the one before."""
        return self.entitled + self.carried_over_in

    @property
    def used(self) -> int:
        """Usage of the period itself, without late usage of closed periods."""
        return self.consumed - self.late

    @property
    def included_left(self) -> int:
        """How much more is within the limit. Before the first request the limit is not known here."""
        if not (self.funded or self.credited or self.soft_cap_extension):
            return MAX_UNITS
        return max(0, self.spendable - self.carried_over_out - (self.used - self.overage_used) - self.late_included)

    @property
    def grantable(self) -> int:
        """What may be granted: overage was spent without funding, and is paid back first."""
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
        """How much more may be granted before the totals exceed the largest integer that a store counts exactly."""
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
    """What becomes of a lease of a closed period in an open one: the lease's own row does not change.

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


class Line(Struct, frozen=True):
    """Units that evidence accounts for: usage of one minute and kind, or what was given back."""

    units: int
    minute: int | None = None
    dimensions: dict[str, str] | None = None


COUNTED_AS, OVERAGE = "counted_as", "overage"  # a dimension, and its only value: all else is within the limit


class Split(NamedTuple):
    """Lines that are within the limit or beyond it, and how many units are beyond."""

    lines: Sequence[Line]
    overage_used: int


def split(lines: Sequence[Line], included_left: int) -> Split:
    """Split lines at the limit, in the order of booking. The result is final: it is booked with each line."""
    units = sum(line.units for line in lines)
    if units <= included_left:
        return Split(lines, 0)
    return Split(list(_split(lines, included_left)), units - included_left)


def _split(lines: Iterable[Line], left: int) -> Iterator[Line]:
    for line in lines:
        included = min(line.units, left)
        left -= included
        if included:
            yield Line(included, line.minute, line.dimensions)
        if line.units > included:
            yield Line(line.units - included, line.minute, (line.dimensions or {}) | {COUNTED_AS: OVERAGE})


class Transfer(Struct, frozen=True):
    """A movement of units from one account to another, as it is booked."""

    line: int  # of a report
    key: Key
    src: Account
    dst: Account
    units: int
    cause: Cause
    minute: int | None = None
    dimensions: dict[str, str] | None = None
    part: int = 0  # of a line that drains several accounts
    late_for: str | None = None  # a closed period

    @property
    def charge_period(self) -> str:
        """The period that the usage belongs to, and in which it is billed if that is open."""
        return self.late_for or self.key.period


@dataclass(slots=True)
class Report:
    """A batch while it is booked. Its transfers are numbered in the order in which they are posted."""

    region: str
    epoch: int
    lane: int
    seq: int
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class Movement:
    """Transfers without a report, on one lease or pool. The id follows from what is moved, so it is booked once."""

    movement_id: UUID
    region: str | None  # none: it is of a pool, and of no lease
    epoch: int | None
    transfers: list[Transfer] = field(default_factory=list)


Entry: TypeAlias = Report | Movement
_MOVEMENTS = UUID("6f1d0a5e-7c0b-4d53-9a55-6c656173656f")


def movement(lease: "Lease | Correction", *what: object) -> Movement:
    """Return an empty movement. `what` distinguishes it from all others on the same lease."""
    late_for = (lease.charge_period,) if isinstance(lease, Correction) else ()
    name = "/".join(map(str, (lease.epoch, *lease.key, *late_for, *what)))
    return Movement(uuid5(_MOVEMENTS, name), lease.region, lease.epoch)


class Overdrawn(ValueError):
    """More was to be moved than there is. This is a bug, and nothing is booked."""


# The column of a pool for an account: one outside of it counts what came from there, one inside what is there.
_OUTSIDE = {
    Account.FUNDING: "funded",
    Account.OVERAGE: "overage",
    Account.SUSPENSE_CARRIED_IN: "suspense_carried_in",
    Account.CORRECTION: "correction",
    Account.ADJUSTMENT: "adjustment",
    Account.SOFT_CAP_EXTENSION: "soft_cap_extension",
    Account.CARRIED_OVER_IN: "carried_over_in",
}
_MAY_BE_NEGATIVE = {"adjustment"}  # what was debited can be more than what was credited
_IN_LEASE = {
    Account.OUTSTANDING,
    Account.CONSUMED,
    Account.SUSPENSE,
    Account.ESTIMATED,
    Account.WRITTEN_OFF,
    Account.SUSPENSE_CARRIED_OUT,
}
_IN_POOL = _IN_LEASE | {Account.UNALLOCATED, Account.SUSPENSE_CARRIED, Account.CARRIED_OVER_OUT}
# The columns of a lease for units that come from its pool or go back to it.
_INTO_LEASE = {Account.UNALLOCATED: "granted", Account.OVERAGE: "overage"}
_OUT_OF_LEASE = {Account.UNALLOCATED: "returned"}


def post(
    entry: Entry, pool: Pool, book: Lease | Correction | None, src: Account, dst: Account, units: int, cause: Cause
) -> None:
    """Move units. Moving none adds no transfer. Raise Overdrawn, with nothing changed, if they are not there."""
    if units:
        _move(pool, book, src, dst, units)
        number, part = _following(entry, 0)
        entry.transfers.append(Transfer(number, pool.key, src, dst, units, cause, part=part, late_for=_late_for(book)))


def _move(pool: Pool, book: Lease | Correction | None, src: Account, dst: Account, units: int) -> None:
    changes = [*_changes_of_pool(pool, src, dst, units), *_changes_of_book(book, src, dst, units)]
    if units < 0 or any(_is_overdrawn(*change) for change in changes):
        raise Overdrawn(f"{units} from {src} to {dst} of {pool.key}")
    # Everything is checked: from here on nothing may fail.
    for each, column, change in changes:
        setattr(each, column, getattr(each, column) + change)


def _is_overdrawn(book: Pool | Lease | Correction, column: str, change: int) -> bool:
    return column not in _MAY_BE_NEGATIVE and getattr(book, column) + change < 0


# In this order evidence drains a lease: an estimate, and what was written off, give way to the truth.
DRAINED = (Account.OUTSTANDING, Account.SUSPENSE, Account.ESTIMATED, Account.WRITTEN_OFF)


def drain(
    entry: Entry,
    pool: Pool,
    lease: Lease,
    dst: Account,
    units: int,
    cause: Cause,
    minute: int | None = None,
    dimensions: dict[str, str] | None = None,
) -> None:
    """Move what evidence accounts for, as one line."""
    if units:
        drain_lines(entry, pool, lease, dst, [Line(units, minute, dimensions)], cause)


def drain_lines(entry: Entry, pool: Pool, lease: Lease, dst: Account, lines: Sequence[Line], cause: Cause) -> None:
    """Move many lines: each is booked by itself, and each account is changed once.

    Raise Overdrawn, with nothing changed, if the lease has less than that.
    """
    if not lines:
        return
    units = sum(line.units for line in lines)
    if units > lease.unaccounted:
        raise Overdrawn(f"{units} to {dst} of {lease.key}, of which {lease.unaccounted} are unaccounted for")
    take(entry, pool, lease, dst, lines, [Source(src, getattr(lease, src), cause) for src in DRAINED])


def use(entry: Entry, pool: Pool, lease: Lease, lines: Sequence[Line]) -> None:
    """Book usage of the period itself: within the limit as far as that goes, in the order in which regions report."""
    told, beyond = split(lines, pool.included_left)
    drain_lines(entry, pool, lease, Account.CONSUMED, told, Cause.USAGE)
    pool.overage_used += beyond


class Source(NamedTuple):
    """An account that units are taken from, and how many it has."""

    src: Account
    units: int
    cause: Cause


def take(
    entry: Entry, pool: Pool, book: Lease | Correction, dst: Account, lines: Sequence[Line], sources: Iterable[Source]
) -> Counter[Cause]:
    """Take lines from one source after the other, which must have enough. Return the units moved for each cause."""
    parts = list(_parts(lines, sources))
    taken = [(source, sum(part[-1] for part in run)) for source, run in groupby(parts, itemgetter(2))]
    for source, units in taken:
        _move(pool, book, source.src, dst, units)
    _note(entry, pool.key, dst, parts, _late_for(book))
    causes = Counter[Cause]()
    for source, units in taken:
        causes[source.cause] += units
    return causes


Part: TypeAlias = tuple[Line, int, Source, int]  # of a line, numbered: so many units one source gives


def _parts(lines: Iterable[Line], sources: Iterable[Source]) -> Iterator[Part]:
    """Split lines where one source ends and the next begins."""
    following = iter(sources)
    source = next(following)
    here = source.units
    for line in lines:
        number, left = 0, line.units
        while left:
            if not here:
                source = next(following)
                here = source.units
                continue
            units = min(left, here)
            yield line, number, source, units
            number, left, here = number + 1, left - units, here - units


def _note(entry: Entry, key: Key, dst: Account, parts: Iterable[Part], late_for: str | None) -> None:
    for line, number, (src, _, cause), units in parts:
        of_entry, part = _following(entry, number)
        moved = Transfer(of_entry, key, src, dst, units, cause, line.minute, line.dimensions, part, late_for)
        entry.transfers.append(moved)


def _following(entry: Entry, number: int) -> tuple[int, int]:
    """Return the numbers of the next line and part. A movement has parts only."""
    transfers = entry.transfers
    if isinstance(entry, Movement):
        return 0, len(transfers)
    return (transfers[-1].line + (not number) if transfers else 0), number


def _late_for(book: Lease | Correction | None) -> str | None:
    return book.charge_period if isinstance(book, Correction) else None


Change = tuple[Pool | Lease | Correction, str, int]


def _changes_of_pool(pool: Pool | Correction, src: Account, dst: Account, units: int) -> list[Change]:
    taken = (pool, src.value, -units) if src in _IN_POOL else (pool, _OUTSIDE[src], units)
    given = (pool, dst.value, units) if dst in _IN_POOL else (pool, _OUTSIDE[dst], -units)
    return [taken, given]


def _changes_of_book(book: Lease | Correction | None, src: Account, dst: Account, units: int) -> list[Change]:
    """Return the changed columns: a correction's are called like a pool's, a lease has names of its own."""
    if book is None:
        return []
    changes_of = _changes_of_lease if isinstance(book, Lease) else _changes_of_pool
    return changes_of(book, src, dst, units)  # type: ignore[arg-type]  # each is asked about its own kind


def _changes_of_lease(lease: Lease, src: Account, dst: Account, units: int) -> list[Change]:
    taken = (lease, src.value, -units) if src in _IN_LEASE else (lease, _INTO_LEASE[src], units)
    given = (lease, dst.value, units) if dst in _IN_LEASE else (lease, _OUT_OF_LEASE[dst], units)
    return [taken, given]
