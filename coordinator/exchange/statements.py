"""The statements of the ledger. Each reads or writes one table for everything that a transaction is about.

Row locks are always taken in the same order, each kind by key: epochs (shared) → lanes → periods (shared) → pools. Who
holds a pool may read and write its leases: whatever moves units of a lease holds its pool, and fencing, which changes
only a lease's state, needs the epoch alone. Missing rows are inserted first and locked then, like all others.

Every write says what it expects to find, and the count of its rows is looked at: a surprise ends the transaction.

Limits, plans and regions are no part of that order. A decision about a pool or a share must be made by a catalogue that
was read after the row was locked, or while the catalogue's own lock was held (`catalogue.lock_catalogue`). Where the
catalogue has to be read before, because it says which rows to lock, `confirm_catalogue` looks again behind the locks.
"""

import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import asyncpg
import msgspec

from coordinator.database.connection import Connection
from coordinator.epochs.rules.lost_ledger import is_kept
from coordinator.exchange.rules.balances import Correction, Entry, Key, Lease, Movement, Pool
from coordinator.exchange.rules.settlement import EpochState, Lane, QuarantineReason
from coordinator.exchange.rules.stages import BookedReport, LockedPool, Overage, closed_keys, late_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.rules.entitlement import Catalogue, calendar_of_key, tenant_of
from coordinator.outages import DecisionOutdated
from coordinator.webhooks.outbox import tell
from coordinator.webhooks.rules import suspense_events
from protocol.identifiers import KEYS_REMEMBERED, parse_quota_key, wider_keys
from protocol.lease import LeaseState
from protocol.messages import FrozenBatch, FrozenLease, Receipt
from protocol.periods import Calendar, Period, moment_of, period_of
from protocol.policy import LimitValue, QuotaSpec

MOMENTS_REMEMBERED = 100  # likewise: of the few gathers that are under way
FEW_TRANSFERS = 200  # up to that many, another round trip costs more than COPY saves
MINUTES_REMEMBERED = 10_000  # as text: usage of the same few is reported again and again


class Surprise(RuntimeError):
    """A row was not as it must be under our locks. A bug; nothing is booked."""


# --- reading ----------------------------------------------------------------------------------------------------------


class LaneName(NamedTuple):
    """A lane, and the region that says it is its own."""

    epoch: int
    lane: int
    region: str


async def lock_lanes(connection: Connection, names: Collection[LaneName]) -> dict[tuple[int, int], Lane]:
    """Those of the lanes that were issued to their region, by (epoch, lane)."""
    rows = await connection.fetch(
        _LOCK_LANES,
        _numbers(name.epoch for name in names),
        _numbers(name.lane for name in names),
        _names(name.region for name in names),
    )
    return {(row["epoch"], row["lane"]): _lane_of(tuple(row)) for row in rows}


async def lock_lanes_and_read_catalogue(
    connection: Connection, documents: Documents, names: Collection[LaneName], quotas: Collection[str], now: datetime
) -> tuple[dict[tuple[int, int], Lane], Catalogue]:
    """Both in one statement."""
    row = await connection.fetchrow(
        _LANES_AND_CATALOGUE,
        *_catalogue_of(quotas, now),
        _numbers(name.epoch for name in names),
        _numbers(name.lane for name in names),
        _names(name.region for name in names),
    )
    lanes = {(each[0], each[1]): _lane_of(each) for each in row["locked"] or ()} if row else {}
    return lanes, await _catalogue(connection, documents, row, quotas)


def _lane_of(columns: Sequence[Any]) -> Lane:
    """In the order of _LANE."""
    epoch, lane, last_seq, last_hash, head, state, *rest = columns
    return Lane(epoch, lane, last_seq, last_hash, head, EpochState(state), *rest)


async def read_catalogue(
    connection: Connection, documents: Documents, quotas: Collection[str], now: datetime
) -> Catalogue:
    """What is in force now, as far as these quota keys are concerned."""
    row = await connection.fetchrow(_CATALOGUE, *_catalogue_of(quotas, now))
    return await _catalogue(connection, documents, row, quotas)


async def confirm_catalogue(
    connection: Connection,
    documents: Documents,
    catalogue: Catalogue,
    version: int,
    quotas: Collection[str],
    now: datetime,
) -> Catalogue:
    """Return the catalogue in force, if it decides on these quota keys as the one that was read before the locks did.

    `version` was read by a statement that began when the locks were held, along with something else: so nothing more is
    asked as long as the catalogue stands still. Raise DecisionOutdated if a change concerns these keys.
    """
    if version == catalogue.version:
        return catalogue
    newer = await read_catalogue(connection, documents, quotas, now)
    if not newer.decides_like(catalogue):
        raise DecisionOutdated(f"the catalogue changed from version {catalogue.version} to {newer.version}")
    return newer


def _catalogue_of(quotas: Collection[str], now: datetime) -> tuple[list[str], list[str], datetime]:
    tenants = {tenant for quota in quotas if (tenant := tenant_of(quota)) is not None}
    keys = {key for quota in quotas for key in wider_keys(quota)}
    return list(tenants), list(keys), now


