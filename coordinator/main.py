"""The composition root: the one place that reads the settings and puts the parts together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import uvloop
from fastapi import FastAPI, Request, Response

from coordinator.api import (
    adjustments,
    agents,
    allocations,
    blocks,
    catalogue,
    exports,
    finance,
    health,
    installation,
    operations,
    overrides,
    proof,
    statements,
    suspense,
    webhooks,
)
from coordinator.clock import ComparedClock
from coordinator.database.documents import Documents
from coordinator.database.engine import open_database
from coordinator.database.notices import listen
from coordinator.domain.installation import places_of
from coordinator.health import HealthWatch
from coordinator.job_failures import JobFailures
from coordinator.loops import Job, running
from coordinator.metrics import Metrics
from coordinator.operations.close_period import go_on_closing
from coordinator.operations.deliveries import forget_events
from coordinator.operations.expire_leases import expire_leases
from coordinator.operations.find_drift import find_drift
from coordinator.operations.first_answers import forget
from coordinator.operations.follow_rebalances import follow_rebalances
from coordinator.operations.make_exports import do_exports, forget_exports
from coordinator.operations.readiness import measure
from coordinator.operations.recall import recall_suspense
from coordinator.operations.seal import seal
from coordinator.operations.share_rates import forget_quiet_rates
from coordinator.operations.verifications import do_verifications
from coordinator.outages import ClockNotTrusted, DatabaseUnavailable
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from coordinator.state import Coordinator
from coordinator.telling import tell_webhooks
from doors.bodies import install_schemas
from doors.connections import ConnectionLimits
from doors.logs import configure_logging
from doors.metrics import HttpMetrics
from doors.problems import Problem, install_problems, problem_response
from doors.requests import install_requests
from doors.serving import serve
from doors.settings import load_settings
from protocol.clock import Clock, SystemClock

ROUTERS = (
    health.router,
    agents.router,
    catalogue.router,
    overrides.router,
    blocks.router,
    operations.router,
    allocations.router,
    finance.router,
    statements.router,
    exports.router,
    installation.router,
    proof.router,
    suspense.router,
    adjustments.router,
    webhooks.router,
)


def create_app(settings: CoordinatorSettings, clock: Clock | None = None, hub: SignalHub | None = None) -> FastAPI:
    """The whole coordinator as an app. Its lifespan holds the connections; whoever serves it closes the hub first."""
    hub = SignalHub() if hub is None else hub  # an empty one is false
    clock = ComparedClock(clock or SystemClock(), settings.clock_limit_ms)
    metrics, failures = Metrics(), JobFailures()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        url = settings.database_url.get_secret_value()
        async with (
            open_database(url, settings.database_pool_size) as database,
            _listening(url, hub),
            _watching(
                HealthWatch(
                    url,
                    clock,
                    metrics,
                    failures,
                    clock_warn_ms=settings.clock_warn_ms,
                    places=places_of(url, settings.installation),
                )
            ) as health,
            running(url, jobs(settings, clock), metrics, failures),
        ):
            app.state.coordinator = Coordinator(settings, clock, database, hub, metrics, health)
            yield
            hub.close()

    app = FastAPI(title="Leasehold coordinator", lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router)
    install_problems(app)
    install_schemas(app)
    app.add_exception_handler(DatabaseUnavailable, _unavailable)
    app.add_middleware(agents.ExchangesAhead, unavailable=_unavailable)
    install_requests(app, max_body_bytes=settings.max_body_bytes, metrics=HttpMetrics(metrics.registry))
    app.state.connection_limits = ConnectionLimits(
        max_connections=settings.max_connections,
        request_timeout_s=settings.request_timeout_ms / 1000,
        registry=metrics.registry,
    )
    return app


def jobs(settings: CoordinatorSettings, clock: Clock) -> list[Job]:
    """What runs by itself, in whichever coordinator comes first."""
    places = places_of(settings.database_url.get_secret_value(), settings.installation)
    grace, documents = timedelta(milliseconds=settings.close_grace_ms), Documents()
    hold_wait = timedelta(milliseconds=settings.close_hold_wait_ms)
    return [
        Job("expire", settings.expire_every_ms / 1000, lambda db: db.run(lambda c: expire_leases(c, clock.now()))),
        Job("close", 5, lambda database: go_on_closing(database, clock, grace, hold_wait), at_most_s=600),
        Job("rebalance", 1, lambda database: follow_rebalances(database, documents, clock)),
        Job("recall", 30, lambda database: database.run(lambda c: recall_suspense(c, clock.now()))),
        Job("seal", 60, lambda database: database.run(lambda c: seal(c, clock.now())), at_most_s=600),
        Job("forget_rates", 60, lambda database: database.run(lambda c: forget_quiet_rates(c, clock.now()))),
        Job("forget", 60, lambda database: database.run(lambda c: forget(c, clock.now()))),
        Job("export", 1, lambda database: do_exports(database, clock), at_most_s=3600),
        Job("forget_exports", 600, lambda database: database.run(lambda c: forget_exports(c, clock.now()))),
        Job("tell", 1, lambda database: tell_webhooks(database, clock, places), at_most_s=120),
        Job("measure", 30, lambda database: database.run(lambda c: measure(c, clock.now()))),
        Job("drift", 300, lambda database: database.run(lambda c: find_drift(c, clock.now()))),
        Job("forget_events", 600, lambda database: database.run(lambda c: forget_events(c, clock.now()))),
        Job("verify", 1, lambda database: do_verifications(database, clock), at_most_s=3600),
    ]


async def _unavailable(request: Request, error: Exception) -> Response:
    if isinstance(error, ClockNotTrusted):
        return problem_response(Problem("clock-not-trusted", str(error), headers={"Retry-After": "1"}), request)
    detail = "the ledger cannot be reached now; nothing was changed that a repetition would not find"
    return problem_response(Problem("database-unavailable", detail, headers={"Retry-After": "1"}), request)


@asynccontextmanager
async def _watching(health: HealthWatch) -> AsyncIterator[HealthWatch]:
    """Look once before anything is served: without a comparison of the clocks nothing is decided."""
    await health.look()
    task = asyncio.create_task(health.run())
    try:
        yield health
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await health.close()


@asynccontextmanager
async def _listening(url: str, hub: SignalHub) -> AsyncIterator[None]:
    task = asyncio.create_task(listen(url, hub.deliver))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def run() -> None:
    """Serves until SIGTERM."""
    settings = load_settings(CoordinatorSettings)
    configure_logging("coordinator", settings.log_level)
    uvloop.run(_serve(settings))


async def _serve(settings: CoordinatorSettings) -> None:
    hub = SignalHub()

    async def end_streams() -> None:
        hub.close()

    app = create_app(settings, hub=hub)
    await serve(
        app,
        host=settings.host,
        port=settings.port,
        max_header_bytes=settings.max_header_bytes,
        limits=app.state.connection_limits,
        before_shutdown=end_streams,
    )
