"""Spans of sampled requests: a request keeps what happened to it, and a thread exports it.

Whether a request is sampled is decided before anything is made for it: as its `traceparent` says, or one request in so
many without one. Work that is gathered (a call of the store, an exchange, a transaction) serves many requests: its span
is the child of the first sampled one, and has links to the others.

The queue is bounded, and no request waits for it. Spans that it has no room for, or that the receiver does not take,
are counted as lost.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import random
from time import time_ns
from typing import Protocol

import structlog

from protocol.traces.trace_context import TraceContext, parse_traceparent
from web.traces.context import ExportResult, Kind, TraceMetrics, within
from web.traces.spans import Attributes, Span, begin_span

MOST_WAITING = 10_000  # spans
MOST_IN_EXPORT = 512
EXPORT_EVERY_S = 1.0
CLOSE_WITHIN_S = 6.0  # longer than one call of the receiver may take

log = structlog.get_logger()


class Exporter(Protocol):
    """Sends spans to a receiver."""

    def export(self, spans: Sequence[Span], /) -> None:
        """Send spans, or raise why they were not taken. It is called in a thread."""


class Tracing:
    """The exporter of a process's spans. With `shows_keys` they may have what requests are counted by, as tenants."""

    def __init__(self, exporter: Exporter, ratio: float, metrics: TraceMetrics, *, shows_keys: bool) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._waiting: deque[Span] = deque()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._is_failing = False
        self.ratio = ratio
        self.under_way = 0  # sampled requests that are not answered yet
        self.shows_keys = shows_keys

    def begin_request(self, name: str, traceparent: str | None) -> Span | None:
        """Begin the span of a request that arrives, if it is sampled. Then `end_request` has to end it."""
        parent = parse_traceparent(traceparent)
        is_sampled = random() < self.ratio if parent is None else parent.is_sampled  # noqa: S311 - no secret
        return self.begin_sampled(name, parent) if is_sampled else None

    def begin_sampled(self, name: str, parent: TraceContext | None) -> Span:
        self.under_way += 1
        return begin_span(name, Kind.SERVER, () if parent is None else (parent,))

    def end_request(self, span: Span, *, is_shown: bool = True) -> None:
        """End a request's span. One that is not shown is not exported: another span is made of the same request."""
        self.under_way -= 1
        if is_shown:
            self.end(span)

    def end(self, span: Span) -> None:
        """Queue a span for its export. The thread begins with the first one: processes may be forked before that."""
        span.ended_ns = time_ns()
        if len(self._waiting) >= MOST_WAITING:
            self._metrics.spans.labels(ExportResult.LOST).inc()
            return
        self._waiting.append(span)
        if self._thread is None:
            self._thread = threading.Thread(target=self._export_for_ever, name="span export", daemon=True)
            self._thread.start()

    @contextmanager
    def around(
        self, name: str, causes: Sequence[TraceContext], kind: Kind, attributes: Attributes | None = None
    ) -> Iterator[Span]:
        """Make a span of a block, to which everything belongs that the block causes."""
        span = begin_span(name, kind, causes, attributes)
        try:
            with within(span.context):
                yield span
        except BaseException as error:
            span.fault = type(error).__name__
            raise
        finally:
            self.end(span)

    def close(self) -> None:
        """Export what is left, within CLOSE_WITHIN_S."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WITHIN_S)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _export_for_ever(self) -> None:
        while not self._closing.wait(EXPORT_EVERY_S):
            self._export_waiting()
        self._export_waiting()

    def _export_waiting(self) -> None:
        while self._waiting:
            spans = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_IN_EXPORT))]
            try:
                self._exporter.export(spans)
            except Exception as error:  # nothing that a span or its receiver does may end the thread
                self._metrics.spans.labels(ExportResult.LOST).inc(len(spans))
                if not self._is_failing:
                    log.warning("spans lost", spans=len(spans), reason=str(error) or type(error).__name__)
                self._is_failing = True
            else:
                self._metrics.spans.labels(ExportResult.EXPORTED).inc(len(spans))
                self._is_failing = False
