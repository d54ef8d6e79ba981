"""Lanes and their epochs, and the receipts of what was booked in them."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from coordinator.database.connection import Connection
from coordinator.database.expect import expect_rows
from coordinator.exchange.rules.decision import BookedReport
from coordinator.exchange.rules.settlement import EpochState, Lane
from coordinator.exchange.rules.submissions import ValidCredentials
from coordinator.exchange.statements.recordsets import recordset
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import CATALOGUE, arguments_of_catalogue, catalogue_of_row
from coordinator.limits.rules.entitlement import Catalogue
from protocol.messages import Receipt


class LaneName(NamedTuple):
    """A lane, and the region that says it is its own."""

    epoch: int
    lane: int
    region: str


async def lock_lane(connection: Connection, epoch: int, lane: int) -> Lane | None:
    row = await connection.fetchrow(_LOCK_LANE, epoch, lane)
    return _lane_of(tuple(row)) if row else None


class LockedLanes(NamedTuple):
    """The result of a transaction's first statement: everything in it is of one moment."""

    lanes: dict[tuple[int, int], Lane]  # those that were issued to their region, by (epoch, lane)
    catalogue: Catalogue
    valid: ValidCredentials


async def lock_lanes_and_read_catalogue(
    connection: Connection,
    documents: Documents,
    names: Collection[LaneName],
    quotas: Collection[str],
    token_hashes: Collection[bytes],
    identities: Collection[str],
    now: datetime,
) -> LockedLanes:
    """Lock lanes, read what is in force, and confirm tokens and certificates, in one statement.

    A lane of another region is not even waited for.
    """
    wanted = recordset([name._asdict() for name in names])
    arguments = *arguments_of_catalogue(quotas, now), wanted, token_hashes, identities
    row = await connection.fetchrow(_LANES_AND_CATALOGUE, *arguments)
    assert row is not None
    lanes = {(each[0], each[1]): _lane_of(each) for each in row["locked"] or ()}
    catalogue = await catalogue_of_row(connection, documents, row, quotas)
    regions = dict(row["valid_identities"] or ())
    return LockedLanes(lanes, catalogue, ValidCredentials(frozenset(row["valid_tokens"] or ()), regions))


def _lane_of(columns: Sequence[Any]) -> Lane:
    """Take the columns in the order of both statements."""
    epoch, lane, last_seq, last_hash, head, state, *rest = columns
    return Lane(epoch, lane, last_seq, last_hash, head, EpochState(state), *rest)


async def share_current_epochs(connection: Connection, epochs: Collection[int]) -> set[int]:
    """Hold those of the epochs that are current, so that they stay current until the transaction ends, and return them.

    It never waits, as it comes out of the order of locks. Epochs of which a lane stands still because the ledger lost
    data are left out: they are granted nothing.
    """
    if not epochs:
        return set()
    rows = await connection.fetch(SHARE_EPOCHS, sorted(epochs))
    stopped = {row["epoch"] for row in await connection.fetch(_STOPPED_EPOCHS, sorted(epochs))}
    return {row["epoch"] for row in rows if row["state"] == "current"} - stopped


async def read_receipts(
    connection: Connection, reports: Collection[tuple[int, int, int]]
) -> dict[tuple[int, int], Receipt]:
    """Return by (epoch, lane) the receipt that was given for a report, which is named by (epoch, lane, seq)."""
    if not reports:
        return {}
    epochs, lanes, seqs = zip(*reports, strict=True)
    rows = await connection.fetch(_RECEIPTS, epochs, lanes, seqs)
    return {(row["epoch"], row["lane"]): Receipt(position=row["position"], head=row["head"].hex()) for row in rows}


async def fill_lane(connection: Connection, lane: Lane, reports: Sequence[BookedReport], now: datetime) -> None:
    """Write reports of nothing for the numbers that the ledger lost, and let the lane continue after the last."""
    last = reports[-1]
    rows = [
        (lane.epoch, lane.lane, each.report.seq, each.body_hash, each.head, len(each.report.transfers), now)
        for each in reports
    ]
    columns = ("epoch", "lane", "seq", "body_hash", "head", "lines", "recorded_at")
    await connection.copy_records_to_table("report", records=rows, columns=columns)
    advanced = await connection.fetchval(
        _ADVANCE_LANE, lane.epoch, lane.lane, lane.last_seq, last.report.seq, last.body_hash, last.head
    )
    expect_rows((advanced,), (1,), "lanes")


# --- the statements ---------------------------------------------------------------------------------------------------

_LOCK_LANE = """
SELECT lane.epoch, lane.lane, lane.last_seq, lane.last_hash, lane.head,
    region_epoch.state, region_epoch.fingerprint, region_epoch.lanes, region_epoch.lost_data
FROM lane JOIN region_epoch USING (epoch) WHERE lane.epoch = $1 AND lane.lane = $2
FOR SHARE OF region_epoch FOR UPDATE OF lane
"""
_LOCK_LANES = """
WITH locked AS MATERIALIZED (
    SELECT lane.epoch, lane.lane, lane.last_seq, lane.last_hash, lane.head,
        region_epoch.state, region_epoch.fingerprint, region_epoch.lanes, region_epoch.lost_data
    FROM json_to_recordset($4) AS named (epoch bigint, lane int, region text)
    JOIN region_epoch ON region_epoch.epoch = named.epoch AND region_epoch.region = named.region
    JOIN lane ON lane.epoch = named.epoch AND lane.lane = named.lane
    ORDER BY lane.epoch, lane.lane FOR SHARE OF region_epoch FOR UPDATE OF lane
)
SELECT (SELECT array_agg(locked) FROM locked) AS locked,
    (SELECT array_agg(hash) FROM token WHERE hash = ANY ($5::bytea[]) AND revoked_at IS NULL) AS valid_tokens,
    (SELECT array_agg((identity, region)) FROM region_identity WHERE identity = ANY ($6::text[])) AS valid_identities,
    catalogue.* FROM ("""
_LANES_AND_CATALOGUE = _LOCK_LANES + CATALOGUE + ") AS catalogue"
SHARE_EPOCHS = """
SELECT epoch, state FROM region_epoch WHERE epoch = ANY ($1::bigint[]) ORDER BY epoch FOR SHARE SKIP LOCKED
"""
_STOPPED_EPOCHS = """
SELECT DISTINCT epoch FROM quarantine JOIN lane USING (epoch, lane)
WHERE epoch = ANY ($1::bigint[]) AND quarantine.quota = '' AND quarantine.seq > lane.last_seq
"""
_RECEIPTS = """
SELECT epoch, lane, position, head FROM report
JOIN unnest($1::bigint[], $2::int[], $3::bigint[]) AS asked (epoch, lane, seq) USING (epoch, lane, seq)
"""
_ADVANCE_LANE = """
WITH moved AS (
    UPDATE lane SET last_seq = $4, last_hash = $5, head = $6 WHERE (epoch, lane, last_seq) = ($1, $2, $3) RETURNING 1
)
SELECT count(*) FROM moved
"""
