"""What an agent tells about its region, to people and to those who decide where requests go."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct

from protocol.outcomes import EpochRefusal
from protocol.units import Units
from regional_agent.domain.breaker import BreakerState
from regional_agent.region import Region

MOST_LEASES = 1000
LOOK_AGAIN_S = 0.01
_NO_EPOCH: Mapping[str, str] = {
    EpochRefusal.REGION_DOWN: "the region has no epoch: its status is down",
    EpochRefusal.TWO_STORES: "the region has no epoch: two stores answer under its name; see docs/operations.md",
}


class LeaseStatus(Struct, frozen=True, kw_only=True):
    quota: str
    period: str
    granted: Units
    overage: Units
    consumed: Units
    returned: Units
    held: Units
    available: int
    expires_in_ms: Units
    demand_milli: Units


class SlotStatus(Struct, frozen=True, kw_only=True):
    """What runs at once here."""

    quota: str
    in_use: Units
    holders: Units


class Status(Struct, frozen=True, kw_only=True):
    region: str
    agent: str
    epoch: Units | None
    lanes: Units | None
    policy_version: Units | None
    block_version: Units | None
    store_breaker: BreakerState
    unreported_age_ms: Units
    stopped_lanes: dict[str, str]
    faults: list[str]
    leases: list[LeaseStatus]
    more_leases: Units
    slots: list[SlotStatus]
    more_slots: Units


async def status_of(region: Region, faults: list[str]) -> Status:
    life = region.life.current
    quotas = [] if life is None else await region.scripts.leased(life)
    slotted = [] if life is None else await region.scripts.slotted()
    return Status(
        region=region.settings.region,
        agent=region.settings.name,
        epoch=life.epoch if life else None,
        lanes=life.lanes if life else None,
        policy_version=region.admission.policies.version if region.admission.policies else None,
        block_version=region.admission.blocks.version if region.admission.blocks else None,
        store_breaker=region.guard.state,
        unreported_age_ms=region.unreported_age_ms(),
        stopped_lanes={
            f"{epoch}/{lane}": outcome.value for (epoch, lane), outcome in region.conversation.stopped_lanes.items()
        },
        faults=faults,
        leases=await _leases(region, quotas[:MOST_LEASES]),
        more_leases=max(0, len(quotas) - MOST_LEASES),
        slots=await _slots(region, slotted[:MOST_LEASES]),
        more_slots=max(0, len(slotted) - MOST_LEASES),
    )


async def _leases(region: Region, quotas: list[str]) -> list[LeaseStatus]:
    life = region.life.current
    if life is None:
        return []
    mono_us = await region.scripts.mono_us()
    return [_lease(region, quota, await region.scripts.lease_fields(life, quota), mono_us) for quota in quotas]


async def _slots(region: Region, quotas: list[str]) -> list[SlotStatus]:
    life = region.life.current
    if life is None:
        return []
    mono_us = await region.scripts.mono_us()
    found = [await region.scripts.slots_in_use(life, quota, mono_us) for quota in quotas]
    return [SlotStatus(quota=each.quota, in_use=each.units, holders=each.holders) for each in found if each.units]


def _lease(region: Region, quota: str, fields: dict[str, str], mono_us: int) -> LeaseStatus:
    granted, overage, consumed, returned, held, expires = (
        int(fields.get(name, "0")) for name in ("granted", "overage", "consumed", "returned", "held", "expires")
    )
    return LeaseStatus(
        quota=quota,
        period=fields.get("period", ""),
        granted=granted,
        overage=overage,
        consumed=consumed,
        returned=returned,
        held=held,
        available=granted + overage - consumed - returned - held,
        expires_in_ms=max(0, (expires - mono_us) // 1000),
        demand_milli=region.leasing.demand_milli(quota),
    )


def faults_of(region: Region) -> list[str]:
    """Why this agent cannot enforce, in words; nothing if it can."""
    faults: list[str] = []
    if not region.store.connected:
        faults.append(f"the store at {region.store.address} is not connected")
    elif region.store.eviction_policy != "noeviction":
        faults.append(f"the store's maxmemory-policy is {region.store.eviction_policy}; leases need noeviction")
    if region.life.current is None:
        faults.append(_NO_EPOCH.get(region.life.refused, "the region has no epoch"))
    elif any(epoch == region.life.current.epoch for epoch, _ in region.conversation.stopped_lanes):
        faults.append("a lane has stopped; see /v1/status")
    if region.journal.fault is not None:
        faults.append(f"allowances fail closed: {region.journal.fault}")
    if region.admission.policies is None:
        faults.append("no policies have been heard yet")
    if region.admission.blocks is None:
        faults.append("no block list has been heard yet")
    return faults


async def able_to_enforce(region: Region, patience_s: float) -> None:
    """Returns when it is, or after a while: then whoever asks is told why not."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while faults_of(region):  # noqa: ASYNC110 - several rooms tell
                await asyncio.sleep(LOOK_AGAIN_S)
