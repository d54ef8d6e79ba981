"""Rebalance: plan what people ask for, and begin it. What follows is `follow_rebalances.py`, by any coordinator.

A plan is what would be done, found out without holding anybody up. To begin it, the same is found out again under the
locks of the pools, behind the catalogue's lock: so one rebalance begins at a time, and whoever planned before somebody
else began is told what that was.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.locked import LockedPool
from coordinator.exchange.statements.leases import read_leases
from coordinator.exchange.statements.pools import lock_pools, read_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.rules.entitlement import Catalogue, limit_of_key
from coordinator.limits.rules.validation import Fault
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.rebalancing.moves import begin_moves, read_moves
from coordinator.rebalancing.read_rebalances import (
    RUNNING,
    Progress,
    Rebalance,
    newest_version,
    read_rebalance,
    rebalances_since,
)
from coordinator.rebalancing.rules.division import by_weight, division_of, recalled_by
from coordinator.rebalancing.rules.plan import (
    Plan,
    Planner,
    SettingTold,
    Table,
    plan_division,
    plan_even_out,
    plan_move,
    plan_of,
)
from coordinator.rebalancing.rules.region_settings import MAX_SETTINGS, NOTHING_SET, Setting, faults_of_settings
from coordinator.rebalancing.schemas import AnyRebalance, Drain, EvenOut, MoveUnits, RegionSettingPatch, Restore, Weigh
from coordinator.regions.put_region import ACTIVE, DRAINING, put_region
from coordinator.regions.read_regions import read_region
from protocol.identifiers import parse_quota_key, subject_key
from protocol.limits.document import AllowanceQuota, LimitValue, Mode, Quota, mode_of

MOST_POOLS = 1000  # that one rebalance moves units of

# --- refusals ---------------------------------------------------------------------------------------------------------


class Faulty(NamedTuple):
    faults: Sequence[Fault]


class Changed(NamedTuple):
    """Others were faster: this is what they did since."""

    since: Sequence[Rebalance]


class Busy(NamedTuple):
    """Another rebalance is about the same units, or the same region, and runs."""

    other: UUID


class Impossible(NamedTuple):
    plan: Plan


class NoSuchPool(NamedTuple):
    quota: str


Refusal: TypeAlias = Faulty | Changed | Busy | Impossible | NoSuchPool


class _Refused(Exception):
    """Ends the transaction, so that nothing was changed."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


@dataclass(frozen=True)
class RebalanceRequest:
    """Who asks for what, and what they have seen."""

    id: UUID
    asked: AnyRebalance
    by: Actor
    is_expected: Callable[[int], bool]  # of the newest version


class PlannedRebalance(NamedTuple):
    """A plan, and what beginning it takes."""

    plan: Plan
    settings: Mapping[str, Setting] | None = None  # of the regions, for `key`
    key: str = ""
    region: str | None = None


async def plan_rebalance(
    connection: Connection, documents: Documents, wish: RebalanceRequest, now: datetime
) -> Rebalance | Refusal:
    """Nothing is held and nothing is changed."""
    try:
        drawn = await _draw(connection, documents, wish.asked, now, is_held=False)
    except _Refused as refused:
        return refused.refusal
    return Rebalance(
        id=None,
        version=await newest_version(connection),
        mode=_mode(wish.asked),
        request=_as_asked(wish.asked),
        state="planned",
        reason=None,
        plan=drawn.plan,
        progress=Progress(sum(move.units for move in drawn.plan.moves), 0, 0),
        moves=[],
        waits_for=[],
        created_at=now,
        created_by=wish.by.name,
        ended_at=None,
    )


async def begin_rebalance(
    connection: Connection, documents: Documents, wish: RebalanceRequest, now: datetime
) -> Rebalance | Refusal:
    """The same id again finds the first one: nothing happens twice. Refused, nothing was changed."""
    await lock_catalogue(connection)
    if found := await read_rebalance(connection, wish.id):
        return found
    newest = await newest_version(connection)
    if not wish.is_expected(newest):
        return Changed(await _since(connection, wish, newest))
    try:
        drawn = await _draw(connection, documents, wish.asked, now, is_held=True)
        await _refuse_busy(connection, drawn)
    except _Refused as refused:
        return refused.refusal
    return await _begin(connection, wish, drawn, now)


