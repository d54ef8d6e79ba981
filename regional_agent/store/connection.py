"""One connection to the region's store, shared by every request.

It pipelines: all commands of one turn of the event loop are written in one piece, and replies are matched to them by
their order. So Python reaches a store of a hundred thousand scripts a second; a call for each request through a pool
of connections reaches a tenth of that.

The store's *fingerprint* is read on every new connection, before any other command: it identifies the incarnation of
the store, and every script compares it. No command is retried: a call that lost its connection may have been executed,
and only its caller knows what that means.

One timer checks the time-outs of all calls: a timer for each call would cost as much as the call. While a store answers
other calls it is not silent, so calls that wait behind our own have longer. A timer that fires late shows that this
process, or the machine, was busy: then the store gets as much extra time, once, and the socket is always read before
any call times out.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

import hiredis
import structlog
import tenacity
from msgspec import Struct
from redis.exceptions import RedisError

from regional_agent.store.address import server_name
from regional_agent.store.call_statistics import CONNECTION_LOST, NOT_CONNECTED, TIMEOUT, StoreCallStatistics
from regional_agent.store.durability import (
    READS_LINKS,
    Durability,
    Link,
    OnDisk,
    Replicas,
    SharedHistory,
    find_field,
    read_links,
    shared_history,
)
from regional_agent.store.opening import CONNECT_S, Endpoint, connect_with
from regional_agent.store.rules.decision_timeout import DecisionTimeout

log = structlog.get_logger()

T = TypeVar("T")
Reply = Any
Argument = bytes | str | int

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# A node with such an error does not own the keys (any more): later calls must go elsewhere. ASK and TRYAGAIN are not
# among them: while the keys of a slot migrate its old node still decides, and other cells share the connection.
CHANGED_TOPOLOGY = {"MOVED", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "LOADING"}
LATE_S = 0.001  # a timer that fires later than this was delayed by a busy process
BUSY_STORE_FACTOR = 4  # a call may take so many times its time-out while the store answers other calls

OnReply = Callable[[Reply | Exception], None]


class StoreUnavailable(Exception):
    """The store is not connected, or did not reply in time."""


class NoAnswer(StoreUnavailable):
    """The command was sent, and no reply came: it may have been executed."""


class StoreError(Exception):
    """The store answered with an error."""


KEEPS_ALL = "noeviction"  # the only eviction policy that loses no lease
SCRIPTS = frozenset({"FCALL"})
UNREACHABLE = (OSError, TimeoutError, RedisError, StoreUnavailable, StoreError)


def set_result_of(future: asyncio.Future[T]) -> Callable[[T | Exception], None]:
    """Return a callback that sets the result of a future, or its exception, unless it was cancelled."""

    def on_result(result: T | Exception) -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    return on_result


class _Call(Struct, eq=False, gc=False):
    """A call that waits for its reply: since when, and for how long. The connection drops each, so it needs no gc."""

    since: float
    timeout_s: float
    on_reply: OnReply | None  # None: it has timed out
    is_decision: bool

    def complete(self, reply: Reply | Exception) -> None:
        on_reply, self.on_reply = self.on_reply, None
        if on_reply is not None:
            on_reply(reply)

    @property
    def due_at(self) -> float:
        return self.since + self.timeout_s

    def is_overdue(self, now: float, silent_since: float) -> bool:
        is_silent = now >= silent_since + self.timeout_s or now >= self.since + BUSY_STORE_FACTOR * self.timeout_s
        return self.on_reply is not None and now >= self.due_at and is_silent


class _Protocol(asyncio.Protocol):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[], None], statistics: StoreCallStatistics
    ) -> None:
        self._statistics = statistics
        self._reader = hiredis.Reader(replyError=StoreError)
        self._waiting: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.writer: asyncio.StreamWriter | None = None  # it closes the transport when it is deleted
        self._loop = loop
        self._on_lost = on_lost
        self._last_reply_at = 0.0
        self._check_at: float | None = None  # when time-outs are checked next

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base class

    def send(
        self,
        arguments: Sequence[Argument],
        on_reply: OnReply,
        timeout_s: float,
        *,
        at_once: bool = False,
        is_decision: bool = False,
    ) -> None:
        """Send a command, with all others of this turn of the event loop or `at_once`, with those before it."""
        if self._transport is None or self._transport.is_closing():
            on_reply(StoreUnavailable("the store's connection is closed"))
            return
        packed = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # its stub knows one-tuples only
        now = self._loop.time()
        self._waiting.append(_Call(now, timeout_s, on_reply, is_decision))
        if self._check_at is None or now + timeout_s < self._check_at:
            self._schedule_check(now + timeout_s)
        if at_once and not self._unsent:
            self._transport.write(packed)
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        if at_once:
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            call = self._waiting.popleft()
            self._statistics.note_reply(now - call.since, is_decision=call.is_decision)
            if isinstance(reply, StoreError):
                self._statistics.note_error(str(reply))
            if call.on_reply is not None:  # else it is late, which does not show that the store is in time
                self._last_reply_at = now
                call.on_reply(reply)
            if isinstance(reply, StoreError) and str(reply).partition(" ")[0] in CHANGED_TOPOLOGY:
                self.close()

    def _schedule_check(self, moment: float, *, is_extension: bool = False) -> None:
        self._check_at = moment
        self._loop.call_at(moment, self._check_timeouts, moment, is_extension)

    def _check_timeouts(self, moment: float, is_extension: bool) -> None:
        """Check for time-outs. Calls fail two turns of the loop later, when everything in the socket has been read."""
        if moment != self._check_at:
            return  # an earlier check was scheduled since
        now = self._loop.time()
        if not any(call.is_overdue(now, self._silent_since()) for call in self._waiting):
            self._schedule_next_check(now)
        elif now - moment > LATE_S and not is_extension:
            self._schedule_check(now + min(now - moment, self._shortest_s()), is_extension=True)
        else:
            self._loop.call_soon(self._loop.call_soon, self._fail_overdue)

    def _fail_overdue(self) -> None:
        """Fail the calls whose time is over. Their replies keep their place in the order, and are dropped."""
        now = self._loop.time()
        silent_since = self._silent_since()
        for call in list(self._waiting):
            if call.is_overdue(now, silent_since):
                self._statistics.failures[TIMEOUT] += 1
                call.complete(NoAnswer("the store did not answer in time"))
        self._schedule_next_check(now)

    def _schedule_next_check(self, now: float) -> None:
        self._check_at = None
        due_at = min((call.due_at for call in self._waiting if call.on_reply is not None), default=None)
        if due_at is not None:
            self._schedule_check(max(due_at, now + self._shortest_s() / 4))

    def _silent_since(self) -> float:
        """Return since when calls wait without any reply."""
        return max(self._last_reply_at, self._waiting[0].since) if self._waiting else self._last_reply_at

    def _shortest_s(self) -> float:
        return min(call.timeout_s for call in self._waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        waiting, self._waiting = self._waiting, deque()
        self._on_lost()
        for call in waiting:
            self._statistics.failures[CONNECTION_LOST] += call.on_reply is not None
            call.complete(NoAnswer(f"the store's connection was lost: {exc or 'closed'}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # what was not sent yet must not be: its reply could not be read


class _DurabilityProof:
    """Passes a reply on once the store has confirmed that the writes before it are safe."""

    __slots__ = ("_durability", "_expected", "_on_reply", "_replies")

    def __init__(self, durability: Durability, expected: int, on_reply: OnReply) -> None:
        """`expected`: the replies to wait for, of which the first is the script's."""
        self._durability = durability
        self._expected = expected
        self._on_reply = on_reply
        self._replies: list[Reply | Exception] = []

    def on_reply(self, reply: Reply | Exception) -> None:
        self._replies.append(reply)
        if len(self._replies) < self._expected:
            return
        answer, *confirmations = self._replies
        if isinstance(answer, Exception) or self._durability.is_confirmed(confirmations):
            self._on_reply(answer)
        else:
            self._on_reply(NoAnswer(f"{self._durability.name} did not confirm the writes of a script in time"))


