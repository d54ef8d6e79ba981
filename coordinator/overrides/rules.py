"""Validate overrides against the limits document in force."""

from collections.abc import Iterator, Mapping

from coordinator.limits.rules.validation import DocumentFault, faults_of_value
from protocol.addresses import parse_address, parse_network
from protocol.limits.document import LimitsDocument, LimitValue


def spelt_subject(subject: Mapping[str, str]) -> dict[str, str]:
    """Return a subject as quota keys write it. Raise ValueError, beginning with the field, for impossible values."""
    return {field: _spelt(field, value) for field, value in subject.items()}


def _spelt(field: str, value: str) -> str:
    try:
        if field == "ip":
            return parse_address(value).text
        if field == "ip_prefix":
            network = parse_network(value)
            return network.text if "/" in network.text else f"{network.text}/{network.length}"
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    if not 1 <= len(value) <= 256 or not value.isprintable():
        raise ValueError(f"{field}: Write 1 to 256 printable characters.")
    return value


def faults_of_override(
    document: LimitsDocument, quota: str, subject: Mapping[str, str], limit: LimitValue
) -> list[DocumentFault]:
    return list(_faults(document, quota, subject, limit))


def _faults(
    document: LimitsDocument, quota: str, subject: Mapping[str, str], limit: LimitValue
) -> Iterator[DocumentFault]:
    spec = next((each for each in document.quotas if each.name == quota), None)
    if spec is None:
        yield DocumentFault("quota", "known", f"There is no quota {quota!r}.")
        return
    ways = [policy.by for policy in document.policies if policy.quota == quota]
    if not any(subject.keys() <= set(by) for by in ways):
        counted = (
            "; or ".join(dict.fromkeys(", ".join(by) or "nothing" for by in ways))
            or "nothing, because it has no policy"
        )
        yield DocumentFault("subject", "counted", f"The subject matches no key: {quota!r} is counted by {counted}.")
    yield from faults_of_value("limit", spec, limit)


def faults_of_change(
    document: LimitsDocument, overrides: Mapping[str, Mapping[str, LimitValue]]
) -> list[DocumentFault]:
    """Return the overrides (quota → key → limit) that a new document would make invalid."""
    places = {quota.name: place for place, quota in enumerate(document.quotas)}
    return [fault for name, limits in overrides.items() for fault in _broken(document, places.get(name), name, limits)]


def _broken(
    document: LimitsDocument, place: int | None, name: str, limits: Mapping[str, LimitValue]
) -> Iterator[DocumentFault]:
    if place is None:
        yield DocumentFault(
            "quotas", "in_use", f"{name!r} is missing, but {_some(limits)} overridden. Delete those overrides first."
        )
        return
    spec = document.quotas[place]
    unfit = {key: limit for key, limit in limits.items() if any(faults_of_value("", spec, limit))}
    if unfit:
        reason = f"{_some(unfit)} overridden with a limit of another kind. Delete those overrides first."
        yield DocumentFault(f"quotas[{place}].kind", "in_use", reason)


def _some(limits: Mapping[str, LimitValue]) -> str:
    first = next(iter(limits))
    return f"{first} is" if len(limits) == 1 else f"{first} and {len(limits) - 1} more are"
