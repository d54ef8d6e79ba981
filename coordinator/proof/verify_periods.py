"""Compare the rows of each period with what they follow from: its transfers, its close, and its quota keys.

Finance reads pools, leases, corrections and hourly and daily usage. None of them is proven by itself. All of them are
computed from transfers, which the chains and seals prove, so they are computed again here and compared.
"""

from datetime import datetime

from coordinator.archives.statements import read_archives, usage_hash
from coordinator.database.connection import Connection
from coordinator.periods.close import period_root
from coordinator.proof.rules import FaultKind, LedgerFault
from coordinator.usage.reconcile import read_books
from coordinator.usage.rules.reconciliation import BalanceStatus, Misrolled, reconcile
from protocol.counting import counted
from protocol.identifiers import parse_quota_key
from protocol.periods import period_of

PREFETCH = 2000


async def fault_of_periods(connection: Connection, now: datetime) -> LedgerFault | None:
    """Return the first fault of a close, a row without a period, a rollup or a balance."""
    return (
        await _fault_of_keys(connection)
        or await _fault_of_closes(connection)
        or await _fault_of_pools(connection)
        or await _fault_of_strays(connection)
        or await _fault_of_regions(connection)
        or await _fault_of_sums(connection, now)
        or await _fault_of_archived_usage(connection)
    )


async def _fault_of_keys(connection: Connection) -> LedgerFault | None:
    """Compare the kind and the bounds of each period with its id, from which all of them follow."""
    for row in await connection.fetch(_KEYS):
        calendar = row["calendar"]
        try:
            named = period_of(row["id"])
        except ValueError:
            return _of_period(FaultKind.PERIOD_CHANGED, "its id names no period", row["id"])
        if calendar not in (None, str(named.calendar)):
            return _of_period(FaultKind.PERIOD_CHANGED, "its calendar is not the one of its id", row["id"])
        bounds = named.calendar.kind.value, named.starts_at, named.ends_at
        if (row["kind"], row["starts_at"], row["ends_at"]) != bounds:
            return _of_period(FaultKind.PERIOD_CHANGED, "its kind and bounds are not those of its id", row["id"])
    return None


async def _fault_of_closes(connection: Connection) -> LedgerFault | None:
    """Compare each closed period with its close, whose root is in the audit. Its transfers are proven by then."""
    for row in await connection.fetch(_CLOSED):
        if row["there"] != row["transfers"]:
            reason = f"it was closed with {counted(row['transfers'], 'transfer')}, and has {row['there']}"
            return _of_period(FaultKind.CLOSED_PERIOD_CHANGED, reason, row["id"])
        if await period_root(connection, row["id"]) != row["root"]:
            reason = "its pools, leases and corrections do not hash to its root"
            return _of_period(FaultKind.CLOSED_PERIOD_CHANGED, reason, row["id"])
    return None


def _of_period(kind: FaultKind, reason: str, period: str) -> LedgerFault:
    return LedgerFault(kind, reason, period=period, table="period", key=period)


async def _fault_of_pools(connection: Connection) -> LedgerFault | None:
    """Compare the name and the tenant of each pool, by which statements find it, with its quota key."""
    async for row in connection.cursor(_POOLS, prefetch=PREFETCH):
        quota, period, name, tenant = row
        try:
            key_name, subject = parse_quota_key(quota)
        except ValueError:
            return LedgerFault(
                FaultKind.POOL_CHANGED, "its quota is no quota key", period=period, table="pool", key=quota
            )
        if (name, tenant) != (key_name, subject.get("tenant")):
            reason = f"it is stored as {name!r} of {tenant!r}, and its key says otherwise"
            return LedgerFault(FaultKind.POOL_CHANGED, reason, period=period, table="pool", key=quota)
    return None


