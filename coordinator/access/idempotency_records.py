"""What was answered first to a request with an Idempotency-Key, so that the same request is answered alike.

An attempt claims its key, does its work in a transaction of its own, and keeps the answer. So there is a moment in
which the work is done and the answer is not kept; who dies in it leaves a claim, which somebody else takes over when it
is old, and does the work again. That is why all that people do is written to be safe to repeat (coordinator/database/
engine.py asks for it, too).
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

import msgspec

from coordinator.database.connection import Connection

KEPT_FOR = timedelta(hours=24)
ABANDONED_AFTER = timedelta(minutes=3)  # longer than any attempt lasts, its retries included
BATCH = 1000  # forgotten in one turn


class Attempt(NamedTuple):
    caller: UUID
    key: str
    asked: bytes  # the hash of the whole request
    claim: UUID


class FirstAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class NotNow(StrEnum):
    IN_FLIGHT = "in_flight"  # another attempt is at it
    OTHER_REQUEST = "other_request"  # the key was used before, for something else


async def claim(connection: Connection, attempt: Attempt, now: datetime) -> FirstAnswer | NotNow | None:
    """None: the key is this attempt's, to do what is asked."""
    is_ours = await connection.fetchval(_CLAIM, *attempt, now, now - ABANDONED_AFTER, now - KEPT_FOR)
    if is_ours:
        return None
    row = await connection.fetchrow(_FOUND, attempt.caller, attempt.key)
    if row is None:
        return NotNow.IN_FLIGHT  # it was given up at this very moment
    if row["asked"] != attempt.asked:
        return NotNow.OTHER_REQUEST
    if row["status"] is None:
        return NotNow.IN_FLIGHT
    return FirstAnswer(row["status"], msgspec.json.decode(row["headers"]), row["body"])


async def keep(connection: Connection, attempt: Attempt, answer: FirstAnswer) -> None:
    headers = msgspec.json.encode(answer.headers).decode()
    await connection.execute(_KEEP, attempt.caller, attempt.key, attempt.claim, answer.status, headers, answer.body)


async def give_up(connection: Connection, attempt: Attempt) -> None:
    """Nothing is kept: the next attempt is the first."""
    await connection.execute(_GIVE_UP, attempt.caller, attempt.key, attempt.claim)


async def forget(connection: Connection, now: datetime) -> int:
    """Some of what is older than anybody asks for again. How many."""
    done = await connection.execute(_FORGET, now - KEPT_FOR, BATCH)
    return int(done.rpartition(" ")[2])


# A statement that ran and whose answer was lost runs again: its own claim is no surprise to it.
_CLAIM = """
INSERT INTO first_answer (caller, key, asked, claim, claimed_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (caller, key) DO UPDATE SET asked = excluded.asked, claim = excluded.claim,
    claimed_at = excluded.claimed_at, status = NULL, headers = NULL, body = NULL
WHERE first_answer.claimed_at < $7
    OR (first_answer.status IS NULL AND first_answer.asked = excluded.asked
        AND (first_answer.claim = excluded.claim OR first_answer.claimed_at < $6))
RETURNING true
"""
_FOUND = "SELECT asked, status, headers::text AS headers, body FROM first_answer WHERE caller = $1 AND key = $2"
_KEEP = """
UPDATE first_answer SET status = $4, headers = $5::text::jsonb, body = $6
WHERE caller = $1 AND key = $2 AND claim = $3 AND status IS NULL
"""
_GIVE_UP = "DELETE FROM first_answer WHERE caller = $1 AND key = $2 AND claim = $3 AND status IS NULL"
_FORGET = """
DELETE FROM first_answer WHERE (caller, key) IN (
    SELECT caller, key FROM first_answer WHERE claimed_at < $1 ORDER BY claimed_at LIMIT $2 FOR UPDATE SKIP LOCKED)
"""
