"""Write the wire format of protocol buffers, as far as our messages need it: fields up to number 15."""

import struct

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_NUMBER_TAGS, _FIXED64_TAGS, _BYTES_TAGS = (
    [bytes((number << 3 | kind,)) for number in range(16)] for kind in (VARINT, FIXED64, BYTES)
)
_64_BITS = 2**64 - 1


def varint(value: int) -> bytes:
    """Return an integer, of which each byte has seven bits. Negative ones count as 64 bits."""
    if 0 <= value < 0x80:
        return bytes((value,))
    value &= _64_BITS
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number_field(number: int, value: int) -> bytes:
    """Return a field of an integer, which is left out if it is 0."""
    return _NUMBER_TAGS[number] + varint(value) if value else b""


def choice_field(number: int, value: int) -> bytes:
    """Return an integer that is one of several fields (`oneof`), so that 0 is written as well."""
    return _NUMBER_TAGS[number] + varint(value)


def fixed64_field(number: int, value: bytes) -> bytes:
    return _FIXED64_TAGS[number] + value


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a field of bytes, a text or a message."""
    return _BYTES_TAGS[number] + varint(len(value)) + value


def struct_message(values: dict[str, str | int | bool]) -> bytes:
    """Return a `google.protobuf.Struct`."""
    entries = (bytes_field(1, key.encode()) + bytes_field(2, _struct_value(value)) for key, value in values.items())
    return b"".join(bytes_field(1, entry) for entry in entries)


def _struct_value(value: str | int | bool) -> bytes:
    if isinstance(value, bool):
        return choice_field(4, value)
    if isinstance(value, int):
        return fixed64_field(2, struct.pack("<d", value))
    return bytes_field(3, value.encode())
