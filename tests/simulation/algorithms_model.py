"""The algorithms of lua/algorithms in plain Python, one class each, for the model of a store.

A state is read once for each key of a request; `taken` is what the request has taken of it so far. Only `keep` writes.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulation.slots_model import Place, Slots

if TYPE_CHECKING:
    from tests.simulation.store_model import StoreModel

MAX_UNITS = 2**53 - 1
PARTS = 10**9
LONG_MS = 2**31

State = dict[str, Any]
Names = Sequence[str]


class Algorithm(Protocol):
    keys: int
    arguments: int

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State: ...

    def refuse(self, state: State, cost: int, is_enforced: bool) -> tuple[str, int]: ...

    def keep(self, store: "StoreModel", names: Names, arguments: Names, state: State, cost: int) -> None: ...

    def tell(self, state: State, taken: int) -> tuple[int, ...]:
        """limit, remaining, reset_ms; and where they mean something: available, last_grant, delay_ms"""


class Allowance:
    keys, arguments = 5, 4

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        return store._allowance(names, arguments, mono)

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        if (cost > s["limit"] and is_enforced) or s["used"] + s["taken"] + cost > MAX_UNITS:
            reason = "cost_above_limit"
        elif s["period"] is None:
            reason = "no_lease"
        elif s["mono"] >= s["expires"] and is_enforced:
            reason = "lease_expired"
        elif cost > s["available"] - s["taken"] and is_enforced:
            reason = "lease_spent"
        else:
            return "", 0
        if reason in ("lease_expired", "lease_spent") and beyond(s, s["taken"] + cost) <= s["may_overdraw"](s):
            return "", 0
        return reason, self._reset_ms(s)

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        (lease, lines, dirty, *_), (_, quota, dimensions, _) = names, arguments
        minute = min(max(store.now_us // 60_000_000, s["first_minute"]), s["last_minute"])
        line = f"{s['period']}|{minute}|{dimensions}"
        store._write(lease, {"consumed": str(int(store.hash(lease).get("consumed", 0)) + cost)})
        store._write(lines, {line: str(int(store.hash(lines).get(line, 0)) + cost)})
        if store.hash(lines)[line] == str(cost):
            store._add(dirty, quota)

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        available = s["available"] - taken
        remaining = max(0, available) + s["unallocated"]
        return s["limit"], remaining, self._reset_ms(s), available, s["last_grant"], 0

    @staticmethod
    def _reset_ms(s: State) -> int:
        return max(0, -int((s["mono"] - s["ends"]) // 1000))


def beyond(s: State, units: int) -> int:
    """Of so many units, what the lease does not have."""
    return units if s["mono"] >= s["expires"] else max(0, units - max(0, s["available"]))


class Concurrency:
    """How slots are looked at; slots_model.py has what holds do with them."""

    keys, arguments = 3, 3

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        limit, slot_ttl_ms, safe = map(int, arguments)
        slots, place, longest_us = Slots(store, mono), Place(*names), slot_ttl_ms * 1000
        s = slots.look(place) | {"limit": limit, "most": limit, "longest_us": longest_us, "safe": safe, "share": None}
        if safe >= 0:
            share = s["share"] = slots.share(place)
            s["limit"] = min(limit, slots.in_force(share, safe, longest_us))
            s["longest_us"] = min(longest_us, share.longest_us) if share else longest_us
        return s

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        units = s["taken"] + cost
        if (units > s["most"] and is_enforced) or s["used"] + units > MAX_UNITS:
            return "cost_above_limit", 0
        if s["used"] + units > s["limit"] and is_enforced:
            lacking = s["used"] + units - s["limit"]
            return "slots_taken", 1000 if lacking > s["used"] else self._ms_to_free(s, lacking)
        return "", 0

    @staticmethod
    def _ms_to_free(s: State, units: int) -> int:
        for due, freed in s["slots"]:
            units -= freed
            if units <= 0:
                return _ms(due - s["mono"])
        raise AssertionError("a cost within the limit fits when nothing is taken")

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        raise AssertionError("what comes back needs somebody to bring it")

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        return s["limit"], max(0, s["limit"] - s["used"] - taken), max(0, _ms(s["last"] - s["mono"]))


SHARED, SAFE = 128, -1
NO_LAYOUT, PARTS_LAYOUT, ARRIVAL_LAYOUT, FIXED_LAYOUT, SLIDING_LAYOUT, LOG_LAYOUT = 0, 6, 7, 8, 9, 10


@dataclass
class GivenShare:
    number: int
    rate_micro: int
    ends: int
    after_micro: int
    kept: int
    spent: int = 0


def read_rate(store: "StoreModel", key: str, safe_micro: int, burst: int, mono: int) -> State:
    """As parts/share reads it: what of a share is over by now is passed through."""
    layout, *numbers = store.rate(key)
    share = None
    if layout >= SHARED:
        layout, share, numbers = layout - SHARED, GivenShare(*numbers[:6]), numbers[6:]
    s: State = {"layout": layout, "share": share, "remembered": numbers, "burst": burst, "mono": mono}
    s |= {"safe_micro": safe_micro, "rate_micro": safe_micro, "spent": share.spent if share else 0}
    while (share := s["share"]) is not None and mono >= share.ends:
        at, old_micro, after_micro = share.ends, share.rate_micro, share.after_micro
        if after_micro == SAFE:
            s["share"], after_micro = None, safe_micro
        else:
            share.rate_micro, share.ends, share.after_micro = after_micro, share.kept, SAFE
        _change(s, at, old_micro, after_micro)
    s["rate_micro"] = share.rate_micro if share else safe_micro
    return s


def _change(s: State, at: int, old_micro: int, new_micro: int) -> None:
    """What is in a bucket came at the old rate, and is the same under the new one."""
    if not s["remembered"] or old_micro == new_micro:
        return
    if s["layout"] == PARTS_LAYOUT:
        parts, since = s["remembered"]
        parts, extra, _ = filled(parts, since, at, old_micro, s["burst"] * PARTS)
        s["remembered"] = [parts + extra, at]
    elif s["layout"] == ARRIVAL_LAYOUT:
        due, rest = s["remembered"]
        old_micro, new_micro = max(1, old_micro), max(1, new_micro)
        parts = ahead(due, min(rest, old_micro - 1), at, old_micro)
        whole_ms, rest = divmod(parts, new_micro)
        s["remembered"] = [min(at + whole_ms * 1000, MAX_UNITS), rest] if parts else []


def level(s: State) -> int:
    """What is in a bucket now, in parts."""
    full: int = s["burst"] * PARTS
    if s["remembered"] and s["layout"] == PARTS_LAYOUT:
        parts, since = s["remembered"]
        parts, extra, _ = filled(parts, since, s["mono"], s["rate_micro"], full)
        return parts + extra
    if s["remembered"] and s["layout"] == ARRIVAL_LAYOUT:
        (due, rest), rate_micro = s["remembered"], max(1, s["rate_micro"])
        return full - ahead(due, min(rest, rate_micro - 1), s["mono"], rate_micro)
    return full


def filled(parts: int, since: int, at: int, rate_micro: int, full: int) -> tuple[int, int, int]:
    parts = min(full, parts)
    elapsed_ms, beyond_us = divmod(max(0, at - since), 1000)
    gained, extra = elapsed_ms * rate_micro, beyond_us * rate_micro // 1000
    if gained + extra >= full - parts:
        return full, 0, at
    return parts + gained, extra, since + elapsed_ms * 1000


def ahead(due: int, rest: int, at: int, rate_micro: int) -> int:
    return min(max(0, -((at - due) * rate_micro // 1000) + rest), MAX_UNITS)


def write_rate(store: "StoreModel", key: str, s: State, ttl_ms: int) -> None:
    share: GivenShare | None = s["share"]
    if share is None:
        store.keep_rate(key, [s["layout"], *s["remembered"]], ttl_ms)
    else:
        packed = [s["layout"] + SHARED, *astuple(share), *s["remembered"]]
        store.keep_rate(key, packed, max(ttl_ms, _ms(share.kept - s["mono"])))


def give_rate(store: "StoreModel", key: str, s: State, share: GivenShare) -> None:
    if share.ends <= s["mono"]:
        share.rate_micro, share.ends, share.after_micro = share.after_micro, share.kept, SAFE
    _change(s, s["mono"], s["rate_micro"], share.rate_micro)
    share.spent = s["share"].spent if s["share"] else 0
    s["share"], s["rate_micro"] = share, share.rate_micro
    write_rate(store, key, s, store.ttl_ms(key))


class Rate:
    """What all rates have in common: a share that replaces the safe one, and one packed string."""

    keys = 1
    layout: int  # what the packed string's first byte says

    def shared(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = read_rate(store, names[0], int(arguments[0]), int(arguments[1]), mono)
        if s["layout"] != self.layout:
            s["layout"], s["remembered"] = self.layout, []
        return s

    def write(self, store: "StoreModel", names: Names, s: State, remembered: list[int], ttl_ms: int) -> None:
        share: GivenShare | None = s["share"]
        if share is not None:
            share.spent = s["spent"] + s["taken"]
        write_rate(store, names[0], s | {"remembered": remembered}, ttl_ms + 1)

    @staticmethod
    def gain_ms(s: State, ms: int, parts: int) -> int:
        share: GivenShare | None = s["share"]
        if share is None:
            return ms
        over_ms, safe_micro = _ms(share.kept - s["mono"]), max(1, int(s["safe_micro"]))
        return min(ms, LONG_MS, over_ms + -(-parts // safe_micro))


class TokenBucket(Rate):
    arguments, layout = 2, PARTS_LAYOUT

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = self.shared(store, names, arguments, mono)
        full = s["burst"] * PARTS
        parts, since = s["remembered"] or (full, mono)
        parts, extra, since = filled(parts, since, mono, s["rate_micro"], full)
        return s | {"full": full, "parts": parts, "extra": extra, "since": since}

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        needed = (s["taken"] + cost) * PARTS
        if (s["taken"] + cost > s["burst"] and is_enforced) or needed > MAX_UNITS:
            return "cost_above_limit", 0
        there = s["parts"] + s["extra"]
        if needed > there and is_enforced:
            return "rate_exceeded", self.gain_ms(s, _ms_to_gain(needed - there, s["rate_micro"], 1000), needed - there)
        return "", 0

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        parts = self._left(s, s["taken"])
        ttl_ms = _ms_to_gain(s["full"] - parts, s["rate_micro"], LONG_MS)
        self.write(store, names, s, [parts, s["since"]], self.gain_ms(s, ttl_ms, s["full"] - parts))

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        parts = self._left(s, taken)
        there = parts + s["extra"]
        reset_ms = _ms_to_gain(s["full"] - there, s["rate_micro"], 1000)
        return s["burst"], max(0, there // PARTS), reset_ms, there, s["rate_micro"], 0

    @staticmethod
    def _left(s: State, taken: int) -> int:
        return min(max(int(s["parts"]) - taken * PARTS, -MAX_UNITS), int(s["full"] - s["extra"]))


def _ms_to_gain(parts: int, rate_micro: int, never_ms: int) -> int:
    return -(-parts // rate_micro) if rate_micro > 0 else never_ms


class Window(Rate):
    """So many units in a window, which is the third argument, in milliseconds."""

    arguments = 3

    def windowed(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        return self.shared(store, names, arguments, mono) | {"window_ms": int(arguments[2])}


class FixedWindow(Window):
    layout = FIXED_LAYOUT

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = self.windowed(store, names, arguments, mono)
        window_us = s["window_ms"] * 1000
        started, used = s["remembered"] or (mono, 0)
        if mono - started >= window_us:
            started, used = mono, 0
        return s | {"started": started, "used": used, "left_ms": _ms(started + window_us - mono)}

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        units = s["taken"] + cost
        if (units > s["burst"] and is_enforced) or s["used"] + units > MAX_UNITS:
            return "cost_above_limit", 0
        if s["used"] + units > s["burst"] and is_enforced:
            return "rate_exceeded", s["left_ms"]
        return "", 0

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        self.write(store, names, s, [s["started"], s["used"] + s["taken"]], s["left_ms"])

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        used = s["used"] + taken
        return s["burst"], max(0, s["burst"] - used), s["left_ms"] if used else 0


class SlidingWindow(Window):
    layout = SLIDING_LAYOUT

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = self.windowed(store, names, arguments, mono)
        window_ms = s["window_ms"]
        started, current, previous = s["remembered"] or (mono, 0, 0)
        elapsed_ms = max(0, (mono - started) // 1000)
        if elapsed_ms >= 2 * window_ms:
            started, current, previous, elapsed_ms = mono, 0, 0, 0
        elif elapsed_ms >= window_ms:
            started, current, previous = started + window_ms * 1000, 0, current
            elapsed_ms -= window_ms
        found = {"started": started, "current": current, "previous": previous, "left_ms": window_ms - elapsed_ms}
        return s | found

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        units = s["taken"] + cost
        if (units > s["burst"] and is_enforced) or s["current"] + units > 10**9:
            return "cost_above_limit", 0
        if self._room(s, units) < 0 and is_enforced:
            return "rate_exceeded", self._retry_ms(s, units)
        return "", 0

    def _retry_ms(self, s: State, units: int) -> int:
        """The first millisecond at which there is room, if nobody asks meanwhile."""
        room = s["burst"] - s["current"] - units
        if room >= 0:
            return int(s["left_ms"]) - self._before_end(room, s["previous"], s["window_ms"])
        before_end = self._before_end(s["burst"] - units, s["current"], s["window_ms"])
        return int(s["left_ms"] + s["window_ms"]) - before_end

    @staticmethod
    def _before_end(room: int, previous: int, window_ms: int) -> int:
        return min(window_ms, room * window_ms // previous) if previous else window_ms

    @staticmethod
    def _room(s: State, units: int) -> int:
        return int((s["burst"] - s["current"] - units) * s["window_ms"] - s["previous"] * s["left_ms"])

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        remembered = [s["started"], s["current"] + s["taken"], s["previous"]]
        self.write(store, names, s, remembered, s["left_ms"] + s["window_ms"])

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        reset_ms = 0
        if s["current"] + taken > 0:
            reset_ms = s["left_ms"] + s["window_ms"]
        elif s["previous"] > 0:
            reset_ms = s["left_ms"]
        return s["burst"], max(0, self._room(s, taken) // s["window_ms"]), reset_ms


class SlidingLog(Window):
    keys, layout = 2, LOG_LAYOUT

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = self.windowed(store, names, arguments, mono)
        window_us = s["window_ms"] * 1000
        _, newest = s["remembered"] or (0, mono)
        live = [entry for entry in store.log(names[1]) if entry[0] + window_us > mono]
        if newest + window_us <= mono:
            live = []
        return s | {"live": live, "used": sum(units for _, units in live), "newest": newest}

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        units = s["taken"] + cost
        if (units > s["burst"] and is_enforced) or s["used"] + units > MAX_UNITS:
            return "cost_above_limit", 0
        if s["used"] + units > s["burst"] and is_enforced:
            return "rate_exceeded", self._ms_to_free(s, s["used"] + units - s["burst"])
        return "", 0

    @staticmethod
    def _ms_to_free(s: State, units: int) -> int:
        free_at = s["mono"]
        for at, freed in s["live"]:
            units, free_at = units - freed, at + s["window_ms"] * 1000
            if units <= 0:
                break
        return _ms(free_at - s["mono"])

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        s["live"] = [*s["live"], (s["mono"], cost)]
        store.keep_log(names[1], s["live"], s["window_ms"] + 1)
        self.write(store, names, s, [s["used"] + s["taken"], s["mono"]], s["window_ms"])

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        used = s["used"] + taken
        newest = s["mono"] if taken else s["newest"]
        reset_ms = _ms(newest + s["window_ms"] * 1000 - s["mono"]) if used else 0
        return s["burst"], max(0, s["burst"] - used), reset_ms


class LeakyBucket(Rate):
    arguments, layout = 2, ARRIVAL_LAYOUT

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = self.shared(store, names, arguments, mono)
        rate_micro = max(1, s["rate_micro"])
        due, rest = s["remembered"] or (mono, 0)
        rest = min(rest, rate_micro - 1)
        in_parts = ahead(due, rest, mono, rate_micro)
        if not in_parts:
            due, rest = mono, 0
        return s | {"rate_micro": rate_micro, "due": due, "rest": rest, "ahead": in_parts}

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        units = s["taken"] + cost
        if (units > s["burst"] and is_enforced) or units * PARTS > MAX_UNITS:
            return "cost_above_limit", 0
        over = s["ahead"] - (s["burst"] - units) * PARTS
        if over > 0 and is_enforced:
            return "rate_exceeded", self.gain_ms(s, -(-over // s["rate_micro"]), over)
        return "", 0

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        whole_ms, rest = divmod(s["rest"] + s["taken"] * PARTS, s["rate_micro"])
        latest = s["mono"] + MAX_UNITS // s["rate_micro"] * 1000
        due = min(s["due"] + whole_ms * 1000, latest, MAX_UNITS)
        ttl_ms = self.gain_ms(s, self._reset_ms(s, s["taken"]), self._ahead_with(s, s["taken"]))
        self.write(store, names, s, [due, rest], ttl_ms)

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        left = s["burst"] * PARTS - self._ahead_with(s, taken)
        delay_ms = -(-s["ahead"] // s["rate_micro"])
        return s["burst"], max(0, left // PARTS), self._reset_ms(s, taken), left, s["rate_micro"], delay_ms

    @staticmethod
    def _ahead_with(s: State, taken: int) -> int:
        return min(max(0, int(s["ahead"]) + taken * PARTS), MAX_UNITS)

    def _reset_ms(self, s: State, taken: int) -> int:
        return -int(-self._ahead_with(s, taken) // s["rate_micro"])


class Gcra(LeakyBucket):
    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        return *super().tell(s, taken)[:5], 0


def _ms(us: int) -> int:
    return -int(-us // 1000)


ALGORITHMS: dict[str, Algorithm] = {
    "allowance": Allowance(),
    "concurrency": Concurrency(),
    "fixed_window": FixedWindow(),
    "gcra": Gcra(),
    "leaky_bucket": LeakyBucket(),
    "sliding_log": SlidingLog(),
    "sliding_window": SlidingWindow(),
    "token_bucket": TokenBucket(),
}
