"""How long a lease lasts at its demand, by the fields that the store keeps of it."""

import pytest

from regional_agent.leasing.rules.headroom import dry_in_s

SECOND_US = 1_000_000
LEASE = {"period": "2026-11", "granted": "100", "consumed": "20", "expires": str(60 * SECOND_US), "ends": "99000000"}


@pytest.mark.parametrize(
    ("changed", "demand_milli", "seconds"),
    [
        ({}, 8_000, 10.0),
        ({"held": "40"}, 8_000, 5.0),
        ({}, 1, 60.0),  # it expires before it is spent
        ({"consumed": "100"}, 8_000, 0.0),
        ({"expires": "0"}, 8_000, 0.0),
        ({"overdraft": "80"}, 8_000, 20.0),
        ({"overdraft": "80", "expires": "0", "owed": "40"}, 8_000, 15.0),  # an overdraft outlasts the lease
        ({}, 0, None),
    ],
)
def test_a_lease_is_dry_when_it_is_spent_or_expires(
    changed: dict[str, str], demand_milli: int, seconds: float | None
) -> None:
    assert dry_in_s(LEASE | changed, 0, demand_milli) == seconds
