"""A region's store in this process: it runs the scripts of lua/ as they are shipped, on keys that are Python values.

The simulation runs the real agent on it. tests/lua/test_scripted_store.py drives it and a real store with the same
commands and scripts, and demands equal replies and equal keys, so that what holds here holds there.

Text is latin-1: one character for each byte.
"""

import copy
import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from protocol.limits.usage_labels import LABELS
from regional_agent.admission.rules.modes import LOOKS, SETS_ASIDE
from regional_agent.store.check_calls import decode_decisions
from regional_agent.store.connection import Argument, OnReply, StoreConnection, StoreError, StoreUnavailable
from regional_agent.store.durability import NEVER_PROMOTED
from regional_agent.store.opening import Server
from regional_agent.store.sources import assemble_files, shipped_library
from regional_agent.store.types import REASONS, SHADOW, RequestRun, StoreDecision, StoreRequest
from tests.simulation.simulated.redis_lua import ShimError, Status, interpreter, text_of_number

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"

Hash = dict[str, str]


class Sorted(dict[str, float]):
    """A sorted set: scores by member. A type of its own, for a hash is a dict as well."""


class Algorithm(NamedTuple):
    """The number of keys and arguments that one policy takes in a call of check.lua."""

    keys: int
    arguments: int


class Charged(NamedTuple):
    """The key and cost that one policy of a request charges."""

    algorithm: str
    key: str
    cost: int
    arguments: Sequence[str]  # of its algorithm

    @property
    def labels(self) -> str:
        """Return the labels of an allowance's usage line."""
        return _labels_in(self.arguments[2])


class Work(NamedTuple):
    """A part of a hold, which ended."""

    lease: str
    period: str
    part: str
    labels: str


@dataclass
class Replica:
    """The replica of a store: a process that follows it, until it hangs."""

    run_id: str
    offset: int = 0  # of what it has acknowledged
    frozen: tuple[dict[str, Any], dict[str, int]] | None = None  # since it hangs: all that it has


