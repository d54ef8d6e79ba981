"""`ShouldRateLimit`: translate a request of Envoy into checks, and their verdicts into its response."""

import structlog

from protocol.protobuf.reading import MalformedMessage
from protocol.traces.trace_context import HEADER, TraceContext
from regional_agent.admission.answers import Verdict
from regional_agent.admission.check_cache import CheckCache
from regional_agent.admission.engine import Admission
from regional_agent.admission.plan import CheckPlan
from regional_agent.envoy.door.methods import Call, GrpcError, Status
from regional_agent.envoy.rls.messages import decode_request
from regional_agent.envoy.rls.planning import RequestPlan, plan_descriptors
from regional_agent.envoy.rls.responses import SHOULD_RATE_LIMIT, encode_response
from regional_agent.traces.agent_traces import AgentTraces
from web.traces.spans import Span

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
MAX_CACHED_BYTES = 1_024

log = structlog.get_logger()


class RateLimitService:
    """Requests of proxies repeat, so their plans are cached under their bytes, as those of the HTTP door are."""

    def __init__(self, admission: Admission, traces: AgentTraces | None = None) -> None:
        self._admission = admission
        self._traces = traces
        self._plans: CheckCache[bytes, RequestPlan] = CheckCache(admission)

    def should_rate_limit(self, message: bytes, call: Call) -> None:
        """Raises GrpcError."""
        plan = self._plans.find(message) or self._plan(message)
        self._admission.submit(plan, self._decision(plan, call))

    def _decision(self, plan: RequestPlan, call: Call) -> "_Decision":
        if self._traces is not None:
            span = self._traces.tracing.begin_request(SHOULD_RATE_LIMIT, call.metadata.get(HEADER))
            if span is not None:
                return _TracedDecision(self._admission, plan, call, span, self._traces)
        return _Decision(self._admission, plan, call)

    def _plan(self, message: bytes) -> RequestPlan:
        try:
            request = decode_request(message)
        except MalformedMessage as error:
            raise GrpcError(Status.INVALID_ARGUMENT, f"the request is no RateLimitRequest: {error}") from None
        plan = plan_descriptors(self._admission, request)
        if len(message) <= MAX_CACHED_BYTES:
            self._plans.keep(message, plan)
        return plan


class _Decision:
    """The decision on one request: its stages one after the other, as long as all before are admitted."""

    __slots__ = ("_admission", "_call", "_plan", "_verdicts")

    trace_context: TraceContext | None = None

    def __init__(self, admission: Admission, plan: RequestPlan, call: Call) -> None:
        self._admission = admission
        self._plan = plan
        self._call = call
        self._verdicts: list[Verdict] = []

    @property
    def has_disconnected(self) -> bool:
        return self._call.has_disconnected

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        if isinstance(verdict, Exception):
            log.error("rate limit request failed", exc_info=verdict)
            self._call.fail(GrpcError(Status.INTERNAL, "an unexpected error: the agent's log has it"))
            return
        self._verdicts.append(verdict)
        stage = self._next_stage()
        if stage is None:
            self._call.respond(encode_response(self._plan, self._verdicts))
        else:
            self._admission.submit(stage, self)

    def _next_stage(self) -> CheckPlan | None:
        done = len(self._verdicts) - 1
        is_going_on = self._verdicts[-1].answer.allowed and done < len(self._plan.later)
        return self._plan.later[done] if is_going_on else None


class _TracedDecision(_Decision):
    """The decision on a sampled request. Its span describes the stage that was decided last."""

    def __init__(self, admission: Admission, plan: RequestPlan, call: Call, span: Span, traces: AgentTraces) -> None:
        super().__init__(admission, plan, call)
        self.trace_context = span.context
        self._span = span
        self._traces = traces

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        if isinstance(verdict, Verdict):
            self._traces.note_verdict(self._span, verdict, {"rpc.system": "grpc"})
        super().on_verdict(verdict)
        # A later stage may have been decided at once, and then it has ended the span.
        if isinstance(verdict, Exception) or (self._verdicts[-1] is verdict and self._next_stage() is None):
            self._traces.tracing.end_request(self._span)
