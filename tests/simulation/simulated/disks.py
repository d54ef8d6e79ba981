"""The disk of a region's agents. Flushed data survives a kill; other data survives whole, in part or not at all.

It also records the ground truth of journals: what is on disk was admitted, and must be booked exactly once.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from protocol.limits.usage_labels import LABELS
from regional_agent.store_outage.journal import end_of_records
from regional_agent.store_outage.rules.records import Entry, ReadSegment, Record, packed, read

FLUSH_S = 0.003


@dataclass
class VirtualDisk:
    random: random.Random
    files: dict[str, bytes] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # the agent that holds its lock
    everything: dict[str, bytes] = field(default_factory=dict)  # removed ones included

    def kept(self) -> dict[tuple[str, str], int]:
        """Return units by quota and period, of all that was ever durable."""
        units: dict[tuple[str, str], int] = defaultdict(int)
        for content in self.everything.values():
            for entry in _entries_of(content):
                units[entry.quota, entry.period] += entry.units
        return units

    def kept_by_labels(self) -> Counter[tuple[str, str, str]]:
        """Return units by quota, period and labels, of all that was ever durable."""
        units = Counter[tuple[str, str, str]]()
        for content in self.everything.values():
            for entry in _entries_of(content):
                units[entry.quota, entry.period, json.loads(entry.dimensions).get(LABELS, "")] += entry.units
        return units

    def write(self, name: str, data: bytes) -> None:
        whole = self.files[name]
        self.files[name] = whole[: end_of_records(whole)] + data
        self.everything[name] = self.files[name]


@lru_cache
def _entries_of(content: bytes) -> list[Entry]:
    return list(read(content).entries)


class VirtualSegment:
    def __init__(self, disk: VirtualDisk, name: str, may_act: Callable[[], bool]) -> None:
        self.name = name
        self._disk = disk
        self._may_act = may_act

    @property
    def size_bytes(self) -> int:
        return len(self._disk.files[self.name])

    async def append(self, data: bytes) -> None:
        """Append data. The agent may be killed while the disk works."""
        await asyncio.sleep(FLUSH_S)
        if self._may_act():
            self._disk.write(self.name, data)
            return
        self._disk.write(self.name, data[: self._disk.random.choice([0, len(data) // 2, len(data)])])
        await asyncio.get_running_loop().create_future()  # a killed agent never continues

    async def content(self) -> ReadSegment:
        return self.read()

    def read(self) -> ReadSegment:
        return read(self._disk.files[self.name])

    def remove(self, *, keep_a_copy: bool) -> None:
        if self._may_act():
            assert not keep_a_copy, "this disk damages nothing that was flushed"
            del self._disk.files[self.name]

    def release(self) -> None:
        """Release the lock of a journal, as the death of its agent does."""


class VirtualDirectory:
    def __init__(
        self, disk: VirtualDisk, agent: str, may_act: Callable[[], bool], lives: Callable[[str], bool]
    ) -> None:
        self._disk = disk
        self._agent = agent
        self._may_act = may_act
        self._lives = lives

    def left(self) -> list[VirtualSegment]:
        free = [name for name in sorted(self._disk.files) if not self._lives(self._disk.owners[name])]
        return [self._segment(name) for name in free]

    async def begin(self, owner: str) -> VirtualSegment:
        await asyncio.sleep(FLUSH_S)
        name = self._disk.random.randbytes(16).hex()
        self._disk.files[name] = self._disk.everything[name] = packed(Record([], [], owner=owner))
        return self._segment(name)

    def _segment(self, name: str) -> VirtualSegment:
        self._disk.owners[name] = self._agent
        return VirtualSegment(self._disk, name, self._may_act)
