"""The difference between two documents, for people to review before it is applied.

Quotas and policies are matched by name and not by position: inserting one at the beginning is one addition.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from msgspec import UNSET, Struct, UnsetType


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    REORDERED = "reordered"


class Change(Struct, frozen=True):
    """A change. An addition has no `before`, a removal no `after`."""

    path: str
    change: ChangeKind
    before: Any | UnsetType = UNSET
    after: Any | UnsetType = UNSET


def differences(before: object, after: object) -> list[Change]:
    """Return the changes between two documents as JSON values, in the order of the first."""
    return list(_between("", before, after))


def _between(path: str, before: object, after: object) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _between_mappings(path, before, after)
    elif _are_named(before) and _are_named(after):
        yield from _between_named(path, before, after)
    elif before != after:
        yield Change(path, ChangeKind.CHANGED, before, after)


def _between_mappings(path: str, before: dict[str, object], after: dict[str, object]) -> Iterator[Change]:
    for key, value in before.items():
        if key in after:
            yield from _between(_join(path, key), value, after[key])
        else:
            yield Change(_join(path, key), ChangeKind.REMOVED, before=value)
    for key in [key for key in after if key not in before]:
        yield Change(_join(path, key), ChangeKind.ADDED, after=after[key])


def _between_named(path: str, before: Any, after: Any) -> Iterator[Change]:
    old = {each["name"]: each for each in before}
    new = {each["name"]: each for each in after}
    yield from _between_mappings(path, old, new)
    stayed_before = [name for name in old if name in new]
    stayed_after = [name for name in new if name in old]
    if stayed_before != stayed_after:
        yield Change(path, ChangeKind.REORDERED, stayed_before, stayed_after)


def _are_named(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "name" in each for each in value)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
