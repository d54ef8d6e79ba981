"""Coordinator and agents apply an override alike, at every moment of its life."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from coordinator.exchange.rules.granting import EntitledPeriod, LeaseTerms, find_entitled_period
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement, quotas_of
from protocol.identifiers import parse_quota_key, quota_key, subject_key, wider_keys
from protocol.limits.document import LimitsDocument, OverrideTerm, PolicyBundle
from regional_agent.admission.policies import Policies, edges_ms, is_in_force
from regional_agent.store.types import AllowanceCharge

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
DOCUMENT = msgspec.convert(
    {
        "quotas": [{"name": "exports", "kind": "allowance", "limit": 10, "period": "month"}],
        "policies": [{"name": "export", "quota": "exports", "by": ["user", "tenant"], "match": {"route": "/x"}}],
    },
    LimitsDocument,
)
VALUES = st.sampled_from(["a", "b", "c/d,e=f"])
SUBJECTS = st.fixed_dictionaries({}, optional={"tenant": VALUES, "user": VALUES})
TERMS = st.builds(
    lambda subject, limit, starts, length: OverrideTerm(
        key=subject_key("exports", subject),
        limit=limit,
        starts_in_ms=starts,
        ends_in_ms=None if length is None else starts + length,
    ),
    SUBJECTS,
    st.integers(11, 99),
    st.integers(0, 4),
    st.none() | st.integers(1, 4),
)


def naive(terms: list[OverrideTerm], subject: dict[str, str], age_ms: int) -> int:
    """Return the limit of the override in force that names most fields of the subject, or the last of equals."""
    limit: Any = 10
    most = -1
    for term in terms:
        said = parse_quota_key(term.key)[1]
        is_on = term.starts_in_ms <= age_ms and (term.ends_in_ms is None or age_ms < term.ends_in_ms)
        if is_on and said.items() <= subject.items():
            rank = _rank(said)
            if rank >= most:
                limit, most = term.limit, rank
    return int(limit)


def _rank(said: Any) -> int:
    """Prefer, of two subjects with equally many fields, the one whose fields come first in the alphabet."""
    return 2 * len(said) + ("tenant" in said and len(said) == 1)


@given(st.lists(TERMS, max_size=6), VALUES, VALUES, st.integers(0, 9))
def test_both_sides_give_the_limit_that_the_rule_gives(
    terms: list[OverrideTerm], tenant: str, user: str, age_ms: int
) -> None:
    subject = {"tenant": tenant, "user": user}
    bundle = PolicyBundle(version=1, document=DOCUMENT, subscriptions={}, weight=1, total_weight=1, overrides=terms)
    [demanded] = Policies(bundle, age_ms).charges_for(subject | {"route": "/x"}, None)
    assert isinstance(demanded.charge, AllowanceCharge)
    in_force = {term.key: term.limit for term in terms if is_in_force(term, age_ms)}
    entitled = entitlement(Catalogue(1, quotas_of(DOCUMENT), None, {}, {}, in_force), demanded.charge.quota)
    assert isinstance(entitled, Entitlement)
    assert demanded.charge.limit == entitled.limit == naive(terms, subject, age_ms)


@given(st.lists(TERMS, max_size=6), VALUES, VALUES)
def test_limits_change_only_when_an_override_begins_or_ends(terms: list[OverrideTerm], tenant: str, user: str) -> None:
    bundle = PolicyBundle(version=1, document=DOCUMENT, subscriptions={}, weight=1, total_weight=1, overrides=terms)
    subject = {"tenant": tenant, "user": user}
    limits = [naive(terms, subject, age_ms) for age_ms in range(12)]
    changed = {age_ms for age_ms in range(1, 12) if limits[age_ms] != limits[age_ms - 1]}
    assert changed <= set(edges_ms(bundle))


def test_an_override_grants_nothing_ahead() -> None:
    """The override may have ended when the next period begins."""
    key, terms = "exports:user=a,tenant=b", LeaseTerms(lease_ms=60_000)
    almost = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC)
    periods = []
    for overrides in ({}, {"exports:tenant=b": 5000}, {"exports:tenant=c": 5000}):
        catalogue = Catalogue(1, quotas_of(DOCUMENT), None, {}, {}, overrides)
        offer = find_entitled_period(catalogue, key, terms, almost)
        assert isinstance(offer, EntitledPeriod)
        periods.append((offer.key.period, offer.ahead and offer.ahead.period))
    assert periods == [("2026-11", "2026-12"), ("2026-11", None), ("2026-11", "2026-12")]


@given(st.dictionaries(st.sampled_from(["tenant", "user", "ip", "route"]), VALUES))
def test_each_wider_subject_is_looked_up_once_narrowest_first(subject: dict[str, str]) -> None:
    keys = wider_keys(quota_key("exports", list(subject.items())))
    assert (keys[0], keys[-1], len(set(keys))) == (subject_key("exports", subject), "exports:", 2 ** len(subject))
    sizes = [len(parse_quota_key(key)[1]) for key in keys]
    assert sizes == sorted(sizes, reverse=True)
