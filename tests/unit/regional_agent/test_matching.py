"""A request meets the policies that a reader of the document would say it meets, however many there are."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from protocol.policy import LimitsDocument, PolicyBundle
from regional_agent.domain.remembered import Remembered
from regional_agent.domain.routes import Routes
from regional_agent.policies import Policies

texts = st.text("ab/", max_size=6)  # few letters, so that prefixes are prefixes of each other
routes = st.builds("/{}".format, texts) | st.builds("/{}*".format, texts) | st.just("*")
methods = st.sampled_from(["GET", "POST", "*"])


def read(written: list[tuple[str, str]], route: str, method: str) -> list[str]:
    """As a person reads the document: line by line."""
    meets = [f"p{i}" for i, (wanted, allowed) in enumerate(written) if wanted == route and allowed in (method, "*")]
    return meets + [
        f"p{i}"
        for i, (wanted, allowed) in enumerate(written)
        if wanted.endswith("*") and route.startswith(wanted[:-1]) and allowed in (method, "*")
    ]


@given(st.lists(st.tuples(routes, methods), max_size=30), st.lists(st.tuples(texts, methods), max_size=10))
def test_matching_by_table_is_matching_by_eye(written: list[tuple[str, str]], asked: list[tuple[str, str]]) -> None:
    document = {
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
    for text, method in asked * 2:  # the second time it is remembered
        found = [policy.spec.name for policy in policies.match({"route": "/" + text, "method": method})]
        assert found == read(written, "/" + text, method)


class Counted(str):
    """A route that counts how often it is compared."""

    compared = 0

    def startswith(self, *arguments: object) -> bool:
        Counted.compared += 1
        return super().startswith(*arguments)  # type: ignore[arg-type]

    def __lt__(self, other: str) -> bool:
        Counted.compared += 1
        return super().__lt__(other)


def test_ten_thousand_routes_cost_a_dozen_comparisons() -> None:
    routes = Routes((f"/v1/{n:04}/*", n) for n in range(10_000))
    Counted.compared = 0
    assert routes.by_prefix(Counted("/v1/0815/things")) == [815]
    assert Counted.compared <= 20, "bisection looks at fourteen of ten thousand"


@given(st.integers(1, 5), st.lists(st.integers(0, 20)))
def test_what_is_remembered_is_true_and_bounded(most: int, asked: list[int]) -> None:
    squares: Remembered[int, int] = Remembered(most)
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
