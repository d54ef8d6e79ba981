"""Import the configuration of envoyproxy/ratelimit.

There a descriptor is compared with a tree: at each level an entry with this key and value comes before one with the key
alone, and the tree is as deep as the descriptor. So each rule becomes a policy for exactly these keys, which counts by
the values that the rule leaves open. All policies that match apply here. So where a rule for one value is looser than
that for all values, it cannot be a policy beside it: it is an override of the other's quota.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from leasehold.importers.imported import NO_UNITS, Imported, InvalidConfiguration, count_at, list_at, mapping_at
from protocol.limits.rates import MAX_BURST

UNITS_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
DAYS = {"month": 30, "year": 365}  # as envoyproxy/ratelimit counts them
MOST_WINDOW_S = 53 * 604_800
ENTRY = {"key", "value", "rate_limit", "descriptors", "shadow_mode", "detailed_metric"}
IGNORED = {
    "value_to_metric": "metrics have no series for each value",
    "share_threshold": "each value counts for itself",
}


class Rule(NamedTuple):
    """One limit, with the entries on the way to it. An entry without a value matches any."""

    domain: str
    entries: tuple[tuple[str, str], ...]
    terms: Mapping[str, Any]
    is_shadow: bool

    @property
    def where(self) -> str:
        path = " ".join(f"{key}={value}" if value else key for key, value in self.entries)
        return f"{self.domain}: {path}"

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.entries]

    def covers(self, other: "Rule") -> bool:
        """Return whether each descriptor of another rule would match this one, were it not more specific."""
        return (
            self.domain == other.domain
            and self.keys == other.keys
            and self.entries != other.entries
            and all(mine in ("", theirs) for (_, mine), (_, theirs) in zip(self.entries, other.entries, strict=True))
        )

    def crosses(self, other: "Rule") -> bool:
        """Return whether some descriptors match both rules, and others only the one or only the other."""
        pairs = zip(self.entries, other.entries, strict=False)
        is_same = self.domain == other.domain and self.keys == other.keys and self.entries != other.entries
        meet = all("" in (mine, theirs) or mine == theirs for (_, mine), (_, theirs) in pairs)
        return is_same and meet and not self.covers(other) and not other.covers(self)


class Window(NamedTuple):
    requests: int
    seconds: int
    text: str


def import_configurations(files: Mapping[str, object]) -> Imported:
    """Import files by name, as YAML has them. Raises InvalidConfiguration."""
    imported, rules = Imported(), list[Rule]()
    for name, content in files.items():
        config = mapping_at(content, name)
        domain = config.get("domain")
        if not isinstance(domain, str) or not domain:
            raise InvalidConfiguration(f"{name}: `domain` is required")
        rules += _rules(imported, domain, (), list_at(config.get("descriptors") or [], f"{name}: descriptors"))
    for domain in dict.fromkeys(rule.domain for rule in rules):
        entries = [entry for rule in rules if rule.domain == domain for entry in rule.entries]
        imported.name_fields(domain, (key for key, _ in entries), [key for key, value in entries if value])
    names: list[tuple[Rule, str]] = []
    for rule in sorted(rules, key=lambda rule: sum(bool(value) for _, value in rule.entries)):
        wider = next((each for each in names if each[0].covers(rule)), None)
        if wider is None or _is_within(rule.terms, wider[0].terms):
            names.append((rule, imported.limit(*_limit(imported, rule))))
        else:
            _override(imported, rule, *wider)
        for other, _ in names:
            if other.crosses(rule):
                imported.note(
                    rule.where, f"for descriptors that match {other.where!r} too, one of both applied; here both do"
                )
    return imported


# --- reading ----------------------------------------------------------------------------------------------------------


def _rules(
    imported: Imported, domain: str, before: tuple[tuple[str, str], ...], descriptors: Sequence[object]
) -> Iterator[Rule]:
    for number, each in enumerate(descriptors):
        where = f"{domain}: descriptors[{number}]"
        found = mapping_at(each, where)
        key, value = found.get("key"), str(found.get("value") or "")
        if not isinstance(key, str) or not key:
            raise InvalidConfiguration(f"{where}: `key` is required")
        entries = (*before, (key, value))
        here = Rule(domain, entries, {}, bool(found.get("shadow_mode"))).where
        if value.endswith("*"):
            imported.note(
                here, "a value with `*` has no equal: labels are compared as a whole. Write one rule for each value"
            )
            continue
        _note_ignored(imported, here, found)
        if found.get("rate_limit"):
            terms = _terms(imported, here, mapping_at(found["rate_limit"], f"{here}: rate_limit"))
            if terms:
                yield Rule(domain, entries, terms, bool(found.get("shadow_mode")))
        yield from _rules(imported, domain, entries, list_at(found.get("descriptors") or [], here))


def _note_ignored(imported: Imported, here: str, found: Mapping[str, Any]) -> None:
    if found.get("detailed_metric"):
        imported.note(
            here, "`detailed_metric` is left out: metrics have no series for each value, the decision log has"
        )
    for field in found.keys() - ENTRY:
        if field not in IGNORED:
            raise InvalidConfiguration(f"{here}: unknown field `{field}`")
        if found[field]:
            imported.note(here, f"`{field}` is left out: {IGNORED[field]}")


def _terms(imported: Imported, here: str, limit: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a quota; none if it has no equal."""
    if limit.get("replaces"):
        imported.note(here, "`replaces` has no equal: the limits that it names apply as well")
    if limit.get("unlimited"):
        return {"kind": "rate", "limit": "unlimited"}
    unit, times = str(limit.get("unit", "")).lower(), count_at(limit.get("unit_multiplier", 1), here)
    requests = count_at(limit.get("requests_per_unit"), f"{here}: requests_per_unit")
    if unit not in UNITS_S | DAYS or not times:
        raise InvalidConfiguration(f"{here}: unknown unit {unit!r}")
    if not requests:
        return NO_UNITS
    window = _window(requests, unit, times)
    if requests > MAX_BURST or window.seconds > MOST_WINDOW_S:
        imported.note(here, f"more than {MAX_BURST:,} requests, or 53 weeks, in a window have no equal")
        return {}
    if unit == "week":
        imported.note(here, "windows of a week begin on Monday, not on Thursday")
    return {"kind": "rate", "limit": window.text, "algorithm": "fixed_window", "align": "calendar"}


