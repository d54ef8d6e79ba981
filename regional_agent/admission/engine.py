"""The hot path: decide whether a request may happen now.

One script in the region's store decides all policies of a request at once. Where the store cannot be asked,
`OutageFallback` applies what each policy says about failures.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol, TypeVar

from msgspec.structs import replace

from protocol.check import Check, CheckAnswer, DenialCause, Hold
from protocol.clock import Clock
from protocol.limits.rates import SLICED
from protocol.limits.subjects import fields_of
from protocol.outcomes import DenialReason
from regional_agent.admission.answers import PolicyAnswers, Verdict, answer_of, unlimited_answer, with_unlimited
from regional_agent.admission.blocks import Blocked, Blocks
from regional_agent.admission.denial_cache import DenialCache
from regional_agent.admission.key_states import KeyStates
from regional_agent.admission.pending_check import Caller, PendingCheck
from regional_agent.admission.plan import CheckPlan, as_hold, plan_blocked, plan_request, require_no_slots
from regional_agent.admission.policies import Policies, Subject
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.admission.rules.modes import BEYOND_LIMITS, CHANGES_DENIALS, LOOKS, REFUND
from regional_agent.admission.rules.slices import HOT
from regional_agent.admission.token_slices import TokenSlices
from regional_agent.admission.unmatched import UnmatchedRequests
from regional_agent.admission.waiting import CoordinatorNotReached, WaitForUnits
from regional_agent.decision_log.recorder import DecisionRecorder
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.quotas import Quotas
from regional_agent.metrics import AgentMetrics
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.check_calls import CheckBatcher
from regional_agent.store.circuit_breaker import is_store_failure
from regional_agent.store.connection import NoAnswer, StoreError, StoreUnavailable
from regional_agent.store.types import (
    AllowanceCharge,
    Charge,
    Fenced,
    Outcome,
    RateCharge,
    RequestRun,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
    hold_part,
)
from regional_agent.store_outage.fallback import OutageFallback
from web.traces.context import current_context

RETRY_WHEN_BLOCKED_MS = 3_600_000  # of a block without an end, which an operator may lift at any time
MAX_ATTEMPTS = 4  # of one request at the store: each but the last was followed by returned slices

T = TypeVar("T")


class NoPoliciesYet(Exception):
    """The agent has received no policies yet, so it does not know what is limited."""


class Admission(Protocol):
    """The admission that the HTTP layer calls, over one store or over the cells of a Cluster."""

    @property
    def policies(self) -> Policies | None: ...
    @property
    def blocks(self) -> Blocks | None: ...
    def plan_check(self, check: Check, *, may_lack_fields: bool = False) -> CheckPlan: ...
    def decide_locally(self, plan: CheckPlan, /) -> Verdict | Exception | None: ...
    def decide_in_store(self, plan: CheckPlan, caller: Caller, times: int = 1) -> None: ...
    def submit(self, plan: CheckPlan, caller: Caller, times: int = 1) -> None: ...
    async def decide(self, check: Check) -> Verdict: ...
    async def hold(self, hold: Hold) -> Verdict: ...


class AdmissionEngine:
    """Decides checks and holds on one store.

    It works by callbacks, not coroutines: a task for each request would cost as much as all that happens in it.
    """

    def __init__(
        self,
        batcher: CheckBatcher,
        epochs: EpochManager,
        quotas: Quotas,
        slices: TokenSlices,
        share_loop: ShareLoop,
        fallback: OutageFallback,
        metrics: AgentMetrics,
        clock: Clock,
        keys: KeyStates,
        recorder: DecisionRecorder,
        adjust_ceiling: int = 100,
    ) -> None:
        """`adjust_ceiling`: one adjustment may book at most so many times the limit."""
        self._adjust_ceiling = adjust_ceiling
        self._keys = keys
        self._recorder = recorder
        self._batcher = batcher
        self._slices = slices
        self._epochs = epochs
        self._quotas = quotas
        self._share_loop = share_loop
        self._metrics = metrics
        self._clock = clock
        self._fallback = fallback
        self._answers = PolicyAnswers(quotas, clock)
        self._unmatched = UnmatchedRequests(metrics.checks, clock)
        self._waiting = WaitForUnits(quotas, metrics, clock, self._decide_once)
        self._last: PendingCheck | None = None
        self.denials = DenialCache(epochs, share_loop)
        self.policies: Policies | None = None
        self.blocks: Blocks | None = None

    # --- plans --------------------------------------------------------------------------------------------------------

    def plan_check(self, check: Check, *, may_lack_fields: bool = False) -> CheckPlan:
        """Raises NoPoliciesYet, InvalidField, UnknownSubjectField or HoldNeeded; nothing is consumed then.

        A subject that `may_lack_fields` does not meet policies that count by a field which it lacks.
        """
        plan = self._plan(check, may_lack_fields=may_lack_fields)
        require_no_slots(plan, check.mode)
        return plan

    def plan_hold(self, hold: Hold) -> CheckPlan:
        check = Check(subject=hold.subject, costs=hold.costs, operation_id=hold.operation_id)
        return as_hold(self._plan(check), hold)

    def _plan(self, check: Check, *, may_lack_fields: bool = False) -> CheckPlan:
        if self.policies is None:
            raise NoPoliciesYet
        subject = fields_of(check.subject)
        if check.mode not in BEYOND_LIMITS and (blocked := self._find_block(subject)) is not None:
            return plan_blocked(check, subject, blocked)
        return plan_request(self.policies, check, subject, self._adjust_ceiling, may_lack_fields=may_lack_fields)

    def _find_block(self, subject: Subject) -> Blocked | None:
        return self.blocks.find(subject, self._clock.monotonic_ms()) if self.blocks else None

    def _find_block_of(self, plan: CheckPlan) -> Blocked | None:
        if not plan.parts:
            return self._find_block(plan.subject)
        return next((found for subject in plan.parts if (found := self._find_block(subject)) is not None), None)

    # --- deciding -----------------------------------------------------------------------------------------------------

    async def decide(self, check: Check) -> Verdict:
        """Raises the refusals of a plan, or OperationConflict."""
        return await verdict_on(self, self.plan_check(check))

    async def hold(self, hold: Hold) -> Verdict:
        """Decide as for a check, but allowances set units aside instead of consuming them."""
        return await verdict_on(self, self.plan_hold(hold))

    def submit(self, plan: CheckPlan, caller: Caller, times: int = 1) -> None:
        """Decide a plan `times` times in a row, each for the same caller."""
        while times and (verdict := self.decide_locally(plan)) is not None:
            caller.on_verdict(verdict)
            times -= 1
        if times:
            self.decide_in_store(plan, caller, times)

    def decide_locally(self, plan: CheckPlan) -> Verdict | Exception | None:
        """Return a verdict that needs no call of the store; None if it needs one, and so does the same plan next."""
        request, policy_charges = plan.request, plan.policy_charges
        if plan.blocked or (self.blocks and request.mode not in BEYOND_LIMITS):
            blocked = plan.blocked or self._find_block_of(plan)
            if blocked is not None:
                return self._blocked_verdict(plan, blocked)
        if request.operation is not None:
            journaled = self._fallback.find_operation(policy_charges, request)
            if journaled is not None:
                return _verdict_of(plan, journaled)
        if plan.unmatched is not None and (verdict := self._unmatched.decide(plan)) is not None:
            self._log(plan, verdict.answer)
            return verdict
        now_ms = self._clock.monotonic_ms()
        if self._slices.held and (sliced := self._slices.decide(policy_charges, request, now_ms)) is not None:
            return self._verdict(plan, sliced)
        for each in policy_charges:
            if each.state.denials and (denied := self.denials.find(each.state, request, now_ms)) is not None:
                return self._repeat_denial(plan, denied, now_ms)
        return None if policy_charges else self._unlimited_verdict(plan)

    def _repeat_denial(self, plan: CheckPlan, denied: StoreDecision, now_ms: int) -> Verdict:
        for each in plan.policy_charges:
            charge = each.charge
            if isinstance(charge, RateCharge):
                self._share_loop.record_demand(each.state, charge, charge.cost, now_ms, size=charge.cost)
        return self._verdict(plan, denied)

    def decide_in_store(self, plan: CheckPlan, caller: Caller, times: int = 1) -> None:
        """Ask the store. Equal plans of one turn of the event loop are decided together."""
        request = plan.request
        is_repeatable = request.mode == "enforce" and request.operation is None
        while times:
            last = self._last
            if is_repeatable and last is not None and last.plan is plan and last is self._batcher.newest:
                joined = self._batcher.extend(times)
                last.join(caller, joined)
                times -= joined
            if times:
                first = min(times, self._batcher.room) if times > 1 and is_repeatable else 1
                self._last = pending = PendingCheck(
                    decider=self,
                    plan=plan,
                    request=request,
                    callers=[caller] * first,
                    times=first,
                    asked_at_ms=self._clock.monotonic_ms(),
                    started_s=perf_counter(),
                    circumstances=(self._epochs.current, self._share_loop.raises),
                )
                self._send(pending)
                times -= first

    def return_units(self, charges: Sequence[Charge]) -> None:
        """Return what was taken of rates that can take it back: they never hold more than their burst."""
        returned = tuple(
            replace(charge, cost=-charge.cost)
            for charge in charges
            if isinstance(charge, RateCharge) and charge.algorithm in SLICED
        )
        if returned and self._epochs.current is not None:
            self._batcher.submit(self._epochs.current, RequestRun(StoreRequest("adjust", returned), 1, lambda _: None))

    def adjust_rate(self, charge: RateCharge, on_outcome: Callable[[Outcome], None]) -> bool:
        """Take the units of a charge, whatever its bucket has; below zero, return them. False without an epoch."""
        incarnation = self._epochs.current
        if incarnation is None:
            return False
        request = StoreRequest("adjust", (charge,))
        self._batcher.submit(incarnation, RequestRun(request, 1, lambda outcomes: on_outcome(outcomes[0])))
        return True

    def forget(self, quota: str) -> None:
        """Forget what is remembered of a rate's key: it has been reset."""
        state = self._keys.find(quota)
        if state is not None:
            state.denials = None
        self._fallback.forget_rate(quota)

    async def close(self) -> None:
        await self._waiting.close()

    # --- the store ----------------------------------------------------------------------------------------------------

    def _send(self, pending: PendingCheck) -> None:
        plan, incarnation = pending.plan, self._usable_incarnation(pending.plan)
        if isinstance(incarnation, StoreUnavailable):
            pending.complete([incarnation] * pending.times)
            return
        if plan.hold_ms is not None:
            pending.request = _request_of(plan, incarnation)
        self._batcher.submit(incarnation, pending)

    async def _decide_once(self, plan: CheckPlan) -> Outcome:
        """Ask the store for a request that waits for units."""
        incarnation = self._usable_incarnation(plan)
        if isinstance(incarnation, StoreUnavailable):
            return incarnation
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        request = _request_of(plan, incarnation)
        self._batcher.submit(incarnation, RequestRun(request, 1, lambda outcomes: resolve(outcome, outcomes[0])))
        return await outcome

    def _usable_incarnation(self, plan: CheckPlan) -> StoreIncarnation | StoreUnavailable:
        incarnation = self._epochs.current
        if incarnation is None:
            return StoreUnavailable("the region has no epoch yet")
        for charge in plan.request.charges:
            if isinstance(charge, AllowanceCharge) and self._epochs.may_evict:
                return StoreUnavailable("the store may evict leases: its maxmemory-policy is not noeviction")
        return incarnation

    def on_outcomes(self, pending: PendingCheck, outcomes: Sequence[Outcome]) -> None:
        """Handle the store's first outcomes of a plan, all that one call had.

        Usually all are admitted. Then their demand is counted once for all of them.
        """
        decisions: Sequence[StoreDecision] = [
            each for each in outcomes if isinstance(each, StoreDecision) and each.allowed and not each.replayed
        ]
        if len(decisions) < len(outcomes):
            for outcome in outcomes:
                self._on_outcome(pending.alone(), outcome)
            return
        plan, times, now_ms = pending.plan, len(decisions), self._clock.monotonic_ms()
        self._note(plan, decisions[-1], now_ms, times)
        if not plan.is_subrequest:
            self._metrics.checks.seconds.observe(perf_counter() - pending.started_s, times)
        charges = plan.policy_charges
        if self._slices.held or charges[0].state.checks >= HOT:  # all of them have to be hot
            decisions = self._slices.apply(charges, plan.request, decisions, pending.asked_at_ms, now_ms)
        for decision in decisions:
            pending.answer(self._verdict(plan, decision, pending.started_s))

    def _on_outcome(self, pending: PendingCheck, outcome: Outcome) -> None:
        plan = pending.plan
        if isinstance(outcome, StoreDecision) and not outcome.replayed:
            if not outcome.allowed and self._retry_with_slices(pending):
                return
            charges, request, now_ms = plan.policy_charges, plan.request, self._clock.monotonic_ms()
            self._note(plan, outcome, now_ms)
            if not outcome.allowed:
                self.denials.remember(charges, request, outcome, pending.asked_at_ms, pending.circumstances)
            (outcome,) = self._slices.apply(charges, request, [outcome], pending.asked_at_ms, now_ms)
        if self._waiting.missing(plan, outcome) is None:
            self._conclude(pending, outcome)
        else:
            self._waiting.start(pending, outcome, self._conclude)

    def _retry_with_slices(self, pending: PendingCheck) -> bool:
        """Ask the store again if token slices that might have helped a denied request were returned to it."""
        if pending.attempts == MAX_ATTEMPTS:
            return False
        if not self._slices.return_units(pending.plan.policy_charges, pending.asked_at_ms):
            return False
        self._send(pending.retry(self._clock.monotonic_ms()))
        return True

    def _conclude(self, pending: PendingCheck, outcome: Outcome) -> None:
        plan = pending.plan
        if not plan.is_subrequest:
            self._metrics.checks.seconds.observe(perf_counter() - pending.started_s)
        if isinstance(outcome, StoreDecision) and _lacks_lease_only(plan, outcome):
            self._fallback.book_adjustment(
                plan.policy_charges,
                plan.request,
                lambda answer: pending.answer(self._fallback_verdict(plan, answer, pending.started_s)),
            )
        elif isinstance(outcome, StoreDecision):
            pending.answer(self._verdict(plan, outcome, pending.started_s))
        elif isinstance(outcome, (StoreUnavailable, StoreError, Fenced, CoordinatorNotReached)):
            if isinstance(outcome, Fenced):
                self._epochs.invalidate()
            self._fallback.decide(
                plan.policy_charges,
                plan.request,
                lambda answer: pending.answer(self._fallback_verdict(plan, answer, pending.started_s)),
                may_have_executed=isinstance(outcome, NoAnswer) or _is_request_error(outcome),
                cause=DenialCause.CUT_OFF if isinstance(outcome, CoordinatorNotReached) else DenialCause.STORE,
            )
        else:
            pending.answer(outcome)

    def _note(self, plan: CheckPlan, decision: StoreDecision, now_ms: int, times: int = 1) -> None:
        """Note a request that was decided so many times in the records of its keys; `decision` is the last of them."""
        mode = plan.request.mode
        changes_denials = mode in CHANGES_DENIALS
        is_counted = mode == REFUND or (plan.is_subrequest and plan.demand_already_counted)
        for each, policy in zip(plan.policy_charges, decision.policies, strict=True):
            charge, state = each.charge, each.state
            is_demand = not is_counted and (policy.code == 0 or policy.reason != DenialReason.COST_ABOVE_LIMIT)
            if isinstance(charge, RateCharge):
                if changes_denials:
                    state.denials = None
                if is_demand:
                    cost = charge.cost
                    self._share_loop.record_demand(state, charge, cost * times, now_ms, size=cost, checks=times)
                self._share_loop.record_bucket(state, charge, policy.available, policy.last_grant, now_ms)
            elif isinstance(charge, AllowanceCharge):
                if is_demand:
                    self._quotas.record_demand(charge.quota, charge.cost * times, policy)
                if decision.hold is not None:
                    self._quotas.add_held(charge.quota, charge.cost)
                self._fallback.note(each, policy, now_ms)
            elif is_demand:
                self._share_loop.record_slots(state, charge, policy, now_ms)

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def _verdict(self, plan: CheckPlan, decision: StoreDecision, started_s: float = 0.0) -> Verdict:
        """Return the verdict. `started_s` is when the check began, where the store was asked."""
        if len(plan.policy_charges) == 1:
            answers = [self._answers.answer(plan.policy_charges[0], decision.policies[0])]
        else:
            answers = list(map(self._answers.answer, plan.policy_charges, decision.policies))
        if plan.unlimited:
            answers += map(unlimited_answer, plan.unlimited)
        if not plan.is_subrequest:
            self._metrics.checks.note(answers, plan.request.mode)
        answer = answer_of(decision.allowed, None, answers)
        if plan.unmatched is not None:
            answer = self._unmatched.note(plan, answer)
        if not plan.is_subrequest and not decision.replayed:
            if answer.allowed:
                self._recorder.note(plan, answer, self._epochs.current, started_s)
            else:
                self._log(plan, answer, started_s)
        return Verdict(answer, plan.policy_charges, decision.hold)

    def _unlimited_verdict(self, plan: CheckPlan) -> Verdict:
        """Admit what only policies without a limit match."""
        answers = list(map(unlimited_answer, plan.unlimited))
        self._metrics.checks.note(answers, plan.request.mode)
        answer = answer_of(True, None, answers)
        self._log(plan, answer)
        return Verdict(answer, [])

    def _blocked_verdict(self, plan: CheckPlan, blocked: Blocked) -> Verdict:
        """Deny without asking the store: a block holds during an outage, too, and nothing is consumed."""
        self._metrics.blocked.labels(blocked.field.value).inc()
        ends_at_ms = blocked.ends_at_ms
        retry_ms = RETRY_WHEN_BLOCKED_MS if ends_at_ms is None else ends_at_ms - self._clock.monotonic_ms()
        answer = replace(answer_of(False, None, []), retry_after_ms=max(1, retry_ms), blocked_by=blocked.field)
        self._log(plan, answer)
        return Verdict(answer, [])

    def _fallback_verdict(
        self, plan: CheckPlan, answer: CheckAnswer | Exception, started_s: float
    ) -> Verdict | Exception:
        if isinstance(answer, CheckAnswer) and not plan.is_subrequest:
            if plan.unmatched is not None:
                answer = self._unmatched.note(plan, answer)
            self._metrics.checks.note(answer.policies, plan.request.mode)
            self._log(plan, answer, started_s)
        return _verdict_of(plan, answer)

    def _log(self, plan: CheckPlan, answer: CheckAnswer, started_s: float = 0.0) -> None:
        self._recorder.note(plan, answer, self._epochs.current, started_s)
        if not answer.allowed and plan.request.mode not in LOOKS:
            self._metrics.denial_lines.note(plan.subject, answer, self._clock.monotonic_ms())


