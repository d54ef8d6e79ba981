"""Policies read a request exactly as the plainest implementation reads the document."""

import re
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.limits.rules.validation import faults_of
from protocol.identifiers import parse_quota_key
from protocol.limits.document import LimitsDocument, PolicyBundle
from protocol.limits.subjects import InvalidAddress
from regional_agent.admission.policies import Policies, UnknownSubjectField

CLASSES = ["heavy", "light"]
ROUTES = st.sampled_from(["*", "/a", "/a*", "/a/b", "/b*", "/*/b", "/b/*"])
METHODS = st.sampled_from(["*", "GET", ["GET", "POST"]])
WHERE = st.fixed_dictionaries({"route": ROUTES, "method": METHODS})
NETWORKS = st.sampled_from(["10.0.0.0/8", "10.1.0.0/16", "2001:db8::/32", "::ffff:10.2.0.0/112", "10.1.2.3"])
COSTS = st.dictionaries(st.sampled_from([*CLASSES, "*"]), st.integers(1, 9))
FIELDS = ["tenant", "user", "api_key", "ip", "ip_prefix", "route", "method", "route_class", "labels.model"]
MODELS = st.sampled_from(["large", "small", "a,b=c"])
LABELS = st.dictionaries(st.sampled_from(["model", "tier"]), MODELS | st.lists(MODELS, min_size=1, max_size=2))
POLICIES = st.fixed_dictionaries(
    {
        "by": st.lists(st.sampled_from(FIELDS), unique=True, max_size=4),
        "match": st.builds(
            lambda where, more: where | more,
            WHERE,
            st.fixed_dictionaries(
                {},
                optional={
                    "route_class": st.sampled_from(CLASSES) | st.lists(st.sampled_from(CLASSES), min_size=1),
                    "ip": NETWORKS | st.lists(NETWORKS, min_size=1, max_size=3),
                    "labels": LABELS,
                },
            ),
        ),
        "cost": st.integers(1, 9) | COSTS | st.just("table"),
        "ip_prefix": st.fixed_dictionaries(
            {"ipv4": st.sampled_from([0, 8, 24, 32]), "ipv6": st.sampled_from([48, 64])}
        ),
    }
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "route_classes": st.fixed_dictionaries(
            {name: st.lists(WHERE, min_size=1, max_size=3) for name in CLASSES},
        ),
        "cost_tables": st.fixed_dictionaries({"table": COSTS}),
        "quotas": st.just([{"name": "q", "kind": "rate", "limit": "10/second"}]),
        "policies": st.lists(POLICIES, max_size=5),
    }
)
SUBJECTS = st.fixed_dictionaries(
    {
        "tenant": st.just("t,=%"),
        "user": st.just("u"),
        "api_key": st.just("k"),
        "ip": st.sampled_from(["10.1.2.3", "::FFFF:10.2.0.9", "192.0.2.1", "2001:DB8:0:0::7", "2001:db8:1::7"]),
        "route": st.sampled_from(["/a", "/a/b", "/ab", "/b", "/b/c", "/c"]),
        "method": st.sampled_from(["GET", "POST", "PUT"]),
        "labels.model": MODELS,
    },
    optional={"labels.tier": MODELS},
)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def fits(where: dict[str, Any], subject: dict[str, str]) -> bool:
    pattern = {"/*/b": "/[^/]+/b"}.get(where["route"], where["route"].replace("*", ".*"))
    spellings = (subject["route"], subject["route"] + "/")
    return any(re.fullmatch(pattern, each) for each in spellings) and (
        where["method"] == "*" or subject["method"] in as_list(where["method"])
    )


def address(text: str) -> Any:
    found = ip_address(text)
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def network(text: str) -> Any:
    base, _, length = text.partition("/")
    return ip_network(f"10.2.0.0/{int(length) - 96}") if base.startswith("::ffff:") else ip_network(text)


def says(where: dict[str, Any]) -> tuple[int, int, int]:
    """Return a key that sorts the most specific route first: exact, then long, then with a method."""
    stars = where["route"].count("*")
    return (min(stars, 1), stars - len(where["route"]), 1 if where["method"] == "*" else 0)


