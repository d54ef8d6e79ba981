"""The model of a store against the real one: the same commands at the same times, equal answers, equal state.

The simulation believes its stores because of this test. The real store runs the scripts as they are but for their
clock: `redis.call('TIME')` reads a key that the test writes, so both live the same microseconds, forwards and back.
"""

import hashlib
import re
import socket
import struct
from collections.abc import Coroutine, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import hiredis
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from leasehold import embedded
from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply, LeaseReply, RateShare, SlotShare
from protocol.outcomes import ExchangeOutcome
from protocol.policy import Rate
from protocol.units import MAX_UNITS
from regional_agent.domain.hold_ids import HoldId, HoldTerms
from regional_agent.store.connection import Argument, OnReply, StoreError
from regional_agent.store.scripts import (
    AllowanceCharge,
    Charge,
    Fence,
    Fenced,
    Life,
    Operation,
    OperationConflict,
    RateCharge,
    RateWant,
    Request,
    Run,
    Scripts,
    SlotCharge,
    SlotWant,
    part_of,
    runs_of,
)
from regional_agent.store.sources import LUA, sources
from tests.conftest import Server
from tests.simulation.algorithms_model import ALGORITHMS
from tests.simulation.store_model import ModelConnection, StoreModel

T = TypeVar("T")

NOW, READ_NOW = b"redis.call('TIME')", b"redis.call('HMGET', 'clock', 's', 'us')"
# The real store forgets so long after this moment, in centuries: the test says when, and no machine has a say in it.
FAR_MS = 10**13
# How the scripts say that something is to be forgotten, and ask when it will be.
FORGETTING = (
    (rb"'PX', (.*)\)$", rb"'PXAT', string.format('%%.0f', (\1) + %d))" % FAR_MS),
    (
        rb"redis\.call\('PEXPIRE', ([\w.]+), (.*)\)$",
        rb"redis.call('PEXPIREAT', \1, string.format('%%.0f', (\2) + %d))" % FAR_MS,
    ),
    (rb"redis\.call\('PTTL', (\w+)\)", rb"(redis.call('PEXPIRETIME', \1) - %d)" % FAR_MS),
)
HOUR_US = 3_600_000_000
BODY, OTHER = "body-1", "body-2"


def on_the_tests_time(source: bytes) -> bytes:
    """A script whose clock is the test's, in its decisions and in what it has the store forget."""
    source = source.replace(NOW, READ_NOW)
    for said, meant in FORGETTING:
        source = re.sub(said, meant, source, flags=re.MULTILINE)
    return source


