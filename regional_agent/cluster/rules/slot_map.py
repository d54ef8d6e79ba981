"""Which primary of a Cluster owns which slot, by the views of its nodes (`CLUSTER NODES`).

Views may differ. As the nodes do among themselves, the claim with the higher config epoch wins: a failover raises it,
and so does the end of a migration. So a node that has the same slot in the same config epoch has had it all the time
in between.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

SLOTS = 16_384
_POLYNOMIAL = 0x1021


class Place(NamedTuple):
    """A primary, in one config epoch."""

    host: str
    port: int
    node: str
    config_epoch: int


def slot_of(tag: bytes) -> int:
    """Return the slot of a hash tag, by CRC-16/XMODEM."""
    crc = 0
    for byte in tag:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ _POLYNOMIAL) if crc & 0x8000 else crc << 1
    return (crc & 0xFFFF) % SLOTS


def places_of(tags: Iterable[bytes], views: Iterable[tuple[str, str]]) -> dict[bytes, Place]:
    """Return the primary of each tag that has one. `views`: pairs of a host and the view of its node."""
    claims = [claim for host, text in views for claim in _claims(host, text)]
    slots = {tag: slot_of(tag) for tag in tags}
    found = {tag: [place for first, last, place in claims if first <= slot <= last] for tag, slot in slots.items()}
    return {tag: max(places, key=lambda place: place.config_epoch) for tag, places in found.items() if places}


def nodes_of(views: Iterable[tuple[str, str]]) -> set[tuple[str, int]]:
    """Return the addresses of all nodes."""
    lines = ((host, line.split()) for host, text in views for line in text.splitlines())
    return {address for host, fields in lines if (address := _address(host, fields[1]))[1]}


def _claims(host: str, text: str) -> Iterator[tuple[int, int, Place]]:
    """Yield the ranges of slots that a view assigns. A migrating slot, in brackets, is still its old node's."""
    for line in text.splitlines():
        node, address, flags, _, _, _, config_epoch, _, *ranges = line.split()
        if "master" in flags.split(","):
            place = Place(*_address(host, address), node, int(config_epoch))
            for text_ in ranges:
                if not text_.startswith("["):
                    first, _, last = text_.partition("-")
                    yield int(first), int(last or first), place


def _address(host: str, text: str) -> tuple[str, int]:
    """Parse `ip:port@bus,hostname`. A node that does not know its own address has the host that it was asked at."""
    known, _, port = text.partition("@")[0].rpartition(":")
    return known or host, int(port)
