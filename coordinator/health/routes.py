"""For those who watch: is it alive, can it do its work, what did it count. No token: nothing here names a tenant."""

from fastapi import APIRouter, Response

from coordinator.state import CoordinatorDep
from web.bodies import described, reply
from web.health import Health, HealthStatus
from web.metrics import exposition

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    return reply({"status": "ok"})


@router.get("/readyz", **described(answers={200: Health, 503: Health}, plain=(503,)))
async def readyz(coordinator: CoordinatorDep) -> Response:
    """Prove a commit, within two seconds, and tell why the coordinator is degraded or not ready: then it is 503."""
    await coordinator.health.look()
    found = coordinator.health.report()
    if found.status is HealthStatus.NOT_READY:
        return reply(found, 503, headers={"Retry-After": "1"})
    return reply(found)


@router.get("/metrics")
async def metrics(coordinator: CoordinatorDep) -> Response:
    """What was counted here, and what one coordinator measured for all. The database is not asked."""
    coordinator.metrics.streams.set(len(coordinator.hub))
    return exposition(coordinator.metrics.registry)
