"""The messages of `envoy.service.rate_limit_quota.v3`: reports that are read, and assignments that are written.

Assignments have the form that Envoy's source reads: token buckets and blanket rules, no requests per time unit. It
reads times in whole seconds, and fills buckets continuously. It takes two buckets for one if only the seconds of their
fill interval differ, so slow buckets have an interval with a nanosecond more.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from protocol.protobuf.reading import as_bytes, as_integer, read_fields, text_of
from protocol.protobuf.writing import bytes_field, choice_field, number_field
from regional_agent.envoy.quota.rules import TIME_TO_LIVE_MS, Assignment

STREAM_RATE_LIMIT_QUOTAS = "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas"
FAST_MICRO = 100_000_000  # such rates are given in whole requests a second, slower ones in requests an hour
HOUR_S = 3600
MAX_UINT32 = 2**32 - 1

BucketId = tuple[tuple[str, str], ...]  # sorted: maps have no order


class Blanket(IntEnum):
    """The decision that a proxy makes for all requests of a bucket."""

    ALLOW_ALL = 0
    DENY_ALL = 1


Strategy = Assignment | Blanket | None  # of requests; None: the bucket is abandoned


class Usage(NamedTuple):
    """A proxy's report of one bucket."""

    bucket: BucketId
    allowed: int
    denied: int
    elapsed_s: int


class Reports(NamedTuple):
    domain: str  # empty in all messages of a stream but the first
    usages: list[Usage]


def decode_reports(message: bytes) -> Reports:
    """Raises MalformedMessage."""
    domain, usages = "", []
    for number, value in read_fields(message):
        if number == 1:
            domain = text_of(value)
        elif number == 2:
            usages.append(_usage(as_bytes(value)))
    return Reports(domain, usages)


def _usage(message: bytes) -> Usage:
    bucket: BucketId = ()
    allowed = denied = elapsed_s = 0
    for number, value in read_fields(message):
        if number == 1:
            bucket = _bucket_id(as_bytes(value))
        elif number == 2:
            elapsed_s = next((as_integer(each) for field, each in read_fields(as_bytes(value)) if field == 1), 0)
        elif number == 3:
            allowed = as_integer(value)
        elif number == 4:
            denied = as_integer(value)
    return Usage(bucket, allowed, denied, elapsed_s)


def _bucket_id(message: bytes) -> BucketId:
    entries = (dict(read_fields(as_bytes(value))) for number, value in read_fields(message) if number == 1)
    return tuple(sorted((text_of(each.get(1, b"")), text_of(each.get(2, b""))) for each in entries))


def encode_bucket_id(bucket: BucketId) -> bytes:
    """Return the field `bucket_id` of an action."""
    entries = (bytes_field(1, key.encode()) + bytes_field(2, value.encode()) for key, value in bucket)
    return bytes_field(1, b"".join(bytes_field(1, entry) for entry in entries))


def encode_response(actions: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a response: the encoded bucket id and action of each bucket."""
    return b"".join(bytes_field(1, bucket_id + action) for bucket_id, action in actions)


def encode_action(strategy: Strategy) -> bytes:
    if strategy is None:
        return bytes_field(3, b"")
    return bytes_field(2, _TIME_TO_LIVE + bytes_field(3, _strategy(strategy)))


def _strategy(strategy: Assignment | Blanket) -> bytes:
    if isinstance(strategy, Blanket):
        return choice_field(1, strategy)
    if not strategy.rate_micro:
        return _strategy(Blanket.DENY_ALL)
    if strategy.rate_micro >= FAST_MICRO:
        tokens, interval = strategy.rate_micro // 1_000_000, _SECOND
    else:
        tokens, interval = strategy.rate_micro * HOUR_S // 1_000_000, _HOUR
    if not tokens:
        return _strategy(Blanket.DENY_ALL)
    bucket = number_field(1, min(strategy.tokens, MAX_UINT32)) + bytes_field(
        2, number_field(1, min(tokens, MAX_UINT32))
    )
    return bytes_field(3, bucket + bytes_field(3, interval))


_TIME_TO_LIVE = bytes_field(2, number_field(1, TIME_TO_LIVE_MS // 1000))
_SECOND = number_field(1, 1)
_HOUR = number_field(1, HOUR_S) + number_field(2, 1)
