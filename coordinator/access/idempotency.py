"""`Idempotency-Key`: a client that does not know whether its request was served sends it again, and it is served once.

One mechanism for all that people change: their routers make routes of the class IdempotentRoute. A repeated request
with the same key is given the stored response. Another request with that key is refused, and so is any while the first
one is still being served. A response that says nothing about the change, because the service failed or the caller was
not let in, is not stored.
"""

import hashlib
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID, uuid4, uuid5

from fastapi import Depends, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from coordinator.access.auth import RequireScope, caller_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency_records import Attempt, KeyConflict, StoredResponse, claim, release, store
from coordinator.state import Coordinator, coordinator_of
from web.openapi import describe_headers, describe_refusals
from web.problems import Problem, answer_to, refused
from web.strict_routes import Handler, StrictRoute

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
MAX_KEY_LENGTH = 255
_MUTATIONS = {"POST", "PUT", "PATCH", "DELETE"}
_NOT_STORED = frozenset((401, 403, 500))
_STORED_HEADERS = ("content-type", "etag", "location")


class ResponseWithSecret(Response):
    """A response that shows a secret once. `stored_body` is the body without it, for repeated requests."""

    stored_body: bytes


async def _declare_key(
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description="A text of your choice. A request is served once for each key, and answered alike for a day.",
            examples=["5f6c1f0e-close-2026-11"],
        ),
    ] = None,
) -> None:
    """Declare the header to FastAPI, which describes it. IdempotentRoute reads it."""


class IdempotentRoute(StrictRoute):
    """A route for people. It authenticates before anything else, and changes something once for each key."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        changes = bool(_MUTATIONS & set(options.get("methods") or ()))
        if changes:
            options["dependencies"] = [*(options.get("dependencies") or ()), Depends(_declare_key)]
        super().__init__(path, endpoint, **options)
        for scope in (each.call for each in self.dependant.dependencies if isinstance(each.call, RequireScope)):
            self.description = f"{self.description}\n\n{scope.description}".strip()
        if changes:
            describe_refusals(self.responses, [409])
            for status in self.responses.keys() - _NOT_STORED:
                describe_headers(self.responses[status], [REPLAYED])

    async def before(self, request: Request) -> None:
        request.state.caller = await caller_of(request, await coordinator_of(request))

    async def around(self, request: Request, handle: Handler) -> Response:
        key = request.headers.get(HEADER)
        if key is None or request.method not in _MUTATIONS:
            return await handle(request)
        return await _serve_once(request, _checked(key), handle)


def id_for(request: Request, caller: Caller) -> UUID:
    """Return an id for what a request creates. With a key it is the same at each attempt, so none creates a second."""
    key = request.headers.get(HEADER)
    return uuid4() if key is None else uuid5(caller.token_id, f"{request.method} {request.url.path} {key}")


def _checked(key: str) -> str:
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isascii() or not key.isprintable():
        raise refused(HEADER, "format", f"Send 1 to {MAX_KEY_LENGTH} printable ASCII characters.")
    return key


async def _serve_once(request: Request, key: str, handle: Handler) -> Response:
    coordinator, caller = await coordinator_of(request), request.state.caller
    attempt = Attempt(caller.token_id, key, await _hash(request), uuid4())
    found = await coordinator.database.run(lambda c: claim(c, attempt, coordinator.clock.now()))
    if isinstance(found, KeyConflict):
        raise _problem_of(found)
    if found is not None:
        return Response(found.body, found.status, {**found.headers, REPLAYED: "true"})
    return await _serve_first(request, attempt, handle, coordinator)


async def _serve_first(request: Request, attempt: Attempt, handle: Handler, coordinator: Coordinator) -> Response:
    try:
        response = await _respond(request, handle)
    except Exception:
        await coordinator.database.run(lambda c: release(c, attempt))
        raise
    if response.status_code >= 500 or response.status_code in _NOT_STORED:
        await coordinator.database.run(lambda c: release(c, attempt))
    else:
        headers = {name: response.headers[name] for name in _STORED_HEADERS if name in response.headers}
        body = response.stored_body if isinstance(response, ResponseWithSecret) else bytes(response.body)
        stored = StoredResponse(response.status_code, headers, body)
        await coordinator.database.run(lambda c: store(c, attempt, stored))
    return response


async def _respond(request: Request, handle: Handler) -> Response:
    """Turn a refusal into a response, which is stored like any other. Unexpected errors are not."""
    try:
        return await handle(request)
    except (Problem, HTTPException, RequestValidationError) as refusal:
        return answer_to(refusal, request)


async def _hash(request: Request) -> bytes:
    """Hash everything that says what the request asks for."""
    parts = (request.method, request.url.path, request.url.query, request.headers.get("If-Match", ""))
    media_type = request.headers.get("Content-Type", "")
    return hashlib.sha256("\n".join((*parts, media_type, "")).encode() + await request.body()).digest()


def _problem_of(conflict: KeyConflict) -> Problem:
    if conflict is KeyConflict.IN_FLIGHT:
        detail = f"The first request with this {HEADER} is still being served. Send it again later."
        return Problem("idempotency-key-in-flight", detail, headers={"Retry-After": "1"})
    return Problem("idempotency-key-reused", f"This {HEADER} was used for another request. Use a new one.")
