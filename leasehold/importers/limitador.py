"""Import the limits of Limitador.

A limit there applies to each request of its namespace that meets all conditions and has all variables, and is counted
from the first request on. Conditions are CEL: of those, comparisons of one entry with values have an equal here.
"""

import re
from collections.abc import Sequence
from typing import Any

from leasehold.importers.imported import NO_UNITS, Imported, InvalidConfiguration, count_at, list_at, mapping_at
from protocol.limits.rates import MAX_BURST, MAX_WEEKS

FIELDS = {"id", "name", "namespace", "max_value", "seconds", "conditions", "variables"}
MOST_WINDOW_S = MAX_WEEKS * 604_800
_ENTRY = re.compile(
    r"""descriptors\[0\](?:\[(["'])(?P<quoted>[^"']+)\1\]|\.(?P<dotted>[A-Za-z_][\w.]*))|(?P<bare>[A-Za-z_][\w.]*)"""
)
_EQUAL = re.compile(r"""(?P<entry>\S+)\s*==\s*(["'])(?P<value>[^"']*)\2""")
_AMONG = re.compile(r"""(?P<entry>\S+)\s+in\s+\[(?P<values>[^\]]*)\]""")
_VALUE = re.compile(r"""(["'])([^"']*)\1""")


def import_limits(name: str, content: object) -> Imported:
    """Import a file, as YAML has it. Raises InvalidConfiguration."""
    imported = Imported()
    limits = [mapping_at(each, f"{name}[{number}]") for number, each in enumerate(list_at(content, name))]
    read = [(f"{name}[{number}]", each, _conditions(each), _variables(each)) for number, each in enumerate(limits)]
    for namespace in dict.fromkeys(str(each.get("namespace")) for each in limits):
        mine = [(wanted, variables) for _, each, wanted, variables in read if str(each.get("namespace")) == namespace]
        fixed = [key for wanted, _ in mine for key in wanted or {}]
        imported.name_fields(namespace, [*fixed, *(key for _, keys in mine for key in keys or [])], fixed)
    for where, each, wanted, variables in read:
        _import_limit(imported, where, each, wanted, variables)
    return imported


def _import_limit(
    imported: Imported,
    where: str,
    limit: dict[str, Any],
    wanted: dict[str, list[str]] | None,
    variables: list[str] | None,
) -> None:
    namespace = limit.get("namespace")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidConfiguration(f"{where}: `namespace` is required")
    if unknown := limit.keys() - FIELDS:
        raise InvalidConfiguration(f"{where}: unknown field {min(unknown)!r}")
    units = count_at(limit.get("max_value"), f"{where}: max_value")
    seconds = count_at(limit.get("seconds"), f"{where}: seconds")
    if wanted is None or variables is None:
        expressions = " and ".join(map(str, [*(limit.get("conditions") or []), *(limit.get("variables") or [])]))
        imported.note(where, f"an expression has no equal, so the limit is left out: {expressions}")
        return
    if units > MAX_BURST or not 0 < seconds <= MOST_WINDOW_S:
        imported.note(where, f"more than {MAX_BURST:,} units, or 53 weeks, in a window have no equal")
        return
    keys = list(dict.fromkeys([*wanted, *variables]))
    fields = dict(zip(keys, imported.fields_of(namespace, keys), strict=True))
    labels: dict[str, Any] = {"domain": namespace}
    match: dict[str, Any] = {"labels": labels}
    for key, values in wanted.items():
        one = values[0] if len(values) == 1 else values
        if fields[key] == "ip":
            match["ip"] = one
        else:
            labels[fields[key].removeprefix("labels.")] = one
    terms = {"kind": "rate", "limit": f"{units} per {seconds} seconds", "algorithm": "fixed_window"}
    compared = [f"{key}-{values[0]}" for key, values in wanted.items()]
    name = str(limit.get("name") or "-".join([namespace, *compared, *variables]))
    imported.limit(name, terms if units else NO_UNITS, {"match": match, "by": [fields[key] for key in variables]})


def _conditions(limit: dict[str, Any]) -> dict[str, list[str]] | None:
    """Return the values that each entry must have; None if a condition has no equal."""
    wanted: dict[str, list[str]] = {}
    for condition in limit.get("conditions") or []:
        found = _EQUAL.fullmatch(str(condition).strip()) or _AMONG.fullmatch(str(condition).strip())
        key = _entry(found["entry"]) if found else None
        if found is None or key is None or key in wanted:
            return None
        groups = found.groupdict()
        values = [value for _, value in _VALUE.findall(groups["values"])] if "values" in groups else [groups["value"]]
        if not values or not all(values):
            return None
        wanted[key] = values
    return wanted


def _variables(limit: dict[str, Any]) -> list[str] | None:
    keys: Sequence[str | None] = [_entry(str(each)) for each in limit.get("variables") or []]
    return None if None in keys else [key for key in keys if key]


def _entry(expression: str) -> str | None:
    found = _ENTRY.fullmatch(expression.strip())
    return None if found is None else found["quoted"] or found["dotted"] or found["bare"]
