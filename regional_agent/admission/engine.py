"""The hot path: may this request happen now?

One script in the region's store decides all policies of a request at once. Where it cannot be asked, `without_store`
decides what that means.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol, TypeVar, cast

import msgspec
import structlog
from msgspec.structs import replace

from protocol.check import Check, CheckAnswer, DenialCause, Hold, PolicyAnswer
from protocol.clock import Clock
from protocol.outcomes import DenialReason
from protocol.periods import calendar_of, period_at
from protocol.policy import SLICED, QuotaKind
from regional_agent.admission.blocks import Blocked, Blocks
from regional_agent.admission.policies import Demanded, HoldNeeded, Policies, Subject, digest
from regional_agent.admission.rules.ceilings import AboveCeiling, allowance_ceiling, rate_ceiling
from regional_agent.admission.rules.denial_cache import Denials
from regional_agent.admission.rules.denial_causes import RETRY_MS, LeaseOutlook, cause_of, retry_after_ms
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS
from regional_agent.admission.token_slices import Slicing
from regional_agent.http.schemas import Verdict, Window, answer_of
from regional_agent.leasing.central import MAY_LOOK, Answer
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.quotas import Leasing
from regional_agent.metrics import Metrics
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.batcher import CheckBatcher, for_each_outcome
from regional_agent.store.circuit_breaker import is_store_failure
from regional_agent.store.connection import NoAnswer, StoreError, StoreUnavailable
from regional_agent.store.types import (
    AllowanceCharge,
    Charge,
    Decision,
    Fenced,
    OnDecisions,
    Operation,
    Outcome,
    PolicyDecision,
    RateCharge,
    SlotCharge,
    StoreIncarnation,
    StoreRequest,
    hold_part,
)
from regional_agent.store_outage.fallback import WithoutStore

log = structlog.get_logger()

ALLOWANCE_WINDOW_MS = 24 * 3600 * 1000
OTHER_WINDOW_MS = 10 * 60 * 1000
RETRY_WHEN_BLOCKED_MS = 3_600_000  # of a block without an end, which people may lift any time

MOST_LOOKS = 4  # of one request: each but the last was followed by units that came back

# What more units, or a renewed lease, may turn into an admission.
WORTH_WAITING = {DenialReason.NO_LEASE, DenialReason.LEASE_EXPIRED, DenialReason.LEASE_SPENT}


class NotAsked(Exception):
    """The coordinator, which alone has what the request asks for, does not answer."""


class NoPoliciesYet(Exception):
    """The agent has never heard any policies: it cannot tell what is limited."""


class Asked(NamedTuple):
    """A check, and what it takes of each policy that it meets: all that can be known before the store is asked."""

    subject: Subject
    demanded: list[Demanded]
    request: StoreRequest
    windows: list[Window]
    blocked: Blocked | None = None  # then nothing else is known of it
    hold_ms: int | None = None  # of a hold: how long it shall last
    beside: tuple[HoldId, ...] = ()  # what is set aside for it in other cells
    is_step: bool = False  # of a request over several cells, whose answer is not known yet

    @property
    def lasts(self) -> bool:
        """As long as the policies: the same check asks the same again."""
        return self.blocked is None and self.request.operation is None

    @property
    def is_noted(self) -> bool:
        """Its demand is known from the step before."""
        return self.is_step and self.request.mode not in LOOKS


OnVerdict = Callable[[Verdict | Exception], None]


class Admits(Protocol):
    """What the web ask."""

    @property
    def policies(self) -> Policies | None: ...
    @property
    def blocks(self) -> Blocks | None: ...
    def asked(self, check: Check) -> Asked: ...
    def known(self, asked: Asked, /) -> Verdict | Exception | None: ...
    def ask(self, asked: Asked, on_verdict: OnVerdict, times: int = 1) -> None: ...
    def submit(self, asked: Asked, on_verdict: OnVerdict, times: int = 1) -> None: ...
    async def decide(self, check: Check) -> Verdict: ...
    async def hold(self, hold: Hold) -> Verdict: ...


class Admission:
    """Callbacks, not coroutines: a task for each request would cost as much as all that happens in it."""

    def __init__(
        self,
        batcher: CheckBatcher,
        epochs: EpochManager,
        leasing: Leasing,
        slicing: Slicing,
        share_loop: ShareLoop,
        without_store: WithoutStore,
        metrics: Metrics,
        clock: Clock,
        adjust_ceiling: int = 100,
    ) -> None:
        """`adjust_ceiling`: so many times the limit may one adjustment book."""
        self._adjust_ceiling = adjust_ceiling
        self._batcher = batcher
        self._slicing = slicing
        self._epochs = epochs
        self._leasing = leasing
        self._share_loop = share_loop
        self._metrics = metrics
        self._clock = clock
        self._without_store = without_store
        self._waiting: set[asyncio.Task[None]] = set()
        self._last: _Pending | None = None
        self._denials: Denials[Decision] = Denials()
        self._denials_of: tuple[StoreIncarnation | None, int] = (
            None,
            0,
        )  # the incarnation and the shares that they are certain in
        self.policies: Policies | None = None
        self.blocks: Blocks | None = None

    async def decide(self, check: Check) -> Verdict:
        """Raises what the store's answer or the request itself makes impossible."""
        return await verdict_on(self, self.asked(check))

    async def hold(self, hold: Hold) -> Verdict:
        """A check, but that allowances set units aside and consume none."""
        return await verdict_on(self, self.asked_to_hold(hold))

    def asked(self, check: Check) -> Asked:
        """Raises NoPoliciesYet, UnknownSubjectField or HoldNeeded; nothing has happened then."""
        asked = self._asked(check)
        for each in asked.demanded:
            if isinstance(each.charge, SlotCharge) and check.mode != "peek" and not each.charge.is_shadow:
                raise HoldNeeded(each.policy.spec.name)
        return asked

    def _asked(self, check: Check) -> Asked:
        if self.policies is None:
            raise NoPoliciesYet
        subject: dict[str, str] = msgspec.to_builtins(check.subject)
        if check.mode != "adjust" and (blocked := self._block_of(subject)) is not None:
            return Asked(subject, [], StoreRequest(check.mode, []), [], blocked)
        demanded = self.policies.demand(subject, check.cost)
        if check.mode == "adjust":
            self._refuse_above_ceiling(demanded)
        charges = tuple(each.charge for each in demanded)
        operation = _operation(check, subject, demanded)
        windows = [_window(each) for each in demanded]
        return Asked(subject, demanded, StoreRequest(check.mode, charges, operation), windows)

    def _refuse_above_ceiling(self, demanded: Sequence[Demanded]) -> None:
        for each in demanded:
            charge = each.charge
            if isinstance(charge, AllowanceCharge):
                ceiling = allowance_ceiling(charge.limit, self._adjust_ceiling)
            elif isinstance(charge, RateCharge):
                ceiling = rate_ceiling(charge.rate_micro, charge.burst, self._adjust_ceiling)
            else:
                continue
            if charge.cost > ceiling:
                raise AboveCeiling("cost", each.policy.name, ceiling)

    def asked_to_hold(self, hold: Hold) -> Asked:
        asked = self._asked(Check(subject=hold.subject, operation_id=hold.operation_id))
        demanded = [each.holding(hold.units) for each in asked.demanded]
        charges = tuple(each.charge for each in demanded)
        operation = asked.request.operation
        if operation is not None:
            operation = operation._replace(body=digest(["hold", operation.body, str(hold.units), str(hold.ttl_ms)]))
        request = StoreRequest("hold", charges, operation)
        return asked._replace(demanded=demanded, request=request, hold_ms=hold.ttl_ms)

    def submit(self, asked: Asked, on_verdict: OnVerdict, times: int = 1) -> None:
        """Ask so many times in a row for a verdict, or for an exception: OperationConflict, or a bug."""
        while times and (known := self.known(asked)) is not None:
            on_verdict(known)
            times -= 1
        if times:
            self.ask(asked, on_verdict, times)

    def ask(self, asked: Asked, on_verdict: OnVerdict, times: int = 1) -> None:
        """The store, for nothing is known. All who ask the same in one turn of the event loop are decided together."""
        last = self._last
        if last is None or last.asked is not asked or last.call != self._batcher.calls:
            last = _Pending(self, asked, self._clock.monotonic_ms(), self._denials_of, self._batcher.calls)
            self._last = last
        last.on_verdicts += [on_verdict] * times
        self._ask_store(asked, last, times)

    def known(self, asked: Asked) -> Verdict | Exception | None:
        """What the store need not be asked. Where it must be, it must be for the same that comes next as well."""
        if asked.blocked or (self.blocks and asked.request.mode not in BEYOND_LIMITS):
            blocked = asked.blocked or self._block_of(asked.subject)
            if blocked is not None:
                return self._denied(asked, blocked)
        if asked.request.operation is not None:
            known = self._without_store.answered_before(asked.demanded, asked.request)
            if known is not None:
                return _verdict_of(asked, known)
        if (sliced := self._slicing.decide(asked.request)) is not None:
            return self._verdict(asked, sliced)
        if (denied := self._denied_before(asked)) is not None:
            for each in asked.demanded:
                if isinstance(each.charge, RateCharge):
                    self._share_loop.note(each.charge, each.charge.cost, each.charge.cost)
            return self._verdict(asked, denied)
        return None if asked.demanded else MEETS_NO_POLICY

    def give_back(self, charges: Sequence[Charge]) -> None:
        """What was taken of rates that can have it back: no more than their burst is ever there."""
        returned = tuple(
            charge._replace(cost=-charge.cost)
            for charge in charges
            if isinstance(charge, RateCharge) and charge.algorithm in SLICED
        )
        if returned and self._epochs.current is not None:
            self._batcher.submit(self._epochs.current, StoreRequest("adjust", returned), lambda _: None)

    async def close(self) -> None:
        """Who still waits for units waits in vain."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def _block_of(self, subject: Subject) -> Blocked | None:
        return self.blocks.find(subject, self._clock.monotonic_ms()) if self.blocks else None

    def _denied(self, asked: Asked, blocked: Blocked) -> Verdict:
        """Nothing is consumed, and nobody is asked: a block holds while the store is down, too."""
        self._metrics.blocked.labels(blocked.field.value).inc()
        ends_at_ms = blocked.ends_at_ms
        retry_ms = RETRY_WHEN_BLOCKED_MS if ends_at_ms is None else ends_at_ms - self._clock.monotonic_ms()
        answer = replace(answer_of(False, None, []), retry_after_ms=max(1, retry_ms), blocked_by=blocked.field)
        self._log_denial(asked.subject, asked.request.mode, answer)
        return Verdict(answer, [])

    # --- with the store ----------------------------------------------------------------------------------------------

    def _ask_store(self, asked: Asked, on_decisions: OnDecisions, times: int = 1) -> None:
        incarnation = self._epochs.current
        if incarnation is None:
            on_decisions([StoreUnavailable("the region has no epoch yet")] * times)
        elif self._epochs.may_evict and _takes_allowance(asked.request):
            on_decisions(
                [StoreUnavailable("the store may evict leases: its maxmemory-policy is not noeviction")] * times
            )
        elif asked.hold_ms is None:
            self._batcher.submit(incarnation, asked.request, on_decisions, times)
        else:
            parts = [part for charge in asked.request.charges if (part := hold_part(charge)) is not None]
            terms = HoldTerms(HoldId.fresh(incarnation.epoch, incarnation.lanes, parts, asked.beside), asked.hold_ms)
            self._batcher.submit(incarnation, asked.request._replace(hold=terms), on_decisions)

    def _denied_before(self, asked: Asked) -> Decision | None:
        """What the store is certain to say, with its times as they are by now."""
        incarnation, heard = self._denials_of
        if incarnation is not self._epochs.current or heard != self._share_loop.heard:
            self._denials.clear()
            self._denials_of = self._epochs.current, self._share_loop.heard
        if not self._denials or not _may_be_certain(asked.request):
            return None
        now_ms = self._clock.monotonic_ms()
        kept = self._denials.find(asked.request.charges, now_ms)
        return None if kept is None else _later(kept.decision, now_ms - kept.asked_at_ms)

    def _remember_denial(self, pending: "_Pending", decision: Decision) -> None:
        """Only what a rate denies: units of an allowance may come from elsewhere at any moment."""
        request = pending.asked.request
        until_ms = [
            policy.retry_after_ms
            for charge, policy in zip(request.charges, decision.policies, strict=True)
            if isinstance(charge, RateCharge) and policy.reason == DenialReason.RATE_EXCEEDED and not charge.is_shadow
        ]
        if until_ms and _may_be_certain(request) and pending.asked_in is self._denials_of:
            self._denials.keep(request.charges, decision, pending.asked_at_ms, max(until_ms))

    def decided(self, pending: "_Pending", outcomes: Sequence[Outcome]) -> None:
        """The store's first answers to a check, as many as were asked for in one call."""
        for outcome in outcomes:
            if not isinstance(outcome, Decision) or not outcome.allowed or outcome.replayed:
                break
        else:
            self._admitted(pending, cast(Sequence[Decision], outcomes))
            return
        for outcome in outcomes:
            self._decided(pending.alone(), outcome)

    def _admitted(self, pending: "_Pending", decisions: Sequence[Decision]) -> None:
        """All of them, as nearly always. What others are told of is told them once."""
        asked, times = pending.asked, len(decisions)
        self._note(asked, decisions[-1], times)
        if not asked.is_step:
            self._metrics.checks.seconds.observe(perf_counter() - pending.started_s, times)
        for decision in self._slicing.heard(asked.request, decisions, pending.asked_at_ms):
            pending.tell(self._verdict(asked, decision))

    def _decided(self, pending: "_Pending", outcome: Outcome) -> None:
        decision = outcome
        if isinstance(decision, Decision) and not decision.replayed:
            if not decision.allowed and self._looks_again(pending):
                return
            self._note(pending.asked, decision)
            if not decision.allowed:
                self._remember_denial(pending, decision)
            (decision,) = self._slicing.heard(pending.asked.request, [decision], pending.asked_at_ms)
        if self._short(pending.asked, decision) is None:
            self._conclude(pending, decision)
        else:
            self._wait(pending, decision)

    def _looks_again(self, pending: "_Pending") -> bool:
        """It was denied, and a slice that lay here might have helped: that is back, and the store is asked again."""
        if pending.looks == MOST_LOOKS:
            return False
        if not self._slicing.give_back(pending.asked.request.charges, pending.asked_at_ms):
            return False
        self._ask_store(pending.asked, pending.again(self._clock.monotonic_ms()))
        return True

    def _conclude(self, pending: "_Pending", decision: Outcome) -> None:
        if not pending.asked.is_step:
            self._metrics.checks.seconds.observe(perf_counter() - pending.started_s)
        if isinstance(decision, Decision) and _lacks_lease_only(pending.asked, decision):
            asked = pending.asked
            self._without_store.book_adjustment(
                asked.demanded, asked.request, lambda answer: pending.tell(self._without_store_verdict(asked, answer))
            )
        elif isinstance(decision, Decision):
            pending.tell(self._verdict(pending.asked, decision))
        elif isinstance(decision, (StoreUnavailable, StoreError, Fenced, NotAsked)):
            if isinstance(decision, Fenced):
                self._epochs.invalidate()
            asked = pending.asked
            self._without_store.decide(
                asked.demanded,
                asked.request,
                lambda answer: pending.tell(self._without_store_verdict(asked, answer)),
                may_be_spent=isinstance(decision, NoAnswer) or _is_about(decision),
                cause=DenialCause.CUT_OFF if isinstance(decision, NotAsked) else DenialCause.STORE,
            )
        else:
            pending.tell(decision)

    # --- waiting for a last unit -------------------------------------------------------------------------------------

    def _wait(self, pending: "_Pending", decision: Outcome) -> None:
        """Few requests come here, and they are in no hurry: a task for each."""
        task = asyncio.get_running_loop().create_task(self._wait_for_units(pending, decision))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _wait_for_units(self, pending: "_Pending", decision: Outcome) -> None:
        """Asks again at each news of the quota, for as long as its policy lets a request wait."""
        deadline_ms: int | None = None
        while (short := self._short(pending.asked, decision)) is not None:
            if short.policy.is_central:
                decision = await self._ask_coordinator(pending, decision)
                break
            now_ms = self._clock.monotonic_ms()
            deadline_ms = now_ms + short.wait_ms if deadline_ms is None else deadline_ms
            if now_ms >= deadline_ms:
                break
            self._metrics.waits.inc()
            await self._leasing.wait(short.charge.quota, short.charge.cost, deadline_ms - now_ms)
            decision = await self._ask_store_again(pending.asked)
        self._conclude(pending, decision)

    async def _ask_coordinator(self, pending: "_Pending", decision: Decision | Exception) -> Decision | Exception:
        """Of what is central, for as long as its policy lets a request wait: nothing of it is here unless asked for."""
        asked, began_ms, is_heard = pending.asked, self._clock.monotonic_ms(), False
        while short := self._short_of_central(asked, decision):
            left_ms = began_ms + min(each.wait_ms for each in short) - self._clock.monotonic_ms()
            asks = (self._leasing.ask(each.charge.quota, each.charge.cost, left_ms, again=is_heard) for each in short)
            answers = await asyncio.gather(*asks)
            told = [each for each, answer in zip(short, answers, strict=True) if answer in MAY_LOOK]
            try:
                if len(told) < len(short):
                    return decision if is_heard else NotAsked()
                if _has_gone(pending.next):
                    return decision
                is_heard, decision = True, await self._ask_store_again(asked)
                if Answer.LAST_LOOK in answers:
                    return decision
            finally:
                for each in told:
                    self._leasing.looked(each.charge.quota)
        return decision

    def _short_of_central(self, asked: Asked, decision: Decision | Exception) -> list[Demanded]:
        """All of them at once: what was granted for one goes back while another is asked for."""
        short = self._shorts(asked, decision)
        return [each for each in short if each.policy.is_central]

    async def _ask_store_again(self, asked: Asked) -> Decision | Exception:
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._ask_store(asked, for_each_outcome(partial(tell, answer)))
        return await answer

    def _short(self, asked: Asked, decision: Decision | Exception) -> Demanded | None:
        """The allowance to wait for. None if there is none, or another policy denies the request anyway. What is
        central comes last, when nothing else is missing.
        """
        if not isinstance(decision, Decision) or decision.allowed:
            return None
        return min(self._shorts(asked, decision), key=lambda each: each.policy.is_central, default=None)

    def _shorts(self, asked: Asked, decision: Decision | Exception) -> list[Demanded]:
        if not isinstance(decision, Decision) or decision.allowed:
            return []
        told = zip(asked.demanded, decision.policies, strict=True)
        denials = [(each, policy) for each, policy in told if not (policy.allowed or each.is_shadow)]
        if any(policy.reason not in WORTH_WAITING for _, policy in denials):
            return []
        may_wait = self._leasing.may_wait
        return [each for each, _ in denials if each.policy.is_central or may_wait(each.charge.quota)]

    def _note(self, asked: Asked, decision: Decision, times: int = 1) -> None:
        """It was decided so many times; this is what came of the last."""
        for each, policy in zip(asked.demanded, decision.policies, strict=True):
            charge = each.charge
            grantable = policy.allowed or policy.reason != DenialReason.COST_ABOVE_LIMIT  # else it is no demand
            if isinstance(charge, RateCharge):
                if grantable and not asked.is_noted:
                    self._share_loop.note(charge, charge.cost * times, charge.cost)
                self._share_loop.look(charge, policy.available, policy.last_grant)
            elif grantable and isinstance(charge, AllowanceCharge):
                if not asked.is_noted:
                    self._leasing.note(charge.quota, charge.cost * times, policy)
                if decision.hold is not None:
                    self._leasing.note_held(charge.quota, charge.cost)
            elif grantable and isinstance(charge, SlotCharge) and not asked.is_noted:
                self._share_loop.note_slots(charge, policy)
        self._without_store.note(asked.demanded, decision)

    def _without_store_verdict(self, asked: Asked, answer: CheckAnswer | Exception) -> Verdict | Exception:
        if isinstance(answer, CheckAnswer) and not asked.is_step:
            self._metrics.checks.note(answer.policies)
            self._log_denial(asked.subject, asked.request.mode, answer)
        return _verdict_of(asked, answer)

    def _log_denial(self, subject: Subject, mode: str, answer: CheckAnswer) -> None:
        if not answer.allowed and mode not in LOOKS:
            self._metrics.decision_log.note(subject, answer, self._clock.monotonic_ms())

    def _verdict(self, asked: Asked, decision: Decision) -> Verdict:
        if len(asked.demanded) == 1:
            answers = [self._policy_answer(asked.demanded[0], decision.policies[0])]
        else:
            answers = list(map(self._policy_answer, asked.demanded, decision.policies))
        if not asked.is_step:
            self._metrics.checks.note(answers)
        answer = answer_of(decision.allowed, None, answers)
        if not answer.allowed and not asked.is_step:
            self._log_denial(asked.subject, asked.request.mode, answer)
        return Verdict(answer, asked.windows, decision.hold)

    def _policy_answer(self, each: Demanded, policy: PolicyDecision) -> PolicyAnswer:
        if policy.code:
            return self._policy_denial(each, policy)
        compiled = each.policy
        return PolicyAnswer(
            policy=compiled.name,
            quota=compiled.quota_name,
            kind=compiled.kind,
            allowed=True,
            limit=policy.limit,
            remaining=policy.remaining,
            reset_ms=policy.reset_ms,
            retry_after_ms=0,
            delay_ms=policy.delay_ms,
            shadow=compiled.is_shadow,
        )

    def _policy_denial(self, each: Demanded, policy: PolicyDecision) -> PolicyAnswer:
        compiled, charge = each.policy, each.charge
        is_allowance = isinstance(charge, AllowanceCharge)
        cause = cause_of(policy.reason, self._leasing.outlook(charge.quota) if is_allowance else LeaseOutlook())
        certain_ms, reset_ms = policy.retry_after_ms, policy.reset_ms
        if is_allowance and not reset_ms:  # no lease says when the period ends
            reset_ms = self._period_ends_in_ms(each)
            certain_ms = certain_ms or reset_ms
        if isinstance(charge, SlotCharge):
            certain_ms = min(certain_ms, RETRY_MS)  # mostly a slot is given back before it runs out
        return PolicyAnswer(
            policy=compiled.name,
            quota=compiled.quota_name,
            kind=compiled.kind,
            allowed=False,
            limit=policy.limit,
            remaining=_left_here(policy, cause) if is_allowance else policy.remaining,
            reset_ms=reset_ms,
            retry_after_ms=retry_after_ms(cause, certain_ms),
            reason=cause,
            shadow=compiled.is_shadow,
        )

    def _period_ends_in_ms(self, each: Demanded) -> int:
        """Return when the period ends by this machine's calendar: the coordinator has not said it yet."""
        now = self._clock.now()
        period = period_at(calendar_of(each.policy.quota, each.began_at), now)
        return max(1, int((period.ends_at - now).total_seconds() * 1000))


