"""Apply changes of region settings, and validate them: a patch is what was set, by name, of one region."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from coordinator.limits.rules.entitlement import Catalogue, limit_of_key
from coordinator.limits.rules.validation import DocumentFault
from coordinator.rebalancing.rules.region_settings import MAX_SETTINGS, NOTHING_SET, Setting, faults_of_settings
from protocol.identifiers import parse_quota_key
from protocol.limits.document import LimitValue, Mode, Quota, limits_of, mode_of

Patches: TypeAlias = Mapping[str, Mapping[str, int | str | None]]  # by region

# Why units of an allowance in this mode are never in a region that could give them away.
IMMOVABLE: dict[str, str] = {
    Mode.REGIONAL: "each region has a limit of its own",
    Mode.CENTRAL: "no region holds units that no request waits for",
}


def apply_patches(before: Mapping[str, Setting], patches: Patches) -> dict[str, Setting]:
    """Return the settings of a key after the changes. A pin is a floor and a ceiling."""
    changed = {region: _patched(before.get(region, NOTHING_SET), patch) for region, patch in patches.items()}
    return dict(before) | changed


def _patched(setting: Setting, patch: Mapping[str, Any]) -> Setting:
    values = dict(patch)
    if "pin" in values:
        values["floor"] = values["ceiling"] = values.pop("pin")
    return setting._replace(**values)


def faults_of_changes(
    catalogue: Catalogue, spec: Quota, key: str, patches: Patches, after: Mapping[str, Setting]
) -> list[DocumentFault]:
    """Return what is wrong with the changes of a key's settings, and with the settings after them."""
    faults = [
        *_faults_of_regions(catalogue, patches),
        *_faults_of_pins(patches),
        *_faults_of_mode(spec, patches),
        *faults_of_settings(spec, _limits_of_key(catalogue, spec, key), after),
    ]
    count = sum(map(len, catalogue.settings.values())) + len(after) - len(catalogue.settings.get(key, {}))
    if count > MAX_SETTINGS:
        faults.append(
            DocumentFault("settings", "full", f"There can be at most {MAX_SETTINGS} settings. Remove some first.")
        )
    return faults


def _faults_of_regions(catalogue: Catalogue, patches: Patches) -> Iterator[DocumentFault]:
    for region in patches:
        if region not in catalogue.regions:
            yield DocumentFault(f"settings.{region}", "known", f"There is no region {region!r}.")


def _faults_of_pins(patches: Patches) -> Iterator[DocumentFault]:
    for region, patch in patches.items():
        if "pin" in patch and patch.keys() & {"floor", "ceiling"}:
            reason = "A pin is a floor and a ceiling. Give either the pin, or those."
            yield DocumentFault(f"settings.{region}.pin", "alone", reason)


def _faults_of_mode(spec: Quota, patches: Patches) -> Iterator[DocumentFault]:
    """A region that has a limit of its own can only have a ceiling, which is lower than the limit."""
    mode = mode_of(spec)
    if mode is not Mode.REGIONAL:
        return
    reason = f"The mode of {spec.name!r} is {mode}: {IMMOVABLE[mode]}. Set a ceiling."
    for region, patch in patches.items():
        for name in ("weight", "floor", "pin"):
            if patch.get(name) is not None:
                yield DocumentFault(f"settings.{region}.{name}", "mode", reason)


def _limits_of_key(catalogue: Catalogue, spec: Quota, key: str) -> Collection[LimitValue]:
    """Return the limits that a key may have: the tenant's, or those of all plans."""
    limit = limit_of_key(catalogue, spec, key) if "tenant" in parse_quota_key(key)[1] else None
    if limit is not None:
        return [limit]
    return limits_of(spec)
