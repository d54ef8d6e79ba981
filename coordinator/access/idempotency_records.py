"""The stored response to the first request with an Idempotency-Key, which a repeated request is given again.

An attempt claims its key, does its work in a transaction of its own, and stores the response. Between the commit of the
work and the storing of the response a process may die. It leaves a claim without a response, which another attempt
takes over after ABANDONED_AFTER, and does the work again. Therefore each operation behind a key is safe to repeat, as
coordinator/database/engine.py demands anyway.
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
BATCH = 1000  # records deleted in one transaction


class Attempt(NamedTuple):
    caller: UUID
    key: str
    request_hash: bytes
    claim: UUID


class StoredResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class KeyConflict(StrEnum):
    """The reason why an attempt cannot use its key."""

    IN_FLIGHT = "in_flight"  # another attempt is working on the same request
    OTHER_REQUEST = "other_request"  # the key was used for another request


async def claim(connection: Connection, attempt: Attempt, now: datetime) -> StoredResponse | KeyConflict | None:
    """Claim the key for this attempt, and return None. Otherwise return the stored response, or why there is none."""
    is_ours = await connection.fetchval(_CLAIM, *attempt, now, now - ABANDONED_AFTER, now - KEPT_FOR)
    if is_ours:
        return None
    row = await connection.fetchrow(_FIND, attempt.caller, attempt.key)
    if row is None:
        return KeyConflict.IN_FLIGHT  # it was released at this very moment
    if row["request_hash"] != attempt.request_hash:
        return KeyConflict.OTHER_REQUEST
    if row["status"] is None:
        return KeyConflict.IN_FLIGHT
    return StoredResponse(row["status"], msgspec.json.decode(row["headers"]), row["body"])


async def store(connection: Connection, attempt: Attempt, response: StoredResponse) -> None:
    """Store the response, unless another attempt has taken the claim over."""
    headers = msgspec.json.encode(response.headers).decode()
    await connection.execute(
        _STORE, attempt.caller, attempt.key, attempt.claim, response.status, headers, response.body
    )


async def release(connection: Connection, attempt: Attempt) -> None:
    """Delete the claim of an attempt that failed: the next attempt counts as the first."""
    await connection.execute(_RELEASE, attempt.caller, attempt.key, attempt.claim)


async def delete_expired(connection: Connection, now: datetime) -> int:
    """Delete a batch of expired records, and return how many there were."""
    done = await connection.execute(_DELETE_EXPIRED, now - KEPT_FOR, BATCH)
    return int(done.rpartition(" ")[2])


# Postgres may have executed a statement whose answer was lost. It is sent again, and meets the claim that it made.
_CLAIM = """
INSERT INTO idempotency_record (caller, key, request_hash, claim, claimed_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (caller, key) DO UPDATE SET request_hash = excluded.request_hash, claim = excluded.claim,
    claimed_at = excluded.claimed_at, status = NULL, headers = NULL, body = NULL
WHERE idempotency_record.claimed_at < $7
    OR (idempotency_record.status IS NULL AND idempotency_record.request_hash = excluded.request_hash
        AND (idempotency_record.claim = excluded.claim OR idempotency_record.claimed_at < $6))
RETURNING true
"""
_FIND = """
SELECT request_hash, status, headers::text AS headers, body FROM idempotency_record WHERE caller = $1 AND key = $2
"""
_STORE = """
UPDATE idempotency_record SET status = $4, headers = $5::text::jsonb, body = $6
WHERE caller = $1 AND key = $2 AND claim = $3 AND status IS NULL
"""
_RELEASE = "DELETE FROM idempotency_record WHERE caller = $1 AND key = $2 AND claim = $3 AND status IS NULL"
RECORDS_EXPIRED = (
    "EXISTS (SELECT FROM idempotency_record"
    f" WHERE claimed_at < $2::timestamptz - make_interval(secs => {KEPT_FOR.total_seconds():.0f}))"
)
_DELETE_EXPIRED = """
DELETE FROM idempotency_record WHERE (caller, key) IN (
    SELECT caller, key FROM idempotency_record WHERE claimed_at < $1
    ORDER BY claimed_at LIMIT $2 FOR UPDATE SKIP LOCKED)
"""