class Store(Protocol):
    """The store that runs scripts: a single one, or the node that has a cell of a Cluster now."""

    @property
    def connected(self) -> bool: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def eviction_policy(self) -> str | None: ...
    @property
    def is_noeviction_assumed(self) -> bool: ...
    @property
    def calls(self) -> int: ...
    def prove_durability(self, durability: Durability | None) -> None: ...
    @property
    def node(self) -> str:
        """Return the address of the node, for status and logs."""

    @property
    def fault(self) -> str:
        """Return why it is not connected, for status and logs."""

    async def call(self, *arguments: Argument) -> Reply: ...
    async def call_unconfirmed(self, *arguments: Argument) -> Reply:
        """Call without waiting for the writes to be safe: for what an epoch begins with."""

    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None: ...
    async def read_fingerprint(self) -> str: ...
    async def is_exempt(self) -> bool: ...
    async def find_replicas(self) -> Replicas: ...
    async def read_shared_history(self) -> SharedHistory | None: ...
    async def read_eviction_policy(self) -> str | None: ...
    def reconnect(self) -> None: ...


class StoreConnection:
    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_ms: int,
        statistics: StoreCallStatistics | None = None,
        on_connected: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        is_node: bool = False,
        assumes_noeviction: bool = False,
    ) -> None:
        """`statistics`: those of all connections; it has the time-out of calls that a service waits for.

        `is_node`: it is a node of a Cluster.

        `assumes_noeviction`: where the store does not say its eviction policy, somebody vouches for it.
        """
        self.endpoint = endpoint
        self.fingerprint: str | None = None
        self.eviction_policy: str | None = None
        self.calls = 0
        self._timeout_s = timeout_ms / 1000
        self._statistics = statistics or StoreCallStatistics(DecisionTimeout(timeout_ms, timeout_ms))
        self._on_connected = on_connected
        self._on_lost_to_others = on_lost
        self._is_node = is_node
        self._assumes_noeviction = assumes_noeviction
        self.is_noeviction_assumed = False
        self._durability: Durability | None = None
        self._reason = ""
        self._protocol: _Protocol | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self.fingerprint is not None

    @property
    def node(self) -> str:
        return str(self.endpoint)

    @property
    def fault(self) -> str:
        return f"the store at {self.endpoint} is not connected{self._reason}"

    async def call(self, *arguments: Argument) -> Reply:
        return await self.call_with(self._durability, *arguments)

    async def call_unconfirmed(self, *arguments: Argument) -> Reply:
        return await self.call_with(None, *arguments)

    async def call_with(self, durability: Durability | None, *arguments: Argument) -> Reply:
        """Call. The reply of a script counts once its writes are safe in this way."""
        if self.fingerprint is None:
            raise self._not_connected()
        return await (self._ask(*arguments) if durability is None else self._ask_with(durability, arguments))

    def send(self, arguments: Sequence[Argument], on_reply: OnReply, durability: Durability | None = None) -> None:
        """Send a decision, or what it needs. `on_reply` gets the reply, or why there is none.

        It is written at once, not at the end of the turn; to a node of a Cluster with the calls of its other cells.

        `durability`: how the writes of this call are confirmed, where cells share the connection.
        """
        if self.fingerprint is None or self._protocol is None:
            on_reply(self._not_connected())
            return
        self.calls += 1
        timeout_s, at_once = self._statistics.decision_timeout.seconds, not self._is_node
        durability = durability or self._durability
        if durability is None:
            self._protocol.send(arguments, on_reply, timeout_s, at_once=at_once, is_decision=True)
        else:
            self._submit(self._protocol, durability, arguments, on_reply, timeout_s, at_once=at_once, is_decision=True)

    def _not_connected(self) -> StoreUnavailable:
        self._statistics.failures[NOT_CONNECTED] += 1
        return StoreUnavailable(self.fault)

    def _submit(
        self,
        protocol: _Protocol,
        durability: Durability | None,
        arguments: Sequence[Argument],
        on_reply: OnReply,
        timeout_s: float,
        *,
        at_once: bool = False,
        is_decision: bool = False,
    ) -> None:
        if durability is None or arguments[0] not in SCRIPTS:
            protocol.send(arguments, on_reply, timeout_s, at_once=at_once, is_decision=is_decision)
            return
        *commands, last = arguments, *durability.commands(timeout_s)
        proof = _DurabilityProof(durability, len(commands) + 1, on_reply)
        for command in commands:
            protocol.send(command, proof.on_reply, timeout_s)
        protocol.send(last, proof.on_reply, timeout_s, at_once=at_once, is_decision=is_decision)

    def prove_durability(self, durability: Durability | None) -> None:
        """Set how the writes of scripts are confirmed before their replies count; None: the replies count at once."""
        self._durability = durability

    async def _ask(self, *arguments: Argument) -> Reply:
        return await self._ask_with(None, arguments)

    async def _ask_with(self, durability: Durability | None, arguments: Sequence[Argument]) -> Reply:
        if self._protocol is None:
            raise StoreUnavailable(self.fault)
        self.calls += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._submit(self._protocol, durability, arguments, set_result_of(future), self._timeout_s)
        return await future

    async def read_fingerprint(self) -> str:
        """Read which incarnation of the store this connection leads to."""
        return _fingerprint(await self._ask("INFO", "server"), await self._ask("INFO", "replication"))

    async def is_exempt(self) -> bool:
        """Return whether it is a single store, without replicas in this incarnation, that fsyncs before it replies."""
        replication, cluster = await self._ask("INFO", "replication"), await self._ask("INFO", "cluster")
        return (
            [_field(replication, name) for name in (b"role", b"connected_slaves", b"repl_backlog_active")]
            == ["master", "0", "0"]
            and not _field(replication, b"master_replid2").strip("0")  # it was never promoted
            and _field(cluster, b"cluster_enabled") == "0"
            and await self._fsyncs_every_write()
            and await self._can_prove_durability()
        )

    async def _fsyncs_every_write(self) -> bool:
        """Return whether its settings say so. A store that does not show them (a managed one) may not."""
        names = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite")
        try:
            answer: list[bytes] = await self._ask("CONFIG", "GET", *names)
        except StoreError:
            return False
        settings = dict(zip(answer[::2], answer[1::2], strict=True))
        return [settings.get(name.encode()) for name in names] == [b"yes", b"always", b"no"]

    async def _can_prove_durability(self) -> bool:
        """Return whether the store can confirm that a write is on its disk: Redis since 7.2, and Valkey."""
        disk = OnDisk()
        try:
            return disk.is_confirmed([await self._ask(*command) for command in disk.commands(self._timeout_s)])
        except StoreError:
            return False

    async def find_replicas(self) -> Replicas:
        """Return the replicas that follow this store, each with its own word for which process it is.

        Each is asked at the address at which the store sees it; one that does not answer is left out. The store is
        asked over a connection of its own: on this one, calls may wait for a replica that confirms nothing.
        """
        place = self.endpoint.place
        if place is None:
            return Replicas({}, "")
        before = await self._read_server(*place)
        history, links = _field(before, b"master_replid"), read_links(before)
        run_ids = await asyncio.gather(*(self._identify_replica(link, history) for link in links.acknowledged))
        if read_links(await self._read_server(*place)).made != links.made:
            raise StoreUnavailable("replicas of the store were linked while they were asked which they are")
        named = zip(run_ids, links.acknowledged, strict=True)
        return Replicas({run_id: link for run_id, link in named if run_id is not None}, links.made)

    async def _identify_replica(self, link: Link, history: str) -> str | None:
        try:
            info = await self._read_server(*link)
        except StoreUnavailable as error:
            log.warning("replica of the store unreachable", replica=server_name(*link), reason=str(error))
            return None
        follows = find_field(info, b"role") == "slave" and find_field(info, b"master_replid") == history
        return _field(info, b"run_id") if follows and find_field(info, b"master_link_status") == "up" else None

    async def _read_server(self, host: str, port: int) -> bytes:
        """Return what a server of this store says of itself and of its replication."""
        connection = self.endpoint.connection_to(host, port)
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_command(*READS_LINKS, "server")
                info: bytes = await connection.read_response()
                return info
        except UNREACHABLE as error:
            raise StoreUnavailable(describe(error)) from error
        finally:
            await connection.disconnect(nowait=True)

    async def read_shared_history(self) -> SharedHistory | None:
        """Return what this store has in common with the primary that it replaced, or None if it replaced none."""
        return shared_history(await self._ask("INFO", "replication"))

    async def read_eviction_policy(self) -> str | None:
        """Read which keys the store drops when its memory is full. It may be changed at any time."""
        policy = find_field(await self._ask("INFO", "memory"), b"maxmemory_policy")
        self.is_noeviction_assumed = policy is None and self._assumes_noeviction
        self.eviction_policy = KEEPS_ALL if self.is_noeviction_assumed else policy
        return self.eviction_policy

    def reconnect(self) -> None:
        """Drop this connection: it may have outlived its store's place in the topology."""
        self._drop()
        self._on_lost_to_others()

    def keep(self) -> None:
        """Connect, and connect again whenever the connection is lost, until closed."""
        self._keeper = asyncio.create_task(self._keep(), name="store connection")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._drop()
        await self.endpoint.close()

    def disconnect(self) -> None:
        """Disconnect until `connect` is called."""
        self._drop()

    async def _keep(self) -> None:
        while True:
            await self._connect_with_retries()
            log.info("store connected", store=str(self.endpoint), fingerprint=self.fingerprint)
            self._on_connected()
            await self._watch()

    async def _watch(self) -> None:
        """Return when the connection is lost. It is closed once its store is at another server."""
        while not self._lost.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self.endpoint.watch_interval_s):
                    await self._lost.wait()
            if not self._lost.is_set() and await self.endpoint.has_moved():
                log.warning("store moved to another server", store=str(self.endpoint))
                self.reconnect()

    async def _connect_with_retries(self) -> None:
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(UNREACHABLE),
            wait=tenacity.wait_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S),
            before_sleep=self._on_unreachable,
            sleep=asyncio.sleep,
        ):
            with attempt:
                await self.connect()

    def _on_unreachable(self, retry: tenacity.RetryCallState) -> None:
        """Log the first failure of an outage."""
        if retry.attempt_number == 1:
            log.warning("store connection failed", store=str(self.endpoint), reason=self._reason.removeprefix(": "))

    async def connect(self) -> None:
        """Connect, or raise one of UNREACHABLE. The connection stays until it is lost."""
        self._lost.clear()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._open()
            await self._greet()
        except UNREACHABLE as error:
            self._drop()
            self._reason = f": {describe(error)}"
            raise
        self._reason = ""

    async def _open(self) -> None:
        def on_lost() -> None:
            if self._protocol is protocol:  # and not one that was dropped before
                self._on_lost()

        protocol = self._protocol = _Protocol(asyncio.get_running_loop(), on_lost, self._statistics)
        protocol.writer = await connect_with(await self.endpoint.locate(), protocol)

    async def _greet(self) -> None:
        """Read the fingerprint before anything else."""
        fingerprint = await self.read_fingerprint()
        cluster = await self._ask("INFO", "cluster")
        if not self._is_node and _field(cluster, b"cluster_enabled") == "1":
            raise StoreUnavailable("it is a node of a Cluster; use an address that begins with redis+cluster://")
        if not self._is_node and _field(await self._ask("INFO", "replication"), b"role") != "master":
            raise StoreUnavailable("it is a replica")
        await self.read_eviction_policy()
        if self.is_noeviction_assumed:
            log.warning("store eviction policy unknown: a setting vouches for noeviction", store=str(self.endpoint))
        self.fingerprint = fingerprint

    def _on_lost(self) -> None:
        was_connected, self.fingerprint = self.connected, None
        self._lost.set()
        if was_connected:
            self._on_lost_to_others()

    def _drop(self) -> None:
        self.fingerprint = None
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.close()
            self._lost.set()


def describe(error: BaseException) -> str:
    """Return the reason that the store, the system or the TLS library gave."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(error) or (describe(error.__cause__) if error.__cause__ else type(error).__name__)


def _fingerprint(server: bytes, replication: bytes) -> str:
    return f"{_field(server, b'run_id')}:{_field(replication, b'master_replid')}"


def _field(info: bytes, name: bytes) -> str:
    value = find_field(info, name)
    if value is None:
        raise StoreError(f"the store's INFO has no {name.decode()}")
    return value