def read(document: dict[str, Any], subject: dict[str, str]) -> list[tuple[str, int, dict[str, str]]]:
    """Return policy, cost and the values that it is counted by."""
    classes = document["route_classes"]
    route_class = min(
        ((says(each), name) for name in classes for each in classes[name] if fits(each, subject)), default=("", "*")
    )[1]
    ip = address(subject["ip"])
    met = []
    for policy in document["policies"]:
        match, cost, lengths = policy["match"], policy["cost"], policy["ip_prefix"]
        if not fits(match, subject) or ("route_class" in match and route_class not in as_list(match["route_class"])):
            continue
        if "ip" in match and not any(ip in network(each) for each in as_list(match["ip"])):
            continue
        labels = match.get("labels", {}).items()
        if not all(subject.get(f"labels.{name}") in as_list(values) for name, values in labels):
            continue
        table = document["cost_tables"]["table"] if cost == "table" else cost
        units = table if isinstance(table, int) else table.get(route_class, table.get("*", 1))
        length = lengths["ipv4" if ip.version == 4 else "ipv6"]
        values = subject | {
            "ip": str(ip),
            "ip_prefix": str(ip_network(f"{ip}/{length}", strict=False)),
            "route_class": route_class,
        }
        met.append((policy["name"], units, {field: values[field] for field in policy["by"]}))
    return met


@given(DOCUMENTS, st.lists(SUBJECTS, min_size=1, max_size=5))
def test_a_compiled_document_is_read_as_a_person_reads_it(
    document: dict[str, Any], subjects: list[dict[str, str]]
) -> None:
    named = [policy | {"name": f"p{place}", "quota": "q"} for place, policy in enumerate(document["policies"])]
    document = document | {"policies": named}
    policies = compiled(document)
    for subject in subjects * 2:  # the second time it comes from the cache
        found = [
            (each.policy.spec.name, each.charge.cost, dict(parse_quota_key(each.charge.quota)[1]))
            for each in policies.charges_for(subject, None)
        ]
        assert sorted(found, key=lambda each: each[0]) == read(document, subject)
        explained = [each for each in policies.explain(subject).policies if each.matches]
        assert [(each.policy, each.key) for each in explained] == sorted(
            (each.policy.name, each.charge.quota) for each in policies.charges_for(subject, None)
        )


def compiled(document: dict[str, Any]) -> Policies:
    converted = msgspec.convert(document, LimitsDocument)
    assert faults_of(converted) == []
    return Policies(PolicyBundle(version=1, document=converted, subscriptions={}, weight=1, total_weight=1))


QUOTAS = [{"name": "q", "kind": "rate", "limit": "1/second"}]


def test_an_invalid_or_missing_address_is_named() -> None:
    policies = compiled({"quotas": QUOTAS, "policies": [{"name": "p", "quota": "q", "by": ["ip_prefix"]}]})
    with pytest.raises(InvalidAddress, match=r"'1.2.3' does not appear"):
        policies.charges_for({"ip": "1.2.3"}, None)
    with pytest.raises(UnknownSubjectField, match=r"'p' counts by 'ip'"):
        policies.charges_for({"tenant": "t"}, None)


def test_a_missing_label_is_named_where_it_is_counted_by_and_matches_nothing_elsewhere() -> None:
    wanted = {"name": "wanted", "quota": "q", "by": [], "match": {"labels": {"model": "large"}}}
    counted = {"name": "counted", "quota": "q", "by": ["labels.model"], "match": {"route": "/chat"}}
    policies = compiled({"quotas": QUOTAS, "policies": [wanted, counted]})
    assert policies.match({"tenant": "t"}) == []
    assert policies.match({"labels.model": "small"}) == []
    assert [each.name for each in policies.match({"labels.model": "large"})] == ["wanted"]
    with pytest.raises(UnknownSubjectField, match=r"'counted' counts by 'labels.model'"):
        policies.charges_for({"route": "/chat"}, None)


def test_a_request_without_an_address_is_in_no_network() -> None:
    policy = {"name": "p", "quota": "q", "by": [], "match": {"ip": "0.0.0.0/0"}}
    assert compiled({"quotas": QUOTAS, "policies": [policy]}).match({"tenant": "t"}) == []
