"""The services behind the gRPC door, and the door that serves them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from protocol.clock import SystemClock
from regional_agent.agent import RegionalAgent
from regional_agent.envoy.door import health
from regional_agent.envoy.door.callers import DoorCallers
from regional_agent.envoy.door.listener import DoorLimits, GrpcDoor
from regional_agent.envoy.door.methods import Methods
from regional_agent.envoy.quota.messages import STREAM_RATE_LIMIT_QUOTAS
from regional_agent.envoy.quota.rules import DELIVERY_MS
from regional_agent.envoy.quota.streams import RateLimitQuotaService
from regional_agent.envoy.rls import rate_limit
from regional_agent.envoy.rls.responses import SHOULD_RATE_LIMIT
from regional_agent.http.callers import CallerRules
from web.connections import ConnectionLimits
from web.serving import Listener, log_listening


@asynccontextmanager
async def serving_grpc(
    listener: Listener,
    region: RegionalAgent,
    callers: CallerRules,
    limits: ConnectionLimits,
    is_ready: Callable[[], Awaitable[bool]],
) -> AsyncIterator[GrpcDoor]:
    """Serve Envoy's protocols on a socket that is open already."""
    quotas = region.proxy_quotas = RateLimitQuotaService(region, SystemClock())
    door = make_door(region, callers, limits, is_ready, quotas)
    region.grpc_clients = door.clients
    tls = region.tls.grpc
    async with quotas.running(), door.serving(listener.socket, tls):
        scheme = "grpc" if tls is None else "grpcs"
        log_listening(listener.address.replace("http", scheme, 1))
        yield door


def make_door(
    region: RegionalAgent,
    callers: CallerRules,
    limits: ConnectionLimits,
    is_ready: Callable[[], Awaitable[bool]],
    quotas: RateLimitQuotaService,
) -> GrpcDoor:
    settings = region.settings
    own = DoorLimits(settings.grpc_max_streams, settings.grpc_max_message_bytes, settings.max_header_bytes, DELIVERY_MS)
    checks = health.HealthService([rate_limit.SERVICE], is_ready)
    methods = Methods(
        unary={SHOULD_RATE_LIMIT: rate_limit.RateLimitService(region.admission, region.traces).should_rate_limit},
        streams={health.CHECK: checks.check, health.WATCH: checks.watch, STREAM_RATE_LIMIT_QUOTAS: quotas.stream},
    )
    door_callers = DoorCallers(callers, methods, public=(health.CHECK, health.WATCH))
    return GrpcDoor(door_callers, own, limits, region.metrics.registry)
