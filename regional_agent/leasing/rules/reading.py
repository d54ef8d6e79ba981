"""Read policies and blocks that a coordinator of another release wrote, as far as this release knows them.

Unknown fields are ignored. A quota or a policy that this release cannot read, because it is of an unknown kind or
names a capability that it lacks, is set aside by itself: its last known version stays in force, and health says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from protocol.blocks import BlockedValue, BlockList
from protocol.compatibility.releases import CAPABILITIES
from protocol.identifiers import name_of_quota
from protocol.limits.document import LimitsDocument, OverrideTerm, PolicyBundle, PolicySpec, Quota


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=_Named)


class SetAside(NamedTuple):
    """An item that this release cannot read. `is_kept`: an earlier version of it stays in force."""

    item: str
    reason: str
    is_kept: bool


class Reading(NamedTuple, Generic[T]):
    content: T
    set_aside: Sequence[SetAside] = ()


def read_whole(type_: type[T]) -> Callable[[bytes, T | None], Reading[T]]:
    """Return a reader of content without items that may be set aside."""
    return lambda body, _before: Reading(msgspec.json.decode(body, type=type_))


def read_bundle(body: bytes, before: PolicyBundle | None) -> Reading[PolicyBundle]:
    """Raise a MsgspecError only if nothing of it can be read."""
    try:
        bundle = msgspec.json.decode(body, type=PolicyBundle)
    except msgspec.ValidationError:
        return _BundleByItem(msgspec.json.decode(body), before).read()
    if any(map(_unknown_capabilities, bundle.requires.values())):
        return _BundleByItem(msgspec.json.decode(body), before).read()
    return Reading(bundle)


def read_blocks(body: bytes, _before: BlockList | None) -> Reading[BlockList]:
    """Leave out each block that this release cannot read: there is no earlier version of it."""
    try:
        return Reading(msgspec.json.decode(body, type=BlockList))
    except msgspec.ValidationError:
        plain = msgspec.json.decode(body)
    blocks, set_aside = [], []
    for place, each in enumerate(plain["data"]):
        try:
            blocks.append(msgspec.convert(each, BlockedValue))
        except msgspec.ValidationError as error:
            set_aside.append(SetAside(f"blocks[{place}]", str(error), is_kept=False))
    return Reading(BlockList(version=plain["version"], data=blocks), set_aside)


class _BundleByItem:
    """Reads a bundle item by item."""

    def __init__(self, plain: Mapping[str, Any], before: PolicyBundle | None) -> None:
        self._plain = plain
        self._before = LimitsDocument() if before is None else before.document
        self._is_first = before is None
        self._set_aside: list[SetAside] = []

    def read(self) -> Reading[PolicyBundle]:
        envelope = _decoded({**self._plain, "document": {}, "overrides": []}, PolicyBundle)
        self._requires = envelope.requires
        document = self._document(self._plain["document"])
        known = {quota.name for quota in document.quotas}
        overrides = [term for term in self._overrides() if name_of_quota(term.key) in known]
        return Reading(replace(envelope, document=document, overrides=overrides), self._set_aside)

    def _document(self, plain: Mapping[str, Any]) -> LimitsDocument:
        before = self._before
        quotas = self._items("quotas", plain, Quota, before.quotas)
        policies = self._items("policies", plain, PolicySpec, before.policies)
        quotas |= {each.name: each for each in before.quotas if each.name in _quotas_of(policies) - quotas.keys()}
        for name in [each.name for each in policies.values() if each.quota not in quotas]:
            del policies[name]
            self._note(f"policies.{name}", "its quota is not known", is_kept=False)
        parts = {
            field.name: self._part(field.name, plain, field.type)
            for field in msgspec.structs.fields(LimitsDocument)
            if field.name not in ("quotas", "policies")
        }
        document = LimitsDocument(quotas=[*quotas.values()], policies=[*policies.values()], **parts)
        return replace(
            document,  # an earlier version of a policy may name what the document no longer has
            route_classes={**before.route_classes, **document.route_classes},
            cost_tables={**before.cost_tables, **document.cost_tables},
        )

    def _items(self, part: str, plain: Mapping[str, Any], type_: Any, before: Iterable[N]) -> dict[str, N]:
        """Read each item by itself, and keep the earlier version of one that cannot be read."""
        found: dict[str, N] = {}
        earlier = {each.name: each for each in before}
        for each in plain.get(part, ()):
            name = each["name"]
            try:
                found[name] = self._item(f"{part}.{name}", each, type_)
            except _NotRead as error:
                self._note(f"{part}.{name}", str(error), is_kept=name in earlier)
                if name in earlier:
                    found[name] = earlier[name]
        return found

    def _item(self, item: str, plain: object, type_: Any) -> Any:
        if unknown := _unknown_capabilities(self._requires.get(item, ())):
            raise _NotRead(f"it needs the capability {', '.join(unknown)}")
        try:
            return _decoded(plain, type_)
        except msgspec.ValidationError as error:
            raise _NotRead(str(error)) from None

    def _part(self, name: str, plain: Mapping[str, Any], type_: Any) -> Any:
        """Read another part of the document, or keep the earlier one."""
        if name not in plain:
            return getattr(LimitsDocument(), name)
        try:
            return self._item(name, plain[name], type_)
        except _NotRead as error:
            self._note(name, str(error), is_kept=not self._is_first)
            return getattr(self._before, name)

    def _overrides(self) -> Iterable[OverrideTerm]:
        for each in self._plain.get("overrides", ()):
            try:
                yield _decoded(each, OverrideTerm)
            except msgspec.ValidationError as error:
                self._note(f"overrides.{each.get('key')}", str(error), is_kept=False)

    def _note(self, item: str, reason: str, *, is_kept: bool) -> None:
        self._set_aside.append(SetAside(item, reason, is_kept))


class _NotRead(Exception):
    """An item is of a kind that this release does not know."""


def _unknown_capabilities(required: Iterable[str]) -> list[str]:
    return sorted({*required} - CAPABILITIES)


def _quotas_of(policies: Mapping[str, PolicySpec]) -> set[str]:
    return {policy.quota for policy in policies.values()}


def _decoded(plain: object, type_: Any) -> Any:
    """Convert a plain value as the decoder of JSON does, for which bytes and times are texts."""
    return msgspec.json.decode(msgspec.json.encode(plain), type=type_)
