"""Addresses as limits and blocks see them: one spelling for each.

Somebody who could write an address in two ways would have two quotas. So an IPv4 address that came mapped into IPv6 is
IPv4, a zone is left out, and the rest is spelt as RFC 5952 has it.
"""

import functools
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

MOST_REMEMBERED = 10_000
_MAPPED = IPv6Network("::ffff:0:0/96")


class Address(NamedTuple):
    version: int  # 4 or 6
    number: int
    text: str

    @property
    def bits(self) -> int:
        return 32 if self.version == 4 else 128

    def within(self, length: int) -> int:
        """The number of its network of that prefix length."""
        return self.number >> (self.bits - length)


class Network(NamedTuple):
    version: int
    length: int
    number: int  # as `Address.within` says it
    text: str


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def parse_address(text: str) -> Address:
    """Raises ValueError for what is no address."""
    found = _unmapped(ip_address(text.partition("%")[0]))
    return Address(found.version, int(found), str(found))


def parse_network(text: str) -> Network:
    """A single address is a network, too. Raises ValueError, also for one with bits beyond its prefix."""
    found = ip_network(text)
    if isinstance(found, IPv6Network) and found.subnet_of(_MAPPED):
        inner = found.network_address.ipv4_mapped
        found = ip_network(f"{inner}/{found.prefixlen - 96}")
    number = int(found.network_address) >> (found.max_prefixlen - found.prefixlen)
    whole = found.prefixlen == found.max_prefixlen
    return Network(found.version, found.prefixlen, number, str(found.network_address) if whole else str(found))


def prefix_of(address: Address, ipv4: int, ipv6: int) -> str:
    """The network that an address is counted with, such as `2001:db8:1:2::/64`."""
    length = ipv4 if address.version == 4 else ipv6
    base = address.within(length) << (address.bits - length)
    return f"{IPv4Address(base) if address.version == 4 else IPv6Address(base)}/{length}"


def is_loopback(host: str) -> bool:
    """Return whether a host, by its name or address, is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
