"""What an exchange's span links to is bounded, and is taken once."""

from protocol.traces.trace_context import TraceContext
from regional_agent.traces.pending_usage import MOST_KEYS, MOST_OF_A_KEY, PendingUsage


def context(number: int) -> TraceContext:
    return TraceContext(number, number, is_sampled=True)


def test_requests_of_the_quotas_of_an_exchange_are_taken_once() -> None:
    usage = PendingUsage()
    for quota, number in (("a", 1), ("a", 1), ("b", 1), ("b", 2), ("c", 3)):
        usage.note(quota, context(number))
    assert usage.take(["a", "b", "unknown"]) == [context(1), context(2)]
    assert usage.take(["a", "b"]) == []
    assert usage.take(["c"]) == [context(3)]


def test_few_requests_are_remembered() -> None:
    usage = PendingUsage()
    for number in range(1, 100):
        usage.note("a", context(number))
    assert len(usage.take(["a"])) == MOST_OF_A_KEY
    for number in range(2 * MOST_KEYS):
        usage.note(f"k{number}", context(1))
    assert sum(bool(usage.take([f"k{number}"])) for number in range(2 * MOST_KEYS)) == MOST_KEYS
