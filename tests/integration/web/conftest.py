"""Fixtures of a real server on a loopback socket, in the test's own event loop, and raw connections to it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from web.bodies import read_body, reply
from web.problems import install_problems
from web.requests import install_requests
from web.serving import serve

MAX_BODY_BYTES = 1_000_000
MAX_HEADER_BYTES = 4096
PATIENCE_S = 20


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the event loop of the services, whose transports are not asyncio's."""
    return "asyncio", {"use_uvloop": True}


class Gate:
    """Yield events that an endpoint waits for, so that a test knows where a request is."""

    def __init__(self) -> None:
        self.entered = anyio.Event()
        self.open = anyio.Event()


def make_app(gate: Gate) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.get("/quick")
    async def quick() -> Response:
        return reply({"answer": "quick"})

    @app.post("/length")
    async def length(request: Request) -> Response:
        return reply({"length": len(await read_body(request, str))})

    @app.post("/unread")
    async def unread() -> Response:
        return reply({"answer": "unread"})

    @app.get("/gated")
    async def gated() -> Response:
        gate.entered.set()
        await gate.open.wait()
        return reply({"answer": "gated"})

    @app.get("/events")
    async def events() -> Response:
        async def stream() -> AsyncIterator[bytes]:
            yield b"event: hello\n\n"
            gate.entered.set()
            await gate.open.wait()
            yield b"event: end\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.get("/breaks")
    async def breaks() -> Response:
        raise RuntimeError("inside")

    install_problems(app)
    install_requests(app, max_body_bytes=MAX_BODY_BYTES)
    return app


@contextlib.asynccontextmanager
async def serving(
    app: Any, before_shutdown: Callable[[], Awaitable[None]] | None = None, **options: Any
) -> AsyncIterator[str]:
    """Serve for as long as the block lasts; yield the address."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = {"host": "127.0.0.1", "port": 0, "max_header_bytes": MAX_HEADER_BYTES, **options}
    task = asyncio.create_task(serve(app, before_shutdown=before_shutdown, on_listening=address.set_result, **options))
    try:
        await asyncio.wait((task, address), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield address.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def address(gate: Gate) -> AsyncIterator[str]:
    async with serving(make_app(gate)) as address:
        yield address


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status
        assert document["request_id"] == self.headers["x-request-id"]
        return document


class Raw:
    """A connection on which a test writes any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> Answer:
        with anyio.fail_after(PATIENCE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split()[1]), headers, body)

    async def rest(self) -> bytes:
        """Return all bytes until the server closes its half."""
        with anyio.fail_after(PATIENCE_S):
            return await self._reader.read()

    async def until(self, wanted: bytes) -> None:
        with anyio.fail_after(PATIENCE_S):
            await self._reader.readuntil(wanted)

    def abort(self) -> None:
        """Close abruptly, whatever is still to be sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Raw]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    raw = Raw(*await asyncio.open_connection(host, int(port)))
    try:
        yield raw
    finally:
        await raw.close()


@pytest.fixture
async def raw(address: str) -> AsyncIterator[Raw]:
    async with connected(address) as connection:
        yield connection