def _left_here(policy: PolicyDecision, cause: DenialCause) -> int:
    """Return what a denied allowance has left for smaller costs: units that are elsewhere do not help this region."""
    if cause is DenialCause.NEVER:
        return policy.remaining
    return 0 if policy.reason == DenialReason.LEASE_EXPIRED else max(0, min(policy.remaining, policy.available))


async def verdict_on(admission: Admits, asked: Asked) -> Verdict:
    """For whoever would rather wait. What is known at once costs no turn of the event loop."""
    outcome = admission.known(asked)
    return outcome if isinstance(outcome, Verdict) else await asked_verdict(admission, asked, outcome)


async def asked_verdict(admission: Admits, asked: Asked, outcome: Exception | None = None) -> Verdict:
    """The store's, for nothing is known; or it is known that there is none."""
    if outcome is None:
        hear: asyncio.Future[Verdict | Exception] = asyncio.get_running_loop().create_future()
        admission.ask(asked, partial(tell, hear))
        told = await hear
    else:
        told = outcome
    if isinstance(told, Exception):
        raise told
    return told


class _Pending:
    """A check that the store was asked about, and all who asked it in one turn. It is called with the answers."""

    __slots__ = ("_admission", "_told", "asked", "asked_at_ms", "asked_in", "call", "looks", "on_verdicts", "started_s")

    def __init__(self, admission: Admission, asked: Asked, now_ms: int, circumstances: object, call: int = -1) -> None:
        """`call`: the batcher's number, as long as others may join."""
        self._admission = admission
        self.asked_at_ms = now_ms
        self.asked_in = circumstances
        self.asked = asked
        self.call = call
        self.on_verdicts: list[OnVerdict] = []
        self._told = 0
        self.looks = 1
        self.started_s = perf_counter()

    def alone(self) -> "_Pending":
        """The next of them, by himself: not all are told the same."""
        if len(self.on_verdicts) == 1:
            return self
        alone = self.again(self.asked_at_ms)
        alone.looks = self.looks
        return alone

    def again(self, now_ms: int) -> "_Pending":
        """The next of them asks once more."""
        again = _Pending(self._admission, self.asked, now_ms, self.asked_in)
        again.on_verdicts.append(self._next())
        again.looks, again.started_s = self.looks + 1, self.started_s
        return again

    def tell(self, outcome: Verdict | Exception) -> None:
        """The next of them. It came with those of others, whom a fault there must not harm."""
        try:
            self._next()(outcome)
        except Exception:
            log.exception("a decision could not be told")

    @property
    def next(self) -> OnVerdict:
        return self.on_verdicts[self._told]

    def _next(self) -> OnVerdict:
        self._told += 1
        return self.on_verdicts[self._told - 1]

    def __call__(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self._admission.decided(self, outcomes)
        except Exception:
            log.exception("decisions could not be told")


def _has_gone(on_verdict: OnVerdict) -> bool:
    """Whoever asked for it, if it can tell: what it does not hear of is not taken for it."""
    return getattr(getattr(on_verdict, "__self__", None), "has_gone", False)


def _verdict_of(asked: Asked, answer: CheckAnswer | Exception) -> Verdict | Exception:
    return answer if isinstance(answer, Exception) else Verdict(answer, asked.windows)


def _is_about(decision: Exception) -> bool:
    """A script that failed over this request may have spent some of it; a store that cannot has spent nothing."""
    return isinstance(decision, StoreError) and not is_store_failure(decision)


def _lacks_lease_only(asked: Asked, decision: Decision) -> bool:
    """Return whether an adjustment was denied only because the region has no lease to book it on."""
    if asked.request.mode != "adjust" or decision.allowed:
        return False
    pairs = zip(asked.demanded, decision.policies, strict=True)
    denials = [policy.reason for each, policy in pairs if not (policy.allowed or each.is_shadow)]
    return all(reason == DenialReason.NO_LEASE for reason in denials)


def _may_be_certain(request: StoreRequest) -> bool:
    """An operation may have been admitted before, and what is not enforced is not denied."""
    return request.mode == "enforce" and request.operation is None


def _takes_allowance(request: StoreRequest) -> bool:
    return any(isinstance(charge, AllowanceCharge) for charge in request.charges)


def _later(decision: Decision, elapsed_ms: int) -> Decision:
    policies = [
        replace(
            policy,
            reset_ms=max(0, policy.reset_ms - elapsed_ms),
            retry_after_ms=max(0, policy.retry_after_ms - elapsed_ms),
        )
        for policy in decision.policies
    ]
    return Decision(False, False, policies)


T = TypeVar("T")


def tell(future: asyncio.Future[T], outcome: T) -> None:
    if not future.done():  # else who asked has gone
        future.set_result(outcome)


def _operation(check: Check, subject: dict[str, str], demanded: list[Demanded]) -> Operation | None:
    """An operation is known within its tenant; the same id for another body is a mistake of the caller's."""
    if check.operation_id is None or check.mode == "peek":
        return None
    long = any(each.policy.quota.kind is QuotaKind.ALLOWANCE for each in demanded)
    body = digest([check.mode, str(check.cost), *(f"{field}={value}" for field, value in sorted(subject.items()))])
    window_ms = ALLOWANCE_WINDOW_MS if long else OTHER_WINDOW_MS
    return Operation(digest([subject.get("tenant", ""), check.operation_id]), body, window_ms)


MEETS_NO_POLICY = Verdict(answer_of(True, None, []), [])


def _window(each: Demanded) -> Window:
    charge = each.charge
    if isinstance(charge, RateCharge) and charge.window_ms:
        return Window(charge.window_ms // 1000)
    if isinstance(charge, RateCharge) and charge.rate_micro:
        return Window(max(1, charge.burst * 1_000_000 // charge.rate_micro), refills=True)
    return Window(each.policy.window_s)
