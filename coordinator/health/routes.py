"""HTTP: liveness, readiness and metrics. They take no token, for nothing in them names a tenant."""

from fastapi import APIRouter, Response

from coordinator.state import CoordinatorDep
from web.bodies import reply
from web.health import Health, HealthStatus, Liveness
from web.metrics import exposition
from web.openapi import described

router = APIRouter(tags=["health"])


@router.get("/healthz", **described(answers={200: Liveness}))
async def get_liveness() -> Response:
    """Answer as long as the process serves requests."""
    return reply(Liveness())


@router.get("/readyz", **described(answers={200: Health, 503: Health}, plain=(503,)))
async def get_readiness(coordinator: CoordinatorDep) -> Response:
    """Prove a commit within two seconds, and return why the coordinator is degraded, or 503 if it is not ready."""
    await coordinator.health.look()
    found = coordinator.health.report()
    if found.status is HealthStatus.NOT_READY:
        return reply(found, 503, headers={"Retry-After": "1"})
    return reply(found)


@router.get("/metrics", **described(answers={200: None}, also=["text/plain"]))
async def get_metrics(coordinator: CoordinatorDep) -> Response:
    """Return metrics in the format of Prometheus: this coordinator's own, and figures that one measured for all."""
    coordinator.metrics.streams.set(len(coordinator.hub))
    return exposition(coordinator.metrics.registry)
