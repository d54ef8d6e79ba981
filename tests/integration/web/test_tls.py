"""Both services' server over TLS, on the event loop that they use."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from structlog.testing import capture_logs

from tests.certificates import LOOPBACK, Authority
from tests.integration.web.conftest import MAX_HEADER_BYTES, Gate, make_app, serving
from tests.waiting import BOUND_S, attempts, until
from web.bodies import reply
from web.connections import ConnectionLimits
from web.tls import context as context_module
from web.tls.context import TlsFiles, client_context
from web.tls.handshakes import FailedHandshakes, serving_context
from web.tls.http_client import HttpsTransport

pytestmark = pytest.mark.anyio

FAILED = "leasehold_tls_handshakes_failed_total"
SPIFFE = "spiffe://example.org/region/us-east"


@contextlib.asynccontextmanager
async def served(
    app: Any, files: TlsFiles, *, requires_client_certificate: bool = True, **options: Any
) -> AsyncIterator[tuple[str, CollectorRegistry]]:
    """Serve with TLS; yield the address, and the registry that counts failed handshakes."""
    registry = CollectorRegistry()
    handshakes = FailedHandshakes(registry)
    tls = serving_context(files, requires_client_certificate=requires_client_certificate, handshakes=handshakes)
    async with serving(app, tls=tls, **options) as address:
        yield address, registry


async def get(address: str, files: TlsFiles, path: str = "/quick") -> httpx.Response:
    async with httpx.AsyncClient(verify=client_context(files), trust_env=False) as client:
        return await client.get(f"{address}{path}")


async def test_requests_are_answered_and_the_address_says_https(gate: Gate, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with served(make_app(gate), authority.files("server")) as (address, _):
        assert address.startswith("https://127.0.0.1:")
        assert (await get(address, authority.files("client"))).json() == {"answer": "quick"}


async def test_a_head_that_is_too_large_is_refused_with_a_problem(gate: Gate, tmp_path: Path) -> None:
    """Half of a TLS connection cannot be closed: the refusal goes out before the end of both halves."""
    authority = Authority(tmp_path)
    async with served(make_app(gate), authority.files("server")) as (address, _):
        host, _, port = address.removeprefix("https://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(authority.files("client")))
        writer.write(b"GET /quick HTTP/1.1\r\nX: " + b"x" * MAX_HEADER_BYTES)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_rotated_certificate_is_shown_without_a_restart(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that are open go on; the authority that signed the first certificate is not needed any more."""
    monkeypatch.setattr(context_module, "REREAD_S", 0)
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    files = before.files("server")._replace(ca_file=None)
    async with (
        served(make_app(gate), files) as (address, _),
        httpx.AsyncClient(verify=client_context(TlsFiles(before.file)), trust_env=False) as client,
    ):
        await client.get(f"{address}/quick")
        after.issue("server")
        assert (await get(address, TlsFiles(after.file))).is_success
        assert (await client.get(f"{address}/quick")).is_success
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await get(address, TlsFiles(before.file))


async def test_a_client_without_a_certificate_is_refused_counted_and_logged(gate: Gate, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with capture_logs() as logged:
        async with served(make_app(gate), authority.files("server")) as (address, registry):
            for _ in range(2):
                with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                    await get(address, TlsFiles(authority.file))
            await until(lambda: registry.get_sample_value(FAILED, {"reason": "no_certificate"}) == 2)
            assert (await get(address, authority.files("client"))).is_success
    [line] = [each for each in logged if each["event"] == "TLS handshake failed"]
    assert (line["code"], line["reason"]) == ("no_certificate", "the client showed no certificate")


async def test_a_client_may_come_without_a_certificate_if_that_is_configured(gate: Gate, tmp_path: Path) -> None:
    """One with a certificate of another authority is refused all the same."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    files = authority.files("server")
    async with served(make_app(gate), files, requires_client_certificate=False) as (address, registry):
        assert (await get(address, TlsFiles(authority.file))).is_success
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            await get(address, other.files("client", authority))
        await until(lambda: registry.get_sample_value(FAILED, {"reason": "untrusted_authority"}) == 1)


async def test_plain_http_is_refused_and_counted(gate: Gate, tmp_path: Path) -> None:
    async with served(make_app(gate), Authority(tmp_path).files("server")) as (address, registry):
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(address.replace("https", "http"))
        await until(lambda: registry.get_sample_value(FAILED, {"reason": "not_tls"}) == 1)


async def test_a_client_that_never_begins_its_handshake_is_disconnected(gate: Gate, tmp_path: Path) -> None:
    limits = ConnectionLimits(request_timeout_s=0.2)
    async with served(make_app(gate), Authority(tmp_path).files("server"), limits=limits) as (address, _):
        host, _, port = address.removeprefix("https://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(30):  # the event loop's own bound is 60
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        finally:
            writer.close()


async def test_an_endpoint_sees_the_certificate_of_its_client(gate: Gate, tmp_path: Path) -> None:
    """uvicorn tells apps nothing of it: our protocol class puts it into the request's state."""
    app = make_app(gate)

    @app.get("/shown")
    async def shown(request: Request) -> Response:
        certificate = request.state.client_certificate
        return reply(None if certificate is None else {"names": certificate.names, "valid": certificate.is_valid_now})

    authority = Authority(tmp_path)
    files = authority.files("server")
    async with served(app, files, requires_client_certificate=False) as (address, _):
        named = authority.files("client", hosts=(LOOPBACK, "Agent.example"), uris=(SPIFFE, "tag:example.org"))
        answer = (await get(address, named, "/shown")).json()
        assert answer == {"names": ["agent.example", SPIFFE], "valid": True}
        assert (await get(address, authority.files("client"), "/shown")).json() == {"names": [], "valid": True}
        assert (await get(address, TlsFiles(authority.file), "/shown")).json() is None
    async with serving(app) as address, httpx.AsyncClient() as client:
        assert (await client.get(f"{address}/shown")).json() is None


async def test_streams_are_served_over_tls(gate: Gate, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        served(make_app(gate), authority.files("server")) as (address, _),
        httpx.AsyncClient(verify=client_context(authority.files("client")), trust_env=False) as client,
        client.stream("GET", f"{address}/events") as answer,
    ):
        events = answer.aiter_text()
        assert await anext(events) == "event: hello\n\n"
        gate.open.set()
        async for _ in attempts():
            if (text := await anext(events, None)) is None or text == "event: end\n\n":
                break
        assert text == "event: end\n\n"


async def test_a_handshake_that_is_cancelled_closes_its_connection(tmp_path: Path) -> None:
    """The server accepts, and never answers. Its end of the connection sees the end of the client's."""
    ended = asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            pass
        ended.set()
        writer.close()

    server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    transport = HttpsTransport(client_context(TlsFiles(Authority(tmp_path).file)), httpx.Limits())
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get(url)
        async with asyncio.timeout(BOUND_S):
            await ended.wait()
    server.close()
