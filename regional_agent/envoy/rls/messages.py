"""The messages of `envoy.service.ratelimit.v3`: a request that is read, and a response that is written."""

from collections.abc import Mapping
from typing import NamedTuple

from protocol.protobuf.reading import Value, as_bytes, as_integer, read_fields, text_of
from protocol.protobuf.writing import bytes_field, number_field, struct_message

OK, OVER_LIMIT = 1, 2  # codes of a response, and of each of its statuses
MAX_UINT32 = 2**32 - 1
# The unit of a limit by the seconds of its window.
UNITS = {1: 1, 60: 2, 3600: 3, 86_400: 4, 604_800: 7, 30 * 86_400: 5}
OVERRIDE_UNITS = {1: "second", 2: "minute", 3: "hour", 4: "day"}  # those that a rate may have


class Override(NamedTuple):
    """A limit that a descriptor brings along."""

    requests: int
    unit: int


class Descriptor(NamedTuple):
    entries: tuple[tuple[str, str], ...]
    override: Override | None
    hits: int | None  # None: as the request or, without that, as the policy says
    is_refund: bool


class RateLimitRequest(NamedTuple):
    domain: str
    descriptors: tuple[Descriptor, ...]


def decode_request(message: bytes) -> RateLimitRequest:
    """Raises MalformedMessage."""
    domain, descriptors, hits = "", list[Descriptor](), 0
    for number, value in read_fields(message):
        if number == 1:
            domain = text_of(value)
        elif number == 2:
            descriptors.append(_descriptor(as_bytes(value)))
        elif number == 3:
            hits = as_integer(value)
    if hits:
        descriptors = [each if each.hits is not None else each._replace(hits=hits) for each in descriptors]
    return RateLimitRequest(domain, tuple(descriptors))


def _descriptor(message: bytes) -> Descriptor:
    entries, override, hits, is_refund = list[tuple[str, str]](), None, None, False
    for number, value in read_fields(message):
        if number == 1:
            entry = _fields_of(value)
            entries.append((text_of(entry.get(1, b"")), text_of(entry.get(2, b""))))
        elif number == 2:
            limit = _fields_of(value)
            override = Override(as_integer(limit.get(1, 0)), as_integer(limit.get(2, 0)))
        elif number == 3:
            hits = as_integer(_fields_of(value).get(1, 0))
        elif number == 4:
            is_refund = bool(as_integer(value))
    return Descriptor(tuple(entries), override, hits, is_refund)


def _fields_of(value: Value) -> dict[int, Value]:
    return dict(read_fields(as_bytes(value)))


def encode_code(code: int) -> bytes:
    return number_field(1, code)


def encode_limit(name: str, limit: int, window_s: int) -> bytes:
    """Return the field `current_limit` of a status."""
    units = number_field(1, min(limit, MAX_UINT32)) + number_field(2, UNITS.get(window_s, 0))
    return bytes_field(2, units + bytes_field(3, name.encode()))


def encode_status(code: int, current_limit: bytes = b"", remaining: int = 0, reset_ms: int = 0) -> bytes:
    """Return one status of a response. `current_limit` is made by `encode_limit`."""
    seconds, milliseconds = divmod(reset_ms, 1000)
    duration = number_field(1, seconds) + number_field(2, milliseconds * 1_000_000)
    reset = bytes_field(4, duration) if current_limit else b""
    return bytes_field(2, encode_code(code) + current_limit + number_field(3, min(remaining, MAX_UINT32)) + reset)


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return headers that the proxy adds to its response."""
    return b"".join(
        [
            bytes_field(3, bytes_field(1, name.encode()) + bytes_field(2, text.encode()))
            for name, text in headers.items()
        ]
    )


def encode_body(body: bytes) -> bytes:
    return bytes_field(5, body)


def encode_metadata(values: dict[str, str | int | bool]) -> bytes:
    return bytes_field(6, struct_message(values))
