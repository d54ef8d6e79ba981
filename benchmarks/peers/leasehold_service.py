"""The same FastAPI service, limited by Leasehold in its own process."""

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


def subject_of(scope: Scope) -> Subject:
    return {"tenant": "acme", "route": scope["path"], "method": scope["method"]}


app = FastAPI(lifespan=lifespan)
app.add_middleware(LimitMiddleware, check=engine.check, subject=subject_of)


@app.get("/benchmark")
async def asked() -> dict[str, str]:
    return {"export": "made"}
