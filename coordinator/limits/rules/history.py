"""Which limits a tenant had in a period, from when to when, and why, by the audit.

The period is cut where something changed: a document was applied, the tenant got another plan, an override began or
ended. The limit of each part is the one that grants are made by (entitlement.py). Equal consecutive parts are merged.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import replace

from coordinator.limits.rules.entitlement import Catalogue, limit_of_key, override_of_key, plan_of_key
from protocol.identifiers import parse_quota_key, subject_key, wider_keys
from protocol.limits.document import AllowanceQuota, LimitValue, Quota


class LimitKind(StrEnum):
    PLAN = "plan"  # the document's limit for the tenant's plan or for all plans
    OVERRIDE = "override"
    CREDIT = "credit"  # an addition, from that time on
    DEBIT = "debit"  # negative, from that time on
    CARRY_OVER = "carry_over"  # an addition of what the previous period left


class LimitInForce(Struct, frozen=True, kw_only=True):
    """A part of the limit in force: of the plan or override, or an addition to it, from one time to another."""

    quota_key: str  # and narrower keys without a limit of their own
    kind: LimitKind
    units: int
    starts_at: datetime = field(name="from")
    ends_at: datetime = field(name="to")
    plan: str | None = None
    version: int | None = None  # of the first limits document with this limit
    id: UUID | None = None  # of the override or adjustment
    reason: str | None = None
    document: str | None = None
    mode: str | None = None  # for plans and overrides; `regional`: each region has the limit for itself
    cap: str | dict[str, int] | None = None  # for plans and overrides; the cap as in the limits document


class Version(NamedTuple):
    """A limits document, from a time on."""

    at: datetime
    number: int
    quotas: Mapping[str, Quota]
    default_plan: str | None


class Subscribed(NamedTuple):
    at: datetime
    plan: str | None


class Overridden(NamedTuple):
    """An override, from its creation and start until its end or deletion."""

    id: UUID
    quota: str
    subject: dict[str, str]
    limit: LimitValue
    reason: str
    created_at: datetime
    starts_at: datetime
    ends_at: datetime | None

    @property
    def key(self) -> str:
        return subject_key(self.quota, self.subject)

    def holds_at(self, moment: datetime) -> bool:
        return self.starts_at <= moment and (self.ends_at is None or moment < self.ends_at)

    def reaches(self, start: datetime, end: datetime) -> bool:
        """Return whether it is in force in any of that time."""
        return max(self.starts_at, start) < (end if self.ends_at is None else min(self.ends_at, end))


class History(NamedTuple):
    """The changes of the limits of one tenant, in order."""

    tenant: str
    versions: Sequence[Version]
    plans: Sequence[Subscribed]
    overrides: Sequence[Overridden]


def narrower(history: History, start: datetime, end: datetime) -> dict[str, dict[str, str]]:
    """Return the overridden quota keys that are narrower than the tenant: each may have a limit of its own."""
    tenant = {"tenant": history.tenant}
    return {
        subject_key(each.quota, each.subject | tenant): each.subject | tenant
        for each in history.overrides
        if each.subject.keys() - tenant.keys() and each.reaches(start, end)
    }


def limits_in_force(
    history: History, quota_keys: Collection[str], start: datetime, end: datetime
) -> list[LimitInForce]:
    """Return the limits in force. A narrower key is listed only if its limits differ from the tenant's."""
    found = {key: _of_key(history, key, start, end) for key in sorted(quota_keys)}
    return [each for key, limits in found.items() if not _is_as(found, key, history.tenant) for each in limits]


def _is_as(found: Mapping[str, Sequence[LimitInForce]], key: str, tenant: str) -> bool:
    of_all = subject_key(parse_quota_key(key)[0], {"tenant": tenant})
    return key != of_all and [replace(each, quota_key=key) for each in found.get(of_all, ())] == found[key]


def _of_key(history: History, key: str, start: datetime, end: datetime) -> list[LimitInForce]:
    reaching = set(wider_keys(key))
    overrides = [each for each in history.overrides if each.key in reaching and each.reaches(start, end)]
    merged: list[LimitInForce] = []
    for since, until in pairwise([*_cuts(history, overrides, start, end), end]):
        found = _at(history, overrides, key, since, until)
        if found and merged and found == _as_if(merged[-1], found):
            merged[-1] = replace(merged[-1], ends_at=until)
        elif found:
            merged.append(found)
    return merged


def _as_if(before: LimitInForce, found: LimitInForce) -> LimitInForce:
    """Return the part as if its version were that of the previous one: a new document need not change this limit."""
    if before.ends_at != found.starts_at:
        return before
    return replace(before, starts_at=found.starts_at, ends_at=found.ends_at, version=found.version)


def _cuts(history: History, overrides: Iterable[Overridden], start: datetime, end: datetime) -> list[datetime]:
    return sorted({start, *(moment for moment in _moments(history, overrides) if start < moment < end)})


def _moments(history: History, overrides: Iterable[Overridden]) -> Iterator[datetime]:
    yield from (each.at for each in history.versions)
    yield from (each.at for each in history.plans)
    for each in overrides:
        yield each.starts_at
        if each.ends_at is not None:
            yield each.ends_at


def _at(
    history: History, overrides: Iterable[Overridden], key: str, since: datetime, until: datetime
) -> LimitInForce | None:
    """Return the limit at a time, or None if the document had no such allowance."""
    version = next((each for each in reversed(history.versions) if each.at <= since), None)
    spec = version and version.quotas.get(parse_quota_key(key)[0])
    if version is None or not isinstance(spec, AllowanceQuota):
        return None
    plan = next((each.plan for each in reversed(history.plans) if each.at <= since), None)
    # Of several overrides with the same key the newest applies.
    valid = {each.key: each for each in sorted(overrides, key=lambda o: (o.created_at, o.id)) if each.holds_at(since)}
    catalogue = Catalogue(
        version.number,
        version.quotas,
        version.default_plan,
        {history.tenant: plan} if plan else {},
        {},
        {name: each.limit for name, each in valid.items()},
    )
    limit, overridden = limit_of_key(catalogue, spec, key), override_of_key(catalogue, key)
    in_force = partial(
        LimitInForce,
        quota_key=key,
        units=limit if isinstance(limit, int) else 0,  # a plan without a limit
        starts_at=since,
        ends_at=until,
        mode=spec.mode,
        cap=spec.cap,
    )
    if overridden is None:
        return in_force(kind=LimitKind.PLAN, plan=plan_of_key(catalogue, key), version=version.number)
    by = valid[overridden]
    return in_force(kind=LimitKind.OVERRIDE, id=by.id, reason=by.reason)
