"""Which requests a client sends to its agent, and what the answers mean, without I/O.

Each method of `AgentProtocol` is a generator. It yields a `Call` to the agent, is sent the response, and returns the
value for the caller. The two clients only carry the calls out, so they cannot differ.

**While the agent is unavailable** `on_failure` answers: `closed` denies, `open` allows, `raise` raises
AgentUnavailable. After several silent calls in a row a circuit breaker stops calls for a while; then one call is let
through on trial. An agent that answers that it cannot decide, or that takes its time, is not silent.

**A call that was cut off** may have been charged. With an `operation_id` it is sent once more, because the same
operation is charged once. Without one it is never repeated: the failure mode answers.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from protocol.backoff import Backoff
from protocol.check import BatchAnswer, CheckAnswer, DenialCause, ExplainAnswer, Mode, PolicyAnswer, cause_of_denial
from protocol.circuit_breaker import CircuitBreaker

T = TypeVar("T")
Subject = Mapping[str, str | Mapping[str, str]]  # only `labels` is a mapping
Costs = Mapping[str, int]  # units by the name of a quota
OnFailure = Literal["closed", "open", "raise"]
Explanation = ExplainAnswer

LONGEST_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.05
RETRY_BACKOFF_S = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
RETRY_WITHOUT_AGENT_MS = 1000
FORWARDED_HEADERS = (
    *("ratelimit-policy", "ratelimit"),
    *("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "retry-after"),
)


class Call(NamedTuple):
    """One request to the agent. A `repeatable` one may be sent twice and does what it does once."""

    method: str
    path: str
    body: bytes
    repeatable: bool


class Response(NamedTuple):
    """The agent's response to one call; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class AgentUnavailable(Exception):
    """The agent could not be called, or could not decide. The message names its address."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class AgentSilent(AgentUnavailable):
    """The agent could not be reached, or gave no sign of life. Only this counts for the client's circuit breaker."""


Steps = Generator[Call, Any, T]  # sent into it: the Response to a Call


def next_step(steps: Steps[T], result: "Response | AgentUnavailable | None") -> Call:
    """Return the next call after the result of the one before. At the end StopIteration has the value."""
    return steps.throw(result) if isinstance(result, AgentUnavailable) else steps.send(result)


class RequestRejected(Exception):
    """The agent rejected an invalid request. Repeating it changes nothing. `allowed` is false, as in a denial."""

    allowed: Literal[False] = False

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {problem.get('detail') or problem.get('title')}")
        self.status = status
        self.problem = problem


class Denied(Exception):
    """A request was denied: raised by decorated functions, and by holds that were not granted."""

    def __init__(self, decision: "Decision") -> None:
        retry_ms = decision.retry_after_ms
        when = "it can never pass" if retry_ms is None else f"try again in {retry_ms} ms"
        reason = "" if decision.reason is None else f" ({decision.reason})"
        super().__init__(f"denied by {decision.denied_by!r}{reason}; {when}")
        self.decision = decision


class Decision(CheckAnswer, frozen=True, kw_only=True):
    """The agent's answer to a check, or the failure mode's, which sets `degraded` and names no policy.

    `allowed`         whether the request may happen now
    `denied_by`       the policy that denies it, and `reason`, why it does
    `retry_after_ms`  the first moment at which it may pass; None if it never can
    `policies`        what each policy that matched decided, with `limit`, `remaining` and `reset_ms`
    `degraded`        the failure mode (open, closed or local) that decided without the store or without the agent
    `blocked_by`      the field of the block that denies the request
    `headers`         RateLimit, X-RateLimit-… and Retry-After, to forward to the caller
    """

    policies: list[PolicyAnswer] = msgspec.field(default_factory=list)
    denied_by: str | None = None
    retry_after_ms: int | None = 0  # None if the request can never pass
    headers: Mapping[str, str] = {}  # to forward: RateLimit, X-RateLimit-…, Retry-After

    @property
    def reason(self) -> DenialCause | None:
        """The reason of the policy in `denied_by`: limit, no_lease, cut_off, drained, expired, never or store."""
        return cause_of_denial(self)


