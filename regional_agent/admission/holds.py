"""Actions on holds: commit, release, extend, or look.

An agent keeps no state of holds. A hold's id names the leases that its units were set aside of, and the store's script
decides, so any agent of the region can act on it, also when its period or epoch is over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog

from protocol.check import NO_COSTS, HeldQuota, HoldCommit, HoldStatus
from protocol.identifiers import name_of_quota
from protocol.outcomes import HoldOutcome
from regional_agent.admission.rules.ceilings import allowance_ceiling
from regional_agent.admission.rules.hold_ids import HoldId, HoldPart, HoldSeal, NoHoldKey
from regional_agent.cluster.cell import Cell
from regional_agent.http.callers import adjust_forbidden
from regional_agent.metrics import AgentMetrics
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.types import SHADOW, HoldState, PartUnits
from web.problems import InvalidParameter, Problem

log = structlog.get_logger()


class CellState(NamedTuple):
    """The state of a hold in one cell."""

    hold: HoldId
    state: HoldState

    @property
    def parts(self) -> Iterator[tuple[HoldPart, PartUnits]]:
        yield from zip(self.hold.parts, self.state.parts, strict=False)  # without any where the cell has forgotten it


class Holds:
    def __init__(
        self,
        cell_of: Callable[[str], Cell],
        seal: HoldSeal,
        metrics: AgentMetrics,
        limit_of: Callable[[str], int | None],
        adjust_ceiling: int,
    ) -> None:
        """`cell_of`: the cell of a quota. `limit_of`: the limit of an allowance, where it is known."""
        self._limit_of = limit_of
        self._adjust_ceiling = adjust_ceiling
        self._cell_of = cell_of
        self.seal = seal
        self._metrics = metrics

    async def update(self, hold_id: str, action: str, amount: int = 0) -> HoldStatus:
        """Apply `release`, `extend` by so many ms, or `look`. Raises Problem."""
        return await self._apply(hold_id, self._opened(hold_id), action, amount)

    async def commit(self, hold_id: str, commit: HoldCommit, *, may_exceed: bool = True) -> HoldStatus:
        """Commit the units that were used. Raises Problem.

        `may_exceed`: the caller may commit more than the hold has set aside.
        """
        hold, costs = self._opened(hold_id), commit.costs or NO_COSTS
        if commit.units is None and not costs:
            raise _invalid("units", "required", "give the units that were used, or `costs` by quota")
        if hold.by_cell:
            _refuse_unknown_quotas(hold, costs)
            await self._refuse_excess(hold, commit, may_exceed=may_exceed)
        return await self._apply(hold_id, hold, "commit", commit.units, costs)

    async def _apply(
        self, hold_id: str, hold: HoldId, action: str, amount: int | None, costs: Mapping[str, int] = NO_COSTS
    ) -> HoldStatus:
        if not hold.by_cell:
            return HoldStatus(hold_id=hold_id, state="nothing_held", units=0, committed=0, expires_in_ms=0)
        states = await self._ask_store(hold, action, amount, costs)
        found = merge_states(states)
        self._metrics.holds.labels(action, found.outcome.value).inc()
        if found.outcome is not HoldOutcome.DONE:
            raise self._refusal(hold, found, action, amount)
        return HoldStatus(
            hold_id=hold_id,
            state=found.state,  # type: ignore[arg-type]  # the states of lua/hold.lua
            units=found.units,
            committed=found.committed,
            expires_in_ms=found.expires_in_ms,
            quotas=[
                HeldQuota(quota=name_of_quota(part.quota), units=held.units, committed=held.committed)
                for each in states
                for part, held in each.parts
                if not part.algorithm.startswith(SHADOW)
            ],
        )

    def _opened(self, hold_id: str) -> HoldId:
        try:
            return self.seal.open(hold_id)
        except ValueError:
            raise _unknown() from None
        except NoHoldKey:
            raise _no_key() from None

    def require_key(self) -> None:
        """Raise a Problem while no id could be sealed, before anything is set aside."""
        try:
            _ = self.seal.cipher
        except NoHoldKey:
            raise _no_key() from None

    async def _refuse_excess(self, hold: HoldId, commit: HoldCommit, *, may_exceed: bool) -> None:
        """Refuse a commit beyond the hold that is above the ceiling, or whose caller may not book beyond limits."""
        wanted = {part: _units_of(commit, part) for each in hold.by_cell for part in each.parts if _is_booked(part)}
        if all(units is None or (may_exceed and units <= self._ceiling(part)) for part, units in wanted.items()):
            return
        states = await self._ask_store(hold, "look", 0)
        if merge_states(states).outcome is not HoldOutcome.DONE:
            return
        for part, held in (pair for each in states for pair in each.parts if _is_booked(pair[0])):
            units = wanted[part]
            if units is None or units <= held.units:
                continue
            if not may_exceed:
                raise adjust_forbidden()
            ceiling = max(self._ceiling(part), held.units * self._adjust_ceiling)
            if units > ceiling:
                name = name_of_quota(part.quota)
                field = f"costs.{name}" if name in (commit.costs or NO_COSTS) else "units"
                raise _invalid(field, "maximum", f"one commit may book at most {ceiling} units: see adjust_ceiling")

    def _ceiling(self, part: HoldPart) -> int:
        return allowance_ceiling(self._limit_of(part.quota) or 1, self._adjust_ceiling)

    async def _ask_store(
        self, hold: HoldId, action: str, amount: int | None, costs: Mapping[str, int] = NO_COSTS
    ) -> list[CellState]:
        """Apply the action in each cell of the hold. A cell that has applied it already changes nothing."""
        try:
            return [
                CellState(each, await self._cell_of(each.parts[0].quota).update_hold(each, action, amount, costs))
                for each in hold.by_cell
            ]
        except (StoreUnavailable, StoreError) as error:
            raise _unavailable(str(error)) from error

    def _refusal(self, hold: HoldId, found: HoldState, action: str, amount: int | None) -> Problem:
        if found.outcome is HoldOutcome.ENDED:
            state = {"state": found.state, "committed": found.committed}
            return Problem("hold-ended", f"the hold is {found.state}: it cannot {action} now", extra=state)
        if found.outcome is HoldOutcome.NOT_EXTENDED:
            return Problem(
                "hold-not-extended",
                f"no slots are free to extend the hold; retry before it expires in {found.expires_in_ms} ms",
            )
        if found.outcome is HoldOutcome.TOO_MANY:
            return _invalid("units", "maximum", "more units than can be counted in a period")
        if action == "commit":  # the units are in suspense if the store lost them: an operator decides, by this line
            quotas = [part.quota for each in hold.by_cell for part in each.parts]
            log.warning("commit to an unknown hold", epoch=hold.epoch, quotas=quotas, units=amount)
        return _unknown()


def merge_states(states: Sequence[CellState]) -> HoldState:
    """Return the state of a hold over several cells: the first failure, allowances before slots.

    A cell that has only slots may forget its part while the others know theirs.
    """
    accounting = [state for hold, state in states if any(map(_is_booked, hold.parts))]
    others = [state for _, state in states if state not in accounting and state.outcome is not HoldOutcome.UNKNOWN]
    known = [*accounting, *others] or [state for _, state in states]
    return next((state for state in known if state.outcome is not HoldOutcome.DONE), known[0])


def _is_booked(part: HoldPart) -> bool:
    return part.algorithm == "allowance"


def _units_of(commit: HoldCommit, part: HoldPart) -> int | None:
    """Return the units that are committed to a part; None if they are all that it has set aside."""
    return (commit.costs or NO_COSTS).get(name_of_quota(part.quota), commit.units)


def _refuse_unknown_quotas(hold: HoldId, costs: Mapping[str, int]) -> None:
    held = {name_of_quota(part.quota) for each in hold.by_cell for part in each.parts}
    for name in costs:
        if name not in held:
            reason = f"the hold has set aside nothing of {name!r}; a rate is spent when the hold is made"
            raise _invalid(f"costs.{name}", "held", reason)


def _invalid(field: str, rule: str, reason: str) -> Problem:
    return Problem("invalid-request", f"{field}: {reason}", invalid_parameters=[InvalidParameter(field, rule, reason)])


def _no_key() -> Problem:
    return Problem("not-ready", "the agent has not received the region's policies yet", headers={"Retry-After": "1"})


def _unknown() -> Problem:
    return Problem("hold-unknown", "no such hold in this region, or it has expired")


def _unavailable(reason: str) -> Problem:
    return Problem("store-unavailable", reason, headers={"Retry-After": "1"})
