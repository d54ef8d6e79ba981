"""`ShouldRateLimit`: translate a request of Envoy into checks, and their verdicts into its response."""

import structlog

from protocol.traces.trace_context import TraceContext
from regional_agent.admission.answers import Verdict
from regional_agent.admission.check_cache import CheckCache
from regional_agent.admission.engine import Admission
from regional_agent.envoy.door.methods import Call, GrpcError, Status
from regional_agent.envoy.rls.messages import decode_request
from regional_agent.envoy.rls.planning import RequestPlan, plan_descriptors
from regional_agent.envoy.rls.responses import encode_response
from regional_agent.envoy.wire import MalformedMessage

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
MAX_CACHED_BYTES = 1_024

log = structlog.get_logger()


class RateLimitService:
    """Requests of proxies repeat, so their plans are cached under their bytes, as those of the HTTP door are."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._plans: CheckCache[bytes, RequestPlan] = CheckCache(admission)

    def should_rate_limit(self, message: bytes, call: Call) -> None:
        """Raises GrpcError."""
        plan = self._plans.find(message) or self._plan(message)
        self._admission.submit(plan, _Decision(self._admission, plan, call))

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
        if verdict.answer.allowed and len(self._verdicts) <= len(self._plan.later):
            self._admission.submit(self._plan.later[len(self._verdicts) - 1], self)
        else:
            self._call.respond(encode_response(self._plan, self._verdicts))
