"""HTTP/2 frames (RFC 9113): their types, flags and errors, and those that this server sends."""

from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9  # of a frame
MAX_FRAME_BYTES = 16_384  # that a peer may send without being allowed more; we allow no more
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535  # of each connection, and of each stream until settings say otherwise

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 3, 4, 5, 6


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer broke the protocol, so the connection ends with a GOAWAY."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StreamFault(Exception):
    """The peer broke the protocol on one stream, which ends with a RST_STREAM."""

    def __init__(self, code: ErrorCode, stream_id: int) -> None:
        super().__init__(code.name)
        self.code = code
        self.stream_id = stream_id


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3), kind, flags, stream_id.to_bytes(4), payload)


def settings(values: dict[int, int]) -> bytes:
    payload = b"".join(name.to_bytes(2) + value.to_bytes(4) for name, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + reason.encode())


def without_padding(payload: bytes, flags: int) -> bytes:
    """Raises ConnectionFault for padding that is longer than its frame."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def field(name: str, value: str) -> bytes:
    """Return a header field that changes no table, so it is understood in any order: HPACK's literal, never indexed."""
    return b"\x00%b%b" % (_text(name.encode()), _text(value.encode()))


def _text(text: bytes) -> bytes:
    return _integer(len(text)) + text


def _integer(value: int) -> bytes:
    """Return an integer of HPACK with a prefix of seven bits."""
    if value < 0x7F:
        return bytes((value,))
    rest, found = value - 0x7F, bytearray((0x7F,))
    while rest >= 0x80:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)
