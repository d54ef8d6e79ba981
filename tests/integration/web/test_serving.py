"""Servers start and stop in order: port, socket file, signals, and open streams."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import pytest

from tests.integration.web.conftest import PATIENCE_S, Gate, connected, make_app, serving
from web.serving import CannotListen, PortInUse, serve

pytestmark = pytest.mark.anyio

EVENTS = b"GET /events HTTP/1.1\r\nHost: doors\r\n\r\n"
GATED = b"GET /gated HTTP/1.1\r\nHost: doors\r\n\r\n"


async def test_a_port_in_use_is_reported_in_one_sentence(gate: Gate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"^Port {port} of 127\.0\.0\.1 is in use by another program: [^\n]*\.$"):
            await serve(make_app(gate), host="127.0.0.1", port=port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
async def test_a_host_that_is_not_ours_is_reported(gate: Gate, host: str) -> None:
    with pytest.raises(CannotListen, match=f"^Cannot listen on port 0 of {host}: .*$"):
        await serve(make_app(gate), host=host, port=0)


async def test_a_port_can_be_used_again_at_once(gate: Gate) -> None:
    async with serving(make_app(gate)) as first, httpx.AsyncClient() as client:
        await client.get(f"{first}/quick")
    async with serving(make_app(gate), port=int(first.rpartition(":")[2])) as second:
        assert second == first


async def _ask(path: Path) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://doors") as client:
        return await client.get("/quick")


async def test_a_unix_socket_is_served(gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with serving(make_app(gate), uds=str(path)) as address:
        assert address == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o660
        assert (await _ask(path)).status_code == 200
        assert not stat.S_IMODE(path.stat().st_mode) & 0o007
        with pytest.raises(PortInUse, match=f"^The socket {path} is in use by another program: "):
            await serve(make_app(gate), host="", port=0, uds=str(path))
        assert (await _ask(path)).status_code == 200
    assert not path.exists()


async def test_the_socket_file_of_a_killed_process_is_replaced(gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(make_app(gate), uds=str(path)):
        assert (await _ask(path)).status_code == 200


async def test_a_file_that_is_not_a_socket_is_not_replaced(gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(PortInUse):
        await serve(make_app(gate), host="", port=0, uds=str(path))
    assert path.read_text() == "data"


async def test_streams_end_by_themselves_and_requests_are_answered(gate: Gate) -> None:
    async def end_streams() -> None:
        gate.open.set()

    async with serving(make_app(gate), end_streams) as address, connected(address) as stream:
        await stream.send(EVENTS)
        await stream.until(b"event: hello\n\n")
        async with connected(address) as request, connected(address) as idle:
            await request.send(GATED)
            await idle.send(b"GET /quick HTTP/1.1\r\nHost: doors\r\n\r\n")
            assert (await idle.answer()).status == 200
            os.kill(os.getpid(), signal.SIGTERM)
            await stream.until(b"event: end\n\n")
            assert (await stream.rest()).endswith(b"0\r\n\r\n")
            assert (await request.answer()).body == b'{"answer":"gated"}'
            assert await idle.rest() == b""


async def test_a_failing_before_shutdown_does_not_keep_the_server(gate: Gate) -> None:
    async def fail() -> None:
        raise RuntimeError("as they do")

    async with serving(make_app(gate), fail) as address:
        pass
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(address)


async def test_a_stream_that_does_not_end_is_cut(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.serving.GRACE_S", 0)
    with anyio.fail_after(PATIENCE_S):
        async with serving(make_app(gate)) as address, connected(address) as stream:
            await stream.send(EVENTS)
            await stream.until(b"event: hello\n\n")
    assert not gate.open.is_set()


PROGRAM = """
import contextlib, uvloop
from web.logs import configure_logging
from web.serving import serve
from tests.integration.web.conftest import Gate, make_app

async def main():
    configure_logging("doors", "info")
    gate = Gate()
    app = make_app(gate)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        print("lifespan ended", flush=True)

    app.router.lifespan_context = lifespan

    async def end_streams():
        print("streams end", flush=True)
        gate.open.set()

    await serve(app, host="127.0.0.1", port=0, before_shutdown=end_streams,
                on_listening=lambda address: print("at", address, flush=True))
    print("served", flush=True)

uvloop.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_on_uvloop_ends_in_order(number: signal.Signals) -> None:
    program = [sys.executable, "-W", "error", "-c", PROGRAM]
    process = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with anyio.fail_after(PATIENCE_S):
            await process.stdout.readuntil(b"\nat ")
            address = (await process.stdout.readline()).decode().strip()
            async with connected(address) as stream:
                await stream.send(EVENTS)
                await stream.until(b"event: hello\n\n")
                process.send_signal(number)
                await stream.until(b"event: end\n\n")
                await stream.rest()
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    events = [line if line[:1] != b"{" else json.loads(line)["event"].encode() for line in out.splitlines()]
    assert events == [b"streams end", b"request", b"lifespan ended", b"served"], (out, err)
    assert (process.returncode, err) == (0, b"")
