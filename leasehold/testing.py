"""Clients without an agent, for unit tests of services.

    client = FakeClient()                                  # admits everything
    client.agent.deny(tenant="acme", retry_after_ms=2000)  # except what acme asks for
    client.agent.limit(3, route="/v1/exports")             # and more than three exports
    …
    assert [check.cost for check in client.agent.checks] == [1]
    assert [hold.committed for hold in client.agent.holds] == [25]

`FakeClient` is a `Client` and `AsyncFakeClient` is an `AsyncClient`: bodies are encoded and checked, operations are
idempotent, holds end once, and `on_failure` answers while `agent.is_away`. Only the agent behind them is in memory. It
knows no policies: a test says what is denied. `wait` does not sleep; the fake agent's clock goes forward instead.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import msgspec

from leasehold.client._async.client import AsyncClient
from leasehold.client._sync.client import Client
from leasehold.client.agent_protocol import AgentSilent, AgentUnavailable, Call, OnFailure, Response
from protocol.check import (
    NO_COSTS,
    BatchAnswer,
    BatchItem,
    Check,
    CheckAnswer,
    DenialCause,
    ExplainAnswer,
    Hold,
    HoldAnswer,
    HoldCommit,
    HoldExtension,
    HoldStatus,
    PolicyAnswer,
    PolicyExplanation,
    Subject,
    Unmatched,
    UnmetCondition,
)
from protocol.denials import denial_of
from protocol.limits.subjects import fields_of
from protocol.problems import PROBLEMS

T = TypeVar("T")
Reason = Literal["limit", "no_lease", "cut_off", "drained", "expired", "never", "store"]
UNLIMITED = 2**53 - 1


class Rule(msgspec.Struct):
    """Denies checks whose subject has these fields, once they need more than `units_left`."""

    subject: Mapping[str, str]
    policy: str
    reason: DenialCause
    retry_after_ms: int | None
    limit: int
    units_left: int
    denials_left: int

    def applies_to(self, subject: Subject) -> bool:
        return all(getattr(subject, name) == value for name, value in self.subject.items())

    def answer(self, cost: int) -> PolicyAnswer:
        is_denied = cost > self.units_left and self.denials_left > 0
        return PolicyAnswer(
            policy=self.policy,
            quota=self.policy,
            kind="allowance",
            allowed=not is_denied,
            limit=self.limit,
            share=self.limit,
            remaining=max(0, self.units_left - (0 if is_denied else cost)),
            reset_ms=0,
            retry_after_ms=self.retry_after_ms if is_denied else 0,
            reason=self.reason if is_denied else None,
        )

    def explain(self, check: Check) -> PolicyExplanation:
        found = {name: getattr(check.subject, name) for name in self.subject}
        unmet = [
            UnmetCondition(f"match.{name}", value, found[name])
            for name, value in self.subject.items()
            if found[name] != value
        ]
        return PolicyExplanation(
            policy=self.policy,
            quota=self.policy,
            matches=not unmet,
            shadow=False,
            cost=(check.costs or NO_COSTS).get(self.policy, check.cost or 1),
            unmet=unmet,
            key=f"{self.policy}:",
            invalid=None,
        )

    def give_back(self, units: int) -> None:
        self.units_left = max(0, min(self.limit, self.units_left + units))


class RawChecks(msgspec.Struct):
    """A batch whose checks are not decoded yet, for each is accepted or refused by itself."""

    checks: list[msgspec.Raw]


class FakeHold(msgspec.Struct):
    """A hold that the fake agent granted."""

    id: str
    subject: Subject
    units: int
    ttl_ms: int
    operation_id: str
    state: Literal["open", "committed", "released"] = "open"
    committed: int = 0
    costs: dict[str, int] = {}  # units by quota, where the hold or its commit names any
    committed_costs: dict[str, int] = {}


class FakeAgent:
    """An agent in memory, which admits what no rule denies. It keeps the checks and holds that it admitted or denied.

    While `is_away` is true no call is answered.
    """

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.holds: list[FakeHold] = []
        self.is_away = False
        self.now_s = 0.0
        self._rules: list[Rule] = []
        self._operations: dict[tuple[str | None, str], tuple[Check | Hold, CheckAnswer, FakeHold | None]] = {}

    def deny(
        self,
        *,
        policy: str = "fake",
        reason: Reason = "limit",
        retry_after_ms: int | None = 1000,
        times: int = UNLIMITED,
        **subject: str,
    ) -> None:
        """Deny checks and holds whose subject has these fields, so many times."""
        self._rules.append(Rule(_fields(subject), policy, DenialCause(reason), retry_after_ms, 0, 0, times))

    def limit(self, units: int, *, policy: str = "fake", retry_after_ms: int | None = 1000, **subject: str) -> None:
        """Admit so many units of the checks and holds whose subject has these fields, all together."""
        rule = Rule(_fields(subject), policy, DenialCause.LIMIT, retry_after_ms, units, units, UNLIMITED)
        self._rules.append(rule)

    def answer(self, call: Call) -> Response:
        """Answer a client's call, or raise AgentSilent."""
        if self.is_away:
            raise AgentSilent("the fake agent is away")
        try:
            return self._route(call)
        except msgspec.ValidationError as error:
            return _problem("invalid-request", str(error))

    def _route(self, call: Call) -> Response:
        if call.path == "/v1/check":
            return self._check(msgspec.Raw(call.body))
        if call.path == "/v1/check:batch":
            checks = msgspec.json.decode(call.body, type=RawChecks).checks
            return _response(200, BatchAnswer(items=[_item(self._check(check)) for check in checks]))
        if call.path == "/v1/explain":
            return _response(200, self._explain(msgspec.json.decode(call.body, type=Check)))
        if call.path == "/v1/holds":
            return self._hold(msgspec.json.decode(call.body, type=Hold))
        hold_id, _, action = call.path.rpartition("/")[2].partition(":")
        held = next((hold for hold in self.holds if hold.id == hold_id), None)
        if held is None:
            return _problem("hold-unknown", "The fake agent has no such hold.")
        return self._change(held, action, call.body)

    def _check(self, body: msgspec.Raw) -> Response:
        try:
            check = msgspec.json.decode(body, type=Check)
        except msgspec.ValidationError as error:
            return _problem("invalid-request", str(error))
        self.checks.append(check)
        return self._decide(check, check.cost or 1, None)

    def _explain(self, check: Check) -> ExplainAnswer:
        """Explain the rules as policies that match the fields which they name."""
        return ExplainAnswer(
            subject=fields_of(check.subject),
            route_class="*",
            plan=None,
            unmatched=None if any(rule.applies_to(check.subject) for rule in self._rules) else Unmatched.ALLOW,
            policies=[rule.explain(check) for rule in self._rules],
            policy_version=1,
            blocked_by=None,
        )

    def _hold(self, hold: Hold) -> Response:
        if hold.units is None and not hold.costs:
            return _problem("invalid-request", "units: give the units to hold, or `costs` by quota")
        new = FakeHold(f"hold_{len(self.holds) + 1}", hold.subject, hold.units or 0, hold.ttl_ms, hold.operation_id)
        new.costs = hold.costs or {}
        return self._decide(hold, hold.units or 1, new)

    def _decide(self, request: Check | Hold, cost: int, new_hold: FakeHold | None) -> Response:
        """Answer as before if the operation is known, or decide it."""
        operation = request.subject.tenant, request.operation_id or ""
        known = self._operations.get(operation)
        if known is not None and known[0] != request:
            return _problem("operation-conflict", "The operation id was used for another request.")
        if known is not None:
            return _answer(known[1], known[2])
        consumes = isinstance(request, Hold) or request.mode != "peek"
        answer = self._apply_rules(request, cost, consumes=consumes)
        if answer.allowed and request.operation_id is not None:
            self._operations[operation] = request, answer, new_hold
        if answer.allowed and new_hold is not None:
            self.holds.append(new_hold)
        return _answer(answer, new_hold)

    def _apply_rules(self, request: Check | Hold, cost: int, *, consumes: bool) -> CheckAnswer:
        """All rules that apply are consumed, or none is. `costs` name the policy of a rule."""
        rules = [rule for rule in self._rules if rule.applies_to(request.subject)]
        costs = request.costs or NO_COSTS
        if isinstance(request, Check) and request.mode == "refund":
            for rule in rules:
                rule.give_back(costs.get(rule.policy, cost))
            rules = []
        answers = [rule.answer(costs.get(rule.policy, cost)) for rule in rules]
        denials = [each for each in answers if not each.allowed]
        for rule, each in zip(rules, answers, strict=True):
            if not each.allowed:
                rule.denials_left -= 1
            elif consumes and not denials:
                rule.units_left = each.remaining
        retries_ms = [each.retry_after_ms for each in denials]
        known_ms = [each for each in retries_ms if each is not None]
        return CheckAnswer(
            allowed=not denials,
            degraded=None,
            policies=answers,
            denied_by=denials[0].policy if denials else None,
            retry_after_ms=None if len(known_ms) < len(retries_ms) else max(known_ms, default=0),
        )

    def _change(self, held: FakeHold, action: str, body: bytes) -> Response:
        """End or extend a hold: once, and again in the same way."""
        wanted = {"commit": "committed", "release": "released"}.get(action, "open")
        commit = msgspec.json.decode(body, type=HoldCommit) if action == "commit" else HoldCommit(units=0)
        units = held.units if commit.units is None else commit.units
        if held.state != "open" and (held.state, held.committed) != (wanted, units):
            return _problem("hold-ended", "The hold has ended.", state=held.state, committed=held.committed)
        if action == "extend":
            held.ttl_ms = max(held.ttl_ms, msgspec.json.decode(body, type=HoldExtension).ttl_ms)
        elif held.state == "open":
            held.state = "committed" if action == "commit" else "released"
            held.committed = units
            held.committed_costs = ({} if commit.units is not None else held.costs) | (commit.costs or {})
            self._give_back(held)
        status = HoldStatus(
            hold_id=held.id, state=held.state, units=held.units, committed=held.committed, expires_in_ms=held.ttl_ms
        )
        return _response(200, status)

    def _give_back(self, held: FakeHold) -> None:
        for rule in self._rules:
            if rule.applies_to(held.subject):
                units = held.costs.get(rule.policy, held.units)
                rule.give_back(units - held.committed_costs.get(rule.policy, held.committed))


