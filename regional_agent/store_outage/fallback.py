"""Decide checks while the store is unavailable: each policy's `on_store_failure` applies, and the answer says so.

The strictest of a request's enforced policies decides, so it is all or nothing here, too. Rates are counted in memory.
An allowance admits nothing that is not in the journal, on disk, before the answer; and nothing for a request that was
sent to the store and got no reply, for it may have been spent there. Nor is anything set aside: only a store has holds.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from protocol.check import CheckAnswer, DenialCause, PolicyAnswer
from protocol.clock import Clock
from protocol.limits.document import AllowanceQuota, PolicySpec, StoreFailure
from protocol.periods import calendar_of, period_at
from regional_agent.admission.answers import answer_of
from regional_agent.admission.policies import PolicyCharge
from regional_agent.admission.rules.denial_causes import RETRY_MS as RETRY_WHEN_DEGRADED_MS
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS, SETS_ASIDE
from regional_agent.metrics import AgentMetrics
from regional_agent.store.types import AllowanceCharge, OperationConflict, PolicyDecision, RateCharge, StoreRequest
from regional_agent.store_outage.journal import Journal
from regional_agent.store_outage.rules.local_allowances import AllowanceRequest as AllowanceAsk
from regional_agent.store_outage.rules.local_allowances import LocalAllowances, SeenLease, local_budget
from regional_agent.store_outage.rules.local_rates import LocalAnswer, LocalRates, RateRequest, fraction_of
from regional_agent.store_outage.rules.records import AdmittedOperation, Entry

STRICTEST_FIRST = (StoreFailure.CLOSED, StoreFailure.LOCAL, StoreFailure.OPEN)

OnAnswer = Callable[[CheckAnswer | Exception], None]


class OutageFallback:
    def __init__(self, journal: Journal, metrics: AgentMetrics, clock: Clock, workers: int = 1) -> None:
        """`workers`: the processes of this agent. Each admits an equal part of the agent's local fraction."""
        self._workers = workers
        self._journal = journal
        self.allowances = LocalAllowances()
        self._metrics = metrics
        self._clock = clock
        self._rates = LocalRates()

    def note(self, each: PolicyCharge, decision: PolicyDecision, now_ms: int) -> None:
        """Note what the store reports of an allowance, for the time when it is unavailable."""
        if _mode(each) is StoreFailure.LOCAL:
            each.state.lease = SeenLease(decision.available, now_ms + decision.reset_ms)

    def decide(
        self,
        charges: Sequence[PolicyCharge],
        request: StoreRequest,
        on_answer: OnAnswer,
        *,
        may_have_executed: bool,
        cause: DenialCause = DenialCause.STORE,
    ) -> None:
        """Answer at once, or when the journal is on disk. `cause` is the reason of a denial."""
        for each in charges:
            spec = each.policy.spec
            self._metrics.degraded.labels(spec.name, spec.on_store_failure.value).inc()
        mode = _strictest(charges)
        allowances = [each for each in charges if isinstance(each.charge, AllowanceCharge)]
        if mode is StoreFailure.CLOSED or (allowances and (may_have_executed or request.mode in SETS_ASIDE)):
            on_answer(closed(charges, cause))
            return
        answers = self._answers(charges, request.mode)
        answer = answer_of(not _is_denied(answers), mode, answers)
        if allowances and answer.allowed and request.mode not in LOOKS:
            self._keep(charges, allowances, request, answer, on_answer)
        else:
            on_answer(answer)

    def book_adjustment(self, charges: Sequence[PolicyCharge], request: StoreRequest, on_answer: OnAnswer) -> None:
        """Write an adjustment to the journal: its region has no lease to book it on."""
        allowances = [each for each in charges if isinstance(each.charge, AllowanceCharge)]
        answers = [_answer(each, allowed=True) for each in charges]
        self._keep(charges, allowances, request, answer_of(True, StoreFailure.OPEN.value, answers), on_answer)

    def forget_rate(self, quota: str) -> None:
        self._rates.forget(quota)

    def find_operation(self, charges: Sequence[PolicyCharge], request: StoreRequest) -> CheckAnswer | Exception | None:
        """Return the answer of an operation that this agent's journal has, whether the store is available or not."""
        operation = request.operation
        body = None if operation is None else self._journal.body_of(operation.digest)
        if operation is None or body is None:
            return None
        if body != operation.body:
            return OperationConflict()
        return answer_of(True, _strictest(charges), [_answer(each, allowed=True) for each in charges])

    def _answers(self, charges: Sequence[PolicyCharge], mode: str) -> list[PolicyAnswer]:
        """Decide each policy by its mode: local ones admit as much as this agent's fraction, open ones everything.

        Each shadow is decided by itself, and counts a request only if the enforced policies admit it.
        """
        answers = [_answer(each, allowed=_mode(each) is not StoreFailure.CLOSED) for each in charges]
        self._count_allowances(charges, answers, mode)
        if not _is_denied(answers):
            self._count_rates(charges, [n for n, each in enumerate(charges) if not each.is_shadow], answers, mode)
        shadow_mode = "peek" if _is_denied(answers) else mode
        for place in (n for n, each in enumerate(charges) if each.is_shadow):
            self._count_rates(charges, [place], answers, shadow_mode)
        return answers

    def _count_allowances(self, charges: Sequence[PolicyCharge], answers: list[PolicyAnswer], mode: str) -> None:
        asks = {place: ask for place, each in enumerate(charges) if (ask := self._allowance_ask(each)) is not None}
        now_ms = self._clock.monotonic_ms()
        for (place, ask), left in zip(asks.items(), self.allowances.left(asks.values(), now_ms), strict=True):
            fits = left >= 0 or mode in BEYOND_LIMITS
            answers[place] = msgspec.structs.replace(
                answers[place],
                allowed=fits,
                share=local_budget(ask, now_ms),
                remaining=max(0, left if fits else left + ask.cost),
                retry_after_ms=0 if fits else RETRY_WHEN_DEGRADED_MS,
                reason=None if fits else DenialCause.STORE,
            )

    def _count_rates(
        self, charges: Sequence[PolicyCharge], places: Sequence[int], answers: list[PolicyAnswer], mode: str
    ) -> None:
        asks = {place: ask for place in places if (ask := self._rate_ask(charges[place])) is not None}
        decisions = self._rates.decide(list(asks.values()), self._clock.monotonic_ms(), mode)
        for (place, ask), local in zip(asks.items(), decisions, strict=True):
            answers[place] = _locally(answers[place], ask, local)

    def _allowance_ask(self, each: PolicyCharge) -> AllowanceAsk | None:
        charge, spec = each.charge, each.policy.spec
        if spec.on_store_failure is not StoreFailure.LOCAL or not isinstance(charge, AllowanceCharge):
            return None
        return AllowanceAsk(charge.quota, charge.cost, self._fraction_micro(spec), each.state.lease)

    def _rate_ask(self, each: PolicyCharge) -> RateRequest | None:
        """Return this process's fraction of a rate: with a burst of one unit at least, or it would admit nothing."""
        charge, spec = each.charge, each.policy.spec
        if spec.on_store_failure is not StoreFailure.LOCAL or not isinstance(charge, RateCharge):
            return None
        micro = self._fraction_micro(spec)
        burst = max(min(1, charge.burst), fraction_of(charge.burst, micro))
        return RateRequest(charge.quota, charge.cost, fraction_of(int(charge.rate_micro), micro), burst)

    def _fraction_micro(self, spec: PolicySpec) -> int:
        return round(spec.local_fraction * 1_000_000) // self._workers

    # --- the journal --------------------------------------------------------------------------------------------------

    def _keep(
        self,
        charges: Sequence[PolicyCharge],
        allowances: Sequence[PolicyCharge],
        request: StoreRequest,
        answer: CheckAnswer,
        on_answer: OnAnswer,
    ) -> None:
        entries = [self._entry(each) for each in allowances]
        for entry in entries:
            self.allowances.give(entry.quota, entry.units)
        known = None if request.operation is None else AdmittedOperation(*request.operation)
        self._journal.keep(entries, known, partial(self._kept, charges, entries, answer, on_answer))

    def _kept(
        self,
        charges: Sequence[PolicyCharge],
        entries: Sequence[Entry],
        answer: CheckAnswer,
        on_answer: OnAnswer,
        is_kept: bool,
    ) -> None:
        if is_kept:
            on_answer(answer)
            return
        for entry in entries:
            self.allowances.take_back(entry.quota, entry.units)
        on_answer(closed(charges))

    def _entry(self, each: PolicyCharge) -> Entry:
        """Return the journal's entry of a charge. Its period is by this machine's calendar."""
        now, quota, charge = self._clock.now(), each.policy.quota, each.charge
        assert isinstance(quota, AllowanceQuota)
        assert isinstance(charge, AllowanceCharge)
        dimensions = msgspec.json.decode(charge.dimensions, type=dict[str, str])
        marked = dict(sorted((dimensions | {"degraded": _mode(each).value}).items()))
        period = period_at(calendar_of(quota, each.began_at), now).id
        minute = int(now.timestamp()) // 60
        return Entry(each.charge.quota, period, minute, msgspec.json.encode(marked).decode(), each.charge.cost)


