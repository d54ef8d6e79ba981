"""Check how the addresses of a database URL are named, and what distinguishes a copy from the installation."""

import pytest

from coordinator.installation.rules import Home, addresses_of, why_unconfirmed

HOME = Home("7", 16_384, frozenset({"db:5432/leasehold"}))


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("postgresql://u:p@DB/leasehold", {"db:5432/leasehold"}),
        ("postgresql://u:p%40@db:5433/leasehold?sslmode=require", {"db:5433/leasehold"}),
        ("postgresql://u@a:1,b/leasehold", {"a:1/leasehold", "b:5432/leasehold"}),
        ("postgresql://u@/leasehold?host=/run/postgresql", {"/run/postgresql:5432/leasehold"}),
        ("postgresql://u@/leasehold?host=a,b&port=1,2", {"a:1/leasehold", "b:2/leasehold"}),
        ("postgresql://u@[::1]:5433/leasehold", {"[::1]:5433/leasehold"}),
        ("postgresql://u@[::1]/leasehold", {"[::1]:5432/leasehold"}),
    ],
)
def test_an_address_is_named_in_full(url: str, addresses: set[str]) -> None:
    assert addresses_of(url, "") == addresses
    assert addresses_of(url, "production") == {"name:production"}


@pytest.mark.parametrize(
    ("here", "is_confirmed"),
    [
        (HOME, True),
        (HOME._replace(addresses=frozenset({"db:5432/leasehold", "standby:5432/leasehold"})), True),
        (HOME._replace(system_identifier=""), True),  # a managed Postgres that keeps it to itself
        (HOME._replace(system_identifier="8"), False),  # restored from a dump
        (HOME._replace(database_oid=16_385), False),  # copied within the cluster
        (HOME._replace(addresses=frozenset({"drill:5432/leasehold"})), False),  # a copy of the files
        (HOME._replace(addresses=frozenset({"name:staging"})), False),
    ],
)
def test_a_copy_is_recognized(here: Home, is_confirmed: bool) -> None:
    assert (why_unconfirmed(HOME, here) is None) == is_confirmed
