"""lua/algorithms/concurrency.lua in plain Python, for the model of a store: what holds have taken of a quota."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.store_model import StoreModel

MAX_UNITS = 2**53 - 1
REMEMBERED_US = 600_000_000
KEPT_US = 40_000_000
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


class SlotsGiven(NamedTuple):
    """A share of them, as it is written down."""

    number: int
    units: int
    ends: int
    after: int
    longest_us: int
    sent: int

    @property
    def kept(self) -> int:
        return self.sent + KEPT_US + self.longest_us


class Slots:
    def __init__(self, store: "StoreModel", mono: int) -> None:
        self._store = store
        self.mono = mono
        self._lost_at = store.lost_at

    def share(self, place: Place) -> SlotsGiven | None:
        text = self._store.hash(place.slots).get("share")
        share = SlotsGiven(*map(int, text.split())) if text else None
        if share is None or self.mono >= share.kept or (self._lost_at is not None and share.sent <= self._lost_at):
            return None
        return share

    def in_force(self, share: SlotsGiven | None, safe: int, longest_us: int) -> int:
        if share is not None:
            return share.units if self.mono < share.ends else share.after
        is_young = self._lost_at is not None and self.mono < self._lost_at + KEPT_US + longest_us
        return 0 if is_young else safe

    def give(self, place: Place, share: SlotsGiven) -> bool:
        known = self.share(place)
        if known is not None and known.number >= share.number:
            return False
        self._store._write(place.slots, {"share": " ".join(map(str, share))})
        self._live(place)
        return True

    def lost_ms(self, longest_us: int) -> int:
        return 0 if self._lost_at is None else max(0, -((self.mono - self._lost_at - longest_us) // 1000))

    def may_extend(self, slot: Slot) -> bool:
        f = self._store.hash(slot.place.slots)
        share = self.share(slot.place)
        return "safe" not in f or int(f["used"]) <= self.in_force(share, int(f["safe"]), slot.longest_us)

    def _live(self, place: Place) -> None:
        share, over = self.share(place), self._store.hash(place.over)
        last = max([*map(int, over.values()), share.kept if share else 0])
        for key in place:
            if key in self._store.data:
                self._store._expire(key, max(0, -((self.mono - last) // 1000)) + 1)

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
        self._live(slot.place)

    def _write_taken(self, slot: Slot) -> None:
        self._store._write(slot.place.due, {slot.name: str(slot.due)})
        self._write(slot, slot.due + REMEMBERED_US)

    def take(self, slot: Slot, safe: int) -> None:
        """`safe` below zero: they are not shared over regions."""
        if safe < 0:
            self._store._remove(slot.place.slots, "safe")
        else:
            self._store._write(slot.place.slots, {"safe": str(safe)})
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
        share = self.share(place) if "safe" in self._store.hash(place.slots) else None
        slot.longest_us = min(slot.longest_us, share.longest_us) if share else slot.longest_us
        return slot

    def finish(self, slot: Slot, state: str, units: int) -> None:
        if slot.state == "open":
            self._free(slot)
        slot.state, slot.committed = state, units
        self._write(slot, self.mono + REMEMBERED_US)

    def extend(self, slot: Slot, due: int) -> None:
        slot.due = max(slot.due, due)
        self._write_taken(slot)
