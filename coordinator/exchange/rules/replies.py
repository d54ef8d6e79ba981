"""What regions are told of their exchanges, once everything is written and the receipts are known."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from coordinator.exchange.rules.allocation import demand_milli_of
from coordinator.exchange.rules.balances import Lease, Pool
from coordinator.exchange.rules.decision import DecidedExchange
from coordinator.exchange.rules.granting import MAY_SPEND_AGAIN, LeaseTerms, PoolView, is_waiting, refusal_of
from coordinator.exchange.rules.locked import Locked
from coordinator.exchange.rules.pacing import report_at, report_within_ms, rest_lasts_ms
from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.rebalancing.rules.division import kept_of_move
from coordinator.webhooks.rules import usage_of
from protocol.lease import LeaseState
from protocol.limits.document import report_within_ms_of, thresholds_of
from protocol.messages import ExchangeReply, ExchangeResponse, LeaseReply, Receipt, Versions
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.periods import period_of

BOUNDS_REMEMBERED = 100  # of periods at one moment: a batch tells many of the same one

Receipts = Mapping[tuple[int, int], Receipt]  # by epoch and lane
_HOPEFUL = (None, GrantRefusal.LEASE_EXPIRED)
_EVIDENCE_OF_LOSS = (ExchangeOutcome.CONFLICT, ExchangeOutcome.STORE_REGRESSED)


def replayed_reports(exchanges: Iterable[DecidedExchange]) -> list[tuple[int, int, int]]:
    """Return the reports that were booked before, by (epoch, lane, seq): their receipts are given again."""
    return [
        (each.exchange.batch.epoch, each.exchange.batch.lane, each.exchange.batch.seq)
        for each in exchanges
        if each.verdict.is_acknowledged and not each.booked
    ]


def epochs_with_data_loss(exchanges: Iterable[DecidedExchange]) -> list[int]:
    """Return the epochs that exchanges show to have lost data of their store: they are over."""
    return sorted({each.exchange.batch.epoch for each in exchanges if each.verdict.outcome in _EVIDENCE_OF_LOSS})


def respond(
    call: ExchangeCall,
    exchanges: Sequence[DecidedExchange],
    locked: Locked,
    catalogue: Catalogue,
    receipts: Receipts,
    terms: LeaseTerms,
    now: datetime,
) -> ExchangeResponse:
    """Answer one call: its exchanges in their order, the refused ones included."""
    replies = [_reply(each, locked, receipts, terms, now) for each in exchanges]
    for place, reply in call.refused:
        replies.insert(place, reply)
    return ExchangeResponse(
        replies=replies,
        versions=Versions(policies=catalogue.version, blocks=catalogue.block_version),
        drain=catalogue.must_return(call.region),
    )


def _reply(
    each: DecidedExchange, locked: Locked, receipts: Receipts, terms: LeaseTerms, now: datetime
) -> ExchangeReply:
    batch, verdict = each.exchange.batch, each.verdict
    return ExchangeReply(
        lane=batch.lane,
        seq=batch.seq,
        outcome=verdict.outcome,
        receipt=receipts[batch.epoch, batch.lane] if verdict.is_acknowledged else None,
        expected_seq=verdict.expected_seq,
        fault=verdict.fault,
        leases=[_lease_reply(each, lease, locked, terms, now) for lease in each.leases.values()]
        if verdict.is_answered
        else [],
        refused=list(each.refused) if verdict.is_answered else [],
    )


def _lease_reply(each: DecidedExchange, lease: Lease, locked: Locked, terms: LeaseTerms, now: datetime) -> LeaseReply:
    refusal = each.refusals.get(lease.key) or refusal_of(lease)
    view = locked.view(lease, each.demands_milli.get(lease.key, 0))
    return lease_reply(lease, view, terms, refusal, now, is_current=lease.key in each.current_keys)


# --- one lease --------------------------------------------------------------------------------------------------------


def lease_reply(
    lease: Lease,
    view: PoolView,
    terms: LeaseTerms,
    refusal: GrantRefusal | None,
    now: datetime,
    *,
    is_current: bool = False,
) -> LeaseReply:
    pool, period = view.pool, _bounds_of(lease.key.period, now)
    may_spend = view.period_is_open and lease.state is LeaseState.ACTIVE
    ends_in_ms = period.ends_in_ms
    pace = _pace(lease, view, terms, now)
    return LeaseReply(
        quota=lease.key.quota,
        period=lease.key.period,
        granted=lease.granted,
        overage=lease.overage,
        unallocated=view.grantable if view.division.is_regional else pool.grantable,
        starts_in_ms=period.starts_in_ms,
        expires_in_ms=min(_spendable_for_ms(lease, terms, now), ends_in_ms) if may_spend else 0,
        ends_in_ms=ends_in_ms,
        first_minute=period.first_minute,
        last_minute=period.last_minute,
        final=not view.period_is_open or refusal_of(lease) not in _HOPEFUL or not ends_in_ms,
        recall_keep=_recall_keep(lease, view, now),
        overdraft=min(lease.overdraft, view.overdraft_part_of(lease.region)) if lease.state in MAY_SPEND_AGAIN else 0,
        refusal=refusal,
        consumed=lease.region_consumed,
        returned=lease.region_returned,
        current=is_current,
        report_within_ms=pace.report_within_ms,
        report_at=pace.report_at,
        beyond_limit=_beyond_limit(lease, pool),
    )


class _Pace(NamedTuple):
    """When a region reports usage of a lease."""

    report_within_ms: int
    report_at: int


def _pace(lease: Lease, view: PoolView, terms: LeaseTerms, now: datetime) -> _Pace:
    spec = view.allowance
    if spec is None:
        return _Pace(0, 0)  # no quota any more: what was used is reported at once
    demand_milli = demand_milli_of(lease, now) if view.division.is_regional else view.demand_milli
    rest_ms = rest_lasts_ms(view.grantable, demand_milli)
    regions = 1 + len(view.others)
    return _Pace(
        report_within_ms(report_within_ms_of(spec), rest_ms, terms.lease_ms),
        report_at(lease.region_consumed, usage_of(view.pool), thresholds_of(spec), regions),
    )


def _beyond_limit(lease: Lease, pool: Pool) -> int:
    """Return how many of the units that a region may still admit are not told to services as `remaining`.

    A soft cap lends units beyond the limit as they are needed, so what can be admitted grows with use.
    """
    return max(0, pool.grantable + lease.outstanding - pool.included_left) if pool.soft_cap_extension else 0


class _Bounds(NamedTuple):
    """The bounds of a period, as a region is told them at one moment."""

    starts_in_ms: int
    ends_in_ms: int
    first_minute: int
    last_minute: int


@functools.lru_cache(maxsize=BOUNDS_REMEMBERED)
def _bounds_of(period_id: str, now: datetime) -> _Bounds:
    period = period_of(period_id)
    return _Bounds(period.starts_in_ms(now), period.ends_in_ms(now), period.first_minute, period.last_minute)


def _recall_keep(lease: Lease, view: PoolView, now: datetime) -> int | None:
    """Repeat the recall, for regions that missed the signal. An expired lease is returned before it is good again.

    Of a central quota everything that no request took is returned at once.
    """
    if lease.state is LeaseState.EXPIRED:
        return 0
    if view.division.is_central:
        return 0 if lease.outstanding else None
    others_wait = not view.pool.grantable and any(is_waiting(other, now) for other in view.others)
    if not others_wait and not view.division.moves:
        return None  # no region needs any of it
    spare = view.spare_of(lease) if others_wait and not lease.waiting else 0
    keep = min(lease.outstanding - spare, kept_of_move(lease, view.division.missing_from(lease.region), now))
    return keep if keep < lease.outstanding else None


def _spendable_for_ms(lease: Lease, terms: LeaseTerms, now: datetime) -> int:
    """Return how long a lease may be spent: until the ledger expires it, less the margin. A replay extends nothing."""
    return max(0, (lease.expires_at - now) // timedelta(milliseconds=1) - terms.margin_ms)
