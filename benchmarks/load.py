"""A load generator that costs little and treats every server the same: fixed bytes out, one whole answer in.

A caller sends its request, waits for the whole answer, and sends the next: one in flight per connection, no pipelining,
as a service in front of an agent would do. The generator's own share is the same in every row, so a ratio is kinder to
the slower side than the truth; the row that asks the store for nothing shows how fast the generator can be.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

from benchmarks.frame import Load


class Server(NamedTuple):
    """The address of a server, its greeting, and the test whether an answer is complete."""

    host: str
    port: int
    is_whole: Callable[[bytes], bool]
    greeting: bytes = b""


MOST_REFUSED = 0.05


class RefusedError(Exception):
    """Too many of the server's answers were not the one that is to be measured."""


class Caller(asyncio.Protocol):
    def __init__(self, server: Server, request: bytes, accepted: bytes) -> None:
        self.latencies_ns: list[int] = []
        self.refusals: list[bytes] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._server, self._request, self._accepted = server, request, accepted
        self._greeting = server.greeting
        self._answer = b""
        self._stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._greeting or self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._server.is_whole(self._answer):
            return
        if self._greeting:
            self._greeting = b""
        elif self._answer.startswith(self._accepted):
            self.latencies_ns.append(time.perf_counter_ns() - self._sent_ns)
        else:
            self.refusals.append(self._answer)
        if self._stopping:
            self._end(None)
        else:
            self._send(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionResetError("the server hung up"))

    def stop(self) -> None:
        """After the answer that is under way."""
        self._stopping = True

    def _send(self, request: bytes) -> None:
        self._answer = b""
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(request)

    def _end(self, reason: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(reason) if reason else self.ended.set_result(None)
        self._transport.close()


@contextmanager
def no_pauses() -> Iterator[None]:
    """A generator that stops to look for garbage would tell of its own pause as the server's: 100 ms were seen."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def load(server: Server, request: bytes, *, accepted: bytes, connections: int, seconds: float) -> Load:
    loop = asyncio.get_running_loop()
    callers = [Caller(server, request, accepted) for _ in range(connections)]
    with no_pauses():
        started_ns = time.perf_counter_ns()
        for caller in callers:
            await loop.create_connection(lambda caller=caller: caller, server.host, server.port)  # type: ignore[misc]
        await asyncio.wait([caller.ended for caller in callers], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for caller in callers:
            caller.stop()
        await asyncio.gather(*(caller.ended for caller in callers))
        elapsed_ns = time.perf_counter_ns() - started_ns
    latencies_us = [latency / 1_000 for caller in callers for latency in caller.latencies_ns]
    refusals = [answer for caller in callers for answer in caller.refusals]
    if len(refusals) > MOST_REFUSED * len(latencies_us):
        example = refusals[0].decode(errors="replace")
        raise RefusedError(f"{len(refusals)} of {len(refusals) + len(latencies_us)} answers were like {example}")
    cuts = statistics.quantiles(latencies_us, n=100)
    return Load(len(latencies_us) * 1e9 / elapsed_ns, cuts[49], cuts[98], len(refusals))


# The two languages that are spoken here.


def resp(*parts: str | bytes) -> bytes:
    encoded = [part if isinstance(part, bytes) else part.encode() for part in parts]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in encoded)


def store(host: str, port: int, password: str) -> Server:
    return Server(host, port, resp_is_whole, resp("AUTH", password) if password else b"")


def resp_is_whole(answer: bytes) -> bool:
    """Return whether one answer of RESP2 is complete: simple ones end with the line, arrays after as many answers."""
    return _after(answer, 0) is not None


def _after(answer: bytes, start: int) -> int | None:
    line_end = answer.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, after = answer[start : start + 1], line_end + 2
    if kind in b"+-:":
        return after
    count = int(answer[start + 1 : line_end])
    if kind == b"$":
        after += count + 2 if count >= 0 else 0
        return after if after <= len(answer) else None
    for _ in range(count):
        following = _after(answer, after)
        if following is None:
            return None
        after = following
    return after


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def http_is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
    return len(body) >= int(length)
