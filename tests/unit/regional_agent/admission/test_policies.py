"""Policies match requests and charge their quotas."""

from datetime import datetime
from typing import Any

import msgspec
import pytest

from coordinator.limits.rules.validation import faults_of
from protocol.identifiers import MAX_QUOTA_KEY_LENGTH
from protocol.limits.document import LimitsDocument, PolicyBundle
from protocol.limits.subjects import InvalidSubjectValue
from regional_agent.admission.policies import Policies, UnknownSubjectField, edges_ms
from regional_agent.store.types import AllowanceCharge, RateCharge, SlotCharge

DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}, "pro": {}},
    "default_plan": "free",
    "quotas": [
        {"name": "exports", "kind": "allowance", "period": "month", "limit": {"free": 10, "pro": 1000}},
        {"name": "api", "kind": "rate", "limit": "100/second, burst 200"},
        {"name": "vip", "kind": "rate", "limit": {"pro": "5/second"}},
        {"name": "reports", "kind": "concurrency", "limit": 11},
    ],
    "policies": [
        {"name": "search", "quota": "api", "by": ["tenant"], "match": {"route": "/v1/search*"}, "cost": 5},
        {"name": "export", "quota": "exports", "by": ["tenant"], "match": {"route": "/v1/exports", "method": "POST"}},
        {"name": "every", "quota": "api", "by": ["ip", "route"], "match": {"route": "/v1/exports"}},
        {"name": "vip", "quota": "vip", "by": ["tenant"], "match": {"route": "/v1/vip"}},
        {"name": "report", "quota": "reports", "by": ["tenant"], "match": {"route": "/v1/reports"}},
    ],
}


@pytest.fixture
def policies() -> Policies:
    document = msgspec.convert(DOCUMENT, LimitsDocument)
    assert {fault.rule for fault in faults_of(document)} <= {"plans"}  # as documents of an older release may have
    return Policies(PolicyBundle(version=3, document=document, subscriptions={"acme": "pro"}, weight=1, total_weight=3))


def names(policies: Policies, **subject: str) -> list[str]:
    return [policy.spec.name for policy in policies.match(subject)]


def test_routes_match_exactly_or_by_prefix_and_by_method(policies: Policies) -> None:
    assert names(policies, route="/v1/search", method="GET") == ["search"]
    assert names(policies, route="/v1/search/images") == ["search"]
    assert names(policies, route="/v1/exports", method="POST") == ["export", "every"]
    assert names(policies, route="/v1/exports", method="GET") == ["every"]
    assert names(policies, route="/v1/exports/7", method="POST") == []
    assert names(policies) == []


def test_the_plan_gives_the_limit_and_the_weight_the_share(policies: Policies) -> None:
    subject = {"tenant": "acme", "ip": "203.0.113.9", "route": "/v1/exports", "method": "POST"}
    allowance, rate = (each.charge for each in policies.charges_for(subject, None))
    assert allowance == AllowanceCharge("exports:tenant=acme", 1, 1000, '{"policy":"export"}')
    assert rate == RateCharge(
        "api:ip=203.0.113.9,route=%2Fv1%2Fexports", 1, 33_333_333, 66, may_slice=True, is_shared=True
    )


def charge_of_rate(quota: dict[str, Any], now: str = "2026-10-25T12:00:00Z") -> RateCharge:
    """Return the charge of a region with a third of all weight."""
    document = {
        "quotas": [{"name": "q", "kind": "rate"} | quota],
        "policies": [{"name": "p", "quota": "q", "by": ["tenant"]}],
    }
    read = msgspec.convert(document, LimitsDocument)
    assert not faults_of(read)
    bundle = PolicyBundle(version=1, document=read, subscriptions={}, weight=1, total_weight=3)
    policies = Policies(bundle, now=datetime.fromisoformat(now))
    (demanded,) = policies.charges_for({"tenant": "acme"}, None)
    assert isinstance(demanded.charge, RateCharge)
    assert demanded.charge.is_shared is (policies.shared("q:tenant=acme") is not None)
    return demanded.charge


def test_a_slow_rate_is_divided_by_weight_and_never_sliced() -> None:
    slow = charge_of_rate({"limit": "9/week, burst 900"})
    assert (slow.burst, slow.is_shared, slow.may_slice) == (300, False, False)
    assert 0 <= 3_000_000 / 604_800 - slow.rate_micro < 0.0005
    usual = charge_of_rate({"limit": "9/hour, burst 900"})
    assert (usual.rate_micro, usual.is_shared, usual.may_slice) == (833, True, True)


