"""Read the wire format of protocol buffers, as far as the messages of a rate limit service need it.

The generated classes would do as well, with two faults. They refuse a request in which any text is no UTF-8, and which
texts a request has is up to the proxy's clients: a client could make its requests unreadable, and so unlimited. And
they know the fields of the release that they were generated from.
"""

from protocol.protobuf.writing import BYTES, FIXED32, FIXED64, VARINT

FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
MAX_VARINT_BYTES = 10

Value = int | bytes


class MalformedMessage(ValueError):
    """The bytes are no message."""


def read_fields(message: bytes) -> list[tuple[int, Value]]:
    """Return the number and the value of each field: an integer, or the bytes of anything longer.

    Raises MalformedMessage.
    """
    fields: list[tuple[int, Value]] = []
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _read_varint(message, at)
            fields.append((number, value))
            continue
        if kind == BYTES:
            length, at = _read_varint(message, at)
        elif kind in FIXED_BYTES:
            length = FIXED_BYTES[kind]
        else:
            raise MalformedMessage(f"field {number} has the unknown wire type {kind}")
        end = at + length
        if end > len(message):
            raise MalformedMessage(f"the message ends within field {number}")
        fields.append((number, message[at:end]))
        at = end
    return fields


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    if at < len(message) and message[at] < 0x80:  # nearly all numbers of a request
        return message[at], at + 1
    value = 0
    for place in range(MAX_VARINT_BYTES):
        if at >= len(message):
            raise MalformedMessage("the message ends within a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at
    raise MalformedMessage("a number is too long")


def text_of(value: Value) -> str:
    """Return a text. What is no UTF-8 stands there as `\\xff`, so that different bytes stay different."""
    return as_bytes(value).decode(errors="backslashreplace")


def as_bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise MalformedMessage("a number stands where a message or a text is expected")
    return value


def as_integer(value: Value) -> int:
    if isinstance(value, int):
        return value
    raise MalformedMessage("a message or a text stands where a number is expected")