async def _catalogue(
    connection: Connection, documents: Documents, row: asyncpg.Record | None, quotas: Collection[str]
) -> Catalogue:
    assert row is not None
    specs, default_plan = await documents.at(connection, row["document_version"], row["applied_at"])
    began_at = msgspec.json.decode(row["began_at"], type=dict[str, datetime])
    plans = msgspec.json.decode(row["plans"], type=dict[str, str])
    overrides = msgspec.json.decode(row["overrides"], type=dict[str, LimitValue])
    regions, settings = await documents.regions_at(connection, row["version"], row["stamp"])
    calendars = _in_zones(specs, began_at, quotas)
    return Catalogue(
        row["version"],
        specs,
        default_plan,
        plans,
        regions,
        overrides,
        row["block_version"],
        settings,
        began_at,
        await _written(connection, calendars) if calendars else {},
    )


def _in_zones(
    specs: Mapping[str, QuotaSpec], began_at: Mapping[str, datetime], quotas: Iterable[str]
) -> dict[str, Calendar]:
    """By their names: those of which the bounds may be others than the rules say by now."""
    calendars = {
        calendar_of_key(began_at, spec, quota)
        for quota in quotas
        if (spec := specs.get(parse_quota_key(quota)[0])) and spec.period and spec.time_zone != "UTC"
    }
    return {str(calendar): calendar for calendar in calendars}


async def _written(connection: Connection, calendars: Mapping[str, Calendar]) -> dict[Calendar, tuple[Period, ...]]:
    rows = await connection.fetch(_WRITTEN, list(calendars))
    return {calendars[row["calendar"]]: tuple(map(period_of, row["ids"])) for row in rows}


async def lock_pools(
    connection: Connection, keys: Collection[Key], must_exist: Collection[Key]
) -> dict[Key, LockedPool]:
    """The pools that there are; those that must exist are made where they are missing. And of a period that is closed
    also those that there never were: that it is closed has to be known.
    """
    found = await _pools(connection, _LOCK_POOLS, keys)
    missing = set(must_exist) - found.keys()
    if missing:
        await _insert_pools(connection, missing)
        found |= await _pools(connection, _LOCK_POOLS, missing)
    await _count_late(connection, found)
    return found | await _closed_pools(connection, {*keys, *must_exist} - found.keys())


async def _count_late(connection: Connection, found: Mapping[Key, LockedPool]) -> None:
    """Of the few that have to do with closed periods. Who books what comes late holds both pools: it stands still."""
    about = [
        key
        for key, (pool, _, closed_at, *_) in found.items()
        if closed_at or pool.suspense_carried_in or pool.correction
    ]
    if about:
        rows = await connection.fetch(_LATE, [key.quota for key in about], [key.period for key in about])
        for key, row in zip(about, rows, strict=True):
            found[key].pool.late, found[key].pool.late_included = row["late"], row["late_included"]


async def look_at_pools(connection: Connection, keys: Collection[Key]) -> dict[Key, LockedPool]:
    """For who changes nothing: they are as they are at this moment, and hold up nobody."""
    found = await _pools(connection, _POOLS, keys)
    await _count_late(connection, found)
    return found


async def _pools(connection: Connection, statement: str, keys: Collection[Key]) -> dict[Key, LockedPool]:
    if not keys:
        return {}
    rows = await connection.fetch(statement, [key.quota for key in keys], [key.period for key in keys])
    return {Key(row["quota"], row["period"]): _locked(row) for row in rows}


async def _closed_pools(connection: Connection, keys: Collection[Key]) -> dict[Key, LockedPool]:
    """A closed period gets no pool any more: what is known of it is known elsewhere, and nothing is booked here."""
    if not keys:
        return {}
    rows = await connection.fetch(_CLOSED, [key.period for key in keys])
    closed = {row["id"]: row["closed_at"] for row in rows}
    return {
        key: LockedPool(Pool(key), period_is_open=False, closed_at=closed[key.period], is_kept=False)
        for key in keys
        if key.period in closed
    }


def _locked(row: asyncpg.Record) -> LockedPool:
    return LockedPool(_pool(row), row["state"] == "open", row["closed_at"], row["open_moves"])


def _pool(row: asyncpg.Record) -> Pool:
    return Pool(Key(row["quota"], row["period"]), *_totals_of_pool(row))


async def _insert_pools(connection: Connection, missing: Collection[Key]) -> None:
    keys = sorted(missing)
    periods = [period_of(period_id) for period_id in sorted({key.period for key in keys})]
    await connection.execute(
        _INSERT_PERIODS,
        [period.id for period in periods],
        [period.calendar.kind.value for period in periods],
        [period.starts_at for period in periods],
        [period.ends_at for period in periods],
        [str(period.calendar) for period in periods],
    )
    await connection.execute(
        _INSERT_POOLS,
        [key.quota for key in keys],
        [key.period for key in keys],
        [parse_quota_key(key.quota)[0] for key in keys],
        [tenant_of(key.quota) for key in keys],
    )


async def read_known_periods(connection: Connection, periods: Collection[str]) -> set[str]:
    """Return those of the periods that are in the books, closed ones too."""
    return {row["id"] for row in await connection.fetch(_KNOWN_PERIODS, list(periods))}


async def read_unseen(connection: Connection, quotas: Collection[str]) -> set[str]:
    """Return those of the quota keys that have no pool in any period."""
    return {row["quota"] for row in await connection.fetch(_UNSEEN, list(quotas))}


async def read_overages(connection: Connection, asked: Collection[Overage]) -> dict[Overage, int]:
    """Return what these regions have used beyond their grants, of locked pools: of the period, and late for it."""
    if not asked:
        return {}
    names = sorted(asked)
    columns = [[name.region for name in names], [name.key.quota for name in names], [name.key.period for name in names]]
    rows = await connection.fetch(_OVERAGES, *columns)
    return dict(zip(names, (row["overage"] for row in rows), strict=True))


