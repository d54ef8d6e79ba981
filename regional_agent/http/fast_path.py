"""The fast path: checks that are answered before the framework sees them.

FastAPI and its middleware cost 60 microseconds a request, ten times the decision. So the class that uvicorn makes for
each connection looks at the bytes first. A plain request (`POST /v1/check` or `/v1/check:batch`, complete, well-formed,
with a valid token, JSON within its bounds) is decided and answered here. *Everything else* goes to uvicorn untouched,
byte for byte, and FastAPI answers it as if there were no fast path: other paths, wrong tokens, bodies that are too
large or no JSON, unknown fields, `Expect`, chunks. So every refusal is made in one place only.

Heads and bodies repeat, so parsed heads and planned checks are cached under their bytes.

A connection has one request under way at a time. What the client sends behind it stays in the socket, once a little of
it has been read; answers keep their order. Nothing here is a coroutine: the store's reply calls back.
"""

import asyncio
import math
import re
from functools import partial
from time import perf_counter, time
from typing import Any, ClassVar, NamedTuple

import httptools
import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from protocol.check import BatchAnswer
from protocol.traces.trace_context import TraceContext
from regional_agent.admission.answers import Verdict
from regional_agent.admission.check_cache import CheckCache
from regional_agent.admission.engine import Admission
from regional_agent.admission.pending_check import Caller
from regional_agent.admission.plan import CheckPlan
from regional_agent.http.batch import PendingBatch, authorize, decode_check, plan_or_refusal
from regional_agent.http.callers import CallerRules, Permission
from regional_agent.http.schemas import BatchItems, HttpAnswer, check_response
from web.http_protocol import BoundedProtocol
from web.metrics import HttpMetrics
from web.problems import Problem
from web.request_ids import harmless, new_request_id
from web.tls.peers import PeerCertificate, call_before_end

