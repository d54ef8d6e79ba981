"""The block list: subjects that are denied whatever the policies say, found by hash before anything else."""

from typing import NamedTuple

from protocol.addresses import parse_address, parse_network
from protocol.blocks import BlockedValue, BlockList
from protocol.check import BlockField

Subject = dict[str, str]


class Blocked(NamedTuple):
    """The field that blocks a subject, and until when on this agent's monotonic clock; None: until the list changes."""

    field: BlockField
    ends_at_ms: int | None


class Blocks:
    """One version of the block list, and when it arrived: ends are durations from then."""

    def __init__(self, listed: BlockList, heard_at_ms: int) -> None:
        self.version = listed.version
        self._values: dict[tuple[str, str], Blocked] = {}
        self._networks: dict[tuple[int, int, int], Blocked] = {}
        for each in listed.data:
            self._add(each, heard_at_ms)
        self._fields = sorted({field for field, _ in self._values})
        self._lengths = sorted({(version, length) for version, length, _ in self._networks})

    def _add(self, each: BlockedValue, heard_at_ms: int) -> None:
        blocked = Blocked(each.field, None if each.ends_in_ms is None else heard_at_ms + each.ends_in_ms)
        if each.field is BlockField.IP:
            network = parse_network(each.value)
            self._networks[network.version, network.length, network.number] = blocked
        else:
            self._values[each.field.value, each.value] = blocked

    def __bool__(self) -> bool:
        return bool(self._values or self._networks)

    def find(self, subject: Subject, now_ms: int) -> Blocked | None:
        """Return the block of this subject that lasts longest, of those in force."""
        found = [blocked for blocked in self._all(subject) if blocked.ends_at_ms is None or blocked.ends_at_ms > now_ms]
        return max(found, key=_lasts, default=None)

    def _all(self, subject: Subject) -> list[Blocked]:
        found = [self._values.get((field, subject.get(field, ""))) for field in self._fields]
        if self._lengths and "ip" in subject:
            found += self._of_address(subject["ip"])
        return [blocked for blocked in found if blocked is not None]

    def _of_address(self, text: str) -> list[Blocked | None]:
        """Return the blocks of an address. There are at most 33 and 129 lengths of prefixes to look up."""
        try:
            address = parse_address(text)
        except ValueError:
            return []  # no network has it
        return [
            self._networks.get((version, length, address.within(length)))
            for version, length in self._lengths
            if version == address.version
        ]


def _lasts(blocked: Blocked) -> float:
    return float("inf") if blocked.ends_at_ms is None else blocked.ends_at_ms
