"""Who has what of a rate that is shared by demand: what may be in force where, and the published worst case."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct

from coordinator.database import ledger
from coordinator.database.connection import Connection
from coordinator.database.documents import Documents
from coordinator.database.shares import read_shares
from coordinator.domain.entitlement import rate_terms
from coordinator.domain.sharing import PARTS, Holding, Shared, Terms, count
from protocol.policy import Sharing


class RegionRate(Struct, frozen=True, kw_only=True):
    """Millionths of a unit a second."""

    region: str
    most_micro: int  # what it may be using, at most: of what it was given, not all may have been heard
    safe_micro: int  # its part by weight, which it has when it is cut off for long
    demand_micro: int | None  # None: it has said nothing yet
    heard_at: datetime | None


class SharedRate(Struct, frozen=True, kw_only=True):
    quota: str
    sharing: Sharing
    limit_micro: int
    bound_milli: int  # thousandths of a unit beyond limit and burst that are admitted in the worst case; never more
    overshoot_milli: int  # that may have been, at most, since regions began to speak of it
    regions: list[RegionRate]


class RateQuestion(NamedTuple):
    quotas: Sequence[str] = ()  # by name or by key; empty: any


async def read_rates(
    connection: Connection, documents: Documents, question: RateQuestion, after: str, limit: int, now: datetime
) -> dict[str, SharedRate | None]:
    """At most so many keys that come after the given one. None: it is no longer shared. Wants a snapshot."""
    found = await read_shares(connection, question.quotas, after, limit)
    catalogue = await ledger.read_catalogue(connection, documents, set(found), now)
    terms = {quota: rate_terms(catalogue, quota) for quota in found}
    now_ms = round(now.timestamp() * 1000)
    return {
        quota: _rate(quota, shared, of, now_ms) if isinstance(of := terms[quota], Terms) else None
        for quota, shared in found.items()
    }


def _rate(quota: str, shared: Shared, terms: Terms, now_ms: int) -> SharedRate:
    """What is owed grows until the next report says otherwise, so it is counted up to now."""
    count(shared, terms, max(now_ms, shared.at_ms))
    return SharedRate(
        quota=quota,
        sharing=terms.sharing,
        limit_micro=terms.limit_micro,
        bound_milli=_milli(terms.worst),
        overshoot_milli=_milli(max(shared.most_debt, shared.debt)),
        regions=[_region(region, holding, terms, now_ms) for region, holding in sorted(shared.holdings.items())],
    )


def _region(region: str, holding: Holding, terms: Terms, now_ms: int) -> RegionRate:
    safe_micro, has_spoken = terms.safe_micro(region), holding.demand_micro is not None
    return RegionRate(
        region=region,
        most_micro=holding.most_within(now_ms, now_ms, safe_micro),
        safe_micro=safe_micro,
        demand_micro=holding.demand_micro,
        heard_at=datetime.fromtimestamp(holding.heard_ms / 1000, UTC) if has_spoken else None,
    )


def _milli(parts: int) -> int:
    """Never too few."""
    return -(-parts * 1000 // PARTS)
