"""Validate the head of a request: the rules of HTTP/2 (RFC 9113, section 8) and those of gRPC over it."""

from collections.abc import Sequence
from typing import NamedTuple

from regional_agent.envoy.door.hpack import Header

PSEUDO = {b":method", b":scheme", b":path", b":authority"}
NOT_IN_HTTP2 = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
CONTENT_TYPES = (b"application/grpc", b"application/grpc+proto")
BAD_METHOD, BAD_CONTENT_TYPE = 405, 415  # HTTP statuses of requests that are no gRPC


class MalformedRequest(Exception):
    """A request that HTTP/2 forbids. It is not answered: its stream is reset."""


class RequestHead(NamedTuple):
    path: str
    headers: Sequence[Header]
    content_length: int | None
    http_status: int = 0  # what a request that is no gRPC is answered

    def values(self, name: bytes) -> list[str]:
        return [value.decode("latin-1") for each, value in self.headers if each == name]

    def metadata(self) -> dict[str, str]:
        """Return the headers without those that HTTP/2 and gRPC define; of several values of one name the last."""
        return {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self.headers
            if name not in (b"te", b"content-type") and not name.startswith(b"grpc-")
        }


def parse_head(headers: Sequence[Header]) -> RequestHead:
    """Raises MalformedRequest."""
    pseudo: dict[bytes, bytes] = {}
    for name, value in headers:
        if not name.startswith(b":"):
            break
        if name not in PSEUDO or name in pseudo:
            raise MalformedRequest(f"pseudo-header {name!r}")
        pseudo[name] = value
    fields = headers[len(pseudo) :]
    check_fields(fields)
    if not (pseudo.get(b":path") and b":method" in pseudo and b":scheme" in pseudo):
        raise MalformedRequest("a request has a method, a scheme and a path")
    lengths = {value for name, value in fields if name == b"content-length"}
    if len(lengths) > 1 or not all(each.isdigit() and len(each) < 20 for each in lengths):
        raise MalformedRequest("content-length")
    length = int(lengths.pop()) if lengths else None
    return RequestHead(pseudo[b":path"].decode("latin-1"), fields, length, _http_status(pseudo[b":method"], fields))


def check_fields(fields: Sequence[Header]) -> None:
    """Check the fields of a head, or those of trailers, in which no pseudo-header may be."""
    for name, value in fields:
        if not name or name.startswith(b":") or name in NOT_IN_HTTP2 or name != name.lower():
            raise MalformedRequest(f"header {name!r}")
        if name == b"te" and value != b"trailers":
            raise MalformedRequest("te may only say that trailers are accepted")


def _http_status(method: bytes, fields: Sequence[Header]) -> int:
    if method != b"POST":
        return BAD_METHOD
    types = [value.partition(b";")[0].strip() for name, value in fields if name == b"content-type"]
    return 0 if len(types) == 1 and types[0] in CONTENT_TYPES else BAD_CONTENT_TYPE