async def _since(connection: Connection, wish: RebalanceRequest, newest: int) -> list[Rebalance]:
    """Newer ones than the last that they know. Of who names no version that ever was, only the newest."""
    known = next((version for version in range(newest, max(newest - 20, 0), -1) if wish.is_expected(version)), None)
    return await rebalances_since(connection, newest - 1 if known is None else known)


# --- what it would come to --------------------------------------------------------------------------------------------


async def _draw(
    connection: Connection, documents: Documents, asked: AnyRebalance, now: datetime, *, is_held: bool
) -> PlannedRebalance:
    if isinstance(asked, Drain | Restore):
        return await _draw_region(connection, asked, now)
    key = _key_of(asked.quota)
    catalogue = await read_catalogue(connection, documents, [key], now)
    spec = catalogue.quotas.get(parse_quota_key(key)[0])
    if spec is None:
        raise _faulty("quota", "known", f"there is no quota {parse_quota_key(key)[0]!r}")
    if isinstance(asked, Weigh):
        return await _draw_settings(connection, catalogue, spec, asked, now, is_held=is_held)
    if not isinstance(spec, AllowanceQuota):
        raise _faulty("quota", "allowance", f"{spec.name!r} is no allowance: set weights, floors and ceilings instead")
    if spec.mode in _STAYS:
        raise _faulty("quota", "mode", f"{spec.name!r} is {spec.mode}: {_STAYS[spec.mode]}")
    planner = _planner(catalogue, asked)
    tables = await _tables(connection, catalogue, await _pools_of(connection, spec, key, now), is_held=is_held)
    if not tables:
        raise _Refused(NoSuchPool(key))
    plan = plan_of(tables, planner, now)
    if plan.cannot and not plan.moves:
        raise _Refused(Impossible(plan))
    return PlannedRebalance(plan)


def _planner(catalogue: Catalogue, asked: MoveUnits | EvenOut) -> Planner:
    if isinstance(asked, EvenOut):
        return plan_even_out
    for name, region in (("from", asked.source), ("to", asked.target)):
        if region not in catalogue.regions:
            raise _faulty(name, "known", f"there is no region {region!r}")
    if asked.source == asked.target:
        raise _faulty("to", "elsewhere", "units are moved to another region")
    return lambda table, now: plan_move(table, asked.source, asked.target, asked.units, now)


async def _draw_settings(
    connection: Connection, catalogue: Catalogue, spec: Quota, asked: Weigh, now: datetime, *, is_held: bool
) -> PlannedRebalance:
    quota, subject = parse_quota_key(_key_of(asked.quota))
    key = subject_key(quota, subject)
    before = catalogue.settings.get(key, {})
    after = dict(before) | {
        region: _said(before.get(region, NOTHING_SET), each) for region, each in asked.settings.items()
    }
    faults = [
        *_faults_of_words(catalogue, asked),
        *_faults_of_mode(spec, asked),
        *faults_of_settings(spec, _limits(catalogue, spec, key), after),
    ]
    if sum(map(len, catalogue.settings.values())) + len(after) - len(before) > MAX_SETTINGS:
        faults.append(Fault("settings", "full", f"there can be no more than {MAX_SETTINGS}"))
    if faults:
        raise _Refused(Faulty(faults))
    plan = Plan([], [], [], [])
    if isinstance(spec, AllowanceQuota):
        divided = catalogue._replace(settings={**catalogue.settings, key: after})
        keys = await _pools_of(connection, spec, key, now)
        plan = plan_of(await _tables(connection, divided, keys, is_held=is_held), plan_division, now)
    plan = msgspec.structs.replace(plan, settings_before=_told(before, asked), settings_after=_told(after, asked))
    return PlannedRebalance(plan, after, key)


def _said(before: Setting, words: RegionSettingPatch) -> Setting:
    said = words.model_dump()
    if "pin" in said:
        said["floor"] = said["ceiling"] = said.pop("pin")
    return before._replace(**said)


def _faults_of_words(catalogue: Catalogue, asked: Weigh) -> list[Fault]:
    unknown = [
        Fault(f"settings.{region}", "known", f"there is no region {region!r}")
        for region in asked.settings
        if region not in catalogue.regions
    ]
    doubled = [
        Fault(f"settings.{region}.pin", "alone", "a pin is a floor and a ceiling; say either")
        for region, words in asked.settings.items()
        if "pin" in words.model_fields_set and words.model_fields_set & {"floor", "ceiling"}
    ]
    return [*unknown, *doubled]


