"""Both services encode and parse replies that refuse one exchange or one want alike."""

import msgspec

from protocol.messages import ExchangeFault, ExchangeReply, ExchangeResponse, ItemRefused, SharesResponse
from protocol.outcomes import ExchangeOutcome, GrantRefusal


def test_a_refused_exchange_needs_neither_lane_nor_seq() -> None:
    fault = ExchangeFault(field="frozen", rule="json", reason="JSON is malformed.")
    reply = ExchangeReply(outcome=ExchangeOutcome.REFUSED, fault=fault)
    assert msgspec.json.decode(msgspec.json.encode(reply), type=ExchangeReply) == reply
    assert (reply.lane, reply.seq) == (None, None)


def test_a_refused_want_is_named_as_it_was_sent_even_if_it_is_no_quota_key() -> None:
    refused = ItemRefused(
        quota="/" * 2000, refusal=GrantRefusal.INVALID, reason="quota: Expected `str` of length <= 512"
    )
    sent = msgspec.json.encode(SharesResponse(rates=[], refused=[refused]))
    assert msgspec.json.decode(sent, type=SharesResponse).refused == [refused]


def test_a_field_that_a_later_release_adds_is_ignored() -> None:
    sent = b'{"replies": [], "versions": {"policies": 1, "blocks": 2, "plans": 3}, "weather": "fair"}'
    assert msgspec.json.decode(sent, type=ExchangeResponse).versions.policies == 1