def test_an_aligned_window_follows_the_calendar_of_its_zone() -> None:
    quota = {"limit": "30/day", "algorithm": "fixed_window", "align": "calendar"}
    day_ms = 86_400_000
    in_utc = charge_of_rate(quota)
    assert in_utc.calendar is not None
    assert (in_utc.burst, in_utc.calendar.begins_ms % day_ms, in_utc.calendar.ends_ms % day_ms) == (10, 0, 0)
    in_berlin = charge_of_rate(quota | {"time_zone": "Europe/Berlin"}).calendar
    assert in_berlin is not None
    assert in_berlin.ends_ms - in_berlin.begins_ms == day_ms + 3_600_000, "clocks go back on this day"
    assert charge_of_rate(quota | {"align": "first_request"}).calendar is None


def test_agents_look_at_the_calendar_of_a_zone_every_hour() -> None:
    quota = {"name": "q", "kind": "rate", "limit": "30/day", "algorithm": "fixed_window", "align": "calendar"}

    def edges(time_zone: str) -> list[int]:
        document = msgspec.convert({"quotas": [quota | {"time_zone": time_zone}]}, LimitsDocument)
        return list(edges_ms(PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1)))

    assert edges("Europe/Berlin")[:3] == [3_600_000, 7_200_000, 10_800_000]
    assert edges("UTC") == []


def told_of(usage_by: list[str], **subject: str) -> str:
    document = msgspec.convert(
        DOCUMENT
        | {
            "route_classes": {"heavy": [{"route": "/v1/exports/*"}]},
            "policies": [{"name": "export", "quota": "exports", "by": ["tenant"], "usage_by": usage_by}],
        },
        LimitsDocument,
    )
    assert {fault.rule for fault in faults_of(document)} <= {"plans"}  # as documents of an older release may have
    bundle = PolicyBundle(version=3, document=document, subscriptions={}, weight=1, total_weight=1)
    (demanded,) = Policies(bundle).charges_for({"tenant": "acme", **subject}, None)
    assert isinstance(demanded.charge, AllowanceCharge)
    return demanded.charge.dimensions


def test_usage_is_itemized_by_the_dimensions_of_the_policy() -> None:
    heavy = {"route": "/v1/exports/7", "api_key": "ak_7"}
    assert told_of([], **heavy) == '{"policy":"export"}'
    assert told_of(["route_class"], **heavy) == '{"policy":"export","route_class":"heavy"}'
    assert told_of(["route_class"], route="/v1/other") == '{"policy":"export","route_class":"*"}'
    # printf %s ak_7 | sha256sum | cut -c1-16, with the prefix
    hashed = '{"api_key":"k_fe9e693676910154","policy":"export"'
    assert told_of(["api_key"], **heavy) == hashed + "}"
    assert told_of(["route_class", "api_key"], **heavy) == hashed + ',"route_class":"heavy"}'


def test_usage_is_itemized_by_labels() -> None:
    labels = {"labels.tier": "gold", "labels.model": "large, 10%"}
    assert told_of(["labels.model"]) == '{"policy":"export"}'
    assert told_of(["labels.model"], **labels) == '{"labels":"model=large%2C 10%25","policy":"export"}'
    both = '{"labels":"model=large%2C 10%25,tier=gold","policy":"export"}'
    assert told_of(["labels.tier", "labels.model"], **labels) == both
    too_long = labels | {"labels.tier": "é" * 128}
    assert told_of(["labels.tier", "labels.model"], **too_long) == '{"labels":"*","policy":"export"}'
    assert told_of(["api_key"], route="/v1/exports/7") == '{"policy":"export"}'


def test_a_tenant_on_no_plan_is_on_the_default_plan(policies: Policies) -> None:
    charge = policies.charges_for({"tenant": "new", "ip": "::1", "route": "/v1/exports", "method": "POST"}, None)[
        0
    ].charge
    assert isinstance(charge, AllowanceCharge)
    assert charge.limit == 10


def test_a_plan_without_a_limit_is_limited_to_nothing(policies: Policies) -> None:
    charge = policies.charges_for({"tenant": "new", "route": "/v1/vip"}, None)[0].charge
    assert charge == RateCharge("vip:tenant=new", 1, 0, 0, may_slice=True, is_shared=True)


def test_the_requests_cost_replaces_the_policys(policies: Policies) -> None:
    assert [
        policies.charges_for({"tenant": "a", "route": "/v1/search"}, cost)[0].charge.cost for cost in (None, 2)
    ] == [
        5,
        2,
    ]


def test_concurrency_is_shared_by_weight_too(policies: Policies) -> None:
    charge = policies.charges_for({"tenant": "acme", "route": "/v1/reports"}, None)[0].charge
    assert charge == SlotCharge("reports:tenant=acme", 1, 3, 600_000), "a third of eleven"


