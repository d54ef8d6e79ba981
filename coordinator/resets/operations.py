"""Reset keys of a rate: every region forgets what it has counted of them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import with_token_names
from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.limits.read_limits import read_limits
from coordinator.limits.rules.validation import DocumentFault
from coordinator.limits.version import lock_catalogue
from coordinator.notice import Notice
from coordinator.resets.read_resets import Reset
from coordinator.resets.rules import plan_reset
from protocol.messages import Signal

KEPT = timedelta(days=7)  # so long a region may be away and still catch up
MOST_KEPT = 100_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class ResetRequest(NamedTuple):
    quota: str
    subject: Mapping[str, str]  # its values as quota keys have them
    reason: str


class AddedReset(NamedTuple):
    """`reset` is None if it is faulty, or if there are too many."""

    reset: Reset | None
    faults: Sequence[DocumentFault] = ()


async def add_reset(connection: Connection, request: ResetRequest, by: Actor, now: datetime) -> AddedReset:
    """Add a reset, and notify all agents when this transaction commits.

    Its number is the time in milliseconds, or one more than the last: no number comes again after a restore of the
    database, so no store takes a new reset for one that it knows. The lock of the catalogue makes numbers visible in
    their order.
    """
    await lock_catalogue(connection)
    plan = plan_reset((await read_limits(connection)).document, request.quota, request.subject)
    if plan.faults:
        return AddedReset(None, plan.faults)
    await connection.execute("DELETE FROM reset WHERE created_at <= $1", now - KEPT)
    last, count = await connection.fetchrow("SELECT coalesce(max(number), 0), count(*) FROM reset") or (0, 0)
    if count >= MOST_KEPT:
        return AddedReset(None)
    number = max((now - _EPOCH) // _MILLISECOND, last + 1)
    subject = msgspec.json.encode(request.subject).decode()
    await connection.execute(_INSERT, number, request.quota, subject, plan.keys, request.reason, now, by.name)
    await notify(connection, [Notice(Signal(kind="resets"))])
    for key in plan.keys:
        await record(connection, by, Action.RESET_ADDED, key, {"number": number, "reason": request.reason}, now)
    reset = Reset(
        number=number,
        keys=plan.keys,
        quota=request.quota,
        subject=dict(request.subject),
        reason=request.reason,
        created_at=now,
        created_by=by.name,
    )
    return AddedReset((await with_token_names(connection, [reset]))[0])


_INSERT = """
INSERT INTO reset (number, quota, subject, keys, reason, created_at, created_by)
VALUES ($1, $2, $3::text::jsonb, $4, $5, $6, $7)
"""
