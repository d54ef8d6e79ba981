"""The traces of one agent: where its spans go, and which sampled requests the next exchanges are about."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from protocol.traces.trace_context import TraceContext
from regional_agent.settings import AgentSettings
from regional_agent.store.check_calls import CheckCalls
from regional_agent.traces.pending_usage import PendingUsage
from regional_agent.traces.store_calls import TracedCalls
from web.traces.context import Kind, TraceMetrics
from web.traces.opening import open_tracing
from web.traces.tracing import Tracing


class AgentTraces:
    def __init__(self, tracing: Tracing, region: str) -> None:
        self.tracing = tracing
        self.usage = PendingUsage()
        self.region = region

    def around_checks(self, calls: CheckCalls) -> TracedCalls:
        return TracedCalls(calls, self.tracing, self.usage)

    def around_exchange(self, causes: Sequence[TraceContext]) -> AbstractContextManager[object]:
        """Make a span of an exchange that sampled requests caused; it passes their trace on to the coordinator."""
        if not causes:
            return nullcontext()
        return self.tracing.around("exchange", causes, Kind.CLIENT, {"leasehold.region": self.region})


def open_traces(settings: AgentSettings, metrics: TraceMetrics) -> AgentTraces | None:
    """Return the agent's traces, if the settings ask for them."""
    tracing = open_tracing("leasehold-agent", settings, metrics)
    return None if tracing is None else AgentTraces(tracing, settings.region)
