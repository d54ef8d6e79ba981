"""The simulation's stand-in for Redis and a real store get the same commands and scripts, and have equal replies and
keys. The simulation relies on these tests. Both run the same Lua; everything below it is compared: commands,
conversions between Lua and Redis, libraries, and what a script may not do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.store import keys
from regional_agent.store.connection import Argument, OnReply, StoreError
from regional_agent.store.scripts import Scripts
from regional_agent.store.sources import shipped_library
from regional_agent.store.types import (
    Charge,
    Operation,
    RateCharge,
    RequestRun,
    SlotCharge,
    StoreIncarnation,
    StoreRequest,
    hold_part,
)
from tests.budget import cases, examples
from tests.conftest import Server
from tests.lua.wire import FAR_MS, NOW, Wire, as_pairs, at_once
from tests.simulation.faults import REGIONS, draw
from tests.simulation.run import run
from tests.simulation.simulated.redis_lua import interpreter
from tests.simulation.simulated.scripted_store import LocalConnection, ScriptedStore

# Returns the reply of a command, or the kind of its error.
ASK = """
local is_done, reply = pcall(redis.call, ARGV[1], KEYS[1], unpack(ARGV, 2))
local fault = not is_done and (type(reply) == 'table' and reply.err or tostring(reply))
if fault then return {'fault', string.match(fault, 'WRONGTYPE') or 'other'} end
return {type(reply), reply}
"""
QUICK = settings(
    max_examples=examples(150),
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(scope="module")
def wire(store_server: Server) -> Iterator[Wire]:
    with closing(Wire(store_server)) as wire:
        yield wire
        wire.ask("FLUSHALL")


def both(wire: Wire, store: ScriptedStore, source: str, keys: Sequence[str] = (), argv: Sequence[str] = ()) -> Any:
    """Run a script in both; return their replies, or the first words of their errors."""
    replies = list[Any]()
    asking: list[Callable[[], Any]] = [
        lambda: wire.ask("EVAL", source, len(keys), *keys, *argv),
        lambda: interpreter().run(source, store._command, keys, argv),
    ]
    for ask in asking:
        try:
            replies.append(ask())
        except StoreError:
            replies.append("refused")
    return replies


def assert_equal_keys(wire: Wire, store: ScriptedStore) -> None:
    assert wire.names() == {key.encode("latin-1") for key in store.data}
    for name in wire.names():
        key = name.decode("latin-1")
        assert wire.state(name) == _as_bytes(store, key), key
        is_kept = store.ttl_ms(key) < 0
        assert (wire.forgets_in_ms(name) < 0) == is_kept, key


def _as_bytes(store: ScriptedStore, key: str) -> Any:
    value = store.data[key]
    if isinstance(value, dict):
        ranked = store.execute("ZRANGE", key, 0, -1, "WITHSCORES") if type(value) is not dict else None
        return as_pairs(store.execute("HGETALL", key) if ranked is None else ranked)
    encoded = [each.encode("latin-1") for each in ([value] if isinstance(value, str) else value)]
    return encoded[0] if isinstance(value, str) else encoded


# --- commands ---------------------------------------------------------------------------------------------------------

words = st.sampled_from(["a", "b", "c", "9", "\xff\x00"])
whole = st.sampled_from(["-3", "-1", "0", "1", "2", "9007199254740991"])
scores = st.sampled_from(["0", "-1.5", "3", "3", "1700000000000001", "1e300"])
commands = st.one_of(
    st.tuples(st.just("HSET"), words, words),
    st.tuples(st.sampled_from(["HGET", "HEXISTS", "HDEL", "ZSCORE", "ZREM", "RPUSH"]), words),
    st.tuples(st.sampled_from(["HMGET", "HDEL", "RPUSH"]), words, words, words),
    st.tuples(st.sampled_from(["HGETALL", "EXISTS", "DEL", "GET"])),
    st.tuples(st.just("HINCRBY"), words.filter(str.isalpha), whole),
    st.tuples(st.just("SET"), words, st.just("PX"), st.just(str(FAR_MS))),
    st.tuples(st.just("PEXPIRE"), st.just(str(FAR_MS))),
    st.tuples(st.just("ZADD"), scores, words),
    st.tuples(st.sampled_from(["ZRANGE", "LRANGE", "LTRIM", "ZREMRANGEBYRANK"]), whole, whole),
    st.tuples(st.just("ZRANGE"), whole, whole, st.just("WITHSCORES")),
    st.tuples(st.just("ZCOUNT"), st.sampled_from(["-inf", "(0", "3"]), st.sampled_from(["+inf", "3", "(3"])),
    st.tuples(st.just("ZRANGEBYSCORE"), st.sampled_from(["-inf", "(0", "3"]), st.sampled_from(["+inf", "3", "(3"])),
    st.tuples(st.just("ZRANGEBYSCORE"), st.just("-inf"), scores, st.just("LIMIT"), st.just("0"), st.just("2")),
)


@QUICK
@given(asked=st.lists(st.tuples(st.sampled_from(["one", "two", "three"]), commands), min_size=10, max_size=60))
def test_commands_reply_and_write_alike(wire: Wire, asked: list[tuple[str, tuple[str, ...]]]) -> None:
    wire.ask("FLUSHALL")
    store = ScriptedStore()
    for key, command in asked:
        argv = [each.encode("latin-1") for each in command]  # text that is not ASCII is bytes in the real one
        real = wire.ask("EVAL", ASK, 1, key, *argv)
        found = interpreter().run(ASK, store._command, [key], command)
        assert _unordered(command, found) == _unordered(command, real), command
    assert_equal_keys(wire, store)


def _unordered(command: tuple[str, ...], reply: Any) -> Any:
    is_hash = command[0] == "HGETALL" and reply[0] == b"table"
    return as_pairs(reply[1]) if is_hash else reply


@pytest.mark.parametrize(
    "source",
    [
        "return {1.9, -1.9, 'a', false, true, {}, 'b', nil, 'never'}",
        "return nil",
        "return true",
        "return false",
        "return 2^53",
        "return {ok = 'FINE'}",
        "return {err = 'ERR of the script itself'}",
        "error('stop')",
        "error({err = 'ERR stop'})",
        "return redis.call('HGET', KEYS[1], 'nothing') == false and 1 or 0",
        "return redis.call('SET', KEYS[1], 'x').ok",
        "a_global = 1",
        "return a_global",
        "local function f() a_global = 1 end return pcall(f) and 1 or 0",
        "return string.format('%.0f', 2^53 - 1) .. string.format('%.17g', 0.1) .. tostring(2^53)",
        "return struct.pack('<Bi8i8', 7, -1, 2^53 - 1) .. struct.pack('<dI2', 0.5, 65535)",
        "return {struct.unpack('<dI2', struct.pack('<dI2', 12, 7) .. 'rest')}",
        "return {struct.unpack('<Bi8', 'xx' .. struct.pack('<Bi8', 255, -9007199254740991), 3)}",
        "return cjson.encode('a/b\"c\\\\d' .. string.char(0, 1, 8, 9, 10, 12, 13, 31, 127, 195, 164))",
        "local t = {} for i = 1, 5000 do t[i] = redis.call('RPUSH', KEYS[1], i) end "
        "return {#redis.call('LRANGE', KEYS[1], 0, -1), redis.call('LRANGE', KEYS[1], 4999, 4999)[1]}",
        *(
            f"redis.call('HSET', KEYS[1], 'n', {number}) return redis.call('HGET', KEYS[1], 'n')"
            for number in ("1", "-1", "0.5", "0.1", "1e15", "2^53 - 1", "1/3", "1e-7")
        ),
    ],
)
def test_scripts_return_and_fail_alike(wire: Wire, source: str) -> None:
    wire.ask("FLUSHALL")
    real, found = both(wire, ScriptedStore(), source, ["key"])
    assert found == real


def test_the_scripts_have_no_other_clock() -> None:
    """Otherwise the tests below would compare two clocks."""
    source = shipped_library().source.decode()
    assert source.count(NOW) == source.count("TIME'") > 0


# --- the scripts themselves -------------------------------------------------------------------------------------------


class Both(LocalConnection):
    """A store that sends every command to both stores, at the same microsecond, and requires equal replies."""

    def __init__(self, store: ScriptedStore, wire: Wire) -> None:
        super().__init__(store)
        self.fingerprint, self._wire = "both", wire
        store.loaded.add(shipped_library().name)  # as it is in the real one
        self.set_time(store.now_us)

    def set_time(self, now_us: int) -> None:
        """Set both clocks, and expire in the real store what the other one expires."""
        if now_us != self.store.now_us:
            due = dict(self.store.forgets_at_us)
            self.store.now_us = now_us
            self.store._forget_expired()
            for key in due:
                name = key.encode("latin-1")
                if key in self.store.data:
                    self._wire.ask("PEXPIREAT", name, self.store.ttl_ms(key) + FAR_MS)
                else:
                    self._wire.ask("DEL", name)
        self._wire.set_time(now_us)

    def compare(self, *arguments: Argument) -> Any:
        found = self.store.execute(*arguments)
        real = self._wire.ask_on_the_tests_time(*arguments)
        assert _comparable(arguments[0], found) == _comparable(arguments[0], real), arguments
        return found

    async def _ask(self, *arguments: Argument) -> Any:
        return self.compare(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply, durability: object = None) -> None:
        on_reply(self.compare(*arguments))


def _comparable(command: Argument, reply: Any) -> Any:
    """Sort replies whose order has no meaning."""
    if command == "HGETALL":
        return as_pairs(reply)
    return sorted(reply) if command == "SRANDMEMBER" else reply


@pytest.mark.parametrize("seed", cases([0, 1, 3], short=1))
def test_a_store_of_the_simulation_replies_as_a_real_one_does(wire: Wire, seed: int) -> None:
    """Replay all calls of one region's agents in a run on a real store, at the same times, until it loses data."""
    region, asked, is_whole = REGIONS[0], list[tuple[int, tuple[Argument, ...]]](), True
    execute, restore = ScriptedStore.execute, ScriptedStore.restore

    def record(self: ScriptedStore, *arguments: Argument) -> Any:
        is_housekeeping = arguments[0] in ("FUNCTION", "TIME") or keys.LIBRARIES in arguments
        is_one_of_both = arguments[0] not in ("INFO", "CONFIG", "SCAN", "WAIT") and not is_housekeeping
        if is_whole and self.run_id.startswith(region) and is_one_of_both and (arguments[0] != "FCALL" or self.loaded):
            asked.append((self.now_us, arguments))
        return execute(self, *arguments)

    def lose(self: ScriptedStore, snapshot: Any) -> None:
        nonlocal is_whole
        is_whole &= not self.run_id.startswith(region)
        restore(self, snapshot)

    history = [event for event in draw(seed, 80) if not event.kind.startswith("store_forgets")]
    with patch.object(ScriptedStore, "execute", record), patch.object(ScriptedStore, "restore", lose):
        run(seed, 80, history)
    wire.ask("FLUSHALL")
    store = ScriptedStore(now_us=asked[0][0])
    connection = Both(store, wire)
    for now_us, arguments in asked:
        connection.set_time(now_us)
        connection.compare(*arguments)
    assert len({arguments[1] for _, arguments in asked if arguments[0] == "FCALL"}) > 6
    assert_equal_keys(wire, store)


