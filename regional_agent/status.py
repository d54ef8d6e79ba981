"""The status of an agent and its region (`/v1/status`)."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from msgspec import Struct

from protocol.circuit_breaker import BreakerState
from protocol.compatibility.releases import RELEASE
from protocol.diagnosis.checks import CheckResult
from protocol.limits.rates import Rate
from protocol.units import Units
from regional_agent.agent import RegionalAgent
from regional_agent.cluster.cell import Cell
from regional_agent.envoy.quota.status import QuotaStatus
from regional_agent.envoy.status import DoorStatus, GrpcClientStatus
from regional_agent.shared_limits.shared_limit import SLOT_MICRO
from regional_agent.store.connection import KEEPS_ALL, StoreError, StoreUnavailable
from regional_agent.store.library import idle_libraries
from regional_agent.store.types import SlotCharge, StoreIncarnation
from web.health import Health, HealthReason, HealthStatus
from web.tls.certificates import CertificateStatus

MOST_LEASES = 1000
MAX_HOT_KEYS = 20
STORE_S = 0.5  # for everything that is read from the store: the rest is answered even while the store hangs
MOST_REFUSALS = 20  # that are shown in full


class LeaseStatus(Struct, frozen=True, kw_only=True):
    quota: str
    period: str
    granted: Units
    overage: Units
    consumed: Units
    returned: Units
    held: Units
    available: int
    overdraft: Units  # what may be admitted beyond the lease in the period while the region is cut off
    overdrawn: Units  # what was admitted beyond the lease
    owed: Units  # the part of it that is not settled yet
    expires_in_ms: Units
    demand_milli: Units


class ShareStatus(Struct, frozen=True, kw_only=True):
    """The region's share of a rate that this agent reports, in millionths of a unit per second."""

    quota: str
    base_share_micro: Units  # while the region is cut off
    share_micro: Units  # granted last
    demand_micro: Units  # of this agent
    expires_in_ms: Units
    contended: bool
    bound_milli: Units  # thousandths of a unit beyond limit and burst, in all regions together: in the worst case
    overshoot_milli: Units  # and at most so far, as the coordinator last said


class SlotShareStatus(Struct, frozen=True, kw_only=True):
    """The region's share of slots that this agent reports: how many may be in use."""

    quota: str
    base_share: Units  # while the region is cut off
    share: Units  # granted last
    demand: Units  # in use or waited for, in the region
    expires_in_ms: Units
    contended: bool


class SlotStatus(Struct, frozen=True, kw_only=True):
    """The slots of one quota that are in use in this region."""

    quota: str
    in_use: Units
    holders: Units


class HotKeyStatus(Struct, frozen=True, kw_only=True):
    """A key with high demand at this agent."""

    quota: str
    demand_milli: Units
    in_slices: Units  # units of a rate that this agent may admit without the store


class StoreLatencyStatus(Struct, frozen=True, kw_only=True):
    """Round trips of recent decisions, and how long a request waits for the store now, in microseconds."""

    median_us: Units
    p99_us: Units
    timeout_us: Units


class CellStatus(Struct, frozen=True, kw_only=True):
    """One cell of a Cluster."""

    cell: int
    node: str
    epoch: Units | None
    breaker: BreakerState


class CoordinatorStatus(Struct, frozen=True, kw_only=True):
    """One of the coordinator's addresses."""

    url: str
    in_use: bool
    fault: str | None  # why the latest call failed there


class Status(Struct, frozen=True, kw_only=True):
    region: str
    agent: str
    release: str
    coordinator_release: str | None  # as the coordinator stated it last
    coordinators: list[CoordinatorStatus]  # in order of preference
    certificates: list[CertificateStatus]  # that this agent shows, and when they end
    grpc_clients: list[GrpcClientStatus]  # of the gRPC door, at all workers; those with most calls first
    more_grpc_clients: Units
    silent_workers: Units  # workers that did not answer, whose clients and proxies are missing
    epoch: Units | None  # in a Cluster the newest of all cells
    lanes: Units | None
    cells: list[CellStatus]  # of a Cluster
    policy_version: Units | None
    block_version: Units | None
    store_breaker: BreakerState
    store_latency: StoreLatencyStatus
    store_eviction: str | None  # the `maxmemory-policy` of the store, and whether it is only assumed
    store_library: str  # the version of the scripts that this agent runs in the store
    store_libraries: dict[str, Units]  # all versions in the store: seconds since an agent last used each of them
    unreported_age_ms: Units
    stopped_lanes: dict[str, str]
    status: HealthStatus
    reasons: list[HealthReason]  # why it is degraded or not ready, as /readyz says
    faults: list[str]  # the texts of the reasons
    checked_at: datetime | None  # when the agent last ran its own checks
    checks: list[CheckResult]  # what they found
    incomplete: str | None  # why leases and slots are missing: the store could not be read
    leases: list[LeaseStatus]
    more_leases: Units
    slots: list[SlotStatus]
    more_slots: Units
    hot_keys: list[HotKeyStatus]  # the hottest first
    shares: list[ShareStatus]
    slot_shares: list[SlotShareStatus]
    proxy_quotas: QuotaStatus | None  # what Envoy's quota protocol does here; null without a gRPC door


