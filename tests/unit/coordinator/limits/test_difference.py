"""The difference between two documents shows every change and nothing that did not change."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from coordinator.limits.rules.difference import Change, ChangeKind, differences

names = st.sampled_from(("a", "b", "c", "d"))
values = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(("x", "y"))
named = st.lists(
    st.fixed_dictionaries({"name": names, "limit": values}), max_size=4, unique_by=lambda each: each["name"]
)
documents = st.fixed_dictionaries(
    {"quotas": named, "plans": st.dictionaries(names, values), "by": st.lists(values, max_size=3)}
)


def test_an_added_quota_is_one_change_wherever_it_stands() -> None:
    before = {"quotas": [{"name": "api", "limit": 1}]}
    after = {"quotas": [{"name": "exports", "limit": 2}, {"name": "api", "limit": 1}]}
    added = Change("quotas.exports", ChangeKind.ADDED, after={"name": "exports", "limit": 2})
    assert differences(before, after) == [added]
    assert differences(after, before) == [
        Change("quotas.exports", ChangeKind.REMOVED, before={"name": "exports", "limit": 2})
    ]


def test_a_changed_limit_shows_its_old_and_its_new_value() -> None:
    before = {"quotas": [{"name": "api", "limit": {"free": 1, "pro": 2}}]}
    after = {"quotas": [{"name": "api", "limit": {"free": 1, "pro": 3}}]}
    assert differences(before, after) == [Change("quotas.api.limit.pro", ChangeKind.CHANGED, 2, 3)]


def test_a_change_of_order_is_a_change_of_its_own() -> None:
    before = {"policies": [{"name": "a"}, {"name": "b"}]}
    after = {"policies": [{"name": "b"}, {"name": "a"}]}
    assert differences(before, after) == [Change("policies", ChangeKind.REORDERED, ["a", "b"], ["b", "a"])]


def test_null_is_a_value_and_absence_is_not() -> None:
    removed, changed = differences({"a": None, "b": None}, {"b": 1})
    assert msgspec.to_builtins(removed) == {"path": "a", "change": "removed", "before": None}
    assert msgspec.to_builtins(changed) == {"path": "b", "change": "changed", "before": None, "after": 1}


@given(documents, documents)
def test_a_difference_is_empty_only_if_the_documents_are_equal(before: object, after: object) -> None:
    assert bool(differences(before, after)) == (before != after)
    assert len(differences(before, after)) == len(differences(after, before))
