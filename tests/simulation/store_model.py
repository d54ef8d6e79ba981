"""A region's store in plain Python: every script of lua/, same arguments, same answers, same state, its own clock.

The simulation runs the real agent on it; tests/lua/test_model.py drives it and a real store with the same commands and
demands equal answers and equal state, so that what holds here holds there.

The model speaks the few commands that the agent uses, so the real `Scripts` runs on it unchanged: names of keys and the
order of arguments are not written down a second time. One method is one script; a mutant overrides one.
"""

import copy
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from regional_agent.domain.modes import BEYOND_LIMITS, LOOKS, SETS_ASIDE
from regional_agent.store.connection import Argument, OnReply, StoreConnection, StoreError, StoreUnavailable
from regional_agent.store.scripts import REASONS, SHADOW, Scripts
from regional_agent.store.sources import digests
from tests.simulation.algorithms_model import (
    ALGORITHMS,
    PARTS,
    Algorithm,
    GivenShare,
    State,
    beyond,
    give_rate,
    level,
    read_rate,
)
from tests.simulation.holds_model import MAY_BECOME, OVER, Holds, Part, Place, read_was, write_was
from tests.simulation.slots_model import Place as SlotPlace
from tests.simulation.slots_model import Slot, Slots, SlotsGiven

POLICY_BYTES = 57
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NEXT = "next:"
HOLDING = (ALGORITHMS["allowance"], ALGORITHMS["concurrency"])
MOST_LEASES = 400
CUT_OFF_US, FORGOTTEN_US = 5_000_000, 30_000_000

Hash = dict[str, str]
Value = Hash | set[str] | list[Any]  # a hash, a set, or a packed string: a rate, or what an operation was answered
Names = Sequence[str]


class Policy(NamedTuple):
    """What one policy of a request asks for."""

    algorithm: Algorithm
    names: Names
    arguments: Names
    cost: int
    is_shadow: bool


class Hold(NamedTuple):
    """What a request would like to hold."""

    id: str
    name: str
    due: int


class Kept(NamedTuple):
    """An operation: its body, and where and for how long it is remembered."""

    body: str
    record: str
    remembered_ms: int


