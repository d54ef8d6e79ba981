"""Actions on holds: commit, release, extend, or look.

An agent keeps no state of holds. A hold's id names the leases that its units were set aside of, and the store's script
decides, so any agent of the region can act on it, also when its period or epoch is over.
"""

from collections.abc import Callable, Sequence

import structlog

from protocol.check import HoldStatus
from protocol.outcomes import HoldOutcome
from regional_agent.admission.rules.ceilings import allowance_ceiling
from regional_agent.admission.rules.hold_ids import HoldId, HoldSeal, NoHoldKey
from regional_agent.cluster.cell import Cell
from regional_agent.http.callers import adjust_forbidden
from regional_agent.metrics import AgentMetrics
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.types import HoldState
from web.problems import InvalidParameter, Problem

log = structlog.get_logger()


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

    async def update(self, hold_id: str, action: str, amount: int = 0, *, may_exceed: bool = True) -> HoldStatus:
        """Apply `commit` of so many units, `release`, `extend` by so many ms, or `look`. Raises Problem.

        `may_exceed`: the caller may commit more than the hold has set aside.
        """
        hold = self._opened(hold_id)
        if not hold.by_cell:
            return HoldStatus(hold_id=hold_id, state="nothing_held", units=0, committed=0, expires_in_ms=0)
        if action == "commit":
            await self._refuse_excess(hold, amount, may_exceed=may_exceed)
        found = await self._ask_store(hold, action, amount)
        self._metrics.holds.labels(action, found.outcome.value).inc()
        if found.outcome is not HoldOutcome.DONE:
            raise self._refusal(hold, found, action, amount)
        return HoldStatus(
            hold_id=hold_id,
            state=found.state,  # type: ignore[arg-type]  # the states of lua/hold.lua
            units=found.units,
            committed=found.committed,
            expires_in_ms=found.expires_in_ms,
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

    async def _refuse_excess(self, hold: HoldId, units: int, *, may_exceed: bool) -> None:
        """Refuse a commit beyond the hold that is above the ceiling, or whose caller may not book beyond limits."""
        quotas = [part.quota for each in hold.by_cell for part in each.parts if part.algorithm == "allowance"]
        ceilings = [allowance_ceiling(self._limit_of(quota) or 1, self._adjust_ceiling) for quota in quotas]
        if not ceilings or (may_exceed and units <= min(ceilings)):
            return
        found = await self._ask_store(hold, "look", 0)
        if found.outcome is not HoldOutcome.DONE or units <= found.units:
            return
        if not may_exceed:
            raise adjust_forbidden()
        ceiling = max(min(ceilings), found.units * self._adjust_ceiling)
        if units > ceiling:
            reason = f"one commit may book at most {ceiling} units: see adjust_ceiling"
            fault = InvalidParameter("units", "maximum", reason)
            raise Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault])

    async def _ask_store(self, hold: HoldId, action: str, amount: int) -> HoldState:
        """Apply the action in each cell of the hold. A cell that has applied it already changes nothing."""
        parts = hold.by_cell
        try:
            states = [await self._cell_of(each.parts[0].quota).update_hold(each, action, amount) for each in parts]
        except (StoreUnavailable, StoreError) as error:
            raise _unavailable(str(error)) from error
        return merge_states(list(zip(parts, states, strict=True)))

    def _refusal(self, hold: HoldId, found: HoldState, action: str, amount: int) -> Problem:
        if found.outcome is HoldOutcome.ENDED:
            state = {"state": found.state, "committed": found.committed}
            return Problem("hold-ended", f"the hold is {found.state}: it cannot {action} now", extra=state)
        if found.outcome is HoldOutcome.NOT_EXTENDED:
            return Problem(
                "hold-not-extended",
                f"no slots are free to extend the hold; retry before it expires in {found.expires_in_ms} ms",
            )
        if found.outcome is HoldOutcome.TOO_MANY:
            fault = InvalidParameter("units", "maximum", "more units than can be counted in a period")
            return Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault])
        if action == "commit":  # the units are in suspense if the store lost them: an operator decides, by this line
            quotas = [part.quota for each in hold.by_cell for part in each.parts]
            log.warning("commit to an unknown hold", epoch=hold.epoch, quotas=quotas, units=amount)
        return _unknown()


def merge_states(states: Sequence[tuple[HoldId, HoldState]]) -> HoldState:
    """Return the state of a hold over several cells: the first failure, allowances before slots.

    A cell that has only slots may forget its part while the others know theirs.
    """
    accounting = [state for hold, state in states if any(part.algorithm == "allowance" for part in hold.parts)]
    others = [state for _, state in states if state not in accounting and state.outcome is not HoldOutcome.UNKNOWN]
    known = [*accounting, *others] or [state for _, state in states]
    return next((state for state in known if state.outcome is not HoldOutcome.DONE), known[0])


def _no_key() -> Problem:
    return Problem("not-ready", "the agent has not received the region's policies yet", headers={"Retry-After": "1"})


def _unknown() -> Problem:
    return Problem("hold-unknown", "no such hold in this region, or it has expired")


def _unavailable(reason: str) -> Problem:
    return Problem("store-unavailable", reason, headers={"Retry-After": "1"})
