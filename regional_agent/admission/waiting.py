"""Requests that wait for units: a lease that is refilled, or an answer of the coordinator for a central quota."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from protocol.clock import Clock
from protocol.outcomes import DenialReason
from regional_agent.admission.pending_check import PendingCheck
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.policies import PolicyCharge
from regional_agent.leasing.quota import MAY_RETRY, GrantAnswer
from regional_agent.leasing.quotas import Quotas
from regional_agent.metrics import AgentMetrics
from regional_agent.store.types import Outcome, StoreDecision

# Denials that more units, or a renewed lease, may turn into an admission.
WORTH_WAITING = {DenialReason.NO_LEASE, DenialReason.LEASE_EXPIRED, DenialReason.LEASE_SPENT}


class CoordinatorNotReached(Exception):
    """The coordinator did not answer a request for units of a central quota."""


class WaitForUnits:
    """Few requests wait, and they are in no hurry: each has a task."""

    def __init__(
        self,
        quotas: Quotas,
        metrics: AgentMetrics,
        clock: Clock,
        decide_in_store: Callable[[CheckPlan], Awaitable[Outcome]],
    ) -> None:
        self._quotas = quotas
        self._metrics = metrics
        self._clock = clock
        self._decide_in_store = decide_in_store
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, pending: PendingCheck, outcome: Outcome, on_outcome: Callable[[PendingCheck, Outcome], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._wait(pending, outcome, on_outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all requests that wait."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def missing(self, plan: CheckPlan, outcome: Outcome) -> PolicyCharge | None:
        """Return the allowance to wait for; None if waiting does not help, or another policy denies the request.

        A central quota comes last, when nothing else is missing.
        """
        if not isinstance(outcome, StoreDecision) or outcome.allowed:
            return None
        return min(self._all_missing(plan, outcome), key=lambda each: each.policy.is_central, default=None)

    def _all_missing(self, plan: CheckPlan, outcome: Outcome) -> list[PolicyCharge]:
        if not isinstance(outcome, StoreDecision) or outcome.allowed:
            return []
        pairs = zip(plan.policy_charges, outcome.policies, strict=True)
        denials = [(each, policy) for each, policy in pairs if not (policy.allowed or each.is_shadow)]
        if any(policy.reason not in WORTH_WAITING for _, policy in denials):
            return []
        may_wait = self._quotas.may_wait
        return [each for each, _ in denials if each.policy.is_central or may_wait(each.charge.quota)]

    async def _wait(
        self, pending: PendingCheck, outcome: Outcome, on_outcome: Callable[[PendingCheck, Outcome], None]
    ) -> None:
        """Ask the store again whenever the quota gains units, for as long as its policy lets a request wait."""
        deadline_ms: int | None = None
        while (missing := self.missing(pending.plan, outcome)) is not None:
            if missing.policy.is_central:
                outcome = await self._ask_coordinator(pending, outcome)
                break
            now_ms = self._clock.monotonic_ms()
            deadline_ms = now_ms + missing.policy.wait_ms if deadline_ms is None else deadline_ms
            if now_ms >= deadline_ms:
                break
            self._metrics.waits.inc()
            await self._quotas.wait(missing.charge.quota, missing.charge.cost, deadline_ms - now_ms)
            outcome = await self._decide_in_store(pending.plan)
        on_outcome(pending, outcome)

    async def _ask_coordinator(self, pending: PendingCheck, outcome: Outcome) -> Outcome:
        """Ask for units of central quotas, for as long as their policies let a request wait."""
        plan, began_ms, was_answered = pending.plan, self._clock.monotonic_ms(), False
        while missing := self._central(self._all_missing(plan, outcome)):
            left_ms = began_ms + min(each.policy.wait_ms for each in missing) - self._clock.monotonic_ms()
            asks = (
                self._quotas.request_units(each.charge.quota, each.charge.cost, left_ms, again=was_answered)
                for each in missing
            )
            answers = await asyncio.gather(*asks)
            granted = [each for each, answer in zip(missing, answers, strict=True) if answer in MAY_RETRY]
            try:
                if len(granted) < len(missing):
                    return outcome if was_answered else CoordinatorNotReached()
                if pending.is_cancelled():
                    return outcome
                was_answered, outcome = True, await self._decide_in_store(plan)
                if GrantAnswer.LAST_RETRY in answers:
                    return outcome
            finally:
                for each in granted:
                    self._quotas.finish_attempt(each.charge.quota)
        return outcome

    def _central(self, missing: Sequence[PolicyCharge]) -> list[PolicyCharge]:
        """Return all central ones: units that were granted for one would go back while another is asked for."""
        return [each for each in missing if each.policy.is_central]
