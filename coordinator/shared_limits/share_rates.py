"""Answer a region's reports of shared rates and slots with its shares.

All coordinators meet in one row for each key. It is locked, decided on (rules.py) and written in one
transaction, which logs nothing: no report of a rate waits for a disk. Who could give something up is asked by a signal.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import confirm_catalogue, read_catalogue
from coordinator.limits.rules.entitlement import Catalogue, rate_terms, slot_terms
from coordinator.notice import Notice
from coordinator.shared_limits.rules import (
    KEPT_MS,
    SLOT_MICRO,
    Beyond,
    DemandReport,
    Grant,
    Shared,
    SharingReply,
    SharingTerms,
    beyond,
    share_out,
)
from coordinator.shared_limits.statements import forget_shares, lock_shares, write_shares
from protocol.messages import ItemRefused, RateShare, SharesRequest, SharesResponse, Signal, SlotShare
from protocol.outcomes import GrantRefusal

FORGOTTEN_AFTER = timedelta(milliseconds=3 * KEPT_MS)


class SharedOut(NamedTuple):
    """The response, and what the metrics count."""

    response: SharesResponse
    overshoots: Sequence[tuple[str, int, int]]  # quota key, the largest debt and the bound, both in nano units


async def share_rates(
    connection: Connection, documents: Documents, region: str, request: SharesRequest, now: datetime
) -> SharedOut:
    asked = {rate.quota for rate in request.rates} | {slots.quota for slots in request.slots}
    catalogue = await read_catalogue(connection, documents, asked, now)
    found = terms_asked(catalogue, request)
    terms = {quota: each for quota, each in found.items() if isinstance(each, SharingTerms)}
    shares = await lock_shares(connection, terms, now) if terms else {}
    response, notices = decide(region, request, found, shares, round(now.timestamp() * 1000))
    if shares:
        version = await write_shares(connection, shares, now)
        await confirm_catalogue(connection, documents, catalogue, version, asked, now)
    await notify(connection, notices)
    overshoots = [
        (quota, shared.most_debt, terms[quota].worst) for quota, shared in shares.items() if not terms[quota].is_slots
    ]
    return SharedOut(response, overshoots)


def terms_asked(catalogue: Catalogue, request: SharesRequest) -> dict[str, SharingTerms | GrantRefusal]:
    rates = {report.quota: rate_terms(catalogue, report.quota) for report in request.rates}
    return rates | {report.quota: slot_terms(catalogue, report.quota) for report in request.slots}


def decide(
    region: str,
    request: SharesRequest,
    terms: Mapping[str, SharingTerms | GrantRefusal],
    shares: Mapping[str, Shared],
    now_ms: int,
) -> tuple[SharesResponse, list[Notice]]:
    """Update the shares of all reported limits. Return why the rest was refused."""
    refused: list[ItemRefused] = []
    answers: dict[str, SharingReply] = {}
    for quota, report in _reports(region, request):
        about = terms[quota]
        if isinstance(about, GrantRefusal):
            refused.append(ItemRefused(quota=quota, refusal=about))
        else:
            answers[quota] = share_out(shares[quota], report, about, now_ms)
    rates = [
        _told(each.quota, answers[each.quota].grant, beyond(shares[each.quota], of))
        for each in request.rates
        if isinstance(of := terms[each.quota], SharingTerms)
    ]
    slots = [
        _told_of_slots(each.quota, answers[each.quota].grant, terms[each.quota])
        for each in request.slots
        if each.quota in answers
    ]
    notices = [
        Notice(Signal(kind="rate", quota=quota), other) for quota, answer in answers.items() for other in answer.asked
    ]
    return SharesResponse(rates=rates, slots=slots, refused=refused), notices


def _reports(region: str, request: SharesRequest) -> Iterator[tuple[str, DemandReport]]:
    for rate in request.rates:
        yield rate.quota, DemandReport(region, rate.demand_micro, rate.number, rate.rate_micro, rate.spent)
    for slot in request.slots:
        wanted_micro, held_micro = slot.wanted * SLOT_MICRO, slot.held * SLOT_MICRO
        yield slot.quota, DemandReport(region, wanted_micro, slot.number, held_micro, 0, slot.epoch, slot.lost_ms)


def _told(quota: str, grant: Grant, past: Beyond) -> RateShare:
    return RateShare(
        quota=quota,
        number=grant.number,
        rate_micro=grant.rate_micro,
        after_micro=grant.after_micro,
        expires_in_ms=grant.expires_in_ms,
        refresh_in_ms=grant.refresh_in_ms,
        contended=grant.is_contended,
        bound_milli=past.bound_milli,
        overshoot_milli=past.overshoot_milli,
    )


def _told_of_slots(quota: str, grant: Grant, terms: SharingTerms | GrantRefusal) -> SlotShare:
    assert isinstance(terms, SharingTerms)
    return SlotShare(
        quota=quota,
        number=grant.number,
        units=grant.rate_micro // SLOT_MICRO,
        after_units=grant.after_micro // SLOT_MICRO,
        expires_in_ms=grant.expires_in_ms,
        refresh_in_ms=grant.refresh_in_ms,
        slot_ttl_ms=terms.lasting_ms,
        contended=grant.is_contended,
    )


async def delete_idle_shares(connection: Connection, now: datetime) -> int:
    return await forget_shares(connection, now - FORGOTTEN_AFTER)
