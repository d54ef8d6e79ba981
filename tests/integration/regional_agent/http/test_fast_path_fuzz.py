"""The fast path and uvicorn's own parser answer any bytes alike, even those that never become a request.

Requests are mutated, cut and sent in pieces, to the fast path and to the same agent without it. By default few are
tried; LEASEHOLD_FUZZ_REQUESTS is their number.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from regional_agent.http.fast_path import fast_protocol
from regional_agent.main import create_app
from tests.budget import size
from tests.integration.regional_agent.world import World
from tests.integration.web.conftest import serving
from tests.waiting import until

pytestmark = pytest.mark.anyio

REQUESTS = size("LEASEHOLD_FUZZ_REQUESTS", 300)
AT_ONCE = 30
QUIET_S = (0.3, 2.0, 8.0)  # the silence that counts as an end; a busy machine gets another chance

BODIES = (
    b'{"subject":{"route":"/v1/nowhere"}}',
    b'{"subject":{"route":"/v1/nowhere","tenant":"acme"},"cost":1}',
    b'{"checks":[{"subject":{"route":"/v1/nowhere"}},{"subject":{"route":"/v1/nowhere"}}]}',
    b'{"subject":{"shoe":"44"}}',
    b"[]",
    b"",
)
LINES = (
    b"Content-Type: application/json",
    b"Content-Type: application/json; charset=utf-8",
    b"Content-Type: text/plain",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Expect: 100-continue",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 5",
    b"X-Request-Id: abc",
    b"Origin: http://evil.example",
    b"Host: evil.example",
    b"Upgrade: websocket",
    b"A b: c",
    b" folded",
    b"X: \x00",
)
BYTES = (b"\r", b"\n", b"\r\n", b"\x00", b" ", b":", b"\t", b"\xff", b"0", b"{")


def request(chance: random.Random) -> bytes:
    body = chance.choice(BODIES)
    path = chance.choice([b"/v1/check"] * 4 + [b"/v1/check:batch"] * 2 + [b"/v1/checks", b"/v1/check?x", b"/healthz"])
    version = chance.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0"])
    length = chance.choice([len(body)] * 8 + [len(body) + 3, max(0, len(body) - 3)])
    head = [b"POST " + path + b" " + version, b"Host: localhost", b"Content-Type: application/json"]
    head += [b"Content-Length: %d" % length, *chance.sample(LINES, chance.choice([0, 0, 0, 1, 2]))]
    return b"\r\n".join([*head, b"", b""]) + body


def mutated(chance: random.Random, raw: bytes) -> bytes:
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        at = chance.randrange(len(raw) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            raw = raw[:at] + chance.choice(BYTES) + raw[at:]
        elif kind == 1:
            raw = raw[:at] + raw[at + chance.randrange(1, 4) :]
        elif kind == 2:
            raw = raw.replace(b"\r\n", b"\n", chance.randrange(1, 4))
        elif kind == 3:
            raw = raw[:at]
        else:
            raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
    return raw


class Case(NamedTuple):
    pieces: tuple[bytes, ...]


def case(seed: int) -> Case:
    chance = random.Random(seed)
    raw = b"".join(mutated(chance, request(chance)) for _ in range(chance.choice([1, 1, 1, 2, 3])))
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.choice([0, 0, 1, 2])))
    ends = [*cuts, len(raw)]
    return Case(tuple(raw[begin:end] for begin, end in zip([0, *cuts], ends, strict=True) if end > begin))


class Collector(asyncio.Protocol):
    """Return all bytes of a connection, even if it is reset in the end."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True


async def answered(address: str, tried: Case, quiet_s: float) -> tuple[list[Any], bool]:
    """Return all answers without times and ids, and whether the connection was closed."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    transport, collector = await asyncio.get_running_loop().create_connection(Collector, host, int(port))
    for piece in tried.pieces:
        transport.write(piece)
        await asyncio.sleep(0.01)
    length = -1
    while not collector.is_closed and length < len(collector.data):
        length = len(collector.data)
        await asyncio.sleep(quiet_s)
    transport.abort()
    return without_last_refusal(summary(collector.data)), collector.is_closed


def summary(data: bytes) -> list[Any]:
    found: list[Any] = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            return [*found, data]
        lines = head.split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
        length = int(headers.get(b"content-length", b"0"))
        found.append((lines[0], headers.get(b"content-type"), body_of(rest[:length])))
        data = rest[length:]
    return found


def without_last_refusal(answers: list[Any]) -> list[Any]:
    """Leave out the answer to invalid bytes after requests that were answered.

    uvicorn parses all bytes before it answers anything, and closes after the last answer; the fast path answers a
    request before it parses what follows, and explains why it closes. Both close.
    """
    is_refusal = bool(answers) and answers[-1][0] == b"HTTP/1.1 400 Bad Request"
    return answers[:-1] if is_refusal and len(answers) > 1 else answers


def body_of(raw: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError):
        return without_ids(msgspec.json.decode(raw))
    return raw


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name != "request_id"}
    return value


def without_lifespan(app: ASGIApp) -> ASGIApp:
    """The same app at a second server; the first one starts and ends it."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})

    return served


@contextlib.asynccontextmanager
async def both_doors(world: World) -> AsyncIterator[tuple[str, str]]:
    app = create_app(world.settings("us-east"))
    async with (
        serving(app, protocol=fast_protocol(app.state.fast_path)) as fast,
        serving(without_lifespan(app)) as slow,
    ):
        region = app.state.region
        await until(lambda: region.has_epochs and region.admission.policies is not None)
        await until(lambda: region.admission.blocks is not None)
        yield fast, slow


async def test_both_paths_answer_any_bytes_alike(world: World) -> None:
    async with both_doors(world) as (fast, slow):
        statuses = set()
        for begin in range(0, REQUESTS, AT_ONCE):
            seeds = range(begin, min(begin + AT_ONCE, REQUESTS))
            for told in await asyncio.gather(*(compared(fast, slow, seed) for seed in seeds)):
                statuses |= {each[0].split()[1] for each in told if isinstance(each, tuple)}
        assert {b"200", b"400", b"403", b"404", b"415", b"421", b"422"} <= statuses


async def compared(fast: str, slow: str, seed: int) -> list[Any]:
    tried = case(seed)
    for quiet_s in QUIET_S:
        one, other = await asyncio.gather(answered(fast, tried, quiet_s), answered(slow, tried, quiet_s))
        if one == other:
            return one[0]
    raise AssertionError(f"seed {seed}: {tried.pieces!r}: {one!r} at the fast path, {other!r} at the other")
