"""Clients build requests and interpret answers without I/O."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import AsyncClient, Client
from leasehold.client.agent_protocol import (
    AgentProtocol,
    AgentSilent,
    AgentUnavailable,
    Call,
    Decision,
    Denied,
    HeldUnits,
    OnFailure,
    Patience,
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


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    "parameter", [{"on_failure": "opne"}, {"timeout_ms": 0}, {"longest_wait_ms": -1}, {"connections": 0}]
)
def test_a_parameter_that_cannot_be_used_is_refused_by_name(client: Any, parameter: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(parameter))}: "):
        client(**parameter)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def protocol(on_failure: OnFailure = "closed", clock: Clock | None = None, **breaker: Any) -> AgentProtocol:
    return AgentProtocol("http://agent:8411", on_failure, CircuitBreaker(**breaker), clock or Clock())


def response(status: int, body: object, **headers: str) -> Response:
    return Response(status, headers, body if isinstance(body, bytes) else msgspec.json.encode(body))


def run_steps(steps: Steps[Any], answers: Iterator[Response | AgentUnavailable]) -> tuple[Any, list[Call]]:
    """Return the value of an operation with an agent that gives these answers, and the calls that it made."""
    calls: list[Call] = []
    came = None
    try:
        while True:
            calls.append(next_step(steps, came))
            came = next(answers)
    except StopIteration as end:
        return end.value, calls


def value_of(steps: Steps[Any], *answers: Response | AgentUnavailable) -> Any:
    return run_steps(steps, iter(answers))[0]


def test_a_check_sends_exactly_the_fields_of_the_contract() -> None:
    decision, [call] = run_steps(protocol().check(SUBJECT, cost=3), iter([response(200, ALLOWED, ratelimit="r")]))
    assert (call.method, call.path, call.repeatable) == ("POST", "/v1/check", False)
    assert msgspec.json.decode(call.body) == {"subject": SUBJECT, "cost": 3, "mode": "enforce"}
    assert decision == Decision(allowed=True, degraded=None, headers={"ratelimit": "r"})


def test_only_operations_and_peeks_are_repeatable() -> None:
    for options, repeatable in (({}, False), ({"operation_id": "a"}, True), ({"mode": "peek"}, True)):
        call = next(protocol().check(SUBJECT, **options))  # type: ignore[arg-type]
        assert call.repeatable is repeatable


def test_a_denial_is_an_answer() -> None:
    decision = value_of(protocol().check(SUBJECT), response(429, DENIED | {"title": "Quota exceeded"}))
    assert (decision.allowed, decision.denied_by, decision.retry_after_ms) == (False, "export", 2_000)
    closed = value_of(protocol().check(SUBJECT), response(503, DENIED | {"degraded": "closed"}))
    assert (closed.allowed, closed.degraded) == (False, "closed")


def test_an_answer_of_a_newer_agent_is_read_as_far_as_it_is_known() -> None:
    policy = {"policy": "export", "quota": "exports", "kind": "budget", "allowed": False, "reason": "over_budget"}
    policy |= {"limit": 1, "share": 1, "remaining": 0, "reset_ms": 1, "retry_after_ms": 1, "added": [1]}
    newer = DENIED | {"policies": [policy | {"degraded": "neighbour"}], "added": {"deep": None}}
    decision = value_of(protocol("raise").check(SUBJECT), response(429, newer | {"blocked_by": "country"}))
    assert (decision.allowed, decision.reason, decision.blocked_by) == (False, "over_budget", "country")
    assert decision.policies[0].degraded == "neighbour"
    with_warning = ALLOWED | {"degraded": "neighbour", "unmatched": "challenge"}
    decision = value_of(protocol("raise").check(SUBJECT), response(200, with_warning))
    assert (decision.allowed, decision.degraded, decision.unmatched) == (True, "neighbour", "challenge")


def test_an_invalid_request_raises_and_does_not_open_the_circuit_breaker() -> None:
    client = protocol(failures=1)
    for _ in range(3):
        with pytest.raises(RequestRejected, match="422: cost"):
            value_of(client.check(SUBJECT), response(422, {"title": "Invalid", "detail": "cost: above zero"}))


@pytest.mark.parametrize(
    "failure", [AgentUnavailable("refused"), response(500, {"detail": "oops"}), response(502, b"<html>")]
)
def test_the_failure_mode_answers_while_the_agent_is_unavailable(failure: Response | AgentUnavailable) -> None:
    closed = value_of(protocol("closed").check(SUBJECT), failure)
    assert (closed.allowed, closed.degraded, closed.retry_after_ms) == (False, "closed", 1000)
    opened = value_of(protocol("open").check(SUBJECT), failure)
    assert (opened.allowed, opened.degraded, opened.retry_after_ms) == (True, "open", 0)
    with pytest.raises(AgentUnavailable):
        value_of(protocol("raise").check(SUBJECT), failure)


def test_an_unreadable_answer_is_a_failure() -> None:
    with pytest.raises(AgentUnavailable, match="unreadable"):
        value_of(protocol("raise").check(SUBJECT), response(200, b"hello"))
    assert value_of(protocol("open").check(SUBJECT), response(200, b"hello")).degraded == "open"


@pytest.mark.parametrize(
    "failure", [AgentSilent("refused"), AgentUnavailable("busy"), response(502, b"<html>"), response(200, b"hello")]
)
def test_an_unavailable_agent_is_named_by_its_address(failure: Response | AgentUnavailable) -> None:
    client = protocol("raise", failures=1)
    with pytest.raises(AgentUnavailable, match="http://agent:8411: ") as raised:
        value_of(client.check(SUBJECT), failure)
    assert type(raised.value) is (AgentSilent if isinstance(failure, AgentSilent) else AgentUnavailable)
    with pytest.raises(AgentUnavailable, match="http://agent:8411: "):
        value_of(client.check(SUBJECT), failure)  # by the circuit breaker, if the agent was silent


def test_an_open_circuit_breaker_lets_one_call_through_on_trial() -> None:
    clock = Clock()
    client = protocol("raise", clock, failures=2, pause_ms=1000)
    for _ in range(2):
        with pytest.raises(AgentUnavailable, match="gone"):
            value_of(client.check(SUBJECT), AgentSilent("gone"))
    with pytest.raises(AgentUnavailable, match="circuit breaker is open"):
        value_of(client.check(SUBJECT))
    clock.now_s += 1.0
    trial = client.check(SUBJECT)
    next(trial)  # the trial call …
    with pytest.raises(AgentUnavailable, match="circuit breaker is open"):
        value_of(client.check(SUBJECT))  # … and other calls are refused
    with pytest.raises(StopIteration):
        trial.send(response(200, ALLOWED))
    assert value_of(client.check(SUBJECT), response(200, ALLOWED)).allowed


@pytest.mark.parametrize("answer", [response(503, {"detail": "no policies yet"}), AgentUnavailable("too slow")])
def test_answers_of_a_living_agent_do_not_open_the_circuit_breaker(answer: Response | AgentUnavailable) -> None:
    client = protocol("raise", failures=1)
    for _ in range(3):
        with pytest.raises(AgentUnavailable):
            value_of(client.check(SUBJECT), answer)
    assert value_of(client.check(SUBJECT), response(200, ALLOWED)).allowed


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


def test_patience_waits_as_the_denial_says_and_within_its_timeout() -> None:
    clock = Clock()
    denied = Decision(allowed=False, degraded=None, denied_by="export", retry_after_ms=2_000)
    patience = Patience(4.1, clock)
    for _ in range(2):
        pause_s = patience.pause_before_retry_s(denied)
        if pause_s is not None:
            assert 2.0 <= pause_s <= 2.2
            clock.now_s += pause_s
    assert pause_s is None or clock.now_s <= 104.1
    assert Patience(1, clock).pause_before_retry_s(denied) is None, "the next moment is too late"
    never = Decision(allowed=False, degraded=None, retry_after_ms=None)
    assert Patience(3_600, clock).pause_before_retry_s(never) is None
    assert Patience(3_600, clock).pause_before_retry_s(Decision(allowed=True, degraded=None)) is None


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.floats(0, 1))
def test_pauses_are_never_too_short_nor_endless(retry_after_ms: int, attempt: int, chance: float) -> None:
    pause_s = next_pause_s(retry_after_ms, attempt, chance)
    assert min(60.0, retry_after_ms / 1000) <= pause_s <= 66.0
    assert pause_s > 0


def test_a_batch_returns_a_decision_or_a_rejection_for_each_check() -> None:
    items = [{"status": 200, "answer": ALLOWED}, {"status": 429, "answer": DENIED}]
    checks = [{"subject": SUBJECT, "operation_id": "a"}, {"subject": SUBJECT, "mode": "peek"}]
    decisions, [call] = run_steps(protocol().check_batch(checks), iter([response(200, {"items": items})]))
    assert ([each.allowed for each in decisions], call.repeatable) == ([True, False], True)
    items[1] = {"status": 422, "problem": {"title": "no"}}
    charged, refused = value_of(protocol().check_batch(checks), response(200, {"items": items}))
    assert charged.allowed, "it was charged, and the caller has to know"
    assert isinstance(refused, RequestRejected)
    assert (refused.status, refused.problem, refused.allowed) == (422, {"title": "no"}, False)
    assert [each.allowed for each in value_of(protocol("open").check_batch(checks), AgentUnavailable("gone"))] == [
        True
    ] * 2


def test_a_batch_that_is_rejected_as_a_whole_raises() -> None:
    with pytest.raises(RequestRejected, match="422: too many"):
        value_of(protocol("open").check_batch([]), response(422, {"title": "Invalid", "detail": "too many"}))


def test_a_hold_is_granted_denied_or_left_to_the_failure_mode() -> None:
    def hold(on_failure: OnFailure, answer: Response | AgentUnavailable) -> Any:
        return value_of(protocol(on_failure).hold(SUBJECT, units=5, ttl_ms=9, operation_id="a"), answer)

    held = {"hold_id": "h/1", "units": 5, "expires_in_ms": 9}
    assert hold("closed", response(201, held)) == HeldUnits("h/1", 5, 9)
    assert hold("open", AgentUnavailable("gone")) == HeldUnits(None, 5, 9)
    for on_failure, answer in (("closed", AgentUnavailable("gone")), ("open", response(429, DENIED))):
        with pytest.raises(Denied):
            hold(on_failure, answer)  # type: ignore[arg-type]


def test_a_hold_is_changed_by_its_id_and_failures_are_raised() -> None:
    _, [call] = run_steps(protocol().commit(HeldUnits("h/1", 5, 9), 3), iter([response(200, {})]))
    assert (call.path, msgspec.json.decode(call.body), call.repeatable) == (
        "/v1/holds/h%2F1:commit",
        {"units": 3},
        True,
    )
    assert run_steps(protocol().release(HeldUnits(None, 5, 9)), iter([])) == (None, [])
    with pytest.raises(AgentUnavailable):
        value_of(protocol("open").commit(HeldUnits("h", 5, 9), 3), AgentUnavailable("gone"))
    with pytest.raises(RequestRejected):
        value_of(protocol("open").commit(HeldUnits("h", 5, 9), 3), response(409, {"title": "committed otherwise"}))
