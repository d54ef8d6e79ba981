"""What clients ask and what answers mean, without any connection."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.client.agent_protocol import (
    AgentProtocol,
    AgentSilent,
    AgentUnavailable,
    Call,
    Decision,
    Denied,
    HeldUnits,
    OnFailure,
    Pause,
    RequestRejected,
    Response,
    Steps,
    next_pause_s,
    next_step,
)
from protocol.circuit_breaker import CircuitBreaker

SUBJECT = {"tenant": "acme", "route": "/v1/exports"}
ALLOWED: dict[str, Any] = {"allowed": True, "degraded": None, "policies": [], "denied_by": None, "retry_after_ms": 0}
DENIED = ALLOWED | {"allowed": False, "denied_by": "export", "retry_after_ms": 2_000}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def protocol(on_failure: OnFailure = "closed", clock: Clock | None = None, **breaker: Any) -> AgentProtocol:
    return AgentProtocol(on_failure, CircuitBreaker(**breaker), clock or Clock())


def response(status: int, body: object, **headers: str) -> Response:
    return Response(status, headers, body if isinstance(body, bytes) else msgspec.json.encode(body))


def walk(
    steps: Steps[Any], answers: Iterator[Response | AgentUnavailable], clock: Clock | None = None
) -> tuple[Any, Any]:
    """Return the value of an operation with an agent that gives these answers, and the steps that it took."""
    taken: list[Any] = []
    came = None
    try:
        while True:
            taken.append(next_step(steps, came))
            came = _come_of(taken[-1], answers, clock)
    except StopIteration as end:
        return end.value, taken


def _come_of(
    step: Call | Pause, answers: Iterator[Response | AgentUnavailable], clock: Clock | None
) -> Response | AgentUnavailable | None:
    if isinstance(step, Call):
        return next(answers)
    assert clock is not None
    clock.now_s += step.seconds
    return None


def outcome(steps: Steps[Any], *answers: Response | AgentUnavailable) -> Any:
    return walk(steps, iter(answers))[0]


def test_a_check_says_what_the_contract_says_and_no_more() -> None:
    decision, [call] = walk(protocol().check(SUBJECT, cost=3), iter([response(200, ALLOWED, ratelimit="r")]))
    assert (call.method, call.path, call.repeatable) == ("POST", "/v1/check", False)
    assert msgspec.json.decode(call.body) == {"subject": SUBJECT, "cost": 3, "mode": "enforce"}
    assert decision == Decision(allowed=True, degraded=None, headers={"ratelimit": "r"})


def test_only_what_charges_once_is_repeatable() -> None:
    for options, repeatable in (({}, False), ({"operation_id": "a"}, True), ({"mode": "peek"}, True)):
        call = next(protocol().check(SUBJECT, **options))  # type: ignore[arg-type]
        assert isinstance(call, Call)
        assert call.repeatable is repeatable


def test_a_denial_is_an_answer() -> None:
    decision = outcome(protocol().check(SUBJECT), response(429, DENIED | {"title": "Quota exceeded"}))
    assert (decision.allowed, decision.denied_by, decision.retry_after_ms) == (False, "export", 2_000)
    closed = outcome(protocol().check(SUBJECT), response(503, DENIED | {"degraded": "closed"}))
    assert (closed.allowed, closed.degraded) == (False, "closed")


def test_a_wrong_question_is_raised_and_is_no_failure_of_the_agents() -> None:
    asked = protocol(failures=1)
    for _ in range(3):
        with pytest.raises(RequestRejected, match="422: cost"):
            outcome(asked.check(SUBJECT), response(422, {"title": "Invalid", "detail": "cost: above zero"}))


@pytest.mark.parametrize(
    "failure", [AgentUnavailable("refused"), response(500, {"detail": "oops"}), response(502, b"<html>")]
)
def test_the_failure_mode_answers_for_an_agent_that_cannot(failure: Response | AgentUnavailable) -> None:
    closed = outcome(protocol("closed").check(SUBJECT), failure)
    assert (closed.allowed, closed.degraded, closed.retry_after_ms) == (False, "closed", 1000)
    opened = outcome(protocol("open").check(SUBJECT), failure)
    assert (opened.allowed, opened.degraded, opened.retry_after_ms) == (True, "open", 0)
    with pytest.raises(AgentUnavailable):
        outcome(protocol("raise").check(SUBJECT), failure)


def test_an_answer_that_cannot_be_read_is_no_admission() -> None:
    with pytest.raises(AgentUnavailable, match="unreadable"):
        outcome(protocol("raise").check(SUBJECT), response(200, b"hello"))


def test_after_failures_in_a_row_nobody_is_asked_until_one_may_try() -> None:
    clock = Clock()
    asked = protocol("raise", clock, failures=2, pause_ms=1000)
    for _ in range(2):
        with pytest.raises(AgentUnavailable, match="gone"):
            outcome(asked.check(SUBJECT), AgentSilent("gone"))
    with pytest.raises(AgentUnavailable, match="circuit breaker is open"):
        outcome(asked.check(SUBJECT))
    clock.now_s += 1.0
    trying = asked.check(SUBJECT)
    next(trying)  # this one tries …
    with pytest.raises(AgentUnavailable, match="circuit breaker is open"):
        outcome(asked.check(SUBJECT))  # … and the others do without
    with pytest.raises(StopIteration):
        trying.send(response(200, ALLOWED))
    assert outcome(asked.check(SUBJECT), response(200, ALLOWED)).allowed


@pytest.mark.parametrize("answer", [response(503, {"detail": "no policies yet"}), AgentUnavailable("too slow")])
def test_an_agent_that_gives_signs_of_life_is_called_on(answer: Response | AgentUnavailable) -> None:
    asked = protocol("raise", failures=1)
    for _ in range(3):
        with pytest.raises(AgentUnavailable):
            outcome(asked.check(SUBJECT), answer)
    assert outcome(asked.check(SUBJECT), response(200, ALLOWED)).allowed


@given(st.lists(st.sampled_from(["ok", "failure"]), max_size=60), st.integers(1, 5))
def test_a_circuit_breaker_is_open_after_so_many_failures_in_a_row(events: list[str], failures: int) -> None:
    breaker = CircuitBreaker(failures, pause_ms=1000)
    in_a_row, now_ms = 0, 0.0
    for event in events:
        if in_a_row >= failures:
            assert not breaker.may_call(now_ms + 990)
            now_ms += 1000
        assert breaker.may_call(now_ms)
        if event == "ok":
            breaker.succeeded()
            in_a_row = 0
        else:
            breaker.failed(now_ms)
            in_a_row += 1


def test_waiting_asks_again_when_the_denial_says_and_not_beyond_its_patience() -> None:
    clock = Clock()
    denials = [response(429, DENIED), response(429, DENIED), response(200, ALLOWED)]
    decision, steps = walk(protocol(clock=clock).wait(SUBJECT, timeout_s=10), iter(denials), clock)
    assert decision.allowed
    assert [type(step) for step in steps] == [Call, Pause, Call, Pause, Call]
    assert all(2.0 <= step.seconds <= 2.2 for step in steps if isinstance(step, Pause))
    decision, steps = walk(protocol(clock=clock).wait(SUBJECT, timeout_s=1), iter(denials), clock)
    assert (decision.allowed, len(steps)) == (False, 1)


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.floats(0, 1))
def test_nobody_asks_again_too_early_or_never(retry_after_ms: int, attempt: int, chance: float) -> None:
    pause_s = next_pause_s(retry_after_ms, attempt, chance)
    assert min(60.0, retry_after_ms / 1000) <= pause_s <= 66.0
    assert pause_s > 0


def test_a_batch_returns_a_decision_or_a_refusal_for_each_check() -> None:
    items = [{"status": 200, "answer": ALLOWED}, {"status": 429, "answer": DENIED}]
    checks = [{"subject": SUBJECT, "operation_id": "a"}, {"subject": SUBJECT, "mode": "peek"}]
    decisions, [call] = walk(protocol().check_batch(checks), iter([response(200, {"items": items})]))
    assert ([each.allowed for each in decisions], call.repeatable) == ([True, False], True)
    items[1] = {"status": 422, "problem": {"title": "no"}}
    charged, refused = outcome(protocol().check_batch(checks), response(200, {"items": items}))
    assert charged.allowed, "it was charged, and the caller has to know"
    assert isinstance(refused, RequestRejected)
    assert (refused.status, refused.problem, refused.allowed) == (422, {"title": "no"}, False)
    assert [each.allowed for each in outcome(protocol("open").check_batch(checks), AgentUnavailable("gone"))] == [
        True
    ] * 2


def test_a_hold_is_granted_denied_or_left_to_the_failure_mode() -> None:
    def hold(on_failure: OnFailure, answer: Response | AgentUnavailable) -> Any:
        return outcome(protocol(on_failure).hold(SUBJECT, units=5, ttl_ms=9, operation_id="a"), answer)

    held = {"hold_id": "h/1", "units": 5, "expires_in_ms": 9}
    assert hold("closed", response(201, held)) == HeldUnits("h/1", 5, 9)
    assert hold("open", AgentUnavailable("gone")) == HeldUnits(None, 5, 9)
    for on_failure, answer in (("closed", AgentUnavailable("gone")), ("open", response(429, DENIED))):
        with pytest.raises(Denied):
            hold(on_failure, answer)  # type: ignore[arg-type]


def test_what_was_held_is_ended_by_its_id_and_a_failure_is_the_callers_to_know() -> None:
    _, [call] = walk(protocol().commit(HeldUnits("h/1", 5, 9), 3), iter([response(200, {})]))
    assert (call.path, msgspec.json.decode(call.body), call.repeatable) == (
        "/v1/holds/h%2F1:commit",
        {"units": 3},
        True,
    )
    assert walk(protocol().release(HeldUnits(None, 5, 9)), iter([])) == (None, [])
    with pytest.raises(AgentUnavailable):
        outcome(protocol("open").commit(HeldUnits("h", 5, 9), 3), AgentUnavailable("gone"))
    with pytest.raises(RequestRejected):
        outcome(protocol("open").commit(HeldUnits("h", 5, 9), 3), response(409, {"title": "committed otherwise"}))