async def read_leases(
    connection: Connection, keys: Collection[Key], epochs: Collection[int], divided: Collection[Key] = ()
) -> list[Lease]:
    """Of locked pools: the leases of these epochs, and those of others that may still be granted to; of those that
    people divided or regions may overdraw, all.
    """
    if not keys:
        return []
    rows = await connection.fetch(_LEASES, *_arguments_of_leases(keys, epochs, divided))
    return [lease_of_row(row) for row in rows]


def _arguments_of_leases(
    keys: Collection[Key], epochs: Collection[int], divided: Collection[Key]
) -> tuple[str, str, str, str]:
    return (
        _names(key.quota for key in keys),
        _names(key.period for key in keys),
        _numbers(sorted(set(epochs))),
        _names(sorted({key.quota for key in divided})),
    )


def lease_of_row(row: asyncpg.Record) -> Lease:
    return Lease(
        Key(row["quota"], row["period"]),
        row["epoch"],
        row["region"],
        row["reported_at"],
        row["expires_at"],
        LeaseState(row["state"]),
        *_totals_of_lease(row),
    )


class LeasesBehindLocks(NamedTuple):
    """Leases of locked pools, and the catalogue's version at the moment at which they were read."""

    leases: Sequence[Lease]
    catalogue_version: int | None  # None if there was nothing to read


async def read_leases_and_version(
    connection: Connection, keys: Collection[Key], epochs: Collection[int], divided: Collection[Key] = ()
) -> LeasesBehindLocks:
    """Read the leases as `read_leases` does, and the catalogue's version, for `confirm_catalogue`, along with them."""
    if not keys:
        return LeasesBehindLocks([], None)
    rows = await connection.fetch(_LEASES_AND_VERSION, *_arguments_of_leases(keys, epochs, divided))
    leases = [lease_of_row(row) for row in rows if row["epoch"] is not None]
    return LeasesBehindLocks(leases, rows[0]["catalogue_version"])


async def expired_leases(connection: Connection, now: datetime, at_most: int) -> list[tuple[int, Key]]:
    """Some of those whose time and margin are over with units outstanding. Nothing is locked by looking."""
    rows = await connection.fetch(_EXPIRED, now, at_most)
    return [(row["epoch"], Key(row["quota"], row["period"])) for row in rows]


async def lock_leases(connection: Connection, names: Collection[tuple[int, Key]]) -> list[tuple[LockedPool, Lease]]:
    """These leases, with what must be locked to move units of them; those that somebody else is at are left out."""
    epochs, keys = [epoch for epoch, _ in names], [key for _, key in names]
    quotas, periods = [key.quota for key in keys], [key.period for key in keys]
    held = {row["epoch"] for row in await connection.fetch(_SHARE_EPOCHS, epochs)}
    pools = {
        Key(row["quota"], row["period"]): _locked(row)
        for row in await connection.fetch(_LOCK_FREE_POOLS, quotas, periods)
    }
    leases = [lease_of_row(row) for row in await connection.fetch(_NAMED_LEASES, epochs, quotas, periods)]
    return [(pools[lease.key], lease) for lease in leases if lease.epoch in held and lease.key in pools]


async def lock_late(
    connection: Connection, pools: Mapping[Key, LockedPool], epochs: Collection[int], now: datetime
) -> tuple[dict[Key, LockedPool], list[Correction]]:
    """What became of the leases of these epochs in the closed ones of the pools, and all pools, with those where what
    comes late is booked. Which these are is known only when it was read, so it is read again under their locks.
    """
    closed, locked = closed_keys(pools), dict(pools)
    corrections = await _read_corrections(connection, closed, epochs)
    if missing := late_pools(closed, corrections, now) - pools.keys():
        locked |= await lock_pools(connection, missing, missing)
        corrections = await _read_corrections(connection, closed, epochs)
    return locked, corrections


async def _read_corrections(
    connection: Connection, closed: Collection[Key], epochs: Collection[int]
) -> list[Correction]:
    if not closed:
        return []
    rows = await connection.fetch(
        _CORRECTIONS, [key.quota for key in closed], [key.period for key in closed], sorted(set(epochs))
    )
    return [correction_of_row(row) for row in rows]


def correction_of_row(row: asyncpg.Record) -> Correction:
    key = Key(row["quota"], row["period"])
    columns = (row[column] for column in CORRECTION_COLUMNS)
    return Correction(key, row["epoch"], row["charge_period"], row["region"], *columns)


async def share_current_epochs(connection: Connection, epochs: Collection[int]) -> set[int]:
    """Those that are current, and stay so until the transaction ends. Never waits, as it comes out of the order.

    Without those of which a lane stands because the ledger lost data: it is to get nothing.
    """
    if not epochs:
        return set()
    rows = await connection.fetch(_SHARE_EPOCHS, sorted(epochs))
    stopped = {row["epoch"] for row in await connection.fetch(_STOPPED, sorted(epochs))}
    return {row["epoch"] for row in rows if row["state"] == "current"} - stopped


