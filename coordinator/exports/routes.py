"""For finance: every usage line of a period, as a file that can be proven and whose download can be resumed."""

import re
import zlib
from collections.abc import AsyncIterator
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta

from coordinator.access.auth import require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.exports.requests import (
    Export,
    ExportRequest,
    NoExport,
    ask_export,
    cancel_export,
    read_export,
    read_from,
)
from coordinator.exports.rules import ExportFormat, can_be_written
from coordinator.http.queries import a_text
from coordinator.state import Coordinator, CoordinatorDep
from protocol.messages import Message
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("usage:read"))]
_NOT_HERE = "it takes pyarrow, which this coordinator has not: install leasehold[parquet]; csv and ndjson take nothing"
_MEDIA = {
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.NDJSON: "application/x-ndjson",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}


class ExportBody(Message, frozen=True):
    period: str
    format: Annotated[str, Meta(description="csv, ndjson or parquet")] = "csv"
    tenant: Annotated[str | None, Meta(description="whose lines; those of all")] = None


@router.post("/v1/exports", **described(body=ExportBody, answers={202: Export, 404: None, 409: None}))
async def add_export(request: Request, coordinator: CoordinatorDep, caller: Reader) -> Response:
    """Every usage line of a period up to the newest seal. `Location` tells how far it is, and is its manifest then.

    Whoever asks for what somebody else has asked for is given the same.
    """
    asked, now = _checked(await read_body(request, ExportBody)), coordinator.clock.now()
    export_id = id_for(request, caller)
    found = await coordinator.database.run(lambda c: ask_export(c, export_id, asked, caller.token_id, now))
    if isinstance(found, NoExport):
        kind = "not-found" if found is NoExport.NO_PERIOD else "export-not-ready"
        raise Problem(kind, found, headers={} if found is NoExport.NO_PERIOD else {"Retry-After": "60"})
    return reply(found, 202, {"Location": f"/v1/exports/{found.id}"})


def _checked(body: ExportBody) -> ExportRequest:
    if body.format not in list(ExportFormat):
        raise _refused(InvalidParameter("format", "known", f"it is one of {', '.join(ExportFormat)}"))
    format_ = ExportFormat(body.format)
    if not can_be_written(format_):
        raise _refused(InvalidParameter("format", "supported", _NOT_HERE))
    for field in ("period", "tenant"):
        if (text := getattr(body, field)) is not None:
            try:
                a_text(text)
            except ValueError as error:
                raise _refused(InvalidParameter(field, "format", str(error))) from None
    return ExportRequest(body.period, body.tenant, format_)


def _refused(fault: InvalidParameter) -> Problem:
    return Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault])


@router.get("/v1/exports/{export}", **described(answers={200: Export, 404: None}))
async def get_export(export: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """The manifest: rows, bytes, SHA-256, and the seal that it is of."""
    return reply(await _found(coordinator, export))


@router.post("/v1/exports/{export}:cancel", **described(answers={200: Export, 404: None}))
async def cancel(export: str, coordinator: CoordinatorDep, caller: Reader) -> Response:
    """It ends, and its bytes go, when nobody who asked for it wants it any more. Of others it changes nothing."""
    export_id, now = _id(export), coordinator.clock.now()
    return reply(_there(await coordinator.database.run(lambda c: cancel_export(c, export_id, caller.token_id, now))))


_DATA = described(
    answers={200: None, 206: None, 304: None, 404: None, 409: None, 410: None, 416: None}, also=tuple(_MEDIA.values())
)


@router.get("/v1/exports/{export}/data", **_DATA)
async def get_data(request: Request, export: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """The lines. `Range: bytes=N-` goes on where a download ended; gzip for whoever accepts it and asks for all."""
    found = await _found(coordinator, export)
    if not found.is_kept(coordinator.clock.now()):
        raise Problem(
            "export-gone", "it was cancelled" if found.cancelled_at else f"it was kept until {found.expires_at}"
        )
    if found.finished_at is None:
        raise Problem("export-not-ready", "it is being made: look at its progress", headers={"Retry-After": "1"})
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
    """Where the one range that is served begins; any other, or one of other bytes, is as if it were not there."""
    wanted = re.fullmatch(r"bytes=(\d{1,18})-", request.headers.get("Range", ""), re.ASCII)
    if wanted is None or request.headers.get("If-Range", tag) != tag:
        return 0
    start = int(wanted[1])
    if start >= size:
        detail = f"the export has {size} bytes"
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


async def _found(coordinator: Coordinator, export: str) -> Export:
    export_id = _id(export)
    return _there(await coordinator.database.read(lambda c: read_export(c, export_id)))


def _id(export: str) -> UUID:
    try:
        return UUID(export)
    except ValueError:
        raise Problem("not-found", "there is no such export") from None


def _there(found: Export | None) -> Export:
    if found is None:
        raise Problem("not-found", "there is no such export")
    return found
