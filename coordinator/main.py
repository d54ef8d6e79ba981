"""The composition root: the one place that reads the settings and puts the parts together."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import uvloop
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.routing import BaseRoute

from coordinator.adjustments import routes as adjustments_routes
from coordinator.archives import routes as archives_routes
from coordinator.background import background_jobs
from coordinator.blocks import routes as blocks_routes
from coordinator.clock import ComparedClock
from coordinator.database.engine import open_database
from coordinator.database.notify import listen
from coordinator.decision_log import routes as decision_routes
from coordinator.decision_log.publisher import DecisionPublisher, open_publisher
from coordinator.decision_log.store import open_decision_store
from coordinator.diagnosis import routes as diagnosis_routes
from coordinator.diagnosis.examine import examine_coordinator
from coordinator.epochs import routes as epochs_routes
from coordinator.exchange import routes as exchange_routes
from coordinator.exports import routes as exports_routes
from coordinator.health import routes as health_routes
from coordinator.health.monitor import CoordinatorHealth
from coordinator.installation import routes as installation_routes
from coordinator.installation.rules import addresses_of
from coordinator.job_failures import JobFailures
from coordinator.jobs import running
from coordinator.limits import routes as limits_routes
from coordinator.metrics import CoordinatorMetrics
from coordinator.outages import ClockNotTrusted, DatabaseUnavailable, LimitsNotReadable
from coordinator.overrides import routes as overrides_routes
from coordinator.proof import routes as proof_routes
from coordinator.rebalancing import routes as rebalancing_routes
from coordinator.regions import routes as regions_routes
from coordinator.replays import routes as replays_routes
from coordinator.resets import routes as resets_routes
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from coordinator.state import Coordinator
from coordinator.suspense import routes as suspense_routes
from coordinator.tenants import routes as tenants_routes
from coordinator.usage import routes as usage_routes
from coordinator.usage import statement_routes
from coordinator.webhooks import routes as webhooks_routes
from protocol.clock import Clock, SystemClock
from protocol.compatibility.releases import RELEASE, stated
from protocol.diagnosis.checks import UnknownSetting, unknown_settings
from web.connections import ConnectionLimits
from web.credentials.verify_jwt import JwtVerifier
from web.diagnosis.self_diagnosis import SelfDiagnosis
from web.logs import configure_logging
from web.metrics import HttpMetrics
from web.openapi import install_openapi, operation_id
from web.problems import Problem, install_problems, problem_response
from web.requests import install_requests
from web.serving import serve
from web.settings import load_settings, variable_of
from web.tls.certificates import Certificates
from web.tls.handshakes import FailedHandshakes, serving_context
from web.traces.opening import exporting, open_tracing, trace_requests

ROUTERS = (
    health_routes.router,
    diagnosis_routes.router,
    epochs_routes.router,
    exchange_routes.router,
    decision_routes.agents,
    limits_routes.router,
    replays_routes.router,
    overrides_routes.router,
    blocks_routes.router,
    resets_routes.router,
    regions_routes.router,
    rebalancing_routes.router,
    usage_routes.router,
    statement_routes.router,
    exports_routes.router,
    archives_routes.router,
    installation_routes.router,
    proof_routes.router,
    decision_routes.router,
    suspense_routes.router,
    adjustments_routes.router,
    tenants_routes.router,
    webhooks_routes.router,
)


class _Process:
    """The parts of a coordinator that live as long as its process, and what runs while it serves."""

    def __init__(
        self, settings: CoordinatorSettings, clock: Clock, hub: SignalHub, unknown: Sequence[UnknownSetting]
    ) -> None:
        self._settings, self._uncompared, self._hub, self._unknown = settings, clock, hub, unknown
        self._clock = ComparedClock(clock, settings.clock_limit_ms)
        self._failures = JobFailures()
        self.metrics = CoordinatorMetrics()
        self.tracing = open_tracing("leasehold-coordinator", settings, self.metrics.traces)
        terms = settings.jwt_terms()
        self._verifier = None if terms is None else JwtVerifier(terms, self.metrics.registry)
        self.tls = serving_context(
            settings.server_files(),
            requires_client_certificate=settings.tls_require_client_cert,
            handshakes=FailedHandshakes(self.metrics.registry),
        )
        self._certificates = Certificates({"http": self.tls}, self.metrics.registry)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Hold the connections, run the jobs, and give the app its state. The server closes the hub first."""
        settings, clock, hub, metrics = self._settings, self._clock, self._hub, self.metrics
        tracing, verifier = self.tracing, self._verifier
        url, jobs = settings.database_url.get_secret_value, background_jobs(settings, clock, metrics, tracing)
        async with (
            open_database(url, settings.database_pool_size, metrics.pools, name="requests") as database,
            open_publisher(settings, metrics.published_decisions) as publisher,
            open_decision_store(
                url, clock, settings.decision_retention_days, metrics.decisions, metrics.pools, publisher
            ) as decisions,
            _beside(listen(url, hub.deliver)),
            nullcontext() if verifier is None else _beside(verifier.keys.run()),
            _watching(self._health(publisher)) as health,
            exporting(tracing),
            running(url, jobs, metrics, self._failures, clock) as scheduler,
        ):
            database.on_commit = scheduler.expect_work
            examine = partial(
                examine_coordinator, database, settings, self._unknown, jobs, self._uncompared, publisher=publisher
            )
            diagnosis = SelfDiagnosis(examine, self._uncompared)
            app.state.coordinator = Coordinator(
                settings, clock, database, hub, metrics, health, diagnosis, decisions, tracing, jwt_verifier=verifier
            )
            async with _beside(diagnosis.run()):
                yield
            hub.close()

    def _health(self, publisher: DecisionPublisher | None) -> CoordinatorHealth:
        url = self._settings.database_url.get_secret_value
        return CoordinatorHealth(
            url,
            self._clock,
            self.metrics,
            self._failures,
            clock_warn_ms=self._settings.clock_warn_ms,
            addresses=addresses_of(url(), self._settings.installation),
            jwt_keys=None if self._verifier is None else self._verifier.keys,
            certificates=self._certificates,
            publisher=publisher,
        )