async def read_receipts(
    connection: Connection, reports: Collection[tuple[int, int, int]]
) -> dict[tuple[int, int], Receipt]:
    """By (epoch, lane): the receipt that was given for a report."""
    if not reports:
        return {}
    epochs, lanes, seqs = zip(*reports, strict=True)
    rows = await connection.fetch(_RECEIPTS, epochs, lanes, seqs)
    return {(row["epoch"], row["lane"]): Receipt(position=row["position"], head=row["head"].hex()) for row in rows}


# --- writing ----------------------------------------------------------------------------------------------------------


async def write_books(
    connection: Connection,
    pools: Sequence[Pool],
    leases: Sequence[Lease],
    were: Mapping[tuple[int, Key], LeaseState],
) -> None:
    """Pools and leases move together. `were`: the states of the leases that the decisions were made on."""
    done = await connection.fetchrow(_UPDATE_BOOKS, *_columns_of_books(pools, leases, were))
    expect(done, (len(pools), len(leases)), "pools and leases")


def _columns_of_books(
    pools: Sequence[Pool], leases: Sequence[Lease], were: Mapping[tuple[int, Key], LeaseState]
) -> Iterator[str]:
    yield _names(pool.key.quota for pool in pools)
    yield _names(pool.key.period for pool in pools)
    yield _numbers(lease.epoch for lease in leases)
    yield _names(lease.key.quota for lease in leases)
    yield _names(lease.key.period for lease in leases)
    yield _names(were[lease.epoch, lease.key] for lease in leases)
    yield _names(lease.state for lease in leases)
    yield _moments(lease.reported_at for lease in leases)
    yield _moments(lease.expires_at for lease in leases)
    yield from _columns(map(_totals_in_pool, pools), len(POOL_COLUMNS))
    yield from _columns(map(_totals_in_lease, leases), len(LEASE_COLUMNS))


def _columns(rows: Iterable[tuple[int, ...]], count: int) -> Iterable[str]:
    columns = zip(*rows, strict=True)
    return [_array(list(column)) for column in columns] or [_EMPTY] * count


def _array(numbers: list[int]) -> str:
    """Written by one call, for here are many: as the list is shown, but for its brackets."""
    return f"{{{str(numbers)[1:-1]}}}"


def _numbers(numbers: Iterable[int]) -> str:
    """An array as Postgres reads it. The driver asks each element of a list what it is, and here are many lists."""
    return f"{{{','.join(map(str, numbers))}}}"


def _names(names: Iterable[str]) -> str:
    """Likewise of text."""
    return f"{{{','.join(map(_quoted, names))}}}"


def _moments(moments: Iterable[datetime]) -> str:
    """Most of what is written is of one moment."""
    return f"{{{','.join(map(_quoted_moment, moments))}}}"


@functools.lru_cache(maxsize=MOMENTS_REMEMBERED)
def _quoted_moment(moment: datetime) -> str:
    return f'"{moment}"'


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_quoted = functools.lru_cache(maxsize=KEYS_REMEMBERED)(_quote)  # of keys: the same few are named again and again


async def insert_leases(
    connection: Connection, leases: Collection[Lease], were: Mapping[tuple[int, Key], LeaseState]
) -> None:
    """New ones, empty and in the state that they began with: what became of them is written as of the others."""
    if leases:
        await connection.execute(
            _INSERT_LEASES,
            [lease.epoch for lease in leases],
            [lease.key.quota for lease in leases],
            [lease.key.period for lease in leases],
            [lease.region for lease in leases],
            [were[lease.epoch, lease.key].value for lease in leases],
            [lease.reported_at for lease in leases],
        )


async def write_corrections(connection: Connection, corrections: Sequence[Correction]) -> None:
    if corrections:
        await connection.execute(
            _WRITE_CORRECTIONS,
            [each.epoch for each in corrections],
            [each.key.quota for each in corrections],
            [each.charge_period for each in corrections],
            [each.key.period for each in corrections],
            [each.region for each in corrections],
            *([getattr(each, column) for each in corrections] for column in CORRECTION_COLUMNS),
        )


async def write_transfers(connection: Connection, entries: Iterable[Entry], now: datetime) -> None:
    """By COPY: no other way takes rows in so cheaply, and every trigger, key and check holds for it as well.

    As text, since the driver would look at each value of each row; and entry by entry, so that Postgres takes in one
    while the next is written.
    """
    moving = [entry for entry in entries if entry.transfers]
    if moving:
        texts = _texts(moving, now.isoformat())
        await connection.copy_to_table("transfer", source=texts, columns=_TRANSFER_COLUMNS)
        await tell(connection, suspense_events(moving), now)


async def _texts(entries: Iterable[Entry], recorded_at: str) -> AsyncIterator[bytes]:
    for entry in entries:
        yield "".join(_rows(entry, recorded_at)).encode()


def _columns_of_transfers(entries: Iterable[Entry]) -> list[str]:
    """As arrays, in the order of _TRANSFER_COLUMNS, without the last, which is the same of all."""
    return [_nullable(column) for column in zip(*_values(entries), strict=True)]


def _values(entries: Iterable[Entry]) -> Iterator[tuple[object, ...]]:
    for entry in entries:
        is_movement = isinstance(entry, Movement)
        origin = (entry.movement_id, None, None) if isinstance(entry, Movement) else (None, entry.lane, entry.seq)
        for each in entry.transfers:
            yield (
                *(each.key.period, each.key.quota, each.src, each.dst, each.units, each.cause, entry.region),
                *(entry.epoch, *origin, None if is_movement else each.line, each.part),
                None if each.minute is None else _moment(each.minute),
                None if each.dimensions is None else msgspec.json.encode(each.dimensions).decode(),
                each.charge_period,
            )


