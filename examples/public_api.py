"""A public API: anonymous callers are limited by their network, for requests and for WebSockets.

    eval "$(./dev env)"
    LEASEHOLD_TOKEN=$ADMIN_TOKEN leasehold apply -f examples/public_api.yaml
    LEASEHOLD_AGENT_URL=$AGENT_US_EAST uvicorn examples.public_api:app --port 9000
    curl -i http://127.0.0.1:9000/v1/weather/berlin

A request is refused with 429 before the code below sees it, and a WebSocket when it is opened. Behind a proxy, run
uvicorn with `--proxy-headers`, so that the address is the caller's.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, WebSocket

from leasehold import AsyncClient, Decision
from leasehold.middleware import LimitMiddleware

# Weather is no money: while the agent is away everybody is served.
client = AsyncClient(os.environ.get("LEASEHOLD_AGENT_URL", "http://127.0.0.1:8411"), on_failure="open")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client:  # which closes its connections
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(LimitMiddleware, check=client.check)  # by route, method and address


@app.get("/v1/weather/{city}")
async def read_weather(city: str, request: Request) -> dict[str, object]:
    decision: Decision = request.state.limit_decision
    return {
        "city": city,
        "celsius": 7,
        "requests_left": min((each.remaining for each in decision.policies), default=None),
    }


@app.websocket("/v1/live/{city}")
async def send_weather(websocket: WebSocket, city: str) -> None:
    await websocket.accept()
    await websocket.send_json({"city": city, "celsius": 7})
    await websocket.close()
