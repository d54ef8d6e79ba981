"""For those who watch: is it alive, can it do its work, what did it count. No token: nothing here names a tenant."""

from contextlib import suppress

from fastapi import APIRouter, Response

from coordinator.operations.read_regions import read_regions
from coordinator.operations.readiness import schema_revision, unit_figures
from coordinator.outages import DatabaseUnavailable
from coordinator.state import Coordinator, TheCoordinator
from doors.bodies import reply
from doors.metrics import exposition
from doors.problems import Problem
from migrations.revisions import is_behind

router = APIRouter(tags=["health"])
MOST_REGIONS = 1_000


@router.get("/healthz")
async def healthz() -> Response:
    return reply({"status": "ok"})


@router.get("/readyz")
async def readyz(coordinator: TheCoordinator) -> Response:
    """Ready when Postgres answers and its schema is as new as this code."""
    if is_behind(await coordinator.database.read(schema_revision)):
        raise Problem("not-ready", "the database's schema is older than this coordinator; run `leasehold migrate`")
    return reply({"status": "ready"})


@router.get("/metrics")
async def metrics(coordinator: TheCoordinator) -> Response:
    await _measure(coordinator)
    return exposition(coordinator.metrics.registry)


async def _measure(coordinator: Coordinator) -> None:
    gauges = coordinator.metrics
    gauges.streams.set(len(coordinator.hub))
    gauges.units.clear()
    gauges.regressed_lanes.clear()
    gauges.contested_regions.clear()
    with suppress(DatabaseUnavailable):  # the counters are worth having without the ledger, too
        await _measure_units(coordinator)


async def _measure_units(coordinator: Coordinator) -> None:
    for quota, account, units in await coordinator.database.read(unit_figures):
        coordinator.metrics.units.labels(quota, account).set(units)
    now = coordinator.clock.now()
    for region in await coordinator.database.read(lambda connection: read_regions(connection, "", MOST_REGIONS, now)):
        coordinator.metrics.regressed_lanes.labels(region.name).set(region.regressed_lanes)
        coordinator.metrics.contested_regions.labels(region.name).set(region.contested)
