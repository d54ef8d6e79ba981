"""HTTP: exports of every usage line of a period, as files that can be verified and whose download can be resumed."""

import re
import zlib
from collections.abc import AsyncIterator
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from coordinator.access.auth import RequireScope
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.archives.refusal import Archived, archived_problem
from coordinator.exports import requests
from coordinator.exports.requests import (
    Export,
    ExportRequest,
    NoExport,
    ask_export,
    lines_archived,
    read_export,
    read_from,
)
from coordinator.exports.rules import ExportFormat, can_be_written
from coordinator.http.conditions import IfNoneMatch
from coordinator.http.parameters import Text, path_id
from coordinator.state import Coordinator, CoordinatorDep
from web.bodies import reply
from web.openapi import described
from web.problems import Problem, refused
from web.strict_routes import BodyModel

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("usage:read"))]
_NO_PYARROW = "Parquet takes pyarrow, which this coordinator lacks: install leasehold[parquet], or use csv or ndjson."
_MEDIA = {
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.NDJSON: "application/x-ndjson",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}

_MISSING = "There is no such export."
ExportId = Annotated[
    UUID, Path(description="The id of an export.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]), path_id(_MISSING)
]


class ExportBody(BodyModel):
    period: Annotated[Text, Field(description="A period.", examples=["2026-11"])]
    format: Annotated[ExportFormat, Field(strict=False, description="The format of the file.", examples=["csv"])] = (
        ExportFormat.CSV
    )
    tenant: Annotated[Text | None, Field(description="Only this tenant's lines.", examples=["acme"])] = None


@router.post(
    "/v1/exports",
    **described(
        answers={202: Export, 404: None, 409: None, 410: None}, headers={202: ["Location"], 409: ["Retry-After"]}
    ),
)
async def create_export(request: Request, coordinator: CoordinatorDep, caller: Reader, body: ExportBody) -> Response:
    """Request a file of every usage line of a period, up to the newest seal.

    `Location` is the path of its progress and manifest. Equal requests of several callers share one export.
    """
    if not can_be_written(body.format):
        raise refused("format", "supported", _NO_PYARROW)
    wanted, now = ExportRequest(body.period, body.tenant, body.format), coordinator.clock.now()
    export_id = id_for(request, caller)
    found = await coordinator.database.run(lambda c: ask_export(c, export_id, wanted, caller.token_id, now))
    if isinstance(found, Archived):
        raise archived_problem(found)
    if isinstance(found, NoExport):
        kind = "not-found" if found is NoExport.NO_PERIOD else "export-not-ready"
        raise Problem(kind, found, headers={} if found is NoExport.NO_PERIOD else {"Retry-After": "60"})
    return reply(found, 202, {"Location": f"/v1/exports/{found.id}"})


@router.get("/v1/exports/{export}", **described(answers={200: Export, 404: None}))
async def get_export(export: ExportId, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return the progress of an export, and its manifest: rows, bytes, SHA-256 and the seal it is of."""
    return reply(await _found(coordinator, export))


@router.post("/v1/exports/{export}:cancel", **described(answers={200: Export, 404: None}))
async def cancel_export(export: ExportId, coordinator: CoordinatorDep, caller: Reader) -> Response:
    """Withdraw the caller's interest. The export is deleted when no caller remains."""
    now = coordinator.clock.now()
    return reply(
        _there(await coordinator.database.run(lambda c: requests.cancel_export(c, export, caller.token_id, now)))
    )


_DATA = described(
    answers={200: None, 206: None, 304: None, 404: None, 409: None, 410: None, 416: None},
    also=tuple(_MEDIA.values()),
    headers={206: ["ETag", "Content-Range"], 409: ["Retry-After"], 416: ["Content-Range"]},
)


@router.get("/v1/exports/{export}/data", **_DATA)
async def download_export(
    request: Request,
    export: ExportId,
    coordinator: CoordinatorDep,
    _: Reader,
    _range: Annotated[
        str | None,
        Header(alias="Range", description="`bytes=N-` resumes a download at byte N.", examples=["bytes=1048576-"]),
    ] = None,
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the file of an export. It is compressed for clients that accept gzip and ask for all of it."""
    found = await _found(coordinator, export)
    if not found.is_kept(coordinator.clock.now()):
        ended = "was cancelled" if found.cancelled_at else f"expired at {found.expires_at}"
        raise Problem("export-gone", f"The export {ended}. Request a new one.")
    if found.finished_at is None:
        raise Problem("export-not-ready", "The export is not finished. Try again later.", headers={"Retry-After": "1"})
    if archived := await coordinator.database.read(lambda c: lines_archived(c, found)):
        raise archived_problem(archived)
    headers = {
        "ETag": f'"{found.sha256}"',
        "Cache-Control": "private, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
        "Vary": "Accept-Encoding, Authorization",
        "Content-Disposition": f'attachment; filename="usage-{found.id}.{found.format}"',
    }
    if headers["ETag"] in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    start = _start(request, headers["ETag"], found.bytes)
    body = read_from(coordinator.database, found, start)
    if start:
        headers["Content-Range"] = f"bytes {start}-{found.bytes - 1}/{found.bytes}"
    elif found.format is not ExportFormat.PARQUET and _accepts_gzip(request):
        headers |= {"Content-Encoding": "gzip", "ETag": f'"{found.sha256}-gzip"'}
        return StreamingResponse(_gzipped(body), 200, headers, media_type=_MEDIA[found.format])
    headers["Content-Length"] = str(found.bytes - start)
    return StreamingResponse(body, 206 if start else 200, headers, media_type=_MEDIA[found.format])


def _start(request: Request, tag: str, size: int) -> int:
    """Return where the requested range begins. Ranges of another form, or of another file, are ignored."""
    wanted = re.fullmatch(r"bytes=(\d{1,18})-", request.headers.get("Range", ""), re.ASCII)
    if wanted is None or request.headers.get("If-Range", tag) != tag:
        return 0
    start = int(wanted[1])
    if start >= size:
        detail = f"The export has {size} bytes."
        raise Problem("range-not-satisfiable", detail, headers={"Content-Range": f"bytes */{size}"})
    return start


def _accepts_gzip(request: Request) -> bool:
    offered = request.headers.get("Accept-Encoding", "").lower().replace(" ", "").split(",")
    return "range" not in request.headers and ("gzip" in offered or "*" in offered)


async def _gzipped(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    async for part in body:
        if packed := packer.compress(part):
            yield packed
    yield packer.flush()


async def _found(coordinator: Coordinator, export: UUID) -> Export:
    return _there(await coordinator.database.read(lambda c: read_export(c, export)))


def _there(found: Export | None) -> Export:
    if found is None:
        raise Problem("not-found", _MISSING)
    return found