def _mode(each: PolicyCharge) -> StoreFailure:
    return each.policy.spec.on_store_failure


def _strictest(charges: Sequence[PolicyCharge]) -> StoreFailure | None:
    """Return the strictest mode of the enforced policies; None if there are none."""
    modes = {_mode(each) for each in charges if not each.is_shadow}
    return next((mode for mode in STRICTEST_FIRST if mode in modes), None)


def _is_denied(answers: Sequence[PolicyAnswer]) -> bool:
    return not all(answer.allowed or answer.shadow for answer in answers)


def closed(charges: Sequence[PolicyCharge], cause: DenialCause = DenialCause.STORE) -> CheckAnswer:
    """Return a denial by the policies that fail closed, else by all but rates, which cannot be allowances now."""
    is_closed = _strictest(charges) is StoreFailure.CLOSED
    answers = [
        _answer(each, allowed=_mode(each) is not StoreFailure.CLOSED, cause=cause)
        if is_closed or each.is_shadow
        else _answer(each, allowed=isinstance(each.charge, RateCharge), cause=cause)
        for each in charges
    ]
    return answer_of(False, StoreFailure.CLOSED.value, answers)


def _answer(each: PolicyCharge, *, allowed: bool, cause: DenialCause = DenialCause.STORE) -> PolicyAnswer:
    return PolicyAnswer(
        policy=each.policy.spec.name,
        quota=each.policy.quota.name,
        kind=each.policy.kind,
        allowed=allowed,
        limit=each.limit,
        share=0,
        remaining=0,
        reset_ms=0,
        retry_after_ms=0 if allowed else RETRY_WHEN_DEGRADED_MS,
        reason=None if allowed else cause,
        degraded=_mode(each).value,
        shadow=each.is_shadow,
    )


def _locally(answer: PolicyAnswer, ask: RateRequest, local: LocalAnswer) -> PolicyAnswer:
    return msgspec.structs.replace(
        answer,
        allowed=local.allowed,
        share=ask.burst,
        remaining=local.remaining,
        reset_ms=local.reset_ms,
        retry_after_ms=0 if local.allowed else local.retry_after_ms or RETRY_WHEN_DEGRADED_MS,
        reason=None if local.allowed else DenialCause.STORE,
    )
