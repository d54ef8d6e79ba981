"""The network between regions and the coordinator, whose faults the scenarios set."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

CORE = "core"  # the place of the coordinator and of Postgres


@dataclass(frozen=True)
class Way:
    """One direction between two places."""

    is_cut: bool = False
    loss: float = 0.0
    delay_s: float = 0.0


OPEN = Way()
CUT = Way(is_cut=True)


class Wan(ABC):
    """Joins places. The subclasses differ in what a lost message is."""

    kind: str  # says in the published table what joins the places

    def __init__(self, regions: Iterable[str]) -> None:
        self._ways = {way: OPEN for region in regions for way in ((region, CORE), (CORE, region))}

    def shape(self, region: str, *, out: Way = OPEN, back: Way = OPEN) -> None:
        """Set how messages from a region travel (`out`), and those to it (`back`)."""
        self._ways[region, CORE], self._ways[CORE, region] = out, back

    @abstractmethod
    def inside(self, place: str) -> AbstractContextManager[None]:
        """Let this thread, and processes that it starts, be at a place."""

    @abstractmethod
    def address_of_core(self, region: str, port: int) -> str:
        """Return the host and port at which a region reaches a server of the core."""

    @abstractmethod
    def close(self) -> None:
        """End what joins the places."""