class _Stored(Struct, frozen=True, kw_only=True):
    """The part of the status that is read from the store."""

    leases: list[LeaseStatus] = []
    more_leases: int = 0
    slots: list[SlotStatus] = []
    more_slots: int = 0
    incomplete: str | None = None


async def status_of(region: RegionalAgent, health: Health, door: DoorStatus) -> Status:
    incarnations = [cell.epochs.current for cell in region.cells]
    stored = await _stored_in_time(region)
    return Status(
        region=region.settings.region,
        agent=region.settings.name,
        release=RELEASE,
        coordinator_release=region.coordinator_release,
        coordinators=_coordinators(region),
        certificates=region.tls.certificates.status(),
        grpc_clients=door.clients,
        more_grpc_clients=door.more_clients,
        silent_workers=door.silent_workers,
        epoch=max((incarnation.epoch for incarnation in incarnations if incarnation), default=None),
        lanes=max((incarnation.lanes for incarnation in incarnations if incarnation), default=None),
        cells=_cells(region),
        policy_version=region.admission.policies.version if region.admission.policies else None,
        block_version=None if region.admission.blocks is None else region.admission.blocks.version,
        store_breaker=region.breaker(),
        store_latency=_store_latency(region),
        store_eviction=_store_eviction(region),
        store_library=region.cells[0].scripts.library.library.name,
        store_libraries=idle_libraries(cell.scripts.library for cell in region.cells),
        unreported_age_ms=region.unreported_age_ms(),
        stopped_lanes=_stopped_lanes(region),
        status=health.status,
        reasons=health.reasons,
        faults=[*(reason.text for reason in health.reasons), *_refusals(region)],
        checked_at=region.diagnosis.report.checked_at,
        checks=region.diagnosis.report.checks,
        incomplete=stored.incomplete,
        leases=stored.leases,
        more_leases=stored.more_leases,
        slots=stored.slots,
        more_slots=stored.more_slots,
        hot_keys=[_hot_key(region, *key) for key in region.hottest(MAX_HOT_KEYS)],
        shares=[share for cell in region.cells for share in _shares(cell)][:MOST_LEASES],
        slot_shares=[share for cell in region.cells for share in _slot_shares(cell)][:MOST_LEASES],
        proxy_quotas=door.proxy_quotas,
    )


def _coordinators(region: RegionalAgent) -> list[CoordinatorStatus]:
    addresses = region.coordinator.addresses
    return [
        CoordinatorStatus(url=each.url, in_use=each is addresses.in_use, fault=each.fault or None)
        for each in addresses.known
    ]


def _store_latency(region: RegionalAgent) -> StoreLatencyStatus:
    timeout = region.decision_timeout
    median_us, p99_us = (int(timeout.quantile_s(percent) * 1_000_000) for percent in (50, 99))
    return StoreLatencyStatus(median_us=median_us, p99_us=p99_us, timeout_us=int(timeout.seconds * 1_000_000))


def _store_eviction(region: RegionalAgent) -> str | None:
    """Return the policy of the single store, or the worst of a Cluster's."""
    stores = [cell.store for cell in region.cells]
    worst = next((store for store in stores if store.eviction_policy != KEEPS_ALL), stores[0])
    if any(store.is_noeviction_assumed for store in stores) and worst.eviction_policy == KEEPS_ALL:
        return f"{KEEPS_ALL} (assumed: LEASEHOLD_AGENT_STORE_ASSUME_NOEVICTION)"
    return worst.eviction_policy


def _stopped_lanes(region: RegionalAgent) -> dict[str, str]:
    return {
        f"{epoch}/{lane}": outcome.value
        for cell in region.cells
        for (epoch, lane), outcome in cell.exchange_loop.stopped_lanes.items()
    }


async def _stored_in_time(region: RegionalAgent) -> _Stored:
    """Read leases and slots, or return why they are missing: a store that hangs must not hide the rest."""
    if region.breaker() is not BreakerState.CLOSED:
        return _Stored(incomplete="the store's circuit breaker is not closed: its leases and slots are not read")
    try:
        async with asyncio.timeout(STORE_S):
            return await _stored(region)
    except TimeoutError:
        return _Stored(incomplete=f"the store took longer than {STORE_S} s: its leases and slots are missing")
    except (StoreUnavailable, StoreError) as error:
        return _Stored(incomplete=str(error))