def _nullable(values: Iterable[object]) -> str:
    return f"{{{','.join('NULL' if each is None else _quote(str(each)) for each in values)}}}"


def _rows(entry: Entry, recorded_at: str) -> Iterator[str]:
    """As COPY reads them: the columns between tabs, in the order of _TRANSFER_COLUMNS."""
    whose = (_NULL, _NULL) if entry.region is None else (_text(entry.region), str(entry.epoch))
    origin = "\t".join((*whose, *_origin(entry)))
    for each in entry.transfers:
        period, quota, charged = _text(each.key.period), _text(each.key.quota), _text(each.charge_period)
        line = _NULL if isinstance(entry, Movement) else each.line
        dimensions = _NULL if each.dimensions is None else _json(each.dimensions)
        yield (
            f"{period}\t{quota}\t{each.src}\t{each.dst}\t{each.units}\t{each.cause}\t{origin}\t{line}\t{each.part}\t"
            f"{_moment(each.minute)}\t{dimensions}\t{charged}\t{recorded_at}\n"
        )


_NULL = "\\N"
_ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _origin(entry: Entry) -> tuple[str, str, str]:
    """A movement has an id of its own, and a report has its place in the conversation."""
    if isinstance(entry, Movement):
        return str(entry.movement_id), _NULL, _NULL
    return _NULL, str(entry.lane), str(entry.seq)


@functools.lru_cache(maxsize=KEYS_REMEMBERED)
def _text(text: str) -> str:
    return text.translate(_ESCAPED)


def _json(dimensions: Mapping[str, str]) -> str:
    """JSON has no tabs and no line ends of its own."""
    return msgspec.json.encode(dimensions).decode().replace("\\", "\\\\")


@functools.lru_cache(maxsize=MINUTES_REMEMBERED)
def _moment(minute: int | None) -> str:
    return _NULL if minute is None else moment_of(minute).isoformat()


async def write_booked(
    connection: Connection,
    booked: Sequence[BookedReport],
    pools: Sequence[Pool],
    leases: Sequence[Lease],
    were: Mapping[tuple[int, Key], LeaseState],
    entries: Sequence[Entry],
    now: datetime,
) -> dict[tuple[int, int], Receipt]:
    """Reports, the lanes that they move on, pools and leases, and what was moved: all in one statement. Where very much
    was moved, it goes ahead by COPY.
    """
    moved = sum(len(entry.transfers) for entry in entries)
    if moved > FEW_TRANSFERS:
        await write_transfers(connection, entries, now)
    few = _columns_of_transfers(entries) if 0 < moved <= FEW_TRANSFERS else ()
    rows = await connection.fetch(
        _BOOK_ALL if few else _BOOK,
        *_columns_of_books(pools, leases, were),
        _numbers(each.report.epoch for each in booked),
        _numbers(each.report.lane for each in booked),
        _numbers(each.report.seq for each in booked),
        [each.body_hash for each in booked],
        [each.head for each in booked],
        _numbers(len(each.report.transfers) for each in booked),
        now,
        *few,
    )
    expect((len(rows),), (len(booked),), "lanes")
    expect(rows[0][:2], (len(pools), len(leases)), "pools and leases")
    if few:
        await tell(connection, suspense_events(entries), now)
    heads = {(each.report.epoch, each.report.lane): each.head.hex() for each in booked}
    return {(epoch, lane): Receipt(position=position, head=heads[epoch, lane]) for _, _, epoch, lane, position in rows}


async def write_quarantine(
    connection: Connection,
    booked: Sequence[BookedReport],
    now: datetime,
    kept_of: Callable[[str, FrozenLease], str | None],
) -> None:
    """Keep evidence for people. `kept_of`: what of a region's evidence is kept, None without a row for it."""
    rows = [
        (each.report, bad, kept)
        for each in booked
        for bad in each.quarantined
        if (kept := kept_of(each.report.region, bad.evidence)) is not None
    ]
    if rows:
        await connection.execute(
            _INSERT_QUARANTINE,
            [report.epoch for report, *_ in rows],
            [report.lane for report, *_ in rows],
            [report.seq for report, *_ in rows],
            [bad.key.quota for _, bad, _ in rows],
            [bad.key.period for _, bad, _ in rows],
            [bad.reason.value for _, bad, _ in rows],
            [kept for *_, kept in rows],
            now,
        )


async def keep_regressed(
    connection: Connection, batches: Sequence[FrozenBatch], now: datetime, may_keep: Callable[[FrozenBatch], bool]
) -> None:
    """Keep batches whole, each number of a lane once.

    A batch is offered again and again until people have seen to it: one beyond its region's budget is kept later.
    """
    kept = await _kept_of(connection, batches) if batches else {}
    new = [batch for batch in batches if _is_new(batch, kept[batch.epoch, batch.lane], now) and may_keep(batch)]
    if new:
        await connection.execute(
            _INSERT_QUARANTINE,
            [batch.epoch for batch in new],
            [batch.lane for batch in new],
            [batch.seq for batch in new],
            [""] * len(new),
            [""] * len(new),
            [QuarantineReason.LEDGER_REGRESSED.value] * len(new),
            [msgspec.json.encode(batch).decode() for batch in new],
            now,
        )


