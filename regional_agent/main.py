"""The composition root: the one place that reads the settings and puts the agent together."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import uvloop
from fastapi import FastAPI

from protocol.clock import Clock, SystemClock
from protocol.compatibility.releases import RELEASE
from protocol.diagnosis.checks import UnknownSetting, unknown_settings
from regional_agent.agent import RegionalAgent
from regional_agent.envoy.services import serving_grpc
from regional_agent.http import routes as http_routes
from regional_agent.http.callers import CallerRules
from regional_agent.http.fast_path import FastPath, fast_protocol
from regional_agent.http.workers import Worker, Workers
from regional_agent.settings import AgentSettings
from regional_agent.traces.checks import traced_protocol
from web.connections import ConnectionLimits
from web.logs import configure_logging
from web.metrics import HttpMetrics
from web.openapi import install_openapi, operation_id
from web.problems import install_problems
from web.requests import install_requests
from web.serving import LameDuck, Listener, listening, serve_on
from web.settings import load_settings, variable_of
from web.supervisor import Beat, supervise
from web.traces.opening import TraceRequests

OF_COMMANDS = ("LEASEHOLD_AGENT_URL",)


def create_app(
    settings: AgentSettings,
    clock: Clock | None = None,
    worker: Worker | None = None,
    unknown: Sequence[UnknownSetting] = (),
    grpc: Listener | None = None,
) -> FastAPI:
    """Return the app of an agent. Its lifespan serves gRPC as well, on the socket `grpc`."""
    region = RegionalAgent(settings, clock or SystemClock(), unknown)
    workers, callers = Workers(region, worker), CallerRules(settings, region.jwt_verifier)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with workers.beating(), region.running(), workers.running(), callers.following_files():
            if grpc is None:
                yield
                return
            async with serving_grpc(grpc, region, callers, app.state.connection_limits, workers.are_ready):
                yield

    app = FastAPI(
        title="Leasehold agent",
        version=RELEASE,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        generate_unique_id_function=operation_id,
    )
    app.state.region = region
    app.state.workers = workers
    app.include_router(http_routes.services)
    app.include_router(http_routes.health)
    install_problems(app)
    here = {"url": "http://127.0.0.1:8411", "description": "The agent of the service's own region."}
    install_openapi(app, server=here, token_is_optional=True)  # on loopback none is asked for
    metrics = HttpMetrics(region.metrics.registry)
    app.state.caller_rules = callers
    app.state.fast_path = FastPath(region.admission, metrics, max_body_bytes=settings.max_body_bytes, callers=callers)
    app.state.connection_limits = ConnectionLimits(
        max_connections=settings.max_connections,
        request_timeout_s=settings.request_timeout_ms / 1000,
        registry=region.metrics.registry,
    )
    # Decisions are counted; a line for each would be most of the log, and a tenth of the work.
    install_requests(app, max_body_bytes=settings.max_body_bytes, metrics=metrics, quiet=http_routes.HOT_PATHS)
    if region.traces is not None:
        app.add_middleware(TraceRequests, tracing=region.traces.tracing)
    return app


def run(workers: int | None = None) -> None:
    """Serve until SIGTERM. `workers` is the command line's, and takes precedence over the environment."""
    typed = {} if workers is None else {variable_of(AgentSettings, "workers"): str(workers)}
    settings = load_settings(AgentSettings, os.environ | typed)
    configure_logging("agent", settings.log_level)
    with ExitStack() as sockets:
        http = sockets.enter_context(listening(settings.host, settings.port, settings.uds))
        grpc = sockets.enter_context(listening(*settings.grpc_address)) if settings.has_grpc else None
        if settings.workers == 1:
            _serve(settings, Listeners(http, grpc))
        else:
            _supervise(settings, Listeners(http, grpc))


def unknown_variables(environ: Mapping[str, str]) -> list[UnknownSetting]:
    """Return the variables that look like settings of an agent and have no effect. Commands read `OF_COMMANDS`."""
    known = (variable_of(AgentSettings, name) for name in AgentSettings.model_fields)
    return unknown_settings(environ, variable_of(AgentSettings, ""), known, OF_COMMANDS)


class Listeners(NamedTuple):
    """The sockets of an agent, which its workers share."""

    http: Listener
    grpc: Listener | None


def _supervise(settings: AgentSettings, listeners: Listeners) -> None:
    with TemporaryDirectory(prefix="leasehold-agent-") as directory:

        def work(number: int, beat: Beat) -> None:
            named = settings.model_copy(update={"name": f"{settings.name}-{number}"})
            _serve(named, listeners, Worker(number, settings.workers, Path(directory), beat))

        if not supervise(settings.workers, work):
            raise SystemExit(1)


def _serve(settings: AgentSettings, listeners: Listeners, worker: Worker | None = None) -> None:
    app = create_app(settings, worker=worker, unknown=unknown_variables(os.environ), grpc=listeners.grpc)
    path, traces = app.state.fast_path, app.state.region.traces
    protocol = fast_protocol(path) if traces is None else traced_protocol(path, traces)
    lame_duck = LameDuck(settings.lame_duck_ms / 1000, app.state.region.health.shut_down)
    serving = serve_on(
        listeners.http,
        app,
        protocol=protocol,
        max_header_bytes=settings.max_header_bytes,
        limits=app.state.connection_limits,
        lame_duck=lame_duck,
        tls=app.state.region.tls.http,
    )
    uvloop.run(serving)
