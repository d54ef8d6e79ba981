"""Admission over the cells of a Cluster: the cell that a request's quotas lie in decides it.

Where they lie in several cells, no script reaches all of them, and the request is decided in two phases. First every
cell is asked with a peek, which takes nothing: most denials are known by that. If all admit it, each cell sets its
units aside with a hold, and when all have, the holds are spent. The holds of an agent that dies run out by themselves;
no total is ever lowered. The caller gets the admission when everything is booked, and never before.

The cell that remembers a request's operation is its coordinating cell. It sets its units aside last, and writes with
them the holds of all other cells, so a retry finds either nothing or all that it needs to continue. When all holds are
spent, the record says so. If a hold ran out before (its agent died), or a cell has lost it, only that one is set aside
anew: what was spent in other cells stays spent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from time import perf_counter
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from protocol.check import Check, Hold, PolicyAnswer
from protocol.identifiers import digest
from protocol.outcomes import HoldOutcome
from regional_agent.admission.answers import Verdict, answer_of, with_unlimited
from regional_agent.admission.blocks import Blocks
from regional_agent.admission.engine import verdict_on
from regional_agent.admission.pending_check import Caller
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.admission.rules.modes import LOOKS, REFUND
from regional_agent.cluster.cell import Cell
from regional_agent.cluster.rules.cells import cell_of, operation_cell
from regional_agent.decision_log.recorder import DecisionRecorder
from regional_agent.metrics import AgentMetrics
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.types import (
    AllowanceCharge,
    Charge,
    KnownOperation,
    Operation,
    OperationConflict,
    StoreRequest,
)
from regional_agent.store_outage.fallback import STRICTEST_FIRST, closed

log = structlog.get_logger()

SPEND_WITHIN_MS = 60_000  # else what a check has set aside is free again


class Step(NamedTuple):
    """The part of a request that one cell decides."""

    number: int
    cell: Cell
    places: tuple[int, ...]  # of its policies among those of the request


Verdicts = Mapping[Step, Verdict]
DecideStep = Callable[[Step], Awaitable[Verdict]]


class MultiCellAdmission:
    def __init__(self, cells: Sequence[Cell], metrics: AgentMetrics, recorder: DecisionRecorder) -> None:
        self._cells = cells
        self._recorder = recorder
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def policies(self) -> Policies | None:
        return self._cells[0].admission.policies

    @property
    def blocks(self) -> Blocks | None:
        return self._cells[0].admission.blocks

    def plan_check(self, check: Check, *, may_lack_fields: bool = False) -> CheckPlan:
        return self._cells[0].admission.plan_check(check, may_lack_fields=may_lack_fields)

    async def decide(self, check: Check) -> Verdict:
        return await verdict_on(self, self.plan_check(check))

    async def hold(self, hold: Hold) -> Verdict:
        return await verdict_on(self, self._cells[0].admission.plan_hold(hold))

    def decide_locally(self, _: CheckPlan) -> Verdict | Exception | None:
        """Return None: what needs no store is known to the engine of the cell that the request lies in."""
        return None

    def decide_in_store(self, plan: CheckPlan, caller: Caller, times: int = 1) -> None:
        self.submit(plan, caller, times)

    def submit(self, plan: CheckPlan, caller: Caller, times: int = 1) -> None:
        numbers = {cell_of(each.charge.quota) for each in plan.policy_charges}
        if len(numbers) > 1:
            plan = drop_foreign_shadows(plan)
            steps = self._steps(plan)
            if len(steps) > 1:
                self._begin_over_cells(plan, steps, caller, times)
                return
            numbers = {steps[0].number}
        cell = self._cells[numbers.pop() if numbers else 0]
        cell.admission.submit(plan, caller, times)

    def _begin_over_cells(self, plan: CheckPlan, steps: list[Step], caller: Caller, times: int) -> None:
        for _ in range(times):
            task = asyncio.get_running_loop().create_task(self._decide_over_cells(plan, steps, caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the requests that are under way; what they have set aside runs out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _steps(self, plan: CheckPlan) -> list[Step]:
        places: dict[int, list[int]] = {}
        for place, each in enumerate(plan.policy_charges):
            places.setdefault(cell_of(each.charge.quota), []).append(place)
        return [Step(number, self._cells[number], tuple(found)) for number, found in sorted(places.items())]

    async def _decide_over_cells(self, plan: CheckPlan, steps: list[Step], caller: Caller) -> None:
        began = perf_counter()
        outcome: Verdict | Exception
        try:
            outcome = await TwoPhaseCheck(plan, steps).decide()
        except (StoreUnavailable, StoreError) as error:
            log.warning("multi-cell check denied: store unavailable", reason=str(error))
            outcome = Verdict(closed(plan.policy_charges), plan.policy_charges)
        except OperationConflict as error:
            outcome = error
        except Exception as error:
            log.exception("multi-cell check failed")
            outcome = error
        if isinstance(outcome, Verdict):
            if plan.unlimited and outcome.answer.blocked_by is None:
                outcome = replace(outcome, answer=with_unlimited(outcome.answer, plan.unlimited))
            self._metrics.checks.note(outcome.answer.policies, plan.request.mode)
            self._recorder.note(plan, outcome.answer, None, began)
            if not outcome.answer.allowed and plan.request.mode not in LOOKS:
                self._metrics.denial_lines.note(plan.subject, outcome.answer, int(began * 1000))
            self._metrics.checks.seconds.observe(perf_counter() - began)
        caller.on_verdict(outcome)


class TwoPhaseCheck:
    """One request over several cells."""

    def __init__(self, plan: CheckPlan, steps: list[Step]) -> None:
        self._plan = plan
        self._steps = steps
        self._coordinator = None if plan.request.operation is None else _coordinating_step(plan, steps)
        self._is_hold = plan.request.mode == "hold"
        self._mode_suffix = "_adjust" if plan.request.mode == "adjust" else ""

    async def decide(self) -> Verdict:
        """Raises StoreUnavailable or StoreError if the outcome is not known."""
        if self._plan.request.mode == REFUND:  # no cell denies it, and each remembers its own part of the operation
            return self._merge(await self._each(self._steps, self._decide_as_requested))
        known = None if self._coordinator is None else await self._coordinator.cell.find_operation(self._operation())
        if known is not None:
            return await self._resume(known)
        peeks = await self._each(self._steps, self._peek)
        if self._plan.request.mode == "peek" or not _all_admit(peeks):
            return self._merge(peeks)
        taken = await self._hold_in_other_cells(peeks)
        if not _all_admit(taken):
            return await self._give_up(peeks, taken)
        if self._coordinator is None:
            await self._conclude(_ids(taken))
            return self._merge(taken)
        return await self._conclude_at(self._coordinator, peeks, taken)

    async def _hold_in_other_cells(self, peeks: Verdicts) -> dict[Step, Verdict]:
        """Set units aside in all cells but the coordinating one.

        Cells whose store is unavailable apply `on_store_failure`, and come last: that cannot be taken back.
        """
        steps = [step for step in self._steps if step != self._coordinator]
        away = [step for step in steps if peeks[step].answer.degraded]
        taken = await self._each([step for step in steps if step not in away], self._set_aside)
        return taken | await self._each(away, self._decide_as_requested) if _all_admit(taken) else taken

    async def _conclude_at(self, coordinator: Step, peeks: Verdicts, taken: dict[Step, Verdict]) -> Verdict:
        """Set aside in the coordinating cell, which writes the operation's record, and spend all holds."""
        siblings = _ids(taken)
        verdict = await self._set_aside(coordinator, self._operation(), siblings)
        if verdict.answer.degraded:  # the record may be written, and a retry may use it: the holds are left to run out
            raise StoreUnavailable("the coordinating cell of the operation became unavailable")
        if verdict.hold is not None and verdict.hold.id.others != siblings:
            await self._release(taken)  # another request with the same operation was quicker
            return await self._resume(KnownOperation(verdict.hold, is_concluded=False))
        taken[coordinator] = verdict
        if verdict.hold is None:
            return await self._give_up(peeks, taken)
        await self._conclude([verdict.hold.id])
        return self._merge(taken)

    # --- one cell -----------------------------------------------------------------------------------------------------

    async def _each(self, steps: Iterable[Step], decide: DecideStep) -> dict[Step, Verdict]:
        """Decide several steps at once. An exception of one is raised when all have ended."""
        steps = list(steps)
        results = await asyncio.gather(*map(decide, steps), return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return {step: each for step, each in zip(steps, results, strict=True) if not isinstance(each, BaseException)}

    async def _peek(self, step: Step) -> Verdict:
        return await self._decide_step(step, StoreRequest(f"peek{self._mode_suffix}", self._charges(step)))

    async def _set_aside(
        self, step: Step, operation: Operation | None = None, siblings: tuple[HoldId, ...] = ()
    ) -> Verdict:
        hold_ms, charges = self._plan.hold_ms, self._charges(step)
        if hold_ms is None:
            hold_ms, charges = SPEND_WITHIN_MS, tuple(map(_released, charges))
        request = StoreRequest(f"hold{self._mode_suffix}", charges, operation)
        return await self._decide_step(step, request, hold_ms, siblings)

    async def _decide_as_requested(self, step: Step) -> Verdict:
        request = self._plan.request
        request = StoreRequest(request.mode, self._charges(step), request.operation)
        return await self._decide_step(step, request, self._plan.hold_ms)

    async def _decide_step(
        self, step: Step, request: StoreRequest, hold_ms: int | None = None, siblings: tuple[HoldId, ...] = ()
    ) -> Verdict:
        plan = replace(
            self._plan,
            policy_charges=[self._plan.policy_charges[place] for place in step.places],
            request=request,
            unlimited=(),  # they are added to the whole answer
            hold_ms=hold_ms,
            sibling_holds=siblings,
            is_subrequest=True,
        )
        return await verdict_on(step.cell.admission, plan)

    def _charges(self, step: Step) -> tuple[Charge, ...]:
        return tuple(self._plan.request.charges[place] for place in step.places)

    def _operation(self) -> Operation:
        """Return the operation under another body: its record names other cells, so no single cell may replay it."""
        operation = self._plan.request.operation
        assert operation is not None
        return operation._replace(body=digest(["several cells", operation.body]))

    # --- the outcome --------------------------------------------------------------------------------------------------

    async def _give_up(self, peeks: Verdicts, taken: Verdicts) -> Verdict:
        """Release all holds: another request took the units between peek and hold."""
        await self._release(taken)
        return self._merge({**peeks, **{step: each for step, each in taken.items() if not each.answer.allowed}})

    async def _release(self, taken: Verdicts) -> None:
        """Release what is set aside. What cannot be released runs out, and units of windows stay taken until then."""
        for step, verdict in taken.items():
            if verdict.answer.allowed and not verdict.answer.degraded:
                step.cell.admission.return_units(self._charges(step))
        releases = (self._cell(each).update_hold(each, "release") for hold in _ids(taken) for each in hold.by_cell)
        await asyncio.gather(*releases, return_exceptions=True)

    async def _conclude(self, holds: Sequence[HoldId]) -> None:
        """Spend all holds of a check. Raises StoreUnavailable if it is not known whether all were spent."""
        if self._is_hold:
            return
        if await self._spend(holds):
            raise StoreUnavailable("a hold of a multi-cell check has run out")
        if self._coordinator is not None:
            await self._note_concluded(self._coordinator, holds[0])

    async def _note_concluded(self, coordinator: Step, hold: HoldId) -> None:
        """Record that all holds are spent. Where that fails, a retry finds it out in each cell."""
        with suppress(StoreUnavailable, StoreError):
            await coordinator.cell.replace_operation(self._operation(), hold, hold, is_concluded=True)

    async def _resume(self, known: KnownOperation) -> Verdict:
        """Finish an operation that was decided before, and return its policies as they are now."""
        assert self._coordinator is not None
        if not self._is_hold and not known.is_concluded:
            missing = await self._spend([known.hold.id])
            if missing:
                return await self._hold_again(self._coordinator, known, missing)
            await self._note_concluded(self._coordinator, known.hold.id)
        return await self._admitted(known.hold)

    async def _admitted(self, hold: HoldTerms) -> Verdict:
        return self._merge(await self._each(self._steps, self._peek), admitted=hold)

    async def _hold_again(self, coordinator: Step, known: KnownOperation, missing: Sequence[HoldId]) -> Verdict:
        """Set aside anew what ran out or was lost before it was spent. The record names it before it is spent."""
        cells = set(map(_cell_of, missing))
        peeks = await self._each(self._steps, self._peek)
        verdicts = {step: each if step.number in cells else _as_admitted(each) for step, each in peeks.items()}
        if not _all_admit(verdicts):
            return self._merge(verdicts)
        taken = await self._each([step for step in self._steps if step.number in cells], self._set_aside)
        if not _all_admit(taken) or any(each.answer.degraded for each in taken.values()):
            return await self._give_up(verdicts, taken)
        hold = _with_new_parts(known.hold.id, _ids(taken))
        operation = self._operation()
        if not await coordinator.cell.replace_operation(operation, known.hold.id, hold, is_concluded=False):
            await self._release(taken)
            raise StoreUnavailable("another request with the same operation is being decided")
        await self._conclude([hold])
        return await self._admitted(known.hold._replace(id=hold))

    async def _spend(self, holds: Iterable[HoldId]) -> list[HoldId]:
        """Spend the holds in each cell. Return those that could not be spent: they ran out, or their cell lost them."""
        parts = [each for hold in holds for each in hold.by_cell]
        outcomes = await asyncio.gather(
            *(self._cell(each).update_hold(each, "spend") for each in parts), return_exceptions=True
        )
        missing = []
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome.outcome is not HoldOutcome.DONE:
                missing.append(part)
        return missing

    def _cell(self, hold: HoldId) -> Cell:
        return next(step.cell for step in self._steps if step.number == _cell_of(hold))

    def _merge(self, verdicts: Verdicts, admitted: HoldTerms | None = None) -> Verdict:
        """Return one verdict from those of the cells, with the policies in the order of the request."""
        blocked = next((each for each in verdicts.values() if each.answer.blocked_by is not None), None)
        if blocked is not None:
            return blocked
        by_place = {
            place: answer
            for step, each in verdicts.items()
            for place, answer in zip(step.places, each.answer.policies, strict=True)
        }
        policies = [by_place[place] for place in sorted(by_place)]
        if admitted is not None:
            policies = list(map(_allowed, policies))
        modes = [each.answer.degraded for each in verdicts.values()]
        degraded = next((mode.value for mode in STRICTEST_FIRST if mode.value in modes), None)
        is_allowed = admitted is not None or _all_admit(verdicts)
        hold = (admitted or self._merge_holds(verdicts)) if self._is_hold and is_allowed else None
        return Verdict(answer_of(is_allowed, degraded, policies), self._plan.policy_charges, hold)

    def _merge_holds(self, verdicts: Verdicts) -> HoldTerms | None:
        """Return the coordinating cell's hold, which names all others, with the shortest time to live of all."""
        terms = [each.hold for each in verdicts.values() if each.hold is not None]
        hold = None if self._coordinator is None else verdicts[self._coordinator].hold
        return None if hold is None else hold._replace(ttl_ms=min(each.ttl_ms for each in terms))


def drop_foreign_shadows(plan: CheckPlan) -> CheckPlan:
    """Leave out shadow policies that lie in another cell than all enforced ones: no cell is asked only for a shadow."""
    enforced = [each for each in plan.policy_charges if not each.is_shadow] or plan.policy_charges[:1]
    cells = {cell_of(each.charge.quota) for each in enforced}
    kept = [not each.is_shadow or {cell_of(each.charge.quota)} == cells for each in plan.policy_charges]
    if all(kept):
        return plan
    mode, charges, operation = plan.request.mode, plan.request.charges, plan.request.operation
    request = StoreRequest(mode, tuple(compress(charges, kept)), operation)
    return replace(plan, policy_charges=list(compress(plan.policy_charges, kept)), request=request)


def _coordinating_step(plan: CheckPlan, steps: Sequence[Step]) -> Step:
    """Return the tenant's cell, if one of the quotas lies there; else the first."""
    wanted = operation_cell(plan.subject.get("tenant", ""))
    return next((step for step in steps if step.number == wanted), steps[0])


def _all_admit(verdicts: Verdicts) -> bool:
    return all(each.answer.allowed for each in verdicts.values())


def _ids(taken: Verdicts) -> tuple[HoldId, ...]:
    return tuple(each.hold.id for each in taken.values() if each.hold is not None)


def _cell_of(hold: HoldId) -> int:
    return cell_of(hold.parts[0].quota)


def _with_new_parts(hold: HoldId, taken: Iterable[HoldId]) -> HoldId:
    """Return a hold whose parts in some cells are replaced by what was set aside there anew."""
    new = {_cell_of(each): each for each in taken if each.parts}
    first, *others = (
        new.get(_cell_of(each), each) if each.parts else each for each in (hold._replace(others=()), *hold.others)
    )
    return first._replace(others=tuple(others))


def _as_admitted(verdict: Verdict) -> Verdict:
    answer = answer_of(True, verdict.answer.degraded, list(map(_allowed, verdict.answer.policies)))
    return Verdict(answer, verdict.policy_charges, verdict.hold)


def _released(charge: Charge) -> Charge:
    """Return the charge of a check: its hold lasts a moment only, and when it runs out no work was done."""
    return replace(charge, on_hold_expiry="release") if isinstance(charge, AllowanceCharge) else charge


def _allowed(answer: PolicyAnswer) -> PolicyAnswer:
    return replace(answer, allowed=True, retry_after_ms=0, reason=None)
