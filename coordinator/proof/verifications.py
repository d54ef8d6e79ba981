"""Requested verifications: run by any coordinator, and kept with their results."""

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
    """A requested verification. Without a result it waits or is running."""

    id: UUID
    requested_at: datetime
    finished_at: datetime | None
    result: Verification | None
    kept_seals: list[KeptSeal]  # seals to compare with those of the database


async def ask_verification(
    connection: Connection, token_id: UUID, kept_seals: Sequence[KeptSeal], now: datetime
) -> AskedVerification:
    row = await connection.fetchrow(_INSERT, uuid4(), token_id, now, msgspec.json.encode(kept_seals).decode())
    assert row is not None
    return _verification_of(row)


async def read_verification(connection: Connection, verification_id: UUID) -> AskedVerification | None:
    row = await connection.fetchrow("SELECT * FROM verification WHERE id = $1", verification_id)
    return _verification_of(row) if row else None


async def run_verifications(database: Database, clock: Clock) -> None:
    """Run the verifications that wait, one after the other: a later request may be about what was booked since."""
    while await _do_next(database, clock):
        pass


async def _do_next(database: Database, clock: Clock) -> bool:
    waiting = await database.read(lambda c: c.fetchrow(_NEXT))
    if waiting is None:
        return False
    next_id, kept_seals = waiting["id"], _kept_seals(waiting)
    found = await database.run(lambda c: verify(c, clock.now(), kept_seals), snapshot=True)
    result = msgspec.json.encode(found).decode()
    await database.run(lambda c: c.execute(_FINISH, next_id, result, clock.now()))
    return True


def _verification_of(row: asyncpg.Record) -> AskedVerification:
    result = row["result"] and msgspec.json.decode(row["result"], type=Verification)
    return AskedVerification(row["id"], row["requested_at"], row["finished_at"], result, _kept_seals(row))


def _kept_seals(row: asyncpg.Record) -> list[KeptSeal]:
    return msgspec.json.decode(row["kept_seals"], type=list[KeptSeal])


VERIFICATIONS_WAITING = "EXISTS (SELECT FROM verification WHERE result IS NULL)"
_INSERT = """
INSERT INTO verification (id, requested_by, requested_at, kept_seals)
VALUES ($1, $2, $3, $4::text::jsonb) RETURNING *
"""
_NEXT = "SELECT id, kept_seals FROM verification WHERE result IS NULL ORDER BY requested_at, id LIMIT 1"
_FINISH = "UPDATE verification SET result = $2, finished_at = $3 WHERE id = $1 AND result IS NULL"
