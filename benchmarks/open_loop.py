"""Load that comes when it comes, whether or not the server keeps up: so many requests a second, on a fixed schedule.

A caller that waits for its answer before it asks again (`load.py`) asks less when the server is slow, and so leaves out
just the requests that would have waited longest. Here a request's time counts from when it was due: one that finds no
free connection waits, and its wait counts.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from benchmarks.load import Server, no_pauses

TICK_S = 0.001


class Sample(NamedTuple):
    due_s: float  # after the beginning
    latency_us: float
    beginning: bytes  # of the answer: what it was
    own_us: float = 0.0  # of the latency, what the generator itself was late with the request


class Moment(NamedTuple):
    after_s: float
    do: Callable[[], object]


class Due(NamedTuple):
    due_s: float
    late_s: float  # when it was seen that it is


NOT_ASKED = Due(0.0, 0.0)


class Asks(Protocol):
    """A client with one request at a time on each connection."""

    def is_free(self, connection: "Connection", /) -> None: ...
    def answered(self, due: Due, beginning: bytes, /) -> None: ...
    def hung_up(self, connection: "Connection", error: Exception, /) -> None: ...


class Schedule:
    """Requests that are due, and connections that are free."""

    def __init__(self, per_second: float, seconds: float, at: Sequence[Moment] = ()) -> None:
        """`at`: what else is done, and when."""
        self._at = deque(sorted(at, key=lambda moment: moment.after_s))
        self.samples: list[Sample] = []
        self.left = int(per_second * seconds)
        self._every_s = 1 / per_second
        self._next_s = 0.0
        self._due: deque[Due] = deque()
        self._free: deque[Connection] = deque()
        self._begun_s = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """The schedule counts from here, with every connection made."""
        self._begun_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def tick(self) -> None:
        now_s = self.now_s()
        while self._at and self._at[0].after_s <= now_s:
            self._at.popleft().do()
        while self._next_s <= now_s and self.left:
            self._due.append(Due(self._next_s, now_s - self._next_s))
            self._next_s += self._every_s
            self.left -= 1
        while self._due and self._free:
            self._free.popleft().ask(self._due.popleft())

    def is_free(self, connection: "Connection") -> None:
        if self._due:
            connection.ask(self._due.popleft())
        else:
            self._free.append(connection)

    def answered(self, due: Due, beginning: bytes) -> None:
        self.samples.append(Sample(due.due_s, (self.now_s() - due.due_s) * 1e6, beginning, due.late_s * 1e6))

    def hung_up(self, _: "Connection", error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def is_over(self, connections: int) -> bool:
        return not self.left and not self._due and len(self._free) == connections


class Connection(asyncio.Protocol):
    def __init__(self, server: Server, request: bytes, asks: Asks) -> None:
        self._server, self._request, self._asks = server, request, asks
        self._greeting = server.greeting
        self._answer = b""
        self._due = NOT_ASKED
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._greeting:
            self.transport.write(self._greeting)
        else:
            self._asks.is_free(self)

    def ask(self, due: Due) -> None:
        self._due, self._answer = due, b""
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._server.is_whole(self._answer):
            return
        if self._greeting:
            self._greeting, self._answer = b"", b""
        else:
            self._asks.answered(self._due, self._answer[:12])
        self._asks.is_free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)
        self._asks.hung_up(self, exc or ConnectionResetError("the server hung up"))


async def open_load(
    server: Server,
    request: bytes,
    *,
    per_second: float,
    seconds: float,
    connections: int = 128,
    at: Sequence[Moment] = (),
) -> list[Sample]:
    """Every request that was due, answered; in the order of their answers."""
    loop = asyncio.get_running_loop()
    schedule = Schedule(per_second, seconds, at)
    callers = [Connection(server, request, schedule) for _ in range(connections)]
    for caller in callers:
        await loop.create_connection(lambda caller=caller: caller, server.host, server.port)  # type: ignore[misc]
    with no_pauses():
        schedule.begin()
        while not schedule.is_over(connections) and not schedule.ended.done():
            schedule.tick()
            await asyncio.sleep(TICK_S)
    if schedule.ended.done():
        schedule.ended.result()
    schedule.ended.set_result(None)
    for caller in callers:
        caller.transport.close()
    await asyncio.gather(*(caller.lost for caller in callers))
    return schedule.samples


def percentile_us(samples: Sequence[Sample], part: float) -> float:
    """The latency that so large a part of the requests did not exceed."""
    latencies_us = sorted(sample.latency_us for sample in samples)
    return latencies_us[math.ceil(part * len(latencies_us)) - 1]
