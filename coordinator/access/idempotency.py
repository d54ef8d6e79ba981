"""`Idempotency-Key`: whoever does not know whether a change was made asks again, and it is made once.

One mechanism for all that people change: their routers make their routes of this class. With the same key the same
request is given the first answer again, and another request is refused; while the first is being worked on the second
is told so. An answer that says nothing about the change, because the service failed or the caller was not let in, is
not kept.
"""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4, uuid5

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from coordinator.access.auth import caller_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency_records import Attempt, KeyConflict, StoredResponse, claim, release, store
from coordinator.state import Coordinator, coordinator_of
from web.problems import InvalidParameter, Problem, answer_to

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
MAX_KEY_LENGTH = 255
_MUTATIONS = {"POST", "PUT", "PATCH", "DELETE"}
_NOT_LET_IN = (401, 403)
_KEPT_HEADERS = ("content-type", "etag", "location")
_PARAMETER = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "of your choice: the same request with the same key is done once, and answered alike for a day",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
}

Handler = Callable[[Request], Awaitable[Response]]


class ResponseWithSecret(Response):
    """An answer with a secret in it. What is kept for repetitions is another body, without the secret."""

    stored_body: bytes


class IdempotentRoute(APIRoute):
    """A door for people. What it changes, it changes once for each key."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if _MUTATIONS & (self.methods or set()):
            extra = self.openapi_extra or {}
            self.openapi_extra = extra | {"parameters": [*extra.get("parameters", []), _PARAMETER]}

    def get_route_handler(self) -> Handler:  # type: ignore[override]  # it is awaited, and no more
        handle: Handler = super().get_route_handler()

        async def once(request: Request) -> Response:
            key = request.headers.get(HEADER)
            if key is None or request.method not in _MUTATIONS:
                return await handle(request)
            return await _once(request, _checked(key), handle)

        return once


def id_for(request: Request, caller: Caller) -> UUID:
    """Of what a request creates: with a key the same at every attempt, so that none creates a second one."""
    key = request.headers.get(HEADER)
    return uuid4() if key is None else uuid5(caller.token_id, f"{request.method} {request.url.path} {key}")


def _checked(key: str) -> str:
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isascii() or not key.isprintable():
        fault = InvalidParameter(HEADER, "format", f"it is a text of 1 to {MAX_KEY_LENGTH} printable ASCII characters")
        raise Problem("invalid-request", f"{HEADER}: {fault.reason}", invalid_parameters=[fault])
    return key


async def _once(request: Request, key: str, handle: Handler) -> Response:
    coordinator = await coordinator_of(request)
    caller = await caller_of(request, coordinator)
    attempt = Attempt(caller.token_id, key, await _hash(request), uuid4())
    found = await coordinator.database.run(lambda c: claim(c, attempt, coordinator.clock.now()))
    if isinstance(found, KeyConflict):
        raise _refusal(found)
    if found is not None:
        return Response(found.body, found.status, {**found.headers, REPLAYED: "true"})
    return await _first(request, attempt, handle, coordinator)


async def _first(request: Request, attempt: Attempt, handle: Handler, coordinator: Coordinator) -> Response:
    try:
        response = await _answered(request, handle)
    except Exception:
        await coordinator.database.run(lambda c: release(c, attempt))
        raise
    if response.status_code >= 500 or response.status_code in _NOT_LET_IN:
        await coordinator.database.run(lambda c: release(c, attempt))
    else:
        headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
        body = response.stored_body if isinstance(response, ResponseWithSecret) else bytes(response.body)
        answer = StoredResponse(response.status_code, headers, body)
        await coordinator.database.run(lambda c: store(c, attempt, answer))
    return response


async def _answered(request: Request, handle: Handler) -> Response:
    """A refusal is an answer, too. What nobody foresaw is not."""
    try:
        return await handle(request)
    except (Problem, HTTPException, RequestValidationError) as refusal:
        return answer_to(refusal, request)


async def _hash(request: Request) -> bytes:
    """Of all that says what is asked."""
    said = (request.method, request.url.path, request.url.query, request.headers.get("If-Match", ""))
    media_type = request.headers.get("Content-Type", "")
    return hashlib.sha256("\n".join((*said, media_type, "")).encode() + await request.body()).digest()


def _refusal(found: KeyConflict) -> Problem:
    if found is KeyConflict.IN_FLIGHT:
        detail = f"the first request with this {HEADER} is being worked on; ask again"
        return Problem("idempotency-key-in-flight", detail, headers={"Retry-After": "1"})
    return Problem("idempotency-key-reused", f"this {HEADER} was used before, for another request")
