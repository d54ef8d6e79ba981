"""Configurations of other rate limiters, with what their users rely on: requests and their answers, or a refusal.

The limits are those of the originals' published examples and integration tests. `Asked` sends a descriptor several
times; the first `admitted` of them pass, and one of at most twice as many more is denied. None: all of them pass.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

Entries = tuple[tuple[str, str], ...]
MANY = 6  # requests that all pass where nothing limits them


class Asked(NamedTuple):
    entries: Entries
    admitted: int | None


class Case(NamedTuple):
    name: str
    config: Any
    asked: tuple[Asked, ...] = ()
    note: str = ""  # a part of what is said to have no equal


def limit(requests: int, unit: str = "day", **more: Any) -> Mapping[str, Any]:
    return {"rate_limit": {"unit": unit, "requests_per_unit": requests, **more}}


def entry(key: str, value: str = "", /, *nested: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"key": key} | ({"value": value} if value else {}) | ({"descriptors": list(nested)} if nested else {}) | more


def tree(name: str, *descriptors: Mapping[str, Any]) -> dict[str, Any]:
    return {"domain": name, "descriptors": list(descriptors)}


def of(**entries: str) -> Entries:
    return tuple(entries.items())


ENVOY_RATELIMIT = (
    Case(
        "one limit for each of two values",
        tree("values", entry("database", "users", **limit(3)), entry("database", "default", **limit(2))),
        (
            Asked(of(database="users"), 3),
            Asked(of(database="default"), 2),
            Asked(of(database="other"), None),
        ),
    ),
    Case(
        "nested descriptors, and the same key at the top",
        tree(
            "messaging",
            entry("message_type", "marketing", entry("to_number", **limit(2))),
            entry("to_number", **limit(4)),
        ),
        (
            Asked(of(message_type="marketing", to_number="1"), 2),
            Asked(of(message_type="marketing", to_number="2"), 2),
            Asked(of(message_type="other", to_number="1"), None),
            Asked(of(to_number="1"), 4),
        ),
    ),
    Case(
        "a value that is banned, beside a limit for all",
        tree("edge_ip", entry("remote_address", **limit(2)), entry("remote_address", "50.0.0.5", **limit(0))),
        (Asked(of(remote_address="50.0.0.5"), 0), Asked(of(remote_address="50.0.0.1"), 2)),
    ),
    Case(
        "a descriptor is as deep as its rule",
        tree("depth", entry("key", "value", **limit(1))),
        (Asked(of(key="value", subkey="x"), None), Asked(of(key="value"), 1)),
    ),
    Case(
        "unlimited",
        tree("internal", entry("ldap", rate_limit={"unlimited": True}), entry("azure", **limit(1))),
        (Asked(of(ldap="x"), None), Asked(of(azure="x"), 1)),
    ),
    Case(
        "shadow mode",
        tree(
            "shadow",
            entry(
                "service",
                "",
                entry("user", "user-a", **limit(1), shadow_mode=True),
                entry("user", "user-b", **limit(2)),
            ),
        ),
        (Asked(of(service="auth", user="user-a"), None), Asked(of(service="auth", user="user-b"), 2)),
    ),
    Case("a limit a second", tree("second", entry("key1", **limit(2, "second")))),
    Case(
        "a limit a minute",
        tree("minute", entry("one_per_minute", **limit(1, "minute"))),
        (Asked(of(one_per_minute="x"), 1),),
    ),
    Case("a limit an hour", tree("hour", entry("key3", **limit(2, "hour"))), (Asked(of(key3="x"), 2),)),
    Case("a limit a month", tree("month", entry("key5", **limit(2, "month"))), (Asked(of(key5="x"), 2),)),
    Case("a limit a year", tree("year", entry("key6", **limit(2, "year"))), (Asked(of(key6="x"), 2),)),
    Case(
        "a limit a week", tree("week", entry("key4", **limit(2, "week"))), (Asked(of(key4="x"), 2),), "begin on Monday"
    ),
    Case(
        "several units",
        tree("several", entry("key7", **limit(2, "hour", unit_multiplier=6))),
        (Asked(of(key7="x"), 2),),
    ),
    Case(
        "paths are compared as they are",
        tree("paths", entry("path", "/a/", **limit(1)), entry("method", "", entry("path", **limit(2)))),
        (Asked(of(path="/a/"), 1), Asked(of(path="/a"), None), Asked(of(method="get", path="/b"), 2)),
    ),
    Case(
        "a looser limit for one value",
        tree("looser", entry("user", **limit(1)), entry("user", "vip", **limit(5))),
        (Asked(of(user="any"), 1),),
        "leasehold override create looser-user 5/day --for labels.user=vip",
    ),
    Case(
        "a stricter limit for one value",
        tree("stricter", entry("user", **limit(4)), entry("user", "slow", **limit(1))),
        (Asked(of(user="any"), 4), Asked(of(user="slow"), 1)),
    ),
    Case(
        "a value with a wildcard",
        tree("wildcard", entry("key1", "value*", **limit(1))),
        (),
        "labels are compared as a whole",
    ),
    Case(
        "replaces",
        tree("replaces", entry("user", **limit(2, replaces=[{"name": "other"}]))),
        (Asked(of(user="x"), 2),),
        "`replaces` has no equal",
    ),
    Case(
        "detailed metrics",
        tree("metrics", entry("key1", **limit(2), detailed_metric=True)),
        (Asked(of(key1="x"), 2),),
        "`detailed_metric` is left out",
    ),
    Case(
        "rules that cross",
        tree("cross", entry("a", "1", entry("b", **limit(2))), entry("a", "", entry("b", "2", **limit(3)))),
        (Asked(of(a="1", b="x"), 2), Asked(of(a="x", b="2"), 3)),
        "here both do",
    ),
)


def counted(
    namespace: str, most: int, *conditions: str, by: tuple[str, ...] = (), seconds: int = 3600
) -> dict[str, Any]:
    found: dict[str, Any] = {"namespace": namespace, "max_value": most, "seconds": seconds}
    return found | {"conditions": list(conditions) or None, "variables": list(by) or None}


LIMITADOR = (
    Case("a limit of a namespace", [counted("all", 3)], (Asked(of(any="x"), 3),)),
    Case(
        "a condition and a variable, in the older form",
        [counted("older", 2, "req_method == 'POST'", by=("user_id",))],
        (
            Asked(of(req_method="POST", user_id="1"), 2),
            Asked(of(req_method="POST", user_id="2"), 2),
            Asked(of(req_method="GET", user_id="1"), None),
            Asked(of(req_method="POST"), None),  # a variable is missing
        ),
    ),
    Case(
        "descriptors by number and key",
        [counted("numbered", 2, "descriptors[0]['keyA'] == 'valueA'", by=("descriptors[0]['varA']",))],
        (Asked((("keyA", "valueA"), ("varA", "1")), 2), Asked((("keyA", "other"), ("varA", "1")), None)),
    ),
    Case(
        "entries beyond those that are named",
        [counted("beyond", 2, "descriptors[0].method == 'GET'")],
        (Asked(of(method="GET", path="/a", user="x"), 2), Asked(of(method="get"), None)),
    ),
    Case(
        "one of several values",
        [counted("among", 2, "tier in ['a', \"b\"]")],
        (Asked(of(tier="b"), 2), Asked(of(tier="c"), None)),
    ),
    Case(
        "a limit of zero",
        [counted("zero", 0, "user == 'banned'")],
        (Asked(of(user="banned"), 0), Asked(of(user="x"), None)),
    ),
    Case(
        "unequal",
        [counted("unequal", 2, "descriptors[0]['req.path'] != '/json'")],
        (Asked((("req.path", "/a"),), None),),
        "no equal",
    ),
    Case("another descriptor", [counted("second", 2, "descriptors[1].a == 'b'")], (), "no equal"),
    Case("an expression", [counted("expression", 2, "size(descriptors[0].a) > 3")], (), "no equal"),
)
