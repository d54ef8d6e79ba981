"""What policies read of a subject beyond its plain fields: addresses, networks, the class of its route."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from protocol import check
from protocol.addresses import Address, Network, parse_address, prefix_of
from protocol.identifiers import MAX_QUOTA_KEY_LENGTH, quota_key
from protocol.limits.document import LABEL_PREFIX, IpPrefix, RouteClass
from protocol.limits.route_table import Routes
from protocol.limits.routes import RouteNormalizer
from protocol.limits.usage_labels import LABELS, encode_labels

Subject = Mapping[str, str]

NO_CLASS = "*"  # of a route that belongs to none
NO_PLAN = ""  # of a tenant that is on none
KEY_PREFIX = "k_"  # so that a spreadsheet takes no hash for a number
KEY_DIGITS = 16  # of the SHA-256 of an API key: enough to tell a company's keys apart
_encoder = msgspec.json.Encoder(order="sorted")
_SUBJECT_FIELD = {"ip_prefix": "ip"}  # where a key's field is read from another one of the subject
PLAIN_FIELDS = frozenset({"tenant", "user", "api_key", "route", "method"})


def fields_of(subject: check.Subject) -> dict[str, str]:
    """Return the fields that policies read; a label is a field such as `labels.model`."""
    fields: dict[str, str] = msgspec.to_builtins(subject)
    if subject.labels is not None:
        del fields["labels"]
        fields |= {LABEL_PREFIX + name: value for name, value in subject.labels.items()}
    return fields


class InvalidAddress(Exception):
    """A policy reads the subject's address, and it is not an IP address."""


class InvalidSubjectValue(Exception):
    """A value cannot be part of a quota key: the coordinator and the finance API reject such a key."""

    def __init__(self, field: str, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field  # of the subject
        self.rule = rule


class _Place(NamedTuple):
    """The order of a class's routes: the least comes first. It does not depend on the order of a JSON object."""

    is_wildcard: bool
    says_less: int
    is_any_method: bool
    route_class: str
    methods: frozenset[str]


class RouteClasses:
    """The class of each request: of the most specific route and, among equal routes, the most specific method."""

    def __init__(self, classes: Mapping[str, RouteClass], normalizer: RouteNormalizer) -> None:
        self._routes = Routes(
            (
                normalizer.pattern(each.route),
                _Place("*" in each.route, _fewer(each.route), not each.methods, name, each.methods),
            )
            for name, routes in classes.items()
            for each in routes
        )

    def of(self, route: str, method: str) -> str:
        """Return the class of a route in its match form, and a method in capitals."""
        found = (*self._routes.exactly(route), *self._routes.by_wildcard(route))
        fitting = [place for place in found if place.is_any_method or method in place.methods]
        return min(fitting, key=lambda place: place[:4]).route_class if fitting else NO_CLASS


def _fewer(route: str) -> int:
    """Return a number that is smaller the more characters the text names."""
    return route.count("*") - len(route)


def usage_dimensions(policy: str, usage_by: Collection[str], subject: Subject, route_class: str) -> str:
    """Return the dimensions of a usage line, as JSON with its keys in order, without fields that the subject lacks.

    An API key appears as a hash only: its owner can find its usage, and no reader can find the key.
    """
    dimensions = {"policy": policy}
    if "route_class" in usage_by:
        dimensions["route_class"] = route_class
    if "api_key" in usage_by and "api_key" in subject:
        digest = hashlib.sha256(subject["api_key"].encode()).hexdigest()
        dimensions["api_key"] = KEY_PREFIX + digest[:KEY_DIGITS]
    named = [name for name in usage_by if name.startswith(LABEL_PREFIX) and name in subject]
    if named:
        dimensions[LABELS] = encode_labels((name.removeprefix(LABEL_PREFIX), subject[name]) for name in named)
    return _encoder.encode(dimensions).decode()


def is_within(subject: Subject, networks: Iterable[Network]) -> bool:
    """Return whether the subject's address is in one of the networks. A subject without an address is in none."""
    if "ip" not in subject:
        return False
    address = address_of(subject)
    return any(
        network.version == address.version and address.within(network.length) == network.number for network in networks
    )


def has_labels(subject: Subject, wanted: Iterable[tuple[str, Collection[str]]]) -> bool:
    """Return whether the subject has all these labels, each with one of the values."""
    return all(subject.get(field) in values for field, values in wanted)


def value_of(field: str, subject: Subject, route_class: str, plan: str, prefix: IpPrefix) -> str:
    """Return a field's value as quota keys have it. Raises KeyError with the field's name where it is missing."""
    if field == "ip":
        return address_of(subject).text
    if field == "ip_prefix":
        return prefix_of(address_of(subject), prefix.ipv4, prefix.ipv6)
    if field == "plan":
        return plan
    return route_class if field == "route_class" else subject[field]


def check_values(quota: str, values: Sequence[tuple[str, str]]) -> None:
    """Raise InvalidSubjectValue, naming the field, if these values cannot be part of a quota key.

    The characters are those that the coordinator accepts in queries, overrides and blocks.
    """
    for name, value in values:
        if not value.isprintable():
            field = _SUBJECT_FIELD.get(name, name)
            raise InvalidSubjectValue(field, "characters", "control and other unprintable characters are not accepted")
    length = len(quota_key(quota, values))
    if length > MAX_QUOTA_KEY_LENGTH:
        name, value = max(values, key=lambda each: len(quote(each[1], safe="")))
        reason = (
            f"the key of quota {quota!r} has {length} characters with these values, at most {MAX_QUOTA_KEY_LENGTH} are "
            "accepted; all but letters, digits and -._~ count as three or more"
        )
        raise InvalidSubjectValue(_SUBJECT_FIELD.get(name, name), "max_length", reason)


def address_of(subject: Subject) -> Address:
    try:
        return parse_address(subject["ip"])
    except ValueError as error:
        raise InvalidAddress(str(error)) from None
