"""Hash what names a person or is a secret: users, API keys, addresses and labels.

A hash is keyed, so that without the key no value is found by trying. Equal values of one field have equal hashes:
decisions of one API key can be counted and found, and replayed under another document, without knowing it.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache

from protocol.addresses import parse_address
from protocol.identifiers import parse_quota_key, quota_key
from protocol.limits.document import LABEL_PREFIX

PRIVATE_FIELDS = frozenset({"user", "api_key", "ip", "ip_prefix"})
HASH_PREFIX = "h_"
HASH_BYTES = 8
REMEMBERED = 20_000


class KeyHasher:
    """Hashes with one key. It remembers hashes: the same few values come again and again."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.hash = lru_cache(maxsize=REMEMBERED)(self._hash)

    def _hash(self, field: str, value: str) -> str:
        text = f"{field}\0{_spelt(field, value)}".encode()
        return HASH_PREFIX + hashlib.blake2b(text, key=self.key, digest_size=HASH_BYTES).hexdigest()

    def subject(self, subject: Mapping[str, str]) -> dict[str, str]:
        return {field: self.value(field, value) for field, value in subject.items()}

    def value(self, field: str, value: str) -> str:
        """Return the value of a field as it is kept."""
        return self.hash(field, value) if is_private(field) else value

    def quota(self, key: str) -> str:
        """Return a quota key as it is kept. Raises ValueError for what is no quota key."""
        quota, values = parse_quota_key(key)
        if not any(map(is_private, values)):
            return key
        return quota_key(quota, [(field, self.value(field, value)) for field, value in values.items()])


class PlainKeys(KeyHasher):
    """Keeps all values as they are, where the limits document says so."""

    def value(self, _: str, value: str) -> str:
        return value


def is_private(field: str) -> bool:
    return field in PRIVATE_FIELDS or field.startswith(LABEL_PREFIX)


def is_hash(value: str) -> bool:
    return value.startswith(HASH_PREFIX) and len(value) == len(HASH_PREFIX) + 2 * HASH_BYTES


def _spelt(field: str, value: str) -> str:
    """Return an address in the one form that quota keys have."""
    if field != "ip":
        return value
    try:
        return parse_address(value).text
    except ValueError:
        return value
