"""A limits document that is being made from another configuration, with what has no equal in it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from protocol.limits.descriptors import USUAL_FIELDS, DescriptorMapping, label_name
from protocol.limits.document import LABEL_PREFIX, EnvoyDomain, EnvoyRules

MAX_NAME = 63
SPELT = ("path", "method")  # fields that Leasehold normalises, and others compare as they are
NO_UNITS = {"kind": "allowance", "limit": 0, "period": "day"}  # admits nothing: a rate is always above zero
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


class InvalidConfiguration(Exception):
    """The configuration is not one of this kind. The text names the place."""


class Imported:
    def __init__(self) -> None:
        self.quotas: list[dict[str, Any]] = []
        self.policies: list[dict[str, Any]] = []
        self.domains: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []  # what has no equal, each with its reason

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"plans": {}, "quotas": self.quotas, "policies": self.policies}
        return found | ({"envoy": {"domains": self.domains}} if self.domains else {})

    def put_in_shadow(self) -> None:
        """Let the document deny nothing, so that what it would deny can be compared first."""
        for policy in self.policies:
            policy["shadow"] = True

    def note(self, where: str, reason: str) -> None:
        self.notes.append(f"{where}: {reason}")

    def limit(self, name: str, terms: Mapping[str, Any], policy: Mapping[str, Any]) -> str:
        """Add a quota, and the policy that uses it. Return their name."""
        name = self._free_name(name)
        self.quotas.append({"name": name, **terms})
        on_failure = "closed" if terms is NO_UNITS else "open"  # as Envoy does by default
        self.policies.append({"name": name, **policy, "quota": name, "on_store_failure": on_failure})
        return name

    def name_fields(self, domain: str, keys: Iterable[str], fixed: Iterable[str]) -> None:
        """Say which fields the keys of a domain become. A key that is compared with a value becomes a label."""
        labels = {key for key in keys if key in USUAL_FIELDS and (key in SPELT or key in set(fixed))}
        labels = {key for key in labels if USUAL_FIELDS[key] != "ip"}
        if labels:
            self.domains[domain] = {"entries": {key: LABEL_PREFIX + label_name(key) for key in sorted(labels)}}

    def fields_of(self, domain: str, keys: Iterable[str]) -> list[str]:
        """Return the field that each entry of a descriptor with these keys becomes."""
        rules = EnvoyDomain(entries=self.domains.get(domain, {}).get("entries", {}))
        samples = [(key, f"10.0.0.{place}") for place, key in enumerate(keys)]
        subject = DescriptorMapping(EnvoyRules(domains={domain: rules})).subject(domain, samples)
        fields = {name: getattr(subject, name) for name in ("tenant", "user", "api_key", "ip", "route", "method")}
        fields |= {LABEL_PREFIX + name: value for name, value in (subject.labels or {}).items()}
        return [next(name for name, value in fields.items() if value == sample) for _, sample in samples]

    def _free_name(self, text: str) -> str:
        name = _NOT_IN_NAMES.sub("-", text.lower()).strip("-")
        name = (name if name[:1].isalpha() else f"limit-{name}")[:MAX_NAME]
        free, number, taken = name, 1, {each["name"] for each in self.quotas}
        while free in taken:
            number += 1
            free = f"{name[: MAX_NAME - len(str(number)) - 1]}-{number}"
        return free


def mapping_at(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidConfiguration(f"{where}: a mapping is expected")
    return value


def list_at(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidConfiguration(f"{where}: a list is expected")
    return value


def count_at(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidConfiguration(f"{where}: a whole number of 0 or more is expected")
    return value