class ScriptedStore:
    """One store: its keys, its clock in microseconds, and the life it lives.

    What a script admitted is told to `note…` the moment it is done, outside of the store's data.
    """

    def __init__(self, run_id: str = "run-1", replid: str = "replid-1", now_us: int = 1_000_000_000_000_000) -> None:
        self.run_id, self.replid, self.now_us = run_id, replid, now_us
        self.is_exempt = False  # it fsyncs every write, and has no replicas
        self.replica: Replica | None = None
        self.links_made = 0  # to replicas
        self.offset, self.former_replid, self.shared_offset = (
            0,
            NEVER_PROMOTED,
            -1,
        )  # of its history, and the one before
        self.eviction = "noeviction"
        self.heard_at_us: int | None = None  # when the coordinator was last heard: nothing that the scripts know
        self.data: dict[str, Any] = {}
        self.forgets_at_us: dict[str, int] = {}
        self.library = shipped_library()
        self.loaded: set[str] = set()  # names of libraries
        self.note: Callable[[str, str, int, bool, str], None] = lambda lease, period, units, is_enforced, labels: None
        self.note_work: Callable[[Work, int, int], None] = lambda work, units, covered: None
        self.note_rate: Callable[[Charged, int], None] = lambda charged, mono_us: None
        self.note_resets: Callable[[Sequence[tuple[int, str]]], None] = lambda resets: None
        self.note_denial: Callable[[str], None] = lambda reason: None
        self.note_overdrawn: Callable[[str, str, int], None] = lambda lease, period, units: None

    # --- a store as such ----------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Copy all that is durable, to `restore` later: a store that goes back to an older state."""
        return {key: copy.copy(value) for key, value in self.data.items()}, dict(self.forgets_at_us)

    def restore(self, snapshot: tuple[dict[str, Any], dict[str, int]]) -> None:
        self.data = {key: copy.copy(value) for key, value in snapshot[0].items()}
        self.forgets_at_us = dict(snapshot[1])

    def restart(self, run_id: str, replid: str) -> None:
        """Begin another incarnation; what the store remembers is the caller's to say."""
        self.run_id, self.replid = run_id, replid
        self.links_made = int(self.replica is not None)
        self.former_replid, self.shared_offset = NEVER_PROMOTED, -1
        self.loaded.clear()

    def execute(self, *arguments: Argument) -> Any:
        """Carry out one command as the agent sends it, and give the reply as the agent reads it."""
        self._forget_expired()
        name, *rest = [_text(each) for each in arguments]
        self.offset += name in ("FCALL", "SET")
        if name == "FCALL":
            return self._call_function(rest)
        return _to_bytes(self._command(name, *rest))

    def _command(self, name: str, *arguments: str) -> Any:
        command = _COMMANDS.get(name)
        if command is None:
            raise ShimError(f"{name} is no command that this store knows")
        return command(self, *arguments)

    def _call_function(self, rest: Sequence[str]) -> Any:
        name = _scripts().get(rest[0])
        if name is None or shipped_library().name not in self.loaded:
            raise StoreError("ERR Function not found")
        count = int(rest[1])
        keys, argv = rest[2 : 2 + count], rest[2 + count :]
        reply = interpreter().call(self.library.source, self.library.functions[name], self._command, keys, argv)
        if name == "check" and isinstance(reply, bytes):
            self._note_decisions(reply, keys, argv)
        elif name == "reset_rates" and reply[0] == b"reset":
            self.note_resets([(int(number), key) for number, key in zip(argv[1:], keys[1::2], strict=True)])
        elif name == "settle" and reply[0] == b"settled" and self.hash(keys[0]).get("epoch") == argv[1]:
            self.heard_at_us = self.now_us
        return reply

    def hash(self, key: str) -> Hash:
        """Give a hash to read; an empty one where the key is missing."""
        value = self.data.get(key)
        if value is None:
            return {}
        if type(value) is not dict:
            raise StoreError(WRONG_TYPE)
        return value

    # --- what really happened -----------------------------------------------------------------------------------------

    def _note_decisions(self, reply: bytes, keys: Sequence[str], argv: Sequence[str]) -> None:
        """Note what check.lua told in this reply, whether or not it arrives."""
        runs = list(_runs_of(keys, argv))
        for run, outcomes in zip(runs, decode_decisions(reply, runs), strict=True):
            for outcome in outcomes:
                if isinstance(outcome, StoreDecision):
                    self._note_decision(outcome, run.request)

    def _note_decision(self, decision: StoreDecision, request: StoreRequest) -> None:
        is_taken = decision.allowed and not decision.replayed and request.mode not in LOOKS | SETS_ASIDE
        for policy, charged in zip(decision.policies, request.charges, strict=True):
            assert isinstance(charged, Charged)
            if policy.code and not decision.replayed:
                self.note_denial(REASONS[policy.code])
            elif is_taken and charged.algorithm == "allowance":
                period = self.hash(charged.key)["period"]
                self.note(charged.key, period, charged.cost, request.mode != "adjust", charged.labels)
            elif is_taken and ":rate:" in charged.key:
                self.note_rate(charged, int(self.hash("lh:fence")["mono"]))

    def _note_hold(self, key: str, part: str, was: str | None, now: str) -> None:
        """Note what a part of a hold came to when it ended, and how much of that had been set aside."""
        state, units, committed, *_, period, dimensions = now.split(" ", 7)
        before = was.split(" ", 1)[0] if was else ""
        if state in (before, "open"):
            return
        set_aside, used = int(units), int(committed)
        work = Work(key.replace(":holds:", ":lease:", 1), period, part, _labels_in(dimensions))
        if state == "charged":
            self.note_work(work, set_aside, set_aside)
        elif before == "charged":
            self.note_work(work, max(used, set_aside), set_aside)
        else:
            self.note_work(work, used, min(used, set_aside) if before == "open" else 0)

    # --- keys and their times -----------------------------------------------------------------------------------------

    def _forget_expired(self) -> None:
        if self.forgets_at_us and min(self.forgets_at_us.values()) <= self.now_us:
            for key in [key for key, at_us in self.forgets_at_us.items() if at_us <= self.now_us]:
                self.delete(key)

    def delete(self, *keys: str) -> int:
        for key in keys:
            self.forgets_at_us.pop(key, None)
        return sum(self.data.pop(key, None) is not None for key in keys)

    def ttl_ms(self, key: str) -> int:
        at_us = self.forgets_at_us.get(key)
        if at_us is None:
            return -1 if key in self.data else -2
        return (at_us - self.now_us) // 1000

    def _expire(self, key: str, ttl_ms: str) -> int:
        if key not in self.data:
            return 0
        self.forgets_at_us[key] = self.now_us + int(ttl_ms) * 1000
        if int(ttl_ms) <= 0:
            self.delete(key)
        return 1

    def _of(self, type_: type[Any], key: str) -> Any:
        """Give a key's value to change, made if it is missing."""
        value = self.data.get(key)
        if value is None:
            value = self.data[key] = type_()
        elif type(value) is not type_:
            raise StoreError(WRONG_TYPE)
        return value

    def _look(self, type_: type[Any], key: str) -> Any:
        """Give a key's value to read; an empty one where it is missing."""
        value = self.data.get(key)
        if value is None:
            return type_()
        if type(value) is not type_:
            raise StoreError(WRONG_TYPE)
        return value

    def _drop_if_empty(self, key: str) -> None:
        if not self.data.get(key, True):
            self.delete(key)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _hget(self, key: str, field: str) -> str | None:
        return self.hash(key).get(field)

    def _hmget(self, key: str, *fields: str) -> list[str | None]:
        found = self.hash(key)
        return [found.get(field) for field in fields]

    def _hgetall(self, key: str) -> list[str]:
        return [text for pair in self.hash(key).items() for text in pair]

    def _hscan(self, key: str, cursor: str, *options: str) -> list[Any]:
        """Scan a hash that does not change between two pages; scripts do nothing else."""
        count = int(options[options.index("COUNT") + 1])
        pairs, first = list(self.hash(key).items()), int(cursor)
        page = [text for pair in pairs[first : first + count] for text in pair]
        return [str(first + count) if first + count < len(pairs) else "0", page]

    def _hexists(self, key: str, field: str) -> int:
        return int(field in self.hash(key))

    def _hset(self, key: str, *pairs: str) -> int:
        found: Hash = self._of(dict, key)
        before = len(found)
        if ":holds:" in key:
            for part, now in zip(pairs[::2], pairs[1::2], strict=True):
                self._note_hold(key, part, found.get(part), now)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def _hdel(self, key: str, *fields: str) -> int:
        found = self.hash(key)
        removed = sum(found.pop(field, None) is not None for field in fields)
        self._drop_if_empty(key)
        return removed

    def _hincrby(self, key: str, field: str, by: str) -> int:
        was = self.hash(key).get(field, "0")
        if not was.lstrip("-").isdecimal():
            raise StoreError("ERR hash value is not an integer")
        total = int(was) + int(by)
        if abs(total) >= 2**63:
            raise StoreError("ERR increment or decrement would overflow")
        found: Hash = self._of(dict, key)
        found[field] = str(total)
        if field == "overdrawn" and ":lease:" in key:
            self.note_overdrawn(key, found["period"], int(by))
        return total

    def _exists(self, *keys: str) -> int:
        return sum(key in self.data for key in keys)

    def _get(self, key: str) -> str | None:
        return self._look(str, key) if key in self.data else None

    def _set(self, key: str, value: str, *options: str) -> str | None:
        """Set a string, with `PX` and `NX` as options."""
        if "NX" in options and key in self.data:
            return None
        self.data[key] = value
        self.forgets_at_us.pop(key, None)
        if "PX" in options:
            self._expire(key, options[options.index("PX") + 1])
        return Status("OK")

    def _zadd(self, key: str, score: str, member: str) -> int:
        found: Sorted = self._of(Sorted, key)
        is_new = member not in found
        found[member] = float(score)
        return int(is_new)

    def _zscore(self, key: str, member: str) -> str | None:
        score = self._look(Sorted, key).get(member)
        return None if score is None else text_of_number(score)

    def _zcount(self, key: str, low: str, high: str) -> int:
        return sum(_within(score, low, high) for score in self._look(Sorted, key).values())

    def _zrem(self, key: str, *members: str) -> int:
        found = self._look(Sorted, key)
        removed = sum(found.pop(member, None) is not None for member in members)
        self._drop_if_empty(key)
        return removed

    def _ranked(self, key: str) -> list[tuple[float, str]]:
        return sorted((score, member) for member, score in self._look(Sorted, key).items())

    def _zrange(self, key: str, first: str, last: str, *with_scores: str) -> list[str]:
        found = self._look(Sorted, key)
        if found and first == last == "0":  # the most frequent question by far
            ranked: Sequence[tuple[float, str]] = [min((score, member) for member, score in found.items())]
        else:
            ranked = _between(self._ranked(key), first, last)
        return [
            text for score, member in ranked for text in ((member, text_of_number(score)) if with_scores else (member,))
        ]

    def _zrangebyscore(self, key: str, low: str, high: str, *limit: str) -> list[str]:
        found = self._look(Sorted, key)
        ranked = heapq.nsmallest(
            len(found), ((score, member) for member, score in found.items() if _within(score, low, high))
        )
        names = [member for _, member in ranked]
        if limit:
            offset, count = int(limit[1]), int(limit[2])
            return names[offset : offset + count] if count >= 0 else names[offset:]
        return names

    def _zremrangebyrank(self, key: str, first: str, last: str) -> int:
        return self._zrem(key, *(member for _, member in _between(self._ranked(key), first, last)))

    def _rpush(self, key: str, *values: str) -> int:
        found: list[str] = self._of(list, key)
        found.extend(values)
        return len(found)

    def _lrange(self, key: str, first: str, last: str) -> list[str]:
        return list(_between(self._look(list, key), first, last))

    def _ltrim(self, key: str, first: str, last: str) -> str:
        found = self._look(list, key)
        found[:] = _between(found, first, last)
        self._drop_if_empty(key)
        return Status("OK")

    def _time(self) -> list[str]:
        return [str(self.now_us // 1_000_000), str(self.now_us % 1_000_000)]

    def _scan(self, _cursor: str, _match: str, pattern: str, *_count: str) -> list[Any]:
        before, _, after = pattern.removesuffix("*").partition("*")
        return ["0", [key for key in self.data if key.startswith(before) and after in key]]

    def _info(self, *sections: str) -> str:
        texts = {
            "server": f"run_id:{self.run_id}",
            "replication": self._replication(),
            "stats": f"sync_full:{self.links_made}\r\nsync_partial_ok:0",
            "cluster": "cluster_enabled:0",
            "memory": f"maxmemory_policy:{self.eviction}",
        }
        return "".join(f"# {section}\r\n{texts[section]}\r\n" for section in sections or texts)

    def _replication(self) -> str:
        each = self.replica
        link = f"slave0:ip=replica,port=1,state=online,offset={each.offset},lag=0\r\n" if each else ""
        return (
            f"role:master\r\nconnected_slaves:{int(each is not None)}\r\n{link}master_replid:{self.replid}\r\n"
            f"master_replid2:{self.former_replid}\r\nmaster_repl_offset:{self.offset}\r\n"
            f"second_repl_offset:{self.shared_offset + 1}\r\nrepl_backlog_active:{int(each is not None)}"
        )

    def describe_replica(self) -> bytes:
        """Return what the replica says of itself. Raise StoreUnavailable if it hangs."""
        if self.replica is None or self.replica.frozen is not None:
            raise StoreUnavailable("the replica does not answer")
        link = f"role:slave\r\nmaster_replid:{self.replid}\r\nmaster_link_status:up"
        return f"run_id:{self.replica.run_id}\r\n{link}\r\n".encode()

    def _wait(self, *_: str) -> int:
        """Let the replica acknowledge all that was written, unless it hangs."""
        if self.replica is None or self.replica.frozen is not None:
            return 0
        self.replica.offset = self.offset
        return 1

    def _config(self, _get: str, *names: str) -> list[str]:
        values = {
            "appendonly": "yes",
            "appendfsync": "always" if self.is_exempt else "everysec",
            "no-appendfsync-on-rewrite": "no",
        }
        return [text for name in names for text in (name, values[name])]

    def _function(self, command: str, *arguments: str) -> Any:
        if command == "LIST":
            return [["library_name", name] for name in sorted(self.loaded)]
        assert command == "LOAD"
        name = arguments[0].partition("\n")[0].removeprefix("#!lua name=")
        if name in self.loaded:
            raise StoreError(f"ERR Library '{name}' already exists")
        self.loaded.add(name)
        return name

    def _waitaof(self, *_: str) -> list[Any]:
        return [int(self.is_exempt), 0]


_COMMANDS: dict[str, Callable[..., Any]] = {
    "DEL": ScriptedStore.delete,
    "PTTL": ScriptedStore.ttl_ms,
    "PEXPIRE": ScriptedStore._expire,
}
_COMMANDS |= {
    name.upper(): getattr(ScriptedStore, f"_{name}")
    for name in (
        *(
            "wait",
            "waitaof",
            "function",
            "hget",
            "hmget",
            "hgetall",
            "hscan",
            "hexists",
            "hset",
            "hdel",
            "hincrby",
            "exists",
            "get",
            "set",
        ),
        *(
            "zadd",
            "zscore",
            "zcount",
            "zrem",
            "zrange",
            "zrangebyscore",
            "zremrangebyrank",
            "rpush",
            "lrange",
            "ltrim",
        ),
        *("time", "scan", "info", "config"),
    )
}


def _labels_in(dimensions: str) -> str:
    labels: str = json.loads(dimensions).get(LABELS, "") if LABELS in dimensions else ""
    return labels


def _text(argument: Argument) -> str:
    if type(argument) is bytes:
        return argument.decode("latin-1")
    text = str(argument)
    return text if text.isascii() else text.encode().decode("latin-1")


def _to_bytes(reply: Any) -> Any:
    if isinstance(reply, str):
        return reply.encode("latin-1")
    return [_to_bytes(each) for each in reply] if isinstance(reply, list) else reply


def _between(values: Sequence[Any], first: str, last: str) -> Sequence[Any]:
    """Slice as Redis does: both ends are included, and a negative one counts from the end."""
    start, stop = int(first), int(last)
    start = max(0, start + len(values)) if start < 0 else start
    stop = stop + len(values) if stop < 0 else stop
    return values[start : stop + 1] if stop >= 0 else values[:0]


def _within(score: float, low: str, high: str) -> bool:
    above = score > float(low[1:]) if low.startswith("(") else score >= float(low)
    below = score < float(high[1:]) if high.startswith("(") else score <= float(high)
    return above and below


# --- scripts ----------------------------------------------------------------------------------------------------------


@cache
def _scripts() -> Mapping[str, str]:
    return {function: name for name, function in shipped_library().functions.items()}


@cache
def _algorithm(name: str) -> Algorithm:
    """Read from the algorithm itself how many keys and arguments it takes."""
    chunk = (
        "local files, results = {}, {}\n"
        "local function require(name) results[name] = results[name] or files[name]() return results[name] end\n"
        f"{assemble_files()}return require('algorithms/*')[...]"
    )
    found = interpreter().evaluate(chunk.encode().decode("latin-1"), name)
    return Algorithm(found["keys"], found["arguments"])


def _runs_of(keys: Sequence[str], argv: Sequence[str]) -> Iterator[RequestRun]:
    """Read the requests of a call of check.lua, as its header describes them."""
    key, at = 1, 3
    for _ in range(int(argv[2])):
        mode, times, count, operation = argv[at : at + 4]
        is_hold = mode in SETS_ASIDE
        key, at = key + bool(operation), at + 4 + bool(operation) + 3 * is_hold
        charges: list[Any] = []
        for _ in range(int(count)):
            name = argv[at].removeprefix(SHADOW)
            end = at + 2 + _algorithm(name).arguments
            charges.append(Charged(name, keys[key], int(argv[at + 1]), argv[at + 2 : end]))
            key, at = key + _algorithm(name).keys, end
        held: Any = True if is_hold else None
        yield RequestRun(StoreRequest(mode, charges, None, held), int(times), lambda _: None)


# --- connections ------------------------------------------------------------------------------------------------------


class LocalConnection(StoreConnection):
    """The real connection's rules on a store in this process: it reads the fingerprint before anything else."""

    def __init__(self, store: ScriptedStore, on_connected: Callable[[], None] = lambda: None) -> None:
        super().__init__(Server.at("redis://local:1"), timeout_ms=1_000, on_connected=on_connected)
        self.store = store
        self.reachable = True

    async def _ask(self, *arguments: Argument) -> Any:
        if not self.reachable:
            raise StoreUnavailable("the store cannot be reached")
        self.calls += 1
        return self.store.execute(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply, durability: object = None) -> None:
        try:
            reply = self.store.execute(*arguments)
        except StoreError as error:
            reply = error
        on_reply(reply)

    async def connect(self) -> None:
        """Connect anew; the caller says when, for there is no keeper here."""
        await self._greet()
        self._on_connected()

    def lose(self) -> None:
        self._on_lost()