def _window(requests: int, unit: str, times: int) -> Window:
    if unit in DAYS:
        unit, times = "day", times * DAYS[unit]
    text = f"{requests}/{unit}" if times == 1 else f"{requests} per {times} {unit}s"
    return Window(requests, UNITS_S[unit] * times, text)


# --- writing ----------------------------------------------------------------------------------------------------------


def _limit(imported: Imported, rule: Rule) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    fields = imported.fields_of(rule.domain, rule.keys)
    pairs = list(zip(fields, rule.entries, strict=True))
    labels = {"domain": rule.domain, "descriptor": ".".join(rule.keys)}
    labels |= {field.removeprefix("labels."): value for field, (_, value) in pairs if value and field != "ip"}
    match: dict[str, Any] = {"labels": labels}
    addresses = [value for field, (_, value) in pairs if value and field == "ip"]
    if addresses:
        match["ip"] = addresses[0]
    by = [field for field, (_, value) in pairs if not value]
    policy = {"match": match, "by": by} | ({"shadow": True} if rule.is_shadow else {})
    name = "-".join([rule.domain, *(f"{key}-{value}" if value else key for key, value in rule.entries)])
    return name, rule.terms, policy


def _is_within(terms: Mapping[str, Any], wider: Mapping[str, Any]) -> bool:
    """Return whether requests within one limit are always within a wider one as well."""
    if terms is NO_UNITS or wider["limit"] == "unlimited":
        return True
    if terms["limit"] == "unlimited" or wider is NO_UNITS:
        return False
    (requests, seconds), (most, over_s) = _read(terms["limit"]), _read(wider["limit"])
    return requests * max(1, -(-over_s // seconds)) <= most


def _read(text: str) -> tuple[int, int]:
    words = text.replace("/", " per 1 ").split()
    return int(words[0]), int(words[2]) * UNITS_S[words[3].rstrip("s")]


def _override(imported: Imported, rule: Rule, wider: Rule, name: str) -> None:
    """Note the command that gives one value another limit of the wider rule's quota."""
    fields = imported.fields_of(rule.domain, rule.keys)
    pairs = zip(fields, wider.entries, rule.entries, strict=True)
    named = [f"{field}={value}" for field, (_, before), (_, value) in pairs if not before and value]
    if rule.is_shadow != wider.is_shadow or wider.terms is NO_UNITS:
        imported.note(rule.where, f"it takes the place of {wider.where!r} there; here that applies as well")
        return
    words = ["leasehold", "override", "create", name, str(rule.terms["limit"])]
    words += [word for each in named for word in ("--for", each)]
    command = " ".join(map(shlex.quote, [*words, "--reason", "imported"]))
    imported.note(
        rule.where,
        f"it is looser than {wider.where!r}, which applies to all values. Apply the document, then: {command}",
    )
