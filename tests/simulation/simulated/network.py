"""Coordinators, and the network between them and the agents.

`VirtualClient` stands where `CoordinatorClient` stands. A call is bytes; a way has weather: bytes may be lost, late,
doubled, or overtaken by later ones, in one direction or in both. A late request arrives after its caller gave up.

Coordinators are as the real ones without HTTP: parse, apply in one transaction, commit, reply. One may be killed before
its commit, or after it and before its reply. None is special, for all that they know is in the ledger.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

import msgspec

from coordinator.clock import ComparedClock
from coordinator.exchange.batcher import ExchangeBatcher
from coordinator.exchange.parsing import parse_exchanges
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.exchange.transaction import Applied
from coordinator.outages import DatabaseUnavailable
from coordinator.shared_limits.rules import Shared
from coordinator.shared_limits.share_rates import decide, terms_asked
from protocol.blocks import BlockList
from protocol.compatibility.releases import Peer
from protocol.messages import (
    EpochOpened,
    ExchangeRequest,
    ExchangeResponse,
    OpenEpoch,
    RebindEpoch,
    ResetBatch,
    SharesRequest,
    SharesResponse,
    Signal,
)
from protocol.outcomes import EpochRefusal, ExchangeOutcome, GrantRefusal
from regional_agent.leasing.coordinator_client import CoordinatorRefused, CoordinatorUnavailable, NoReply
from regional_agent.leasing.rules.addresses import Addresses
from tests.simulation.simulated.ledger_model import LedgerModel, Transaction
from tests.simulation.simulated.virtual_time import VirtualClock
from web.problems import Problem

Serve = Callable[[], Awaitable[bytes | EpochRefusal | None]]
T = TypeVar("T")
CALL_TIMEOUT_S = 5.0
TRANSACTION_S = 0.005
LONG_POLL_S = 20.0
CLOCK_LIMIT_MS = 5_000  # as coordinators have it unless it is set


@dataclass
class Weather:
    """The network between one region and the coordinators."""

    random: random.Random
    loss: float = 0.005
    doubling: float = 0.01
    lateness: float = 0.01  # how often a message takes seconds
    sends: bool = True  # False: nothing that the region sends arrives
    hears: bool = True  # False: nothing arrives that is sent to it
    troubles: int = 0  # so many messages were lost or late

    def delay_s(self) -> float:
        if self.random.random() < self.lateness:
            self.troubles += 1
            return self.random.uniform(0.5, 9.0)
        return self.random.uniform(0.02, 0.12)

    def delivers(self, *, out: bool) -> bool:
        is_open = self.sends if out else self.hears
        arrives = is_open and self.random.random() >= self.loss
        self.troubles += not arrives
        return arrives


# How a ledger that lost what it had told is noticed: the store is ahead of it.
ALARMS = {
    ExchangeOutcome.LEDGER_REGRESSED,
    ExchangeOutcome.GAP,
    ExchangeOutcome.UNKNOWN_EPOCH,
    ExchangeOutcome.WRONG_FINGERPRINT,
}


class AheadClock(NamedTuple):
    real: VirtualClock
    ahead: timedelta

    def now(self) -> datetime:
        return self.real.now() + self.ahead

    def monotonic_ms(self) -> int:
        return self.real.monotonic_ms()


class Died(DatabaseUnavailable):
    """A coordinator, over a transaction; whoever was gathered in it hears nothing."""


@dataclass
class Coordinators:
    ledger: LedgerModel
    clock: VirtualClock
    terms: LeaseTerms
    on_bug: Callable[[str, BaseException], None]
    is_up: bool = True
    transaction_s: float = TRANSACTION_S
    alarmed: set[str] = field(default_factory=set)  # regions of which the ledger was shown to have lost data
    dies_before_commit: int = 0  # so many of the next transactions
    dies_after_commit: int = 0
    deaths: int = 0  # of coordinators over a transaction
    outcomes: Counter[str] = field(default_factory=Counter)
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    skews: dict[str, timedelta] = field(default_factory=dict)  # of the clocks of those that serve a region
    shared: dict[str, Shared] = field(default_factory=dict)
    subscribers: dict[str, list["VirtualClient"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger.on_commit = self._tell
        self._gathering = ExchangeBatcher(self._apply)

    async def exchange(self, region: str, body: bytes) -> bytes | None:
        """The reply, or None if the coordinator died over it."""
        if not self.is_up:
            return None
        try:
            applied = await self._gathering.apply(parse_exchanges(region, body))
        except DatabaseUnavailable:
            return None
        for each in applied.response.replies:
            if each.fault is not None or any(want.refusal is GrantRefusal.INVALID for want in each.refused):
                self.on_bug("an agent's exchange or want was refused as malformed", ValueError(each))
        return msgspec.json.encode(applied.response)

    async def shares(self, region: str, body: bytes) -> bytes | None:
        """The reply. What is remembered of rates is no ledger, and is lost with it."""
        await asyncio.sleep(self.transaction_s)
        if not self.is_up:
            return None
        request, now = msgspec.json.decode(body, type=SharesRequest), self.clock.now()
        asked = [*(rate.quota for rate in request.rates), *(slots.quota for slots in request.slots)]
        terms = terms_asked(self.ledger.catalogue(asked, now), request)
        now_ms = round(now.timestamp() * 1000)
        for quota in terms:
            self.shared.setdefault(quota, Shared(now_ms, now_ms))
        response, notices = decide(region, request, terms, self.shared, now_ms)
        self._tell(Transaction({}, notices))
        return msgspec.json.encode(response)

    async def _apply(self, calls: Sequence[ExchangeCall]) -> list[Applied]:
        """Run one transaction. Calls that arrive meanwhile are gathered; its effects happen at its end."""
        await asyncio.sleep(self.transaction_s)
        now = self._compared_now(calls)
        try:
            responses, transaction = self.ledger.apply_exchanges(calls, self.terms, now)
        except Exception as error:
            self.on_bug("exchanges failed", error)  # they would be answered as refused
            raise
        if not self.is_up or not self.conclude(transaction):
            raise Died
        for region, epochs in transaction.lost:
            self.ledger.commit(self.ledger.fence_lost(region, epochs, self.clock.now()))
        for call, response in zip(calls, responses, strict=True):
            self._count(response)
            if any(reply.outcome in ALARMS for reply in response.replies):
                self.alarmed.add(call.region)
        self.outcomes["gathered"] += len(calls) > 1
        return [Applied(response, (), 0, (), ()) for response in responses]

    def _compared_now(self, calls: Sequence[ExchangeCall]) -> datetime:
        """The time on the clock of who serves these calls, as a coordinator compares it with its database's."""
        ahead = max((self.skews.get(call.region, timedelta()) for call in calls), default=timedelta())
        if not ahead:
            return self.clock.now()
        clock = ComparedClock(AheadClock(self.clock, ahead), CLOCK_LIMIT_MS)
        clock.compare(clock.untrusted_now(), self.clock.now(), clock.untrusted_now())
        try:
            return clock.now()
        except DatabaseUnavailable:
            self.outcomes["clock not trusted"] += 1
            raise

    def decide(self, kind: str, region: str, body: bytes) -> Transaction:
        """Return what a call would do, without doing it."""
        if kind == "exchange":
            call = parse_exchanges(region, body)
            response, transaction = self.ledger.apply_exchange(call, self.terms, self.clock.now())
            self._count(response)
            return transaction
        opened, transaction = self._opened(kind, region, body)
        if isinstance(opened, EpochRefusal):
            self.outcomes[f"EpochRefusal.{opened.name}"] += 1
        return transaction

    def _opened(self, kind: str, region: str, body: bytes) -> tuple[EpochOpened | EpochRefusal | None, Transaction]:
        if kind == "rebind_epoch":
            return self.ledger.rebind_epoch(region, 10**6, _decoded(body, RebindEpoch))
        return self.ledger.open_epoch(region, _decoded(body, OpenEpoch), self.clock.now())

    async def open_epoch(self, region: str, body: bytes) -> bytes | EpochRefusal | None:
        if not self.is_up:
            return None
        return self._answer(*self.ledger.open_epoch(region, _decoded(body, OpenEpoch), self.clock.now()))

    async def rebind_epoch(self, region: str, epoch: int, body: bytes) -> bytes | EpochRefusal | None:
        if not self.is_up:
            return None
        return self._answer(*self.ledger.rebind_epoch(region, epoch, _decoded(body, RebindEpoch)))

    def _answer(
        self, opened: EpochOpened | EpochRefusal | None, transaction: Transaction
    ) -> bytes | EpochRefusal | None:
        if opened is None or not self.conclude(transaction):
            return None
        if isinstance(opened, EpochRefusal):
            self.outcomes[f"EpochRefusal.{opened.name}"] += 1
            return opened
        return msgspec.json.encode(opened)

    def conclude(self, transaction: Transaction) -> bool:
        """Commit, and only then let the reply go. False if the reply never goes."""
        if self.dies_before_commit:
            self.dies_before_commit -= 1
            self.deaths += 1
            return False
        self.ledger.commit(transaction)
        if self.dies_after_commit:
            self.dies_after_commit -= 1
            self.deaths += 1
            return False
        return True

    def expire(self) -> None:
        """Return a lease's spendable units: none after its expiry, whatever its state."""
        now = self.clock.now()
        try:
            if self.conclude(self.ledger.expire_leases(now)):
                leases = self.ledger.leases.values()
                left = [each for each in leases if each.outstanding and each.expires_at <= now]
                assert not left, left
        except Exception as error:
            self.on_bug("expiry raised", error)

    def fail_over(self, commits: int) -> None:
        """Postgres moves to its replica, which has all that was committed: a commit waits for it."""

    def _count(self, response: ExchangeResponse) -> None:
        for reply in response.replies:
            self.outcomes[f"ExchangeOutcome.{reply.outcome.name}"] += 1
            refusals = [*(each.refusal for each in reply.refused), *(lease.refusal for lease in reply.leases)]
            self.outcomes.update(f"GrantRefusal.{refusal.name}" for refusal in refusals if refusal is not None)

    def _tell(self, transaction: Transaction) -> None:
        """Signals leave with the commit."""
        for notice in transaction.notices:
            for region, clients in self.subscribers.items():
                if notice.region in (None, region):
                    for client in clients:
                        if notice.signal.kind == "resets":
                            client.poll_resets()
                        client.hear(notice.signal)


