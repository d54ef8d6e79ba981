"""Which policies logged checks meet under another document, at what cost, and what all of it would deny."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from coordinator.decision_log.rules.hashing import KeyHasher
from coordinator.limits.rules.entitlement import RegionShare
from coordinator.replays.rules.bounds import Estimate
from coordinator.replays.rules.limits import Circumstances, Limits
from coordinator.replays.rules.matching import Matcher, UnknownReason
from coordinator.replays.rules.replay import LoggedCheck, Replay, TenantResult
from protocol.limits.document import LimitsDocument

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
HASHER = KeyHasher(b"k" * 32)
QUOTAS: list[dict[str, Any]] = [
    {"name": "api", "kind": "rate", "limit": "1 per 1 hour, burst 10"},
    {"name": "big", "kind": "rate", "limit": {"free": "1 per 1 hour, burst 40", "pro": "unlimited"}},
    {"name": "slots", "kind": "concurrency", "limit": 3},
    {"name": "exports", "kind": "allowance", "period": "hour", "limit": 10},
    {"name": "mails", "kind": "allowance", "period": "month", "limit": 10},
    {"name": "windowed", "kind": "rate", "limit": "10/hour", "algorithm": "fixed_window"},
]


def policy(name: str, quota: str, by: str = "tenant", **more: Any) -> dict[str, Any]:
    return {"name": name, "quota": quota, "by": [by] if by else []} | more


def replayed(checks: list[LoggedCheck], *policies: dict[str, Any], **more: Any) -> dict[str, TenantResult]:
    fields = {"quotas": QUOTAS, "policies": list(policies), "plans": {"free": {}, "pro": {}}, "default_plan": "free"}
    document = msgspec.convert(fields | more, LimitsDocument)
    regions = {"eu": RegionShare("active", 1), "us": RegionShare("active", 1), "old": RegionShare("down", 1)}
    around = Circumstances({"paying": "pro"}, {}, {"api:tenant=special": "1 per 1 hour, burst 30"}, regions)
    start, end = NOON, NOON + timedelta(hours=1)
    matcher = Matcher(document, HASHER.hash, around.plans)
    replay = Replay(matcher, Limits(document, around, start, end), start, end)
    for each in checks:
        replay.add(each)
    return {each.tenant: each for each in replay.results()}


def check(second: float = 0.0, tenant: str = "acme", **more: Any) -> LoggedCheck:
    """Return one check. Values of the subject are as the log has them."""
    given: dict[str, Any] = {
        "at": NOON + timedelta(seconds=second),
        "region": "eu",
        "checks": 1.0,
        "variance": 0.0,
        "denied_by": None,
        "is_denied": False,
        "subject": {"route": "/v1/search", "method": "GET"},
        "charged": {},
        "own_costs": {},
    }
    given |= more
    return LoggedCheck(tenant=tenant, subject_text=str(given["subject"]), **given)


def many(number: int, **more: Any) -> list[LoggedCheck]:
    return [check(second, **more) for second in range(number)]


def exactly(number: float) -> Estimate:
    return Estimate(number, number, number)


def test_a_key_is_denied_what_its_limit_cannot_admit() -> None:
    found = replayed([*many(25), *many(9, tenant="bcme"), *many(25, tenant="special")], policy("all", "api"))
    assert {name: round(each.would_deny.middle, 1) for name, each in found.items()} == {
        "acme": 15.0,
        "bcme": 0.0,
        "special": 0.0,
    }
    [of_policy] = found["acme"].policies
    assert (of_policy.checks, round(of_policy.would_deny.low, 1), of_policy.window_s) == (25, 15.0, 1)


def test_an_unlimited_plan_denies_nothing_and_a_missing_limit_everything() -> None:
    found = replayed([*many(50), *many(50, tenant="paying")], policy("all", "big"))
    assert (round(found["acme"].would_deny.middle), found["paying"].would_deny) == (10, Estimate())
    quotas = [{"name": "none", "kind": "rate", "limit": {"pro": "1/second"}}]
    found = replayed(many(5), policy("all", "none"), quotas=quotas)
    assert found["acme"].would_deny == exactly(5)


def test_hashed_values_are_matched_and_counted_as_the_values_are() -> None:
    subjects = [{"route": "/", "labels.model": HASHER.hash("labels.model", each)} for each in ("large", "small")]
    checks = [check(n, subject=subjects[n % 2]) for n in range(60)]
    one = replayed(checks, policy("large", "api", match={"labels": {"model": "large"}}))["acme"]
    assert (one.policies[0].checks, round(one.would_deny.middle)) == (30, 20)
    each = replayed(checks, policy("by-model", "api", "labels.model"))["acme"]
    assert (each.policies[0].checks, round(each.would_deny.middle)) == (60, 40)


def test_what_the_log_cannot_tell_is_named_and_counted() -> None:
    hashed, plain = {"ip": HASHER.hash("ip", "203.0.113.9")}, {"ip": "203.0.113.9"}
    network = {"ip": "203.0.113.0/24"}
    for subject, one, reason in (
        (hashed, policy("net", "api", match=network), UnknownReason.HASHED_ADDRESSES),
        (hashed, policy("prefix", "api", "ip_prefix"), UnknownReason.HASHED_ADDRESSES),
        ({}, policy("user", "api", "user"), UnknownReason.MISSING_FIELD),
        ({}, policy("slots", "slots"), UnknownReason.CONCURRENCY),
        ({}, policy("mails", "mails"), UnknownReason.PARTIAL_PERIOD),
    ):
        [found] = replayed(many(8, subject=subject), one)["acme"].policies
        assert (found.unknown, found.would_deny) == ({reason: 8.0}, Estimate()), one
    [known] = replayed(many(28, subject=plain), policy("net", "api", match=network))["acme"].policies
    assert (known.unknown, round(known.would_deny.middle)) == ({}, 18)
    [by_ip] = replayed(many(28, subject=hashed), policy("ip", "api", "ip"))["acme"].policies
    assert (by_ip.unknown, round(by_ip.would_deny.middle)) == ({}, 18)
    [regional] = replayed(many(8, region="old"), policy("windowed", "windowed"))["acme"].policies
    assert regional.unknown == {UnknownReason.INACTIVE_REGION: 8.0}


def test_few_samples_of_many_keys_say_nothing_of_any() -> None:
    sampled = [
        check(n, checks=1_000.0, variance=999_000.0, subject={"user": HASHER.hash("user", str(n))}) for n in range(50)
    ]
    [found] = replayed(sampled, policy("user", "api", "user"))["acme"].policies
    assert (found.checks, found.unknown) == (50_000, {UnknownReason.TOO_FEW_SAMPLES: 50_000})


def test_an_allowance_counts_by_period_and_a_period_that_is_not_whole_only_what_is_surely_beyond() -> None:
    for one in (policy("export", "exports"), policy("mail", "mails")):
        found = replayed(many(25), one)["acme"]
        assert ({round(each, 6) for each in found.would_deny}, found.policies[0].unknown) == ({15.0}, {})


def test_windows_are_divided_over_regions_and_shared_rates_are_not() -> None:
    checks = [*many(10), *many(4, region="us")]
    assert round(replayed(checks, policy("windowed", "windowed"))["acme"].would_deny.middle, 1) == 5.0
    assert round(replayed(checks, policy("all", "api"))["acme"].would_deny.middle, 1) == 4.0


def test_a_check_that_two_policies_deny_counts_once() -> None:
    both = replayed(many(50), policy("tight", "api"), policy("wide", "big"))["acme"]
    assert [round(each.would_deny.middle) for each in both.policies] == [40, 10]
    assert round(both.would_deny.middle) == 40
    apart = [policy("tight", "api", match={"route": "/a"}), policy("wide", "big", match={"route": "/b"})]
    checks = [*many(50, subject={"route": "/a"}), *many(50, subject={"route": "/b"})]
    assert round(replayed(checks, *apart)["acme"].would_deny.middle) == 50


def test_a_shadow_policy_is_reported_and_denies_nothing() -> None:
    found = replayed(many(50), policy("trial", "api", shadow=True))["acme"]
    assert (round(found.policies[0].would_deny.middle), found.would_deny) == (40, Estimate())


def test_checks_that_can_never_pass_and_unmatched_ones_are_denied_whatever_else_comes() -> None:
    found = replayed(many(3), policy("all", "api", cost=11))["acme"]
    assert (found.would_deny, found.policies[0].would_deny) == (exactly(3), exactly(3))
    nowhere = replayed(many(4), policy("all", "api", match={"route": "/other"}), unmatched="deny")["acme"]
    assert (nowhere.would_deny, nowhere.policies) == (exactly(4), [])


def test_a_stated_cost_stays_and_a_policys_own_is_the_new_one() -> None:
    stated = {"charged": {"all": ("api", 5)}, "own_costs": {"all": 1}}
    own = {"charged": {"all": ("api", 1)}, "own_costs": {"all": 1}}
    doubled = policy("all", "api", cost=2)
    assert round(replayed(many(10, **stated), doubled)["acme"].would_deny.middle, 1) == 8.0
    assert round(replayed(many(10, **own), doubled)["acme"].would_deny.middle, 1) == 5.0
    other = policy("other", "big", cost=2)
    assert round(replayed(many(10, **stated), other)["acme"].would_deny.middle, 1) == 2.0
    of_one_quota = {"charged": {"all": ("api", 5), "more": ("exports", 1)}, "own_costs": {"all": 1, "more": 1}}
    assert replayed(many(10, **of_one_quota), other)["acme"].would_deny == Estimate()


def test_checks_that_were_denied_are_requested_again_under_the_other_document() -> None:
    denied = many(30, denied_by="old", is_denied=True)
    found = replayed(denied, policy("old", "big"))["acme"]
    assert (found.denied, found.policies[0].denied, found.would_deny) == (30, 30, Estimate())