def _faults_of_mode(spec: Quota, asked: Weigh) -> list[Fault]:
    """Of a region's own limit only a ceiling says anything: that it is lower."""
    mode = mode_of(spec)
    if mode is not Mode.REGIONAL:
        return []
    return [
        Fault(f"settings.{region}.{word}", "mode", f"{spec.name!r} is {mode}: {_STAYS[mode]}; set a ceiling")
        for region, words in asked.settings.items()
        for word in ("weight", "floor", "pin")
        if getattr(words, word) is not None
    ]


_STAYS: dict[str, str] = {
    Mode.REGIONAL: "each region has its own limit, and no other's",
    Mode.CENTRAL: "nothing of it lies in a region that no request waits for",
}


def _limits(catalogue: Catalogue, spec: Quota, key: str) -> Collection[LimitValue]:
    """That a key may have: the tenant's, or those of all plans."""
    limit = limit_of_key(catalogue, spec, key) if "tenant" in parse_quota_key(key)[1] else None
    if limit is not None:
        return [limit]
    return list(spec.limit.values()) if isinstance(spec.limit, dict) else [spec.limit]


def _told(settings: Mapping[str, Setting], asked: Weigh) -> dict[str, SettingTold]:
    return {region: SettingTold(*settings.get(region, NOTHING_SET)) for region in asked.settings}


async def _draw_region(connection: Connection, asked: Drain | Restore, now: datetime) -> PlannedRebalance:
    found = await read_region(connection, asked.region, now)
    if found is None:
        raise _faulty("region", "known", f"there is no region {asked.region!r}")
    if isinstance(asked, Drain) and found.status != ACTIVE:
        raise _faulty("region", "active", f"{asked.region!r} is {found.status} already")
    if isinstance(asked, Restore) and found.status == ACTIVE:
        raise _faulty("region", "active", f"{asked.region!r} is active")
    recalled = await connection.fetchval(_OUTSTANDING, asked.region) if isinstance(asked, Drain) else 0
    return PlannedRebalance(Plan([], [], [], [], recalled=recalled), region=asked.region)


def _faulty(field: str, rule: str, reason: str) -> _Refused:
    return _Refused(Faulty([Fault(field, rule, reason)]))


def _key_of(text: str) -> str:
    """A quota's name alone stands for all of its keys."""
    key = text if ":" in text else f"{text}:"
    try:
        parse_quota_key(key)
    except ValueError as error:
        raise _faulty("quota", "format", "write it as exports:tenant=acme, or as exports for all of them") from error
    return key


async def _pools_of(connection: Connection, spec: AllowanceQuota, key: str, now: datetime) -> list[Key]:
    """Return the pools of the current periods that the key covers."""
    subject = parse_quota_key(key)[1].items()
    rows = await connection.fetch(_RUNNING_POOLS, spec.name, now)
    keys = [Key(*row) for row in rows if subject <= parse_quota_key(row["quota"])[1].items()]
    if len(keys) > MOST_POOLS:
        raise _faulty(
            "quota", "pools", f"it reaches {len(keys)} allowances, and at most {MOST_POOLS} are moved at once"
        )
    return sorted(keys)


async def _tables(connection: Connection, catalogue: Catalogue, keys: Sequence[Key], *, is_held: bool) -> list[Table]:
    found = await (lock_pools(connection, keys, ()) if is_held else read_pools(connection, keys))
    return await tables_of(connection, catalogue, {key: each for key, each in found.items() if each.period_is_open})


async def tables_of(connection: Connection, catalogue: Catalogue, pools: Mapping[Key, LockedPool]) -> list[Table]:
    """With all leases of each, and the moves that are open."""
    leases = await read_leases(connection, pools, (), pools)
    moves = await read_moves(connection, [key for key, locked in pools.items() if locked.open_moves])
    current = {row["region"] for row in await connection.fetch(_WITH_AN_EPOCH)}
    regions, unless_set = (
        current & {name for name in catalogue.regions if catalogue.is_active(name)},
        by_weight(catalogue),
    )
    return [
        Table(
            locked.pool,
            [lease for lease in leases if lease.key == key],
            division_of(catalogue, key, [move for move in moves if move.key == key], unless_set),
            regions,
        )
        for key, locked in sorted(pools.items())
    ]


# --- it begins --------------------------------------------------------------------------------------------------------


