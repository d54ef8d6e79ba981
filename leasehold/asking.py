"""What a client asks its agent, and what the answers mean: decided once, without any input or output.

Each talk is a generator. It yields what is to be done (`Call` the agent, `Pause`), is told what came of it, and returns
what the caller gets. `leasehold/client.py` walks through it, once for threads and once for event loops, so that the two
clients cannot differ.

**When the agent cannot be asked** `on_failure` answers: `closed` denies, `open` allows, `raise` leaves it to the
caller. After it was silent for some calls in a row it is not called for a while; then one call tries, and the others go
on without it. An agent that answers that it cannot decide, or that takes its time, is not silent.

**A call that was cut off** may have been charged. With an `operation_id` it is sent once more, for the same operation
is charged once. Without one it is never repeated: the failure mode answers.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from protocol.check import BatchAnswer, CheckAnswer, DenialCause, PolicyAnswer, cause_of_denial
from protocol.circuit_breaker import CircuitBreaker

T = TypeVar("T")
Subject = Mapping[str, str]
OnFailure = Literal["closed", "open", "raise"]
Mode = Literal["enforce", "peek", "adjust"]

LONGEST_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.05
RETRY_WITHOUT_AGENT_MS = 1000
PASSED_ON = ("ratelimit-policy", "ratelimit", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")


class Call(NamedTuple):
    """One request to the agent. `repeatable`: a second one does nothing that the first did not."""

    method: str
    path: str
    body: bytes
    repeatable: bool


class Pause(NamedTuple):
    seconds: float


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


Talk = Generator[Call | Pause, Any, T]  # sent into it: the Response to a Call


class AgentUnavailable(Exception):
    """The agent could not be asked, or could not answer."""


class AgentSilent(AgentUnavailable):
    """The agent could not be reached, or gave no sign of life. Only this counts for the client's circuit breaker."""


def go_on(talk: Talk[T], came: "Response | AgentUnavailable | None") -> Call | Pause:
    """The talk's next step, after what came of the one before. At its end StopIteration has the result."""
    return talk.throw(came) if isinstance(came, AgentUnavailable) else talk.send(came)


class Refused(Exception):
    """The agent refuses a request that is wrong. Repeating it changes nothing. `allowed` is false, as of a denial."""

    allowed: Literal[False] = False

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {problem.get('detail') or problem.get('title')}")
        self.status = status
        self.problem = problem


class Denied(Exception):
    """What a guarded function, or a hold that was not granted, raises."""

    def __init__(self, decision: "Decision") -> None:
        retry_ms = decision.retry_after_ms
        when = "it can never pass" if retry_ms is None else f"ask again in {retry_ms} ms"
        reason = "" if decision.reason is None else f" ({decision.reason})"
        super().__init__(f"denied by {decision.denied_by!r}{reason}; {when}")
        self.decision = decision


class Decision(CheckAnswer, frozen=True, kw_only=True):
    """The agent's answer, or the failure mode's in its place: then `degraded` says so, and no policy is named."""

    policies: list[PolicyAnswer] = msgspec.field(default_factory=list)
    denied_by: str | None = None
    retry_after_ms: int | None = 0  # None where it can never pass
    headers: Mapping[str, str] = {}  # to pass on: RateLimit, X-RateLimit-…, Retry-After

    @property
    def reason(self) -> DenialCause | None:
        """Why the policy in `denied_by` denies: limit, no_lease, cut_off, drained, expired, never or store."""
        return cause_of_denial(self)


def decision_of(answer: CheckAnswer, headers: Mapping[str, str]) -> Decision:
    return Decision(
        allowed=answer.allowed,
        degraded=answer.degraded,
        policies=answer.policies,
        denied_by=answer.denied_by,
        retry_after_ms=answer.retry_after_ms,
        blocked_by=answer.blocked_by,
        headers=headers,
    )


class Held(msgspec.Struct, frozen=True):
    """Units set aside. `hold_id` is None where the failure mode allowed the work and nothing is set aside."""

    hold_id: str | None
    units: int
    expires_in_ms: int