# What the simulation's document does not have: the other algorithms, slots, extreme numbers.
LIFE = StoreIncarnation("life-1", 7, 2)
costs = st.one_of(st.integers(1, 12), st.sampled_from([1000, 2**40, 2**52]))
rates = st.builds(
    lambda algorithm, cost, rate_micro, burst, window_ms: RateCharge(
        f"{algorithm}:tenant=acme", cost, rate_micro, burst, algorithm, window_ms
    ),
    st.sampled_from(["token_bucket", "gcra", "leaky_bucket", "fixed_window", "sliding_window", "sliding_log"]),
    costs,
    st.sampled_from([0, 1, 833, 1_000_000, 10**12]),
    st.sampled_from([0, 1, 10, 900_000]),
    st.sampled_from([1_000, 60_000]),
)
slots = st.builds(
    SlotCharge,
    st.sampled_from(["reports:tenant=acme", "reports:tenant=%C3%A4"]),
    st.integers(1, 4),
    st.sampled_from([0, 3, 5]),
    st.sampled_from([1_000, 90_000]),
    st.booleans(),
    st.sampled_from([-1, 0, 2]),
)
modes = st.sampled_from(["enforce", "peek", "adjust", "hold", "hold"])


@QUICK
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 999, 1_000_000, 61_000_000, -500]),
            modes,
            st.lists(st.one_of(rates, slots), min_size=1, max_size=3),
            st.sampled_from(["commit", "release", "extend", "look"]),
        ),
        min_size=5,
        max_size=25,
    )
)
def test_checks_and_holds_reply_alike(wire: Wire, asked: list[tuple[int, str, list[Charge], str]]) -> None:
    wire.ask("FLUSHALL")
    store = ScriptedStore()
    connection = Both(store, wire)
    scripts = Scripts(connection)
    at_once(scripts.begin_incarnation("life-1", "a" * 16))
    at_once(scripts.adopt_epoch("life-1", "a" * 16, 7, 2))
    for number, (later_us, mode, charges, action) in enumerate(asked):
        connection.set_time(store.now_us + later_us)
        parts = [part for charge in charges if (part := hold_part(charge)) is not None]
        hold = HoldTerms(HoldId.fresh(7, 2, parts), 60_000) if mode == "hold" else None
        operation = Operation(f"o-{number % 7}", "body", 60_000) if hold else None
        scripts.checks.send(
            LIFE, [RequestRun(StoreRequest(mode, charges, operation, hold), 1, lambda _: None)], lambda _: None
        )
        if hold and parts:
            at_once(scripts.update_hold("life-1", hold.id, action, 2))
    assert_equal_keys(wire, store)
