"""HTTP: archives of closed periods, in files outside of the database."""

from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Response
from msgspec import Struct, to_builtins
from pydantic import Field

from coordinator.access.auth import RequireScope
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.archives.requests import (
    Archive,
    ArchivePreview,
    ArchiveRefused,
    list_archives,
    preview_archive,
    read_archive_progress,
    request_archive,
)
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Text
from coordinator.state import Coordinator, CoordinatorDep
from web.bodies import reply
from web.openapi import described
from web.problems import Problem
from web.strict_routes import BodyModel

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("usage:read"))]
Closer = Annotated[Caller, Depends(RequireScope("period:close"))]

T = TypeVar("T")
_NO_SETTING = "This coordinator has no place for archives: set LEASEHOLD_COORDINATOR_ARCHIVE."
_NO_PYARROW = "Archives take pyarrow, which this coordinator lacks: install leasehold[parquet]."


class ArchiveList(Struct, frozen=True):
    """Archives by their periods, also those that are being written or failed."""

    data: list[Archive]
    page: PageLinks


class ArchiveBody(BodyModel):
    period: Annotated[Text, Field(description="A closed period.", examples=["2025-11"])]
    dry_run: Annotated[
        bool, Field(description="Return what would be archived, and change nothing.", examples=[True])
    ] = False


@router.post(
    "/v1/archives",
    **described(answers={200: ArchivePreview, 202: Archive, 404: None, 409: None}, headers={202: ["Location"]}),
)
async def create_archive(coordinator: CoordinatorDep, caller: Closer, body: ArchiveBody) -> Response:
    """Archive a closed period: write its lines into files, verify them, and remove them from the database.

    Statements, hourly and daily usage, and seals stay. `Location` is the path of its progress. A repeated request
    returns the archive, and lets one that failed begin again.
    """
    period, lacks = body.period, _lacks(coordinator)
    if body.dry_run:
        preview = await coordinator.database.run(lambda c: preview_archive(c, period, lacks), snapshot=True)
        return reply(_known(preview))
    now = coordinator.clock.now()
    found = await coordinator.database.run(lambda c: request_archive(c, period, lacks, caller.token_id, now))
    if isinstance(found, ArchiveRefused):
        missing = {"missing": to_builtins(found.missing)}
        raise Problem("period-not-archivable", found.missing[0].reason, extra=missing)
    return reply(_known(found), 202, {"Location": f"/v1/archives/{period}"})


def _lacks(coordinator: Coordinator) -> str | None:
    """Return what keeps this coordinator from writing archives."""
    if coordinator.archives is not None:
        return None
    return _NO_PYARROW if coordinator.settings.archive else _NO_SETTING


@router.get("/v1/archives", **described(answers={200: ArchiveList}))
async def get_archives(coordinator: CoordinatorDep, _: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """Return the archives, by their periods: where each is, and the SHA-256 of its manifest."""
    page = query.page("archives")
    rows = await coordinator.database.read(lambda c: list_archives(c, page.after(str) or "", page.size + 1))
    return reply(ArchiveList(rows[: page.size], page.links(rows, lambda row: row.period)))


@router.get("/v1/archives/{period}", **described(answers={200: Archive, 404: None}))
async def get_archive(
    period: Annotated[str, Path(description="A period.", examples=["2025-11"])], coordinator: CoordinatorDep, _: Reader
) -> Response:
    """Return the archive of a period, or how far it has come."""
    found = await coordinator.database.read(lambda c: read_archive_progress(c, period))
    if found is None:
        raise Problem("not-found", "There is no archive of this period.")
    return reply(found)


def _known(found: T | None) -> T:
    if found is None:
        raise Problem("not-found", "Unknown period.")
    return found