async def _kept_of(
    connection: Connection, batches: Sequence[FrozenBatch]
) -> Mapping[tuple[int, int], Mapping[int, datetime]]:
    """By epoch and lane: what was kept that the lane has not come to, by its number."""
    kept: dict[tuple[int, int], dict[int, datetime]] = defaultdict(dict)
    rows = await connection.fetch(_KEPT, [batch.epoch for batch in batches], [batch.lane for batch in batches])
    for row in rows:
        kept[row["epoch"], row["lane"]][row["seq"]] = row["recorded_at"]
    return kept


def _is_new(batch: FrozenBatch, kept: Mapping[int, datetime], now: datetime) -> bool:
    return batch.seq not in kept and is_kept(kept.values(), now)


async def fill_lane(connection: Connection, lane: Lane, reports: Sequence[BookedReport], now: datetime) -> None:
    """Numbers that the ledger lost, with nothing in them; the lane goes on after the last."""
    last = reports[-1]
    rows = [
        (lane.epoch, lane.lane, each.report.seq, each.body_hash, each.head, len(each.report.transfers), now)
        for each in reports
    ]
    columns = ("epoch", "lane", "seq", "body_hash", "head", "lines", "recorded_at")
    await connection.copy_records_to_table("report", records=rows, columns=columns)
    moved = await connection.fetchval(
        _MOVE_LANE, lane.epoch, lane.lane, lane.last_seq, last.report.seq, last.body_hash, last.head
    )
    expect((moved,), (1,), "lanes")


def expect(done: Iterable[int] | None, rows: tuple[int, ...], what: str) -> None:
    if done is None or tuple(done) != rows:
        raise Surprise(f"{what}: {done} of {rows} were as they must be")


# --- the statements ---------------------------------------------------------------------------------------------------

POOL_COLUMNS = (
    "funded",
    "overage",
    "suspense_carried_in",
    "correction",
    "unallocated",
    "outstanding",
    "suspense",
    "suspense_carried",
    "suspense_carried_out",
    "estimated",
    "consumed",
    "written_off",
    "adjustment",
    "credited",
    "soft_cap_extension",
    "overage_used",
    "carried_over_in",
    "carried_over_out",
)
LEASE_COLUMNS = (
    "granted",
    "overage",
    "consumed",
    "returned",
    "outstanding",
    "suspense",
    "suspense_carried_out",
    "estimated",
    "written_off",
    "region_consumed",
    "region_returned",
    "demand_milli",
    "waiting",
    "last_grant",
    "overdraft",
    "overdrawn",
)
_totals_of_pool, _totals_of_lease = itemgetter(*POOL_COLUMNS), itemgetter(*LEASE_COLUMNS)
_totals_in_pool, _totals_in_lease = attrgetter(*POOL_COLUMNS), attrgetter(*LEASE_COLUMNS)
_EMPTY = "{}"
_TRANSFER_COLUMNS = (
    "period",
    "quota",
    "src",
    "dst",
    "units",
    "cause",
    "region",
    "epoch",
    "movement_id",
    "lane",
    "seq",
    "line",
    "part",
    "window_at",
    "dimensions",
    "charge_period",
    "recorded_at",
)
CORRECTION_COLUMNS = (
    "suspense_carried_in",
    "correction",
    "suspense_carried",
    "suspense_carried_out",
    "estimated",
    "consumed",
    "written_off",
    "replaced",
    "recovered",
    "overage_used",
    "region_consumed",
    "region_returned",
    "quarantined",
)


# A lane of another region is not even waited for.
def _locking_lanes(epochs: int, lanes: int, regions: int) -> str:
    """By the numbers of the parameters that name them."""
    return f"""
SELECT lane.epoch, lane.lane, lane.last_seq, lane.last_hash, lane.head,
    region_epoch.state, region_epoch.fingerprint, region_epoch.lanes, region_epoch.lost_data
FROM unnest(${epochs}::text::bigint[], ${lanes}::text::int[], ${regions}::text::text[]) AS asked (epoch, lane, region)
JOIN region_epoch ON region_epoch.epoch = asked.epoch AND region_epoch.region = asked.region
JOIN lane ON lane.epoch = asked.epoch AND lane.lane = asked.lane
ORDER BY lane.epoch, lane.lane FOR SHARE OF region_epoch FOR UPDATE OF lane
"""  # noqa: S608 - numbers of ours


_LOCK_LANES = _locking_lanes(1, 2, 3)
_IN_FORCE = """
SELECT version, stamp,
    coalesce((SELECT max(version) FROM limits_version), 0) AS document_version,
    (SELECT applied_at FROM limits_version ORDER BY limits_version.version DESC LIMIT 1) AS applied_at,
    coalesce((SELECT json_object_agg(tenant, plan) FROM subscription WHERE tenant = ANY ($1::text[])), '{}')::text
        AS plans,
    coalesce((SELECT json_object_agg(tenant, began_at) FROM subscription WHERE tenant = ANY ($1::text[])), '{}')::text
        AS began_at,
    (SELECT version FROM block_version) AS block_version,
    coalesce((
        SELECT json_object_agg(key, value) FROM (
            SELECT DISTINCT ON (key) key, value FROM limit_override
            WHERE key = ANY ($2::text[]) AND valid_from <= $3 AND (valid_until IS NULL OR valid_until > $3)
            ORDER BY key, created_at DESC, id DESC) AS newest), '{}')::text AS overrides"""
