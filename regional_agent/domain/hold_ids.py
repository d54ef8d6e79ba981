"""A hold's id: it names the epoch and the leases that units were set aside of.

So whoever is told of a hold finds what to book it on without asking anybody, long after the period or the epoch is
over. To services it is a text without spaces, and no more: `name.epoch.lanes.parts`. Of a hold over several cells of a
Cluster it names what was set aside in each of them: `…~…`.
"""

import binascii
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

LONGEST = 8_192  # it has to fit into a request line
NAME_BYTES = 16
BESIDE = "~"
_ID = re.compile(r"([A-Za-z0-9_-]{22})\.(\d{1,15})\.(\d{1,4})\.([A-Za-z0-9_-]*)")


class HoldPart(NamedTuple):
    """What is set aside of one quota, and which algorithm (lua/algorithms) knows of it."""

    algorithm: str
    quota: str


class HoldId(NamedTuple):
    name: str
    epoch: int
    lanes: int
    parts: tuple[HoldPart, ...]  # in the order of the policies; none: nothing is set aside
    others: tuple["HoldId", ...] = ()  # of the same hold, in other cells

    @classmethod
    def fresh(cls, epoch: int, lanes: int, parts: Iterable[HoldPart], others: "tuple[HoldId, ...]" = ()) -> Self:
        return cls(_text(secrets.token_bytes(NAME_BYTES)), epoch, lanes, tuple(parts), others)

    @classmethod
    def of_nothing(cls) -> Self:
        """For work that may be done with nothing set aside."""
        return cls.fresh(0, 0, ())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for what `str` never makes."""
        if len(text) > LONGEST:
            raise ValueError("not the id of a hold")
        first, *others = map(cls._one, text.split(BESIDE))
        return first._replace(others=tuple(others))

    @classmethod
    def _one(cls, text: str) -> Self:
        found = _ID.fullmatch(text)
        if found is None:
            raise ValueError("not the id of a hold")
        name, epoch, lanes, packed = found.groups()
        hold = cls(name, int(epoch), int(lanes), tuple(_parts(packed)))
        if str(hold) != text or (hold.parts and not hold.lanes):
            raise ValueError("not the id of a hold")
        return hold

    def __str__(self) -> str:
        parts = "\n".join(f"{part.algorithm} {part.quota}" for part in self.parts)
        own = f"{self.name}.{self.epoch}.{self.lanes}.{_text(parts.encode())}"
        return BESIDE.join((own, *map(str, self.others)))

    @property
    def by_cell(self) -> "list[HoldId]":
        """What is set aside, each in one cell."""
        return [each for each in (self._replace(others=()), *self.others) if each.parts]


class HoldTerms(NamedTuple):
    """A hold, and for how long it lasts: as it is asked for, or from now on."""

    id: HoldId
    ttl_ms: int


def _parts(packed: str) -> Iterator[HoldPart]:
    try:
        text = urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("not the id of a hold") from None
    for line in text.split("\n") if text else ():
        algorithm, _, quota = line.partition(" ")
        yield HoldPart(algorithm, quota)


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")
