"""The invariants of a single step of the ledger, in terms of the protocol, independent of the code that makes it.

The ledger is read before a step and after it. The expected outcome of a batch follows from the state before it, and
grants, returns and suspense follow from the difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import asyncpg

from coordinator.database.connection import Connection
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.submissions import ExchangeCall, Submission
from protocol.messages import ExchangeReply, FrozenLease, Receipt
from protocol.outcomes import ExchangeOutcome

Row = asyncpg.Record
ACKNOWLEDGED = {ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED, ExchangeOutcome.RETIRED}
BOOKED = {ExchangeOutcome.APPLIED, ExchangeOutcome.RETIRED}
REGRESSED = {ExchangeOutcome.GAP, ExchangeOutcome.LEDGER_REGRESSED}
COUNTS_RETURNS = ("active", "expired", "fenced")
DRAINED = ("suspense", "estimated", "written_off")  # by evidence, in this order
STANDS_STILL = {
    "lost": ("returned",),
    "quarantined": ("consumed", "returned", "granted", "estimated", "written_off"),
    "retired": ("consumed", "returned", "granted", "overage"),
}


class Name(NamedTuple):
    epoch: int
    key: Key


class Kept(NamedTuple):
    """A row of the quarantine table."""

    epoch: int
    lane: int
    seq: int
    quota: str
    period: str


class Seen(NamedTuple):
    leases: Mapping[Name, Row]
    pools: Mapping[Key, Row]
    lanes: Mapping[tuple[int, int], Row]
    kept: Mapping[Kept, str]
    closed: Mapping[str, str]  # periods, with all their rows


async def see(connection: Connection) -> Seen:
    return Seen(
        leases={Name(row["epoch"], _key(row)): row for row in await connection.fetch(_LEASES)},
        pools={_key(row): row for row in await connection.fetch(_POOLS)},
        lanes={(row["epoch"], row["lane"]): row for row in await connection.fetch(_LANES)},
        kept={Kept(*row[:5]): row[5] for row in await connection.fetch(_KEPT)},
        closed={row["id"]: row["books"] for row in await connection.fetch(_CLOSED)},
    )


def _key(row: Row) -> Key:
    return Key(row["quota"], row["period"])


# --- effects of a step ------------------------------------------------------------------------------------------------


def faults_of_step(before: Seen, after: Seen, now: datetime) -> Iterator[str]:
    for name, lease in after.leases.items():
        was = before.leases.get(name)
        if lease["admitted"] > (was["admitted"] if was else 0):
            yield from (f"{name} was granted to: {why}" for why in _faults_of_grant(was, lease, after.pools[name.key]))
        if was:
            yield from (f"{name}: {why}" for why in _faults_of_change(was, lease, now))
    for key, pool in after.pools.items():
        yield from (f"{key}: {why}" for why in _faults_of_overage(before.pools.get(key), pool))
        yield from (f"{key}: {why}" for why in _faults_of_limit(before.pools.get(key), pool))
    for place, lane in before.lanes.items():
        if lane["is_shown_lost"] and not after.lanes[place]["is_shown_lost"]:
            yield f"the store of {place} was shown to have lost data, and that is forgotten"
    for period, books in before.closed.items():
        if after.closed.get(period) != books:
            yield f"{period} is closed, and its books are others"
    yield from (f"{kept} is gone or another" for kept, what in before.kept.items() if after.kept.get(kept) != what)


def _faults_of_grant(was: Row | None, lease: Row, pool: Row) -> Iterator[str]:
    if lease["epoch_state"] != "current":
        yield "its epoch is over"
    if lease["state"] != "active":
        yield f"it is {lease['state']}"
    if lease["served"] > (was["served"] if was else 0) and lease["status"] != "active":
        yield f"its region is {lease['status']}"
    if was and was["state"] == "expired":
        given = lease["admitted"] - was["admitted"]
        if (lease["outstanding"], lease["suspense"]) != (given, 0):
            yield "it had expired, and has not returned what was left"
    if pool["unallocated"] < pool["overage"]:
        yield "of what overage had spent"


def _faults_of_change(was: Row, lease: Row, now: datetime) -> Iterator[str]:
    if was["state"] == lease["state"]:
        moved = [column for column in STANDS_STILL.get(was["state"], ()) if was[column] != lease[column]]
        if moved:
            yield f"it is {was['state']}, and {moved} moved"
    elif lease["state"] == "quarantined" and lease["outstanding"]:
        yield "it is in quarantine, and its region may still spend of it"
    if (was["state"], lease["state"]) == ("active", "expired") and was["expires_at"] > now:
        yield "it expired before its time"
    fell = [column for column in ("granted", "overage", "consumed", "returned") if lease[column] < was[column]]
    if fell:
        yield f"{fell} fell"

    if lease["overage_used"] > was["overage_used"] and any(lease[account] for account in DRAINED):
        yield "it has overage beside what evidence was to drain"
    for i, account in enumerate(DRAINED):
        if lease[account] < was[account] and any(lease[earlier] for earlier in DRAINED[:i]):
            yield f"of {account} something went before its turn"


def _faults_of_overage(was: Row | None, pool: Row) -> Iterator[str]:
    """Check that usage beyond a lease is covered from free units first."""
    if was and pool["overage_used"] > was["overage_used"] and pool["taken"] - was["taken"] < was["unallocated"]:
        yield "there is overage, and units were left that nobody holds"


def _faults_of_limit(was: Row | None, pool: Row) -> Iterator[str]:
    """Check that included usage of all regions equals the limit, late usage too, once the limit is known."""
    if was is None or not (was["spendable"] or was["soft_cap_extension"]):
        return
    limits = was["spendable"], pool["spendable"]
    if pool["told_included"] > max(was["told_included"], *limits):
        yield f"{pool['told_included']} are included, and its limit is {limits}"
    if pool["told_beyond"] > was["told_beyond"] and pool["told_included"] < min(limits):
        yield f"there is overage, and of its limit {limits} only {pool['told_included']} are used"


def set_aside(before: Seen, after: Seen) -> list[Name]:
    """Check what expired, of leases that could be spent until then."""
    states = ("active", "expired")
    return [n for n, row in after.leases.items() if (before.leases[n]["state"], row["state"]) == states]


# --- replies to a batch -----------------------------------------------------------------------------------------------


def expected(call: ExchangeCall, incoming: Submission, before: Seen) -> ExchangeOutcome:
    batch = incoming.batch
    lane = before.lanes.get((batch.epoch, batch.lane))
    if lane is None or lane["region"] != call.region:
        return ExchangeOutcome.UNKNOWN_EPOCH
    if lane["state"] == "current" and lane["fingerprint"] != call.fingerprint:
        return ExchangeOutcome.WRONG_FINGERPRINT
    if batch.seq != lane["last_seq"] + 1:
        return _of_another_number(incoming, lane)
    if lane["state"] == "retired":
        return ExchangeOutcome.RETIRED
    known = [(lease, before.leases.get(_name(batch.epoch, lease))) for lease in batch.leases]
    if any(row and _is_less(lease, row) for lease, row in known):
        return ExchangeOutcome.STORE_REGRESSED
    forgot = any(
        lease.granted > (row["granted"] if row else 0) or lease.overage > (row["overage"] if row else 0)
        for lease, row in known
        if row is None or row["state"] != "closed"
    )
    return ExchangeOutcome.LEDGER_REGRESSED if forgot else ExchangeOutcome.APPLIED


def _of_another_number(incoming: Submission, lane: Row) -> ExchangeOutcome:
    if incoming.batch.seq > lane["last_seq"]:
        return ExchangeOutcome.GAP
    if incoming.batch.seq < lane["last_seq"]:
        return ExchangeOutcome.STALE
    if incoming.body_hash != lane["last_hash"]:
        return ExchangeOutcome.CONFLICT
    return ExchangeOutcome.RETIRED if lane["state"] == "retired" else ExchangeOutcome.REPLAYED


def _is_less(lease: FrozenLease, row: Row) -> bool:
    return bool(lease.consumed < row["said_consumed"] or lease.returned < row["said_returned"])


def _name(epoch: int, lease: FrozenLease) -> Name:
    return Name(epoch, Key(lease.quota, lease.period))


# --- outcomes ---------------------------------------------------------------------------------------------------------


async def faults_of_answer(
    connection: Connection, incoming: Submission, reply: ExchangeReply, before: Seen, after: Seen
) -> list[str]:
    """Check that an acknowledged batch has its receipt, and that each lease of it is booked line by line or
    quarantined.
    """
    batch = incoming.batch
    number = (batch.epoch, batch.lane, batch.seq)
    row = await connection.fetchrow(_RECEIPT, *number)
    receipt = Receipt(position=row["position"], head=row["head"].hex()) if row else None
    faults = []
    if reply.receipt != (receipt if reply.outcome in ACKNOWLEDGED else None):
        faults.append(f"the receipt of {number} is {receipt}, and {reply.receipt} was given")
    if reply.outcome in REGRESSED and Kept(*number, "", "") not in after.kept:
        faults.append(f"{number} shows that the ledger forgot, and is not kept")
    if reply.outcome in BOOKED and batch.seq > before.lanes[batch.epoch, batch.lane]["last_seq"]:  # but not twice
        usage = {Key(*each[:2]): each[2] for each in await connection.fetch(_USAGE, *number)}
        faults += _faults_of_leases(number, batch.leases, usage, before, after)
    return faults


def _faults_of_leases(
    number: tuple[int, int, int],
    leases: Sequence[FrozenLease],
    usage: Mapping[Key, int],
    before: Seen,
    after: Seen,
) -> Iterator[str]:
    for lease in leases:
        name = _name(number[0], lease)
        said, was, row = sum(line.units for line in lease.lines), before.leases.get(name), after.leases.get(name)
        grew = lease.consumed - (was["said_consumed"] if was else 0)
        is_new = bool(grew or lease.returned > (was["said_returned"] if was else 0) or lease.lines)
        if Kept(*number, *name.key) in after.kept or not is_new:
            continue
        if row is None or not usage.get(name.key, 0) == said == grew:
            yield f"{number}: {said} units of {name} are neither booked nor kept"
        elif row["state"] in COUNTS_RETURNS and row["returned"] != lease.returned:
            yield f"{number}: what {name} returned is not booked"


def may_be_kept(incoming: Submission, reply: ExchangeReply) -> set[Kept]:
    """Return what this reply did."""
    batch = incoming.batch
    number = (batch.epoch, batch.lane, batch.seq)
    if reply.outcome in REGRESSED:
        return {Kept(*number, "", "")}
    if reply.outcome in BOOKED:
        return {Kept(*number, lease.quota, lease.period) for lease in batch.leases}
    return set()


def tenth(lease_ms: int) -> timedelta:
    return timedelta(milliseconds=lease_ms // 10)


# --- the statements ---------------------------------------------------------------------------------------------------

_LEASES = """
SELECT lease.*, region_epoch.state AS epoch_state, region.status,
    greatest(region_consumed, (SELECT max(late.region_consumed) FROM correction AS late WHERE late.epoch = lease.epoch
        AND late.quota = lease.quota AND late.charge_period = lease.period)) AS said_consumed,
    greatest(region_returned, (SELECT max(late.region_returned) FROM correction AS late WHERE late.epoch = lease.epoch
        AND late.quota = lease.quota AND late.charge_period = lease.period)) AS said_returned,
    coalesce(sum(units) FILTER (WHERE cause = 'grant'), 0) AS admitted,
    coalesce(sum(units) FILTER (WHERE cause = 'grant' AND seq IS NOT NULL), 0) AS served,
    coalesce(sum(units) FILTER (WHERE cause = 'overage'), 0) AS overage_used
