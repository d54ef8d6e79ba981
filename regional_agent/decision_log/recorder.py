"""Note decisions for the decision log: every denial, and a sample of the admissions.

A decision never waits for the log. What it notes is a reference to what it has anyway, in a queue with a bound; a
background loop (`sender.py`) encodes and sends it. Beyond the bounds decisions are counted as lost, by the minute.

Most denials repeat one another: a caller over its rate is denied thousands of times a second, from the denial cache.
Denials of one tenant by one policy for one key and reason are one entry for each second, with their number, and the
times of the first and the last.
"""

import random
from collections import deque
from time import perf_counter

from msgspec import Struct

from protocol.check import CheckAnswer, cause_of_denial
from protocol.clock import Clock
from protocol.decision_log.messages import Outcome
from protocol.decision_log.sampling import DEFAULT_RATE, OTHER_POLICIES, hazard_of, is_sampled, rate_of
from protocol.limits.document import PolicyBundle
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.policies import sample_rate
from regional_agent.admission.rules.modes import LOOKS, REFUND
from regional_agent.decision_log.losses import Losses
from regional_agent.store.types import StoreIncarnation

MOST_WAITING = 5_000  # entries: an encoding loop that works takes them several times a second
WINDOW_MS = 1_000

Identity = tuple[object, ...]


class Entry(Struct, gc=False):
    """A decision that waits to be encoded, or equal denials of one window."""

    plan: CheckPlan
    answer: CheckAnswer
    outcome: Outcome
    at_ms: int  # monotonic
    last_ms: int
    epoch: int | None
    latency_us: int | None
    weight: float = 1.0
    count: int = 1


