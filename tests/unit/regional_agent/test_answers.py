"""Headers say what the body says, in whole seconds and never too early."""

from hypothesis import given
from hypothesis import strategies as st

from regional_agent.answers import PolicyAnswer, headers_of, retry_after_header


def answer(policy: str, *, allowed: bool = True, remaining: int, reset_ms: int = 1500) -> PolicyAnswer:
    return PolicyAnswer(
        policy=policy,
        quota="q",
        kind="rate",
        allowed=allowed,
        limit=100,
        remaining=remaining,
        reset_ms=reset_ms,
        retry_after_ms=0,
    )


def test_headers_name_every_policy_and_count_by_the_tightest() -> None:
    headers = headers_of([answer("wide", remaining=90), answer("narrow", remaining=3)], [2, 60])
    assert headers == {
        "RateLimit-Policy": '"wide";q=100;w=2, "narrow";q=100;w=60',
        "RateLimit": '"wide";r=90;t=2, "narrow";r=3;t=2',
        "X-RateLimit-Limit": "100",
        "X-RateLimit-Remaining": "3",
        "X-RateLimit-Reset": "2",
    }


def test_the_policy_that_denies_is_the_tightest() -> None:
    headers = headers_of([answer("full", remaining=1), answer("denies", allowed=False, remaining=7)], [1, 1])
    assert headers["X-RateLimit-Remaining"] == "7"


def test_a_request_that_meets_no_policy_has_no_headers() -> None:
    assert headers_of([], []) == {}


@given(st.integers(0, 10**10), st.floats(0, 1))
def test_retry_after_is_never_too_early_and_not_much_too_late(retry_after_ms: int, jitter: float) -> None:
    seconds = int(retry_after_header(retry_after_ms, jitter)["Retry-After"])
    assert retry_after_ms <= seconds * 1000 <= retry_after_ms + 62_000
