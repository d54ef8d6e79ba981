"""Plan a rebalance for people, or begin it. From then on `follow.py` sees it through, in any coordinator.

One rebalance begins at a time, behind the catalogue's lock. Plans that were made before are refused then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import with_token_names
from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.exchange.statements.leases import read_leases
from coordinator.limits.in_force import Documents
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.rebalancing.holds import begin_holds
from coordinator.rebalancing.moves import begin_moves
from coordinator.rebalancing.planning import PlannedRebalance, plan_request
from coordinator.rebalancing.read_rebalances import newest_version, read_rebalance, rebalances_since
from coordinator.rebalancing.refusals import NewerRebalances, RebalanceRefused, RebalanceRunning, Refusal
from coordinator.rebalancing.rules.division import recall_notice
from coordinator.rebalancing.rules.region_settings import NOTHING_SET, Setting
from coordinator.rebalancing.schemas import RUNNING, AnyRebalance, Drain, Progress, Rebalance, Restore
from coordinator.regions.put_region import ACTIVE, DRAINING, put_region

MAX_NEWER = 20  # rebalances that a refusal lists


@dataclass(frozen=True)
class RebalanceRequest:
    """The requester, and the version that they have seen."""

    id: UUID
    body: AnyRebalance
    by: Actor
    is_expected: Callable[[int], bool]  # of the newest version

    def as_json(self) -> dict[str, Any]:
        """Return the body as it is stored and shown."""
        return self.body.model_dump(by_alias=True, exclude={"dry_run"})


async def plan_rebalance(
    connection: Connection, documents: Documents, request: RebalanceRequest, now: datetime
) -> Rebalance | Refusal:
    """Return what would be done. Nothing is locked and nothing is changed."""
    try:
        planned = await plan_request(connection, documents, request.body, now, lock=False)
    except RebalanceRefused as refused:
        return refused.refusal
    rebalance = Rebalance(
        id=None,
        version=await newest_version(connection),
        mode=request.body.mode,
        request=request.as_json(),
        state="planned",
        reason=None,
        plan=planned.plan,
        progress=Progress(sum(move.units for move in planned.plan.moves), 0, 0),
        moves=[],
        waits_for=[],
        created_at=now,
        created_by=request.by.name,
        ended_at=None,
    )
    return (await with_token_names(connection, [rebalance]))[0]


async def begin_rebalance(
    connection: Connection, documents: Documents, request: RebalanceRequest, now: datetime
) -> Rebalance | Refusal:
    """Begin a rebalance, or return the one of this id. A refusal changes nothing."""
    await lock_catalogue(connection)
    if found := await read_rebalance(connection, request.id):
        return found
    newest = await newest_version(connection)
    if not request.is_expected(newest):
        return NewerRebalances(await _newer(connection, request, newest))
    try:
        planned = await plan_request(connection, documents, request.body, now, lock=True)
        await _refuse_if_running(connection, planned)
    except RebalanceRefused as refused:
        return refused.refusal
    return await _begin(connection, request, planned, now)


async def _newer(connection: Connection, request: RebalanceRequest, newest: int) -> list[Rebalance]:
    """Return rebalances since the version that the request expects. If it expects none, return only the newest."""
    versions = range(newest, max(newest - MAX_NEWER, 0), -1)
    known = next((version for version in versions if request.is_expected(version)), None)
    return await rebalances_since(connection, newest - 1 if known is None else known)


async def _refuse_if_running(connection: Connection, planned: PlannedRebalance) -> None:
    keys = [move.key for move in planned.plan.moves]
    other = await connection.fetchval(_RUNNING, [key.quota for key in keys], [key.period for key in keys])
    if other is not None:
        raise RebalanceRefused(RebalanceRunning(other))


# --- beginning --------------------------------------------------------------------------------------------------------


async def _begin(
    connection: Connection, request: RebalanceRequest, planned: PlannedRebalance, now: datetime
) -> Rebalance:
    if planned.settings is not None:
        await _write_settings(connection, planned.key, planned.settings, request.by, now)
    if isinstance(request.body, Restore):
        await connection.execute(_END_DRAINS, request.body.region, now)
    await _insert(connection, request, planned, now)
    await begin_holds(connection, request.id, planned.plan.holds)
    await _start(connection, request, planned, now)
    plan = planned.plan
    settings = {"settings_before": plan.settings_before, "settings_after": plan.settings_after}
    await record(connection, request.by, Action.REBALANCE_BEGUN, str(request.id), request.as_json() | settings, now)
    begun = await read_rebalance(connection, request.id)
    assert begun is not None
    return begun


async def _insert(connection: Connection, request: RebalanceRequest, planned: PlannedRebalance, now: datetime) -> None:
    runs = bool(planned.plan.moves) or isinstance(request.body, Drain)
    await connection.execute(
        _INSERT,
        request.id,
        request.body.mode,
        msgspec.json.encode(request.as_json()).decode(),
        msgspec.json.encode(planned.plan).decode(),
        planned.region,
        planned.plan.recalled,
        RUNNING if runs else "done",
        now,
        request.by.name,
        None if runs else now,
    )


async def _start(connection: Connection, request: RebalanceRequest, planned: PlannedRebalance, now: datetime) -> None:
    """Begin the moves, and notify the regions at the commit. `follow.py` repeats notices that are missed."""
    if planned.region is not None:
        status = DRAINING if isinstance(request.body, Drain) else ACTIVE
        await put_region(connection, planned.region, None, status, request.by, now)
    moves = await begin_moves(connection, request.id, planned.plan.moves)
    leases = await read_leases(connection, {move.key for move in moves}, ())
    recalls = [recall_notice(move, [lease for lease in leases if lease.key == move.key], now) for move in moves]
    await notify(connection, [notice for notice in recalls if notice])


async def _write_settings(
    connection: Connection, key: str, settings: Mapping[str, Setting], by: Actor, now: datetime
) -> None:
    """Write the settings of a key, and advance the catalogue, which agents and coordinators then read again."""
    for region, setting in settings.items():
        if setting == NOTHING_SET:
            await connection.execute(_DELETE_SETTING, key, region)
        else:
            values = (None if each is None else msgspec.json.encode(each).decode() for each in setting[1:])
            await connection.execute(_PUT_SETTING, key, region, setting.weight, *values, now, by.name)
    await advance_catalogue(connection)


_RUNNING = """
SELECT rebalance FROM unnest($1::text[], $2::text[]) AS wanted (quota, period)
JOIN rebalance_move AS move USING (quota, period) WHERE move.ended_at IS NULL LIMIT 1
"""
_INSERT = """
INSERT INTO rebalance (id, mode, request, plan, region, recalled, state, created_at, created_by, ended_at)
VALUES ($1, $2, $3::text::jsonb, $4::text::jsonb, $5, $6, $7, $8, $9, $10)
"""
_END_DRAINS = """
UPDATE rebalance SET state = 'cancelled', reason = 'restored', ended_at = $2 WHERE region = $1 AND state = 'running'
"""
_PUT_SETTING = """
INSERT INTO region_setting (key, region, weight, floor, ceiling, changed_at, changed_by)
VALUES ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $7)
ON CONFLICT (key, region) DO UPDATE SET weight = excluded.weight, floor = excluded.floor, ceiling = excluded.ceiling,
    changed_at = excluded.changed_at, changed_by = excluded.changed_by
"""
_DELETE_SETTING = "DELETE FROM region_setting WHERE key = $1 AND region = $2"
