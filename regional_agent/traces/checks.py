"""Spans of the checks that are answered in front of the framework.

Of a check that is not sampled a connection reads one byte of its `traceparent`, or draws a number without one. Of a
sampled one it keeps the verdict; a thread makes the attributes of the span from it.
"""

from random import random
from typing import ClassVar

from protocol.check import BatchAnswer
from protocol.denials import status_of_answer
from protocol.traces.trace_context import SAMPLED_DIGITS, parse_traceparent
from regional_agent.admission.answers import Verdict
from regional_agent.admission.pending_check import Caller
from regional_agent.http.fast_path import BATCH, FastPath, FastProtocol, Head
from regional_agent.traces.agent_traces import AgentTraces
from web.traces.spans import Attributes, Span


class TracedCaller:
    """Gets the verdict on a sampled request in place of its connection."""

    def __init__(self, connection: Caller, span: Span, traces: AgentTraces) -> None:
        self._connection = connection
        self._span = span
        self._traces = traces
        self.trace_context = span.context

    @property
    def has_disconnected(self) -> bool:
        return self._connection.has_disconnected

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        """Pass the verdict on. A refusal is answered by FastAPI's route, which has a span of its own."""
        traces, is_decided = self._traces, isinstance(verdict, Verdict)
        if isinstance(verdict, Verdict):
            traces.note_verdict(self._span, verdict, {"http.response.status_code": status_of_answer(verdict.answer)})
        traces.tracing.end_request(self._span, is_shown=is_decided)
        self._connection.on_verdict(verdict)


class TracedProtocol(FastProtocol):
    """One connection of an agent with traces."""

    traces: ClassVar[AgentTraces]
    _batch_span: Span | None = None

    def _decide(self, head: Head, raw: bytes, body: bytes, caller: Caller | None = None) -> None:
        given, tracing = self._traceparent, self.traces.tracing
        if not (random() < tracing.ratio if given is None else given[-1] in SAMPLED_DIGITS):  # noqa: S311 - no secret
            super()._decide(head, raw, body, caller)
            return
        parent = None if given is None else parse_traceparent(given.decode())
        span = tracing.begin_sampled(f"POST {head.path}", parent)
        if head.path == BATCH:
            self._batch_span = span
            super()._decide(head, raw, body)
        else:
            super()._decide(head, raw, body, TracedCaller(self, span, self.traces))

    def _on_batch_answer(self, answer: BatchAnswer) -> None:
        self._end_batch({"leasehold.checks": len(answer.items)}, is_shown=True)
        super()._on_batch_answer(answer)

    def _hand_on(self, data: bytes) -> None:
        self._end_batch({}, is_shown=False)
        super()._hand_on(data)

    def _end_batch(self, attributes: Attributes, *, is_shown: bool) -> None:
        span, self._batch_span = self._batch_span, None
        if span is not None:
            span.attributes = attributes
            self.traces.tracing.end_request(span, is_shown=is_shown)


def traced_protocol(fast_path: FastPath, traces: AgentTraces) -> type[TracedProtocol]:
    """Return the class of which uvicorn makes an instance for each connection."""
    return type("TracedProtocol", (TracedProtocol,), {"fast_path": fast_path, "traces": traces})
