"""Who is denied everywhere, whatever their quotas say: the list as agents hear it, whole each time it changes."""

from enum import StrEnum

from msgspec import Struct

from protocol.addresses import parse_network
from protocol.units import Milliseconds, Units

MAX_BLOCKS = 10_000  # the list travels whole: a megabyte


class BlockField(StrEnum):
    """What a block can be for. Of `ip` the value is an address or a network, such as 203.0.113.0/24."""

    TENANT = "tenant"
    USER = "user"
    API_KEY = "api_key"
    IP = "ip"


class BlockedValue(Struct, frozen=True, kw_only=True):
    field: BlockField
    value: str
    ends_in_ms: Milliseconds | None = None  # after the list was made; none: until a list comes without it


class BlockList(Struct, frozen=True, kw_only=True):
    version: Units
    data: list[BlockedValue]


def spelt(field: BlockField, value: str) -> str:
    """A value as it is compared. Raises ValueError for what no request can have."""
    if field is BlockField.IP:
        return parse_network(value).text
    if not 1 <= len(value) <= 256 or not value.isprintable():
        raise ValueError("it is a text of 1 to 256 printable characters")
    return value