CHECK, BATCH = "/v1/check", "/v1/check:batch"
REQUEST_PREFIX, END_OF_HEAD = b"POST /v1/check", b"\r\n\r\n"
MAX_HEADS, MAX_HEAD_BYTES, MAX_CACHED_BYTES = 1_024, 4_096, 1_024  # a head may have a JWT
PLAIN_TYPES = (b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8")
# Headers that may change the answer. A plain request has each of them once at most.
RELEVANT = (b"content-type", b"content-length", b"authorization", b"host", b"origin", b"x-request-id", b"connection")
CALLER = (b"authorization", b"host", b"origin")
NEVER_PLAIN = (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade")
# The header of a trace differs with each request, and changes no answer. A head without it is one that repeats.
TRACEPARENT, TRACEPARENT_LINE = b"raceparent: ", re.compile(rb"\r\n[Tt]raceparent: ([0-9a-f-]{55})(?=\r\n[^ \t])")
MAX_LENGTH_DIGITS = 20  # of Content-Length; more are zeros, or a number that no body has
SERVER_ERROR = 500  # these are always logged

_log = structlog.get_logger("web.requests")


class Head(NamedTuple):
    """A parsed request line with its headers."""

    is_plain: bool
    path: str = ""
    body_bytes: int = 0
    request_id: str | None = None
    may_adjust: bool = True
    expires_at_s: float = math.inf  # when the caller's JWT or certificate is not accepted any more


HeadKey = bytes | tuple[PeerCertificate, bytes]  # with the certificate that its connection was accepted for

NOT_PLAIN = Head(False)
INCOMPLETE = Head(True, body_bytes=1)


class _Headers:
    """The relevant headers that the parser found; None once one of them makes the request not plain."""

    def __init__(self) -> None:
        self.relevant: dict[bytes, bytes] | None = {}
        self.is_whole = False

    def on_headers_complete(self) -> None:
        self.is_whole = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if self.relevant is None:
            return
        if name in NEVER_PLAIN or name in self.relevant:
            self.relevant = None
        elif name in RELEVANT:
            self.relevant[name] = value


_decode_items = msgspec.json.Decoder(BatchItems).decode
_encode = msgspec.json.Encoder().encode


def _values(relevant: dict[bytes, bytes], name: bytes) -> list[str]:
    return [relevant[name].decode("latin-1")] if name in relevant else []


class FastPath:
    """The state that all connections of a process share."""

    def __init__(
        self, admission: Admission, metrics: HttpMetrics, *, max_body_bytes: int, callers: CallerRules
    ) -> None:
        self.admission = admission
        self.metrics = metrics
        self._max_body_bytes = max_body_bytes
        self.callers = callers
        self.heads: dict[HeadKey, Head] = {}  # also whether their callers are accepted
        callers.on_change.append(self.heads.clear)
        self.plans: CheckCache[bytes, CheckPlan] = CheckCache(admission)
        self._default_headers: list[tuple[bytes, bytes]] = []
        self._response_heads: dict[tuple[int, str], bytes] = {}

    # --- heads --------------------------------------------------------------------------------------------------------

    def read_head(self, key: HeadKey) -> Head:
        """Parse a head, and keep it in `heads` if it may come again."""
        certificate, raw = (None, key) if isinstance(key, bytes) else key
        head = self._parse_head(raw, certificate)
        # One with an id of its own does not repeat. One that is not plain may be so next time, if it has a JWT.
        if head.is_plain and head.request_id is None and len(raw) <= MAX_HEAD_BYTES:
            if len(self.heads) >= MAX_HEADS:
                self.heads.clear()
            self.heads[key] = head
        return head

    def _parse_head(self, raw: bytes, certificate: PeerCertificate | None) -> Head:
        headers = _Headers()
        parser = httptools.HttpRequestParser(headers)
        try:
            parser.feed_data(raw)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return NOT_PLAIN
        if headers.relevant is None or parser.get_http_version() != "1.1":
            return NOT_PLAIN
        return self._check_head(raw[5 : raw.index(b" ", 5)].decode("latin-1"), headers.relevant, certificate)

    def _check_head(self, path: str, relevant: dict[bytes, bytes], certificate: PeerCertificate | None) -> Head:
        length = relevant.get(b"content-length", b"")
        is_plain = (
            path in (CHECK, BATCH)
            and length.isdigit()
            and len(length) < MAX_LENGTH_DIGITS
            and int(length) <= self._max_body_bytes
            and relevant.get(b"content-type", b"").lower() in PLAIN_TYPES
            and relevant.get(b"connection", b"keep-alive").lower() == b"keep-alive"
        )
        if not is_plain:
            return NOT_PLAIN
        authorization, host, origin = (_values(relevant, name) for name in CALLER)
        caller = self.callers.permission(authorization, host, origin, certificate)
        if not isinstance(caller, Permission):
            return NOT_PLAIN
        request_id = harmless(relevant.get(b"x-request-id", b""))
        return Head(True, path, int(length), request_id, caller.may_adjust, caller.expires_at_s)

    # --- bodies -------------------------------------------------------------------------------------------------------

    def make_plan(self, raw: bytes) -> CheckPlan | Exception:
        """Plan a check by its JSON, and keep the plan in `plans`. Raises Problem for a body that is no check at all."""
        plan = plan_or_refusal(self.admission, decode_check(raw))
        if isinstance(plan, CheckPlan) and len(raw) <= MAX_CACHED_BYTES:
            self.plans.keep(raw, plan)
        return plan

    def read_batch(self, raw: bytes) -> list[bytes] | None:
        """Return the checks of a batch; None where it must be validated as a whole, which FastAPI's route does."""
        if b"\\" in raw or raw.count(b'"checks"') != 1:
            return None  # a name may occur twice
        try:
            str(raw, "utf-8")
            return [bytes(item) for item in _decode_items(raw).checks]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None

    def plan_item(self, raw: bytes, *, may_adjust: bool) -> CheckPlan | Exception:
        """Return the plan of one check of a batch, or why it is refused, or raise Problem."""
        return authorize(self.plans.find(raw) or self.make_plan(raw), may_adjust=may_adjust)

    # --- answers ------------------------------------------------------------------------------------------------------

    def encode_response(
        self, answer: HttpAnswer, request_id: str, default_headers: list[tuple[bytes, bytes]], *, is_last: bool
    ) -> bytes:
        """Return a response. Its first lines stay the same for a second: uvicorn makes a new list with each date."""
        if default_headers is not self._default_headers:
            self._default_headers = default_headers
            self._response_heads.clear()
        begin = self._response_heads.get((answer.status, answer.media_type))
        if begin is None:
            headers = (*default_headers, (b"content-type", answer.media_type.encode()))
            lines = [name + b": " + value for name, value in headers]
            begin = STATUS_LINE[answer.status] + b"\r\n".join([*lines, b"content-length: "])
            self._response_heads[answer.status, answer.media_type] = begin
        others = "".join([f"{name}: {value}\r\n" for name, value in answer.headers.items()])
        end = "connection: close\r\n\r\n" if is_last else "\r\n"
        head = f"{len(answer.body)}\r\n{others}x-request-id: {request_id}\r\n{end}"
        return begin + head.encode("latin-1") + answer.body


class FastProtocol(BoundedProtocol):
    """One connection."""

    fast_path: ClassVar[FastPath]
    trace_context: TraceContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: Head | None = None  # of the request that is being decided
        self._raw = b""  # its bytes
        self._request_id = ""
        self._traceparent: bytes | None = None
        self._started_s = 0.0
        self._decided = 0  # requests so far
        self._unread = bytearray()  # received, and not parsed yet
        self._needed_bytes = 0  # of them, for a complete request
        self._answered_at_s = 0.0
        self._is_last = False
        self._identified: PeerCertificate | None = None  # the client's certificate, if it stands for a token
        self._end: asyncio.TimerHandle | None = None  # before that certificate's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._identified = self.fast_path.callers.identified(self._client_certificate)
        self._end = call_before_end(self._identified, self.shutdown)

    @property
    def has_disconnected(self) -> bool:
        """Return whether the client has closed the connection, so that no answer reaches it."""
        return bool(self.transport.is_closing())

    @property
    def _is_silent(self) -> bool:
        return super()._is_silent and self._head is None and not self._answered_at_s

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self._head is None

    def _is_awaited(self) -> bool:
        begun = bool(self._unread) and self._head is None and not self.flow.write_paused
        return begun or super()._is_awaited()

    def _progress(self) -> tuple[int, int]:
        request, received = super()._progress()
        return request + self._decided, received + len(self._unread)

    # --- input --------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._head is None and not self._unread and not self.flow.write_paused:
            self._parse(data)
            return
        self._unread += data
        if self._head is not None or self.flow.write_paused:
            self.flow.pause_reading()  # the rest waits with the client
        elif len(self._unread) >= self._needed_bytes:
            self._parse_unread()

    def _parse_unread(self) -> None:
        data, self._unread, self._needed_bytes = bytes(self._unread), bytearray(), 0
        self.flow.resume_reading()
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse requests from the first byte of one on, and keep an incomplete rest in `_unread`."""
        while data and not self.transport.is_closing():
            if self._head is not None or self.flow.write_paused:
                self._unread += data
                return
            head, end = self._find_head(data)
            whole_bytes = end + head.body_bytes
            if not head.is_plain:
                self._hand_on(data)
                return
            if len(data) < whole_bytes:
                self._unread += data
                self._needed_bytes = whole_bytes
                self._await_arrival()
                return
            raw, data = data[:whole_bytes], data[whole_bytes:]
            self._decide(head, raw, raw[end:])

    def _find_head(self, data: bytes) -> tuple[Head, int]:
        """Return the head that the data begin with, and where it ends.

        An incomplete head is awaited, within its bound and unless it is malformed already: uvicorn refuses that.
        """
        is_free = (  # uvicorn has no request that must be answered, or read to its end, first
            self._between_messages
            and (self.cycle is None or self.cycle.response_complete)
            and not self._refused
            and self._linger is None
        )
        if not (is_free and data.startswith(REQUEST_PREFIX[: len(data)])):
            return NOT_PLAIN, 0
        found = data.find(END_OF_HEAD)
        if found < 0:
            may_complete = len(data) < self.max_header_bytes and is_head_prefix(data)
            return (INCOMPLETE, len(data)) if may_complete else (NOT_PLAIN, 0)
        end = found + len(END_OF_HEAD)
        if end > self.max_header_bytes:
            return NOT_PLAIN, 0
        raw, self._traceparent = data[:end], None
        if TRACEPARENT in raw and (line := TRACEPARENT_LINE.search(raw)) is not None:
            raw, self._traceparent = raw[: line.start()] + raw[line.end() :], line[1]
        key: HeadKey = raw if self._identified is None else (self._identified, raw)
        head = self.fast_path.heads.get(key)
        if head is None or head.expires_at_s <= time():
            head = self.fast_path.read_head(key)
        return head, end

    def _hand_on(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_last:
            super().shutdown()

    # --- the decision -------------------------------------------------------------------------------------------------

    def _decide(self, head: Head, raw: bytes, body: bytes, caller: Caller | None = None) -> None:
        """`caller`: gets the verdict in place of this connection, and passes it on."""
        self._head, self._raw, self._started_s = head, raw, perf_counter()
        self._request_id = head.request_id or new_request_id()
        self._decided += 1
        if head.path == BATCH:
            self._decide_batch(head, body)
            return
        try:
            plan = self.fast_path.plans.find(body) or self.fast_path.make_plan(body)
            if not head.may_adjust:
                plan = authorize(plan, may_adjust=False)
        except Problem as problem:
            plan = problem
        if isinstance(plan, Exception):
            (caller or self).on_verdict(plan)
        else:
            self.fast_path.admission.submit(plan, caller or self)

    def _decide_batch(self, head: Head, body: bytes) -> None:
        path = self.fast_path
        checks = path.read_batch(body)
        if checks is None:
            self._head = None
            self._hand_on(self._raw)
            return
        plan = partial(path.plan_item, may_adjust=head.may_adjust)
        request_id = self._request_id
        PendingBatch(path.admission, plan, self._on_batch_answer, path=BATCH, request_id=request_id).submit(checks)

    def _on_batch_answer(self, answer: BatchAnswer) -> None:
        self._answer(HttpAnswer(200, "application/json", {}, _encode(answer)))

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        if isinstance(verdict, Exception):  # nothing was consumed: FastAPI's route plans it again, and words it
            self._head = None
            self._hand_on(self._raw)
            self._resume()
        else:
            self._answer(check_response(verdict, CHECK, self._request_id))

    # --- output -------------------------------------------------------------------------------------------------------

    def _answer(self, answer: HttpAnswer) -> None:
        assert self._head is not None
        path, self._head = self._head.path, None
        seconds, server = perf_counter() - self._started_s, self.server_state
        self.fast_path.metrics.observe(path, "POST", answer.status, seconds)
        if answer.status >= SERVER_ERROR:
            self._log_error(path, answer.status, seconds)
        if self.transport.is_closing():
            return
        is_last = self._is_last
        response = self.fast_path.encode_response(answer, self._request_id, server.default_headers, is_last=is_last)
        self.transport.write(response)
        server.total_requests += 1
        if is_last:
            self.transport.close()
            return
        self._answered_at_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._close_when_idle(self.timeout_keep_alive)
        if self._unread:
            self._resume()

    def _log_error(self, path: str, status: int, seconds: float) -> None:
        duration_ms, request_id = round(seconds * 1000, 2), self._request_id
        _log.info("request", method="POST", route=path, status=status, duration_ms=duration_ms, request_id=request_id)

    def _resume(self) -> None:
        """Parse what arrived behind the request, unless the loop in `_parse` does."""
        if self._unread and not self.flow.write_paused:
            self._parse_unread()

    # --- what uvicorn calls -------------------------------------------------------------------------------------------

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._head is None:
            self._resume()

    def timeout_keep_alive_handler(self) -> None:
        """Keep one timer for a connection instead of one for each answer."""
        left_s = self._answered_at_s + self.timeout_keep_alive - self.loop.time()
        if self._head is not None or self._unread:
            self._close_when_idle(self.timeout_keep_alive)
        elif left_s > 0:
            self._close_when_idle(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _close_when_idle(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def shutdown(self) -> None:
        if self._head is not None or self._unread:
            self._is_last = True
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


def is_head_prefix(data: bytes) -> bool:
    """Return whether an incomplete head can still become a plain one."""
    headers = _Headers()
    try:
        httptools.HttpRequestParser(headers).feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return False
    return not headers.is_whole and headers.relevant is not None


def fast_protocol(fast_path: FastPath) -> type[FastProtocol]:
    """Return the class of which uvicorn makes an instance for each connection."""
    return type("FastProtocol", (FastProtocol,), {"fast_path": fast_path})
