"""Check when an agent renews the leases of a quota, and which requests a reply answers."""

from typing import Any

import pytest

from protocol.messages import ExchangeReply, LeaseReply
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from regional_agent.leasing.settlement import answered_quotas, next_renewal_ms

HOUR_MS = 3_600_000


def told(*, expires: int, ends: int = HOUR_MS, **more: Any) -> LeaseReply:
    reply: dict[str, Any] = {"quota": "exports:tenant=acme", "period": "2026-11-18T12", "starts_in_ms": 0}
    reply |= {"granted": 10, "overage": 0, "unallocated": 90}
    reply |= {"first_minute": 0, "last_minute": 59, "expires_in_ms": expires, "ends_in_ms": ends}
    return LeaseReply(**reply | more)


NOW = told(expires=60_000)
LAST = told(expires=20_000, ends=20_000)  # it ends with its period
AHEAD = told(expires=70_000, starts_in_ms=20_000, period="2026-11-18T13")
FINAL = told(expires=0, final=True)
QUARANTINED = told(expires=0, refusal=GrantRefusal.QUARANTINED)
EXHAUSTED = told(expires=60_000, ends=900_000, refusal=GrantRefusal.EXHAUSTED)


@pytest.mark.parametrize(
    ("leases", "renewal_in_ms"),
    [
        ([NOW], 30_000),
        ([told(expires=120_000)], 45_000),  # early enough that an outage of a minute is survived
        ([told(expires=20_000)], 10_000),
        ([LAST], 10_000),
        ([LAST, AHEAD], 35_000),  # the other lease continues where this one ends
        ([NOW, AHEAD], 30_000),  # a lease that expires before the other begins is not continued by it
        ([FINAL, NOW], 30_000),
        ([EXHAUSTED], 450_000),  # no other lease begins before the period ends
        ([FINAL], None),
        ([QUARANTINED], None),
        ([], None),
    ],
)
def test_renewal_is_half_way_to_the_end_of_a_lease_without_successor(
    leases: list[LeaseReply], renewal_in_ms: int | None
) -> None:
    assert next_renewal_ms(leases) == renewal_in_ms


@pytest.mark.parametrize(
    ("outcome", "answered"), [(ExchangeOutcome.APPLIED, ["a", "b"]), (ExchangeOutcome.REPLAYED, ["a"])]
)
def test_a_replay_answers_only_the_quotas_that_it_contains(outcome: ExchangeOutcome, answered: list[str]) -> None:
    """Otherwise the agent would request the same units once more and get them twice."""
    assert answered_quotas(ExchangeReply(lane=0, seq=1, outcome=outcome), ["a", "b"], {"a": 5}) == answered