async def _refuse_busy(connection: Connection, drawn: PlannedRebalance) -> None:
    other = await connection.fetchval(
        _BUSY, [move.key.quota for move in drawn.plan.moves], [move.key.period for move in drawn.plan.moves]
    )
    if other is not None:
        raise _Refused(Busy(other))


async def _begin(connection: Connection, wish: RebalanceRequest, drawn: PlannedRebalance, now: datetime) -> Rebalance:
    asked, is_drain = wish.asked, isinstance(wish.asked, Drain)
    if drawn.settings is not None:
        await _set(connection, drawn.key, drawn.settings, wish.by, now)
    if isinstance(asked, Restore):
        await connection.execute(_END_DRAINS, asked.region, now)
    runs = bool(drawn.plan.moves) or is_drain
    plan, told = msgspec.json.encode(drawn.plan).decode(), _as_asked(asked)
    await connection.execute(
        _INSERT,
        wish.id,
        _mode(asked),
        msgspec.json.encode(told).decode(),
        plan,
        drawn.region,
        drawn.plan.recalled,
        RUNNING if runs else "done",
        now,
        wish.by.name,
        None if runs else now,
    )
    await _start(connection, wish, drawn, now)
    details = {**told, "settings_before": drawn.plan.settings_before, "settings_after": drawn.plan.settings_after}
    await record(connection, wish.by, Action.REBALANCE_BEGUN, str(wish.id), details, now)
    begun = await read_rebalance(connection, wish.id)
    assert begun is not None
    return begun


async def _start(connection: Connection, wish: RebalanceRequest, drawn: PlannedRebalance, now: datetime) -> None:
    """The regions that are concerned hear of it at the commit; whoever missed that is asked again."""
    if drawn.region is not None:
        status = DRAINING if isinstance(wish.asked, Drain) else ACTIVE
        await put_region(connection, drawn.region, None, status, wish.by, now)
    moves = await begin_moves(connection, wish.id, drawn.plan.moves)
    leases = await read_leases(connection, {move.key for move in moves}, ())
    recalls = [recalled_by(move, [lease for lease in leases if lease.key == move.key], now) for move in moves]
    await notify(connection, [notice for notice in recalls if notice])


async def _set(connection: Connection, key: str, settings: Mapping[str, Setting], by: Actor, now: datetime) -> None:
    """Every agent hears of it, and every coordinator reads it anew."""
    for region, setting in settings.items():
        if setting == NOTHING_SET:
            await connection.execute(_UNSET, key, region)
        else:
            values = (None if each is None else msgspec.json.encode(each).decode() for each in setting[1:])
            await connection.execute(_SET, key, region, setting.weight, *values, now, by.name)
    await advance_catalogue(connection)


def _mode(asked: AnyRebalance) -> str:
    return str(_as_asked(asked)["mode"])


def _as_asked(asked: AnyRebalance) -> dict[str, Any]:
    return asked.model_dump(by_alias=True, exclude={"dry_run"})


_WITH_AN_EPOCH = "SELECT region FROM region_epoch WHERE state = 'current'"
_OUTSTANDING = "SELECT coalesce(sum(outstanding), 0) FROM lease WHERE region = $1 AND outstanding > 0"
_BUSY = """
SELECT rebalance FROM unnest($1::text[], $2::text[]) AS asked (quota, period)
JOIN rebalance_move AS move USING (quota, period) WHERE move.ended_at IS NULL LIMIT 1
"""
_INSERT = """
INSERT INTO rebalance (id, mode, request, plan, region, recalled, state, created_at, created_by, ended_at)
VALUES ($1, $2, $3::text::jsonb, $4::text::jsonb, $5, $6, $7, $8, $9, $10)
"""
_END_DRAINS = """
UPDATE rebalance SET state = 'cancelled', reason = 'restored', ended_at = $2 WHERE region = $1 AND state = 'running'
"""
_SET = """
INSERT INTO region_setting (key, region, weight, floor, ceiling, changed_at, changed_by)
VALUES ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $7)
ON CONFLICT (key, region) DO UPDATE SET weight = excluded.weight, floor = excluded.floor, ceiling = excluded.ceiling,
    changed_at = excluded.changed_at, changed_by = excluded.changed_by
"""
_RUNNING_POOLS = """
SELECT quota, period FROM pool JOIN period ON period.id = pool.period
WHERE name = $1 AND starts_at <= $2 AND ends_at > $2
"""
_UNSET = "DELETE FROM region_setting WHERE key = $1 AND region = $2"
