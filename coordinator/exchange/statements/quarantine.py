"""Evidence that is kept for people to judge, instead of being booked."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from coordinator.database.connection import Connection
from coordinator.exchange.rules.settlement import QuarantineReason
from coordinator.exchange.statements.recordsets import recordset
from protocol.messages import FrozenBatch


class EvidenceRow(NamedTuple):
    """A row of the quarantine. One that keeps a whole batch names no quota and no period."""

    epoch: int
    lane: int
    seq: int
    quota: str
    period: str
    reason: QuarantineReason
    evidence: str  # as JSON


async def insert_quarantine(connection: Connection, rows: Sequence[EvidenceRow], now: datetime) -> None:
    if rows:
        await connection.execute(_INSERT_QUARANTINE, recordset([row._asdict() for row in rows]), now)


async def read_kept_batches(
    connection: Connection, batches: Collection[FrozenBatch]
) -> Mapping[tuple[int, int], Mapping[int, datetime]]:
    """Return when batches of these lanes were kept, by (epoch, lane) and number, as far as the lane has not got yet."""
    kept: dict[tuple[int, int], dict[int, datetime]] = defaultdict(dict)
    lanes = [{"epoch": batch.epoch, "lane": batch.lane} for batch in batches]
    for row in await connection.fetch(_KEPT_BATCHES, recordset(lanes)) if lanes else ():
        kept[row["epoch"], row["lane"]][row["seq"]] = row["recorded_at"]
    return kept


# --- the statements ---------------------------------------------------------------------------------------------------

_INSERT_QUARANTINE = """
INSERT INTO quarantine (epoch, lane, seq, quota, period, reason, evidence, recorded_at)
SELECT epoch, lane, seq, quota, period, reason, evidence::jsonb, $2::timestamptz
FROM json_to_recordset($1)
    AS new (epoch bigint, lane int, seq bigint, quota text, period text, reason text, evidence text)
"""
_KEPT_BATCHES = """
SELECT epoch, lane, quarantine.seq, recorded_at FROM json_to_recordset($1) AS asked (epoch bigint, lane int)
JOIN lane USING (epoch, lane) JOIN quarantine USING (epoch, lane)
WHERE quarantine.quota = '' AND quarantine.seq > lane.last_seq
"""
