"""The door that nearly every request comes through: checks, answered before the framework sees them.

FastAPI and what is around it cost sixty microseconds a request, ten times the decision. So the class that uvicorn makes
for each connection looks at the bytes first. A request that is plain (`POST /v1/check` or `/v1/check:batch`, whole,
well-formed, with a valid token, JSON within its bounds) is decided and answered right here. *Everything else* is handed
on untouched, byte for byte, and FastAPI answers it as if this door were not there: other paths, wrong tokens, bodies
that are too large or no JSON, unknown fields, `Expect`, chunks. So there is no second set of refusals that could say
something else than the first.

Heads and bodies come again and again: what was made of one is remembered under its bytes.

One request of a connection is under way at a time. What a client sends behind it waits unread, in the socket, once a
little of it is here; answers keep their order. Nothing here is a coroutine: the store's answer calls back.
"""

from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import httptools
import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from protocol.check import BatchAnswer, Check
from regional_agent.admission.check_cache import AskedBefore
from regional_agent.admission.engine import Admits, Asked
from regional_agent.admission.rules.generational_cache import Remembered
from regional_agent.http.batch import Batch, asked_of, permitted
from regional_agent.http.callers import CallerRules
from regional_agent.http.schemas import Answered, CheckPieces, Verdict, answered
from web.bodies import decode
from web.http_protocol import BoundedProtocol
from web.metrics import HttpMetrics
from web.problems import Problem
from web.request_ids import harmless, new_request_id