class FakeClient(Client):
    """A `Client` whose agent is in memory: `client.agent` says what it denies, and what it was asked."""

    def __init__(self, *, on_failure: OnFailure = "closed", agent: FakeAgent | None = None) -> None:
        self.agent = FakeAgent() if agent is None else agent
        super().__init__(on_failure=on_failure)

    def _call(self, call: Call) -> Response | AgentUnavailable:
        return _answer_or_error(self.agent, call)

    def _now_s(self) -> float:
        return self.agent.now_s

    def _pause(self, seconds: float) -> None:
        self.agent.now_s += seconds


class AsyncFakeClient(AsyncClient):
    """An `AsyncClient` whose agent is in memory: `client.agent` says what it denies, and what it was asked."""

    def __init__(self, *, on_failure: OnFailure = "closed", agent: FakeAgent | None = None) -> None:
        self.agent = FakeAgent() if agent is None else agent
        super().__init__(on_failure=on_failure)

    async def _call(self, call: Call) -> Response | AgentUnavailable:
        return _answer_or_error(self.agent, call)

    def _now_s(self) -> float:
        return self.agent.now_s

    async def _pause(self, seconds: float) -> None:
        self.agent.now_s += seconds


def _fields(subject: Mapping[str, str]) -> Mapping[str, str]:
    """Return the fields of a subject, and raise for one that does not exist."""
    msgspec.convert(subject, Subject)
    return subject