_CATALOGUE = f"{_IN_FORCE} FROM policy_version"
_LANES_AND_CATALOGUE = f"""
WITH locked AS MATERIALIZED ({_locking_lanes(4, 5, 6)})
{_IN_FORCE}, (SELECT array_agg(locked) FROM locked) AS locked FROM policy_version
"""  # noqa: S608 - likewise
_WRITTEN = """
SELECT calendar, (SELECT array_agg(id) FROM (
    SELECT id FROM period WHERE period.calendar = asked.calendar ORDER BY ends_at DESC LIMIT 4) AS newest) AS ids
FROM unnest($1::text[]) AS asked (calendar)
WHERE EXISTS (SELECT FROM period WHERE period.calendar = asked.calendar)
"""
_POOLS = """
SELECT pool.*, period.state, period.closed_at
FROM unnest($1::text[], $2::text[]) AS asked (quota, period)
JOIN period ON period.id = asked.period
JOIN pool ON pool.quota = asked.quota AND pool.period = asked.period
ORDER BY pool.period, pool.quota
"""
_LATE = """
SELECT (SELECT coalesce(sum(consumed), 0) FROM correction
        WHERE (correction.quota, correction.period) = (asked.quota, asked.period)) AS late,
    (SELECT coalesce(sum(consumed - overage_used), 0) FROM correction
        WHERE (correction.quota, correction.charge_period) = (asked.quota, asked.period)) AS late_included
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (quota, period, place) ORDER BY place
"""
_UNSEEN = """
SELECT quota FROM unnest($1::text[]) AS asked (quota)
WHERE NOT EXISTS (SELECT FROM pool WHERE pool.quota = asked.quota)
"""
_KNOWN_PERIODS = "SELECT id FROM period WHERE id = ANY ($1::text[])"
_OVERAGES = """
SELECT coalesce((SELECT sum(lease.overage) FROM lease
        WHERE (lease.quota, lease.period, lease.region) = (asked.quota, asked.period, asked.region)), 0)
    + coalesce((SELECT sum(late.correction) FROM correction AS late
        WHERE (late.quota, late.charge_period, late.region) = (asked.quota, asked.period, asked.region)), 0) AS overage
FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS asked (region, quota, period, place) ORDER BY place
"""
_LOCK_POOLS = f"{_POOLS} FOR SHARE OF period FOR UPDATE OF pool"
_LOCK_FREE_POOLS = f"{_POOLS} FOR SHARE OF period SKIP LOCKED FOR UPDATE OF pool SKIP LOCKED"
_INSERT_PERIODS = """
INSERT INTO period (id, kind, starts_at, ends_at, calendar)
SELECT * FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::text[]) ON CONFLICT DO NOTHING
"""
_INSERT_POOLS = """
INSERT INTO pool (quota, period, name, tenant)
SELECT new.* FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS new (quota, period, name, tenant)
JOIN period ON period.id = new.period WHERE period.state <> 'closed' FOR SHARE OF period
ON CONFLICT DO NOTHING
"""
_CLOSED = "SELECT id, closed_at FROM period WHERE id = ANY ($1::text[]) AND state = 'closed'"
_LEASES = """
SELECT lease.*
FROM unnest($1::text::text[], $2::text::text[]) AS asked (quota, period)
JOIN lease ON lease.quota = asked.quota AND lease.period = asked.period
WHERE lease.state = 'active' OR lease.epoch = ANY ($3::text::bigint[]) OR lease.quota = ANY ($4::text::text[])
"""
# A row without a lease where there is none: the version is wanted all the same.
_LEASES_AND_VERSION = f"""
SELECT found.*, policy_version.version AS catalogue_version FROM policy_version LEFT JOIN ({_LEASES}) AS found ON true
"""  # noqa: S608 - a statement of ours
_CORRECTIONS = """
SELECT correction.* FROM unnest($1::text[], $2::text[]) AS asked (quota, charge_period)
JOIN correction USING (quota, charge_period) WHERE correction.epoch = ANY ($3::bigint[])
"""
_EXPIRED = """
SELECT epoch, quota, period FROM lease
WHERE outstanding > 0 AND expires_at <= $1 ORDER BY expires_at LIMIT $2
"""
_SHARE_EPOCHS = """
SELECT epoch, state FROM region_epoch WHERE epoch = ANY ($1::bigint[]) ORDER BY epoch FOR SHARE SKIP LOCKED
"""
_STOPPED = """
SELECT DISTINCT epoch FROM quarantine JOIN lane USING (epoch, lane)
WHERE epoch = ANY ($1::bigint[]) AND quarantine.quota = '' AND quarantine.seq > lane.last_seq
"""
_KEPT = """
SELECT epoch, lane, quarantine.seq, recorded_at FROM unnest($1::bigint[], $2::int[]) AS asked (epoch, lane)
JOIN lane USING (epoch, lane) JOIN quarantine USING (epoch, lane)
WHERE quarantine.quota = '' AND quarantine.seq > lane.last_seq
"""
_NAMED_LEASES = """
SELECT lease.* FROM unnest($1::bigint[], $2::text[], $3::text[]) AS asked (epoch, quota, period)
JOIN lease USING (epoch, quota, period)
"""
_RECEIPTS = """
SELECT epoch, lane, position, head FROM report
JOIN unnest($1::bigint[], $2::int[], $3::bigint[]) AS asked (epoch, lane, seq) USING (epoch, lane, seq)
"""