class DecisionRecorder:
    """The log of one agent."""

    def __init__(self, clock: Clock, losses: Losses, rows_per_second: int) -> None:
        """`rows_per_second`: of what is noted in a second, as many rows are kept; 0 keeps none and loses none."""
        self._clock = clock
        self._losses = losses
        self._rows_per_second = rows_per_second
        self._room = rows_per_second
        self._waiting: deque[Entry] = deque()
        self._denials: dict[Identity, Entry] = {}  # of the current window
        self._window_ends_ms = 0
        self._lost = 0  # in the current window
        self._unmatched_hazard = hazard_of(DEFAULT_RATE)  # of requests that no policy matches
        self._equal_hazard: float | None = None  # of all requests, where they have one and there are no shadows
        self._until_sample = random.expovariate(1.0)  # hazard

    def follow(self, bundle: PolicyBundle) -> None:
        """Sample as a bundle says, from now on."""
        policies = bundle.document.policies
        rates = {sample_rate(bundle, name) for name in (OTHER_POLICIES, *(policy.name for policy in policies))}
        self._unmatched_hazard = hazard_of(sample_rate(bundle, OTHER_POLICIES))
        has_shadow = any(policy.shadow for policy in policies)
        self._equal_hazard = None if has_shadow or len(rates) > 1 else self._unmatched_hazard

    def note(
        self, plan: CheckPlan, answer: CheckAnswer, incarnation: StoreIncarnation | None, started_s: float = 0.0
    ) -> None:
        """Note a decision. `started_s` is when it began; 0 where no store was asked."""
        if not answer.allowed:
            self._note_denial(plan, answer, "denied", answer.denied_by, incarnation, started_s)
            return
        hazard = self._equal_hazard
        if hazard is None:
            hazard, has_shadow = self._look_at_policies(plan)
            if has_shadow and self._note_shadow(plan, answer, incarnation, started_s):
                return
        self._until_sample -= hazard
        if self._until_sample <= 0 or plan.request.operation is not None:
            self._sample(plan, answer, hazard, incarnation, started_s)

    def _look_at_policies(self, plan: CheckPlan) -> tuple[float, bool]:
        """Return the highest hazard of the policies that a request meets, and whether one of them is a shadow."""
        hazard, has_shadow = 0.0, False
        for each in plan.policy_charges:
            policy = each.policy
            if policy.hazard > hazard:  # noqa: PLR1730 - max() would cost more than all of this
                hazard = policy.hazard
            if policy.is_shadow:
                has_shadow = True
        if plan.unmatched is not None or not plan.policy_charges:
            hazard = max(hazard, self._unmatched_hazard)
        return hazard, has_shadow

    def _sample(
        self,
        plan: CheckPlan,
        answer: CheckAnswer,
        hazard: float,
        incarnation: StoreIncarnation | None,
        started_s: float,
    ) -> None:
        was_drawn, operation = self._until_sample <= 0, plan.request.operation
        if was_drawn:
            self._until_sample = random.expovariate(1.0)
        rate = rate_of(hazard)
        if not (was_drawn if operation is None else is_sampled(operation.digest, rate)):
            return
        if plan.request.mode in LOOKS or plan.request.mode == REFUND or not rate:
            return
        now_ms = self._clock.monotonic_ms()
        if self._has_room(now_ms):
            entry = Entry(
                plan, answer, "admitted", now_ms, now_ms, _epoch(incarnation), _latency_us(started_s), 1 / rate
            )
            self._waiting.append(entry)

    def _note_shadow(
        self, plan: CheckPlan, answer: CheckAnswer, incarnation: StoreIncarnation | None, started_s: float
    ) -> bool:
        """Note an admission that a shadow policy would have denied, as denials are: each of them counts."""
        for each in answer.policies:
            if each.shadow and not each.allowed:
                self._note_denial(plan, answer, "shadow_denied", each.policy, incarnation, started_s)
                return True
        return False

    def _note_denial(
        self,
        plan: CheckPlan,
        answer: CheckAnswer,
        outcome: Outcome,
        policy: str | None,
        incarnation: StoreIncarnation | None,
        started_s: float,
    ) -> None:
        if plan.request.mode in LOOKS or plan.request.mode == REFUND:
            return
        now_ms, key = self._clock.monotonic_ms(), None
        for each in plan.policy_charges:
            if each.policy.name == policy:
                key = each.charge.quota
                break
        cause = cause_of_denial(answer) or answer.blocked_by
        identity = (policy, key, plan.subject.get("tenant"), cause, outcome)
        known = self._denials.get(identity) if now_ms < self._window_ends_ms else None
        if known is not None:
            known.count += 1
            known.last_ms = now_ms
        elif self._has_room(now_ms):
            entry = Entry(plan, answer, outcome, now_ms, now_ms, _epoch(incarnation), _latency_us(started_s))
            self._denials[identity] = entry
            self._waiting.append(entry)

    def _has_room(self, now_ms: int) -> bool:
        """Return whether another entry may be kept, and begin the next window when it is time. Count a loss if not."""
        if now_ms >= self._window_ends_ms:
            self._window_ends_ms = now_ms + WINDOW_MS
            self._denials = {}
            self._room = self._rows_per_second
            self._report_losses()
        if self._room > 0 and len(self._waiting) < MOST_WAITING:
            self._room -= 1
            return True
        self._lost += 1
        return False

    def take(self, most: int, *, closing: bool = False) -> list[Entry]:
        """Take the oldest entries. Those of the current window may still count more denials, and wait for its end.

        `closing` takes these as well.
        """
        begin_ms = self._window_ends_ms - WINDOW_MS
        is_over = closing or self._clock.monotonic_ms() >= self._window_ends_ms
        taken: list[Entry] = []
        while self._waiting and len(taken) < most and (is_over or self._waiting[0].at_ms < begin_ms):
            taken.append(self._waiting.popleft())
        if is_over:
            self._denials = {}
            self._report_losses()
        return taken

    def _report_losses(self) -> None:
        if self._lost and self._rows_per_second:
            self._losses.add(self._lost, "full")
        self._lost = 0


def _epoch(incarnation: StoreIncarnation | None) -> int | None:
    return None if incarnation is None else incarnation.epoch


def _latency_us(started_s: float) -> int | None:
    return None if not started_s else max(0, int((perf_counter() - started_s) * 1_000_000))