def test_a_shadow_policy_does_not_fault_a_request_that_it_cannot_read() -> None:
    tried: list[dict[str, Any]] = [
        {"name": "by-user", "quota": "tried", "by": ["user"], "shadow": True},
        {"name": "by-ip", "quota": "tried", "by": ["ip"], "match": {"ip": "10.0.0.0/8"}, "shadow": True},
    ]
    quotas = [*DOCUMENT["quotas"], {"name": "tried", "kind": "rate", "limit": "3/second"}]
    told = DOCUMENT | {"quotas": quotas, "policies": [*DOCUMENT["policies"], *tried]}
    document = msgspec.convert(told, LimitsDocument)
    assert {fault.rule for fault in faults_of(document)} <= {"plans"}  # as documents of an older release may have
    policies = Policies(PolicyBundle(version=3, document=document, subscriptions={}, weight=1, total_weight=1))
    subject = {"tenant": "acme", "route": "/v1/search"}
    for extra, met in (
        ({}, ["search"]),
        ({"ip": "nonsense"}, ["search"]),
        ({"user": "eve", "ip": "10.1.2.3"}, ["search", "by-user", "by-ip"]),
    ):
        demanded = policies.charges_for(subject | extra, None)
        assert [each.policy.spec.name for each in demanded] == met
    assert [each.is_shadow for each in demanded] == [False, True, True]
    assert demanded[1].charge == RateCharge("tried:user=eve", 1, 3_000_000, 3, is_shadow=True), "and it has no slices"


def test_a_missing_field_is_refused_by_name(policies: Policies) -> None:
    with pytest.raises(UnknownSubjectField, match="'search' counts by 'tenant'"):
        policies.charges_for({"route": "/v1/search"}, None)


WITH_TWO_FIELDS = {
    "quotas": DOCUMENT["quotas"],
    "policies": [
        {"name": "both", "quota": "exports", "by": ["tenant", "user"]},
        {"name": "path", "quota": "api", "by": ["route"]},
        {"name": "trial", "quota": "vip", "by": ["api_key"], "shadow": True},
    ],
}


@pytest.mark.parametrize(
    ("subject", "field", "rule"),
    [
        ({"tenant": "/" * 170, "user": "u", "route": "/v1"}, "tenant", "max_length"),
        ({"tenant": "a", "user": "é" * 100, "route": "/v1"}, "user", "max_length"),
        ({"tenant": "a" * 250, "user": "b" * 251, "route": "/v1"}, "user", "max_length"),
        ({"tenant": "a", "user": "u", "route": "/" + "x" * 600}, "route", "max_length"),
        ({"tenant": "a", "user": "u", "route": "/a" * 200}, "route", "max_length"),
        ({"tenant": "a\tb", "user": "u", "route": "/v1"}, "tenant", "characters"),
        ({"tenant": "a\n", "user": "u", "route": "/v1"}, "tenant", "characters"),
        ({"tenant": "a", "user": "\x1b[31m", "route": "/v1"}, "user", "characters"),
        ({"tenant": "a", "user": "\x7f", "route": "/v1"}, "user", "characters"),
        ({"tenant": "a", "user": "\ud800", "route": "/v1"}, "user", "characters"),
    ],
)
def test_a_value_that_no_quota_key_may_hold_is_refused_by_its_field(
    subject: dict[str, str], field: str, rule: str
) -> None:
    document = msgspec.convert(DOCUMENT | WITH_TWO_FIELDS, LimitsDocument)
    policies = Policies(PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1))
    with pytest.raises(InvalidSubjectValue) as refused:
        policies.charges_for(subject, None)
    assert (refused.value.field, refused.value.rule) == (field, rule)


def test_a_key_of_just_the_length_that_is_accepted_is_built() -> None:
    document = msgspec.convert(DOCUMENT | WITH_TWO_FIELDS, LimitsDocument)
    both = {"tenant": "/" * 80, "user": "u", "route": "/v1"}
    room = MAX_QUOTA_KEY_LENGTH - len("exports:tenant=,user=") - 3 * 80
    policies = Policies(PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1))
    fits, *_ = policies.charges_for(both | {"user": "u" * room}, None)
    assert len(fits.charge.quota) == MAX_QUOTA_KEY_LENGTH
    with pytest.raises(InvalidSubjectValue):
        policies.charges_for(both | {"user": "u" * (room + 1)}, None)


def test_a_shadow_policy_leaves_out_missing_dimensions() -> None:
    document = msgspec.convert(DOCUMENT | WITH_TWO_FIELDS, LimitsDocument)
    policies = Policies(PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1))
    subject = {"tenant": "a", "user": "u", "route": "/v1", "api_key": "/" * 200}
    assert [each.policy.name for each in policies.charges_for(subject, None)] == ["both", "path"]
