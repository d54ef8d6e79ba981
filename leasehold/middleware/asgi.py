"""ASGI middleware that checks each HTTP request and each WebSocket before the service sees it.

    app.add_middleware(LimitMiddleware, check=client.check, subject=subject_of)

`check` is `AsyncClient.check` (an agent beside the service) or `Engine.check` (in process): the decisions are the same.
The service's code finds the decision in `request.state.limit_decision` (`scope["state"]["limit_decision"]`).

A WebSocket is checked when it is opened, as the GET request that it is. A denied handshake is answered with the same
problem document as a request if the server supports it (the ASGI extension `websocket.http.response`). Otherwise the
WebSocket is closed before it is accepted, which servers answer with 403.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from leasehold.client.agent_protocol import Decision, Denied, RequestRejected, Subject
from leasehold.middleware.refusals import Refusal, headers_to_forward, refuse_denied, refuse_undecided
from web.request_ids import request_id_of

# The types of ASGI, as Starlette spells them.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

SubjectOf = Callable[[Scope], Subject | None]


class AsyncCheckFunction(Protocol):
    """A check for event loops: `AsyncClient.check` or `Engine.check`."""

    def __call__(self, subject: Subject, /) -> Awaitable[Decision]: ...


def by_route_and_address(scope: Scope) -> Subject:
    """Return what every request says about itself. A service that knows its tenants passes a function of its own."""
    subject = {"route": scope["path"], "method": scope.get("method", "GET")}  # a WebSocket's handshake is a GET
    return subject | {"ip": scope["client"][0]} if scope.get("client") else subject


class LimitMiddleware:
    """Check each request whose subject is not None, and answer those that are denied.

    `Denied`, raised by the service before its response begins, is answered in the same way. Without `check`, this is
    all that the middleware does. With `show_policies` customers see the names of policies and quotas.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        check: AsyncCheckFunction | None = None,
        subject: SubjectOf = by_route_and_address,
        show_policies: bool = False,
    ) -> None:
        self._app = app
        self._check = check
        self._subject = subject
        self._show_policies = show_policies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        response = _Response(scope, receive, send)
        subject = None if self._check is None else self._subject(scope)
        try:
            if self._check is not None and subject is not None:
                decision = await self._check(subject)
                scope.setdefault("state", {})["limit_decision"] = decision
                if not decision.allowed:
                    raise Denied(decision)
                response.headers = headers_to_forward(decision, show_policies=self._show_policies)
            await self._app(scope, response.receive, response.send)
        except Denied as denied:
            if response.has_begun:
                raise
            await response.refuse(self._refusal(denied.decision, scope))
        except RequestRejected as rejection:
            if response.has_begun:
                raise
            await response.refuse(refuse_undecided(rejection, scope["path"], request_id_of(scope)))

    def _refusal(self, decision: Decision, scope: Scope) -> Refusal:
        return refuse_denied(decision, scope["path"], request_id_of(scope), show_policies=self._show_policies)


class _Response:
    """The response to one request or handshake: the service's with more headers, or a refusal."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_handshake_received = False
        self.headers: Mapping[str, str] = {}
        self.has_begun = False

    async def receive(self) -> Message:
        self._is_handshake_received = True
        return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            message = {**message, "headers": [*message.get("headers", ()), *_raw(self.headers)]}
        self.has_begun = True
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        kind = "http.response"
        if self._scope["type"] == "websocket":
            if not self._is_handshake_received:
                await self._receive()  # the request to connect must be taken before it can be answered
            if "websocket.http.response" not in (self._scope.get("extensions") or {}):
                await self._send({"type": "websocket.close", "code": 1013})  # try again later
                return
            kind = "websocket.http.response"
        await self._send({"type": f"{kind}.start", "status": refusal.status, "headers": _raw(refusal.headers)})
        await self._send({"type": f"{kind}.body", "body": refusal.body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
