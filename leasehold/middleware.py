"""ASGI middleware that checks each request before the service sees it.

    app.add_middleware(LimitMiddleware, check=engine.check, subject=subject_of)

`check` is `Engine.check` (in process) or `AsyncClient.check` (an agent beside the service): the decisions are the same.
A denial is answered as the agent answers it: 429, or 503 if a policy fails closed, with the problem document,
`Retry-After` and the RateLimit headers. The response to an admitted request gets the RateLimit headers.

A WebSocket is checked when it is opened, as the GET request that it is. A denied handshake is answered with the same
problem document if the server supports it (the ASGI extension `websocket.http.response`). Otherwise the WebSocket is
closed before it is accepted, which servers answer with 403.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from leasehold.client.agent_protocol import Decision, RequestRejected, Subject
from protocol.denials import denial_of
from protocol.problems import MEDIA_TYPE
from web.request_ids import request_id_of

# The types of ASGI, as Starlette spells them.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

SubjectOf = Callable[[Scope], Subject | None]


class CheckFunction(Protocol):
    def __call__(self, subject: Subject, /) -> Awaitable[Decision]: ...


def by_route_and_address(scope: Scope) -> Subject:
    """Return what every request says about itself. A service that knows its tenants passes a function of its own."""
    subject = {"route": scope["path"], "method": scope.get("method", "GET")}  # a WebSocket's handshake is a GET
    return subject | {"ip": scope["client"][0]} if scope.get("client") else subject


class LimitMiddleware:
    """Check each request whose subject is not None."""

    def __init__(self, app: ASGIApp, *, check: CheckFunction, subject: SubjectOf = by_route_and_address) -> None:
        self._app = app
        self._check = check
        self._subject = subject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        subject = self._subject(scope) if scope["type"] in ("http", "websocket") else None
        if subject is None:
            await self._app(scope, receive, send)
            return
        try:
            decision = await self._check(subject)
        except RequestRejected as rejection:
            if rejection.status < HTTPStatus.INTERNAL_SERVER_ERROR:  # the service's own mistake, not its caller's
                raise
            await _reject(rejection, scope, receive, send)
            return
        if decision.allowed:
            await self._app(scope, receive, _adding_headers(decision, send))
        else:
            await _deny(decision, scope, receive, send)


def _adding_headers(decision: Decision, send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            message = {**message, "headers": [*message.get("headers", ()), *_raw(decision.headers)]}
        await send(message)

    return send_with_headers


async def _reject(rejection: RequestRejected, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that no decision could be made, as by an engine that has just started and has no policies yet."""
    document = {**rejection.problem, "instance": scope["path"], "request_id": request_id_of(scope)}
    await _answer(scope, receive, send, rejection.status, msgspec.json.encode(document), {"retry-after": "1"})


async def _deny(decision: Decision, scope: Scope, receive: Receive, send: Send) -> None:
    denial = denial_of(decision, scope["path"], request_id_of(scope))
    await _answer(scope, receive, send, denial.status, msgspec.json.encode(denial), decision.headers)


async def _answer(
    scope: Scope, receive: Receive, send: Send, status: int, body: bytes, headers: Mapping[str, str]
) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # the client's request to connect, which must be taken before it can be answered
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1013})  # try again later
            return
        kind = "websocket.http.response"
    own = {"content-type": MEDIA_TYPE, "content-length": str(len(body))}
    await send({"type": f"{kind}.start", "status": status, "headers": _raw({**headers, **own})})
    await send({"type": f"{kind}.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
