"""HTTP: seals, verifications of the ledger, and proofs of single statement lines."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import WholeNumber, path_id
from coordinator.proof.read_proof import BillsNothing, LineProof, NoSuchSeal, TooManySeals, read_proof
from coordinator.proof.rules import KeptSeal
from coordinator.proof.seal import ShownSeal, read_seals
from coordinator.proof.verifications import AskedVerification, ask_verification, read_verification
from coordinator.state import CoordinatorDep
from coordinator.usage.statement_routes import LineNumber, LineQuery, PathStatement, found_line
from protocol.units import MAX_UNITS
from web.bodies import reply
from web.openapi import described
from web.problems import Problem, refused
from web.strict_routes import BodyModel

router = APIRouter(tags=["audit"], route_class=IdempotentRoute)
Auditor = Annotated[Caller, Depends(RequireScope("audit:read"))]

MAX_KEPT_SEALS = 1000
DEFAULT_REPORTS = 100  # a page of reports of a line, each with everything that came in it

_MISSING = "There is no such verification."
VerificationId = Annotated[
    UUID,
    Path(description="The id of a verification.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    path_id(_MISSING),
]


class SealList(Struct, frozen=True):
    """Seals, newest first."""

    data: list[ShownSeal]
    page: PageLinks


@router.get("/v1/seals", **described(answers={200: SealList}))
async def list_seals(coordinator: CoordinatorDep, _: Auditor, query: Annotated[PageQuery, Query()]) -> Response:
    """Return seals, newest first.

    Each covers all before it: a copy of the newest hash, kept elsewhere, shows whether any of them is changed later.
    """
    page = query.page("seals")
    rows = await coordinator.database.read(lambda c: read_seals(c, page.after(int), page.size + 1))
    return reply(SealList(rows[: page.size], page.links(rows, lambda row: row.number)))


class KeptSealBody(BodyModel):
    """A seal that was written down elsewhere."""

    number: Annotated[int, Field(ge=1, le=MAX_UNITS, description="The number of the seal.", examples=[42])]
    hash: Annotated[
        str,
        Field(pattern="^[0-9a-f]{64}$", description="Its hash, as the list of seals has it.", examples=["0f" * 32]),
    ]


class VerificationBody(BodyModel):
    kept_seals: Annotated[
        list[KeptSealBody],
        Field(
            default_factory=list,
            max_length=MAX_KEPT_SEALS,
            description="Seals that you kept elsewhere. Each must still be there.",
        ),
    ]


@router.post("/v1/verifications", **described(answers={202: AskedVerification}, headers={202: ["Location"]}))
async def create_verification(
    coordinator: CoordinatorDep, caller: Auditor, body: VerificationBody | None = None
) -> Response:
    """Verify the whole ledger. It takes a while: read the result at `Location`. The body may be left out."""
    kept, now = (
        [KeptSeal(each.number, each.hash) for each in (body.kept_seals if body else ())],
        coordinator.clock.now(),
    )
    verification = await coordinator.database.run(lambda c: ask_verification(c, caller.token_id, kept, now))
    return reply(verification, 202, {"Location": f"/v1/verifications/{verification.id}"})


@router.get("/v1/verifications/{verification_id}", **described(answers={200: AskedVerification, 404: None}))
async def get_verification(verification_id: VerificationId, coordinator: CoordinatorDep, _: Auditor) -> Response:
    """Return a verification, with its result once it is finished."""
    found = await coordinator.database.read(lambda c: read_verification(c, verification_id))
    if found is None:
        raise Problem("not-found", _MISSING)
    return reply(found)


class ProofQuery(LineQuery):
    seal: Annotated[
        WholeNumber | None,
        Field(description="The number of the seal that you kept. Without it, the last one needed.", examples=[42]),
    ] = None
    page_size: Annotated[
        WholeNumber, Field(ge=1, le=10_000, description="How many reports a page has at most.", examples=[100])
    ] = DEFAULT_REPORTS


@router.get("/v1/statements/{statement}/lines/{n}/proof", **described(answers={200: LineProof, 404: None, 410: None}))
async def get_line_proof(
    coordinator: CoordinatorDep,
    _: Auditor,
    statement: PathStatement,
    n: LineNumber,
    query: Annotated[ProofQuery, Query()],
) -> Response:
    """Return what proves a line of a statement, to a holder of a seal: the reports that it was booked from.

    The reports are whole, with what other tenants used in them.
    """
    page, after = query.line_page(statement, n)
    found = await coordinator.database.run(
        lambda c: read_proof(c, coordinator.archives, statement, n, query.as_of, after, page.size, query.seal),
        snapshot=True,
    )
    if isinstance(found, TooManySeals):
        raise refused("page_size", "bound", f"These reports are {found.seals} seals apart. Ask for fewer.")
    if isinstance(found, NoSuchSeal):
        raise refused("seal", "known", f"There is no seal {query.seal}: {found.reason}.")
    if isinstance(found, BillsNothing):
        raise refused("n", "billed", f"The line bills nothing, so there is nothing to prove. See {found.path}.")
    line, reports, movements, seals, numbers = found_line(found)
    return reply(LineProof(line, reports, movements, seals, page.links(numbers, str)))
