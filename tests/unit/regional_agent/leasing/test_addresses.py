"""Which address of the coordinator is used, after failures and recoveries."""

from hypothesis import given
from hypothesis import strategies as st

from regional_agent.leasing.rules.addresses import Addresses

URLS = ["https://a", "https://b", "https://c"]


def test_a_failure_moves_to_the_next_address_and_from_the_last_to_the_first() -> None:
    addresses = Addresses.of(URLS)
    used = []
    for _ in range(4):
        used.append(addresses.in_use.url)
        assert addresses.failed(addresses.in_use, "refused")
    assert used == ["https://a", "https://b", "https://c", "https://a"]
    assert addresses.moves == 4


def test_calls_that_fail_at_the_same_address_move_once() -> None:
    addresses = Addresses.of(URLS)
    first = addresses.in_use
    assert [addresses.failed(first, "reset") for _ in range(3)] == [True, False, False]
    assert addresses.in_use.url == "https://b"


def test_a_single_address_stays_in_use() -> None:
    addresses = Addresses.of(URLS[:1])
    assert not addresses.failed(addresses.in_use, "refused")
    assert (addresses.in_use.fault, addresses.moves) == ("refused", 0)


def test_a_call_tries_each_address_once_beginning_with_the_one_in_use() -> None:
    addresses = Addresses.of(URLS)
    addresses.failed(addresses.in_use, "refused")
    assert [each.url for each in addresses.in_order()] == ["https://b", "https://c", "https://a"]


def test_a_preferred_address_is_used_again_once_it_is_ready() -> None:
    addresses = Addresses.of(URLS)
    first, second, third = addresses.known
    assert not addresses.to_probe()
    addresses.failed(first, "refused")
    addresses.failed(second, "refused", is_tls_fault=True)
    assert addresses.to_probe() == [first, second]
    assert addresses.ready(second)
    assert (addresses.in_use, second.fault, second.is_tls_fault) == (second, "", False)
    assert not addresses.ready(third)
    assert addresses.in_use is second


def test_the_fault_of_an_address_that_is_not_preferred_ends_by_a_probe() -> None:
    addresses = Addresses.of(URLS)
    first, second, _ = addresses.known
    addresses.failed(second, "expired", is_tls_fault=True)
    assert addresses.to_probe() == [second]
    assert not addresses.ready(second)
    assert (addresses.in_use, second.fault) == (first, "")


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["failed", "answered", "ready"]))))
def test_one_address_is_in_use_whatever_happens(events: list[tuple[int, str]]) -> None:
    addresses = Addresses.of(URLS)
    for place, event in events:
        address, before = addresses.known[place], addresses.in_use
        if event == "failed":
            assert addresses.failed(address, "refused") == (address is before)
        elif event == "answered":
            addresses.answered(address)
            assert addresses.in_use is before
        elif addresses.ready(address):
            assert addresses.in_use is address
        assert sorted(each.url for each in addresses.in_order()) == URLS
        assert addresses.in_order()[0] is addresses.in_use