class StoreModel:
    """One store: its data, its clock in microseconds, and the life it lives."""

    def __init__(self, run_id: str = "run-1", replid: str = "replid-1", now_us: int = 1_000_000_000_000_000) -> None:
        self.run_id, self.replid, self.now_us = run_id, replid, now_us
        self.is_exempt = False  # it fsyncs every write, and has no replicas
        self.lost_at: int | None = None  # of the fence that was read last
        self.fence = ""  # likewise
        self.heard_at_us: int | None = None  # the coordinator, last: nothing that the scripts know
        self.data: dict[str, Value] = {}
        self.forgets_at_us: dict[str, int] = {}
        self.note: Callable[[str, str, int, bool], None] = lambda lease, period, units, is_enforced: None
        self.note_work: Callable[[str, str, str, int, int], None] = lambda lease, period, part, units, covered: None
        self.note_denial: Callable[[str], None] = lambda reason: None
        self.note_overdrawn: Callable[[str, str, int], None] = lambda lease, period, units: None
        self._names = {digest: name for name, digest in digests().items()}

    # --- a store as such ---------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Value], dict[str, int]]:
        """All that is durable, to `restore` later: a store that goes back to an older state."""
        return copy.deepcopy((self.data, self.forgets_at_us))

    def restore(self, snapshot: tuple[dict[str, Value], dict[str, int]]) -> None:
        self.data, self.forgets_at_us = copy.deepcopy(snapshot)

    def restart(self, run_id: str, replid: str) -> None:
        """Another life; what it remembers is the caller's to say."""
        self.run_id, self.replid = run_id, replid

    def execute(self, *arguments: Argument) -> Any:
        """One command, as the agent sends it, and the store's reply."""
        if self.forgets_at_us:
            self._forget()
        name, *rest = [each.decode() if type(each) is bytes else str(each) for each in arguments]
        if name in ("EVALSHA", "EVAL"):
            return self._evaluate(name, rest)
        command: Callable[..., Any] | None = getattr(self, f"_do_{name.lower()}", None)
        if command is None:
            raise StoreError(f"ERR the model knows no command {name}")
        return command(*rest)

    def _evaluate(self, command: str, rest: list[str]) -> Any:
        sha = rest[0] if command == "EVALSHA" else hashlib.sha1(rest[0].encode()).hexdigest()
        if sha not in self._names:
            raise StoreError("NOSCRIPT No matching script.")
        count = int(rest[1])
        script: Callable[[Names, Names], Any] = getattr(self, self._names[sha])
        return script(rest[2 : 2 + count], rest[2 + count :])

    def _forget(self) -> None:
        if min(self.forgets_at_us.values()) <= self.now_us:
            for key in [key for key, at_us in self.forgets_at_us.items() if at_us <= self.now_us]:
                self._delete(key)

    def _delete(self, key: str) -> None:
        self.data.pop(key, None)
        self.forgets_at_us.pop(key, None)

    def hash(self, key: str) -> Hash:
        """To read; an empty one where the key is missing."""
        value = self.data.get(key, {})
        assert isinstance(value, dict)
        return value

    def _write(self, key: str, fields: Hash) -> None:
        self.data[key] = self.hash(key) | fields

    def _remove(self, key: str, *fields: str) -> int:
        value = self.hash(key)
        removed = sum(value.pop(field, None) is not None for field in fields)
        if not value:
            self._delete(key)
        return removed

    def members(self, key: str) -> set[str]:
        value = self.data.get(key, set())
        assert isinstance(value, set)
        return value

    def _add(self, key: str, member: str) -> None:
        self.data[key] = self.members(key) | {member}

    def _discard(self, key: str, member: str) -> None:
        self.members(key).discard(member)
        if not self.members(key):
            self._delete(key)

    def ttl_ms(self, key: str) -> int:
        at_us = self.forgets_at_us.get(key)
        return -1 if at_us is None else (at_us - self.now_us) // 1000

    def _expire(self, key: str, ttl_ms: int) -> None:
        self.forgets_at_us[key] = self.now_us + ttl_ms * 1000
        if ttl_ms <= 0:
            self._delete(key)

    def _do_info(self, section: str) -> bytes:
        texts = {
            "server": f"run_id:{self.run_id}",
            "replication": f"role:master\r\nconnected_slaves:0\r\nmaster_replid:{self.replid}\r\n"
            "master_replid2:000\r\nrepl_backlog_active:0",
            "cluster": "cluster_enabled:0",
        }
        return f"# {section}\r\n{texts[section]}\r\n".encode()

    def _do_config(self, _: str, *names: str) -> list[bytes]:
        values = {
            "maxmemory-policy": "noeviction",
            "appendonly": "yes",
            "appendfsync": "always" if self.is_exempt else "everysec",
            "no-appendfsync-on-rewrite": "no",
        }
        return [text.encode() for name in names for text in (name, values[name])]

    def _do_hget(self, key: str, field: str) -> bytes | None:
        return _bytes(self.hash(key).get(field))

    def _do_hmget(self, key: str, *fields: str) -> list[bytes | None]:
        return [_bytes(self.hash(key).get(field)) for field in fields]

    def _do_hgetall(self, key: str) -> list[bytes]:
        return [text.encode() for pair in self.hash(key).items() for text in pair]

    def _do_hset(self, key: str, *pairs: str) -> int:
        before = len(self.hash(key))
        self._write(key, dict(zip(pairs[::2], pairs[1::2], strict=True)))
        return len(self.hash(key)) - before

    def _do_set(self, key: str, value: str, _px: str, kept_ms: str, *only_new: str) -> bytes | None:
        if only_new and key in self.data:
            return None
        self.data[key] = [value, b""] if only_new else ["probe"]
        self._expire(key, int(kept_ms))
        return b"OK"

    def _do_hdel(self, key: str, *fields: str) -> int:
        return self._remove(key, *fields)

    def _do_srandmember(self, key: str, count: str) -> list[bytes]:
        return [member.encode() for member in sorted(self.members(key))[: int(count)]]

    def _do_scan(self, _cursor: str, _match: str, pattern: str, _count: str, _many: str) -> list[Any]:
        before, _, after = pattern.removesuffix("*").partition("*")
        return [b"0", [key.encode() for key in self.data if key.startswith(before) and after in key]]

    # --- the scripts ---------------------------------------------------------------------------------------------

    def _tick(self, fence: str) -> int:
        """The store's clock, which never goes back."""
        f = self.hash(fence)
        elapsed_us = self.now_us - int(f["last"]) if "last" in f else None
        mono = int(f.get("mono", 0)) + max(0, elapsed_us or 0)
        if elapsed_us is None or not 0 <= elapsed_us < 1000:
            self._write(fence, {"mono": str(mono), "last": str(self.now_us)})
        self.lost_at, self.fence = int(f["lost_at"]) if "lost_at" in f else None, fence
        return mono

    def _is_old(self, at: str | None, mono: int) -> bool:
        return at is None or mono - int(at) > FORGOTTEN_US

    def is_cut_off(self, mono: int) -> bool:
        f = self.hash(self.fence)
        at, since = f.get("unheard_at"), f.get("unheard_since")
        return not self._is_old(at, mono) and since is not None and mono - int(since) >= CUT_OFF_US

    def unheard(self, keys: Names, argv: Names) -> list[Any]:
        if self.is_fenced(keys[0], argv[0], argv[1]):
            return [b"fenced"]
        mono, f = self._tick(keys[0]), self.hash(keys[0])
        since = str(mono) if self._is_old(f.get("unheard_at"), mono) else f["unheard_since"]
        self._write(keys[0], {"unheard_since": since, "unheard_at": str(mono)})
        return [b"noted", int(self.is_cut_off(mono)), int(f.get("overdrawn", 0))]

    def begin_life(self, keys: Names, argv: Names) -> list[bytes | None]:
        fence = self.hash(keys[0])
        if fence.get("fingerprint") != argv[0] or fence.get("nonce") == argv[2]:
            epoch = fence.get("epoch")
            self._write(keys[0], {"fingerprint": argv[0], "nonce": argv[1]})
            self._remove(keys[0], "epoch", "lanes", "whole", "exempt")
            if argv[3] and argv[3] == epoch:
                self._write(keys[0], {"whole": epoch})
        return self._do_hmget(keys[0], "fingerprint", "nonce", "epoch", "lanes", "whole", "exempt")

    def adopt_epoch(self, keys: Names, argv: Names) -> int:
        fence = self.hash(keys[0])
        if (fence.get("fingerprint"), fence.get("nonce")) != (argv[0], argv[1]):
            return 0
        self._write(keys[0], {"epoch": argv[2], "lanes": argv[3], "exempt": argv[4]})
        self._remove(keys[0], "whole")
        if argv[5] == "1":
            self._write(keys[0], {"lost_at": str(self._tick(keys[0]))})
        self._write(keys[1], {argv[2]: argv[3]})
        return 1

    def forget_epoch(self, keys: Names, argv: Names) -> int:
        if self.hash(keys[0]).get("fingerprint") != argv[0]:
            return -1
        if any(self.members(dirty) for dirty in keys[2:]):
            return 0
        self._remove(keys[1], argv[1])
        return 1

    def rebind_epoch(self, keys: Names, argv: Names) -> int:
        fence = self.hash(keys[0])
        if fence.get("fingerprint") not in (argv[0], argv[3]):
            return 0
        if (fence.get("nonce"), fence.get("epoch"), fence.get("exempt")) != (argv[1], argv[2], "1"):
            return 0
        self._write(keys[0], {"fingerprint": argv[3]})
        return 1

    def is_fenced(self, fence: str, fingerprint: str, epoch: str) -> bool:
        f = self.hash(fence)
        return (f.get("fingerprint"), f.get("epoch")) != (fingerprint, epoch)

    def give_back(self, keys: Names, argv: Names) -> int:
        fence = self.hash(keys[0])
        if fence.get("fingerprint") != argv[0] or "epoch" not in fence:
            return -1
        mono = self._tick(keys[0])
        self._take_over(keys[1], argv[2], keys[2], mono)
        lease, dirty, lines, holds, due = keys[1:]
        Holds(self, mono).sweep(Place(lease, lines, dirty, holds, due, argv[2]))
        units = 0
        if argv[5] in ("", self.hash(keys[1]).get("period")):
            units = self._return(keys[1], argv[2], keys[2], "", int(argv[3]), int(argv[6] or 2**60))
        if argv[4] == "return":
            units += self._return(keys[1], argv[2], keys[2], NEXT, 0)
        if fence["epoch"] != argv[1] and self.hash(keys[1]):
            self._add(keys[2], argv[2])
        return units

    def _return(self, lease: str, quota: str, dirty: str, prefix: str, keep: int, most: int = 2**60) -> int:
        f = self.hash(lease)
        granted, overage, consumed, returned, held = _totals(f, prefix)
        units = granted + overage - consumed - returned - held - keep
        if units <= 0:
            return 0
        self._write(lease, {f"{prefix}returned": str(returned + units)})
        self._add(dirty, quota)
        return units

    # --- one period gives way to the next ----------------------------------------------------------------------------

    def _take_over(self, lease: str, quota: str, dirty: str, mono: float) -> None:
        """Nothing, unless a lease waits whose period has begun."""
        f = self.hash(lease)
        if f"{NEXT}starts" not in f or mono < int(f[f"{NEXT}starts"]):
            return
        self._retire(lease, quota, dirty, "")
        waited = {name.removeprefix(NEXT): value for name, value in self._take_next(lease).items()}
        del waited["starts"]
        self._remove(lease, "overdraft", "overdrawn", "owed")
        self._write(lease, dict.fromkeys(("consumed", "returned", "held", "holds"), "0") | waited)

    def _take_next(self, lease: str) -> Hash:
        waited = {name: value for name, value in self.hash(lease).items() if name.startswith(NEXT)}
        self._remove(lease, *waited)
        return waited

    def _retire(self, lease: str, quota: str, dirty: str, prefix: str) -> None:
        """A period is over here: what is left goes back, and its totals wait for their last report."""
        f = self.hash(lease)
        if f"{prefix}period" not in f:
            return
        was = {name: int(f.get(prefix + name, 0)) for name in OVER}
        was["returned"] = max(was["returned"], was["granted"] + was["overage"] - was["consumed"] - was["held"])
        write_was(self, lease, f[f"{prefix}period"], was)
        self._add(dirty, quota)

    # --- check -------------------------------------------------------------------------------------------------------

    def check(self, keys: Names, argv: Names) -> Any:
        if self.is_fenced(keys[0], argv[0], argv[1]):
            return [b"fenced"]
        mono = self._tick(keys[0])
        names, arguments = iter(keys[1:]), iter(argv[3:])
        holds = Holds(self, mono)
        return b"".join(self._request(names, arguments, mono, holds) for _ in range(int(argv[2])))

    def _request(self, names: Iterator[str], arguments: Iterator[str], mono: int, holds: Holds) -> bytes:
        mode, times, count, operation = next(arguments), int(next(arguments)), int(next(arguments)), next(arguments)
        record, remembered_ms = (next(names), int(next(arguments))) if operation else ("", 0)
        hold = self._hold_of(arguments, mono) if mode in SETS_ASIDE else None
        policies = [self._policy(names, arguments) for _ in range(count)]
        kept = Kept(operation, record, remembered_ms)
        return b"".join(self._decided(mode, kept, hold, policies, mono, holds) for _ in range(times))

    def _decided(
        self, mode: str, kept: Kept, hold: Hold | None, policies: Sequence[Policy], mono: int, holds: Holds
    ) -> bytes:
        operation, record, remembered_ms = kept
        known = self.data.get(record)
        if isinstance(known, list) and known[0] != operation:
            return b"\3"
        said_before = known[1] if isinstance(known, list) else b""
        if known and hold:
            hold, said_before = _read_record(said_before)
        if isinstance(known, list) and len(said_before) == POLICY_BYTES * len(policies):
            return b"\2" + _head(hold, mono) + said_before
        states: dict[str, State] = {}
        asked = "adjust" if known else mode
        may_hold = bool(known) or mode in SETS_ASIDE | LOOKS
        try:
            refusals = [self._refusal(policy, states, asked, mono, holds, may_hold) for policy in policies]
        except StoreError as error:  # while it is looked at: nothing was taken
            return b"\4" + struct.pack("<H", len(str(error))) + str(error).encode()
        refuses = [bool(reason) for reason, _ in refusals]
        said_no = [no and not policy.is_shadow for policy, no in zip(policies, refuses, strict=True)]
        is_taken = not known and not any(said_no) and mode not in LOOKS
        for reason, _ in refusals:
            if reason:
                self.note_denial(reason)
        if is_taken:
            hold = hold and _shortened(hold, policies, states, mono)
            self._take(policies, states, mode, hold, holds, refuses)
        said = b""
        for policy, (reason, retry_ms) in zip(policies, refusals, strict=True):
            state = states[policy.names[0]]
            said += _told(policy, state, state["taken"] if is_taken else 0, reason, retry_ms)
        if operation and is_taken:
            self.data[record] = [operation, _record(hold) + said]
            self._expire(record, remembered_ms)
        if not known and any(said_no):
            return b"\0" + said
        return (b"\2" if known else b"\1") + _head(hold, mono) + said

    def _hold_of(self, arguments: Iterator[str], mono: int) -> Hold:
        hold_id, name, ttl_ms = next(arguments), next(arguments), int(next(arguments))
        return Hold(hold_id, name, mono + ttl_ms * 1000)

    def _take(
        self,
        policies: Sequence[Policy],
        states: dict[str, State],
        mode: str,
        hold: Hold | None,
        holds: Holds,
        refuses: Sequence[bool],
    ) -> None:
        """What refuses is in shadow, and takes nothing."""
        self._draw(states.values())
        parts = 0
        for policy, is_refused in zip(policies, refuses, strict=True):
            state = states[policy.names[0]]
            parts += hold is not None and policy.algorithm in HOLDING
            if is_refused:
                continue
            if hold is not None and policy.algorithm is ALGORITHMS["concurrency"]:
                due = min(hold.due, holds.mono + state["longest_us"])
                numbers = ("open", policy.cost, 0, due, state["longest_us"])
                slot = Slot(SlotPlace(*policy.names), f"{hold.name}/{parts}", *numbers)
                Slots(self, holds.mono).take(slot, state["safe"])
                state["last"] = max(state["last"], due)
            elif hold is not None and policy.algorithm is ALGORITHMS["allowance"]:
                _, quota, dimensions, on_expiry = policy.arguments
                last_minute, period = state["last_minute"], state["period"]
                place, name = place_of(policy.names, quota), f"{hold.name}/{parts}"
                units = ("open", policy.cost, 0, hold.due, last_minute)
                holds.set_aside(Part(place, name, *units, on_expiry, period, dimensions))
            else:
                policy.algorithm.keep(self, policy.names, policy.arguments, state, policy.cost)
                self._note(policy, state, mode)

    def _draw(self, states: Iterable[State]) -> None:
        for state in states:
            units = beyond(state, state["taken"]) if state.get("overdraft") is not None else 0
            if units:
                lease, f, fence = state["lease"], self.hash(state["lease"]), self.hash(self.fence)
                self._write(lease, {name: str(int(f.get(name, 0)) + units) for name in ("overdrawn", "owed")})
                self._write(self.fence, {"overdrawn": str(int(fence.get("overdrawn", 0)) + units)})
                self.note_overdrawn(lease, state["period"], units)

    def _policy(self, names: Iterator[str], arguments: Iterator[str]) -> Policy:
        name, cost = next(arguments), int(next(arguments))
        algorithm = ALGORITHMS[name.removeprefix(SHADOW)]
        mine = [next(names) for _ in range(algorithm.keys)]
        own = [next(arguments) for _ in range(algorithm.arguments)]
        return Policy(algorithm, mine, own, cost, name.startswith(SHADOW))

    def _refusal(
        self, policy: Policy, states: dict[str, State], mode: str, mono: int, holds: Holds, may_hold: bool
    ) -> tuple[str, int]:
        name = policy.names[0]
        if name not in states:
            if policy.algorithm is ALGORITHMS["allowance"]:
                self._take_over(name, policy.arguments[1], policy.names[2], mono)
                holds.sweep(place_of(policy.names, policy.arguments[1]))
            states[name] = policy.algorithm.look(self, policy.names, policy.arguments, mono) | {"taken": 0}
        if policy.algorithm is ALGORITHMS["concurrency"] and not may_hold:
            return "hold_needed", 0
        reason, retry_ms = policy.algorithm.refuse(states[name], policy.cost, mode not in BEYOND_LIMITS)
        if not reason:
            states[name]["taken"] += policy.cost
        return reason, retry_ms

    def _note(self, policy: Policy, state: State, mode: str) -> None:
        """Tell the ground truth what was admitted of an allowance."""
        if policy.algorithm is ALGORITHMS["allowance"]:
            self.note(policy.names[0], state["period"], policy.cost, mode != "adjust")

    def _allowance(self, names: Names, arguments: Names, mono: int) -> State:
        f = self.hash(names[0])
        numbers = ("expires", "ends", "unallocated", "first_minute", "last_minute", "last_grant")
        state: State = {name: int(f.get(name, 0)) for name in numbers}
        used = int(f.get("consumed", 0)) + int(f.get("held", 0))
        known = {"period": f.get("period"), "available": _available(f), "limit": int(arguments[0])}
        state |= known | {"used": used, "mono": mono, "lease": names[0], "overdraft": None}
        return state | {"may_overdraw": self._may_overdraw}

    def _may_overdraw(self, state: State) -> int:
        """Looked at when it is needed, and then once for a request."""
        if state["overdraft"] is None:
            f, mono = self.hash(state["lease"]), state["mono"]
            left = int(f.get("overdraft", 0)) - int(f.get("overage", 0)) - int(f.get("owed", 0))
            may = left > 0 and mono < state["ends"] and self.is_cut_off(mono)
            state["overdraft"] = left if may else 0
        units: int = state["overdraft"]
        return units

    def rate(self, key: str) -> list[int]:
        """A rate's packed string: the share, and what its algorithm remembers."""
        value = self.data.get(key, [0])
        if not isinstance(value, list):
            raise StoreError(WRONG_TYPE)
        return value

    def keep_rate(self, key: str, value: list[int], ttl_ms: int) -> None:
        self.data[key] = value
        self._expire(key, max(1, ttl_ms))

    def log(self, key: str) -> list[tuple[int, int]]:
        value = self.data.get(key, [])
        assert isinstance(value, list)
        return value

    def keep_log(self, key: str, entries: list[tuple[int, int]], ttl_ms: int) -> None:
        self.data[key] = list(entries)
        self._expire(key, ttl_ms)

    # --- hold --------------------------------------------------------------------------------------------------------

    def hold(self, keys: Names, argv: Names) -> list[Any]:
        fence = self.hash(keys[0])
        if fence.get("fingerprint") != argv[0]:
            return [b"fenced"]
        _, epoch, lanes, name, action, amount, count, *arguments = argv
        mono = self._tick(keys[0])
        holds, slots, names, rest = Holds(self, mono), Slots(self, mono), iter(keys[2:]), iter(arguments)
        policies = [self._policy(names, rest) for _ in range(int(count))]
        parts, booked, shadows = list[Part | Slot](), list[Part](), list[Slot]()
        for i, policy in enumerate(policies, 1):
            if policy.algorithm is ALGORITHMS["concurrency"]:
                slot = slots.find(SlotPlace(*policy.names), f"{name}/{i}")
                (shadows if policy.is_shadow else parts).extend([slot] if slot else [])
                continue
            part = holds.find(place_of(policy.names, policy.arguments[1]), f"{name}/{i}")
            if part is None:
                return [b"unknown"]
            parts.append(part)
            booked.append(part)
        if not parts and not all(policy.is_shadow for policy in policies):
            return [b"unknown"]
        refused = [_refused(slots, part, len(parts), action, int(amount)) for part in parts]
        outcome = next((each for each in refused if each), b"done")
        if outcome == b"done":
            _tell(holds, slots, parts, shadows, action, int(amount))
            if booked and fence.get("epoch") != epoch:
                self._write(keys[1], {epoch: lanes})
        if not parts:
            return [outcome, b"nothing_held", 0, 0, 0]
        first = next((part for part in booked if part.state == "charged"), (booked or parts)[0])
        left_ms = math.ceil((first.due - mono) / 1000) if first.state == "open" else 0
        return [outcome, first.state.encode(), first.units, first.committed, left_ms]

    # --- freeze ------------------------------------------------------------------------------------------------------

    def freeze(self, keys: Names, argv: Names) -> list[Any]:
        if self.hash(keys[0]).get("fingerprint") != argv[0]:
            return [b"fenced"]
        if self.hash(keys[0]).get("epoch") == argv[1]:
            for i, quota in enumerate(argv[4:]):
                if self._is_lost(quota, keys[3 + 4 * i], keys[5 + 4 * i], keys[2]):
                    self._tick(keys[0])
                    return [b"lost", quota.encode()]
        tick = self._tick(keys[0])
        mono, is_current = str(tick).encode(), self.hash(keys[0]).get("epoch") == argv[1]
        lane = self.hash(keys[1])
        if "frozen" in lane:
            return [b"frozen", lane["frozen"].encode(), int(lane["frozen_seq"]), mono, self._held(keys)]
        holds = Holds(self, tick)
        seq = int(lane.get("seq", 0)) + 1
        leases: list[str] = []
        dropped: list[tuple[str, str]] = []
        cleaned: list[str] = []
        for i, quota in enumerate(argv[4:]):
            lease, lines, held, due = keys[3 + 4 * i : 7 + 4 * i]
            if len(dropped) >= int(argv[3]) or len(leases) >= MOST_LEASES:
                break
            if is_current:
                self._take_over(lease, quota, keys[2], tick)
            holds.sweep(Place(lease, lines, keys[2], held, due, quota))
            reported = self._report_lease(quota, lease, lines, seq, leases)
            dropped += [(lines, field) for field in self.hash(lines) if field.split("|")[0] in reported]
            cleaned.append(quota)
        body = f'{{"epoch":{argv[1]},"lane":{argv[2]},"seq":{seq},"leases":[{",".join(leases)}]}}'
        self._write(keys[1], {"frozen": body, "frozen_seq": str(seq)})
        for key, field in dropped:
            self._remove(key, field)
        for quota in cleaned:
            self._discard(keys[2], quota)
        return [b"frozen", body.encode(), seq, mono, self._held(keys)]

    def _held(self, keys: Names) -> list[int]:
        return [int(self.hash(lease).get("held", 0)) for lease in keys[3::4]]

    def _report_lease(self, quota: str, lease: str, lines: str, seq: int, leases: list[str]) -> set[str]:
        """Add what is to be said of one quota; gives the periods of which something is."""
        f, reported = self.hash(lease), {}
        for name in sorted(f):
            if name.startswith("was:"):
                period = name.removeprefix("was:")
                was = read_was(self, lease, period)
                assert was is not None
                reported[period] = [str(was[total]) for total in (*OVER[:4], "overdrawn")]
                write_was(self, lease, period, was | {"told": seq})
        for prefix in ("", NEXT):
            if f"{prefix}period" in f:
                overdrawn = "0" if prefix else f.get("overdrawn", "0")
                reported[f[f"{prefix}period"]] = [*(str(total) for total in _totals(f, prefix)[:4]), overdrawn]
        for period, totals in reported.items():
            leases.append(self._one_lease(quota, period, totals, lines))
        return set(reported)

    def _one_lease(self, quota: str, period: str, totals: Sequence[str], lines: str) -> str:
        said = ",".join(
            f'{{"minute":{field.split("|", 2)[1]},"dimensions":{field.split("|", 2)[2]},"units":{units}}}'
            for field, units in sorted(self.hash(lines).items(), key=lambda pair: pair[0].encode())
            if field.split("|")[0] == period
        )
        names = ("granted", "overage", "consumed", "returned")
        numbers = ",".join(f'"{name}":{total}' for name, total in zip(names, totals[:4], strict=True))
        numbers += f',"overdrawn":{totals[4]}' if totals[4] != "0" else ""
        return f'{{"quota":{_json(quota)},"period":{_json(period)},{numbers},"lines":[{said}]}}'

    # --- settle ------------------------------------------------------------------------------------------------------

    def settle(self, keys: Names, argv: Names) -> list[Any]:
        fence, lane = self.hash(keys[0]), keys[1]
        if fence.get("fingerprint") != argv[0]:
            return [b"fenced"]
        if fence.get("epoch") == argv[1]:
            for i in range(int(argv[4])):
                quota, used = argv[5 + 14 * i], int(argv[16 + 14 * i]) + int(argv[17 + 14 * i])
                if self._is_lost(quota, keys[3 + 2 * i], keys[4 + 2 * i], keys[2], used):
                    return [b"lost", quota.encode()]
        dropped = argv[2] != "0" and self.hash(lane).get("frozen_seq") == argv[2]
        if dropped:
            self._remove(lane, "frozen", "frozen_seq")
            self._write(lane, {"seq": argv[2]})
        answer: list[Any] = [b"settled", int(dropped)]
        if fence.get("epoch") != argv[1]:
            for i in range(int(argv[4])):
                self._hear(keys[3 + 2 * i], argv[5 + 14 * i : 19 + 14 * i])
            return answer
        sent, leases = int(argv[3]), int(argv[4])
        mono = self._tick(keys[0])
        self.heard_at_us = self.now_us
        self._remove(keys[0], "unheard_since", "unheard_at")
        for i in range(leases):
            reply, acknowledged = argv[5 + 14 * i : 19 + 14 * i], argv[2] if dropped else "0"
            is_late = int(argv[2]) < int(self.hash(lane).get("seq", 0))
            answer.append(self._install(keys[3 + 2 * i], keys[2], reply, sent, mono, acknowledged, is_late))
        return answer

    def _is_lost(self, quota: str, lease: str, holds: str, dirty: str, used: int = 0) -> bool:
        return lease not in self.data and bool(used or holds in self.data or quota in self.data.get(dirty, ()))

    def _hear(self, key: str, reply: Names) -> None:
        """What an older epoch was given, to be given back."""
        f = self.hash(key)
        for prefix in ("", NEXT):
            if f.get(f"{prefix}period") == reply[1]:
                given = (("granted", reply[2]), ("overage", reply[3]))
                heard = {prefix + name: str(max(int(f.get(prefix + name, 0)), int(total))) for name, total in given}
                self._write(key, heard)

    def _install(
        self, key: str, dirty: str, reply: Names, sent: int, mono: int, acknowledged: str, is_late: bool = False
    ) -> int:
        """`acknowledged`: the number of the batch that was just dropped."""
        quota, period, first = reply[0], reply[1], int(reply[7])
        self._take_over(key, quota, dirty, mono)
        f = self.hash(key)
        if f.get("period") == period:
            return self._grant(key, "", reply, sent)
        if f"was:{period}" in f:
            self._settle_over(key, dirty, reply, acknowledged)
            return 0
        is_older = "period" in f and first < int(f.get("first_minute", 0))
        if f.get(f"{NEXT}period") != period and (is_late or is_older):
            if not is_late:
                self._give_back_unknown(key, dirty, reply)
            return 0
        if f.get(f"{NEXT}period", period) != period:
            if first > int(f[f"{NEXT}first_minute"]):
                self._take_over(key, quota, dirty, math.inf)
            else:
                self._retire(key, quota, dirty, NEXT)
                self._take_next(key)
        more = self._grant(key, NEXT, reply, sent)
        starts_in = int(reply[9])
        starts = max(sent + starts_in * 1000, int(self.hash(key).get(f"{NEXT}starts", 0))) if starts_in else sent
        self._write(key, {f"{NEXT}starts": str(starts)})
        self._take_over(key, quota, dirty, mono)
        return more if self.hash(key).get("period") == period else 0

    def _grant(self, key: str, prefix: str, reply: Names, sent: int) -> int:
        _, period, granted, overage, unallocated, expires_in, ends_in, first, last, _, overdraft, *_ = reply
        f = self.hash(key)
        had = {name: int(f.get(prefix + name, 0)) for name in ("granted", "overage", "expires")}
        more = max(0, int(granted) - had["granted"])
        fields = {
            "period": period,
            "granted": str(max(int(granted), had["granted"])),
            "overage": str(max(int(overage), had["overage"])),
            "unallocated": unallocated,
            "expires": str(max(had["expires"], sent + int(expires_in) * 1000)),
            "ends": str(sent + int(ends_in) * 1000),
            "first_minute": first,
            "last_minute": last,
            "overdraft": overdraft,
        } | ({"last_grant": str(more)} if more else {})
        self._write(key, {prefix + name: value for name, value in fields.items()})
        if not prefix:
            self._pay_back(key)
        return more

    def _pay_back(self, key: str) -> None:
        f = self.hash(key)
        if owed := int(f.get("owed", 0)):
            self._write(key, {"owed": str(max(0, min(owed, -_available(f))))})

    def _give_back_unknown(self, key: str, dirty: str, reply: Names) -> None:
        granted, overage, consumed, returned = (int(reply[i]) for i in (2, 3, 11, 12))
        if granted + overage > consumed + returned:
            numbers = {
                "granted": granted,
                "overage": overage,
                "consumed": consumed,
                "returned": granted + overage - consumed,
            }
            write_was(self, key, reply[1], numbers | dict.fromkeys(("told", "held", "holds", "overdrawn"), 0))
            self._add(dirty, reply[0])

    def _settle_over(self, key: str, dirty: str, reply: Names, acknowledged: str) -> None:
        """What is granted late to a period that is over here goes back; once all of it is booked, it is forgotten."""
        quota, period = reply[0], reply[1]
        was = read_was(self, key, period)
        if was is None:
            return
        was_given, spent = was["granted"] + was["overage"], was["consumed"] + was["returned"] + was["held"]
        granted, overage = max(was["granted"], int(reply[2])), max(was["overage"], int(reply[3]))
        if granted + overage == was_given:
            if was["told"] == int(acknowledged) != 0 and reply[6] == "0" and not was["holds"]:
                self._remove(key, f"was:{period}")
            return
        returned = was["returned"] + max(0, granted + overage - spent) - max(0, was_given - spent)
        now = {"granted": granted, "overage": overage, "returned": returned, "told": 0}
        write_was(self, key, period, was | now)
        self._add(dirty, quota)

    # --- shares of rates ---------------------------------------------------------------------------------------------

    def report_rates(self, keys: Names, argv: Names) -> list[Any]:
        if self.is_fenced(keys[0], argv[0], argv[1]):
            return [b"fenced"]
        mono = self._tick(keys[0])
        answer = [b"reported", b"%d" % mono]
        for i, (key, demands) in enumerate(zip(keys[1::2], keys[2::2], strict=True)):
            safe_micro, burst, demand, is_contended = (int(each) for each in argv[3 + 4 * i : 7 + 4 * i])
            s = read_rate(self, key, safe_micro, burst, mono)
            wanted = self._wanted_by_all(demands, argv[2], demand, mono)
            if is_contended:
                over = level(s) - s["burst"] * PARTS // 2
                wanted = max(0, wanted - max(0, over) // 2000) + min(wanted // 8, max(0, -over) // 2000)
            if is_contended and s["share"] and wanted < s["share"].rate_micro:
                self._lower(key, s, wanted)
            share: GivenShare | None = s["share"]
            told = (share.number, s["rate_micro"], max(0, share.spent)) if share else (0, s["rate_micro"], 0)
            answer += [b"%d" % each for each in (*told, wanted)]
        return answer

    def _wanted_by_all(self, key: str, agent: str, micro: int, mono: int) -> int:
        self._write(key, {agent: f"{mono} {micro}"})
        self._expire(key, 20_000)
        wanted = {name: [int(each) for each in text.split()] for name, text in self.hash(key).items()}
        self._remove(key, *(name for name, (at, _) in wanted.items() if mono - at > 10_000_000))
        return sum(micro for at, micro in wanted.values() if mono - at <= 10_000_000)

    def _lower(self, key: str, s: State, rate_micro: int) -> None:
        share = s["share"]
        after_micro = share.after_micro if share.after_micro < 0 else min(share.after_micro, rate_micro)
        give_rate(self, key, s, replace(share, rate_micro=rate_micro, after_micro=after_micro))

    def share_rates(self, keys: Names, argv: Names) -> list[Any]:
        if self.is_fenced(keys[0], argv[0], argv[1]):
            return [b"fenced"]
        mono, sent, new = self._tick(keys[0]), int(argv[2]), 0
        if mono - sent > 5_000_000:
            return [b"shared", 0]
        for i, key in enumerate(keys[1:]):
            numbers = (int(each) for each in argv[3 + 6 * i : 9 + 6 * i])
            safe_micro, burst, number, rate_micro, after_micro, expires_in = numbers
            s = read_rate(self, key, safe_micro, burst, mono)
            if number > (s["share"].number if s["share"] else 0):
                given = GivenShare(number, rate_micro, sent + expires_in * 1000, after_micro, sent + 40_000_000)
                give_rate(self, key, s, given)
                new += 1
        return [b"shared", new]

    def report_slots(self, keys: Names, argv: Names) -> list[Any]:
        if self.is_fenced(keys[0], argv[0], argv[1]):
            return [b"fenced"]
        mono, concurrency = self._tick(keys[0]), ALGORITHMS["concurrency"]
        answer = [b"reported", b"%d" % mono]
        for i in range((len(keys) - 1) // 4):
            names, arguments = keys[1 + 4 * i : 4 + 4 * i], argv[3 + 4 * i : 7 + 4 * i]
            s = concurrency.look(self, names, arguments[:3], mono)
            wanted = s["used"] + self._wanted_by_all(keys[4 + 4 * i], argv[2], int(arguments[3]), mono)
            number = s["share"].number if s["share"] else 0
            lost_ms = Slots(self, mono).lost_ms(int(arguments[1]) * 1000)
            answer += [b"%d" % each for each in (number, max(s["limit"], s["used"]), wanted, lost_ms)]
        return answer

    def share_slots(self, keys: Names, argv: Names) -> list[Any]:
        if self.is_fenced(keys[0], argv[0], argv[1]):
            return [b"fenced"]
        mono, sent, new = self._tick(keys[0]), int(argv[2]), 0
        if mono - sent > 5_000_000:
            return [b"shared", 0]
        for i in range((len(keys) - 1) // 3):
            number, units, after, expires_in, slot_ttl_ms = (int(each) for each in argv[3 + 5 * i : 8 + 5 * i])
            share = SlotsGiven(number, units, sent + expires_in * 1000, after, slot_ttl_ms * 1000, sent)
            new += Slots(self, mono).give(SlotPlace(*keys[1 + 3 * i : 4 + 3 * i]), share)
        return [b"shared", new]


class ModelConnection(StoreConnection):
    """The real connection's rules on a modelled store: the fingerprint is read before anything else, and again."""

    def __init__(self, model: StoreModel, on_connected: Callable[[], None] = lambda: None) -> None:
        super().__init__("redis://model:1/0", timeout_ms=1_000, on_connected=on_connected)
        self.model = model
        self.reachable = True

    async def _ask(self, *arguments: Argument) -> Any:
        if not self.reachable:
            raise StoreUnavailable("the store cannot be reached")
        self.calls += 1
        return self.model.execute(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None:
        try:
            reply = self.model.execute(*arguments)
        except StoreError as error:
            reply = error
        on_reply(reply)

    async def connect(self) -> None:
        """A new connection; the caller says when, for there is no keeper here."""
        await self._greet()
        self._on_connected()

    def lose(self) -> None:
        self._on_lost()


async def scripts_on(model: StoreModel) -> Scripts:
    """The real scripts' methods, connected to a modelled store."""
    connection = ModelConnection(model)
    await connection.connect()
    return Scripts(connection)


_TOTALS = ("granted", "overage", "consumed", "returned", "held")


def _totals(f: Hash, prefix: str) -> list[int]:
    return [int(f.get(prefix + name, 0)) for name in _TOTALS]


def _available(f: Hash) -> int:
    given = int(f.get("granted", 0)) + int(f.get("overage", 0))
    return given - int(f.get("consumed", 0)) - int(f.get("returned", 0)) - int(f.get("held", 0))


def _told(policy: Policy, state: State, taken: int, reason: str, retry_ms: int) -> bytes:
    limit, remaining, reset_ms, *more = policy.algorithm.tell(state, taken)
    available, last_grant, delay_ms = more or (remaining, 0, 0)
    numbers = (limit, remaining, reset_ms, retry_ms, available, last_grant, 0 if reason else delay_ms)
    return struct.pack("<B7q", REASONS.index(reason), *numbers)


def place_of(names: Names, quota: str) -> Place:
    lease, lines, dirty, holds, due = names
    return Place(lease, lines, dirty, holds, due, quota)


def _record(hold: Hold | None) -> bytes:
    return b"" if hold is None else struct.pack("<dH", hold.due, len(hold.id)) + hold.id.encode()


def _read_record(packed: bytes) -> tuple[Hold, bytes]:
    due, length = struct.unpack_from("<dH", packed)
    return Hold(packed[10 : 10 + length].decode(), "", int(due)), packed[10 + length :]


def _head(hold: Hold | None, mono: int) -> bytes:
    if hold is None:
        return b""
    return struct.pack("<qH", max(0, -((mono - hold.due) // 1000)), len(hold.id)) + hold.id.encode()


def _shortened(hold: Hold, policies: Sequence[Policy], states: dict[str, State], mono: int) -> Hold:
    """No part of it outlasts another, but for what is in shadow."""
    enforced = [states[policy.names[0]] for policy in policies if not policy.is_shadow]
    return hold._replace(due=min([hold.due, *(mono + s["longest_us"] for s in enforced if "longest_us" in s)]))


def _tell(
    holds: Holds, slots: Slots, parts: Sequence[Part | Slot], shadows: Sequence[Slot], action: str, amount: int
) -> None:
    longest_us = [part.longest_us for part in parts if isinstance(part, Slot)]
    due = holds.mono + min([amount * 1000, *longest_us])
    for part in (*parts, *shadows):
        becomes = MAY_BECOME[part.state].get(action)
        if becomes is None or (action != "extend" and becomes == part.state):
            continue
        units = part.units if action == "spend" else amount
        if isinstance(part, Slot):
            latest = min(due, slots.mono + part.longest_us)
            slots.extend(part, latest) if action == "extend" else slots.finish(part, becomes, units)
        else:
            holds.extend(part, due) if action == "extend" else holds.finish(part, becomes, units)


def _refused(slots: Slots, part: Part | Slot, parts: int, action: str, amount: int) -> bytes:
    becomes = MAY_BECOME[part.state].get(action)
    is_committed = part.state == "committed"
    if becomes is None or (is_committed and action == "commit" and part.committed != amount):
        return b"ended"
    if action == "extend" and isinstance(part, Slot) and not slots.may_extend(part):
        return b"not_extended"
    return b"too_many" if action == "commit" and not is_committed and amount * parts > part.most else b""


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("/", "\\/")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
