"""Read the lanes of epochs, and which of them wait for people because the ledger has lost data."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from msgspec import Struct, convert

from coordinator.database.connection import Connection


class LaneName(NamedTuple):
    epoch: int = 0
    lane: int = -1


class LaneView(Struct, frozen=True, kw_only=True):
    """A lane. One that waits was offered a batch that is further than the ledger: people rebase it."""

    region: str
    epoch: int
    epoch_state: str
    cell: int
    lane: int
    last_seq: int  # the number of the last batch that was booked
    waiting_seq: int | None  # the number of the batch that waits; null: the lane goes on
    waiting_since: datetime | None
    lacking: int | None  # numbers that the ledger lost
    proposal: UUID | None  # to rebase it, until another person approves
    proposed_by: UUID | None


async def read_lanes(
    connection: Connection, regions: Sequence[str], only_waiting: bool, after: LaneName, count: int
) -> list[LaneView]:
    """Return up to `count` lanes by epoch and number, from the one after `after`."""
    rows = await connection.fetch(_LANES, *after, list(regions), only_waiting, count)
    return [convert(dict(row), LaneView) for row in rows]


_LANES = """
SELECT its.region, lane.epoch, its.state AS epoch_state, its.cell, lane.lane, lane.last_seq, kept.seq AS waiting_seq,
    kept.since AS waiting_since, kept.seq - lane.last_seq - 1 AS lacking, open.id AS proposal, open.proposed_by
FROM lane JOIN region_epoch AS its USING (epoch)
LEFT JOIN LATERAL (
    SELECT seq, min(recorded_at) OVER () AS since FROM quarantine
    WHERE quarantine.epoch = lane.epoch AND quarantine.lane = lane.lane AND quota = '' AND seq > lane.last_seq
    ORDER BY recorded_at DESC, seq DESC LIMIT 1) AS kept ON true
LEFT JOIN resolution AS open ON open.epoch = lane.epoch AND open.lane = lane.lane AND open.approved_at IS NULL
WHERE (lane.epoch, lane.lane) > ($1, $2) AND ($3::text[] = '{}' OR its.region = ANY ($3))
    AND (NOT $4::bool OR kept.seq IS NOT NULL)
ORDER BY lane.epoch, lane.lane LIMIT $5
"""
