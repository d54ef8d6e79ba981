"""Admission over the cells of a Cluster: each request is decided by the cell that its policies lie in.

Where they lie in several, no script reaches all of them. Then every cell is asked first, and nothing is taken: mostly a
denial is known by that. If all agree, each sets aside what it has to give; and only when all have, it is spent. What an
agent that dies has set aside runs out by itself; no total is ever lowered. The caller is told that it is admitted when
everything is booked, and never before.

Of an operation the cell where it is known, its home, sets aside last, and writes down with it what all the others did.
So a retry either finds nothing, or all that is needed to go on. When everything is spent, that is written down as well.
If something ran out before (its agent died), or a cell has lost it, only that is set aside anew: what was spent of the
operation in other cells stays spent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from time import perf_counter
from typing import NamedTuple

import msgspec
import structlog

from protocol.check import Check, Hold, PolicyAnswer
from protocol.outcomes import HoldOutcome
from regional_agent.admission.blocks import Blocks
from regional_agent.admission.engine import Asked, OnVerdict, verdict_on
from regional_agent.admission.policies import Policies, digest
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.admission.rules.modes import LOOKS
from regional_agent.cluster.cell import Cell
from regional_agent.cluster.rules.cells import cell_of, home_of
from regional_agent.http.schemas import Verdict, answer_of
from regional_agent.metrics import Metrics
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

SPENT_WITHIN_MS = 60_000  # else what a check has set aside is free again


class Step(NamedTuple):
    """What one cell decides of a request."""

    number: int
    cell: Cell
    places: tuple[int, ...]  # of its policies, among those of the request


Told = Mapping[Step, Verdict]
Ask = Callable[[Step], Awaitable[Verdict]]


class SpreadAdmission:
    def __init__(self, cells: Sequence[Cell], metrics: Metrics) -> None:
        self._cells = cells
        self._metrics = metrics
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def policies(self) -> Policies | None:
        return self._cells[0].admission.policies

    @property
    def blocks(self) -> Blocks | None:
        return self._cells[0].admission.blocks

    def asked(self, check: Check) -> Asked:
        return self._cells[0].admission.asked(check)

    async def decide(self, check: Check) -> Verdict:
        return await verdict_on(self, self.asked(check))

    async def hold(self, hold: Hold) -> Verdict:
        return await verdict_on(self, self._cells[0].admission.asked_to_hold(hold))

    def known(self, _: Asked) -> Verdict | Exception | None:
        """What is known without a store is known where the request lies."""
        return None

    def ask(self, asked: Asked, on_verdict: OnVerdict, times: int = 1) -> None:
        self.submit(asked, on_verdict, times)

    def submit(self, asked: Asked, on_verdict: OnVerdict, times: int = 1) -> None:
        asked = without_strangers(asked)
        steps = self._steps(asked)
        if len(steps) <= 1:
            cell = steps[0].cell if steps else self._cells[0]
            cell.admission.submit(asked, on_verdict, times)
            return
        for _ in range(times):
            task = asyncio.get_running_loop().create_task(self._over(asked, steps, on_verdict))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """What is under way is given up, and runs out."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _steps(self, asked: Asked) -> list[Step]:
        places: dict[int, list[int]] = {}
        for place, each in enumerate(asked.demanded):
            places.setdefault(cell_of(each.charge.quota), []).append(place)
        return [Step(number, self._cells[number], tuple(found)) for number, found in sorted(places.items())]

    async def _over(self, asked: Asked, steps: list[Step], on_verdict: OnVerdict) -> None:
        began = perf_counter()
        outcome: Verdict | Exception
        try:
            outcome = await Spanning(asked, steps).decide()
        except (StoreUnavailable, StoreError) as error:
            log.warning("a request over several cells is denied", reason=str(error))
            outcome = Verdict(closed(asked.demanded), asked.windows)
        except OperationConflict as error:
            outcome = error
        except Exception as error:
            log.exception("a request over several cells failed")
            outcome = error
        if isinstance(outcome, Verdict):
            self._metrics.checks.note(outcome.answer.policies)
            if not outcome.answer.allowed and asked.request.mode not in LOOKS:
                self._metrics.decision_log.note(asked.subject, outcome.answer, int(began * 1000))
            self._metrics.checks.seconds.observe(perf_counter() - began)
        on_verdict(outcome)


