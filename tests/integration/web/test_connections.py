"""Idle and slow connections are closed by a real server, so that they hold no descriptors."""

import contextlib
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from tests.integration.web.conftest import MAX_BODY_BYTES, Gate, Raw, connected, make_app, serving
from web.connections import ConnectionLimits, within_descriptors

pytestmark = pytest.mark.anyio

QUICK = b"GET /quick HTTP/1.1\r\nHost: doors\r\n"
LENGTH = b"POST /length HTTP/1.1\r\nHost: doors\r\nContent-Type: application/json\r\n"
PROMPT_S = 0.1


@contextlib.asynccontextmanager
async def limited(gate: Gate, max_connections: int = 100) -> AsyncIterator[tuple[str, CollectorRegistry]]:
    """A server that waits a moment for a request, and its metrics."""
    registry = CollectorRegistry()
    limits = ConnectionLimits(max_connections=max_connections, request_timeout_s=PROMPT_S, registry=registry)
    async with serving(make_app(gate), limits=limits) as address:
        yield address, registry


def closed(registry: CollectorRegistry, reason: str) -> float:
    value = registry.get_sample_value("leasehold_http_connections_closed_total", {"reason": reason})
    assert value is not None
    return value


async def test_a_silent_connection_is_closed(gate: Gate) -> None:
    async with limited(gate) as (address, registry), connected(address) as raw:
        with contextlib.suppress(ConnectionError):
            assert await raw.rest() == b""
        assert closed(registry, "silent") == 1


UNFINISHED = {
    "half a request line": b"GET /qui",
    "half a head": QUICK + b"X: ",
    "no body": LENGTH + b"Content-Length: 10\r\n\r\n",
    "half a body": LENGTH + b'Content-Length: 10\r\n\r\n"abc',
    "half a chunk": LENGTH + b'Transfer-Encoding: chunked\r\n\r\n9\r\n"abc',
    "the end of the chunks": LENGTH + b'Transfer-Encoding: chunked\r\n\r\n5\r\n"abc"\r\n',
}


@pytest.mark.parametrize("data", UNFINISHED.values(), ids=UNFINISHED.keys())
async def test_an_unfinished_request_is_closed(gate: Gate, data: bytes) -> None:
    async with limited(gate) as (address, registry), connected(address) as raw:
        await raw.send(data)
        answer = await raw.answer()
        assert (answer.status, answer.problem()["type"]) == (408, "/problems/request-timeout")
        assert answer.headers["connection"] == "close"
        assert await raw.rest() == b""
        assert closed(registry, "slow_request") == 1


async def test_an_unfinished_second_request_is_closed(gate: Gate) -> None:
    async with limited(gate) as (address, _), connected(address) as raw:
        await raw.send(QUICK + b"\r\n")
        assert (await raw.answer()).status == 200
        await anyio.sleep(3 * PROMPT_S)  # the time for the first request has passed
        await raw.send(QUICK)
        assert (await raw.answer()).status == 408


async def test_bytes_that_trickle_do_not_count_as_a_head(gate: Gate) -> None:
    async with limited(gate) as (address, _), connected(address) as raw, anyio.create_task_group() as tasks:

        async def trickle() -> None:
            while True:
                await raw.send(b"a")
                await anyio.sleep(PROMPT_S / 20)

        await raw.send(QUICK + b"X: ")
        tasks.start_soon(trickle)
        assert (await raw.answer()).status == 408
        tasks.cancel_scope.cancel()


async def test_a_large_body_may_take_long(gate: Gate) -> None:
    """Each interval has more than the minimal rate, though the whole takes many of them."""
    body = b'"' + b"a" * (MAX_BODY_BYTES // 2) + b'"'
    async with limited(gate) as (address, _), connected(address) as raw:
        await raw.send(LENGTH + b"Content-Length: %d\r\n\r\n" % len(body))
        for begin in range(0, len(body), 20_000):
            await raw.send(body[begin : begin + 20_000])
            await anyio.sleep(PROMPT_S / 4)
        assert (await raw.answer()).body == b'{"length":%d}' % (len(body) - 2)


async def test_a_request_in_progress_is_not_closed(gate: Gate) -> None:
    async with limited(gate) as (address, registry), connected(address) as raw:
        await raw.send(b"GET /gated HTTP/1.1\r\nHost: doors\r\n\r\n")
        await gate.entered.wait()
        async with connected(address) as silent:  # closed when the time has passed, for both of them
            with contextlib.suppress(ConnectionError):
                await silent.rest()
        gate.open.set()
        assert (await raw.answer()).body == b'{"answer":"gated"}'
        assert closed(registry, "slow_request") == 0


async def test_a_full_server_closes_an_idle_connection_for_a_new_one(gate: Gate) -> None:
    async with contextlib.AsyncExitStack() as stack:
        address, registry = await stack.enter_async_context(limited(gate, max_connections=8))
        others = [await stack.enter_async_context(connected(address)) for _ in range(20)]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{address}/quick")).status_code == 200
        del others
        assert closed(registry, "replaced") >= 12
        assert b"leasehold_http_connections_limit 8.0" in generate_latest(registry)


async def test_a_full_server_keeps_the_requests_that_it_serves(gate: Gate) -> None:
    async with contextlib.AsyncExitStack() as stack:
        address, registry = await stack.enter_async_context(limited(gate, max_connections=2))
        serving_now: list[Raw] = []
        for _ in range(2):
            raw = await stack.enter_async_context(connected(address))
            await raw.send(b"GET /gated HTTP/1.1\r\nHost: doors\r\n\r\n")
            serving_now.append(raw)
        await gate.entered.wait()
        newcomer = await stack.enter_async_context(connected(address))
        with contextlib.suppress(ConnectionError):
            assert await newcomer.rest() == b""
        gate.open.set()
        assert [(await raw.answer()).status for raw in serving_now] == [200, 200]
        assert closed(registry, "too_many") + closed(registry, "replaced") >= 1


async def test_two_host_headers_are_refused(gate: Gate) -> None:
    async with limited(gate) as (address, _), connected(address) as raw:
        await raw.send(QUICK + b"Host: other\r\n\r\n")
        assert (await raw.answer()).status == 400


async def test_a_length_of_thousands_of_zeros_is_refused(gate: Gate) -> None:
    async with limited(gate) as (address, _), connected(address) as raw:
        zeros = b"0" * 3_000
        await raw.send(LENGTH + b"Content-Length: " + zeros + b'5\r\n\r\n"abc"')
        assert (await raw.answer()).body == b'{"length":3}'
        await raw.send(LENGTH + b"Content-Length: " + zeros + b"%d\r\n\r\n" % (2 * MAX_BODY_BYTES))
        assert (await raw.answer()).status == 413


def test_a_process_keeps_fewer_connections_than_descriptors() -> None:
    assert within_descriptors(10) == 10
    assert within_descriptors(10**9) < 10**9
