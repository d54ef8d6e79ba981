"""One connection to the region's store, shared by every request.

Writes are gathered: all that is asked for in one turn of the event loop leaves in one piece, and replies are matched
in the order in which they come. That is what makes a store of a hundred thousand scripts a second reachable from
Python; a call for each request through a pool reaches a tenth of it.

The store's *fingerprint* is read on every new connection, before any other command: it tells one incarnation of the
store from another, and every script compares it. Nothing is asked twice by itself: a call that was cut off may have
been executed, and only its caller knows what that means.

Time runs out for all calls together: one timer looks at those that wait. A timer for each call would cost as much as
the call. A store that answers others meanwhile is not silent: calls that wait behind our own have longer. And a timer
that is late says that this process, or the machine, was busy: then the store is given as much time as well, once, and
what lies in the socket is always read before anybody is told that there is no answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis
import structlog
import tenacity

from regional_agent.store.rules.decision_timeout import DecisionTimeout

log = structlog.get_logger()

T = TypeVar("T")
Reply = Any
Argument = bytes | str | int

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# Who answers so is not, or no longer, the one that decides: whatever is asked next has to be asked elsewhere.
# Not so ASK and TRYAGAIN: of a slot whose keys are under way its old place decides until all have left it, and the
# cells beside it share the connection.
CHANGED_TOPOLOGY = {"MOVED", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "LOADING"}
LATE_S = 0.001  # a timer that fires later than this after its moment was held up
BEHIND_OTHERS = 4  # times its own time may a call wait while the store answers


OnReply = Callable[[Reply | Exception], None]


class StoreUnavailable(Exception):
    """The store could not be asked, or did not answer in time."""


class NoAnswer(StoreUnavailable):
    """It was asked: whether it did what it was asked, nobody knows."""


class StoreError(Exception):
    """The store answered with an error."""


SCRIPTS = frozenset({"EVALSHA", "EVAL"})
UNREACHABLE = (OSError, TimeoutError, StoreUnavailable, StoreError)


def set_result_of(future: asyncio.Future[T]) -> Callable[[T | Exception], None]:
    """What to call so that whoever awaits the future hears it."""

    def on_answer(answer: T | Exception) -> None:
        if future.done():  # its caller gave up; the answer is nobody else's
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    return on_answer


class _Call:
    """Who waits for a reply, since when, and for how long."""

    __slots__ = ("is_decision", "on_reply", "patience_s", "since")

    def __init__(self, since: float, patience_s: float, on_reply: OnReply, *, is_decision: bool) -> None:
        self.is_decision = is_decision
        self.since = since
        self.patience_s = patience_s
        self.on_reply: OnReply | None = on_reply  # None: told already that there is no answer in time

    def tell(self, reply: Reply | Exception) -> None:
        on_reply, self.on_reply = self.on_reply, None
        if on_reply is not None:
            on_reply(reply)

    @property
    def due_at(self) -> float:
        return self.since + self.patience_s

    def is_overdue(self, now: float, silent_since: float) -> bool:
        is_silent = now >= silent_since + self.patience_s or now >= self.since + BEHIND_OTHERS * self.patience_s
        return self.on_reply is not None and now >= self.due_at and is_silent


class _Protocol(asyncio.Protocol):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[], None], decision_timeout: DecisionTimeout
    ) -> None:
        self._decision_timeout = decision_timeout
        self._reader = hiredis.Reader(replyError=StoreError)
        self._waiting: deque[_Call] = deque()
        self._gathered: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._loop = loop
        self._on_lost = on_lost
        self._heard_at = 0.0
        self._look_at: float | None = None  # when those that wait are looked at next

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class

    def send(self, arguments: Sequence[Argument], on_reply: OnReply, patience_s: float, *, at_once: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            on_reply(StoreUnavailable("the store's connection is closed"))
            return
        if not self._gathered and not at_once:
            self._loop.call_soon(self._flush)
        packed = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # its stub knows one-tuples only
        self._gathered.append(packed)
        now = self._loop.time()
        self._waiting.append(_Call(now, patience_s, on_reply, is_decision=at_once))
        if self._look_at is None or now + patience_s < self._look_at:
            self._look_later(now + patience_s)
        if at_once:
            self._flush()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(gathered))

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            call = self._waiting.popleft()
            if call.is_decision:
                self._decision_timeout.note(now - call.since)
            if call.on_reply is not None:  # else it comes too late to speak for the store
                self._heard_at = now
            call.tell(reply)
            if isinstance(reply, StoreError) and str(reply).partition(" ")[0] in CHANGED_TOPOLOGY:
                self.close()

    def _look_later(self, moment: float, *, is_second: bool = False) -> None:
        self._look_at = moment
        self._loop.call_at(moment, self._look, moment, is_second)

    def _look(self, moment: float, is_second: bool) -> None:
        """At those whose time is over. Once two turns have passed, what lay in the socket has been read."""
        if moment != self._look_at:
            return  # an earlier look was asked for since
        now = self._loop.time()
        if not any(call.is_overdue(now, self._silent_since()) for call in self._waiting):
            self._look_again(now)
        elif now - moment > LATE_S and not is_second:
            self._look_later(now + min(now - moment, self._shortest_s()), is_second=True)
        else:
            self._loop.call_soon(self._loop.call_soon, self._give_up)

    def _give_up(self) -> None:
        """Replies that come later are thrown away: the order is what tells them apart."""
        now = self._loop.time()
        silent_since = self._silent_since()
        for call in list(self._waiting):
            if call.is_overdue(now, silent_since):
                call.tell(NoAnswer("the store did not answer in time"))
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        self._look_at = None
        due_at = min((call.due_at for call in self._waiting if call.on_reply is not None), default=None)
        if due_at is not None:
            self._look_later(max(due_at, now + self._shortest_s() / 4))

    def _silent_since(self) -> float:
        """Since when something waits and nothing was heard."""
        return max(self._heard_at, self._waiting[0].since) if self._waiting else self._heard_at

    def _shortest_s(self) -> float:
        return min(call.patience_s for call in self._waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        waiting, self._waiting = self._waiting, deque()
        self._on_lost()
        for call in waiting:
            call.tell(NoAnswer(f"the store's connection was lost: {exc or 'closed'}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # what was not sent yet must not be: nobody would hear the answer


def is_flushed(told: Reply | Exception) -> bool:
    """Whether WAITAOF says that the writes of its connection are on the disk of this store."""
    return isinstance(told, list) and bool(told) and told[0] == 1


def _flushed_within(patience_s: float) -> tuple[Argument, ...]:
    return ("WAITAOF", 1, 0, max(1, int(patience_s * 1000)))


class _DurabilityProof:
    """Passes a reply on once the store has said that what was written before it is on disk."""

    __slots__ = ("_on_reply", "_reply")

    def __init__(self, on_reply: OnReply) -> None:
        self._on_reply = on_reply
        self._reply: Reply | Exception = None

    def on_reply(self, reply: Reply | Exception) -> None:
        self._reply = reply

    def on_flushed(self, told: Reply | Exception) -> None:
        if isinstance(self._reply, Exception) or is_flushed(told):
            self._on_reply(self._reply)
        else:
            self._on_reply(NoAnswer("the store did not say that what it wrote is on its disk"))


class StoreAddress:
    """`redis://:password@host:port/database` or `unix:///path?db=0`. The text never shows the password."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"redis", "unix"}:
            raise ValueError("a store's address begins with redis:// or unix://")
        self.path = unquote(parts.path) if parts.scheme == "unix" else None
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 6379
        self.username = unquote(parts.username) if parts.username else None
        self.password = unquote(parts.password) if parts.password else None
        database = parse_qs(parts.query).get("db", ["0"])[0] if self.path else parts.path.strip("/") or "0"
        if not database.isdigit():
            raise ValueError("a store's database is a number, such as redis://127.0.0.1:6379/0")
        self.database = int(database)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}/{self.database}"