async def _stored(region: RegionalAgent) -> _Stored:
    leased = [pair for cell in region.cells for pair in await _quotas(cell, cell.scripts.leased_quotas)]
    quotas_with_slots = [pair for cell in region.cells for pair in await _quotas(cell, cell.scripts.quotas_with_slots)]
    leases = await asyncio.gather(*(_lease(*pair) for pair in leased[:MOST_LEASES]))
    slots = await asyncio.gather(*(_slots(*pair) for pair in quotas_with_slots[:MOST_LEASES]))
    return _Stored(
        leases=leases,
        more_leases=max(0, len(leased) - MOST_LEASES),
        slots=[each for each in slots if each.in_use],
        more_slots=max(0, len(quotas_with_slots) - MOST_LEASES),
    )


def _refusals(region: RegionalAgent) -> list[str]:
    """Return faults of single lanes and quotas, in spite of which the agent is ready."""
    found = [refusal for cell in region.cells for refusal in cell.refusals()]
    more = [f"{len(found) - MOST_REFUSALS} more refusals"] if len(found) > MOST_REFUSALS else []
    return found[:MOST_REFUSALS] + more


def _hot_key(region: RegionalAgent, quota: str, demand_milli: int) -> HotKeyStatus:
    in_slices = region.cell_of(quota).slices.units_here(quota)
    return HotKeyStatus(quota=quota, demand_milli=demand_milli, in_slices=in_slices)


def _shares(cell: Cell) -> list[ShareStatus]:
    now_ms = cell.share_loop.now_ms()
    return [
        ShareStatus(
            quota=limit.quota,
            base_share_micro=limit.base_share_micro,
            share_micro=limit.share.micro,
            demand_micro=limit.demand_micro(now_ms),
            expires_in_ms=max(0, limit.share.expires_ms - now_ms),
            contended=limit.share.is_contended,
            bound_milli=limit.share.bound_milli,
            overshoot_milli=limit.share.overshoot_milli,
        )
        for limit in cell.share_loop.reported_limits()
        if isinstance(limit.terms, Rate)
    ]


def _slot_shares(cell: Cell) -> list[SlotShareStatus]:
    now_ms = cell.share_loop.now_ms()
    return [
        SlotShareStatus(
            quota=limit.quota,
            base_share=limit.base_share_micro // SLOT_MICRO,
            share=limit.share.micro // SLOT_MICRO,
            demand=limit.report.demand_micro // SLOT_MICRO,
            expires_in_ms=max(0, limit.share.expires_ms - now_ms),
            contended=limit.share.is_contended,
        )
        for limit in cell.share_loop.reported_limits()
        if isinstance(limit.terms, SlotCharge)
    ]


def _cells(region: RegionalAgent) -> list[CellStatus]:
    """Return the cells of a Cluster, or nothing for a single store."""
    return [
        CellStatus(
            cell=cell.number,
            node=cell.store.node,
            epoch=cell.epochs.current.epoch if cell.epochs.current else None,
            breaker=cell.breaker.state,
        )
        for cell in region.cells
        if cell.number is not None
    ]


async def _quotas(cell: Cell, listed: Callable[[StoreIncarnation], Awaitable[list[str]]]) -> list[tuple[Cell, str]]:
    incarnation = cell.epochs.current
    return [] if incarnation is None else [(cell, quota) for quota in await listed(incarnation)]


async def _slots(cell: Cell, quota: str) -> SlotStatus:
    incarnation = cell.epochs.current
    if incarnation is None:
        return SlotStatus(quota=quota, in_use=0, holders=0)
    found = await cell.scripts.slots_in_use(incarnation, quota, await cell.scripts.read_mono_us())
    return SlotStatus(quota=found.quota, in_use=found.units, holders=found.holders)


async def _lease(cell: Cell, quota: str) -> LeaseStatus:
    incarnation = cell.epochs.current
    fields = {} if incarnation is None else await cell.scripts.lease_fields(incarnation, quota)
    return _lease_of(cell, quota, fields, await cell.scripts.read_mono_us())


def _lease_of(cell: Cell, quota: str, fields: dict[str, str], mono_us: int) -> LeaseStatus:
    granted, overage, consumed, returned, held, expires = (
        int(fields.get(name, "0")) for name in ("granted", "overage", "consumed", "returned", "held", "expires")
    )
    overdraft, overdrawn, owed = (int(fields.get(name, "0")) for name in ("overdraft", "overdrawn", "owed"))
    return LeaseStatus(
        quota=quota,
        period=fields.get("period", ""),
        granted=granted,
        overage=overage,
        consumed=consumed,
        returned=returned,
        held=held,
        available=granted + overage - consumed - returned - held,
        overdraft=overdraft,
        overdrawn=overdrawn,
        owed=owed,
        expires_in_ms=max(0, (expires - mono_us) // 1000),
        demand_milli=cell.quotas.demand_milli(quota),
    )