async def _fault_of_strays(connection: Connection) -> LedgerFault | None:
    """Find rows of a period that does not exist: no period would be compared with them."""
    row = await connection.fetchrow(_STRAYS)
    if row is None:
        return None
    kind = FaultKind.BALANCE if row["source"] == "pool" else FaultKind.ROLLUP_DIFFERS
    reason = f"there is no period {row['period']!r}"
    return LedgerFault(kind, reason, period=row["period"], table=row["source"], key=row["quota"])


async def _fault_of_regions(connection: Connection) -> LedgerFault | None:
    """Compare the region of each lease and correction, by which statements list it, with that of its epoch."""
    row = await connection.fetchrow(_REGIONS)
    if row is None:
        return None
    reason = f"it names the region {row['region']!r}, and its epoch is of {row['its']!r}"
    place = {"table": row["source"], "key": row["quota"]}
    return LedgerFault(FaultKind.LEASE_CHANGED, reason, epoch=row["epoch"], period=row["period"], **place)


async def _fault_of_sums(connection: Connection, now: datetime) -> LedgerFault | None:
    for row in await connection.fetch("SELECT id FROM period ORDER BY id"):
        books = await read_books(connection, row["id"])
        if books.misrolled:
            return _fault_of_rollup(row["id"], books.misrolled[0])
        for finding in reconcile(row["id"], books, now).findings:
            if finding.kind is BalanceStatus.PROJECTION:
                reason = f"{finding.quota_key}: {finding.reason}"
                return LedgerFault(FaultKind.BALANCE, reason, period=row["id"], key=finding.quota_key)
    return None


async def _fault_of_archived_usage(connection: Connection) -> LedgerFault | None:
    """Compare the usage of archived periods with what was recorded: its transfers are not here to be added up."""
    for archive in await read_archives(connection):
        if await usage_hash(connection, archive.period) != archive.usage_sha256:
            reason = "its rows do not hash to what its archive recorded"
            return LedgerFault(FaultKind.ROLLUP_DIFFERS, reason, period=archive.period, table="usage_hour")
    return None


def _fault_of_rollup(period: str, differs: Misrolled) -> LedgerFault:
    rows, units = counted(differs.rows, "row"), counted(differs.units, "unit")
    reason = f"{rows} differ from the transfers, by {units} in all"
    key = f"{differs.quota} in {differs.region} from {differs.begins_at:%Y-%m-%dT%H:%MZ}"
    return LedgerFault(FaultKind.ROLLUP_DIFFERS, reason, period=period, table=differs.rollup, key=key)


# --- the statements ---------------------------------------------------------------------------------------------------

_KEYS = "SELECT id, kind, starts_at, ends_at, calendar FROM period ORDER BY id"
_REGIONS = """
SELECT source, epoch, quota, period, kept.region, region_epoch.region AS its FROM (
    SELECT 'lease' AS source, epoch, quota, period, region FROM lease
    UNION ALL SELECT 'correction', epoch, quota, period, region FROM correction
) AS kept LEFT JOIN region_epoch USING (epoch) WHERE kept.region IS DISTINCT FROM region_epoch.region LIMIT 1
"""
_CLOSED = """
SELECT id, transfers, root, (SELECT count(*) FROM transfer WHERE transfer.period = period.id)
    + (SELECT coalesce(sum(transfers), 0) FROM archived_sum WHERE archived_sum.period = period.id) AS there
FROM period WHERE state = 'closed' ORDER BY id
"""
_POOLS = "SELECT quota, period, name, tenant FROM pool ORDER BY period, quota"
_STRAYS = """
SELECT source, period, quota FROM (
    SELECT 'pool' AS source, period, quota FROM pool
    UNION ALL SELECT 'usage_hour', period, quota FROM usage_hour
    UNION ALL SELECT 'usage_day', period, quota FROM usage_day
    UNION ALL SELECT 'labelled_usage', period, quota FROM labelled_usage
) AS kept WHERE NOT EXISTS (SELECT FROM period WHERE period.id = kept.period) LIMIT 1
"""