class VirtualClient:
    """One agent's CoordinatorClient."""

    peer: Peer | None = None  # nothing is stated: all are of one release

    def __init__(self, region: str, coordinators: Coordinators, weather: Weather, is_alive: Callable[[], bool]) -> None:
        self.addresses = Addresses.of(["http://coordinator"])
        self._region = region
        self._coordinators = coordinators
        self._weather = weather
        self._is_alive = is_alive
        self._loop = asyncio.get_running_loop()
        self._signals: asyncio.Queue[Signal] = asyncio.Queue()
        self._news, self._reset = asyncio.Event(), asyncio.Event()
        coordinators.subscribers.setdefault(region, []).append(self)

    async def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        listening = self._coordinators.subscribers[self._region]
        if self in listening:
            listening.remove(self)

    async def open_epoch(self, request: OpenEpoch) -> EpochOpened:
        body = msgspec.json.encode(request)
        return _opened(await self._call(lambda: self._coordinators.open_epoch(self._region, body)))

    async def rebind_epoch(self, epoch: int, request: RebindEpoch) -> EpochOpened:
        body = msgspec.json.encode(request)
        return _opened(await self._call(lambda: self._coordinators.rebind_epoch(self._region, epoch, body)))

    async def exchange(self, request: ExchangeRequest, within_s: float | None = None) -> ExchangeResponse:
        body = msgspec.json.encode(request)
        try:
            async with asyncio.timeout(within_s):
                answer = await self._call(lambda: self._coordinators.exchange(self._region, body))
        except TimeoutError:
            raise NoReply("no reply in time") from None
        assert isinstance(answer, bytes)
        return msgspec.json.decode(answer, type=ExchangeResponse)

    async def shares(self, request: SharesRequest) -> SharesResponse:
        body = msgspec.json.encode(request)
        answer = await self._call(lambda: self._coordinators.shares(self._region, body))
        assert isinstance(answer, bytes)
        return msgspec.json.decode(answer, type=SharesResponse)

    async def policies(self, since: int | None, read: Callable[[bytes], T]) -> T | None:
        """Policies come by another call, with the same weather; long polls are one question each second."""
        for _ in range(int(LONG_POLL_S)):
            await asyncio.sleep(self._weather.delay_s())
            if (
                not self._coordinators.is_up
                or not self._weather.delivers(out=True)
                or not self._weather.delivers(out=False)
            ):
                raise CoordinatorUnavailable("no answer")
            bundle = self._coordinators.ledger.policy_bundle(self._region)
            if bundle.version != since:
                return read(msgspec.json.encode(bundle))
            self._news.clear()
            try:
                async with asyncio.timeout(2):
                    await self._news.wait()
            except TimeoutError:
                continue
        return None

    async def blocks(self, since: int | None, read: Callable[[bytes], T]) -> T | None:
        """Return an empty list of blocks once, and then wait for ever, because it does not change."""
        if since is None:
            return read(msgspec.json.encode(BlockList(version=0, data=[])))
        await self._loop.create_future()
        return None

    async def resets(self, since: int | None, read: Callable[[bytes], T]) -> T | None:
        """Resets come by a long poll of their own, with the same weather once there is one."""
        if since is None:
            return read(msgspec.json.encode(ResetBatch(version=0, data=[])))
        while not (batch := self._coordinators.ledger.resets(since)).data:
            self._reset.clear()
            await self._reset.wait()
        await asyncio.sleep(self._weather.delay_s())
        if not self._coordinators.is_up or not all(self._weather.delivers(out=out) for out in (True, False)):
            raise CoordinatorUnavailable("no answer")
        return read(msgspec.json.encode(batch))

    def poll_resets(self) -> None:
        """Let the poll find what was added."""
        self._reset.set()

    async def signals(self) -> AsyncIterator[Signal]:
        while True:
            yield await self._signals.get()

    def hear(self, signal: Signal) -> None:
        """A hint: where it does not arrive, nobody says it again."""
        if self._weather.delivers(out=False):
            self._loop.call_later(self._weather.delay_s(), self._heard, signal)

    def _heard(self, signal: Signal) -> None:
        if self._is_alive():
            self._signals.put_nowait(signal)
            self._news.set()

    # --- one call -----------------------------------------------------------------------------------------------------

    async def _call(self, serve: Serve) -> bytes | EpochRefusal:
        answered: asyncio.Future[bytes | EpochRefusal] = self._loop.create_future()
        if not self._is_alive():
            return await answered  # the dead ask nothing, and wait for ever
        copies = 2 if self._weather.random.random() < self._weather.doubling else 1
        for _ in range(copies):
            if self._weather.delivers(out=True):
                self._loop.call_later(self._weather.delay_s(), self._arrive, serve, answered)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await answered
        except TimeoutError:
            raise CoordinatorUnavailable("no answer") from None

    def _arrive(self, serve: Serve, answered: asyncio.Future[bytes | EpochRefusal]) -> None:
        serving = self._loop.create_task(self._serve(serve, answered), name="a coordinator")
        self._coordinators.serving.add(serving)
        serving.add_done_callback(self._coordinators.serving.discard)

    async def _serve(self, serve: Serve, answered: asyncio.Future[bytes | EpochRefusal]) -> None:
        try:
            answer = await serve()
        except Problem as problem:
            self._coordinators.on_bug("an agent's call was refused as malformed", problem)
            return
        except Exception as error:
            self._coordinators.on_bug("a coordinator raised", error)
            return
        if answer is not None and self._weather.delivers(out=False):
            self._loop.call_later(self._weather.delay_s(), self._reply, answer, answered)

    def _reply(self, answer: bytes | EpochRefusal, answered: asyncio.Future[bytes | EpochRefusal]) -> None:
        if not answered.done() and self._is_alive():
            answered.set_result(answer)


def _opened(answer: bytes | EpochRefusal) -> EpochOpened:
    if isinstance(answer, EpochRefusal):
        raise CoordinatorRefused(409, answer.value, answer.value)
    return msgspec.json.decode(answer, type=EpochOpened)


def _decoded(body: bytes, type_: type[T]) -> T:
    return msgspec.json.decode(body, type=type_)
