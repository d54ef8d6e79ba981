"""Each address has one spelling, because a client with two spellings would have two quotas."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.addresses import parse_address, parse_network, prefix_of

ADDRESSES = st.ip_addresses()


@given(ADDRESSES)
def test_an_address_has_its_canonical_spelling(address: IPv4Address | IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    assert parse_address(address.exploded).text == str(mapped or address)
    assert parse_address(str(address).upper()) == parse_address(str(address))


@given(st.ip_addresses(v=4))
def test_ipv4_mapped_to_ipv6_is_ipv4(address: IPv4Address) -> None:
    assert parse_address(f"::ffff:{address}") == parse_address(str(address))
    assert parse_network(f"::ffff:{address}") == parse_network(str(address))


@given(ADDRESSES, st.integers(0, 32), st.integers(0, 128))
def test_a_prefix_is_the_network_that_the_address_is_in(
    address: IPv4Address | IPv6Address, ipv4: int, ipv6: int
) -> None:
    parsed = parse_address(str(address))
    inside = ip_address(parsed.text)
    network = ip_network(prefix_of(parsed, ipv4, ipv6))
    assert inside in network
    assert network.prefixlen == (ipv4 if inside.version == 4 else ipv6)


@given(ADDRESSES, ADDRESSES, st.integers(0, 128))
def test_a_network_contains_its_addresses(
    one: IPv4Address | IPv6Address, other: IPv4Address | IPv6Address, length: int
) -> None:
    network = ip_network(f"{one}/{min(length, one.max_prefixlen)}", strict=False)
    parsed, address = parse_network(str(network)), parse_address(str(other))
    has_it = address.version == parsed.version and address.within(parsed.length) == parsed.number
    assert has_it == (ip_address(address.text) in ip_network(parsed.text))


def test_a_zone_is_left_out() -> None:
    assert parse_address("fe80::1%eth0").text == "fe80::1"


@pytest.mark.parametrize("text", ["", "1.2.3", "1.2.3.256", "::1::", "example.org", "1.2.3.4/8", "010.0.0.1"])
def test_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|Expected|octet|Octet"):
        parse_address(text)
