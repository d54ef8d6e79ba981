"""Middleware of every request: a request id, a bound on the body, and a line in the access log.

Both middlewares are plain ASGI. RequestContext is the outer one, so that a request has an id, one log line
and an answer whatever happens inside, other middleware included. install_requests keeps that order.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import structlog
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.compatibility.releases import RELEASE_HEADER
from web.metrics import IS_HELD_OPEN, HttpMetrics, method_label
from web.problems import Problem, answer_to, problem_response
from web.request_ids import request_id_of

_STATES = RELEASE_HEADER.encode()
_PROBES = ("/healthz", "/readyz", "/metrics")  # requested every few seconds
_FAULT = 500  # from this status on, every request is logged
MAX_LENGTH_DIGITS = 19  # of a Content-Length
_CLIENT_GONE = 499  # nginx's status of a request whose client disconnected before the response

_log = structlog.get_logger("web.requests")


def install_requests(
    app: FastAPI,
    *,
    max_body_bytes: int,
    metrics: HttpMetrics | None = None,
    quiet: Collection[str] = (),
    stated: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add the middleware to an app. Requests of `quiet` paths are counted, and logged only if they fail.

    A request that states its release is answered with the headers in `stated`.
    """
    # The middleware that is added last is the outermost.
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    app.add_middleware(RequestContext, metrics=metrics, quiet=quiet, stated=stated)


class RequestContext:
    """Adds X-Request-Id, binds the id to all log lines, writes the access log, and answers every exception."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics | None = None,
        quiet: Collection[str] = (),
        stated: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._stated = [(name.encode(), value.encode()) for name, value in stated.items()]
        self._quiet = frozenset((*_PROBES, *quiet))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = time.perf_counter_ns()
        request_id = request_id_of(scope)
        stated = self._stated if self._stated and _header(scope, _STATES) is not None else ()
        reply = (_HeadReply if scope["method"] == "HEAD" else _Reply)(send, request_id, stated)
        inner = _as_get(scope)
        bound = structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._serve(inner, receive, reply)
        finally:
            self._note(scope["method"], inner, reply.status, time.perf_counter_ns() - started_ns)
            structlog.contextvars.reset_contextvars(**bound)

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        try:
            await self._app(scope, receive, reply)
        except (ClientDisconnect, _NoBodyWanted):
            return
        except Exception as error:
            if reply.status != _CLIENT_GONE:
                raise  # the response has begun: the server closes the connection
            await answer_to(error, Request(scope))(scope, receive, reply)

    def _note(self, method: str, scope: Scope, status: int, duration_ns: int) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        if self._metrics is not None:
            observe = self._metrics.observe_held if scope.get(IS_HELD_OPEN) else self._metrics.observe
            observe(route, method_label(method), status, duration_ns / 1e9)
        if status >= _FAULT or scope["path"] not in self._quiet:
            _log.info("request", method=method, route=route, status=status, duration_ms=duration_ns // 10_000 / 100)


class _Reply:
    """Sends a response, remembers its status, and adds the request id and further headers."""

    def __init__(self, send: Send, request_id: str, more: Iterable[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = [(b"x-request-id", request_id.encode("ascii")), *more]
        self.status = _CLIENT_GONE

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)


class _NoBodyWanted(Exception):
    """Ends the response to a HEAD request, whose GET may stream for ever."""


class _HeadReply(_Reply):
    """Sends the headers of a response at once, and no body."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await super().__call__(message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        elif message.get("more_body"):
            raise _NoBodyWanted


def _as_get(scope: Scope) -> Scope:
    """Turn HEAD into GET, of which it is the response without a body (RFC 9110), so that routes need not know it."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


class BodyLimit:
    """Refuses bodies over `max_body_bytes`: by their Content-Length at once, and otherwise by counting bytes."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._declares_too_much(scope):
            await problem_response(self._too_large(scope), Request(scope))(scope, receive, send)
        else:
            await self._app(scope, self._counted(scope, receive), send)

    def _declares_too_much(self, scope: Scope) -> bool:
        declared = _header(scope, b"content-length")
        if declared is None or not declared.isdigit():
            return False
        digits = declared.lstrip(b"0")  # int() refuses thousands of digits
        return len(digits) > MAX_LENGTH_DIGITS or int(digits or b"0") > self._max_body_bytes

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        received_bytes = 0

        async def counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._max_body_bytes:
                raise self._too_large(scope)
            return message

        return counted

    def _too_large(self, scope: Scope) -> Problem:
        # A client that waits for 100-continue may never send the body, and then the connection cannot be reused.
        headers = {"Connection": "close"} if _header(scope, b"expect") is not None else {}
        detail = f"The body is too large. Send at most {self._max_body_bytes} bytes."
        return Problem("body-too-large", detail, headers=headers, extra={"max_body_bytes": self._max_body_bytes})


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)
