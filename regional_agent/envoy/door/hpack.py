"""Decode HPACK header blocks (RFC 7541): what HTTP/2 clients send as the head of a request.

There is no encoder: the heads of our responses are static bytes, which every decoder understands.
"""

from collections import deque

Header = tuple[bytes, bytes]

TABLE_BYTES = 4_096  # of the dynamic table: what every client may use before it hears of another size
ENTRY_BYTES = 32  # that an entry of the table counts beyond its name and value
MAX_INTEGER_BYTES = 5
END_OF_STRING = 256  # the symbol with which no text ends


class InvalidHeaderBlock(Exception):
    """A header block cannot be decoded, so no later one of the connection can be."""


class HeaderListTooLarge(Exception):
    """A header list is larger than its bound. Its block was decoded, so the connection can go on."""


class HeaderDecoder:
    """The decoder of one connection."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._dynamic: deque[Header] = deque()  # the newest first
        self._bytes = 0
        self._limit = TABLE_BYTES
        self.changes = 0  # of the table: while it is the same, equal blocks have equal headers

    def decode(self, block: bytes) -> list[Header]:
        """Raises InvalidHeaderBlock or HeaderListTooLarge."""
        reader, headers, list_bytes = _Reader(block), list[Header](), 0
        while not reader.is_at_end:
            header = self._read_field(reader, may_resize=not headers)
            if header is None:
                continue
            list_bytes += len(header[0]) + len(header[1]) + ENTRY_BYTES
            if list_bytes <= self._max_list_bytes:
                headers.append(header)
        if list_bytes > self._max_list_bytes:
            raise HeaderListTooLarge
        return headers

    def _read_field(self, reader: "_Reader", *, may_resize: bool) -> Header | None:
        """Return the next header field, or None for a change of the table's size."""
        first = reader.peek()
        if first & 0x80:
            return self._entry(reader.integer(7))
        if first & 0x40:
            header = self._literal(reader, 6)
            self._add(header)
            return header
        if first & 0x20:
            if not may_resize:
                raise InvalidHeaderBlock("the size of the table changes behind a field")
            self._resize(reader.integer(5))
            return None
        return self._literal(reader, 4)

    def _literal(self, reader: "_Reader", prefix_bits: int) -> Header:
        index = reader.integer(prefix_bits)
        name = self._entry(index)[0] if index else reader.text()
        return name, reader.text()

    def _entry(self, index: int) -> Header:
        if 1 <= index <= len(STATIC):
            return STATIC[index - 1]
        if 0 <= index - len(STATIC) - 1 < len(self._dynamic):
            return self._dynamic[index - len(STATIC) - 1]
        raise InvalidHeaderBlock(f"there is no entry {index}")

    def _add(self, header: Header) -> None:
        self.changes += 1
        self._dynamic.appendleft(header)
        self._bytes += _size(header)
        self._evict()

    def _resize(self, limit: int) -> None:
        if limit > TABLE_BYTES:
            raise InvalidHeaderBlock("the table is made larger than it may be")
        self.changes += 1
        self._limit = limit
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._limit:
            self._bytes -= _size(self._dynamic.pop())


def _size(header: Header) -> int:
    return len(header[0]) + len(header[1]) + ENTRY_BYTES


class _Reader:
    """Reads integers and texts from a block."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._block)

    def peek(self) -> int:
        if self.is_at_end:
            raise InvalidHeaderBlock("the block ends within a field")
        return self._block[self._at]

    def integer(self, prefix_bits: int) -> int:
        largest = (1 << prefix_bits) - 1
        value = self.peek() & largest
        self._at += 1
        if value < largest:
            return value
        for place in range(MAX_INTEGER_BYTES):
            byte = self.peek()
            self._at += 1
            value += (byte & 0x7F) << (7 * place)
            if not byte & 0x80:
                return value
        raise InvalidHeaderBlock("an integer is too long")

    def text(self) -> bytes:
        is_huffman = bool(self.peek() & 0x80)
        length = self.integer(7)
        text = self._block[self._at : self._at + length]
        if len(text) < length:
            raise InvalidHeaderBlock("the block ends within a text")
        self._at += length
        return decode_huffman(text) if is_huffman else text


def decode_huffman(text: bytes) -> bytes:
    """Raises InvalidHeaderBlock for what no encoder makes."""
    found, code, bits = bytearray(), 0, 0
    for byte in text:
        for place in range(7, -1, -1):
            code, bits = code << 1 | byte >> place & 1, bits + 1
            symbol = _SYMBOLS.get((bits, code))
            if symbol is None:
                continue
            if symbol == END_OF_STRING:
                raise InvalidHeaderBlock("a text contains the end of a text")
            found.append(symbol)
            code, bits = 0, 0
    if bits > 7 or code != (1 << bits) - 1:
        raise InvalidHeaderBlock("a text is padded with other bits than ones")
    return bytes(found)


def _canonical_codes(lengths: str) -> dict[tuple[int, int], int]:
    """Return the symbol of each code by its length and bits. The code is canonical, so the lengths say all of it."""
    code, before, codes = 0, 0, {}
    for bits, symbol in sorted((int(digit, 36), symbol) for symbol, digit in enumerate(lengths)):
        code <<= bits - before
        codes[bits, code] = symbol
        code, before = code + 1, bits
    return codes


# RFC 7541, appendix B: the number of bits of each symbol's code, as a digit of base 36.
_SYMBOLS = _canonical_codes(
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6ca"
    "d67777777777777777777777878djde6f56565666577666567655677777fbeds"
    "kmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmn"
    "qqkjmnmpqqqrrqopjlqrrqrollqqsrrrkoklmllnmmppooqnqrqqrrrrrsrrrrrq"
    "u"
)

# RFC 7541, appendix A: the static table, as `name` or `name=value`.
_STATIC = """
:authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https :status=200 :status=204
:status=206 :status=304 :status=400 :status=404 :status=500 accept-charset accept-encoding=gzip,deflate
accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control
content-disposition content-encoding content-language content-length content-location content-range content-type
cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since
last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh retry-after
server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""


def _parse_static(text: str) -> tuple[Header, ...]:
    fields = (field.partition("=") for field in text.split())
    return tuple((name.encode(), value.replace(",", ", ").encode()) for name, _, value in fields)


STATIC = _parse_static(_STATIC)