class Spanning:
    """One request over several cells, on its way."""

    def __init__(self, asked: Asked, steps: list[Step]) -> None:
        self._asked = asked
        self._steps = steps
        self._home = None if asked.request.operation is None else _home(asked, steps)
        self._holds = asked.request.mode == "hold"
        self._beyond = "_adjust" if asked.request.mode == "adjust" else ""

    async def decide(self) -> Verdict:
        """Raises StoreUnavailable or StoreError if it is not known what came of it."""
        known = None if self._home is None else await self._home.cell.find_operation(self._operation())
        if known is not None:
            return await self._go_on(known)
        peeks = await self._each(self._steps, self._peek)
        if self._asked.request.mode == "peek" or not _all_agree(peeks):
            return self._merged(peeks)
        taken = await self._take_but_home(peeks)
        if not _all_agree(taken):
            return await self._give_up(peeks, taken)
        if self._home is None:
            await self._conclude(_ids(taken))
            return self._merged(taken)
        return await self._conclude_at(self._home, peeks, taken)

    async def _take_but_home(self, peeks: Told) -> dict[Step, Verdict]:
        """Where a store is away its policies answer by their failure modes, and last: they cannot take that back."""
        steps = [step for step in self._steps if step != self._home]
        away = [step for step in steps if peeks[step].answer.degraded]
        taken = await self._each([step for step in steps if step not in away], self._set_aside)
        return taken | await self._each(away, self._without_store) if _all_agree(taken) else taken

    async def _conclude_at(self, home: Step, peeks: Told, taken: dict[Step, Verdict]) -> Verdict:
        """From here on the operation is known, with all that is set aside for it."""
        beside = _ids(taken)
        verdict = await self._take(home, beside)
        if verdict.answer.degraded:  # it may be known, and is said again: so what is set aside is left to run out
            raise StoreUnavailable("the cell where the operation is known went away")
        if verdict.hold is not None and verdict.hold.id.others != beside:
            await self._release(taken)  # another request with the same operation was quicker
            return await self._go_on(KnownOperation(verdict.hold, is_concluded=False))
        taken[home] = verdict
        if verdict.hold is None:
            return await self._give_up(peeks, taken)
        await self._conclude([verdict.hold.id])
        return self._merged(taken)

    # --- what a cell is asked ----------------------------------------------------------------------------------------

    async def _each(self, steps: Iterable[Step], ask: Ask) -> dict[Step, Verdict]:
        """All at once; whatever one of them raises is raised when all are told."""
        steps = list(steps)
        told = await asyncio.gather(*map(ask, steps), return_exceptions=True)
        for each in told:
            if isinstance(each, BaseException):
                raise each
        return {step: each for step, each in zip(steps, told, strict=True) if not isinstance(each, BaseException)}

    async def _peek(self, step: Step) -> Verdict:
        return await self._ask(step, StoreRequest(f"peek{self._beyond}", self._charges(step)))

    async def _set_aside(
        self, step: Step, operation: Operation | None = None, beside: tuple[HoldId, ...] = ()
    ) -> Verdict:
        lasts_ms, charges = self._asked.hold_ms, self._charges(step)
        if lasts_ms is None:
            lasts_ms, charges = SPENT_WITHIN_MS, tuple(map(_released, charges))
        return await self._ask(step, StoreRequest(f"hold{self._beyond}", charges, operation), lasts_ms, beside)

    async def _without_store(self, step: Step) -> Verdict:
        request = self._asked.request
        return await self._ask(step, request._replace(charges=self._charges(step)), self._asked.hold_ms)

    async def _take(self, home: Step, beside: tuple[HoldId, ...]) -> Verdict:
        return await self._set_aside(home, self._operation(), beside)

    async def _ask(
        self, step: Step, request: StoreRequest, hold_ms: int | None = None, beside: tuple[HoldId, ...] = ()
    ) -> Verdict:
        asked = self._asked._replace(
            demanded=[self._asked.demanded[place] for place in step.places],
            request=request,
            windows=[self._asked.windows[place] for place in step.places],
            hold_ms=hold_ms,
            beside=beside,
            is_step=True,
        )
        return await verdict_on(step.cell.admission, asked)

    def _charges(self, step: Step) -> tuple[Charge, ...]:
        return tuple(self._asked.request.charges[place] for place in step.places)

    def _operation(self) -> Operation:
        """What is written down of it names other cells, so it is no operation that a single one can answer."""
        operation = self._asked.request.operation
        assert operation is not None
        return operation._replace(body=digest(["several cells", operation.body]))

    # --- what comes of it --------------------------------------------------------------------------------------------

    async def _give_up(self, peeks: Told, taken: Told) -> Verdict:
        """Somebody else took it between the two questions."""
        await self._release(taken)
        return self._merged({**peeks, **{step: each for step, each in taken.items() if not each.answer.allowed}})

    async def _release(self, taken: Told) -> None:
        """Where that fails it runs out; of rates that cannot have it back the units stay taken for their window."""
        for step, verdict in taken.items():
            if verdict.answer.allowed and not verdict.answer.degraded:
                step.cell.admission.give_back(self._charges(step))
        tellings = (self._cell(each).update_hold(each, "release") for hold in _ids(taken) for each in hold.by_cell)
        await asyncio.gather(*tellings, return_exceptions=True)

    async def _conclude(self, holds: Sequence[HoldId]) -> None:
        """Spend all that is set aside. Raises StoreUnavailable if it is not known whether all of it was."""
        if self._holds:
            return
        if await self._spend(holds):
            raise StoreUnavailable("what was set aside in one of several cells has run out")
        if self._home is not None:
            await self._note_concluded(self._home, holds[0])

    async def _note_concluded(self, home: Step, hold: HoldId) -> None:
        """Write down that all is spent. Where that fails, a retry finds it out in each cell."""
        with suppress(StoreUnavailable, StoreError):
            await home.cell.replace_operation(self._operation(), hold, hold, is_concluded=True)

    async def _go_on(self, known: KnownOperation) -> Verdict:
        """Finish an operation that was decided before, and tell its policies as they are now."""
        assert self._home is not None
        if not self._holds and not known.is_concluded:
            missing = await self._spend([known.hold.id])
            if missing:
                return await self._take_again(self._home, known, missing)
            await self._note_concluded(self._home, known.hold.id)
        return await self._admitted(known.hold)

    async def _admitted(self, hold: HoldTerms) -> Verdict:
        return self._merged(await self._each(self._steps, self._peek), admitted=hold)

    async def _take_again(self, home: Step, known: KnownOperation, missing: Sequence[HoldId]) -> Verdict:
        """Set aside anew what ran out before it was spent, or was lost; the record names it before it is spent."""
        cells = set(map(_cell_of, missing))
        peeks = await self._each(self._steps, self._peek)
        told = {step: each if step.number in cells else _as_admitted(each) for step, each in peeks.items()}
        if not _all_agree(told):
            return self._merged(told)
        taken = await self._each([step for step in self._steps if step.number in cells], self._set_aside)
        if not _all_agree(taken) or any(each.answer.degraded for each in taken.values()):
            return await self._give_up(told, taken)
        hold = _with_new_parts(known.hold.id, _ids(taken))
        operation = self._operation()
        if not await home.cell.replace_operation(operation, known.hold.id, hold, is_concluded=False):
            await self._release(taken)
            raise StoreUnavailable("another request with the same operation is being decided")
        await self._conclude([hold])
        return await self._admitted(known.hold._replace(id=hold))

    async def _spend(self, holds: Iterable[HoldId]) -> list[HoldId]:
        """Spend what is set aside in each cell. Return what could not be spent: it ran out, or its cell has lost it."""
        parts = [each for hold in holds for each in hold.by_cell]
        outcomes = await asyncio.gather(
            *(self._cell(each).update_hold(each, "spend") for each in parts), return_exceptions=True
        )
        missing = []
        for part, told in zip(parts, outcomes, strict=True):
            if isinstance(told, BaseException):
                raise told
            if told.outcome is not HoldOutcome.DONE:
                missing.append(part)
        return missing

    def _cell(self, hold: HoldId) -> Cell:
        return next(step.cell for step in self._steps if step.number == _cell_of(hold))

    def _merged(self, told: Told, admitted: HoldTerms | None = None) -> Verdict:
        """What each cell says of its policies, in the order of the request."""
        blocked = next((each for each in told.values() if each.answer.blocked_by is not None), None)
        if blocked is not None:
            return blocked
        by_place = {
            place: answer
            for step, each in told.items()
            for place, answer in zip(step.places, each.answer.policies, strict=True)
        }
        policies = [by_place[place] for place in sorted(by_place)]
        if admitted is not None:
            policies = list(map(_allowed, policies))
        modes = [each.answer.degraded for each in told.values()]
        degraded = next((mode.value for mode in STRICTEST_FIRST if mode.value in modes), None)
        is_allowed = admitted is not None or _all_agree(told)
        hold = (admitted or self._held(told)) if self._holds and is_allowed else None
        return Verdict(answer_of(is_allowed, degraded, policies), self._asked.windows, hold)

    def _held(self, told: Told) -> HoldTerms | None:
        """The home's, which names all of them, for as long as the first of them lasts."""
        terms = [each.hold for each in told.values() if each.hold is not None]
        home = None if self._home is None else told[self._home].hold
        return None if home is None else home._replace(ttl_ms=min(each.ttl_ms for each in terms))


