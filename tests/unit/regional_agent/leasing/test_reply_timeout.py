"""The timeout of an exchange follows the duration of replies."""

from regional_agent.leasing.rules.reply_timeout import (
    FIRST_PAUSE_MS,
    LONGEST_PAUSE_MS,
    exchange_backoff,
    reply_timeout_ms,
)


def test_the_reply_timeout_grows_with_latency_and_with_each_lost_reply() -> None:
    backoff = exchange_backoff()
    assert [reply_timeout_ms(backoff, rtt) for rtt in (80, 300, 4_000)] == [400, 600, LONGEST_PAUSE_MS]
    backoff.failed(0)
    assert reply_timeout_ms(backoff, 80) == 800
    backoff.succeeded()
    assert reply_timeout_ms(backoff, 0) == FIRST_PAUSE_MS
    backoff.pause = LONGEST_PAUSE_MS
    assert reply_timeout_ms(backoff, 0) == LONGEST_PAUSE_MS