def decision_of(answer: CheckAnswer, headers: Mapping[str, str]) -> Decision:
    """Return an agent's answer as a decision, with the headers to forward."""
    return Decision(
        allowed=answer.allowed,
        degraded=answer.degraded,
        policies=answer.policies,
        denied_by=answer.denied_by,
        retry_after_ms=answer.retry_after_ms,
        blocked_by=answer.blocked_by,
        unmatched=answer.unmatched,
        headers=headers,
    )


def results_of(batch: BatchAnswer) -> "list[Decision | RequestRejected]":
    """Return the decision of each check of a batch, or its rejection."""
    return [
        RequestRejected(item.status, item.problem or {}) if item.answer is None else decision_of(item.answer, {})
        for item in batch.items
    ]


class HeldUnits(msgspec.Struct, frozen=True):
    """Units reserved by a hold. `hold_id` is None if the failure mode allowed the work and nothing is reserved.

    `units` is 0 if the hold was made with `costs` only.
    """

    hold_id: str | None
    units: int
    expires_in_ms: int


def refuse_unusable(on_failure: str, **numbers: int) -> None:
    """Raise ValueError for parameters with which a client would do something else, or wait for ever."""
    if on_failure not in get_args(OnFailure):
        raise ValueError(f"on_failure: {on_failure!r} is none of {', '.join(get_args(OnFailure))}")
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: {number} is less than 1")


class AgentProtocol:
    """The requests of one client."""

    def __init__(
        self, address: str, on_failure: OnFailure, breaker: CircuitBreaker, now_s: Callable[[], float]
    ) -> None:
        self._address = address
        self._on_failure = on_failure
        self._breaker = breaker
        self._now_s = now_s

    def check(
        self,
        subject: Subject,
        *,
        cost: int | None = None,
        costs: Costs | None = None,
        operation_id: str | None = None,
        mode: Mode = "enforce",
    ) -> Steps[Decision]:
        body = _check_body(subject, cost=cost, costs=costs, operation_id=operation_id, mode=mode)
        repeatable = operation_id is not None or mode == "peek"
        try:
            response = yield from self._call("POST", "/v1/check", body, repeatable)
            return self._decision(response)
        except AgentUnavailable as error:
            return self._decide_without_agent(error)

    def check_batch(self, checks: Sequence[Mapping[str, Any]]) -> Steps[list[Decision | RequestRejected]]:
        repeatable = all("operation_id" in check or check.get("mode") == "peek" for check in checks)
        try:
            response = yield from self._call("POST", "/v1/check:batch", {"checks": checks}, repeatable)
            if response.status >= 400:
                raise _rejection(response)
            return results_of(self._decode(response, BatchAnswer))
        except AgentUnavailable as error:
            return [self._decide_without_agent(error) for _ in checks]

    def explain(self, subject: Subject, *, cost: int | None, costs: Costs | None) -> Steps[Explanation]:
        """Ask for an explanation. No failure mode can make one: a failure is raised."""
        response = yield from self._call("POST", "/v1/explain", _check_body(subject, cost=cost, costs=costs), True)
        if response.status >= 400:
            raise _rejection(response)
        return self._decode(response, Explanation)

    def hold(
        self, subject: Subject, *, units: int | None, costs: Costs | None = None, ttl_ms: int, operation_id: str
    ) -> Steps[HeldUnits]:
        body = _check_body(subject, units=units, costs=costs, ttl_ms=ttl_ms, operation_id=operation_id)
        try:
            response = yield from self._call("POST", "/v1/holds", body, repeatable=True)
            if response.status == 201:
                return self._decode(response, HeldUnits)
            decision = self._decision(response)
        except AgentUnavailable as error:
            decision = self._decide_without_agent(error)
            if not decision.allowed:
                raise Denied(decision) from error
            return HeldUnits(None, units or 0, ttl_ms)
        raise Denied(decision)

    def commit(self, hold: HeldUnits, units: int | None, costs: Costs | None = None) -> Steps[None]:
        body = {"units": units, "costs": costs}
        yield from self._change(hold, "commit", {name: value for name, value in body.items() if value is not None})

    def extend(self, hold: HeldUnits, ttl_ms: int) -> Steps[None]:
        yield from self._change(hold, "extend", {"ttl_ms": ttl_ms})

    def release(self, hold: HeldUnits) -> Steps[None]:
        yield from self._change(hold, "release", {})

    def _change(self, hold: HeldUnits, action: str, body: Mapping[str, object]) -> Steps[None]:
        """Change a hold. A failure is raised whatever `on_failure` says: a commit that is lost is not billed."""
        if hold.hold_id is None:
            return
        response = yield from self._call(
            "POST", f"/v1/holds/{_path_segment(hold.hold_id)}:{action}", body, repeatable=True
        )
        if response.status >= 400:
            raise _rejection(response)

    def _call(self, method: str, path: str, body: Mapping[str, Any], repeatable: bool) -> Steps[Response]:
        if not self._breaker.may_call(self._now_s() * 1000):
            raise AgentUnavailable(
                f"{self._address}: the circuit breaker is open after several calls without an answer"
            )
        try:
            response: Response = yield Call(method, path, msgspec.json.encode(body), repeatable)
        except AgentUnavailable as error:
            if isinstance(error, AgentSilent):
                self._breaker.failed(self._now_s() * 1000)
            raise type(error)(f"{self._address}: {error}") from error
        self._breaker.succeeded()
        if response.status >= 500 and "allowed" not in _problem(response):
            detail = _problem(response).get("detail")
            raise AgentUnavailable(f"{self._address}: the agent answered {response.status}: {detail}")
        return response

    def _decision(self, response: Response) -> Decision:
        if response.status == 200 or "allowed" in _problem(response):
            headers = response.headers
            forwarded = {name: headers[name] for name in FORWARDED_HEADERS if name in headers}
            return decision_of(self._decode(response, CheckAnswer), forwarded)
        raise _rejection(response)

    def _decode(self, response: Response, shape: type[T]) -> T:
        try:
            return msgspec.json.decode(response.body, type=shape)
        except msgspec.MsgspecError as error:
            text = f"the agent answered {response.status} with an unreadable body: {error}"
            raise AgentUnavailable(f"{self._address}: {text}") from None

    def _decide_without_agent(self, error: AgentUnavailable) -> Decision:
        if self._on_failure == "raise":
            raise error
        is_open = self._on_failure == "open"
        retry_after_ms = 0 if is_open else RETRY_WITHOUT_AGENT_MS
        return Decision(allowed=is_open, degraded="open" if is_open else "closed", retry_after_ms=retry_after_ms)


