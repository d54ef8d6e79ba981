"""HPACK blocks are decoded as RFC 7541 has them: its own examples, and what it forbids."""

import pytest

from regional_agent.envoy.door import frames
from regional_agent.envoy.door.hpack import HeaderDecoder, HeaderListTooLarge, InvalidHeaderBlock, decode_huffman

# Appendix C.4 of RFC 7541: three requests with Huffman coding on one connection.
FIRST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
EXAMPLES = [
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", FIRST),
    ("828684be5886a8eb10649cbf", [*FIRST, (b"cache-control", b"no-cache")]),
    (
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        [
            (b":method", b"GET"),
            (b":scheme", b"https"),
            (b":path", b"/index.html"),
            FIRST[3],
            (b"custom-key", b"custom-value"),
        ],
    ),
]


def test_the_examples_of_the_standard() -> None:
    decoder = HeaderDecoder(16_384)
    for block, headers in EXAMPLES:
        assert decoder.decode(bytes.fromhex(block)) == headers


def test_a_block_that_changes_no_table_says_so() -> None:
    decoder = HeaderDecoder(16_384)
    decoder.decode(bytes.fromhex(EXAMPLES[0][0]))
    changes = decoder.changes
    assert changes
    decoder.decode(bytes.fromhex("828684be"))
    assert decoder.changes == changes


def test_old_entries_leave_a_full_table() -> None:
    decoder = HeaderDecoder(1 << 20)
    for number in range(200):
        value = b"%04d" % number * 10
        assert decoder.decode(b"\x40\x01a\x28" + value) == [(b"a", value)]
    assert decoder.decode(b"\xbe") == [(b"a", b"0199" * 10)]
    with pytest.raises(InvalidHeaderBlock, match="no entry"):
        decoder.decode(bytes([0x80 | 0x7F, 100]))


def test_our_own_fields_can_be_decoded() -> None:
    texts = [("grpc-message", "x" * length) for length in (0, 1, 126, 127, 128, 1000)]
    block = b"".join(frames.field(name, value) for name, value in texts)
    found = HeaderDecoder(16_384).decode(block)
    assert [(name.decode(), value.decode()) for name, value in found] == texts


@pytest.mark.parametrize(
    "block",
    ["80", "ff00", "00", "0003616263", "3fe21f", "8220", "ffffffffffffff", "00016183", "0001618100"],
)
def test_malformed_blocks_are_refused(block: str) -> None:
    with pytest.raises(InvalidHeaderBlock):
        HeaderDecoder(16_384).decode(bytes.fromhex(block))


@pytest.mark.parametrize("text", ["ffffffff", "ff", "00", "fe"])
def test_huffman_texts_end_as_the_standard_says(text: str) -> None:
    with pytest.raises(InvalidHeaderBlock):
        decode_huffman(bytes.fromhex(text))


def test_a_large_list_is_refused_after_it_was_decoded() -> None:
    decoder = HeaderDecoder(100)
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(bytes.fromhex(EXAMPLES[0][0]))
    assert decoder.decode(b"\xbe") == [FIRST[3]]
