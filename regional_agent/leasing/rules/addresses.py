"""Which of the coordinator's addresses an agent uses.

The addresses are in order of preference. A failure of the one in use moves the agent to the next one, behind the last
to the first. The agent returns to a preferred address once that says it is ready, so a region does not stay with a far
coordinator because its own was restarted, and coordinators that were restarted one by one get their regions back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Address:
    url: str
    fault: str = ""  # why the latest call failed there; empty after one that was answered
    is_tls_fault: bool = False


@dataclass(slots=True)
class Addresses:
    known: Sequence[Address]
    moves: int = 0  # away from an address that failed
    _used: int = field(default=0)

    @classmethod
    def of(cls, urls: Sequence[str]) -> "Addresses":
        return cls([Address(url) for url in urls])

    @property
    def in_use(self) -> Address:
        return self.known[self._used]

    def in_order(self) -> list[Address]:
        """Return all addresses in the order in which a call tries them."""
        return [*self.known[self._used :], *self.known[: self._used]]

    def to_probe(self) -> list[Address]:
        """Return the addresses to ask whether they are ready: the preferred ones, and those that failed."""
        return [
            each for place, each in enumerate(self.known) if place < self._used or (each.fault and place > self._used)
        ]

    def failed(self, address: Address, reason: str, *, is_tls_fault: bool = False) -> bool:
        """Note a failure. Return whether the agent moves to another address for it."""
        address.fault, address.is_tls_fault = reason, is_tls_fault
        if address is not self.in_use or len(self.known) == 1:
            return False
        self._used = (self._used + 1) % len(self.known)
        self.moves += 1
        return True

    def answered(self, address: Address) -> None:
        address.fault, address.is_tls_fault = "", False

    def ready(self, address: Address) -> bool:
        """Note that an address says it is ready. Return whether the agent returns to it."""
        self.answered(address)
        place = self.known.index(address)
        if place >= self._used:
            return False
        self._used = place
        return True
