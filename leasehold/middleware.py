"""ASGI middleware: a request that may not happen is answered before the service sees it.

    app.add_middleware(Limited, ask=engine.check, subject=subject_of)

`ask` is `Engine.check` (in process) or `AsyncClient.check` (an agent beside the service): the answers are the same. A
denial is the agent's own: 429, or 503 where a policy fails closed, with the problem document, `Retry-After` and the
RateLimit headers. A request that is admitted gets the RateLimit headers on its way out.

A WebSocket is asked about when it is opened, as the GET request that it is. If it is denied the handshake is answered
with the same problem document where the server can do that (the ASGI extension `websocket.http.response`), else it is
closed before it is accepted, which servers answer with 403.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leasehold.asking import Decision, Refused, Subject
from protocol.check import denial_of
from protocol.problems import MEDIA_TYPE
from web.request_ids import request_id_of

SubjectOf = Callable[[Scope], Subject | None]


class Ask(Protocol):
    def __call__(self, subject: Subject, /) -> Awaitable[Decision]: ...


def by_route_and_address(scope: Scope) -> Subject:
    """What every request tells of itself. A service knows its tenants; it says so in a function of its own."""
    subject = {"route": scope["path"], "method": scope.get("method", "GET")}  # a WebSocket's handshake is a GET
    return subject | {"ip": scope["client"][0]} if scope.get("client") else subject


class Limited:
    def __init__(self, app: ASGIApp, *, ask: Ask, subject: SubjectOf = by_route_and_address) -> None:
        self._app = app
        self._ask = ask
        self._subject = subject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        subject = self._subject(scope) if scope["type"] in ("http", "websocket") else None
        if subject is None:  # nobody is asked about it
            await self._app(scope, receive, send)
            return
        try:
            decision = await self._ask(subject)
        except Refused as refused:
            if refused.status < HTTPStatus.INTERNAL_SERVER_ERROR:  # the question is wrong: the service's own fault
                raise
            await _refuse(refused, scope, receive, send)
            return
        if decision.allowed:
            await self._app(scope, receive, _passing_on(decision, send))
        else:
            await _deny(decision, scope, receive, send)


def _passing_on(decision: Decision, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            message = {**message, "headers": [*message.get("headers", ()), *_raw(decision.headers)]}
        await send(message)

    return sending


async def _refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that no decision could be made, as by an engine that has just started and has no policies yet."""
    document = {**refused.problem, "instance": scope["path"], "request_id": request_id_of(scope)}
    await _answer(scope, receive, send, refused.status, msgspec.json.encode(document), {"retry-after": "1"})


async def _deny(decision: Decision, scope: Scope, receive: Receive, send: Send) -> None:
    denial = denial_of(decision, scope["path"], request_id_of(scope))
    await _answer(scope, receive, send, denial.status, msgspec.json.encode(denial), decision.headers)


async def _answer(
    scope: Scope, receive: Receive, send: Send, status: int, body: bytes, headers: Mapping[str, str]
) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # the client's wish to connect, which has to be taken before it can be answered
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1013})  # try again later
            return
        kind = "websocket.http.response"
    own = {"content-type": MEDIA_TYPE, "content-length": str(len(body))}
    await send({"type": f"{kind}.start", "status": status, "headers": _raw({**headers, **own})})
    await send({"type": f"{kind}.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
