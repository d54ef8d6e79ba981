"""Read and write the wire format of protocol buffers, as far as the messages of a rate limit service need it.

The generated classes would do as well, with two faults. They refuse a request in which any text is no UTF-8, and which
texts a request has is up to the proxy's clients: a client could make its requests unreadable, and so unlimited. And
they know the fields of the release that they were generated from.
"""

import struct

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
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


def varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


# The tags of the fields up to 15, which are all that these messages have.
_NUMBER_TAGS, _BYTES_TAGS = ([bytes((number << 3 | kind,)) for number in range(16)] for kind in (VARINT, BYTES))


def number_field(number: int, value: int) -> bytes:
    """Return a field of an integer, which is left out if it is 0."""
    return _NUMBER_TAGS[number] + varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    return _BYTES_TAGS[number] + varint(len(value)) + value


def struct_message(values: dict[str, str | int | bool]) -> bytes:
    """Return a `google.protobuf.Struct`."""
    entries = (bytes_field(1, key.encode()) + bytes_field(2, _struct_value(value)) for key, value in values.items())
    return b"".join(bytes_field(1, entry) for entry in entries)


def _struct_value(value: str | int | bool) -> bytes:
    if isinstance(value, bool):
        return varint(4 << 3) + varint(value)
    if isinstance(value, int):
        return varint(2 << 3 | FIXED64) + struct.pack("<d", value)
    return bytes_field(3, value.encode())
