"""Routes of epochs, for agents. An agent acts for one region only."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from coordinator.access.auth import actor_of, caller_of, require_this_region
from coordinator.epochs.open import open_epoch
from coordinator.epochs.rebind import rebind_epoch
from coordinator.exchange.rules.budget import Budget
from coordinator.http.parameters import EpochNumber
from coordinator.state import Coordinator, CoordinatorDep
from protocol.messages import EpochOpened, OpenEpoch, RebindEpoch
from protocol.outcomes import EpochRefusal
from web.bodies import read_body, reply
from web.openapi import described
from web.problems import Problem, refused
from web.strict_routes import StrictRoute

router = APIRouter(tags=["agents"], route_class=StrictRoute)

PathRegion = Annotated[str, Depends(require_this_region)]
SPLIT_BRAIN_RETRY_S = "15"

_REFUSED_EPOCHS = {
    EpochRefusal.NONCE_OF_ANOTHER_INCARNATION: (
        "nonce-of-another-incarnation",
        "this nonce opened an epoch for another incarnation",
    ),
    EpochRefusal.REGION_DOWN: ("region-down", "the region is down: it opens no epoch"),
    EpochRefusal.TWO_STORES: ("two-stores", "this store and another replace each other again and again in this region"),
    EpochRefusal.NOT_ISSUED: ("rebind-refused", "this nonce has opened no such epoch of this region"),
    EpochRefusal.EPOCH_OVER: ("rebind-refused", "the epoch is over"),
    EpochRefusal.ANOTHER_INCARNATION: ("rebind-refused", "the epoch belongs to another incarnation of the store"),
    EpochRefusal.STORE_BEHIND: ("rebind-refused", "the ledger has heard more of this epoch than the store remembers"),
}


@router.post(
    "/v1/regions/{region}/epochs", **described(body=OpenEpoch, answers={200: EpochOpened, 409: None, 429: None})
)
async def open_region_epoch(request: Request, region: PathRegion, coordinator: CoordinatorDep) -> Response:
    """Open an epoch. The same nonce and fingerprint again give the same epoch."""
    body = await read_body(request, OpenEpoch)
    if body.cell >= body.cells:
        raise refused("cell", "maximum", f"Of {body.cells} cells the last is {body.cells - 1}.")
    _take_an_epoch(coordinator, region, Budget.JOURNAL_EPOCHS if body.journal else Budget.EPOCHS)
    lanes, now = coordinator.settings.lanes, coordinator.clock.now()
    by = actor_of(request, await caller_of(request, coordinator))
    opened = await coordinator.database.run(lambda c: open_epoch(c, region, body, lanes, by, now))
    if opened is None:
        raise Problem("not-found", "There is no such region.")
    return reply(_granted(opened))


def _take_an_epoch(coordinator: Coordinator, region: str, budget: Budget) -> None:
    if not coordinator.budgets.take(region, budget, 1):
        headers = {"Retry-After": str(coordinator.budgets.retry_after_s(region, budget))}
        detail = f"The region has opened too many epochs in this minute ({budget.value}). Ask again later."
        raise Problem("over-budget", detail, headers=headers, extra={"budget": budget.value})


@router.post(
    "/v1/regions/{region}/epochs/{epoch}:rebind", **described(body=RebindEpoch, answers={200: EpochOpened, 409: None})
)
async def rebind_region_epoch(
    request: Request, region: PathRegion, epoch: EpochNumber, coordinator: CoordinatorDep
) -> Response:
    """Let a single store that fsyncs every write continue in its epoch. Repeating it changes nothing."""
    body, now = await read_body(request, RebindEpoch), coordinator.clock.now()
    by = actor_of(request, await caller_of(request, coordinator))
    return reply(_granted(await coordinator.database.run(lambda c: rebind_epoch(c, region, epoch, body, by, now))))


def _granted(answer: EpochOpened | EpochRefusal) -> EpochOpened:
    if isinstance(answer, EpochRefusal):
        headers = {"Retry-After": SPLIT_BRAIN_RETRY_S} if answer is EpochRefusal.TWO_STORES else {}
        raise Problem(*_REFUSED_EPOCHS[answer], headers=headers, extra={"refusal": answer.value})
    return answer
