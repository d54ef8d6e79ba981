"""Routes are normalised by the rules of the document, the same for policies and for requests."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.limits.document import RouteRules
from protocol.limits.routes import RouteNormalizer

KEEP_ALL = {"trailing_slash": "keep", "query": "keep", "merge_slashes": False, "percent": "keep"}


def normalizer(**rules: object) -> RouteNormalizer:
    return RouteNormalizer(msgspec.convert(rules, RouteRules))


def test_the_defaults_are_those_of_the_contract() -> None:
    assert msgspec.to_builtins(RouteRules()) == {
        "trailing_slash": "ignore",
        "case": "keep",
        "query": "drop",
        "merge_slashes": True,
        "percent": "decode_unreserved",
    }


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("/v1/exports", "/v1/exports"),
        ("/v1/exports/", "/v1/exports"),
        ("//v1///exports//", "/v1/exports"),
        ("/v1/exports?x=1", "/v1/exports"),
        ("/v1/exports/?x=/..", "/v1/exports"),
        ("/v1/exports#top", "/v1/exports"),
        ("/v1/%65xports", "/v1/exports"),
        ("/v1/a%2fb", "/v1/a%2Fb"),
        ("/v1/a%2Fb", "/v1/a%2Fb"),
        ("/v1/%2565", "/v1/%2565"),
        ("/v1/%zz%4", "/v1/%zz%4"),
        ("/v1/caf%c3%a9", "/v1/caf%C3%A9"),
        ("/v1/./exports", "/v1/exports"),
        ("/v1/x/../exports", "/v1/exports"),
        ("/v1/x/%2E%2e/exports/.", "/v1/exports"),
        ("/../..", "/"),
        ("/v1/..", "/"),
        ("/v1/...", "/v1/..."),
        ("/v1/.well-known", "/v1/.well-known"),
        ("/", "/"),
        ("//", "/"),
        ("?x", "/"),
        ("/V1/Exports", "/V1/Exports"),
        ("export-job", "export-job"),
    ],
)
def test_the_default_rules(written: str, normal: str) -> None:
    assert normalizer().normalize(written) == normal


@pytest.mark.parametrize(
    ("rules", "written", "normal"),
    [
        ({"trailing_slash": "keep"}, "/v1//exports/", "/v1/exports/"),
        ({"case": "ignore"}, "/V1/Exports/%2F", "/v1/exports/%2f"),
        ({"query": "keep"}, "//v1/exports/?a=%65//", "/v1/exports?a=%65//"),
        ({"merge_slashes": False}, "//v1//exports/", "//v1//exports"),
        ({"merge_slashes": False}, "/a//../b", "/a/b"),
        ({"percent": "keep"}, "/v1/%65xports", "/v1/%65xports"),
        (KEEP_ALL, "//v1/Exports/?x=%65", "//v1/Exports/?x=%65"),
        (KEEP_ALL, "/v1/x/../exports/", "/v1/exports/"),
    ],
)
def test_each_rule_may_differ(rules: dict[str, object], written: str, normal: str) -> None:
    assert normalizer(**rules).normalize(written) == normal


@pytest.mark.parametrize(
    ("written", "pattern"),
    [
        ("/v1/exports/", "/v1/exports/"),
        ("/v1/exports", "/v1/exports/"),
        ("//v1/%65xports*", "/v1/exports*"),
        ("/v1/*", "/v1/*"),
        ("/v1//*", "/v1/*"),
        ("/v1/.*", "/v1/.*"),
        ("/v1/*/exports/", "/v1/*/exports/"),
        ("/v1/*/", "/v1/*/"),
        ("/", "/"),
        ("*", "*"),
    ],
)
def test_a_pattern_keeps_what_its_wildcards_stand_for(written: str, pattern: str) -> None:
    assert normalizer().pattern(written) == pattern


routes = st.builds("/{}".format, st.text("ab./%26eE?", max_size=12))
rules = st.fixed_dictionaries(
    {
        "trailing_slash": st.sampled_from(["ignore", "keep"]),
        "case": st.sampled_from(["keep", "ignore"]),
        "query": st.sampled_from(["drop", "keep"]),
        "merge_slashes": st.booleans(),
        "percent": st.sampled_from(["decode_unreserved", "keep"]),
    }
)


@given(rules, routes)
def test_a_route_is_looked_up_as_the_policy_that_spells_it_so(rules: dict[str, object], route: str) -> None:
    normal = normalizer(**rules)
    assert normal.match_form(normal.normalize(route)) == normal.pattern(route)


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "", "%61", "%2e", "%2F", "a?b"]), max_size=6))
def test_normalising_twice_changes_nothing(segments: list[str]) -> None:
    normal = normalizer()
    once = normal.normalize("/" + "/".join(segments))
    assert normal.normalize(once) == once
