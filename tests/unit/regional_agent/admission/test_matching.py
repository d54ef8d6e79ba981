"""A request matches the policies that a reader of the document would expect, however many there are."""

import re
from typing import SupportsIndex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.limits.document import LimitsDocument, PolicyBundle
from protocol.limits.route_table import Routes
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.generational_cache import GenerationalCache

texts = st.text("ab/", max_size=6)  # few letters, so that some prefixes contain others
segments = st.sampled_from(["*", "*", "a", "b", "ab", ""])
with_segments = st.builds(lambda parts, rest: f"/{'/'.join(parts)}/{rest}", st.lists(segments, max_size=4), texts)
routes = (
    st.builds("/{}".format, texts)
    | st.builds("/{}*".format, texts)
    | with_segments
    | st.builds("{}*".format, with_segments)
    | st.just("*")
)
methods = st.sampled_from(["GET", "POST", "*"])


def read(written: list[tuple[str, str]], route: str, method: str) -> list[str]:
    """Match a request against the document line by line."""
    meets = [f"p{i}" for i, (wanted, allowed) in enumerate(written) if wanted == route and allowed in (method, "*")]
    return meets + [
        f"p{i}"
        for i, (wanted, allowed) in enumerate(written)
        if "*" in wanted and by_eye(wanted).fullmatch(route) and allowed in (method, "*")
    ]


def by_eye(route: str) -> re.Pattern[str]:
    """Match one segment by a * within a route, and any rest by a * at its end."""
    *middle, last = re.split(r"(?<=/)\*(?=/)", route)
    last = re.escape(last[:-1]) + ".*" if last.endswith("*") else re.escape(last)
    return re.compile("[^/]+".join([*map(re.escape, middle), last]))


@given(st.lists(st.tuples(routes, methods), max_size=30), st.lists(st.tuples(texts, methods), max_size=10))
def test_matching_by_table_equals_matching_line_by_line(
    written: list[tuple[str, str]], asked: list[tuple[str, str]]
) -> None:
    document = {
        "routes": {"trailing_slash": "keep", "merge_slashes": False},
        "quotas": [{"name": "q", "kind": "rate", "limit": "1/second"}],
        "policies": [
            {"name": f"p{i}", "quota": "q", "by": ["tenant"], "match": {"route": route, "method": method}}
            for i, (route, method) in enumerate(written)
        ],
    }
    bundle = PolicyBundle(
        version=1, document=msgspec.convert(document, LimitsDocument), subscriptions={}, weight=1, total_weight=1
    )
    policies = Policies(bundle)
    for text, method in asked * 2:  # the second time it comes from the cache
        found = [policy.spec.name for policy in policies.match({"route": "/" + text, "method": method})]
        assert found == read(written, "/" + text, method)
        explained = policies.explain({"route": "/" + text, "method": method, "tenant": "t"}).policies
        assert {each.policy for each in explained if each.matches} == set(found)


def test_every_spelling_of_a_route_meets_the_same_policies_and_counts_the_same_key() -> None:
    document = {
        "route_classes": {"heavy": [{"route": "/v1/%65xports/", "method": "post"}]},
        "quotas": [{"name": "q", "kind": "rate", "limit": "1/second"}],
        "policies": [
            {"name": "exact", "quota": "q", "by": ["route", "method"], "match": {"route": "//v1/exports"}},
            {"name": "below", "quota": "q", "by": [], "match": {"route": "/v1/*", "method": "post"}},
            {"name": "class", "quota": "q", "by": ["route_class"], "match": {"route_class": "heavy"}},
            {"name": "end", "quota": "q", "by": [], "match": {"route": "/*/exports/", "method": ["GET", "Post"]}},
            {"name": "one", "quota": "q", "by": [], "match": {"route": "/v1/*/"}},
            {"name": "inside", "quota": "q", "by": [], "match": {"route": "/v1/exports/*"}},
        ],
    }
    bundle = PolicyBundle(
        version=1, document=msgspec.convert(document, LimitsDocument), subscriptions={}, weight=1, total_weight=1
    )
    policies = Policies(bundle)
    spellings = ["/v1/exports", "/v1/exports/", "//v1/exports", "/v1/exports?x", "/v1/%65xports", "/v1/a/../exports"]
    for spelling in spellings * 2:  # the second time it comes from the cache
        for method in ("POST", "post"):
            found = policies.charges_for({"route": spelling, "method": method}, None)
            assert {each.policy.name: each.charge.quota for each in found} == {
                "exact": "q:route=%2Fv1%2Fexports,method=POST",
                "below": "q:",
                "class": "q:route_class=heavy",
                "end": "q:",
                "one": "q:",
                "inside": "q:",
            }
    assert [each.name for each in policies.match({"route": "/v1", "method": "POST"})] == ["below"]
    assert policies.match({"route": "/v1x", "method": "POST"}) == []
    assert [each.name for each in policies.match({"route": "/V1/exports", "method": "POST"})] == ["end"]


class Counted(str):
    """A route that counts how often it is compared."""

    compared = 0

    def startswith(self, *arguments: object) -> bool:
        Counted.compared += 1
        return super().startswith(*arguments)  # type: ignore[arg-type]

    def __lt__(self, other: str) -> bool:
        Counted.compared += 1
        return super().__lt__(other)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return Counted(super().__getitem__(key))


@pytest.mark.parametrize("route", ["/v1/{}/*", "/v1/*/{}", "/v1/*/{}/*", "/*/{}/*/x*"])
def test_ten_thousand_routes_cost_a_dozen_comparisons(route: str) -> None:
    routes = Routes((route.format(f"{n:04}"), n) for n in range(10_000))
    Counted.compared = 0
    assert routes.by_wildcard(Counted(route.format("0815").replace("*", "xyz"))) == [815]
    assert Counted.compared <= 20, "bisection looks at fourteen of ten thousand"


def test_a_star_within_a_route_is_one_segment_and_at_its_end_whatever_follows() -> None:
    routes = Routes([("/v1/*/exports", 1), ("/v1/*/exports/*", 2), ("/v1/*", 3)])
    asked = ["/v1/acme/exports", "/v1/acme/exports/7/x", "/v1/a/b/exports", "/v1//exports", "/v2/acme/exports"]
    assert [sorted(routes.by_wildcard(each)) for each in asked] == [[1, 3], [2, 3], [3], [3], []]


@given(st.integers(1, 5), st.lists(st.integers(0, 20)))
def test_cached_matches_are_correct_and_bounded(most: int, asked: list[int]) -> None:
    squares: GenerationalCache[int, int] = GenerationalCache(most)
    last_used: list[int] = []
    for number in asked:
        known = squares.get(number)
        assert known in (None, number * number)
        if number in last_used[-most:]:
            assert known is not None, "what was used lately is still there"
        if known is None:
            squares.put(number, number * number)
        last_used = [used for used in last_used if used != number] + [number]
        assert len(squares) <= 2 * most
    squares.clear()
    assert len(squares) == 0
