"""Override the limit of some of a quota's keys for a time, from now on or from later on."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import with_token_names
from coordinator.database.connection import Connection
from coordinator.limits.read_limits import read_limits
from coordinator.limits.rules.validation import DocumentFault
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.overrides.read_overrides import Override, read_override
from coordinator.overrides.rules import faults_of_override
from protocol.identifiers import subject_key

MAX_OVERRIDES = 10_000  # that have not ended: each agent holds all of them


class AddedOverride(NamedTuple):
    override: Override
    faults: Sequence[DocumentFault] = ()
    is_full: bool = False


async def add_override(connection: Connection, override: Override, by: Actor | None, now: datetime) -> AddedOverride:
    """Add an override. If one with the same id exists, return that one, so that a retry adds nothing."""
    await lock_catalogue(connection)
    found = await read_override(connection, override.id)
    if found is not None:
        return AddedOverride(found)
    limits = await read_limits(connection)
    if faults := faults_of_override(limits.document, override.quota, override.subject, override.limit):
        return AddedOverride(override, faults)
    if await connection.fetchval(_COUNT, now) >= MAX_OVERRIDES:
        return AddedOverride(override, is_full=True)
    subject, limit = (msgspec.json.encode(part).decode() for part in (override.subject, override.limit))
    key = subject_key(override.quota, override.subject)
    validity = override.valid_from, override.valid_until
    await connection.execute(
        _INSERT, override.id, key, override.quota, subject, limit, *validity, override.reason, now, override.created_by
    )
    await advance_catalogue(connection)
    await record(connection, by, Action.OVERRIDE_ADDED, key, msgspec.to_builtins(override), now)
    return AddedOverride((await with_token_names(connection, [override]))[0])


async def delete_override(connection: Connection, id_: UUID, by: Actor | None, now: datetime) -> bool:
    """Delete an override, and return whether there was one. The audit keeps what it was."""
    await lock_catalogue(connection)
    found = await read_override(connection, id_)
    if found is None:
        return False
    found = msgspec.structs.replace(found, created_by_name=msgspec.UNSET)  # the audit has ids, as for the addition
    await connection.execute("DELETE FROM limit_override WHERE id = $1", id_)
    await advance_catalogue(connection)
    about = subject_key(found.quota, found.subject)
    await record(connection, by, Action.OVERRIDE_DELETED, about, {"was": msgspec.to_builtins(found)}, now)
    return True


_COUNT = "SELECT count(*) FROM limit_override WHERE valid_until IS NULL OR valid_until > $1"
_INSERT = """
INSERT INTO limit_override (id, key, quota, subject, value, valid_from, valid_until, reason, created_at, created_by)
VALUES ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $7, $8, $9, $10)
"""
