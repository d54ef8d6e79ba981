"""lua/algorithms/concurrency.lua in plain Python, for the model of a store: what holds have taken of a quota."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.store_model import StoreModel

MAX_UNITS = 2**53 - 1
REMEMBERED_US = 600_000_000
FORGOTTEN_AT_ONCE = 64


class Place(NamedTuple):
    """The names of a quota's keys."""

    slots: str
    due: str
    over: str


@dataclass
class Slot:
    """Its fields in the order in which they are written down."""

    place: Place
    name: str
    state: str
    units: int
    committed: int
    due: int
    longest_us: int

    most: int = MAX_UNITS  # that may still be committed

    @classmethod
    def read(cls, place: Place, name: str, text: str) -> "Slot":
        state, *numbers = text.split()
        return cls(place, name, state, *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.state} {self.units} {self.committed} {self.due} {self.longest_us}"


class Slots:
    def __init__(self, store: "StoreModel", mono: int) -> None:
        self._store = store
        self.mono = mono

    def look(self, place: Place) -> dict[str, Any]:
        self._sweep(place)
        taken = sorted((int(due), self._read(place, name).units) for name, due in self._store.hash(place.due).items())
        used = int(self._store.hash(place.slots).get("used", 0))
        assert used == sum(units for _, units in taken), "the two counts of what is taken agree"
        return {"used": used, "slots": taken, "last": taken[-1][0] if taken else 0, "mono": self.mono}

    def _read(self, place: Place, name: str) -> Slot:
        return Slot.read(place, name, self._store.hash(place.slots)[name])

    def _sweep(self, place: Place) -> None:
        for name, due in list(self._store.hash(place.due).items()):
            if int(due) <= self.mono:
                self._free(self._read(place, name))
        over = sorted((int(at), name) for name, at in self._store.hash(place.over).items())
        for _, name in [each for each in over if each[0] <= self.mono][:FORGOTTEN_AT_ONCE]:
            self._store._remove(place.slots, name)
            self._store._remove(place.over, name)

    def _free(self, slot: Slot) -> None:
        used = int(self._store.hash(slot.place.slots)["used"])
        self._store._write(slot.place.slots, {"used": str(used - slot.units)})
        self._store._remove(slot.place.due, slot.name)

    def _write(self, slot: Slot, remembered_until: int) -> None:
        self._store._write(slot.place.slots, {slot.name: str(slot)})
        self._store._write(slot.place.over, {slot.name: str(remembered_until)})
        last = max(int(at) for at in self._store.hash(slot.place.over).values())
        for key in slot.place:
            if key in self._store.data:
                self._store._expire(key, -((self.mono - last) // 1000) + 1)

    def _write_taken(self, slot: Slot) -> None:
        self._store._write(slot.place.due, {slot.name: str(slot.due)})
        self._write(slot, slot.due + REMEMBERED_US)

    def take(self, slot: Slot) -> None:
        used = int(self._store.hash(slot.place.slots).get("used", 0))
        self._store._write(slot.place.slots, {"used": str(used + slot.units)})
        self._write_taken(slot)

    def find(self, place: Place, name: str) -> Slot | None:
        self._sweep(place)
        if name not in self._store.hash(place.slots):
            return None
        slot = self._read(place, name)
        if slot.state == "open" and slot.due <= self.mono:
            slot.state = "lapsed"
        return slot

    def finish(self, slot: Slot, state: str, units: int) -> None:
        if slot.state == "open":
            self._free(slot)
        slot.state, slot.committed = state, units
        self._write(slot, self.mono + REMEMBERED_US)

    def extend(self, slot: Slot, due: int) -> None:
        slot.due = max(slot.due, due)
        self._write_taken(slot)