FROM lease JOIN region_epoch USING (epoch) JOIN region ON region.name = lease.region
LEFT JOIN transfer USING (epoch, quota, period)
GROUP BY lease.epoch, lease.quota, lease.period, region_epoch.epoch, region.name
"""
_TOLD = """
(SELECT coalesce(sum(told.units), 0)::bigint FROM transfer AS told WHERE dst = 'consumed'
    AND (told.quota, told.charge_period) = (pool.quota, pool.period) AND (dimensions ->> 'counted_as') IS {} 'overage')
"""
_POOLS = f"""
SELECT pool.*, funded + credited AS spendable, {_TOLD.format("DISTINCT FROM")} AS told_included,
    {_TOLD.format("NOT DISTINCT FROM")} AS told_beyond,
    coalesce(sum(units) FILTER (WHERE src = 'unallocated'), 0) AS taken,
    coalesce(sum(units) FILTER (WHERE cause = 'overage' AND seq IS NOT NULL), 0) AS overage_used,
    coalesce(sum(units) FILTER (WHERE cause = 'rebased' AND src = 'funding'), 0) AS rebased
FROM pool LEFT JOIN transfer USING (quota, period) GROUP BY pool.quota, pool.period
"""
_LANES = """
SELECT lane.*, region, state, fingerprint, lost_data AND NOT loss_is_assumed AS is_shown_lost
FROM lane JOIN region_epoch USING (epoch)
"""
_KEPT = "SELECT epoch, lane, seq, quota, period, reason || evidence::text FROM quarantine"
_BOOKS_OF_A_PERIOD = " UNION ALL ".join(
    f"SELECT '{table} ' || row::text AS book FROM {table} AS row WHERE row.period = closed.id"
    for table in ("transfer", "lease", "pool", "correction")
)
_CLOSED = f"""
SELECT id, md5(concat(closed, (SELECT string_agg(book, '|' ORDER BY book) FROM ({_BOOKS_OF_A_PERIOD}) AS its))) AS books
FROM period AS closed WHERE state = 'closed'
"""
_RECEIPT = "SELECT position, head FROM report WHERE (epoch, lane, seq) = ($1, $2, $3)"
_USAGE = """
SELECT quota, charge_period, sum(units)::bigint FROM transfer
WHERE (epoch, lane, seq) = ($1, $2, $3) AND dst = 'consumed' GROUP BY quota, charge_period
"""
