"""HTTP: the decision log. Agents send what they decided, and people ask why a tenant was denied."""

from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope, require_this_region
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.database.connection import Connection
from coordinator.decision_log.read import Decision, DecisionFilter, DecisionSummary, Place, read_decisions, read_summary
from coordinator.decision_log.store import read_hasher
from coordinator.exchange.rules.budget import Budget
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Instant, QuotaKey, QuotaName, RegionName, Several, Text
from coordinator.limits.known_names import faults_of_names
from coordinator.state import Coordinator, CoordinatorDep
from protocol.check import DenialCause
from protocol.decision_log.messages import MAX_BATCH_BYTES, DecisionBatch, DecisionsStored, LoggedDecision
from protocol.identifiers import operation_digest
from web.bodies import decode, decode_parts, read_compressed_json, reply
from web.openapi import described
from web.problems import Problem, refused, refused_all
from web.strict_routes import StrictRoute

agents = APIRouter(tags=["agents"], route_class=StrictRoute)
router = APIRouter(tags=["audit"], route_class=IdempotentRoute)
PathRegion = Annotated[str, Depends(require_this_region)]
Auditor = Annotated[Caller, Depends(RequireScope("audit:read"))]

A_DAY = timedelta(days=1)
REASONS = (*(cause.value for cause in DenialCause), "blocked", "unmatched")


# --- for agents -------------------------------------------------------------------------------------------------------


class _BatchParts(DecisionBatch, frozen=True):
    """A batch whose decisions are not decoded yet, for each is stored or refused by itself."""

    decisions: list[msgspec.Raw]  # type: ignore[assignment]


@agents.post(
    "/v1/regions/{region}/decisions",
    **described(body=DecisionBatch, answers={200: DecisionsStored, 429: None}),
)
async def post_decisions(request: Request, region: PathRegion, coordinator: CoordinatorDep) -> Response:
    """Store a batch of decisions for the decision log, in gzip or not. The same batch is stored once.

    A malformed decision is refused by itself. Answered 429 or 503, send the batch again later.
    """
    raw = await read_compressed_json(request, MAX_BATCH_BYTES)
    batch, refused_items = _read_batch(raw)
    if not coordinator.budgets.may_take(region, Budget.DECISIONS, max(1, len(batch.decisions))):
        pause_s = coordinator.budgets.retry_after_s(region, Budget.DECISIONS)
        raise Problem("over-budget", "The region has sent too many decisions.", headers={"Retry-After": str(pause_s)})
    stored = await coordinator.decisions.store(region, batch)
    return reply(DecisionsStored(stored.stored, stored.refused + refused_items))


def _read_batch(raw: bytes) -> tuple[DecisionBatch, int]:
    """Return the batch, and how many malformed decisions it is without."""
    try:
        return decode(raw, DecisionBatch), 0
    except Problem:
        parts = decode_parts(raw, _BatchParts)
    decisions = []
    for part in parts.decisions:
        try:
            decisions.append(decode(bytes(part), LoggedDecision))
        except Problem:
            continue
    batch = DecisionBatch(id=parts.id, agent=parts.agent, decisions=decisions, lost=parts.lost)
    return batch, len(parts.decisions) - len(decisions)


# --- for people -------------------------------------------------------------------------------------------------------


class DecisionList(Struct, frozen=True):
    """Decisions, the newest first. The first page has the sum of all that the question finds."""

    data: list[Decision]
    summary: DecisionSummary | None
    page: PageLinks


class DecisionQuery(PageQuery):
    tenant: Annotated[
        Text | None, Field(description="Only this tenant's. Without it the answer takes longer.", examples=["acme"])
    ] = None
    start: Annotated[
        Instant,
        Field(
            alias="from",
            description="An RFC 3339 time, or a date in UTC. Without it, a day before `to`.",
            examples=["2026-11-19T15:00:00Z"],
        ),
    ] = None
    end: Annotated[
        Instant,
        Field(alias="to", description="The first moment after. Without it, now.", examples=["2026-11-19T15:05:00Z"]),
    ] = None
    outcome: Annotated[
        Several[Annotated[str, Field(pattern="^(denied|admitted|shadow_denied)$")]],
        Field(
            description="`denied`, `admitted`, or `shadow_denied`: admitted, but a shadow policy would have denied it.",
            examples=["denied"],
        ),
    ] = ()
    reason: Annotated[
        Several[Annotated[str, Field(pattern=f"^({'|'.join(REASONS)})$")]],
        Field(description="Only denials for these reasons.", examples=["limit"]),
    ] = ()
    policy: Annotated[Several[QuotaName], Field(description="Only by these policies.", examples=["export"])] = ()
    quota: Annotated[Several[QuotaName], Field(description="Only of these quotas.", examples=["exports"])] = ()
    region: Annotated[Several[RegionName], Field(description="Only in these regions.", examples=["eu-west"])] = ()
    key: Annotated[
        Several[QuotaKey],
        Field(
            description="Only of these quota keys, with the values themselves: they are hashed here.",
            examples=["api:api_key=ak_7"],
        ),
    ] = ()
    operation_id: Annotated[
        Text | None, Field(description="Only of this operation of the tenant.", examples=["order-17"])
    ] = None


@router.get("/v1/decisions", **described(answers={200: DecisionList}))
async def list_decisions(coordinator: CoordinatorDep, _: Auditor, query: Annotated[DecisionQuery, Query()]) -> Response:
    """Return why requests were denied or admitted: each denial, and a sample of the admissions.

    Users, API keys, addresses and labels are hashed, unless the limits document says otherwise.
    """
    page = query.page()
    if query.operation_id is not None and query.tenant is None:
        raise refused("tenant", "required", "An operation id belongs to a tenant: name it.")
    hasher = await coordinator.database.read(read_hasher)
    start, end = _window(query, coordinator.clock.now())
    question = DecisionFilter(
        start=start,
        end=end,
        tenant=query.tenant,
        outcomes=query.outcome,
        reasons=query.reason,
        policies=query.policy,
        quotas=query.quota,
        regions=query.region,
        keys=tuple(dict.fromkeys(each for key in query.key for each in (key, hasher.quota(key)))),
        operation=None if query.operation_id is None else operation_digest(query.tenant or "", query.operation_id),
    )
    after = page.after(Place)

    async def read(connection: Connection) -> tuple[list[Decision], DecisionSummary | None]:
        found = await read_decisions(connection, question, after, page.size + 1)
        return found, None if after else await read_summary(connection, question)

    rows, summary = await coordinator.database.run(read, snapshot=True)
    await _refuse_unknown_names(query, coordinator, has_rows=bool(rows))
    return reply(DecisionList(rows[: page.size], summary, page.links(rows, lambda row: Place(row.at, row.id))))


async def _refuse_unknown_names(query: DecisionQuery, coordinator: Coordinator, *, has_rows: bool) -> None:
    """Refuse misspelt names. A quota or policy that the limits had once is known if the log has decisions of it."""
    names = {"region": query.region} | ({} if has_rows else {"quota": query.quota, "policy": query.policy})
    if faults := await coordinator.database.read(lambda c: faults_of_names(c, names)):
        raise refused_all(faults)


def _window(query: DecisionQuery, now: datetime) -> tuple[datetime, datetime]:
    end = query.end or now
    start = query.start or end - A_DAY
    if start >= end:
        raise refused("to", "order", "`to` must be after `from`.")
    return start, end
