"""HTTP: what a coordinator's checks of itself, its database and the ledger find."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from msgspec import Struct

from coordinator.access.auth import RequireScope
from coordinator.access.authenticate import Caller
from coordinator.state import CoordinatorDep
from protocol.compatibility.releases import RELEASE
from protocol.diagnosis.checks import CheckResult
from web.bodies import reply
from web.openapi import described

router = APIRouter(tags=["operations"])
Auditor = Annotated[Caller, Depends(RequireScope("audit:read"))]


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The findings of all checks, each with a stable code that the documentation explains."""

    release: str
    now: datetime  # by this coordinator's clock
    checked_at: datetime | None  # null: they could not run
    checks: list[CheckResult]


@router.get("/v1/diagnosis", **described(answers={200: Diagnosis}))
async def get_diagnosis(coordinator: CoordinatorDep, _: Auditor) -> Response:
    """Run the checks of this coordinator, its database and the ledger now, and return what they find."""
    report = await coordinator.diagnosis.look()
    return reply(
        Diagnosis(
            release=RELEASE,
            now=coordinator.diagnosis.now(),
            checked_at=report.checked_at,
            checks=report.checks,
        )
    )
