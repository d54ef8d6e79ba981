"""lua/parts/holds.lua and lua/parts/was.lua in plain Python, for the model of a store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.store_model import StoreModel

MAX_UNITS = 2**53 - 1
RAN_OUT_US, ENDED_US = 24 * 3_600_000_000, 3_600_000_000
MOST = 64
PENDING = ("open", "lapsed", "charged")
OVER = ("granted", "overage", "consumed", "returned", "told", "held", "holds", "overdrawn")

MAY_BECOME = {
    "open": {"commit": "committed", "spend": "committed", "release": "released", "extend": "open", "look": "open"},
    "lapsed": {"commit": "committed", "release": "released", "look": "lapsed"},
    "charged": {"commit": "committed", "release": "charged", "look": "charged"},
    "committed": {"commit": "committed", "spend": "committed", "look": "committed"},
    "released": {"release": "released", "look": "released"},
}

Was = dict[str, int]


class Place(NamedTuple):
    """The names of a lease's keys, and its quota."""

    lease: str
    lines: str
    dirty: str
    holds: str
    due: str
    quota: str


@dataclass
class Part:
    """Of a hold, what is set aside of one lease. Its fields in the order in which they are written down."""

    place: Place
    name: str
    state: str
    units: int
    committed: int
    due: int
    last_minute: int
    on_expiry: str
    period: str
    dimensions: str

    most: int = 0  # that may still be committed

    @classmethod
    def read(cls, place: Place, name: str, text: str) -> "Part":
        state, units, committed, due, last_minute, on_expiry, period, dimensions = text.split(" ", 7)
        numbers = int(units), int(committed), int(due), int(last_minute)
        return cls(place, name, state, *numbers, on_expiry, period, dimensions)

    def __str__(self) -> str:
        return " ".join(str(each) for each in list(vars(self).values())[2:-1])


def read_was(store: "StoreModel", lease: str, period: str) -> Was | None:
    text = store.hash(lease).get(f"was:{period}")
    return None if text is None else dict.fromkeys(OVER, 0) | dict(zip(OVER, map(int, text.split()), strict=False))


def write_was(store: "StoreModel", lease: str, period: str, was: Was) -> None:
    store._write(lease, {f"was:{period}": " ".join(str(was[name]) for name in OVER)})


class Holds:
    """As a script has them, from its begin to its end: it sees to so many and no more."""

    def __init__(self, store: "StoreModel", mono: int) -> None:
        self._store = store
        self.mono = mono
        self._left = MOST

    def read(self, place: Place, name: str) -> Part | None:
        text = self._store.hash(place.holds).get(name)
        return None if text is None else Part.read(place, name, text)

    def _write(self, part: Part) -> None:
        place = part.place
        self._store._write(place.holds, {part.name: str(part)})
        self._store._write(place.due, {part.name: str(part.due)})
        due = self._store.hash(place.lease).get("due")
        if due is None or part.due < int(due):
            self._store._write(place.lease, {"due": str(part.due)})

    def _forget(self, part: Part) -> None:
        self._store._remove(part.place.holds, part.name)
        self._store._remove(part.place.due, part.name)
        part.state = "forgotten"

    def used(self, part: Part) -> int | None:
        f = self._store.hash(part.place.lease)
        if f.get("period") == part.period:
            return int(f.get("consumed", 0)) + int(f.get("held", 0))
        was = read_was(self._store, part.place.lease, part.period)
        return None if was is None else was["consumed"] + was["held"]

    def book(self, part: Part, held: int, consumed: int, holds: int) -> None:
        lease = part.place.lease
        f, grows = self._store.hash(lease), {"held": held, "consumed": consumed, "holds": holds}
        if f.get("period") == part.period:
            self._store._write(lease, {name: str(int(f.get(name, 0)) + by) for name, by in grows.items() if by})
        else:
            self._book_over(part, grows)
        if consumed:
            self._note_line(part, consumed)

    def _book_over(self, part: Part, grows: dict[str, int]) -> None:
        was = read_was(self._store, part.place.lease, part.period)
        assert was is not None
        was |= {name: was[name] + by for name, by in grows.items()}
        was["returned"] = max(was["returned"], was["granted"] + was["overage"] - was["consumed"] - was["held"])
        write_was(self._store, part.place.lease, part.period, was | {"told": 0})
        self._store._add(part.place.dirty, part.place.quota)

    def _note_line(self, part: Part, units: int) -> None:
        minute = min(self._store.now_us // 60_000_000, part.last_minute)
        line, lines = f"{part.period}|{minute}|{part.dimensions}", part.place.lines
        self._store._write(lines, {line: str(int(self._store.hash(lines).get(line, 0)) + units)})
        self._store._add(part.place.dirty, part.place.quota)

    def run_out(self, part: Part) -> None:
        charged = part.on_expiry == "charge"
        self.book(part, -part.units, part.units if charged else 0, 0)
        part.state, part.due = "charged" if charged else "lapsed", self.mono + RAN_OUT_US
        self._write(part)
        paid = part.units if charged else 0
        self._note_work(part, paid, paid)

    def _fall_due(self, part: Part) -> None:
        if part.state == "open":
            self.run_out(part)
            return
        if part.state in PENDING:
            self.book(part, 0, 0, -1)
        self._forget(part)

    def set_aside(self, part: Part) -> None:
        self.book(part, part.units, 0, 1)
        self._write(part)

    def find(self, place: Place, name: str) -> Part | None:
        self.sweep(place)
        part = self.read(place, name)
        if part is None:
            return None
        used = self.used(part)
        if part.state in PENDING and used is None:
            return None
        if part.due <= self.mono:
            self._fall_due(part)
        part.most = MAX_UNITS - (used or 0)
        return None if part.state == "forgotten" else part

    def finish(self, part: Part, state: str, units: int) -> None:
        held = part.units if part.state == "open" else 0
        paid = part.units if part.state == "charged" else 0
        self.book(part, -held, max(0, units - paid), -1)
        self._note_work(part, max(units, paid), min(units, held) or paid)
        part.state, part.committed, part.due = state, units, self.mono + ENDED_US
        self._write(part)

    def _note_work(self, part: Part, units: int, covered: int) -> None:
        """Tell the ground truth what came of the part in all, and how much of it had been set aside."""
        self._store.note_work(part.place.lease, part.period, part.name, units, covered)

    def extend(self, part: Part, due: int) -> None:
        part.due = max(part.due, due)
        self._write(part)

    def sweep(self, place: Place) -> None:
        """Nothing, unless something is due."""
        due = self._store.hash(place.lease).get("due")
        if due is None or int(due) > self.mono:
            return
        for name in self._names_due(place):
            self._left -= 1
            part = self.read(place, name)
            assert part is not None
            if self.used(part) is None:
                self._forget(part)
            else:
                self._fall_due(part)
        first = min((int(each) for each in self._store.hash(place.due).values()), default=None)
        if first is None:
            self._store._remove(place.lease, "due")
        else:
            self._store._write(place.lease, {"due": str(first)})

    def _names_due(self, place: Place) -> list[str]:
        dues = sorted((int(due), name) for name, due in self._store.hash(place.due).items())
        return [name for due, name in dues if due <= self.mono][: self._left]
