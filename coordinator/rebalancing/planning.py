"""Plan a rebalance: read what it is about, and decide what would be moved.

To plan is to read without locks. To begin a rebalance it is planned again under the locks of its pools.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.locked import LockedPool
from coordinator.exchange.statements.leases import read_leases
from coordinator.exchange.statements.pools import lock_pools, read_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.rebalancing.moves import read_moves
from coordinator.rebalancing.refusals import InvalidRebalance, NothingToMove, RebalanceRefused, UnknownPool, invalid
from coordinator.rebalancing.rules.division import by_weight, division_of
from coordinator.rebalancing.rules.plan import (
    DividedPool,
    Plan,
    Planner,
    RegionSetting,
    floors_with,
    plan_division,
    plan_even_out,
    plan_hold,
    plan_move,
    plan_of,
    taken_back,
)
from coordinator.rebalancing.rules.region_settings import NOTHING_SET, Setting
from coordinator.rebalancing.rules.setting_changes import IMMOVABLE, apply_patches, faults_of_changes
from coordinator.rebalancing.schemas import AnyRebalance, Drain, EvenOut, MoveUnits, Restore, Weigh
from coordinator.regions.put_region import ACTIVE
from coordinator.regions.read_regions import read_region
from protocol.identifiers import parse_quota_key, subject_key
from protocol.limits.document import AllowanceQuota, Quota
from protocol.limits.rates import parse_duration_ms

MAX_POOLS = 1000  # whose units one rebalance moves


class PlannedRebalance(NamedTuple):
    """A plan, and what else beginning it changes."""

    plan: Plan
    settings: Mapping[str, Setting] | None = None  # of the regions, for `key`
    key: str = ""
    region: str | None = None  # that is drained or restored


async def plan_request(
    connection: Connection, documents: Documents, body: AnyRebalance, now: datetime, *, lock: bool
) -> PlannedRebalance:
    """Return the plan of what is asked for. Raise RebalanceRefused if it cannot be done."""
    if isinstance(body, Drain | Restore):
        return await _plan_region(connection, body, now)
    key = _key_of(body.quota)
    catalogue = await read_catalogue(connection, documents, [key], now)
    spec = catalogue.quotas.get(parse_quota_key(key)[0])
    if spec is None:
        raise invalid("quota", "known", f"There is no quota {parse_quota_key(key)[0]!r}.")
    if isinstance(body, Weigh):
        return await _plan_settings(connection, catalogue, spec, body, now, lock=lock)
    if not isinstance(spec, AllowanceQuota):
        raise invalid("quota", "allowance", f"{spec.name!r} is no allowance. Set weights, floors and ceilings instead.")
    if spec.mode in IMMOVABLE:
        raise invalid("quota", "mode", f"The mode of {spec.name!r} is {spec.mode}: {IMMOVABLE[spec.mode]}.")
    planner = _planner_of(catalogue, body)
    pools = await _read_pools(connection, catalogue, await _keys_covered(connection, spec, key, now), lock=lock)
    if not pools:
        raise RebalanceRefused(UnknownPool(key))
    plan = plan_of(pools, planner, now)
    if plan.cannot and not plan.moves:
        raise RebalanceRefused(NothingToMove(plan))
    return PlannedRebalance(_with_outlook(plan, pools, body, now) if isinstance(body, MoveUnits) else plan)


def _with_outlook(plan: Plan, pools: Sequence[DividedPool], body: MoveUnits, now: datetime) -> Plan:
    """Add what keeps the moved units in the target, and when demand may take them back."""
    by_key = {pool.key: pool for pool in pools}
    hold = timedelta(milliseconds=parse_duration_ms(body.hold)) if body.hold else timedelta()
    holds = [plan_hold(by_key[move.key], move, now + hold) for move in plan.moves] if hold else []
    for each in holds:
        pool = by_key[Key(each.quota, each.period)]
        if (floors := floors_with(pool, each)) > pool.pool.funded:
            reason = f"The floors of {each.quota} would add up to {floors}, more than its {pool.pool.funded} units."
            raise invalid("hold", "floors", reason)
    outlooks = (taken_back(by_key[move.key], move, hold, now) for move in plan.moves)
    return msgspec.structs.replace(plan, holds=holds, taken_back=[each for each in outlooks if each])


def _planner_of(catalogue: Catalogue, body: MoveUnits | EvenOut) -> Planner:
    if isinstance(body, EvenOut):
        return plan_even_out
    for name, region in (("from", body.source), ("to", body.target)):
        if region not in catalogue.regions:
            raise invalid(name, "known", f"There is no region {region!r}.")
    if body.source == body.target:
        raise invalid("to", "elsewhere", "Units are moved to another region.")
    return lambda pool, now: plan_move(pool, body.source, body.target, body.units, now)


async def _plan_settings(
    connection: Connection, catalogue: Catalogue, spec: Quota, body: Weigh, now: datetime, *, lock: bool
) -> PlannedRebalance:
    key = subject_key(*parse_quota_key(_key_of(body.quota)))
    patches = {region: patch.model_dump() for region, patch in body.settings.items()}
    before = catalogue.settings.get(key, {})
    after = apply_patches(before, patches)
    if faults := faults_of_changes(catalogue, spec, key, patches, after):
        raise RebalanceRefused(InvalidRebalance(faults))
    plan = Plan([], [], [], [])
    if isinstance(spec, AllowanceQuota):
        changed = catalogue._replace(settings={**catalogue.settings, key: after})
        keys = await _keys_covered(connection, spec, key, now)
        plan = plan_of(await _read_pools(connection, changed, keys, lock=lock), plan_division, now)
    shown = {name: _shown(settings, body) for name, settings in (("before", before), ("after", after))}
    plan = msgspec.structs.replace(plan, settings_before=shown["before"], settings_after=shown["after"])
    return PlannedRebalance(plan, after, key)


def _shown(settings: Mapping[str, Setting], body: Weigh) -> dict[str, RegionSetting]:
    return {region: RegionSetting(*settings.get(region, NOTHING_SET)) for region in body.settings}


async def _plan_region(connection: Connection, body: Drain | Restore, now: datetime) -> PlannedRebalance:
    found = await read_region(connection, body.region, now)
    if found is None:
        raise invalid("region", "known", f"There is no region {body.region!r}.")
    if isinstance(body, Drain) and found.status != ACTIVE:
        raise invalid("region", "active", f"The region {body.region!r} is {found.status} already.")
    if isinstance(body, Restore) and found.status == ACTIVE:
        raise invalid("region", "active", f"The region {body.region!r} is active already.")
    recalled = await connection.fetchval(_OUTSTANDING, body.region) if isinstance(body, Drain) else 0
    return PlannedRebalance(Plan([], [], [], [], recalled=recalled), region=body.region)


def _key_of(text: str) -> str:
    """Return a quota key. The name of a quota alone stands for all of its keys."""
    key = text if ":" in text else f"{text}:"
    try:
        parse_quota_key(key)
    except ValueError as error:
        reason = "Write `exports:tenant=acme` for one key, or `exports` for all keys of the quota."
        raise invalid("quota", "format", reason) from error
    return key


# --- reading ----------------------------------------------------------------------------------------------------------


async def _keys_covered(connection: Connection, spec: AllowanceQuota, key: str, now: datetime) -> list[Key]:
    """Return the pools of the current periods that the key covers."""
    subject = parse_quota_key(key)[1].items()
    rows = await connection.fetch(_CURRENT_POOLS, spec.name, now)
    keys = [Key(*row) for row in rows if subject <= parse_quota_key(row["quota"])[1].items()]
    if len(keys) > MAX_POOLS:
        reason = f"It covers {len(keys)} allowances, and one rebalance moves units of at most {MAX_POOLS}."
        raise invalid("quota", "pools", reason)
    return sorted(keys)


async def _read_pools(
    connection: Connection, catalogue: Catalogue, keys: Sequence[Key], *, lock: bool
) -> list[DividedPool]:
    found = await (lock_pools(connection, keys, ()) if lock else read_pools(connection, keys))
    is_open = {key: each for key, each in found.items() if each.period_is_open}
    return await divided_pools(connection, catalogue, is_open)


async def divided_pools(
    connection: Connection, catalogue: Catalogue, pools: Mapping[Key, LockedPool]
) -> list[DividedPool]:
    """Return pools with all of their leases, and with their division, which has the open moves."""
    leases = await read_leases(connection, pools, (), pools)
    moves = await read_moves(connection, [key for key, locked in pools.items() if locked.open_moves])
    with_epoch = {row["region"] for row in await connection.fetch(_WITH_EPOCH)}
    regions = with_epoch & {name for name in catalogue.regions if catalogue.is_active(name)}
    unless_set = by_weight(catalogue)
    return [
        DividedPool(
            locked.pool,
            [lease for lease in leases if lease.key == key],
            division_of(catalogue, key, [move for move in moves if move.key == key], unless_set),
            regions,
        )
        for key, locked in sorted(pools.items())
    ]


_WITH_EPOCH = "SELECT region FROM region_epoch WHERE state = 'current'"
_OUTSTANDING = "SELECT coalesce(sum(outstanding), 0) FROM lease WHERE region = $1 AND outstanding > 0"
_CURRENT_POOLS = """
SELECT quota, period FROM pool JOIN period ON period.id = pool.period
WHERE name = $1 AND starts_at <= $2 AND ends_at > $2
"""
