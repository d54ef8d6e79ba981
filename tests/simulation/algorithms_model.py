"""The algorithms of lua/algorithms in plain Python, one class each, for the model of a store.

A state is read once for each key of a request; `taken` is what the request has taken of it so far. Only `keep` writes.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
    keys, arguments = 3, 3

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        return store._allowance(names, arguments, mono)

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        if (cost > s["limit"] and is_enforced) or s["consumed"] + s["taken"] + cost > MAX_UNITS:
            reason = "cost_above_limit"
        elif s["period"] is None:
            reason = "no_lease"
        elif s["mono"] >= s["expires"] and is_enforced:
            reason = "lease_expired"
        elif cost > s["available"] - s["taken"] and is_enforced:
            reason = "lease_spent"
        else:
            return "", 0
        return reason, self._reset_ms(s)

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        (lease, lines, dirty), (_, quota, dimensions) = names, arguments
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


class Rate:
    """What all rates have in common: a share that replaces the safe one, and one packed string."""

    keys = 1

    @staticmethod
    def shared(store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        rate_micro, burst = int(arguments[0]), int(arguments[1])
        share_rate, share_burst, share_until, *remembered = store.rate(names[0])
        if mono < share_until:
            rate_micro, burst = share_rate, share_burst
        share = [share_rate, share_burst, share_until]
        return {"rate_micro": rate_micro, "burst": burst, "share": share, "remembered": remembered, "mono": mono}

    @staticmethod
    def write(store: "StoreModel", names: Names, s: State, remembered: list[int], ttl_ms: int) -> None:
        share_ms = math.ceil((s["share"][2] - s["mono"]) / 1000)
        store.keep_rate(names[0], [*s["share"], *remembered], max(ttl_ms + 1, share_ms))


class TokenBucket(Rate):
    arguments = 2

    def look(self, store: "StoreModel", names: Names, arguments: Names, mono: int) -> State:
        s = self.shared(store, names, arguments, mono)
        full = s["burst"] * PARTS
        parts, since = s["remembered"] or (full, mono)
        elapsed_ms = max(0, (mono - since) // 1000)
        parts = min(full, min(full, parts) + elapsed_ms * s["rate_micro"])
        return s | {"full": full, "parts": parts, "since": since + elapsed_ms * 1000}

    def refuse(self, s: State, cost: int, is_enforced: bool) -> tuple[str, int]:
        needed = (s["taken"] + cost) * PARTS
        if (s["taken"] + cost > s["burst"] and is_enforced) or needed > MAX_UNITS:
            return "cost_above_limit", 0
        if needed > s["parts"] and is_enforced:
            return "rate_exceeded", _ms_to_gain(needed - s["parts"], s["rate_micro"], 1000)
        return "", 0

    def keep(self, store: "StoreModel", names: Names, arguments: Names, s: State, cost: int) -> None:
        parts = self._left(s, s["taken"])
        ttl_ms = _ms_to_gain(s["full"] - parts, s["rate_micro"], LONG_MS)
        self.write(store, names, s, [parts, s["since"]], ttl_ms)

    def tell(self, s: State, taken: int) -> tuple[int, ...]:
        parts = self._left(s, taken)
        return s["burst"], max(0, parts // PARTS), _ms_to_gain(s["full"] - parts, s["rate_micro"], 1000)

    @staticmethod
    def _left(s: State, taken: int) -> int:
        return max(int(s["parts"]) - taken * PARTS, -MAX_UNITS)


def _ms_to_gain(parts: int, rate_micro: int, never_ms: int) -> int:
    return -(-parts // rate_micro) if rate_micro > 0 else never_ms


ALGORITHMS: dict[str, Algorithm] = {
    "allowance": Allowance(),
    "token_bucket": TokenBucket(),
}
