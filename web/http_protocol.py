"""Bound request heads, and answer requests that cannot be parsed with a problem document.
uvicorn does neither. Parsed bytes are counted exactly, and those of a head that does not end are counted as they
arrive. After a refusal our half of the connection is closed, and input is discarded for a moment: closing at once would
reset the connection, and the client might never read the refusal.

A body that is refused before it is complete (413) is given the same moment: if it ends within it, the connection can
be used again. Otherwise it is closed.

A request has to arrive in time. One that stays incomplete is answered 408, and its connection is closed. A connection
that sends nothing is closed without an answer. Each connection has one timer, which runs only while input is awaited.
`web.connections` has the limits.
"""

import asyncio
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protocol.problems import MEDIA_TYPE
from web.connections import SILENT, SLOW, ConnectionLimits
from web.problems import Problem, problem_document
from web.request_ids import new_request_id
from web.tls.peers import PeerCertificate, peer_certificate_of

LINGER_S = 5.0
CLIENT_CERTIFICATE = "client_certificate"  # its name in `request.state`


class _HeadTooLarge(Exception):
    """Stops the parser from inside one of its callbacks."""


class _TwoHosts(Exception):
    """Stops the parser: RFC 9112 demands that a request with two Host headers is refused."""


class BoundedProtocol(HttpToolsProtocol):
    max_header_bytes: ClassVar[int] = 16_384
    limits: ClassVar[ConnectionLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heads_begun = 0
        self._in_head = False
        self._between_messages = True
        self._parsed_bytes = 0  # of this head, by what the parser handed over
        self._streamed_bytes = 0  # of this head, by what arrived while it was open
        self._refused = False
        self._linger: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # by the parser
        self._has_host = False
        self._arrival: asyncio.TimerHandle | None = None  # while a request is awaited
        self._arrival_seen = (0, 0)  # how far it had come when the timer was set
        self._client_certificate: PeerCertificate | None = None

    # --- the number of connections -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client_certificate = peer_certificate_of(transport)
        self._await_arrival()
        self.limits.opened(self)

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being served, so that the connection can be closed."""
        return self._is_silent or (self._between_messages and (self.cycle is None or self.cycle.response_complete))

    @property
    def _is_silent(self) -> bool:
        """Return whether no complete request has arrived on this connection."""
        return self.cycle is None

    def drop(self, reason: str) -> None:
        self.limits.closed(reason)
        self.transport.abort()

    # --- the time that a request may take to arrive -----------------------------------------------------------------

    def _await_arrival(self) -> None:
        if self._arrival is None:
            self._arrival_seen = self._progress()
            self._arrival = self.loop.call_later(self.limits.request_timeout_s, self._check_arrival)

    def _progress(self) -> tuple[int, int]:
        """Return the number of the awaited request, and of the bytes received on the connection."""
        return self._heads_begun, self._received_bytes

    def _is_awaited(self) -> bool:
        """Return whether a request has begun, and is incomplete because the client has not sent the rest."""
        return not self._between_messages and not self.flow.read_paused

    def _check_arrival(self) -> None:
        self._arrival = None
        if self._refused or self._linger is not None or self.transport.is_closing():
            return
        (request, received), (request_then, received_then) = self._progress(), self._arrival_seen
        gets_on = not self._in_head and received - received_then >= self.limits.min_body_bytes
        if not self._is_awaited():
            if self._is_silent:
                self.drop(SILENT)
        elif request != request_then or gets_on:
            self._await_arrival()
        else:
            self.limits.closed(SLOW)
            self._refuse(Problem("request-timeout", "The request did not arrive in time."))

    # --- counting ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        begun_before, between_before = self._heads_begun, self._between_messages
        self._received_bytes += len(data)
        super().data_received(data)
        if not self._between_messages:
            self._await_arrival()
        if self._in_head and not self._refused:
            self._count_streamed(len(data), self._heads_begun - begun_before, between_before)

    def _count_streamed(self, length: int, heads_begun: int, between_before: bool) -> None:
        if heads_begun == 0:
            self._streamed_bytes += length
        elif heads_begun == 1 and between_before:
            self._streamed_bytes = length
        else:  # the head began somewhere behind other requests: what was parsed of it is all that is certain
            self._streamed_bytes = self._parsed_bytes
        if self._streamed_bytes > self.max_header_bytes:
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._heads_begun += 1
        self._in_head = True
        self._between_messages = False
        self._has_host = False
        self._parsed_bytes = 0
        self.scope["state"][CLIENT_CERTIFICATE] = self._client_certificate

    def on_url(self, url: bytes) -> None:
        self._count_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_parsed(len(name) + len(value) + 4)
        if len(name) == 4 and name.lower() == b"host":
            if self._has_host:
                raise _TwoHosts
            self._has_host = True
        super().on_header(name, value)

    def _count_parsed(self, length: int) -> None:
        self._parsed_bytes += length
        if self._parsed_bytes > self.max_header_bytes:
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._between_messages = True
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # --- refusing ----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses, which uvicorn calls this for, also from inside our callbacks."""
        if self._parsed_bytes > self.max_header_bytes:
            self._refuse(self._head_too_large())
        else:
            self._refuse(Problem("bad-request", msg))

    def _head_too_large(self) -> Problem:
        detail = f"Request line and headers may have {self.max_header_bytes} bytes at most."
        return Problem("headers-too-large", detail, extra={"max_header_bytes": self.max_header_bytes})

    def _refuse(self, problem: Problem) -> None:
        self._refused = True
        unanswered = self.cycle is not None and not self.cycle.response_complete
        if unanswered and self._in_head:
            self.cycle.keep_alive = False  # earlier requests are answered, in their order; the last answer closes
        elif unanswered and self.cycle.response_started:
            self.transport.close()
        else:
            if unanswered:  # its body or its trailers are the trouble: this is its answer
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._write_and_close(problem)

    def _write_and_close(self, problem: Problem) -> None:
        self.transport.write(self._head_and_body(problem))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _head_and_body(self, problem: Problem) -> bytes:
        request_id = new_request_id()
        body = msgspec.json.encode(problem_document(problem, "", request_id))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[problem.status] + lines + b"\r\n" + body

    # --- lingering ---------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        if self._arrival is not None:
            self._arrival.cancel()
        self.limits.lost(self)
        super().connection_lost(exc)


def bounded_protocol(
    max_header_bytes: int, limits: ConnectionLimits, protocol: type[BoundedProtocol] = BoundedProtocol
) -> type[BoundedProtocol]:
    """Return a protocol class for one server, because uvicorn makes the instances."""
    return type(protocol.__name__, (protocol,), {"max_header_bytes": max_header_bytes, "limits": limits})
