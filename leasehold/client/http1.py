"""HTTP/1.1 as the client speaks it: where the agent is, the bytes of a request, and the parser of a response.

It supports little on purpose: no redirects, no proxies, no cookies. The agent runs on the same machine, or in the same
private network.
"""

import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

import httptools

from leasehold.client.agent_protocol import AgentSilent, AgentUnavailable, Call, Response

if TYPE_CHECKING:
    from ssl import SSLContext

FileName = str | os.PathLike[str]
MAX_BODY_BYTES = 16 * 1024 * 1024
HEALTH_CHECK = Call("GET", "/healthz", b"", repeatable=True)
_HTTP_URL = re.compile(r"(https?)://(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]/?#:@\s]+))(?::(\d{1,5}))?/?", re.IGNORECASE)
_UNIX_URL = re.compile(r"unix://(/.+)", re.IGNORECASE)


class ServerAddress(NamedTuple):
    """The address of an agent, and the TLS context that verifies its certificate."""

    host: str
    port: int
    uds: str | None  # the path of a unix socket
    tls: "SSLContext | None" = None

    @property
    def host_header(self) -> str:
        name = "agent" if self.uds else f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}"


def parse_url(
    url: str, ca_file: FileName | None = None, certificate: tuple[FileName, FileName] | None = None
) -> ServerAddress:
    """Parse `http://host:port`, `https://host:port` or `unix:///path`, and read the files for https."""
    http = _HTTP_URL.fullmatch(url)
    is_https = http is not None and http[1].lower() == "https"
    if not is_https and (ca_file or certificate):
        raise ValueError(f"url: {url!r} does not begin with https://, so ca_file and certificate are not used")
    if unix := _UNIX_URL.fullmatch(url):
        return ServerAddress("", 0, unix[1])
    port = int(http[4] or (443 if is_https else 80)) if http else 0
    if http is None or port > 65535:
        raise ValueError(f"url: {url!r} is neither http(s)://host:port nor unix:///path/of/a/socket")
    return ServerAddress((http[2] or http[3]).lower(), port, None, _tls(ca_file, certificate) if is_https else None)


def _tls(ca_file: FileName | None, certificate: tuple[FileName, FileName] | None) -> "SSLContext":
    """Return a context that verifies the agent's certificate and host name, and reads changed files again."""
    from pathlib import Path  # noqa: PLC0415 - for https only: the client loads few modules

    from web.tls.context import ReloadedContext, TlsFiles, client_context  # noqa: PLC0415

    paths = (None if each is None else Path(each) for each in (ca_file, *(certificate or (None, None))))
    return ReloadedContext(TlsFiles(*paths), client_context)


def request_bytes(call: Call, host: str, token: str | None) -> bytes:
    """Return one request as it is sent."""
    authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
    head = (
        f"{call.method} {call.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"{authorization}{_trace_header()}Content-Length: {len(call.body)}\r\n\r\n"
    )
    return head.encode("latin-1") + call.body


def _trace_header() -> str:
    """Return the header with the W3C trace context, if the service has loaded OpenTelemetry and traces this request."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"traceparent: 00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}\r\n"


class Timeouts(NamedTuple):
    """The time that an agent may be silent, and the time that a call may take while the agent gives signs of life."""

    silence_s: float
    longest_wait_s: float


class ResponseReader:
    """Collect one response from the bytes that arrive."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self.is_complete = self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        if not data:
            raise AgentSilent("the agent closed the connection before it had answered")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise AgentUnavailable(f"the agent's answer is not HTTP: {error}") from None
        if len(self._body) > MAX_BODY_BYTES:
            raise AgentUnavailable("the agent's answer is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.keeps_alive = bool(self._parser.should_keep_alive())  # the parser forgets it as soon as this returns

    def response(self) -> Response:
        return Response(self._parser.get_status_code(), self._headers, bytes(self._body))