class Store(Protocol):
    """What a script is sent to: a single store, or whoever has one of a Cluster's cells now."""

    @property
    def connected(self) -> bool: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def eviction_policy(self) -> str | None: ...
    @property
    def calls(self) -> int: ...
    def prove_durability(self, *, is_wanted: bool) -> None: ...
    @property
    def node(self) -> str:
        """Where it is, for people."""

    @property
    def fault(self) -> str:
        """Why it is not connected, likewise."""

    async def call(self, *arguments: Argument) -> Reply: ...
    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None: ...
    async def read_fingerprint(self) -> str: ...
    async def is_exempt(self) -> bool: ...
    async def read_eviction_policy(self) -> str | None: ...
    def reconnect(self) -> None: ...


class StoreConnection:
    def __init__(
        self,
        url: str,
        *,
        timeout_ms: int,
        decision_timeout: DecisionTimeout | None = None,
        on_connected: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        is_node: bool = False,
    ) -> None:
        """`decision_timeout`: of what is sent at once, for a service waits for it. `is_node`: of a Cluster."""
        self.address = StoreAddress(url)
        self.fingerprint: str | None = None
        self.eviction_policy: str | None = None
        self.calls = 0
        self._timeout_s = timeout_ms / 1000
        self.decision_timeout = decision_timeout or DecisionTimeout(timeout_ms, timeout_ms)
        self._on_connected = on_connected
        self._on_lost_to_others = on_lost
        self._is_node = is_node
        self._proves_durability = False
        self._reason = ""
        self._protocol: _Protocol | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self.fingerprint is not None

    @property
    def node(self) -> str:
        return str(self.address)

    @property
    def fault(self) -> str:
        return f"the store at {self.address} is not connected{self._reason}"

    async def call(self, *arguments: Argument) -> Reply:
        if self.fingerprint is None:
            raise StoreUnavailable(f"the store at {self.address} is not connected")
        return await self._ask(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None:
        """Ask at once, without a wait for the end of the turn; the reply, or why there is none, is told."""
        if self.fingerprint is None or self._protocol is None:
            on_reply(StoreUnavailable(f"the store at {self.address} is not connected"))
            return
        self.calls += 1
        self._submit(self._protocol, arguments, on_reply, self.decision_timeout.seconds, at_once=True)

    def _submit(
        self,
        protocol: _Protocol,
        arguments: Sequence[Argument],
        on_reply: OnReply,
        patience_s: float,
        *,
        at_once: bool,
    ) -> None:
        if not self._proves_durability or arguments[0] not in SCRIPTS:
            protocol.send(arguments, on_reply, patience_s, at_once=at_once)
            return
        proof = _DurabilityProof(on_reply)
        protocol.send(arguments, proof.on_reply, patience_s, at_once=False)
        protocol.send(_flushed_within(patience_s), proof.on_flushed, patience_s, at_once=at_once)

    def prove_durability(self, *, is_wanted: bool) -> None:
        """Whether replies of scripts count only once the store has said that what they wrote is on its disk."""
        self._proves_durability = is_wanted

    async def _ask(self, *arguments: Argument) -> Reply:
        if self._protocol is None:
            raise StoreUnavailable(f"the store at {self.address} is not connected")
        self.calls += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._submit(self._protocol, arguments, set_result_of(future), self._timeout_s, at_once=False)
        return await future

    async def read_fingerprint(self) -> str:
        """Which incarnation of the store this connection leads to, asked anew."""
        return _fingerprint(await self._ask("INFO", "server"), await self._ask("INFO", "replication"))

    async def is_exempt(self) -> bool:
        """Is it a single store, without replicas in this incarnation, that fsyncs every write before it answers?"""
        replication, cluster = await self._ask("INFO", "replication"), await self._ask("INFO", "cluster")
        names = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite")
        answer: list[bytes] = await self._ask("CONFIG", "GET", *names)
        settings = dict(zip(answer[::2], answer[1::2], strict=True))
        return (
            [_field(replication, name) for name in (b"role", b"connected_slaves", b"repl_backlog_active")]
            == ["master", "0", "0"]
            and not _field(replication, b"master_replid2").strip("0")  # it was never promoted
            and _field(cluster, b"cluster_enabled") == "0"
            and [settings.get(name.encode()) for name in names] == [b"yes", b"always", b"no"]
            and await self._can_prove_durability()
        )

    async def _can_prove_durability(self) -> bool:
        """Whether the store can say that a write is on its disk: Redis since 7.2, and Valkey."""
        try:
            return is_flushed(await self._ask(*_flushed_within(self._timeout_s)))
        except StoreError:
            return False

    async def read_eviction_policy(self) -> str | None:
        """Read which keys the store drops when its memory is full. Anybody may change that at any time."""
        policy = await self._ask("CONFIG", "GET", "maxmemory-policy")
        self.eviction_policy = policy[1].decode() if policy else None
        return self.eviction_policy

    def reconnect(self) -> None:
        """Leave this connection: it may have outlived its store's place in the topology."""
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

    def leave(self) -> None:
        """For good, or until somebody connects it again."""
        self._drop()

    async def _keep(self) -> None:
        while True:
            await self._connect_with_retries()
            log.info("the store is connected", store=str(self.address), fingerprint=self.fingerprint)
            self._on_connected()
            await self._lost.wait()

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
        """Log the first failure of an outage, and leave what was half connected."""
        if retry.attempt_number == 1 and retry.outcome is not None:
            log.warning("the store cannot be reached", store=str(self.address), reason=str(retry.outcome.exception()))
        self._drop()

    async def connect(self) -> None:
        """Raises one of UNREACHABLE. Once connected it stays so until it is lost."""
        self._lost.clear()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(2):
            if self.address.path:
                _, self._protocol = await loop.create_unix_connection(self._new_protocol, self.address.path)
            else:
                _, self._protocol = await loop.create_connection(
                    self._new_protocol, self.address.host, self.address.port
                )
        await self._greet()

    async def _greet(self) -> None:
        if self.address.password is not None:
            user = (self.address.username,) if self.address.username else ()
            await self._ask("AUTH", *user, self.address.password)
        if self.address.database:
            await self._ask("SELECT", self.address.database)
        cluster = await self._ask("INFO", "cluster")
        if not self._is_node and _field(cluster, b"cluster_enabled") == "1":
            self._reason = ": it is a node of a Cluster, whose address begins with redis+cluster://"
            raise StoreUnavailable(f"the store at {self.address} is not connected{self._reason}")
        fingerprint = await self.read_fingerprint()
        await self.read_eviction_policy()
        self.fingerprint = fingerprint

    def _new_protocol(self) -> _Protocol:
        return _Protocol(asyncio.get_running_loop(), self._on_lost, self.decision_timeout)

    def _on_lost(self) -> None:
        was_connected, self.fingerprint = self.connected, None
        self._lost.set()
        if was_connected:
            self._on_lost_to_others()

    def _drop(self) -> None:
        self.fingerprint = None
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None


def _fingerprint(server: bytes, replication: bytes) -> str:
    return f"{_field(server, b'run_id')}:{_field(replication, b'master_replid')}"


def _field(info: bytes, name: bytes) -> str:
    for line in info.splitlines():
        key, _, value = line.partition(b":")
        if key == name:
            return value.decode()
    raise StoreError(f"the store's INFO has no {name.decode()}")
