"""Give some of a quota's keys another limit, for a while: now, or announced for later."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.read_limits import read_limits
from coordinator.limits.rules.validation import Fault
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.overrides.read_overrides import Override, read_override
from coordinator.overrides.rules import faults_of_override
from protocol.identifiers import subject_key

MAX_OVERRIDES = 10_000  # that are not over: each agent has them all


class AddedOverride(NamedTuple):
    override: Override
    faults: Sequence[Fault] = ()
    is_full: bool = False


async def add_override(connection: Connection, wanted: Override, by: Actor | None, now: datetime) -> AddedOverride:
    """The same id again finds the first one: nothing happens twice."""
    await lock_catalogue(connection)
    found = await read_override(connection, wanted.id)
    if found is not None:
        return AddedOverride(found)
    limits = await read_limits(connection)
    if faults := faults_of_override(limits.document, wanted.quota, wanted.subject, wanted.limit):
        return AddedOverride(wanted, faults)
    if await connection.fetchval(_COUNT, now) >= MAX_OVERRIDES:
        return AddedOverride(wanted, is_full=True)
    subject, limit = (msgspec.json.encode(part).decode() for part in (wanted.subject, wanted.limit))
    key = subject_key(wanted.quota, wanted.subject)
    validity = wanted.valid_from, wanted.valid_until
    await connection.execute(
        _INSERT, wanted.id, key, wanted.quota, subject, limit, *validity, wanted.reason, now, wanted.created_by
    )
    await advance_catalogue(connection)
    await record(connection, by, Action.OVERRIDE_ADDED, key, msgspec.to_builtins(wanted), now)
    return AddedOverride(wanted)


_COUNT = "SELECT count(*) FROM limit_override WHERE valid_until IS NULL OR valid_until > $1"
_INSERT = """
INSERT INTO limit_override (id, key, quota, subject, value, valid_from, valid_until, reason, created_at, created_by)
VALUES ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $7, $8, $9, $10)
"""
