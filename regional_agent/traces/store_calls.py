"""Spans of calls of the store. One call decides many requests, so it has links to all sampled ones among them."""

from collections.abc import Sequence

from protocol.traces.trace_context import TraceContext
from regional_agent.store.check_calls import CheckCalls
from regional_agent.store.connection import OnReply, Reply
from regional_agent.store.types import AllowanceCharge, Run, StoreIncarnation
from regional_agent.traces.pending_usage import PendingUsage
from web.traces.context import Kind
from web.traces.spans import begin_span
from web.traces.tracing import Tracing


class TracedCalls:
    """Sends the calls of a batcher. Those without a sampled request are sent as they are."""

    def __init__(self, calls: CheckCalls, tracing: Tracing, usage: PendingUsage) -> None:
        self._calls = calls
        self._tracing = tracing
        self._usage = usage

    def send(self, incarnation: StoreIncarnation, runs: Sequence[Run], on_call: OnReply) -> None:
        causes = self._causes(runs) if self._tracing.under_way else ()
        if not causes:
            self._calls.send(incarnation, runs, on_call)
            return
        span = begin_span("store call", Kind.CLIENT, causes, {"leasehold.requests": sum(run.times for run in runs)})

        def on_reply(reply: Reply | Exception) -> None:
            if isinstance(reply, Exception):
                span.fault = type(reply).__name__
            self._tracing.end(span)
            on_call(reply)

        self._calls.send(incarnation, runs, on_reply)

    def _causes(self, runs: Sequence[Run]) -> list[TraceContext]:
        """Return the sampled requests of the call. The exchange that grants or books their units is about them, too."""
        found: dict[TraceContext, None] = {}
        for run in runs:
            for context in run.trace_contexts():
                found[context] = None
                for charge in run.request.charges:
                    if isinstance(charge, AllowanceCharge):
                        self._usage.note(charge.quota, context)
        return list(found)
