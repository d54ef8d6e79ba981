"""Spans wait in a bounded queue for a thread, and each one that is lost is counted."""

import threading
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from web.traces import tracing as module
from web.traces.context import Kind, TraceMetrics, current_context
from web.traces.spans import Span, begin_span
from web.traces.tracing import Tracing

TIMEOUT_S = 30


class Receiver:
    """An exporter that takes spans, refuses them, or keeps its caller waiting."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refuses = False
        self.exports = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def export(self, spans: Sequence[Span]) -> None:
        self.exports.release()
        assert self.may_go_on.wait(TIMEOUT_S)
        if self.refuses:
            raise ConnectionRefusedError("no receiver")
        self.names += [each.name for each in spans]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch, receiver: Receiver, registry: CollectorRegistry) -> Tracing:
    monkeypatch.setattr(module, "EXPORT_EVERY_S", 0.01)
    return Tracing(receiver, 1.0, TraceMetrics(registry), shows_keys=False)


def count(registry: CollectorRegistry, result: str) -> float | None:
    return registry.get_sample_value("leasehold_trace_spans_total", {"result": result})


def end(tracing: Tracing, name: str) -> None:
    tracing.end(begin_span(name, Kind.INTERNAL, ()))


def test_what_is_left_is_exported_at_the_end(tracing: Tracing, receiver: Receiver, registry: CollectorRegistry) -> None:
    with tracing.around("outer", (), Kind.INTERNAL) as outer, tracing.around("inner", (), Kind.INTERNAL) as inner:
        assert current_context() == inner.context
    tracing.close()
    assert receiver.names == ["inner", "outer"]
    assert count(registry, "exported") == 2
    assert current_context() is None
    assert outer.ended_ns >= inner.ended_ns >= inner.began_ns >= outer.began_ns


def test_an_error_is_named_in_the_span(tracing: Tracing, receiver: Receiver) -> None:
    with pytest.raises(KeyError), tracing.around("fails", (), Kind.CLIENT) as span:
        raise KeyError("acme")
    tracing.close()
    assert span.fault == "KeyError", "the text of an error may have a secret"
    assert receiver.names == ["fails"]


def test_a_receiver_that_fails_loses_spans_and_gets_the_next_ones(
    tracing: Tracing, receiver: Receiver, registry: CollectorRegistry
) -> None:
    receiver.refuses = True
    end(tracing, "lost")
    assert receiver.exports.acquire(timeout=TIMEOUT_S)
    receiver.refuses = False
    end(tracing, "next")
    tracing.close()
    assert (count(registry, "lost") or 0) + (count(registry, "exported") or 0) == 2
    assert receiver.names[-1] == "next"


def test_spans_beyond_the_bound_are_lost_and_counted(
    tracing: Tracing, receiver: Receiver, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    receiver.may_go_on.clear()
    end(tracing, "under way")
    assert receiver.exports.acquire(timeout=TIMEOUT_S)
    for number in range(5):
        end(tracing, str(number))
    assert count(registry, "lost") == 2
    receiver.may_go_on.set()
    tracing.close()
    assert receiver.names == ["under way", "0", "1", "2"]


@pytest.mark.parametrize(("flags", "ratio", "is_sampled"), [("01", 0.0, True), ("00", 1.0, False), ("", 1.0, True)])
def test_a_traceparent_decides_and_without_one_a_ratio(
    tracing: Tracing, flags: str, ratio: float, is_sampled: bool
) -> None:
    tracing.ratio = ratio
    given = f"00-{'a' * 32}-{'b' * 16}-{flags}" if flags else None
    span = tracing.begin_request("POST", given)
    assert (span is not None) is is_sampled
    if span is not None:
        assert bool(span.causes) is bool(flags)
        tracing.end_request(span, is_shown=False)
    assert tracing.under_way == 0
    tracing.close()
