"""The history of limits lists what was in force, from when to when and why, as grants were decided by it."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from coordinator.limits.rules.entitlement import Catalogue, limit_of_key
from coordinator.limits.rules.history import History, Overridden, Subscribed, Version, limits_in_force, narrower
from protocol.limits.document import AllowanceQuota, PeriodKind

START, END = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
MAILS = "mails:tenant=acme"


def day(number: int) -> datetime:
    return START + timedelta(days=number - 1)


def version(number: int, at: datetime, free: int, pro: int, default: str | None = "free") -> Version:
    spec = AllowanceQuota(name="mails", limit={"free": free, "pro": pro}, period=PeriodKind.MONTH)
    return Version(at, number, {"mails": spec}, default)


def override(n: int, limit: int, since: int, until: int | None, made: int = -9, **subject: str) -> Overridden:
    return override_of(n, limit, since, until, made, subject)


def override_of(n: int, limit: int, since: int, until: int | None, made: int, subject: dict[str, str]) -> Overridden:
    ends_at = None if until is None else day(until)
    return Overridden(UUID(int=n), "mails", subject, limit, f"reason {n}", day(made), day(since), ends_at)


def entries(history: History, *keys: str) -> list[tuple[object, ...]]:
    found = limits_in_force(history, keys or [MAILS], START, END)
    return [
        (each.kind, each.units, each.starts_at.day, (each.ends_at - START).days + 1, each.plan or each.reason)
        for each in found
    ]


def test_a_month_is_divided_at_every_change() -> None:
    versions = [version(1, day(-30), 100, 500), version(2, day(20), 100, 600)]
    plans = [Subscribed(day(-5), "free"), Subscribed(day(10), "pro"), Subscribed(day(25), None)]
    overrides = [override(1, 900, 12, 14, tenant="acme"), override(2, 50, -3, 2)]
    assert entries(History("acme", versions, plans, overrides)) == [
        ("override", 50, 1, 2, "reason 2"),
        ("plan", 100, 2, 10, "free"),
        ("plan", 500, 10, 12, "pro"),
        ("override", 900, 12, 14, "reason 1"),
        ("plan", 500, 14, 20, "pro"),
        ("plan", 600, 20, 25, "pro"),
        ("plan", 100, 25, 31, "free"),  # the default plan
    ]


def test_changes_that_do_not_affect_the_tenant_are_left_out() -> None:
    versions = [version(1, day(-30), 100, 500), version(2, day(20), 100, 600), version(3, day(22), 100, 700)]
    (only,) = limits_in_force(History("acme", versions, [], []), [MAILS], START, END)
    assert (only.units, only.version, only.starts_at, only.ends_at) == (100, 1, START, END)


def test_there_is_no_limit_before_the_document_or_without_one_in_the_plan() -> None:
    assert entries(History("acme", [], [], [])) == []
    versions = [version(1, day(5), 100, 500, default=None)]
    assert entries(History("acme", versions, [], [])) == [("plan", 0, 5, 31, None)]
    assert entries(History("acme", versions, [], []), "exports:tenant=acme") == []


def test_overrides_of_narrower_subjects_are_listed_apart() -> None:
    overrides = [
        override(1, 7, -3, None, tenant="acme", user="ann"),
        override(2, 8, -3, None, user="bob"),
        override(3, 9, -3, -2, tenant="acme", user="over"),
        override(4, 10, -3, None, tenant="acme"),
    ]
    history = History("acme", [version(1, day(-30), 100, 500)], [], overrides)
    own = narrower(history, START, END)
    assert own == {
        "mails:tenant=acme,user=ann": {"tenant": "acme", "user": "ann"},
        "mails:tenant=acme,user=bob": {"tenant": "acme", "user": "bob"},
    }
    assert [row[:2] for row in entries(history, MAILS, *own)] == [
        ("override", 10),
        ("override", 7),
    ]  # bob belongs to acme


def test_the_newest_of_several_overrides_of_a_subject_counts() -> None:
    overrides = [override(1, 7, -3, None, made=-8, tenant="acme"), override(2, 8, -3, None, made=-9, tenant="acme")]
    assert entries(History("acme", [version(1, day(-30), 1, 2)], [], overrides))[0][:2] == ("override", 7)


DAYS = st.integers(-5, 35)
LIMITS = st.integers(0, 3)
VERSIONS = st.lists(st.tuples(DAYS, LIMITS, LIMITS, st.sampled_from([None, "free"])), max_size=4)
PLANS = st.lists(st.tuples(DAYS, st.sampled_from([None, "free", "pro"])), max_size=4)
SUBJECTS = st.sampled_from([{}, {"tenant": "acme"}, {"user": "ann"}, {"tenant": "acme", "user": "ann"}])
OVERRIDES = st.lists(st.tuples(LIMITS, DAYS, st.one_of(st.none(), DAYS), DAYS, SUBJECTS), max_size=4)


@given(versions=VERSIONS, plans=PLANS, overrides=OVERRIDES, key=st.sampled_from([MAILS, "mails:tenant=acme,user=ann"]))
def test_the_history_equals_the_limit_of_grants_at_each_moment(
    versions: list[tuple[int, int, int, str | None]],
    plans: list[tuple[int, str | None]],
    overrides: list[tuple[int, int, int | None, int, dict[str, str]]],
    key: str,
) -> None:
    """Check that each moment has one entry, that none precedes the document, and that neighbours differ."""
    history = History(
        "acme",
        [version(n, day(at), free, pro, to) for n, (at, free, pro, to) in enumerate(sorted(versions, key=_first), 1)],
        [Subscribed(day(at), plan) for at, plan in sorted(plans, key=_first)],
        [override_of(n, *each) for n, each in enumerate(overrides)],
    )
    found = limits_in_force(history, [key], START, END)
    for moment in (day(number) for number in range(1, 31)):
        pieces = [each.units for each in found if each.starts_at <= moment < each.ends_at]
        assert pieces == _expected(history, key, moment)
    for one, following in pairwise(found):
        assert one.ends_at <= following.starts_at
        same = [(each.kind, each.units, each.plan, each.id) for each in (one, following)]
        assert one.ends_at < following.starts_at or same[0] != same[1]


def _first(event: tuple[int, ...] | tuple[int, str | None] | tuple[int, int, int, str | None]) -> int:
    return event[0]


def _expected(history: History, key: str, moment: datetime) -> list[int]:
    """Return the limit that an exchange would read from the catalogue at that moment."""
    at = [each for each in history.versions if each.at <= moment]
    if not at:
        return []
    plans = [each.plan for each in history.plans if each.at <= moment]
    valid = [
        each for each in history.overrides if each.starts_at <= moment and (not each.ends_at or moment < each.ends_at)
    ]
    limits = {each.key: each.limit for each in sorted(valid, key=lambda each: (each.created_at, each.id))}
    plan = {"acme": plans[-1]} if plans and plans[-1] else {}
    catalogue = Catalogue(1, at[-1].quotas, at[-1].default_plan, plan, {}, limits)
    limit = limit_of_key(catalogue, at[-1].quotas["mails"], key)
    return [limit if isinstance(limit, int) else 0]
