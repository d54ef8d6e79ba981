"""Propose and approve one resolution for many leases: all that a filter finds, such as those of a failed-over store.

A proposal has a resolution for each lease that was found when it was made, so leases that are found later are no part
of it. A call of the approval carries out at most MOST_PER_CALL of them, each in its own transaction, which decides
again whether the resolution still fits its lease. Repeating the approval continues it, and carries out nothing twice.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec

from coordinator.access.audit import record_all
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import TokenName, with_token_names
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.suspense.read_suspense import WAITING, SuspenseFilter
from coordinator.suspense.resolve import Resolution, approve_resolution
from coordinator.suspense.rules import ResolutionKind, ResolutionRefusal

MOST_LEASES = 10_000  # of one proposal
MOST_PER_CALL = 200


class RefusedResolution(msgspec.Struct, frozen=True):
    """A resolution that cannot be carried out any more, because its lease has changed since."""

    id: UUID
    refusal: ResolutionRefusal


class BulkResolution(msgspec.Struct, frozen=True):
    """Resolutions that were proposed together. Those that later proposals have replaced are not counted."""

    id: UUID
    kind: ResolutionKind
    reason: str
    leases: int
    units: int  # in suspense at the time of the proposal
    charged: int  # of these, billed as an estimate
    approved: int  # leases whose resolution is approved and carried out
    proposed_by: UUID
    proposed_at: datetime
    refused: Sequence[RefusedResolution] = ()  # by this call
    next: UUID | None = None  # the last resolution of this call, if there are more: repeat it with `after`
    proposed_by_name: TokenName = msgspec.UNSET


class BulkProposal(NamedTuple):
    id: UUID
    only: SuspenseFilter
    kind: ResolutionKind
    reason: str


class TooManyLeases(NamedTuple):
    leases: int


async def propose_bulk(
    connection: Connection, proposal: BulkProposal, by: Actor, now: datetime
) -> BulkResolution | ResolutionRefusal | TooManyLeases:
    """Propose the same for all leases that the filter finds. A repeated request with the same id changes nothing."""
    if found := await read_bulk(connection, proposal.id):
        return found
    arguments = (*proposal.only.arguments, proposal.kind.value)
    leases = await connection.fetchval(_COUNT, *arguments)
    if leases > MOST_LEASES:
        return TooManyLeases(leases)
    rows = await connection.fetch(_PROPOSE, *arguments, proposal.id, proposal.reason, UUID(by.name), now)
    resolutions = msgspec.convert([dict(row) for row in rows], list[Resolution])
    made = [(str(each.id), msgspec.to_builtins(each)) for each in resolutions]
    await record_all(connection, by, Action.RESOLUTION_PROPOSED, made, now)
    return await read_bulk(connection, proposal.id) or ResolutionRefusal.NO_SUCH_LEASE


async def read_bulk(connection: Connection, id_: UUID) -> BulkResolution | None:
    row = await connection.fetchrow(_READ, id_)
    if row is None:
        return None
    return (await with_token_names(connection, [msgspec.convert(dict(row), BulkResolution)]))[0]


async def approve_bulk(
    database: Database, id_: UUID, after: UUID, by: Actor, now: datetime
) -> BulkResolution | ResolutionRefusal:
    """Approve the next resolutions by id, after the given one, and carry them out."""
    found = await database.read(lambda c: read_bulk(c, id_))
    if found is None:
        return ResolutionRefusal.NO_SUCH_PROPOSAL
    if found.proposed_by == UUID(by.name):
        return ResolutionRefusal.SAME_PERSON
    rows = await database.read(lambda c: c.fetch(_OPEN, id_, after, MOST_PER_CALL + 1))
    names = [row["id"] for row in rows]
    refused = list[RefusedResolution]()
    for name in names[:MOST_PER_CALL]:
        outcome = await _approve(database, name, by, now)
        if isinstance(outcome, ResolutionRefusal):
            refused.append(RefusedResolution(name, outcome))
    done = await database.read(lambda c: read_bulk(c, id_)) or found
    return msgspec.structs.replace(done, refused=refused, next=names[-2] if len(names) > MOST_PER_CALL else None)


async def _approve(database: Database, id_: UUID, by: Actor, now: datetime) -> Resolution | ResolutionRefusal:
    return await database.run(lambda c: approve_resolution(c, id_, by, now))


# --- the statements ---------------------------------------------------------------------------------------------------

_CHOSEN = f"""{WAITING}, chosen AS (
    SELECT * FROM waiting WHERE CASE $7::text WHEN 'unattributed' THEN state = 'quarantined'
        ELSE state <> 'quarantined' AND suspense > 0 END
)"""  # noqa: S608 - all parts are constants
_COUNT = f"{_CHOSEN} SELECT count(*) FROM chosen"  # noqa: S608
_PROPOSE = f"""{_CHOSEN}
INSERT INTO resolution (id, bulk, epoch, quota, period, kind, suspense, charged, reason, proposed_by, proposed_at)
SELECT gen_random_uuid(), $8, epoch, quota, period, $7, suspense, CASE $7 WHEN 'charge' THEN suspense ELSE 0 END,
    $9, $10, $11 FROM chosen
ON CONFLICT (epoch, quota, period, lane) WHERE approved_at IS NULL
DO UPDATE SET id = excluded.id, bulk = excluded.bulk, kind = excluded.kind, suspense = excluded.suspense,
    charged = excluded.charged, reason = excluded.reason, proposed_by = excluded.proposed_by,
    proposed_at = excluded.proposed_at
RETURNING *
"""  # noqa: S608
_READ = """
SELECT bulk AS id, kind, reason, count(*) AS leases, sum(suspense) AS units, sum(charged) AS charged,
    count(approved_at) AS approved, proposed_by, proposed_at
FROM resolution WHERE bulk = $1 GROUP BY bulk, kind, reason, proposed_by, proposed_at
"""
_OPEN = "SELECT id FROM resolution WHERE bulk = $1 AND id > $2 AND approved_at IS NULL ORDER BY id LIMIT $3"