class Asking:
    """The talks of one client."""

    def __init__(self, on_failure: OnFailure, breaker: CircuitBreaker, now_s: Callable[[], float]) -> None:
        self._on_failure = on_failure
        self._breaker = breaker
        self._now_s = now_s

    # --- talks ---------------------------------------------------------------------------------------------------

    def check(
        self,
        subject: Subject,
        *,
        cost: int | None = None,
        operation_id: str | None = None,
        mode: Mode = "enforce",
    ) -> Talk[Decision]:
        """May this happen now? Consumes when it may."""
        question = _question(subject, cost=cost, operation_id=operation_id, mode=mode)
        repeatable = operation_id is not None or mode == "peek"
        try:
            response = yield from self._call("POST", "/v1/check", question, repeatable)
        except AgentUnavailable as error:
            return self._without_agent(error)
        return _decision(response)

    def check_batch(self, checks: Sequence[Mapping[str, Any]]) -> Talk[list[Decision | Refused]]:
        """Decide up to 1,000 checks, each as it would be in a call of its own (contract: `POST /v1/check:batch`).

        Where the agent refuses one check, its place in the result has the `Refused`, which is not raised: others may
        have been charged, and the caller has to see them.
        """
        repeatable = all("operation_id" in check or check.get("mode") == "peek" for check in checks)
        try:
            response = yield from self._call("POST", "/v1/check:batch", {"checks": checks}, repeatable)
        except AgentUnavailable as error:
            return [self._without_agent(error) for _ in checks]
        return [_item_decision(item.status, item.answer, item.problem) for item in _read(response, BatchAnswer).items]

    def wait(
        self, subject: Subject, *, patience_s: float, cost: int | None = None, operation_id: str | None = None
    ) -> Talk[Decision]:
        """Check until it is allowed, as often as the denials say, for as long as `patience_s`. Return the last answer.

        A request that can never pass is not asked for again.
        """
        deadline_s, attempt = self._now_s() + patience_s, 0
        while True:
            decision = yield from self.check(subject, cost=cost, operation_id=operation_id)
            if decision.allowed or decision.retry_after_ms is None:
                return decision
            pause_s = pause_before_next(decision.retry_after_ms, attempt, random.random())  # noqa: S311 - it spreads a herd
            if self._now_s() + pause_s > deadline_s:
                return decision
            yield Pause(pause_s)
            attempt += 1

    def hold(self, subject: Subject, *, units: int, ttl_ms: int, operation_id: str) -> Talk[Held]:
        """Set units aside for work whose cost is not known yet. Raises Denied where there are not as many."""
        question = _question(subject, units=units, ttl_ms=ttl_ms, operation_id=operation_id)
        try:
            response = yield from self._call("POST", "/v1/holds", question, repeatable=True)
        except AgentUnavailable as error:
            decision = self._without_agent(error)
            if not decision.allowed:
                raise Denied(decision) from error
            return Held(None, units, ttl_ms)
        if response.status == 201:
            return _read(response, Held)
        raise Denied(_decision(response))

    def commit(self, hold: Held, units: int) -> Talk[None]:
        """So many were used. Repeating it changes nothing; another number is refused."""
        yield from self._end(hold, "commit", {"units": units})

    def extend(self, hold: Held, ttl_ms: int) -> Talk[None]:
        yield from self._end(hold, "extend", {"ttl_ms": ttl_ms})

    def release(self, hold: Held) -> Talk[None]:
        yield from self._end(hold, "release", {})

    def _end(self, hold: Held, action: str, body: Mapping[str, int]) -> Talk[None]:
        """A failure is the caller's to know: a commit that nobody heard is not billed."""
        if hold.hold_id is None:
            return
        path = f"/v1/holds/{quote(hold.hold_id, safe='')}:{action}"
        response = yield from self._call("POST", path, body, repeatable=True)
        if response.status >= 400:
            raise _refusal(response)

    # --- the agent, or what stands in for it -----------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Mapping[str, Any], repeatable: bool) -> Talk[Response]:
        if not self._breaker.may_call(self._now_s() * 1000):
            raise AgentUnavailable("the circuit breaker is open: the agent was silent several times in a row")
        try:
            response: Response = yield Call(method, path, msgspec.json.encode(body), repeatable)
        except AgentSilent:
            self._breaker.failed(self._now_s() * 1000)
            raise
        self._breaker.succeeded()
        if response.status >= 500 and "allowed" not in _problem(response):
            raise AgentUnavailable(f"the agent answered {response.status}: {_problem(response).get('detail')}")
        return response

    def _without_agent(self, error: AgentUnavailable) -> Decision:
        if self._on_failure == "raise":
            raise error
        is_open = self._on_failure == "open"
        retry_after_ms = 0 if is_open else RETRY_WITHOUT_AGENT_MS
        return Decision(allowed=is_open, degraded="open" if is_open else "closed", retry_after_ms=retry_after_ms)


def pause_before_next(retry_after_ms: int, attempt: int, chance: float) -> float:
    """What the denial says, never earlier; at least a doubling pause; spread out, so that no herd comes back."""
    least_s: float = max(retry_after_ms / 1000, FIRST_PAUSE_S * 2 ** min(attempt, 10))
    return min(LONGEST_PAUSE_S, least_s) * (1 + chance / 10)


# --- bodies -----------------------------------------------------------------------------------------------------------


def _question(subject: Subject, **rest: object) -> dict[str, Any]:
    return {"subject": subject, **{name: value for name, value in rest.items() if value is not None}}


def _decision(response: Response) -> Decision:
    if response.status == 200 or "allowed" in _problem(response):
        return _told(_read(response, CheckAnswer), response.headers)
    raise _refusal(response)


def _told(answer: CheckAnswer, headers: Mapping[str, str]) -> Decision:
    passed_on = {name: headers[name] for name in (*PASSED_ON, "retry-after") if name in headers}
    return decision_of(answer, passed_on)


def _item_decision(status: int, answer: CheckAnswer | None, problem: Mapping[str, Any] | None) -> Decision | Refused:
    if answer is None:
        return Refused(status, problem or {})
    return _told(answer, {})


def _refusal(response: Response) -> Refused:
    return Refused(response.status, _problem(response))


def _read(response: Response, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(response.body, type=shape)
    except msgspec.MsgspecError as error:
        raise AgentUnavailable(f"the agent answered {response.status} and something unreadable: {error}") from None


def _problem(response: Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(response.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
