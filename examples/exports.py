"""A FastAPI service that checks every request before it works, in its own process.

It is one more agent of its region, so it reads the settings of one (LEASEHOLD_AGENT_…).

    eval "$(./dev env --agent us-east)"
    uvicorn examples.exports:app --port 9000
    curl -i http://127.0.0.1:9000/v1/exports -X POST -H 'X-Tenant: acme'
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import Scope

from leasehold import Engine, Subject
from leasehold.middleware import LimitMiddleware

engine = Engine()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.running():
        yield


def subject_of(scope: Scope) -> Subject | None:
    """Who asks, and for what. None: the health check asks nobody."""
    if scope["path"] == "/healthz":
        return None
    tenant = dict(scope["headers"]).get(b"x-tenant", b"nobody").decode("latin-1")
    return {"tenant": tenant, "route": scope["path"], "method": scope["method"]}


app = FastAPI(lifespan=lifespan)
app.add_middleware(LimitMiddleware, check=engine.check, subject=subject_of)


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/v1/exports")
async def export() -> dict[str, str]:
    return {"export": "made"}