CHECK, BATCH = "/v1/check", "/v1/check:batch"
BEGINNING, END_OF_HEAD = b"POST /v1/check", b"\r\n\r\n"
MOST_HEADS, LONGEST_REMEMBERED = 1_024, 1_024
PLAIN_TYPES = (b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8")
# Headers that may change what is answered. Of each there is at most one, or the request is not plain.
TELLING = (b"content-type", b"content-length", b"authorization", b"host", b"origin", b"x-request-id", b"connection")
NEVER_PLAIN = (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade")
MOST_LENGTH_DIGITS = 20  # of Content-Length; more are zeros, or a number that no body has
FAULT = 500  # is always worth a line

_log = structlog.get_logger("web.requests")


class Head(NamedTuple):
    """What a request line and its headers come to."""

    is_plain: bool
    path: str = ""
    body_bytes: int = 0
    request_id: str | None = None
    may_adjust: bool = True


HANDED_ON = Head(False)
HALF = Head(True, body_bytes=1)


class _Headers:
    """Called by the parser. None once a header stands there that makes a request not plain."""

    def __init__(self) -> None:
        self.telling: dict[bytes, bytes] | None = {}
        self.is_whole = False

    def on_headers_complete(self) -> None:
        self.is_whole = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if self.telling is None:
            return
        if name in NEVER_PLAIN or name in self.telling:
            self.telling = None
        elif name in TELLING:
            self.telling[name] = value


class _NotUtf8(Exception):
    pass


_decode_pieces = msgspec.json.Decoder(CheckPieces).decode
_encode = msgspec.json.Encoder().encode


def _values(telling: dict[bytes, bytes], name: bytes) -> list[str]:
    return [telling[name].decode("latin-1")] if name in telling else []


class FastDoor:
    """What all connections of a process share."""

    def __init__(self, admission: Admits, metrics: HttpMetrics, *, max_body_bytes: int, callers: CallerRules) -> None:
        self.admission = admission
        self.metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._callers = callers
        self._heads: Remembered[bytes, Head] = Remembered(MOST_HEADS)
        self._asked: AskedBefore[bytes] = AskedBefore(admission)
        self._dated: list[tuple[bytes, bytes]] = []
        self._beginnings: dict[tuple[int, str], bytes] = {}

    # --- heads -------------------------------------------------------------------------------------------------------

    def head(self, raw: bytes) -> Head:
        head = self._heads.get(raw)
        if head is None:
            head = self._read(raw)
            if head.request_id is None and len(raw) <= LONGEST_REMEMBERED:  # an id of its own does not come again
                self._heads.put(raw, head)
        return head

    def _read(self, raw: bytes) -> Head:
        headers = _Headers()
        parser = httptools.HttpRequestParser(headers)
        try:
            parser.feed_data(raw)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return HANDED_ON
        if headers.telling is None or parser.get_http_version() != "1.1":
            return HANDED_ON
        return self._plain(raw[5 : raw.index(b" ", 5)].decode("latin-1"), headers.telling)

    def _plain(self, path: str, telling: dict[bytes, bytes]) -> Head:
        length = telling.get(b"content-length", b"")
        is_plain = (
            path in (CHECK, BATCH)
            and length.isdigit()
            and len(length) < MOST_LENGTH_DIGITS
            and int(length) <= self._max_body_bytes
            and telling.get(b"content-type", b"").lower() in PLAIN_TYPES
            and telling.get(b"connection", b"keep-alive").lower() == b"keep-alive"
            and self._is_welcome(telling)
        )
        if not is_plain:
            return HANDED_ON
        request_id = harmless(telling.get(b"x-request-id", b""))
        return Head(True, path, int(length), request_id, self._callers.may_adjust(_values(telling, b"authorization")))

    def _is_welcome(self, telling: dict[bytes, bytes]) -> bool:
        authorization, host, origin = (_values(telling, name) for name in (b"authorization", b"host", b"origin"))
        return self._callers.refusal(authorization, host, origin) is None

    # --- bodies ------------------------------------------------------------------------------------------------------

    def asked(self, raw: bytes) -> Asked | Exception:
        """What a check's JSON asks. Raises Problem for what is no check at all."""
        known = self._asked.find(raw)
        if known is not None:
            return known
        asked = asked_of(self.admission, decode(raw, Check))
        if isinstance(asked, Asked) and len(raw) <= LONGEST_REMEMBERED:
            self._asked.keep(raw, asked)
        return asked

    def asked_by_batch(self, raw: bytes) -> list[Asked | Exception] | None:
        """None where the whole has to be looked at more closely than piece by piece."""
        if b"\\" in raw or raw.count(b'"checks"') != 1:
            return None  # a name may stand there twice
        try:
            return [self._piece(bytes(piece)) for piece in _decode_pieces(raw).checks]
        except (msgspec.MsgspecError, RecursionError, _NotUtf8):
            return None

    def _piece(self, raw: bytes) -> Asked | Exception:
        """One check of a batch. A Problem with it is an answer of its own."""
        try:
            return self.asked(raw)
        except Problem as problem:
            if problem.kind == "invalid-json":  # then the body as a whole is none, either
                raise _NotUtf8 from None
            return problem

    # --- answers -----------------------------------------------------------------------------------------------------

    def beginning(self, status: int, media_type: str, dated: list[tuple[bytes, bytes]]) -> bytes:
        """Of an answer: all that is the same for a second. uvicorn makes a new list when the date changes."""
        if dated is not self._dated:
            self._dated = dated
            self._beginnings.clear()
        beginning = self._beginnings.get((status, media_type))
        if beginning is None:
            lines = [name + b": " + value for name, value in (*dated, (b"content-type", media_type.encode()))]
            beginning = STATUS_LINE[status] + b"\r\n".join([*lines, b""])
            self._beginnings[status, media_type] = beginning
        return beginning


class FastProtocol(BoundedProtocol):
    """One connection."""

    door: ClassVar[FastDoor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: Head | None = None  # of the request that is being decided
        self._raw = b""  # all of it
        self._started_s = 0.0
        self._decided = 0  # requests
        self._behind = bytearray()  # what came and is not looked at yet
        self._needed_bytes = 0  # how much of it makes a whole request
        self._answered_at_s = 0.0
        self._is_last = False

    @property
    def has_gone(self) -> bool:
        """Nobody is there any more to hear an answer."""
        return bool(self.transport.is_closing())

    @property
    def _is_silent(self) -> bool:
        return super()._is_silent and self._head is None and not self._answered_at_s

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self._head is None

    def _is_awaited(self) -> bool:
        begun = bool(self._behind) and self._head is None and not self.flow.write_paused
        return begun or super()._is_awaited()

    def _progress(self) -> tuple[int, int]:
        request, received = super()._progress()
        return request + self._decided, received + len(self._behind)

    # --- in ----------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._head is None and not self._behind and not self.flow.write_paused:
            self._take(data)
            return
        self._behind += data
        if self._head is not None or self.flow.write_paused:
            self.flow.pause_reading()  # the rest waits with the client
        elif len(self._behind) >= self._needed_bytes:
            self._go_on()

    def _go_on(self) -> None:
        data, self._behind, self._needed_bytes = bytes(self._behind), bytearray(), 0
        self.flow.resume_reading()
        self._take(data)

    def _take(self, data: bytes) -> None:
        """From the first byte of a request. Ends with everything looked at, or the rest in `_behind`."""
        while data and not self.transport.is_closing():
            if self._head is not None or self.flow.write_paused:
                self._behind += data
                return
            head, end = self._head_of(data)
            whole_bytes = end + head.body_bytes
            if not head.is_plain:
                self._hand_on(data)
                return
            if len(data) < whole_bytes:
                self._behind += data
                self._needed_bytes = whole_bytes
                self._await_arrival()
                return
            raw, data = data[:whole_bytes], data[whole_bytes:]
            self._decide(head, raw, raw[end:])

    def _head_of(self, data: bytes) -> tuple[Head, int]:
        """Return the head that the data begin with, and where it ends. Of half a head more is awaited, within its bound
        and unless it is malformed already: uvicorn refuses that at once.
        """
        if not (self._is_free() and data.startswith(BEGINNING[: len(data)])):
            return HANDED_ON, 0
        found = data.find(END_OF_HEAD)
        if found < 0:
            awaits_more = len(data) < self.max_header_bytes and is_begin_of_head(data)
            return (HALF, len(data)) if awaits_more else (HANDED_ON, 0)
        end = found + len(END_OF_HEAD)
        return (self.door.head(data[:end]), end) if end <= self.max_header_bytes else (HANDED_ON, 0)

    def _is_free(self) -> bool:
        """Whether uvicorn has nothing under way that must be answered, or be read to its end, first."""
        return (
            self._between_messages
            and (self.cycle is None or self.cycle.response_complete)
            and not self._refused
            and self._linger is None
        )

    def _hand_on(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_last:
            super().shutdown()

    # --- the decision ------------------------------------------------------------------------------------------------

    def _decide(self, head: Head, raw: bytes, body: bytes) -> None:
        self._head, self._raw, self._started_s = head, raw, perf_counter()
        self._decided += 1
        if head.path == BATCH:
            self._decide_batch(head, body)
            return
        try:
            asked = permitted(self.door.asked(body), may_adjust=head.may_adjust)
        except Problem as problem:
            asked = problem
        if isinstance(asked, Exception):
            self._told(asked)
        else:
            self.door.admission.submit(asked, self._told)

    def _decide_batch(self, head: Head, body: bytes) -> None:
        checks = self.door.asked_by_batch(body)
        if checks is None:
            self._head = None
            self._hand_on(self._raw)
        else:
            request_id = head.request_id or new_request_id()
            checks = [permitted(check, may_adjust=head.may_adjust) for check in checks]
            Batch(BATCH, request_id, partial(self._told_all, request_id)).submit(self.door.admission, checks)

    def _told_all(self, request_id: str, answer: BatchAnswer) -> None:
        self._answer(Answered(200, "application/json", {}, _encode(answer)), request_id)

    def _told(self, verdict: Verdict | Exception) -> None:
        assert self._head is not None
        if isinstance(verdict, Exception):  # nothing was consumed: it is asked again, and its refusal put into words
            self._head = None
            self._hand_on(self._raw)
            self._resume()
            return
        request_id = self._head.request_id or new_request_id()
        self._answer(answered(verdict, CHECK, request_id), request_id)

    # --- out ---------------------------------------------------------------------------------------------------------

    def _answer(self, told: Answered, request_id: str) -> None:
        assert self._head is not None
        path, self._head = self._head.path, None
        seconds = perf_counter() - self._started_s
        self.door.metrics.observe(path, "POST", told.status, seconds)
        if told.status >= FAULT:
            self._log_fault(path, told.status, seconds, request_id)
        if not self.transport.is_closing():
            self.transport.write(self._bytes_of(told, request_id))
            self._rest()

    def _bytes_of(self, told: Answered, request_id: str) -> bytes:
        beginning = self.door.beginning(told.status, told.media_type, self.server_state.default_headers)
        lines = [f"{name}: {value}\r\n" for name, value in told.headers.items()]
        ending = "connection: close\r\n\r\n" if self._is_last else "\r\n"
        head = f"content-length: {len(told.body)}\r\n{''.join(lines)}x-request-id: {request_id}\r\n{ending}"
        return beginning + head.encode("latin-1") + told.body

    def _log_fault(self, path: str, status: int, seconds: float, request_id: str) -> None:
        duration_ms = round(seconds * 1000, 2)
        _log.info("request", method="POST", route=path, status=status, duration_ms=duration_ms, request_id=request_id)

    def _rest(self) -> None:
        self.server_state.total_requests += 1
        if self._is_last:
            self.transport.close()
            return
        self._answered_at_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._close_when_silent(self.timeout_keep_alive)
        self._resume()

    def _resume(self) -> None:
        """Whoever called `_decide` goes on by itself, unless it has left the rest for later."""
        if self._behind and not self.flow.write_paused:
            self._go_on()

    # --- what uvicorn calls ------------------------------------------------------------------------------------------

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._head is None:
            self._resume()

    def timeout_keep_alive_handler(self) -> None:
        """One timer for a connection, and not one for each answer."""
        left_s = self._answered_at_s + self.timeout_keep_alive - self.loop.time()
        if self._head is not None or self._behind:
            self._close_when_silent(self.timeout_keep_alive)
        elif left_s > 0:
            self._close_when_silent(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _close_when_silent(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def shutdown(self) -> None:
        if self._head is not None or self._behind:
            self._is_last = True
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._behind.clear()
        super().connection_lost(exc)


def is_begin_of_head(data: bytes) -> bool:
    """Return whether what there is of a head can still become a plain one."""
    headers = _Headers()
    try:
        httptools.HttpRequestParser(headers).feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return False
    return not headers.is_whole and headers.telling is not None


def fast_protocol(door: FastDoor) -> type[FastProtocol]:
    """uvicorn makes the instances."""
    return type("FastProtocol", (FastProtocol,), {"door": door})
