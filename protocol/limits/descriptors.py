"""Turn the descriptors of Envoy's rate limit protocols into the subjects that policies read.

A descriptor is a list of entries, each a key with a value; a bucket id of RLQS is a map of them. Each entry becomes one
field of the subject: the one that the document names for its key, else the usual one, else a label. No value that a
client can choose makes a descriptor unreadable, because most proxies admit what their rate limit service refuses:

* the key of an entry becomes the name of a label in lower case, with `_` for each other character, 32 at most, and with
  `x_` in front if it does not begin with a letter;
* an entry whose field is taken becomes a label of its key, or, if that is taken too, with `_2`, `_3` and so on;
* an empty value is `-`, and characters that do not print are percent-encoded;
* a value that is too long for its field ends in `~` and digits of its SHA-256, so that it differs from others;
* of an `ip` the prefix length is left out, and what is no address is `0.0.0.0`: such requests share one quota.

Two labels are always there: `domain`, and `descriptor`, which has the keys of all entries in order (`tenant.path`). A
policy that matches both applies to exactly these descriptors, as a rule of envoyproxy/ratelimit does.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from protocol import check
from protocol.addresses import parse_address
from protocol.check import MAX_LABELS, MAX_VALUE_LENGTH
from protocol.limits.document import LABEL_PREFIX, EnvoyDomain, EnvoyRules

DOMAIN, DESCRIPTOR = "domain", "descriptor"  # labels of each descriptor
USUAL_FIELDS = {
    "remote_address": "ip",
    "masked_remote_address": "ip",
    "path": "route",
    "method": "method",
    "user": "user",
    "tenant": "tenant",
    "api_key": "api_key",
}
NO_VALUE = "-"
NO_ADDRESS = "0.0.0.0"  # noqa: S104 - no address to listen on
MAX_NAME = 32  # characters of a label's name
MAX_CHARS = {"route": 1024, "method": 16}  # of a value; of all other fields MAX_VALUE_LENGTH
HASH_DIGITS = 16  # of a value that is shortened; at most half of what is left of it
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_]")


class UnreadableDescriptor(ValueError):
    """A descriptor cannot become a subject. That depends on its keys, which a proxy's configuration has, only."""


class DescriptorMapping:
    """The mapping of one limits document."""

    def __init__(self, rules: EnvoyRules) -> None:
        self._domains = rules.domains

    def rules_of(self, domain: str) -> EnvoyDomain:
        return self._domains.get(domain) or _DEFAULTS

    def subject(self, domain: str, entries: Iterable[tuple[str, str]]) -> check.Subject:
        """Return the subject of a descriptor. A bucket id is given as its sorted items: maps have no order.

        Raises UnreadableDescriptor.
        """
        entries = list(entries)
        fields = self.rules_of(domain).entries
        labels = {DOMAIN: _text(domain), DESCRIPTOR: _text(".".join(key for key, _ in entries))}
        found: dict[str, str] = {}
        for key, value in entries:
            field = fields.get(key) or USUAL_FIELDS.get(key) or LABEL_PREFIX + label_name(key)
            _put(found, labels, field, key, value)
        if len(labels) > MAX_LABELS:
            raise UnreadableDescriptor(f"has {len(labels)} labels with `domain` and `descriptor`, at most {MAX_LABELS}")
        return check.Subject(**found, labels=labels)


_DEFAULTS = EnvoyDomain()


def label_name(key: str) -> str:
    """Return the name of the label that an entry of this key becomes."""
    name = _NOT_IN_NAMES.sub("_", key.lower())
    return (name if name[:1].isalpha() else f"x_{name}")[:MAX_NAME]


def shorten(value: str, most_chars: int) -> str:
    """Return a value of at most so many characters, which differs where the whole differs."""
    if len(value) <= most_chars:
        return value
    digits = min(HASH_DIGITS, most_chars // 2)
    ending = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:digits]
    return f"{value[: most_chars - digits - 1]}~{ending}"


def _put(found: dict[str, str], labels: dict[str, str], field: str, key: str, value: str) -> None:
    """Add an entry under its field, or under a label of its key where the field is taken."""
    name = field.removeprefix(LABEL_PREFIX)
    if name == field and field not in found:
        found[field] = _address(value) if field == "ip" else _text(value, MAX_CHARS.get(field, MAX_VALUE_LENGTH))
        return
    labels[_free_name(labels, label_name(key) if name == field else name)] = _text(value)


def _free_name(labels: Mapping[str, str], name: str) -> str:
    free, number = name, 1
    while free in labels:
        number += 1
        free = f"{name[: MAX_NAME - len(str(number)) - 1]}_{number}"
    return free


def _text(value: str, most_chars: int = MAX_VALUE_LENGTH) -> str:
    if not value.isprintable():
        value = "".join(char if char.isprintable() else quote(char, safe="", errors="replace") for char in value)
    return shorten(value, most_chars) or NO_VALUE


def _address(value: str) -> str:
    try:
        return parse_address(value.partition("/")[0]).text
    except ValueError:
        return NO_ADDRESS
