"""Who has which slot of a Cluster, as its nodes say (`CLUSTER NODES`).

Nodes may differ in what they know. As among themselves, of two that claim a slot the one with the higher config epoch
has it: a failover raises it, and so does the end of a migration. So whoever has the same slot in the same config epoch
has had it all the time between.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

SLOTS = 16_384
_POLYNOMIAL = 0x1021


class Place(NamedTuple):
    """A primary, since it became one."""

    host: str
    port: int
    node: str
    config_epoch: int


def slot_of(tag: bytes) -> int:
    """CRC-16/XMODEM of a hash tag."""
    crc = 0
    for byte in tag:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ _POLYNOMIAL) if crc & 0x8000 else crc << 1
    return (crc & 0xFFFF) % SLOTS


def places_of(tags: Iterable[bytes], told: Iterable[tuple[str, str]]) -> dict[bytes, Place]:
    """The primary of each tag that has one. `told`: a host, and what the node there says."""
    claims = [claim for host, text in told for claim in _claims(host, text)]
    slots = {tag: slot_of(tag) for tag in tags}
    found = {tag: [place for first, last, place in claims if first <= slot <= last] for tag, slot in slots.items()}
    return {tag: max(places, key=lambda place: place.config_epoch) for tag, places in found.items() if places}


def nodes_of(told: Iterable[tuple[str, str]]) -> set[tuple[str, int]]:
    """Every node's address, for whoever has to ask one."""
    lines = ((host, line.split()) for host, text in told for line in text.splitlines())
    return {address for host, fields in lines if (address := _address(host, fields[1]))[1]}


def _claims(host: str, text: str) -> Iterator[tuple[int, int, Place]]:
    """Of slots, each a range. What is on its way from or to another node, in brackets, is where it was."""
    for line in text.splitlines():
        node, address, flags, _, _, _, config_epoch, _, *ranges = line.split()
        if "master" in flags.split(","):
            place = Place(*_address(host, address), node, int(config_epoch))
            for text_ in ranges:
                if not text_.startswith("["):
                    first, _, last = text_.partition("-")
                    yield int(first), int(last or first), place


def _address(host: str, text: str) -> tuple[str, int]:
    """`ip:port@bus,hostname`. A node that was never met by its address does not know it: it is where it was asked."""
    told, _, port = text.partition("@")[0].rpartition(":")
    return told or host, int(port)
