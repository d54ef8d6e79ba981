"""A trace on real processes: each unit is a request at its region's agent, sent when the trace says.

Nobody waits for an answer before the next request is sent. There are as many connections as requests under way, and one
that nobody needed for a while is closed before its agent does so.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.allocation.traces import TICK_MS, Trace
from benchmarks.load import Server, no_pauses
from benchmarks.open_loop import Connection, Due, Moment

MOST_CONNECTIONS = 4_000  # to one agent
IDLE_S = 3.0  # agents hang up after five
ANSWERED_WITHIN_S = 30.0  # of the last request
ALLOWED, DENIED = b"HTTP/1.1 200", b"HTTP/1.1 429"
NO_ANSWER = b""

Decided = Callable[[int, int, int, bool], None]  # region, tick of the request, ms of the answer, whether it is admitted


@dataclass
class Played:
    """The answers to the requests, and the delays of the generator itself."""

    answers: Counter[bytes] = field(default_factory=Counter)
    late_ms: list[float] = field(default_factory=list)  # of each tick: when it was sent, after it was due
    admitted_after_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0  # until the last answer
    beyond_ms: Sequence[float] = ()  # in each region, what an exchange took beyond its distance

    @property
    def admitted(self) -> int:
        return self.answers[ALLOWED]

    @property
    def others(self) -> int:
        """Neither admitted nor denied."""
        return self.answers.total() - self.answers[ALLOWED] - self.answers[DENIED]


async def play(
    made: Trace, agents: Sequence[Server], request: bytes, decided: Decided, at: Sequence[Moment] = ()
) -> Played:
    """`at`: what else is done, and when."""
    player = _Player(made, agents, request, decided)
    with no_pauses():
        return await player.play(sorted(at, key=lambda moment: moment.after_s))


class _Player:
    def __init__(self, made: Trace, agents: Sequence[Server], request: bytes, decided: Decided) -> None:
        self._made, self._decided = made, decided
        self._doors = [_Door(each, request, partial(self._answered, region)) for region, each in enumerate(agents)]
        self._played = Played()
        self._begun_s = 0.0

    async def play(self, at: Sequence[Moment]) -> Played:
        left = list(at)
        self._begun_s = time.perf_counter()
        for tick, arrivals in enumerate(self._made.ticks):
            due_s = tick * TICK_MS / 1000
            await asyncio.sleep(due_s - self._now_s())
            while left and left[0].after_s <= due_s:
                left.pop(0).do()
            self._send(arrivals, due_s)
        for moment in left:
            moment.do()
        await self._until_answered()
        self._played.took_s = self._now_s()
        return self._played

    def _now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _send(self, arrivals: Sequence[tuple[int, int]], due_s: float) -> None:
        due = Due(due_s, max(0.0, self._now_s() - due_s))
        self._played.late_ms.append(due.late_s * 1000)
        for region, units in arrivals:
            for _ in range(units):
                self._doors[region].ask(due)

    def _answered(self, region: int, due: Due, beginning: bytes) -> None:
        now_s = self._now_s()
        self._played.answers[beginning] += 1
        if beginning == ALLOWED:
            self._played.admitted_after_ms.append((now_s - due.due_s) * 1000)
        self._decided(region, round(due.due_s * 1000 / TICK_MS), round(now_s * 1000), beginning == ALLOWED)

    async def _until_answered(self) -> None:
        for _ in range(round(1000 * ANSWERED_WITHIN_S / TICK_MS)):
            if not any(door.under_way for door in self._doors):
                break
            await asyncio.sleep(TICK_MS / 1000)
        await asyncio.gather(*(door.close() for door in self._doors))


class _Door:
    """The connections to one region's agent."""

    def __init__(self, agent: Server, request: bytes, answered: Callable[[Due, bytes], None]) -> None:
        self._agent, self._request, self._tell = agent, request, answered
        self._waiting: list[Due] = []  # for a connection
        self._busy: dict[Connection, Due] = {}
        self._free: list[tuple[float, Connection]] = []  # since when; the last one was needed last
        self._opening: set[asyncio.Task[None]] = set()
        self._all: list[Connection] = []

    @property
    def under_way(self) -> int:
        return len(self._busy) + len(self._waiting)

    def ask(self, due: Due) -> None:
        self._close_idle()
        if self._free:
            self._ask(self._free.pop()[1], due)
        else:
            self._waiting.append(due)
            self._open()

    def _ask(self, connection: Connection, due: Due) -> None:
        self._busy[connection] = due
        connection.ask(due)

    def _open(self) -> None:
        if len(self._all) >= MOST_CONNECTIONS:
            return
        connection = Connection(self._agent, self._request, self)
        self._all.append(connection)
        opening = asyncio.create_task(self._connect(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: connection, self._agent.host, self._agent.port)
        except OSError:  # whoever waits for it has no answer
            self._all.remove(connection)
            if self._waiting:
                self._tell(self._waiting.pop(0), NO_ANSWER)

    def _close_idle(self) -> None:
        """Return whether the connection that was needed last has been idle for too long: then all have."""
        if self._free and time.perf_counter() - self._free[-1][0] > IDLE_S:
            idle, self._free = self._free, []
            for _, connection in idle:
                connection.transport.close()

    # --- told by connections

    def is_free(self, connection: Connection) -> None:
        self._busy.pop(connection, None)
        if self._waiting:
            self._ask(connection, self._waiting.pop(0))
        else:
            self._free.append((time.perf_counter(), connection))

    def answered(self, due: Due, beginning: bytes) -> None:
        self._tell(due, beginning)

    def hung_up(self, connection: Connection, _: Exception) -> None:
        self._all.remove(connection)
        due = self._busy.pop(connection, None)
        self._free = [each for each in self._free if each[1] is not connection]
        if due is not None:
            self._tell(due, NO_ANSWER)

    async def close(self) -> None:
        """Close the connections. Requests without a reply by now get none."""
        await asyncio.gather(*self._opening)
        everybody = list(self._all)
        for connection in everybody:
            connection.transport.close()
        await asyncio.gather(*(connection.lost for connection in everybody))