async def verdict_on(admission: Admission, plan: CheckPlan) -> Verdict:
    """Await a verdict. One that needs no store call costs no turn of the event loop."""
    verdict = admission.decide_locally(plan)
    return verdict if isinstance(verdict, Verdict) else await await_verdict(admission, plan, verdict)


async def await_verdict(admission: Admission, plan: CheckPlan, refusal: Exception | None = None) -> Verdict:
    """Await the store's verdict where `decide_locally` gave none, or raise what it gave."""
    if refusal is not None:
        raise refusal
    caller = AwaitedVerdict()
    admission.decide_in_store(plan, caller)
    verdict = await caller.future
    if isinstance(verdict, Exception):
        raise verdict
    return verdict


class AwaitedVerdict:
    """A caller that is a coroutine."""

    has_disconnected = False

    def __init__(self) -> None:
        self.future: asyncio.Future[Verdict | Exception] = asyncio.get_running_loop().create_future()
        self.trace_context = current_context()

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        resolve(self.future, verdict)


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Set the result of a future, unless its caller has cancelled it."""
    if not future.done():
        future.set_result(result)


def _verdict_of(plan: CheckPlan, answer: CheckAnswer | Exception) -> Verdict | Exception:
    if isinstance(answer, Exception):
        return answer
    return Verdict(with_unlimited(answer, plan.unlimited) if plan.unlimited else answer, plan.policy_charges)


def _is_request_error(outcome: Exception) -> bool:
    """Return whether a script failed over this request: it may have spent units; a store failure has spent none."""
    return isinstance(outcome, StoreError) and not is_store_failure(outcome)


def _lacks_lease_only(plan: CheckPlan, decision: StoreDecision) -> bool:
    """Return whether an adjustment was denied only because the region has no lease to book it on."""
    if plan.request.mode != "adjust" or decision.allowed:
        return False
    pairs = zip(plan.policy_charges, decision.policies, strict=True)
    denials = [policy.reason for each, policy in pairs if not (policy.allowed or each.is_shadow)]
    return all(reason == DenialReason.NO_LEASE for reason in denials)


def _request_of(plan: CheckPlan, incarnation: StoreIncarnation) -> StoreRequest:
    """Return the request to send. That of a hold has an id of its own each time."""
    request = plan.request
    if plan.hold_ms is None:
        return request
    parts = [part for charge in request.charges if (part := hold_part(charge)) is not None]
    hold_id = HoldId.fresh(incarnation.epoch, incarnation.lanes, parts, plan.sibling_holds)
    return StoreRequest(request.mode, request.charges, request.operation, HoldTerms(hold_id, plan.hold_ms))