def _answer_or_error(agent: FakeAgent, call: Call) -> Response | AgentUnavailable:
    try:
        return agent.answer(call)
    except AgentUnavailable as error:
        return error


def _answer(answer: CheckAnswer, hold: FakeHold | None) -> Response:
    if not answer.allowed:
        denial = denial_of(answer, "/v1/check" if hold is None else "/v1/holds", "fake")
        return _response(denial.status, denial)
    if hold is None:
        return _response(200, answer)
    granted = HoldAnswer(
        hold_id=hold.id, units=hold.units, expires_in_ms=hold.ttl_ms, degraded=None, policies=answer.policies
    )
    return _response(201, granted)


def _item(response: Response) -> BatchItem:
    if response.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return BatchItem(status=response.status, problem=msgspec.json.decode(response.body, type=dict[str, Any]))
    return BatchItem(status=response.status, answer=msgspec.json.decode(response.body, type=CheckAnswer))


def _problem(slug: str, detail: str, **more: object) -> Response:
    kind = PROBLEMS[slug]
    document = {"type": f"/problems/{slug}", "title": kind.title, "status": kind.status, "detail": detail, **more}
    return _response(kind.status, document)


def _response(status: int, body: object) -> Response:
    return Response(status, {}, msgspec.json.encode(body))
