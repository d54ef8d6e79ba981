"""The block list: subjects that are denied everywhere. Agents fetch the whole list each time it changes."""

from msgspec import Struct

from protocol.addresses import parse_network
from protocol.check import BlockField
from protocol.units import Milliseconds, Units

MAX_BLOCKS = 10_000  # the list travels whole: a megabyte


class BlockedValue(Struct, frozen=True, kw_only=True):
    field: BlockField
    value: str
    ends_in_ms: Milliseconds | None = None  # after the list was made; none: until a list comes without it


class BlockList(Struct, frozen=True, kw_only=True):
    version: Units
    data: list[BlockedValue]


def spelt(field: BlockField, value: str) -> str:
    """Return the value in the form in which it is compared. Raise ValueError for one that no request can have."""
    if field is BlockField.IP:
        return parse_network(value).text
    if not 1 <= len(value) <= 256 or not value.isprintable():
        raise ValueError("it must be 1 to 256 printable characters")
    return value
