"""Verifications that people ask for: done by whichever coordinator comes first, and kept with what was found."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID, uuid4

import asyncpg
import msgspec
from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.proof.rules import KeptSeal
from coordinator.proof.verify import Verification, verify
from protocol.clock import Clock


class AskedVerification(Struct, frozen=True):
    """Without a result it is still to be done, or being done."""

    id: UUID
    asked_at: datetime
    finished_at: datetime | None
    result: Verification | None
    kept: list[KeptSeal]  # compared with the seals that are there


async def ask_verification(
    connection: Connection, token_id: UUID, kept: Sequence[KeptSeal], now: datetime
) -> AskedVerification:
    row = await connection.fetchrow(_ASK, uuid4(), token_id, now, msgspec.json.encode(kept).decode())
    assert row is not None
    return _asked(row)


async def read_verification(connection: Connection, verification_id: UUID) -> AskedVerification | None:
    row = await connection.fetchrow("SELECT * FROM verification WHERE id = $1", verification_id)
    return _asked(row) if row else None


async def do_verifications(database: Database, clock: Clock) -> None:
    """All that wait. Each on its own: whoever asked later may mean what was booked since."""
    while await _do_next(database, clock):
        pass


async def _do_next(database: Database, clock: Clock) -> bool:
    asked = await database.read(lambda c: c.fetchrow(_NEXT))
    if asked is None:
        return False
    next_id, kept = asked["id"], _kept(asked)
    found = await database.run(lambda c: verify(c, clock.now(), kept), snapshot=True)
    result = msgspec.json.encode(found).decode()
    await database.run(lambda c: c.execute(_FINISH, next_id, result, clock.now()))
    return True


def _asked(row: asyncpg.Record) -> AskedVerification:
    result = row["result"] and msgspec.json.decode(row["result"], type=Verification)
    return AskedVerification(row["id"], row["asked_at"], row["finished_at"], result, _kept(row))


def _kept(row: asyncpg.Record) -> list[KeptSeal]:
    return msgspec.json.decode(row["kept"], type=list[KeptSeal])


VERIFICATIONS_WAITING = "EXISTS (SELECT FROM verification WHERE result IS NULL)"  # the job has work
_ASK = "INSERT INTO verification (id, asked_by, asked_at, kept) VALUES ($1, $2, $3, $4::text::jsonb) RETURNING *"
_NEXT = "SELECT id, kept FROM verification WHERE result IS NULL ORDER BY asked_at, id LIMIT 1"
_FINISH = "UPDATE verification SET result = $2, finished_at = $3 WHERE id = $1 AND result IS NULL"
