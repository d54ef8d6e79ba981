"""Hold ids: they name the epoch and the leases that units were set aside of.

So an agent finds what to book a hold on without a look-up, long after the period or the epoch has ended. In the store
an id is the text `name.epoch.lanes.parts`; of a hold over several cells of a Cluster it has what was set aside in each
of them: `…~…`. Services get it sealed with the region's key (`HoldSeal`): it reveals no tenants and quotas, and can
neither be changed nor forged.
"""

import binascii
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

LONGEST = 8_192  # it has to fit into a request line
NAME_BYTES = 16
BESIDE = "~"
_ID = re.compile(r"([A-Za-z0-9_-]{22})\.(\d{1,15})\.(\d{1,4})\.([A-Za-z0-9_-]*)")


class HoldPart(NamedTuple):
    """A quota that units are set aside of, and the algorithm (lua/algorithms) that holds them."""

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
        """Return an id for work that may be done with no units set aside."""
        return cls.fresh(0, 0, ())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of an id. Raises ValueError for a text that `str` never makes."""
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
        """Return the parts of the hold, one hold for each cell."""
        return [each for each in (self._replace(others=()), *self.others) if each.parts]


class HoldTerms(NamedTuple):
    """A hold and its time to live: as requested, or from now on."""

    id: HoldId
    ttl_ms: int


class NoHoldKey(Exception):
    """The region's key has not arrived yet. It comes with the first policies, or from the state directory."""


class HoldSeal:
    """Encrypts and authenticates the ids that services get. The same id is sealed to the same text each time."""

    def __init__(self) -> None:
        self._cipher: AESSIV | None = None

    def use(self, key: bytes) -> None:
        self._cipher = AESSIV(key)

    @property
    def cipher(self) -> AESSIV:
        if self._cipher is None:
            raise NoHoldKey
        return self._cipher

    def seal(self, hold: HoldId) -> str:
        return _text(self.cipher.encrypt(str(hold).encode(), None))

    def open(self, text: str) -> HoldId:
        """Return the id of a sealed text. Raises ValueError for a text that this region's agents have not made."""
        if len(text) > 2 * LONGEST:
            raise ValueError("not the id of a hold")
        try:
            return HoldId.parse(self.cipher.decrypt(_raw(text), None).decode())
        except InvalidTag:
            raise ValueError("not the id of a hold") from None


def _parts(packed: str) -> Iterator[HoldPart]:
    try:
        text = _raw(packed).decode()
    except UnicodeDecodeError:
        raise ValueError("not the id of a hold") from None
    for line in text.split("\n") if text else ():
        algorithm, _, quota = line.partition(" ")
        yield HoldPart(algorithm, quota)


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def _raw(text: str) -> bytes:
    try:
        raw = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise ValueError("not the id of a hold") from None
    if _text(raw) != text:  # Python overlooks characters that do not belong there
        raise ValueError("not the id of a hold")
    return raw