def without_strangers(asked: Asked) -> Asked:
    """Less the shadows that do not lie with all that is enforced: no cell is asked for their sake."""
    enforced = [each for each in asked.demanded if not each.is_shadow] or asked.demanded[:1]
    cells = {cell_of(each.charge.quota) for each in enforced}
    kept = [not each.is_shadow or {cell_of(each.charge.quota)} == cells for each in asked.demanded]
    if all(kept):
        return asked
    return asked._replace(
        demanded=list(compress(asked.demanded, kept)),
        request=asked.request._replace(charges=tuple(compress(asked.request.charges, kept))),
        windows=list(compress(asked.windows, kept)),
    )


def _home(asked: Asked, steps: Sequence[Step]) -> Step:
    """The tenant's cell, if one of the policies lies there; else the first."""
    wanted = home_of(asked.subject.get("tenant", ""))
    return next((step for step in steps if step.number == wanted), steps[0])


def _all_agree(told: Told) -> bool:
    return all(each.answer.allowed for each in told.values())


def _ids(taken: Told) -> tuple[HoldId, ...]:
    return tuple(each.hold.id for each in taken.values() if each.hold is not None)


def _cell_of(hold: HoldId) -> int:
    return cell_of(hold.parts[0].quota)


def _with_new_parts(hold: HoldId, taken: Iterable[HoldId]) -> HoldId:
    """Return a hold whose parts in some cells are replaced by what was set aside there anew."""
    new = {_cell_of(each): each for each in taken if each.parts}
    home, *others = (
        new.get(_cell_of(each), each) if each.parts else each for each in (hold._replace(others=()), *hold.others)
    )
    return home._replace(others=tuple(others))


def _as_admitted(verdict: Verdict) -> Verdict:
    answer = answer_of(True, verdict.answer.degraded, list(map(_allowed, verdict.answer.policies)))
    return Verdict(answer, verdict.windows, verdict.hold)


def _released(charge: Charge) -> Charge:
    """A check sets aside for a moment only, and nobody did any work by it."""
    return charge._replace(on_hold_expiry="release") if isinstance(charge, AllowanceCharge) else charge


def _allowed(answer: PolicyAnswer) -> PolicyAnswer:
    return msgspec.structs.replace(answer, allowed=True, retry_after_ms=0, reason=None)