class Patience:
    """The pauses before a denied check is repeated, and the time to give up."""

    def __init__(self, timeout_s: float, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._deadline_s = now_s() + timeout_s
        self._attempts = 0

    def pause_before_retry_s(self, decision: Decision) -> float | None:
        """Return the pause, or None if there is no use in a retry: allowed, never allowed, or too late."""
        if decision.allowed or decision.retry_after_ms is None:
            return None
        pause_s = next_pause_s(decision.retry_after_ms, self._attempts, os.urandom(1)[0] / 256)
        self._attempts += 1
        return pause_s if self._now_s() + pause_s <= self._deadline_s else None


def next_pause_s(retry_after_ms: int, attempt: int, chance: float) -> float:
    """Return the pause before the next check: never shorter than the denial says, doubling, and spread by a tenth."""
    least_s = max(retry_after_ms / 1000, RETRY_BACKOFF_S.pause_after(attempt + 1))
    return min(LONGEST_PAUSE_S, least_s) * (1 + chance / 10)


# --- bodies -----------------------------------------------------------------------------------------------------------


def _check_body(subject: Subject, **rest: object) -> dict[str, Any]:
    return {"subject": subject, **{name: value for name, value in rest.items() if value is not None}}


def _path_segment(text: str) -> str:
    """Percent-encode a text as `urllib.parse.quote` does, without importing it: the client loads few modules."""
    return "".join(char if char in _UNRESERVED else "".join(f"%{byte:02X}" for byte in char.encode()) for char in text)


_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def _rejection(response: Response) -> RequestRejected:
    return RequestRejected(response.status, _problem(response))


def _problem(response: Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(response.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
