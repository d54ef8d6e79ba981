"""Which capabilities a reader of a limits document needs, by item, because it must not ignore a field of it."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from protocol.compatibility.releases import Capability
from protocol.limits.document import LimitsDocument

# By field, such as `policies.match`. A field is here from the release that adds it until no supported one lacks it.
NEEDED: Mapping[str, Capability] = {}


def requirements_of(document: LimitsDocument) -> dict[str, list[str]]:
    """Return the capabilities that each quota and policy needs, as `requires` of a bundle names them."""
    if not NEEDED:
        return {}
    found = {
        f"{part}.{item.name}": sorted({NEEDED[name].value for name in _set_fields(part, item) if name in NEEDED})
        for part in ("quotas", "policies")
        for item in getattr(document, part)
    }
    return {name: needed for name, needed in found.items() if needed}


def _set_fields(part: str, item: Any) -> Iterator[str]:
    """Yield the fields that have another value than their default."""
    for field in msgspec.structs.fields(item):
        factory = field.default_factory
        default = field.default if factory is msgspec.NODEFAULT else factory()
        if getattr(item, field.name) != default:
            yield f"{part}.{field.name}"
