"""A FastAPI service that Leasehold limits in the service's own process."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

from fastapi import FastAPI
from starlette.types import Scope

from leasehold import Engine, Subject
from leasehold.middleware import LimitMiddleware

engine = Engine()
route = os.environ["PEER_ROUTE"]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.running():
        yield


def subject_of(scope: Scope) -> Subject:
    tenant = parse_qs(scope["query_string"])[b"tenant"][0].decode()
    return {"tenant": tenant, "route": route, "method": scope["method"]}


app = FastAPI(lifespan=lifespan)
app.add_middleware(LimitMiddleware, check=engine.check, subject=subject_of)


@app.get("/benchmark")
async def benchmark() -> dict[str, str]:
    return {"export": "made"}
