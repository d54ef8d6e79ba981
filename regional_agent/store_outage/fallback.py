"""What a failure means: where the store cannot be asked, each policy's `on_store_failure` answers, and it is said so.

Of those that are enforced, the strictest of a request's policies decides: all or nothing here, too. Rates are counted
in memory. Of an allowance nothing is admitted that is not in the journal, on disk, before the answer; and nothing for a
request that the store was asked about and did not answer: it may have been spent there. Nor is anything set aside: a
hold is known to the store.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from protocol.check import CheckAnswer, DenialCause, PolicyAnswer
from protocol.clock import Clock
from protocol.periods import calendar_of, period_at
from protocol.policy import PolicySpec, StoreFailure
from regional_agent.admission.policies import Demanded
from regional_agent.admission.rules.denial_causes import RETRY_MS as RETRY_WHEN_DEGRADED_MS
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS, SETS_ASIDE
from regional_agent.http.schemas import answer_of
from regional_agent.metrics import Metrics
from regional_agent.store.types import AllowanceCharge, Decision, OperationConflict, RateCharge, StoreRequest
from regional_agent.store_outage.journal import Journal
from regional_agent.store_outage.rules.local_allowances import Ask as AllowanceAsk
from regional_agent.store_outage.rules.local_allowances import LocalAllowances
from regional_agent.store_outage.rules.local_rates import Ask, LocalAnswer, LocalRates, fraction_of
from regional_agent.store_outage.rules.records import Entry, Known

STRICTEST_FIRST = (StoreFailure.CLOSED, StoreFailure.LOCAL, StoreFailure.OPEN)

OnAnswer = Callable[[CheckAnswer | Exception], None]


class WithoutStore:
    def __init__(self, journal: Journal, metrics: Metrics, clock: Clock, workers: int = 1) -> None:
        """What is `local` is the fraction of one agent: each of its workers gives an equal part."""
        self._workers = workers
        self._journal = journal
        self.allowances = LocalAllowances()
        self._metrics = metrics
        self._clock = clock
        self._rates = LocalRates()

    def note(self, demanded: Sequence[Demanded], decision: Decision) -> None:
        """What the store says of allowances, for the time when it does not."""
        for each, policy in zip(demanded, decision.policies, strict=True):
            if isinstance(each.charge, AllowanceCharge) and _mode(each) is StoreFailure.LOCAL:
                until_ms = self._clock.monotonic_ms() + policy.reset_ms
                self.allowances.note(each.charge.quota, policy.available, until_ms)

    def decide(
        self,
        demanded: Sequence[Demanded],
        request: StoreRequest,
        on_answer: OnAnswer,
        *,
        may_be_spent: bool,
        cause: DenialCause = DenialCause.STORE,
    ) -> None:
        """At once, or when the journal's disk has it. `cause` is what a denial says."""
        for each in demanded:
            spec = each.policy.spec
            self._metrics.degraded.labels(spec.name, spec.on_store_failure.value).inc()
        mode = _strictest(demanded)
        counted = [each for each in demanded if isinstance(each.charge, AllowanceCharge)]
        if mode is StoreFailure.CLOSED or (counted and (may_be_spent or request.mode in SETS_ASIDE)):
            on_answer(closed(demanded, cause))
            return
        answers = self._answers(demanded, request.mode)
        answer = answer_of(not _is_denied(answers), mode, answers)
        if counted and answer.allowed and request.mode not in LOOKS:
            self._keep(demanded, counted, request, answer, on_answer)
        else:
            on_answer(answer)

    def book_adjustment(self, demanded: Sequence[Demanded], request: StoreRequest, on_answer: OnAnswer) -> None:
        """Write work that was done to the journal, where its region has no lease to book it on."""
        counted = [each for each in demanded if isinstance(each.charge, AllowanceCharge)]
        answers = [_answer(each, allowed=True) for each in demanded]
        self._keep(demanded, counted, request, answer_of(True, StoreFailure.OPEN.value, answers), on_answer)

    def answered_before(self, demanded: Sequence[Demanded], request: StoreRequest) -> CheckAnswer | Exception | None:
        """What this agent's journal knows of the request's operation, whether the store is there or not."""
        operation = request.operation
        body = None if operation is None else self._journal.body_of(operation.digest)
        if operation is None or body is None:
            return None
        if body != operation.body:
            return OperationConflict()
        return answer_of(True, _strictest(demanded), [_answer(each, allowed=True) for each in demanded])

    def _answers(self, demanded: Sequence[Demanded], mode: str) -> list[PolicyAnswer]:
        """What is local passes as far as this agent's part of it goes, and the rest is open. Closed may be a shadow.

        Each shadow is decided by itself, and takes what it lets pass if the request does.
        """
        answers = [_answer(each, allowed=_mode(each) is not StoreFailure.CLOSED) for each in demanded]
        self._count_allowances(demanded, answers, mode)
        if not _is_denied(answers):
            self._count_rates(demanded, [n for n, each in enumerate(demanded) if not each.is_shadow], answers, mode)
        shadow_mode = "peek" if _is_denied(answers) else mode
        for place in (n for n, each in enumerate(demanded) if each.is_shadow):
            self._count_rates(demanded, [place], answers, shadow_mode)
        return answers

    def _count_allowances(self, demanded: Sequence[Demanded], answers: list[PolicyAnswer], mode: str) -> None:
        asks = {place: ask for place, each in enumerate(demanded) if (ask := self._allowance_ask(each)) is not None}
        now_ms = self._clock.monotonic_ms()
        for (place, ask), left in zip(asks.items(), self.allowances.left(asks.values(), now_ms), strict=True):
            fits = left >= 0 or mode in BEYOND_LIMITS
            answers[place] = msgspec.structs.replace(
                answers[place],
                allowed=fits,
                limit=self.allowances.budget(ask, now_ms),
                remaining=max(0, left if fits else left + ask.cost),
                retry_after_ms=0 if fits else RETRY_WHEN_DEGRADED_MS,
                reason=None if fits else DenialCause.STORE,
            )

    def _count_rates(
        self, demanded: Sequence[Demanded], places: Sequence[int], answers: list[PolicyAnswer], mode: str
    ) -> None:
        asks = {place: ask for place in places if (ask := self._rate_ask(demanded[place])) is not None}
        told = self._rates.decide(list(asks.values()), self._clock.monotonic_ms(), mode)
        for (place, ask), local in zip(asks.items(), told, strict=True):
            answers[place] = _locally(answers[place], ask, local)

    def _allowance_ask(self, each: Demanded) -> AllowanceAsk | None:
        charge, spec = each.charge, each.policy.spec
        if spec.on_store_failure is not StoreFailure.LOCAL or not isinstance(charge, AllowanceCharge):
            return None
        return AllowanceAsk(charge.quota, charge.cost, self._fraction_micro(spec))

    def _rate_ask(self, each: Demanded) -> Ask | None:
        """This process's fraction of the region's share; at least one unit at once, or it would admit nothing, ever."""
        charge, spec = each.charge, each.policy.spec
        if spec.on_store_failure is not StoreFailure.LOCAL or not isinstance(charge, RateCharge):
            return None
        micro = self._fraction_micro(spec)
        burst = max(min(1, charge.burst), fraction_of(charge.burst, micro))
        return Ask(charge.quota, charge.cost, fraction_of(charge.rate_micro, micro), burst)

    def _fraction_micro(self, spec: PolicySpec) -> int:
        return round(spec.local_fraction * 1_000_000) // self._workers

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _keep(
        self,
        demanded: Sequence[Demanded],
        counted: Sequence[Demanded],
        request: StoreRequest,
        answer: CheckAnswer,
        on_answer: OnAnswer,
    ) -> None:
        entries = [self._entry(each) for each in counted]
        for entry in entries:
            self.allowances.give(entry.quota, entry.units)
        known = None if request.operation is None else Known(*request.operation)
        self._journal.keep(entries, known, partial(self._kept, demanded, entries, answer, on_answer))

    def _kept(
        self,
        demanded: Sequence[Demanded],
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
        on_answer(closed(demanded))

    def _entry(self, each: Demanded) -> Entry:
        """By this machine's calendar: who could say otherwise is away."""
        now, quota = self._clock.now(), each.policy.quota
        dimensions = msgspec.json.decode(each.policy.dimensions, type=dict[str, str])
        told = dict(sorted((dimensions | {"degraded": _mode(each).value}).items()))
        period = period_at(calendar_of(quota, each.began_at), now).id
        minute = int(now.timestamp()) // 60
        return Entry(each.charge.quota, period, minute, msgspec.json.encode(told).decode(), each.charge.cost)


def _mode(each: Demanded) -> StoreFailure:
    return each.policy.spec.on_store_failure


def _strictest(demanded: Sequence[Demanded]) -> StoreFailure | None:
    """None where nothing is enforced."""
    modes = {_mode(each) for each in demanded if not each.is_shadow}
    return next((mode for mode in STRICTEST_FIRST if mode in modes), None)


def _is_denied(answers: Sequence[PolicyAnswer]) -> bool:
    return not all(answer.allowed or answer.shadow for answer in answers)


def closed(demanded: Sequence[Demanded], cause: DenialCause = DenialCause.STORE) -> CheckAnswer:
    """Denied by the policies that fail closed, or else by the allowances, of which nothing can be kept now."""
    is_closed = _strictest(demanded) is StoreFailure.CLOSED
    answers = [
        _answer(each, allowed=_mode(each) is not StoreFailure.CLOSED, cause=cause)
        if is_closed or each.is_shadow
        else _answer(each, allowed=isinstance(each.charge, RateCharge), cause=cause)
        for each in demanded
    ]
    return answer_of(False, StoreFailure.CLOSED.value, answers)


def _answer(each: Demanded, *, allowed: bool, cause: DenialCause = DenialCause.STORE) -> PolicyAnswer:
    charge = each.charge
    return PolicyAnswer(
        policy=each.policy.spec.name,
        quota=each.policy.quota.name,
        kind=each.policy.kind,
        allowed=allowed,
        limit=charge.burst if isinstance(charge, RateCharge) else charge.limit,
        remaining=0,
        reset_ms=0,
        retry_after_ms=0 if allowed else RETRY_WHEN_DEGRADED_MS,
        reason=None if allowed else cause,
        degraded=_mode(each).value,
        shadow=each.is_shadow,
    )


def _locally(answer: PolicyAnswer, ask: Ask, local: LocalAnswer) -> PolicyAnswer:
    return msgspec.structs.replace(
        answer,
        allowed=local.allowed,
        limit=ask.burst,
        remaining=local.remaining,
        reset_ms=local.reset_ms,
        retry_after_ms=0 if local.allowed else local.retry_after_ms or RETRY_WHEN_DEGRADED_MS,
        reason=None if local.allowed else DenialCause.STORE,
    )
