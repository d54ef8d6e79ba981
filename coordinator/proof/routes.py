"""For auditors: the seals, and whether the books are what was booked."""

from collections.abc import Sequence
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from coordinator.access.auth import require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.http.queries import INTEGER, PAGE, Query, a_number, with_query
from coordinator.proof.read_proof import BillsNothing, LineProof, NoSuchSeal, TooManySeals, read_proof
from coordinator.proof.rules import KeptSeal
from coordinator.proof.seal import ShownSeal, read_seals
from coordinator.proof.verifications import AskedVerification, ask_verification, read_verification
from coordinator.state import CoordinatorDep
from coordinator.usage.statement_routes import AS_OF, asked_line, of_line
from protocol.messages import Message
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["audit"], route_class=IdempotentRoute)
Auditor = Annotated[Caller, Depends(require("audit:read"))]


MOST_KEPT = 1000
PARTS = 100  # reports of a line, with all that came in them


class SealList(Struct, frozen=True):
    """The newest first."""

    data: list[ShownSeal]
    page: dict[str, str | None]


@router.get("/v1/seals", **with_query(described(answers={200: SealList}), PAGE))
async def list_seals(request: Request, coordinator: CoordinatorDep, _: Auditor) -> Response:
    """Each vouches for all before it: whoever keeps the newest hash elsewhere can tell if any of it is changed."""
    query = Query(request)
    page = query.page("seals")
    if page.cursor.after and not page.cursor.after.isdecimal():
        query.refuse("page_after", "format", "it is not the `next` of a page")
    query.checked()
    before = int(page.cursor.after) if page.cursor.after else None
    rows = await coordinator.database.read(lambda c: read_seals(c, before, page.size + 1))
    return reply(SealList(rows[: page.size], page.links(rows, lambda row: str(row.number))))


class VerificationBody(Message, frozen=True):
    kept_seals: Annotated[
        Sequence[KeptSeal], Meta(max_length=MOST_KEPT, description="seals that you kept elsewhere; each must be there")
    ] = ()


@router.post("/v1/verifications", **described(body=VerificationBody, answers={202: AskedVerification}))
async def add_verification(request: Request, coordinator: CoordinatorDep, caller: Auditor) -> Response:
    """Have the whole ledger proven. It takes a while: ask for the result at `Location`. The body may be left out."""
    body = await read_body(request, VerificationBody) if await request.body() else VerificationBody()
    now = coordinator.clock.now()
    asked = await coordinator.database.run(lambda c: ask_verification(c, caller.token_id, body.kept_seals, now))
    return reply(asked, 202, {"Location": f"/v1/verifications/{asked.id}"})


@router.get("/v1/verifications/{verification_id}", **described(answers={200: AskedVerification, 404: None}))
async def get_verification(verification_id: str, coordinator: CoordinatorDep, _: Auditor) -> Response:
    asked_id = _parsed(verification_id)
    found = await coordinator.database.read(lambda c: read_verification(c, asked_id)) if asked_id else None
    if found is None:
        raise Problem("not-found", "there is no such verification")
    return reply(found)


def _parsed(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


@router.get(
    "/v1/statements/{statement}/lines/{n}/proof",
    **with_query(
        described(answers={200: LineProof, 404: None}),
        AS_OF | PAGE | {"seal": ("the number of the seal that you kept; without it, the last one needed", INTEGER)},
    ),
)
async def get_proof(request: Request, statement: str, n: str, coordinator: CoordinatorDep, _: Auditor) -> Response:
    """Proves a line of a statement, by the reports that it is from, to whoever has kept a seal. A page has few reports.

    It has these reports whole, with what others used in them.
    """
    asked = asked_line(request, statement, n, PARTS)
    last = asked.query.one("seal", a_number, None)
    asked.query.checked()
    size = asked.page.size
    found = await coordinator.database.run(
        lambda c: read_proof(c, asked.of, asked.n, asked.as_of, asked.page.cursor.after, size, last), snapshot=True
    )
    if isinstance(found, TooManySeals):
        fault = InvalidParameter("page_size", "bound", f"its reports are {found.seals} seals apart: ask for fewer")
        raise Problem("invalid-request", "the query is not valid", invalid_parameters=[fault])
    if isinstance(found, NoSuchSeal):
        fault = InvalidParameter("seal", "known", f"there is no seal {last}: {found.reason}")
        raise Problem("invalid-request", "the query is not valid", invalid_parameters=[fault])
    if isinstance(found, BillsNothing):
        fault = InvalidParameter("n", "billed", f"it bills nothing, so nothing is to be proven: see {found.path}")
        raise Problem("invalid-request", "the line has no proof", invalid_parameters=[fault])
    line, reports, movements, seals, numbers = of_line(found)
    return reply(LineProof(line, reports, movements, seals, asked.page.links(numbers, str)))
