"""Which primary of a Cluster owns which slot, by the views of its nodes (`CLUSTER NODES`).

Views may differ. As the nodes do among themselves, the claim with the higher config epoch wins: a failover raises it,
and so does the end of a migration. So a node that has the same slot in the same config epoch has had it all the time
in between.
"""

from binascii import crc_hqx
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SLOTS = 16_384


class Place(NamedTuple):
    """A primary, in one config epoch."""

    host: str
    port: int
    node: str
    config_epoch: int


def slot_of(tag: bytes) -> int:
    """Return the slot of a hash tag, by CRC-16/XMODEM."""
    return crc_hqx(tag, 0) % SLOTS


def places_of(tags: Iterable[bytes], views: Iterable[tuple[str, str]], *, by_name: bool = False) -> dict[bytes, Place]:
    """Return the primary of each tag that has one.

    `views`: pairs of a host and the view of its node. `by_name`: prefer the names that nodes announce to addresses, for
    a certificate names a host.
    """
    claims = [claim for host, text in views for claim in _claims(host, text, by_name)]
    slots = {tag: slot_of(tag) for tag in tags}
    found = {tag: [place for first, last, place in claims if first <= slot <= last] for tag, slot in slots.items()}
    return {tag: max(places, key=lambda place: place.config_epoch) for tag, places in found.items() if places}


def nodes_of(views: Iterable[tuple[str, str]], *, by_name: bool = False) -> set[tuple[str, int]]:
    """Return the addresses of all nodes."""
    lines = ((host, line.split()) for host, text in views for line in text.splitlines())
    return {address for host, fields in lines if (address := _address(host, fields[1], by_name))[1]}


def _claims(host: str, text: str, by_name: bool) -> Iterator[tuple[int, int, Place]]:
    """Yield the ranges of slots that a view assigns. A migrating slot, in brackets, is still its old node's."""
    for line in text.splitlines():
        node, address, flags, _, _, _, config_epoch, _, *ranges = line.split()
        if "master" in flags.split(","):
            place = Place(*_address(host, address, by_name), node, int(config_epoch))
            for text_ in ranges:
                if not text_.startswith("["):
                    first, _, last = text_.partition("-")
                    yield int(first), int(last or first), place


def _address(host: str, text: str, by_name: bool) -> tuple[str, int]:
    """Parse `ip:port@bus,hostname`. A node that does not know its own address has the host that it was asked at."""
    address, _, more = text.partition("@")
    known, _, port = address.rpartition(":")
    name = more.partition(",")[2].partition(",")[0]
    return (name if by_name and name and "=" not in name else known) or host, int(port)
