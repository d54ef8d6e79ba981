"""What a region says of rates that are shared by demand, and what it may use of each from now on.

All coordinators meet in one row for each key. It is locked, decided on (domain/sharing.py) and written in one
transaction, which logs nothing: no report of a rate waits for a disk. Who could give something up is asked by a signal.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from coordinator.database import ledger
from coordinator.database.connection import Connection
from coordinator.database.documents import Documents
from coordinator.database.notices import notify
from coordinator.database.shares import forget_shares, lock_shares, write_shares
from coordinator.domain.entitlement import rate_terms
from coordinator.domain.notice import Notice
from coordinator.domain.sharing import KEPT_MS, Grant, Report, Shared, Terms, share_out
from protocol.messages import RateReport, RateShare, SharesResponse, Signal, WantRefused
from protocol.outcomes import GrantRefusal

FORGOTTEN_AFTER = timedelta(milliseconds=3 * KEPT_MS)


class SharedOut(NamedTuple):
    """The answer, and what the metrics want to know."""

    response: SharesResponse
    overshoots: Sequence[tuple[str, int, int]]  # quota key, the most that was owed and the bound, both in parts


async def share_rates(
    connection: Connection, documents: Documents, region: str, reports: Sequence[RateReport], now: datetime
) -> SharedOut:
    catalogue = await ledger.read_catalogue(connection, documents, {report.quota for report in reports}, now)
    found = {report.quota: rate_terms(catalogue, report.quota) for report in reports}
    terms = {quota: each for quota, each in found.items() if isinstance(each, Terms)}
    shares = await lock_shares(connection, terms, now) if terms else {}
    response, notices = decide(region, reports, found, shares, round(now.timestamp() * 1000))
    if shares:
        await write_shares(connection, shares, now)
    await notify(connection, notices)
    overshoots = [(quota, shared.most_debt, terms[quota].worst) for quota, shared in shares.items()]
    return SharedOut(response, overshoots)


def decide(
    region: str,
    reports: Sequence[RateReport],
    terms: Mapping[str, Terms | GrantRefusal],
    shares: Mapping[str, Shared],
    now_ms: int,
) -> tuple[SharesResponse, list[Notice]]:
    """Changes the shares of what is shared; says why the rest is not."""
    given: list[RateShare] = []
    refused: list[WantRefused] = []
    notices: list[Notice] = []
    for report in reports:
        about = terms[report.quota]
        if isinstance(about, GrantRefusal):
            refused.append(WantRefused(quota=report.quota, refusal=about))
            continue
        said = Report(region, report.demand_micro, report.number, report.rate_micro, report.spent)
        grant, asked = share_out(shares[report.quota], said, about, now_ms)
        given.append(_told(report.quota, grant))
        notices += [Notice(Signal(kind="rate", quota=report.quota), other) for other in asked]
    return SharesResponse(rates=given, refused=refused), notices


def _told(quota: str, grant: Grant) -> RateShare:
    return RateShare(
        quota=quota,
        number=grant.number,
        rate_micro=grant.rate_micro,
        after_micro=grant.after_micro,
        expires_in_ms=grant.expires_in_ms,
        refresh_in_ms=grant.refresh_in_ms,
        contended=grant.is_contended,
    )


async def forget_quiet_rates(connection: Connection, now: datetime) -> int:
    return await forget_shares(connection, now - FORGOTTEN_AFTER)