class Wire:
    """The real store, asked without an event loop: Hypothesis runs its steps one after the other."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection((embedded.LOOPBACK, server.port), timeout=10)
        self._reader = hiredis.Reader(replyError=StoreError)
        self.ask("AUTH", server.password)
        self.ask("FLUSHALL")
        self.sha: dict[str, str] = {}
        for source in sources().values():
            loaded: bytes = self.ask("SCRIPT", "LOAD", on_the_tests_time(source))
            self.sha[hashlib.sha1(source).hexdigest()] = loaded.decode()

    def ask(self, *arguments: Argument) -> Any:
        self._socket.sendall(hiredis.pack_command(arguments))  # type: ignore[arg-type]
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        if isinstance(reply, StoreError):
            raise reply
        return reply

    def close(self) -> None:
        self._socket.close()

    def forgets_in_ms(self, key: bytes) -> int:
        """As it was said when it was written, or a moment was passed, last; below zero of what is kept."""
        at_ms: int = self.ask("PEXPIRETIME", key)
        return at_ms - FAR_MS

    def state(self, key: bytes) -> Any:
        kind = self.ask("TYPE", key)
        if kind == b"hash":
            return _pairs(self.ask("HGETALL", key))
        if kind == b"set":
            return {member.decode() for member in self.ask("SMEMBERS", key)}
        if kind == b"zset":
            return {name: str(int(due)) for name, due in _pairs(self.ask("ZRANGE", key, 0, -1, "WITHSCORES")).items()}
        if kind == b"list":
            return _by_moment(struct.unpack("<dd", entry) for entry in self.ask("LRANGE", key, 0, -1))
        packed: bytes = self.ask("GET", key)
        if b":rate:" in key:
            return [int(each) for each in struct.unpack(f"<B{len(packed) // 8}d", packed)]
        return [packed[: len(BODY)].decode(), packed[len(BODY) :]]


class Both(ModelConnection):
    """Every command goes to the model and to the real store; they must agree."""

    def __init__(self, model: StoreModel, wire: Wire) -> None:
        super().__init__(model)
        self.fingerprint, self._wire = "both", wire

    async def _ask(self, *arguments: Argument) -> Any:
        expected = self.model.execute(*arguments)
        to_real = list(arguments)
        if arguments[0] == "EVALSHA":
            to_real[1] = self._wire.sha[str(arguments[1])]
        found = self._wire.ask(*to_real)
        assert _comparable(arguments[0], found) == _comparable(arguments[0], expected)
        return expected

    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None:
        on_reply(at_once(self._ask(*arguments)))

    def live(self, until_us: int) -> None:
        """Both clocks stand here now, and both have forgotten what they forget until then."""
        due = dict(self.model.forgets_at_us)
        self.model.now_us = until_us
        self.model.execute("HGET", "none", "none")  # forgets
        for key in due:
            if key in self.model.data:
                self._wire.ask("PEXPIREAT", key, self.model.ttl_ms(key) + FAR_MS)
            else:
                self._wire.ask("DEL", key)
        self._wire.ask("HSET", "clock", "s", until_us // 1_000_000, "us", until_us % 1_000_000)

    def compare(self) -> None:
        names = {name for name in self._wire.ask("KEYS", "*") if name != b"clock"}
        assert names == {name.encode() for name in self.model.data}
        for name in names:
            key = name.decode()
            expected = self.model.data[key]
            assert self._wire.state(name) == (_by_moment(expected) if b":log:" in name else _plain(expected)), key
            left_ms, expected_ms = self._wire.forgets_in_ms(name), self.model.ttl_ms(key)
            is_kept = expected_ms < 0
            assert left_ms < 0 if is_kept else left_ms == expected_ms, key
            passing = (b":rate:", b":demands:", b":log:", b":op:", b":slots:", b":slots_due:", b":slots_over:")
            is_passing = any(kind in name for kind in passing) and b":spoilt:" not in name
            assert is_kept != is_passing, f"accounting is kept, and nothing else: {key}"


def _by_moment(log: Iterable[Any]) -> list[tuple[int, int]]:
    """What was taken at one moment is one entry or several."""
    return [(at, sum(units for _, units in same)) for at, same in groupby(log, itemgetter(0))]


def _pairs(flat: list[bytes]) -> dict[str, str]:
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _comparable(command: Argument, reply: Any) -> Any:
    """Replies whose order means nothing, in one order."""
    if command == "HGETALL":
        return _pairs(reply)
    if command == "SRANDMEMBER":
        return sorted(reply)
    return sorted(set(reply[1])) if command == "SCAN" else reply


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run what never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it waited")


# --- what happens to a store ------------------------------------------------------------------------------------------

LANES = 2
QUOTAS = ["exports:tenant=acme", "exports:tenant=globex", "exports:tenant=a%2Fb%22", "reads:user=%C3%A4"]
RATES = {f"{algorithm}:tenant=acme": algorithm for algorithm in sorted(set(ALGORITHMS) - {"allowance", "concurrency"})}
BUCKETS = {f"{algorithm}:tenant=acme": algorithm for algorithm in ("gcra", "leaky_bucket", "token_bucket")}
SLOTS = ["reports:tenant=acme", "reports:tenant=globex"]
PERIODS = {"2026-11": (1_000, 1_999), "2026-12": (2_000, 2_999), "2027-01": (3_000, 3_999)}

few = st.integers(0, 12)
units = st.one_of(few, st.integers(0, 2_000), st.just(2**52))  # sums stay within what Lua counts exactly
costs = st.one_of(st.integers(1, 12), st.sampled_from([1000, 2**40, 2**52, MAX_UNITS]))
waits_ms = st.one_of(st.just(0), st.integers(0, 5_000), st.sampled_from([60_000, 3_600_000, 2**40]))
dimensions = st.sampled_from(['{"policy":"export"}', '{"policy":"a|b","tenant":"{x}"}'])
fingerprints = st.sampled_from(["life-1", "life-1", "life-1", "life-1", "life-2"])
epochs = st.sampled_from([7, 7, 7, 8])

allowances = st.builds(
    AllowanceCharge,
    st.sampled_from(QUOTAS),
    costs,
    st.sampled_from([5, 1_000, MAX_UNITS]),
    dimensions,
    st.sampled_from(["release", "charge"]),
)
small_allowances = st.builds(
    AllowanceCharge,
    st.sampled_from(QUOTAS[:2]),
    st.integers(1, 12),
    st.just(1_000),
    dimensions,
    st.sampled_from(["release", "charge"]),
)
slots = st.builds(
    SlotCharge,
    st.sampled_from(SLOTS),
    st.integers(1, 4),
    st.sampled_from([0, 3, 5, 5]),
    st.sampled_from([1_000, 90_000, 3_600_000]),
    st.sampled_from([False, False, True]),
    st.sampled_from([-1, 0, 2, 3]),
)
slot_wants = st.builds(SlotWant, slots, few)
slot_shares = st.builds(
    SlotShare,
    quota=st.sampled_from(SLOTS),
    number=few,
    units=few,
    after_units=st.integers(0, 3),
    expires_in_ms=st.sampled_from([0, 1, 1_000, 8_000, 20_000]),
    refresh_in_ms=st.just(1),
    slot_ttl_ms=st.sampled_from([1_000, 90_000]),
    contended=st.booleans(),
)
words = st.one_of(
    st.tuples(st.just("commit"), st.one_of(few, few, st.sampled_from([1_000, MAX_UNITS]))),
    st.tuples(st.just("extend"), st.sampled_from([1, 60_000, 3_600_000])),
    st.tuples(st.sampled_from(["spend", "release", "look"]), st.just(0)),
)
pauses_us = st.sampled_from([0, 0, 1_000_000, 61_000_000, HOUR_US, 25 * HOUR_US])
periods = st.sampled_from(list(PERIODS))
ttls_ms = st.sampled_from([1, 500, 60_000, 3_600_000])


@st.composite
def rates(draw: st.DrawFn) -> RateCharge:
    quota = draw(st.sampled_from(list(RATES)))
    windowed = "window" in quota or "log" in quota
    return RateCharge(
        quota,
        draw(costs),
        draw(st.sampled_from([0, 1, 833, 1_000_000, 10**12])),
        draw(st.sampled_from([0, 1, 10, 900_000])),
        RATES[quota],
        draw(st.sampled_from([1_000, 1_000, 60_000])) if windowed else 0,
        is_shadow=draw(st.sampled_from([False, False, True])),
    )


SPOILT = RateCharge("spoilt:tenant=acme", 1, 1_000, 10)
# Units that come back to a bucket: beside what is taken in the same call, as a slice does it.
returns = st.builds(
    lambda quota, cost, rate_micro, burst: Request(
        "adjust", [RateCharge(quota, -cost, rate_micro, burst, BUCKETS[quota])]
    ),
    st.sampled_from(list(BUCKETS)),
    st.integers(1, 12),
    st.sampled_from([1, 833, 1_000_000, 10**12]),
    st.sampled_from([1, 10, 900_000]),
)
operations = st.builds(
    Operation, st.sampled_from(["d1", "d2"]), st.sampled_from([BODY, OTHER]), st.sampled_from([60_000, 3_600_000])
)
requests = st.builds(
    Request,
    st.sampled_from(["enforce", "enforce", "peek", "adjust"]),
    st.lists(st.one_of(allowances, rates(), st.just(SPOILT)), min_size=1, max_size=3),
    st.one_of(st.none(), operations),
    st.none(),
)


@st.composite
def lease_replies(draw: st.DrawFn) -> LeaseReply:
    period = draw(st.sampled_from(list(PERIODS)))
    first, last = PERIODS[period]
    return LeaseReply(
        quota=draw(st.sampled_from(QUOTAS)),
        period=period,
        granted=draw(units),
        overage=draw(st.one_of(st.just(0), few)),
        limit=1_000,
        unallocated=draw(few),
        starts_in_ms=draw(st.one_of(st.just(0), st.just(0), waits_ms)),
        expires_in_ms=draw(waits_ms),
        ends_in_ms=draw(waits_ms),
        refresh_in_ms=1,
        first_minute=first,
        last_minute=last,
        overdraft=draw(st.sampled_from([0, 0, 7, 20])),
    )


def hold_of(charges: Sequence[Charge], ttl_ms: int, epoch: int = 7) -> HoldTerms:
    parts = [part for charge in charges if (part := part_of(charge)) is not None]
    return HoldTerms(HoldId.fresh(epoch, LANES, parts), ttl_ms)


micro = st.sampled_from([0, 1, 1_000, 5_000_000, 10**9])
bursts = st.sampled_from([0, 1, 10, 900_000])
rate_shares = st.builds(
    RateShare,
    quota=st.sampled_from(list(RATES)),
    number=few,
    rate_micro=micro,
    after_micro=micro,
    expires_in_ms=st.sampled_from([0, 1, 1_000, 8_000, 20_000]),
    refresh_in_ms=st.just(1),
    contended=st.booleans(),
)
safe_rates = st.builds(Rate, micro, bursts)
rate_wants = st.builds(RateWant, st.sampled_from(list(RATES)), safe_rates, micro, st.booleans())


class Store(RuleBasedStateMachine):
    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire(self.server)
        self.both = Both(StoreModel(), self.wire)
        self.scripts = Scripts(self.both)
        self.holds: list[HoldId] = []

    @initialize()
    def adopt(self) -> None:
        self.pass_time(0)
        at_once(self.scripts.begin_life("life-1", "a" * 16))
        at_once(self.scripts.adopt_epoch("life-1", "a" * 16, 7, LANES))
        # Of another type than its script's: whoever asks for it fails, alone.
        at_once(self.both.call("HSET", SPOILT.asked(Life("life-1", 7, LANES))[0][0], "of", "another type"))

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        try:
            return at_once(coroutine)
        except (Fenced, OperationConflict) as refused:
            event(type(refused).__name__)
            return None
        finally:
            self.both.compare()

    @rule(us=st.one_of(st.integers(-1_000_000, 5_000_000), st.sampled_from([HOUR_US, -HOUR_US, 31 * 24 * HOUR_US])))
    def pass_time(self, us: int) -> None:
        self.both.live(self.both.model.now_us + us)

    @rule(
        fingerprint=fingerprints,
        nonce=st.sampled_from(["b" * 16, "c" * 16]),
        lost=st.sampled_from(["", "", "a" * 16, "b" * 16]),
        whole=st.sampled_from([None, 7, 8]),
    )
    def begin_life(self, fingerprint: str, nonce: str, lost: str, whole: int | None) -> None:
        self.do(self.scripts.begin_life(fingerprint, nonce, lost, whole))

    @rule(
        fingerprint=fingerprints,
        nonce=st.sampled_from(["a" * 16, "b" * 16, "c" * 16]),
        epoch=epochs,
        is_exempt=st.booleans(),
        is_whole=st.booleans(),
    )
    def adopt_epoch(self, fingerprint: str, nonce: str, epoch: int, is_exempt: bool, is_whole: bool = True) -> None:
        adopted = self.scripts.adopt_epoch(fingerprint, nonce, epoch, LANES, is_exempt=is_exempt, is_whole=is_whole)
        self.do(adopted)

    @rule(previous=fingerprints, fingerprint=fingerprints, nonce=st.sampled_from(["a" * 16, "b" * 16]), epoch=epochs)
    def rebind_epoch(self, previous: str, fingerprint: str, nonce: str, epoch: int) -> None:
        fence = Fence(previous, nonce, epoch, LANES)
        self.do(self.scripts.rebind_epoch(fence, fingerprint))

    @rule(fingerprint=fingerprints, epoch=epochs)
    def forget_epoch(self, fingerprint: str, epoch: int) -> None:
        self.do(self.scripts.forget_epoch(Life(fingerprint, epoch, LANES)))

    @rule(fingerprint=fingerprints, epoch=epochs, us=st.sampled_from([1_000_000, 5_000_000, 31_000_000]))
    def unheard(self, fingerprint: str, epoch: int, us: int) -> None:
        self.do(self.scripts.unheard(Life(fingerprint, epoch, LANES)))
        self.pass_time(us)

    @rule(
        quota=st.sampled_from(QUOTAS),
        costs=st.lists(st.integers(1, 9), min_size=1, max_size=4),
        times=st.sampled_from([1, 3]),
        passed_ms=st.sampled_from([0, 3_000, 8_000_000]),
    )
    def overdraw(self, quota: str, costs: list[int], times: int, passed_ms: int) -> None:
        """Of a lease that is nearly spent, or expired, while the region is cut off."""
        life, first_last = Life("life-1", 7, LANES), PERIODS["2026-11"]
        self.adopt_epoch("life-1", at_once(self.scripts.read_fence()).nonce or "", 7, False)
        lease = LeaseReply(
            quota=quota,
            period="2026-11",
            granted=5,
            overage=0,
            limit=100,
            unallocated=0,
            starts_in_ms=0,
            expires_in_ms=7_200_000,
            ends_in_ms=9_000_000,
            refresh_in_ms=1,
            first_minute=first_last[0],
            last_minute=first_last[1],
            overdraft=15,
        )
        self.settle("life-1", 7, lane_of(quota, LANES), None, [lease], 0)
        self.unheard("life-1", 7, 5_000_000)
        self.unheard("life-1", 7, 0)
        self.pass_time(passed_ms * 1000)
        self.unheard("life-1", 7, 0)
        before = self.both.model.hash(self.both.model.fence).get("overdrawn", "0")
        charges = [AllowanceCharge(quota, cost, 1_000, '{"policy":"export"}') for cost in costs]
        told: list[Any] = []
        asked = [Run(Request("enforce", charges[:2]), times, told.extend)]
        asked += [Run(Request("enforce", [each]), 1, told.extend) for each in charges]
        self.scripts.send_check(life, asked, lambda _: None)
        self.both.compare()
        if self.both.model.hash(self.both.model.fence).get("overdrawn", "0") != before:
            event("overdrawn")

    @rule()
    def end_exemption(self) -> None:
        self.do(self.scripts.end_exemption())

    @rule(
        fingerprint=fingerprints,
        epoch=epochs,
        mode=st.sampled_from(["enforce", "enforce", "peek", "adjust", "peek_adjust"]),
        charges=st.lists(st.one_of(allowances, rates()), min_size=1, max_size=3),
        operation=st.one_of(st.none(), st.none(), operations),
    )
    def check(
        self, fingerprint: str, epoch: int, mode: str, charges: list[Charge], operation: Operation | None
    ) -> None:
        self.do(self.scripts.check(Life(fingerprint, epoch, LANES), mode, charges, operation))

    @rule(charges=st.lists(st.one_of(slots, slots, rates()), min_size=1, max_size=2))
    def peek_at_slots(self, charges: list[Charge]) -> None:
        self.do(self.scripts.check(Life("life-1", 7, LANES), "peek", charges))

    @rule(
        charges=st.lists(st.one_of(slots, rates()), min_size=1, max_size=2), mode=st.sampled_from(["enforce", "adjust"])
    )
    def check_slots(self, charges: list[Charge], mode: str) -> None:
        """Which the doors let come only of slots in shadow."""
        self.do(self.scripts.check(Life("life-1", 7, LANES), mode, charges))

    @rule(
        runs=st.lists(
            st.tuples(st.one_of(requests, requests, returns), st.sampled_from([1, 1, 2, 7])), min_size=1, max_size=5
        )
    )
    def check_many(self, runs: list[tuple[Request, int]]) -> None:
        told: list[Any] = []
        asked = [run for request, times in runs for run in runs_of(request, times, told.extend)]
        self.scripts.send_check(Life("life-1", 7, LANES), asked, lambda _: None)
        assert len(told) == sum(times for _, times in runs)
        self.both.compare()

    @rule(
        quota=st.sampled_from(QUOTAS),
        period=periods,
        granted=st.sampled_from([20, 2_000]),
        overdraft=st.sampled_from([0, 15]),
    )
    def grant(self, quota: str, period: str, granted: int, overdraft: int = 0) -> None:
        """So that there is something to hold."""
        first, last = PERIODS[period]
        self.adopt_epoch("life-1", at_once(self.scripts.read_fence()).nonce or "", 7, False)
        lease = LeaseReply(
            quota=quota,
            period=period,
            granted=granted,
            overage=0,
            limit=granted,
            unallocated=0,
            starts_in_ms=0,
            expires_in_ms=7_200_000,
            ends_in_ms=7_200_000,
            refresh_in_ms=1,
            first_minute=first,
            last_minute=last,
            overdraft=overdraft,
        )
        self.settle("life-1", 7, lane_of(quota, LANES), None, [lease], 0)

    @rule(
        charges=st.lists(st.one_of(small_allowances, slots), min_size=1, max_size=2),
        others=st.lists(st.one_of(allowances, rates(), slots), max_size=1),
        period=st.one_of(st.none(), periods),
        ttl_ms=ttls_ms,
        digest=st.sampled_from(["", "d1", "d2", "h1", "h2", "h3", "h4"]),
        body=st.sampled_from(["hold-1", "hold-1", "hold-2"]),
        mode=st.sampled_from(["hold", "hold", "hold_adjust"]),
    )
    def set_aside(
        self,
        charges: list[Charge],
        others: list[Charge],
        period: str | None,
        ttl_ms: int,
        digest: str,
        body: str,
        mode: str,
    ) -> None:
        if period is not None and isinstance(charges[0], AllowanceCharge):
            self.grant(charges[0].quota, period, 2_000)
        charges = charges + others
        told: list[Any] = []
        operation = Operation(digest, body, 3_600_000) if digest else None
        request = Request(mode, charges, operation, hold_of(charges, ttl_ms))
        self.scripts.send_check(Life("life-1", 7, LANES), [Run(request, 1, told.extend)], lambda _: None)
        self.both.compare()
        held = getattr(told[0], "hold", None)
        if held is not None and held.id.parts:
            event("held")
            self.holds.append(held.id)

    @rule(words=st.lists(st.tuples(st.integers(0, 1_000), fingerprints, words, pauses_us), min_size=1, max_size=8))
    def tell_holds(self, words: list[tuple[int, str, tuple[str, int], int]]) -> None:
        """Late ones as well, and more than once."""
        for chosen, fingerprint, (action, amount), pause_us in words if self.holds else ():
            self.pass_time(pause_us)
            hold = self.holds[-1 - chosen % min(4, len(self.holds))]
            told = self.do(self.scripts.tell_hold(fingerprint, hold, action, amount))
            event("no answer" if told is None else f"{told.outcome} {told.state}")

    @rule(fingerprint=fingerprints, epoch=epochs, lane=st.integers(0, LANES - 1))
    def freeze(self, fingerprint: str, epoch: int, lane: int) -> None:
        mine = [quota for quota in QUOTAS if lane_of(quota, LANES) == lane]
        self.do(self.scripts.freeze(Life(fingerprint, epoch, LANES), lane, mine))

    @rule(
        fingerprint=fingerprints,
        epoch=epochs,
        lane=st.integers(0, LANES - 1),
        seq=st.one_of(st.none(), st.none(), st.integers(1, 3)),
        leases=st.lists(lease_replies(), max_size=3),
        late_us=st.integers(0, 10_000_000),
    )
    def settle(
        self,
        fingerprint: str,
        epoch: int,
        lane: int,
        seq: int | None,
        leases: list[LeaseReply],
        late_us: int,
    ) -> None:
        """With the number of the batch that waits, or with another."""
        life = Life(fingerprint, epoch, LANES)
        seq = seq or at_once(self.scripts.frozen_seq(life, lane)) or 1
        mine = [lease for lease in leases if lane_of(lease.quota, LANES) == lane]
        reply = ExchangeReply(lane=lane, seq=seq, outcome=ExchangeOutcome.APPLIED, leases=mine)
        sent_us = max(0, at_once(self.scripts.mono_us()) - late_us)
        self.do(self.scripts.settle(life, lane, sent_us, reply))

    @rule(
        fingerprint=fingerprints,
        epoch=epochs,
        agent=st.sampled_from(["one", "two"]),
        wants=st.lists(rate_wants, min_size=1, max_size=3, unique_by=lambda want: want.quota),
    )
    def report_rates(self, fingerprint: str, epoch: int, agent: str, wants: list[RateWant]) -> None:
        self.do(self.scripts.report_rates(Life(fingerprint, epoch, LANES), agent, wants))

    @rule(
        fingerprint=fingerprints,
        epoch=epochs,
        shares=st.lists(st.tuples(safe_rates, rate_shares), min_size=1, max_size=3),
        late_us=st.sampled_from([0, 0, 1_000_000, 5_000_000, 5_000_001]),
    )
    def share_rates(self, fingerprint: str, epoch: int, shares: list[tuple[Rate, RateShare]], late_us: int) -> None:
        sent_us = max(0, at_once(self.scripts.mono_us()) - late_us)
        self.do(self.scripts.share_rates(Life(fingerprint, epoch, LANES), sent_us, shares))

    @rule(
        fingerprint=fingerprints,
        epoch=epochs,
        agent=st.sampled_from(["one", "two"]),
        wants=st.lists(slot_wants, min_size=1, max_size=2, unique_by=lambda want: want.slots.quota),
    )
    def report_slots(self, fingerprint: str, epoch: int, agent: str, wants: list[SlotWant]) -> None:
        self.do(self.scripts.report_slots(Life(fingerprint, epoch, LANES), agent, wants))

    @rule(
        fingerprint=fingerprints,
        epoch=epochs,
        shares=st.lists(slot_shares, min_size=1, max_size=3),
        late_us=st.sampled_from([0, 0, 1_000_000, 5_000_000, 5_000_001]),
    )
    def share_slots(self, fingerprint: str, epoch: int, shares: list[SlotShare], late_us: int) -> None:
        sent_us = max(0, at_once(self.scripts.mono_us()) - late_us)
        self.do(self.scripts.share_slots(Life(fingerprint, epoch, LANES), sent_us, shares))

    @rule(fingerprint=fingerprints, epoch=epochs, quota=st.sampled_from(QUOTAS), keep=units, ahead=st.booleans())
    def give_back(self, fingerprint: str, epoch: int, quota: str, keep: int, ahead: bool) -> None:
        self.do(self.scripts.give_back(Life(fingerprint, epoch, LANES), quota, keep, ahead=ahead))

    @rule(epoch=epochs)
    def look(self, epoch: int) -> None:
        life = Life("life-1", epoch, LANES)
        at_once(self.scripts.read_fence())
        at_once(self.scripts.leased(life))
        at_once(self.scripts.older_epochs(life))
        at_once(self.scripts.seqs(epoch, LANES))
        at_once(self.scripts.held(life))
        for lane in range(LANES):
            at_once(self.scripts.dirty(life, lane, 100))

    def teardown(self) -> None:
        self.wire.close()


def test_the_model_answers_and_remembers_what_a_store_does(store_server: Server) -> None:
    Store.server = store_server
    run_state_machine_as_test(
        Store,
        settings=settings(
            max_examples=60,
            phases=[Phase.generate],
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    embedded.ask_store(store_server.port, store_server.password, "FLUSHALL")


def test_the_scripts_have_no_other_clock() -> None:
    """Else the test above would compare two clocks."""
    for name, source in sources().items():
        assert source.count(NOW) == source.count(b"TIME'"), name


def test_the_model_knows_every_script_and_every_algorithm() -> None:
    for name in sources():
        assert callable(getattr(StoreModel, name, None)), name
    assert set(ALGORITHMS) == {path.stem for path in LUA.glob("algorithms/*.lua")}
