"""Headers agree with the body, in whole seconds, and never name a time that is too early."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from protocol.check import DenialCause, FailureMode, PolicyAnswer
from protocol.outcomes import DenialReason
from regional_agent.admission.answers import Verdict, answer_of
from regional_agent.admission.policies import Window
from regional_agent.admission.rules.denial_causes import LeaseOutlook, cause_of, retry_after_ms
from regional_agent.http.schemas import headers_of, retry_after_header


def answer(
    policy: str,
    *,
    allowed: bool = True,
    remaining: int,
    reset_ms: int = 1500,
    retry_ms: int | None = 0,
    kind: str = "rate",
    degraded: FailureMode | None = None,
) -> PolicyAnswer:
    return PolicyAnswer(
        policy=policy,
        quota="q",
        kind=kind,
        allowed=allowed,
        limit=300,
        share=100,
        remaining=remaining,
        reset_ms=reset_ms,
        retry_after_ms=retry_ms,
        degraded=degraded,
    )


def headers(answers: list[PolicyAnswer], windows: list[Window]) -> Mapping[str, str]:
    charges: Any = [SimpleNamespace(window=each) for each in windows]
    return headers_of(Verdict(answer_of(True, None, answers), charges))


def test_headers_name_every_policy_and_count_by_the_tightest() -> None:
    found = headers(
        [answer("wide", remaining=90), answer("narrow", remaining=3)], [Window.of(300, 2), Window.of(300, 60)]
    )
    assert found == {
        "RateLimit-Policy": '"wide";q=300;w=2, "narrow";q=300;w=60',
        "RateLimit": '"wide";r=90;t=2, "narrow";r=3;t=2',
        "X-RateLimit-Limit": "300",
        "X-RateLimit-Remaining": "3",
        "X-RateLimit-Reset": "2",
    }


def test_the_policy_that_denies_is_the_tightest() -> None:
    found = headers(
        [answer("full", remaining=1), answer("denies", allowed=False, remaining=7)],
        [Window.of(300, 1), Window.of(300, 1)],
    )
    assert found["X-RateLimit-Remaining"] == "7"


def test_a_request_that_meets_no_policy_has_no_headers() -> None:
    assert headers([], []) == {}


@given(st.integers(0, 10**10), st.floats(0, 1))
def test_retry_after_is_never_too_early_and_not_much_too_late(retry_after_ms: int, jitter: float) -> None:
    seconds = int(retry_after_header(retry_after_ms, jitter)["Retry-After"])
    assert retry_after_ms <= seconds * 1000 <= retry_after_ms + 62_000


def test_headers_announce_the_next_unit_and_not_the_full_quota() -> None:
    """A bucket of 100 that is empty and full again in 10 s has its next unit in a tenth of a second."""
    bucket, window = Window.of(300, 10, refills=True), Window.of(300, 10)
    empty = answer("p", remaining=0, reset_ms=10_000)
    assert headers([empty], [bucket])["RateLimit"] == '"p";r=0;t=1'
    assert headers([empty], [window])["RateLimit"] == '"p";r=0;t=10'
    assert headers([answer("p", remaining=100, reset_ms=0)], [bucket])["RateLimit"] == '"p";r=100;t=0'


def test_a_denial_announces_more_quota_no_later_than_retry_after() -> None:
    denied = answer("p", allowed=False, remaining=0, reset_ms=10_000, retry_ms=1_400)
    assert headers([denied], [Window.of(300, 10)])["RateLimit"] == '"p";r=0;t=2'
    assert int(retry_after_header(1_400, 0)["Retry-After"]) >= 2
    slots = answer("s", allowed=False, remaining=0, reset_ms=600_000, retry_ms=1_000, kind="concurrency")
    assert headers([slots], [Window.of_slots(300)])["RateLimit"] == '"s";r=0;t=1'


def test_a_request_that_can_never_pass_has_no_retry_after() -> None:
    denied = answer("p", allowed=False, remaining=5, retry_ms=None)
    assert headers([denied], [Window.of(300, 10)])["RateLimit"] == '"p";r=5'
    assert retry_after_header(None, 0.5) == {}


def test_a_policy_that_admitted_without_counting_has_no_figures() -> None:
    opened = answer("o", remaining=0, reset_ms=0, degraded="open")
    local = answer("l", remaining=3, degraded="local")
    assert headers([opened], [Window.of(300, 1)]) == {}
    assert headers([opened, local], [Window.of(300, 1), Window.of(300, 1)])["RateLimit"] == '"l";r=3;t=2'


def test_a_request_that_one_policy_never_allows_has_no_retry_after() -> None:
    later, never = answer("later", allowed=False, remaining=0, retry_ms=10**9), answer("n", allowed=False, remaining=0)
    never = structs.replace(never, retry_after_ms=None)
    told = answer_of(False, None, [later, never])
    assert (told.denied_by, told.retry_after_ms) == ("n", None)
    assert answer_of(False, None, [later]).retry_after_ms == 10**9


@pytest.mark.parametrize("said", [each for each in DenialReason if "lease" in each])
@pytest.mark.parametrize(
    ("outlook", "cause", "retry_ms"),
    [
        (LeaseOutlook(is_draining=True, is_exhausted=True), DenialCause.DRAINED, 5_000),
        (LeaseOutlook(is_exhausted=True, is_cut_off=True), DenialCause.LIMIT, 777),
        (LeaseOutlook(is_cut_off=True), DenialCause.CUT_OFF, 1_000),
    ],
)
def test_the_agent_states_why_there_are_no_units(
    said: DenialReason, outlook: LeaseOutlook, cause: DenialCause, retry_ms: int
) -> None:
    assert cause_of(said, outlook) is cause
    assert retry_after_ms(cause, 777) == retry_ms


def test_each_reason_of_the_store_has_a_cause() -> None:
    causes = {said: cause_of(said, LeaseOutlook()) for said in DenialReason}
    assert causes == {
        DenialReason.NO_LEASE: DenialCause.NO_LEASE,
        DenialReason.LEASE_EXPIRED: DenialCause.EXPIRED,
        DenialReason.LEASE_SPENT: DenialCause.NO_LEASE,
        DenialReason.RATE_EXCEEDED: DenialCause.LIMIT,
        DenialReason.COST_ABOVE_LIMIT: DenialCause.NEVER,
        DenialReason.SLOTS_TAKEN: DenialCause.LIMIT,
        DenialReason.HOLD_NEEDED: DenialCause.NEVER,
    }
    assert retry_after_ms(DenialCause.NEVER, 0) is None
