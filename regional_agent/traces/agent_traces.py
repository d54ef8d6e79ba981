"""The traces of one agent: where its spans go, and which sampled requests the next exchanges are about."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from protocol.check import cause_of_denial
from protocol.identifiers import name_of_quota
from protocol.traces.trace_context import TraceContext
from regional_agent.admission.answers import Verdict
from regional_agent.settings import AgentSettings
from regional_agent.store.check_calls import CheckCalls
from regional_agent.store.types import AllowanceCharge
from regional_agent.traces.pending_usage import PendingUsage
from regional_agent.traces.store_calls import TracedCalls
from web.traces.context import Kind, TraceMetrics
from web.traces.opening import open_tracing
from web.traces.spans import Attributes, Span
from web.traces.tracing import Tracing


class AgentTraces:
    def __init__(self, tracing: Tracing, region: str) -> None:
        self.tracing = tracing
        self.usage = PendingUsage()
        self.region = region

    def around_checks(self, calls: CheckCalls) -> TracedCalls:
        return TracedCalls(calls, self.tracing, self.usage)

    def note_verdict(self, span: Span, verdict: Verdict, more: Attributes) -> None:
        """Let a span describe a decided check, and remember an admitted one for the exchange that books it."""
        span.attributes = partial(describe, verdict, self.region, more, shows_keys=self.tracing.shows_keys)
        if verdict.answer.allowed:
            for each in verdict.policy_charges:
                if isinstance(each.charge, AllowanceCharge):
                    self.usage.note(each.charge.quota, span.context)

    def around_exchange(self, causes: Sequence[TraceContext]) -> AbstractContextManager[object]:
        """Make a span of an exchange that sampled requests caused; it passes their trace on to the coordinator."""
        if not causes:
            return nullcontext()
        return self.tracing.around("exchange", causes, Kind.CLIENT, {"leasehold.region": self.region})


def describe(verdict: Verdict, region: str, more: Attributes, *, shows_keys: bool) -> Attributes:
    """Say how a check was decided. Values that requests are counted by are secrets, unless a setting shows them."""
    answer, keys = verdict.answer, [each.charge.quota for each in verdict.policy_charges]
    found: dict[str, str | int | bool | list[str]] = {
        "leasehold.region": region,
        "leasehold.allowed": answer.allowed,
        "leasehold.policies": [each.policy for each in answer.policies],
        "leasehold.quotas": sorted({name_of_quota(key) for key in keys}),
    }
    if shows_keys:
        found["leasehold.quota_keys"] = keys
    named = {"denied_by": answer.denied_by, "reason": cause_of_denial(answer), "degraded": answer.degraded}
    return found | {f"leasehold.{name}": str(value) for name, value in named.items() if value is not None} | dict(more)


def open_traces(settings: AgentSettings, metrics: TraceMetrics) -> AgentTraces | None:
    """Return the agent's traces, if the settings ask for them."""
    tracing = open_tracing("leasehold-agent", settings, metrics)
    return None if tracing is None else AgentTraces(tracing, settings.region)
