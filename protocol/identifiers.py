"""Identifiers that both sides must build alike.

A *quota key* names one limited thing: the quota of the document and the values it is counted by, such as
`exports:tenant=acme`. Values come from requests, so all but a few plain characters are percent-encoded: a key
never holds a separator that a value brought along.

A *fingerprint* tells one incarnation of a region's store from another: the store by its `run_id` and the id of its
replication history, and, where replicas confirm each reply, these by their `run_id`s. It also has the number of links
to replicas that the store had made by then: one that was linked again may have been a primary meanwhile. So an agent
that knows other replicas, or none, is fenced by every script.
"""

import functools
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Annotated, NamedTuple
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,62}$"
REGION_PATTERN = r"^[a-z][a-z0-9-]{0,30}$"
MAX_QUOTA_KEY_LENGTH = 512
ESCAPE = "%"  # begins each character of a key that stands there percent-encoded
KEYS_REMEMBERED = 10_000  # parsed: the same few are named again and again

Name = Annotated[str, Meta(pattern=NAME_PATTERN, description="lower case letters, digits, - and _")]
RegionName = Annotated[str, Meta(pattern=REGION_PATTERN, description="lower case letters, digits and -")]
QuotaKey = Annotated[str, Meta(min_length=1, max_length=MAX_QUOTA_KEY_LENGTH, description="quota:dimension=value")]
PeriodId = Annotated[str, Meta(min_length=4, max_length=64, description="such as 2026-11")]

_PLAIN = re.compile(r"[A-Za-z0-9_.~-]*").fullmatch  # what percent-encoding leaves as it is
_NAME = re.compile(NAME_PATTERN)
_REGION = re.compile(REGION_PATTERN)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_region(text: str) -> bool:
    return _REGION.fullmatch(text) is not None


def quota_key(quota: str, dimensions: Sequence[tuple[str, str]]) -> str:
    values = [f"{name}={value if _PLAIN(value) else quote(value, safe='')}" for name, value in dimensions]
    return f"{quota}:{','.join(values)}"


@functools.lru_cache(maxsize=KEYS_REMEMBERED)
def parse_quota_key(key: str) -> tuple[str, Mapping[str, str]]:
    """Return the quota and its dimensions. Raise ValueError for what `quota_key` would never build."""
    quota, separator, rest = key.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
    dimensions = {name: unquote(value) for name, _, value in pairs}
    if not separator or not is_name(quota) or quota_key(quota, list(dimensions.items())) != key:
        raise ValueError(f"not a quota key: {key!r}")
    return quota, MappingProxyType(dimensions)  # it is cached, so it must not be changed


def canonical_quota_key(text: str) -> str:
    """Return the key that a person has written, in whose values plain characters need not be percent-encoded.

    Raise ValueError for what is no key. A value with a comma or a percent sign of its own has these percent-encoded.
    """
    quota, separator, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
    if not separator or not is_name(quota) or any(not name or not equals for name, equals, _ in pairs):
        example = "exports:tenant=acme, with `,` and `%` in a value as %2C and %25"
        raise ValueError(f"{text!r} is no quota key. Write it as {example}.")
    return quota_key(quota, [(name, unquote(value)) for name, _, value in pairs])


def name_of_quota(key: str) -> str:
    return key.partition(":")[0]


def subject_key(quota: str, subject: Mapping[str, str]) -> str:
    """Return the canonical key of a subject: its fields in alphabetical order, whichever order a policy uses."""
    return quota_key(quota, sorted(subject.items()))


@functools.lru_cache(maxsize=KEYS_REMEMBERED)
def wider_keys(key: str) -> tuple[str, ...]:
    """Return the keys whose overrides apply to a key: its own subject first, wider ones, the whole quota last."""
    quota, dimensions = parse_quota_key(key)
    pairs = sorted(dimensions.items())
    return tuple(
        quota_key(quota, chosen) for fields in range(len(pairs), -1, -1) for chosen in combinations(pairs, fields)
    )


def digest(parts: Sequence[str]) -> str:
    """Return a name of fixed length for texts of any length."""
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def operation_digest(tenant: str, operation_id: str) -> str:
    """Return the name of an operation: its id is unique within its tenant."""
    return digest([tenant, operation_id])


def lane_of(key: str, lanes: int) -> int:
    """Return the lane that a quota key belongs to for the whole of an epoch."""
    return zlib.crc32(key.encode()) % lanes


# --- fingerprints -----------------------------------------------------------------------------------------------------

MAX_REPLICAS = 3  # that a fingerprint names: it is at most 256 characters long
_NAMES = "+"


class StoreName(NamedTuple):
    run_id: str
    history: str  # the id of its replication history (`master_replid`)


def with_replicas(store: str, run_ids: Iterable[str], links_made: str) -> str:
    """Return the fingerprint of an incarnation whose replies these replicas confirm."""
    named = sorted(run_ids)
    return _NAMES.join((store, links_made, *named)) if named else store


def store_of(fingerprint: str) -> str:
    """Return the fingerprint of the store alone."""
    return fingerprint.partition(_NAMES)[0]


def replicas_of(fingerprint: str) -> frozenset[str]:
    """Return the run ids of the replicas that confirm each reply."""
    return frozenset(fingerprint.split(_NAMES)[2:])


def links_made_of(fingerprint: str) -> str:
    return "".join(fingerprint.split(_NAMES)[1:2])


def name_of(fingerprint: str) -> StoreName:
    run_id, _, history = store_of(fingerprint).partition(":")
    return StoreName(run_id, history)
