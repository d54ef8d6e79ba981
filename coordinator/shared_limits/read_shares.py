"""Read the shares of rates and slots: what may be in force in each region, and the worst case of all."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.rules.entitlement import Catalogue, rate_terms, slot_terms
from coordinator.shared_limits.rules import SLOT_MICRO, Holding, Shared, SharingTerms, beyond, count
from coordinator.shared_limits.statements import read_shares
from protocol.identifiers import quota_key
from protocol.limits.rates import Sharing


class RegionRate(Struct, frozen=True, kw_only=True):
    """A region's share of a rate, in millionths of a unit per second."""

    region: str
    most_micro: int  # the most that it may be using: it may not have received its latest share yet
    base_share_micro: int  # while the region is cut off
    demand_micro: int | None  # None: it has not reported yet
    last_seen_at: datetime | None


class SharedRate(Struct, frozen=True, kw_only=True):
    quota: str
    sharing: Sharing
    limit_micro: int
    bound_milli: int  # thousandths of a unit beyond limit and burst that are admitted in the worst case; never more
    overshoot_milli: int  # and were at most so far, since the first report
    regions: list[RegionRate]


class RegionSlots(Struct, frozen=True, kw_only=True):
    region: str
    most: int  # the most that may be in use, including what was taken by an expired share
    base_share: int  # while the region is cut off
    wanted: int | None  # in use or waited for; None: it has not reported yet
    last_seen_at: datetime | None


class SharedSlots(Struct, frozen=True, kw_only=True):
    """The shares of one quota's slots. All regions together use no more than the limit, unless it was lowered."""

    quota: str
    limit: int
    slot_ttl_ms: int
    regions: list[RegionSlots]


class ShareQuestion(NamedTuple):
    """Which shares to read. An empty filter selects all."""

    quotas: Sequence[str] = ()  # by name or by key
    tenants: Sequence[str] = ()
    regions: Sequence[str] = ()

    def holdings(self, shared: Shared) -> list[tuple[str, Holding]]:
        return [each for each in sorted(shared.holdings.items()) if not self.regions or each[0] in self.regions]


async def read_rates(
    connection: Connection, documents: Documents, question: ShareQuestion, after: str, limit: int, now: datetime
) -> dict[str, SharedRate | None]:
    """Return at most so many rates after the given key, or None if a named rate is not shared. Needs a snapshot."""
    found, catalogue = await _read(connection, documents, question, after, limit, now)
    now_ms = round(now.timestamp() * 1000)
    return {
        quota: _rate(quota, shared, terms, question, now_ms)
        if isinstance(terms := rate_terms(catalogue, quota), SharingTerms)
        else None
        for quota, shared in found.items()
    }


async def read_slots(
    connection: Connection, documents: Documents, question: ShareQuestion, after: str, limit: int, now: datetime
) -> dict[str, SharedSlots | None]:
    """Return shared slots in the same way."""
    found, catalogue = await _read(connection, documents, question, after, limit, now)
    now_ms = round(now.timestamp() * 1000)
    return {
        quota: _slots(quota, shared, terms, question, now_ms)
        if isinstance(terms := slot_terms(catalogue, quota), SharingTerms)
        else None
        for quota, shared in found.items()
    }


async def _read(
    connection: Connection, documents: Documents, question: ShareQuestion, after: str, limit: int, now: datetime
) -> tuple[Mapping[str, Shared], Catalogue]:
    dimensions = [quota_key("any", [("tenant", tenant)]).partition(":")[2] for tenant in question.tenants]
    found = await read_shares(connection, question.quotas, dimensions, after, limit)
    return found, await read_catalogue(connection, documents, set(found), now)


def _rate(quota: str, shared: Shared, terms: SharingTerms, question: ShareQuestion, now_ms: int) -> SharedRate:
    """Count the debt of a rate up to now: it grows until the next report."""
    count(shared, terms, max(now_ms, shared.at_ms))
    return SharedRate(
        quota=quota,
        sharing=terms.sharing,
        limit_micro=terms.limit_micro,
        **beyond(shared, terms)._asdict(),
        regions=[_region_rate(*each, terms, now_ms) for each in question.holdings(shared)],
    )


def _region_rate(region: str, holding: Holding, terms: SharingTerms, now_ms: int) -> RegionRate:
    base_share_micro = terms.base_share_micro(region)
    return RegionRate(
        region=region,
        most_micro=holding.most_within(now_ms, now_ms, base_share_micro),
        base_share_micro=base_share_micro,
        demand_micro=holding.demand_micro,
        last_seen_at=_heard_at(holding),
    )


def _slots(quota: str, shared: Shared, terms: SharingTerms, question: ShareQuestion, now_ms: int) -> SharedSlots:
    return SharedSlots(
        quota=quota,
        limit=terms.limit_micro // SLOT_MICRO,
        slot_ttl_ms=terms.lasting_ms,
        regions=[_region_slots(*each, terms, now_ms) for each in question.holdings(shared)],
    )


def _region_slots(region: str, holding: Holding, terms: SharingTerms, now_ms: int) -> RegionSlots:
    base_share_micro, demand_micro = terms.base_share_micro(region), holding.demand_micro
    return RegionSlots(
        region=region,
        most=holding.most_within(now_ms, now_ms, base_share_micro) // SLOT_MICRO,
        base_share=base_share_micro // SLOT_MICRO,
        wanted=None if demand_micro is None else demand_micro // SLOT_MICRO,
        last_seen_at=_heard_at(holding),
    )


def _heard_at(holding: Holding) -> datetime | None:
    return None if holding.demand_micro is None else datetime.fromtimestamp(holding.heard_ms / 1000, UTC)