_INSERT_LEASES = """
INSERT INTO lease (epoch, quota, period, region, state, reported_at, expires_at)
SELECT epoch, quota, period, region, state, reported_at, reported_at
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[])
    AS new (epoch, quota, period, region, state, reported_at)
"""
_FIRST_POOL, _FIRST_LEASE = 10, 10 + len(POOL_COLUMNS)
_POOL_ARRAYS = ", ".join(f"${number}::text::bigint[]" for number in range(_FIRST_POOL, _FIRST_LEASE))
_FIRST_REPORT = _FIRST_LEASE + len(LEASE_COLUMNS)
_LEASE_ARRAYS = ", ".join(f"${number}::text::bigint[]" for number in range(_FIRST_LEASE, _FIRST_REPORT))
_REPORT_TYPES = ("text::bigint[]", "text::int[]", "text::bigint[]", "bytea[]", "bytea[]", "text::int[]")
_REPORT_ARRAYS = ", ".join(f"${number}::{type_}" for number, type_ in enumerate(_REPORT_TYPES, _FIRST_REPORT))
_RECORDED_AT = _FIRST_REPORT + len(_REPORT_TYPES)
_BOOKS = f"""
WITH pools AS (
    UPDATE pool SET {", ".join(f"{column} = new.{column}" for column in POOL_COLUMNS)}
    FROM unnest($1::text::text[], $2::text::text[], {_POOL_ARRAYS}) AS new (quota, period, {", ".join(POOL_COLUMNS)})
    WHERE pool.quota = new.quota AND pool.period = new.period
    RETURNING 1
), leases AS (
    UPDATE lease SET state = new.state, reported_at = new.reported_at, expires_at = new.expires_at,
        {", ".join(f"{column} = new.{column}" for column in LEASE_COLUMNS)}
    FROM unnest($3::text::bigint[], $4::text::text[], $5::text::text[], $6::text::text[], $7::text::text[],
            $8::text::timestamptz[], $9::text::timestamptz[], {_LEASE_ARRAYS})
        AS new (epoch, quota, period, state_was, state, reported_at, expires_at, {", ".join(LEASE_COLUMNS)})
    WHERE lease.epoch = new.epoch AND lease.quota = new.quota AND lease.period = new.period
        AND lease.state = new.state_was
    RETURNING 1
)"""  # noqa: S608 - the names come from the tuples above
_UPDATE_BOOKS = f"{_BOOKS} SELECT (SELECT count(*) FROM pools), (SELECT count(*) FROM leases)"  # noqa: S608
# The precondition once more, in the database's own words: a lane moves on by one, or its report is not booked.
_REPORTS = f"""{_BOOKS}, moved AS (
    UPDATE lane SET last_seq = next.seq, last_hash = next.body_hash, head = next.head
    FROM unnest({_REPORT_ARRAYS})
        AS next (epoch, lane, seq, body_hash, head, lines)
    WHERE lane.epoch = next.epoch AND lane.lane = next.lane AND lane.last_seq = next.seq - 1
    RETURNING next.*
), reports AS (
    INSERT INTO report (epoch, lane, seq, body_hash, head, lines, recorded_at)
    SELECT *, ${_RECORDED_AT}::timestamptz FROM moved
    RETURNING epoch, lane, position
)"""  # noqa: S608 - likewise
_RECEIPTS_OF_BOOKED = """
SELECT (SELECT count(*) FROM pools), (SELECT count(*) FROM leases), epoch, lane, position FROM reports
"""
_TRANSFER_TYPES = (
    *("text", "text", "text", "text", "bigint", "text", "text", "bigint", "uuid", "int", "bigint", "int", "int"),
    *("timestamptz", "jsonb", "text"),
)
_TRANSFER_ARRAYS = ", ".join(
    f"${number}::text::{type_}[]" for number, type_ in enumerate(_TRANSFER_TYPES, _RECORDED_AT + 1)
)
_BOOK = f"{_REPORTS} {_RECEIPTS_OF_BOOKED}"
_BOOK_ALL = f"""{_REPORTS}, transfers AS (
    INSERT INTO transfer ({", ".join(_TRANSFER_COLUMNS)})
    SELECT *, ${_RECORDED_AT}::timestamptz FROM unnest({_TRANSFER_ARRAYS})
)
{_RECEIPTS_OF_BOOKED}"""  # noqa: S608 - likewise
_CORRECTION_TYPES = ["bigint[]"] * (len(CORRECTION_COLUMNS) - 1) + ["boolean[]"]
_WRITE_CORRECTIONS = f"""
INSERT INTO correction (epoch, quota, charge_period, period, region, {", ".join(CORRECTION_COLUMNS)})
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[],
    {", ".join(f"${number}::{type_}" for number, type_ in enumerate(_CORRECTION_TYPES, 6))})
ON CONFLICT (epoch, quota, charge_period, period) DO UPDATE
SET {", ".join(f"{column} = excluded.{column}" for column in CORRECTION_COLUMNS)}
"""  # noqa: S608 - likewise
_MOVE_LANE = """
WITH moved AS (
    UPDATE lane SET last_seq = $4, last_hash = $5, head = $6 WHERE (epoch, lane, last_seq) = ($1, $2, $3) RETURNING 1
)
SELECT count(*) FROM moved
"""
_INSERT_QUARANTINE = """
INSERT INTO quarantine (epoch, lane, seq, quota, period, reason, evidence, recorded_at)
SELECT *, $8::timestamptz
FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::jsonb[])
"""
