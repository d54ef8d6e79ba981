"""The composition root: the one place that reads the settings and puts the agent together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from fastapi import FastAPI

from doors.bodies import install_schemas
from doors.logs import configure_logging
from doors.metrics import HttpMetrics
from doors.problems import install_problems
from doors.requests import install_requests
from doors.serving import serve
from doors.settings import load_settings
from protocol.clock import Clock, SystemClock
from regional_agent import api
from regional_agent.fast_door import FastDoor, fast_protocol
from regional_agent.region import Region
from regional_agent.settings import AgentSettings


def create_app(settings: AgentSettings, clock: Clock | None = None) -> FastAPI:
    region = Region(settings, clock or SystemClock())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with region.running():
            yield

    app = FastAPI(title="Leasehold agent", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.region = region
    app.include_router(api.services)
    app.include_router(api.health)
    install_problems(app)
    install_schemas(app, token_is_optional=True)  # on loopback none is asked for
    metrics = HttpMetrics(region.metrics.registry)
    token = settings.service_token.get_secret_value() if settings.service_token else None
    app.state.fast_door = FastDoor(
        region.admission, metrics, max_body_bytes=settings.max_body_bytes, service_token=token
    )
    # Decisions are counted; a line for each would be most of the log, and a tenth of the work.
    install_requests(app, max_body_bytes=settings.max_body_bytes, metrics=metrics, quiet=api.HOT_PATHS)
    return app


def run() -> None:
    """Serves until SIGTERM."""
    settings = load_settings(AgentSettings)
    configure_logging("agent", settings.log_level)
    app = create_app(settings)
    uvloop.run(
        serve(
            app,
            protocol=fast_protocol(app.state.fast_door),
            host=settings.host,
            port=settings.port,
            uds=settings.uds,
            max_header_bytes=settings.max_header_bytes,
        )
    )