def create_app(
    settings: CoordinatorSettings,
    clock: Clock | None = None,
    hub: SignalHub | None = None,
    unknown: Sequence[UnknownSetting] = (),
) -> FastAPI:
    """Return the whole coordinator as an app.

    `unknown`: variables of the environment that look like settings, and that no setting reads.
    """
    hub = SignalHub() if hub is None else hub  # an empty one is false
    process = _Process(settings, clock or SystemClock(), hub, unknown)
    metrics = process.metrics
    app = FastAPI(
        title="Leasehold coordinator",
        version=RELEASE,
        lifespan=process.running,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=operation_id,
        routes=_routes(),
    )
    app.state.tls = process.tls
    install_problems(app)
    here = {"url": "http://127.0.0.1:8400", "description": "A coordinator. Any of them answers for all."}
    install_openapi(app, server=here)
    app.add_exception_handler(DatabaseUnavailable, _unavailable)
    app.add_middleware(exchange_routes.ExchangesAhead, unavailable=_unavailable)
    http_metrics = HttpMetrics(metrics.registry)
    install_requests(app, max_body_bytes=settings.max_body_bytes, metrics=http_metrics, stated=stated())
    trace_requests(app, process.tracing)
    app.state.connection_limits = _connection_limits(settings, metrics)
    return app


def _connection_limits(settings: CoordinatorSettings, metrics: CoordinatorMetrics) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=settings.max_connections,
        request_timeout_s=settings.request_timeout_ms / 1000,
        registry=metrics.registry,
    )


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes of every app of this process, because FastAPI analyses each of them at its first request."""
    whole = APIRouter(generate_unique_id_function=operation_id)
    for router in ROUTERS:
        whole.include_router(router)
    return whole.routes


async def _unavailable(request: Request, error: Exception) -> Response:
    for type_, kind in ((ClockNotTrusted, "clock-not-trusted"), (LimitsNotReadable, "limits-not-readable")):
        if isinstance(error, type_):
            return problem_response(Problem(kind, str(error), headers={"Retry-After": "1"}), request)
    detail = "the ledger cannot be reached now; nothing was changed that a repetition would not find"
    return problem_response(Problem("database-unavailable", detail, headers={"Retry-After": "1"}), request)


@asynccontextmanager
async def _watching(health: CoordinatorHealth) -> AsyncIterator[CoordinatorHealth]:
    """Check once before anything is served: without a comparison of the clocks nothing is decided."""
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
async def _beside(loop: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop until the end of the block."""
    task = asyncio.create_task(loop)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def unknown_variables(environ: Mapping[str, str]) -> list[UnknownSetting]:
    """Return the variables that look like settings of a coordinator and have no effect."""
    known = (variable_of(CoordinatorSettings, name) for name in CoordinatorSettings.model_fields)
    return unknown_settings(environ, variable_of(CoordinatorSettings, ""), known)


def run() -> None:
    """Serve until SIGTERM."""
    settings = load_settings(CoordinatorSettings)
    configure_logging("coordinator", settings.log_level)
    uvloop.run(_serve(settings))


async def _serve(settings: CoordinatorSettings) -> None:
    hub = SignalHub()

    async def end_streams() -> None:
        hub.close()

    app = create_app(settings, hub=hub, unknown=unknown_variables(os.environ))
    await serve(
        app,
        host=settings.host,
        port=settings.port,
        max_header_bytes=settings.max_header_bytes,
        limits=app.state.connection_limits,
        before_shutdown=end_streams,
        tls=app.state.tls,
    )
