"""Post movements of units: every change of a balance, with the transfers that explain it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeAlias
from uuid import UUID, uuid5

from msgspec import Struct

from coordinator.exchange.rules.balances import Account, Cause, Correction, Key, Lease, Pool


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
