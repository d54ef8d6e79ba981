"""The decision of exchanges, from what is locked to what is written and replied. It reads nothing more.

First every report is booked, then what came back for a region is kept for it, then wants are granted, and what is left
goes to regions that wait elsewhere. So a want is granted from all that the same transaction freed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import datetime
from typing import NamedTuple

from coordinator.exchange.rules.allocation import demand_milli_of
from coordinator.exchange.rules.balances import Correction, Key, Lease, Pool
from coordinator.exchange.rules.granting import LeaseTerms, push_to_waiting, record_contact, serve_request
from coordinator.exchange.rules.locked import Bounds, LeaseName, Locked
from coordinator.exchange.rules.posting import Entry, Movement, Report
from coordinator.exchange.rules.settlement import (
    Quarantined,
    SettlementVerdict,
    judge_totals,
    key_of,
    quarantine_all,
    settle,
)
from coordinator.exchange.rules.signals import (
    availability_signals,
    grant_signal,
    has_nothing_to_signal,
    recall_signals,
)
from coordinator.exchange.rules.submissions import Classified, Matched
from coordinator.notice import Notice
from coordinator.periods.rules.closing import settle_late
from coordinator.proof.rules import next_head
from coordinator.rebalancing.rules.division import Move, fetch_notice, note_returned
from coordinator.webhooks.rules import Event, overdrawn_event, suspense_events, thresholds_reached
from protocol.identifiers import parse_quota_key
from protocol.lease import LeaseState
from protocol.limits.document import AllowanceQuota, thresholds_of
from protocol.messages import ItemRefused
from protocol.outcomes import ExchangeOutcome, GrantRefusal


class BookedReport(NamedTuple):
    """A report as it is to be written."""

    report: Report
    body_hash: bytes
    head: bytes
    quarantined: Sequence[Quarantined]


class DecidedExchange(NamedTuple):
    """The outcome of an exchange, as its region learns it."""

    exchange: Classified
    verdict: SettlementVerdict
    booked: BookedReport | None  # None if its number does not count
    leases: Mapping[Key, Lease]
    current_keys: Iterable[Key]
    refused: Sequence[ItemRefused]
    refusals: Mapping[Key, GrantRefusal | None]  # why a lease got nothing or less than was wanted
    demands_milli: Mapping[Key, int]  # of all regions together


class Decided(NamedTuple):
    """Everything that is to be written, and what is to be signalled. Without a report booked, nothing moves."""

    exchanges: Sequence[DecidedExchange]
    booked: Sequence[BookedReport]
    pools: Sequence[Pool]  # of which something moved
    new_leases: Sequence[Lease]
    leases: Sequence[Lease]  # all that changed, the new ones included
    states: Mapping[LeaseName, LeaseState]  # as they were read: the decision holds for those only
    entries: Sequence[Entry]  # the booked reports, and grants to regions that waited
    corrections: Sequence[Correction]  # for what belongs to closed periods
    moves: Sequence[Move]  # that advanced
    regressed: Sequence[Classified]  # kept for people: they show that the ledger lost data
    notices: Sequence[Notice]
    events: Sequence[Event]  # for webhooks


class _Settled(NamedTuple):
    """An exchange whose report is booked."""

    matched: Matched
    leases: Mapping[Key, Lease]
    verdict: SettlementVerdict
    report: Report
    quarantined: Sequence[Quarantined] = ()


def decide(locked: Locked, bounds: Bounds, terms: LeaseTerms, now: datetime) -> Decided:
    overage_left = {region: dict(left) for region, left in bounds.overage_left.items()}
    settled = list(_settle_all(locked, overage_left, terms, now))
    demands_milli = Counter[Key]()
    for key, leases in locked.by_pool.items():
        demands_milli[key] = sum(demand_milli_of(lease, now) for lease in leases)
    refusals = [_grant(each, locked, demands_milli, now) for each in settled]
    pushed = list(_push(settled, locked, bounds, demands_milli, now))
    exchanges = [_decided(each, refused, demands_milli, now) for each, refused in zip(settled, refusals, strict=True)]
    booked = [each.booked for each in exchanges if each.booked]
    entries: list[Entry] = [*(each.report for each in booked), *(entry for entry, _ in pushed)]
    moved = sorted({transfer.key for entry in entries for transfer in entry.transfers})
    touched = _touched(settled, locked, [lease for _, lease in pushed])
    signals = [*_signals(settled, locked, demands_milli, now), *(grant_signal(lease) for _, lease in pushed)]
    return Decided(
        exchanges,
        booked,
        pools=[locked.pools[key].pool for key in moved],
        new_leases=[lease for lease in locked.new_leases if (lease.epoch, lease.key) in touched],
        leases=list(touched.values()),
        states=locked.as_read.states,
        entries=entries,
        corrections=[late.book for late in locked.lates.values() if late.has_changed],
        moves=locked.changed_moves,
        regressed=[each.matched.exchange for each in settled if each.verdict.shows_a_regressed_ledger],
        notices=list(dict.fromkeys(signals)),
        events=[*suspense_events(entries), *_threshold_events(locked, moved), *_overdrawn_events(locked)],
    )


# --- settle -----------------------------------------------------------------------------------------------------------


def _settle_all(
    locked: Locked, overage_left: MutableMapping[str, dict[Key, int]], terms: LeaseTerms, now: datetime
) -> Iterator[_Settled]:
    for matched, leases in locked.exchanges:
        settled = _settle(matched, leases, locked, overage_left, terms, now)
        for key in leases:
            if moves := locked.divisions[key].moves:  # before anything is granted: it came back for another region
                note_returned(settled.report, key, settled.report.region, moves)
        yield settled


def _settle(
    matched: Matched,
    leases: Mapping[Key, Lease],
    locked: Locked,
    overage_left: MutableMapping[str, dict[Key, int]],
    terms: LeaseTerms,
    now: datetime,
) -> _Settled:
    """Book a report, if its totals are plausible: neither its store nor the ledger has lost data."""
    exchange, batch = matched.exchange, matched.exchange.batch
    report = Report(exchange.region, batch.epoch, batch.lane, batch.seq)
    settled = _Settled(matched, leases, exchange.verdict, report)
    if exchange.verdict.is_kept:
        return settled._replace(quarantined=quarantine_all(batch))
    if not exchange.verdict.is_applied:
        return settled
    outcome = judge_totals(batch, leases, locked.closed)
    if outcome is not ExchangeOutcome.APPLIED:
        return settled._replace(verdict=SettlementVerdict(outcome))
    for lease in leases.values():
        record_contact(lease, terms, now)
    left = overage_left.setdefault(exchange.region, {})
    return settled._replace(quarantined=list(_book(settled, locked, left, terms, now)))


def _book(
    settled: _Settled, locked: Locked, overage_left: dict[Key, int], terms: LeaseTerms, now: datetime
) -> Iterator[Quarantined]:
    """Book the leases of a report, and yield those that are kept for people instead."""
    matched, leases, report = settled.matched, settled.leases, settled.report
    reported = matched.exchange.batch.leases
    for each in reported if matched.held else ():
        if (key := key_of(each)) in matched.held:
            yield Quarantined(key, matched.held[key], each)
    pools = {key: locked.pools[key].pool for key in leases}
    regional = {key for key in leases if locked.divisions[key].is_regional}
    lates = {key: late for key in leases if (late := locked.lates.get((report.epoch, key)))} if locked.lates else {}
    if not lates:
        yield from settle(report, reported, pools, leases, regional, overage_left)
        return
    yield from settle(
        report, [each for each in reported if key_of(each) not in lates], pools, leases, regional, overage_left
    )
    late_leases = [each for each in reported if key_of(each) in lates]
    yield from settle_late(report, late_leases, lates, terms.late_days, now, overage_left)


# --- grant ------------------------------------------------------------------------------------------------------------


def _grant(
    settled: _Settled, locked: Locked, demands_milli: Counter[Key], now: datetime
) -> Mapping[Key, GrantRefusal | None]:
    """Grant what an exchange wants, and return why it is not more."""
    refusals: dict[Key, GrantRefusal | None] = {}
    if not settled.verdict.is_applied:
        return refusals
    known = {key_of(each): each.granted for each in settled.matched.exchange.batch.leases}
    for request in settled.matched.requests:
        lease = settled.leases[request.key]
        # Granted before, and not yet known to the region when it sent this: it waits for so much less.
        in_flight = max(0, lease.granted - known.get(request.key, lease.granted))
        demand_was_milli = demand_milli_of(lease, now)
        view = locked.view(lease, demands_milli[lease.key])
        refusals[request.key] = serve_request(
            settled.report, request._replace(in_flight=in_flight) if in_flight else request, lease, view, now
        )
        demands_milli[lease.key] += demand_milli_of(lease, now) - demand_was_milli
    return refusals


def _push(
    exchanges: Iterable[_Settled], locked: Locked, bounds: Bounds, demands_milli: Counter[Key], now: datetime
) -> Iterator[tuple[Movement, Lease]]:
    """Grant what is left, after all that report here were served, to those that wait elsewhere."""
    for each in exchanges:
        if each.verdict.is_applied and bounds.pushable:
            cause = (each.report.epoch, each.report.lane, each.report.seq)
            for lease in each.leases.values():
                limit, view = bounds.limits.get(lease.key.quota, 0), locked.view(lease, demands_milli[lease.key])
                yield from push_to_waiting(view, limit, bounds.pushable, cause, now)


# --- what is written and signalled ------------------------------------------------------------------------------------


def _decided(
    settled: _Settled, refusals: Mapping[Key, GrantRefusal | None], demands_milli: Mapping[Key, int], now: datetime
) -> DecidedExchange:
    matched, exchange = settled.matched, settled.matched.exchange
    booked = None
    if settled.verdict.is_booked:
        assert exchange.lane is not None
        head = next_head(exchange.lane.head, settled.report, exchange.body_hash, now)
        booked = BookedReport(settled.report, exchange.body_hash, head, settled.quarantined)
    return DecidedExchange(
        exchange,
        settled.verdict,
        booked,
        settled.leases,
        matched.current_keys,
        matched.refused,
        refusals,
        demands_milli,
    )


def _touched(exchanges: Iterable[_Settled], locked: Locked, pushed: Iterable[Lease]) -> dict[LeaseName, Lease]:
    """Return the leases that are written. Those of closed periods stay as they are: their corrections are written."""
    own = [lease for each in exchanges if each.verdict.is_applied for lease in each.leases.values()]
    touched = {(lease.epoch, lease.key): lease for lease in [*own, *pushed]}
    return {name: lease for name, lease in touched.items() if name not in locked.lates} if locked.lates else touched


def _signals(exchanges: Iterable[_Settled], locked: Locked, demands_milli: Counter[Key], now: datetime) -> list[Notice]:
    signals: list[Notice] = []
    reported = [lease for each in exchanges if each.verdict.is_applied for lease in each.leases.values()]
    grantable = locked.as_read.grantable
    quiet = {
        key
        for key in {lease.key for lease in reported}
        if has_nothing_to_signal(locked.pools[key].pool, locked.divisions[key], grantable[key])
    }
    for lease in reported:
        if lease.key not in quiet:
            view = locked.view(lease, demands_milli[lease.key])
            signals += recall_signals(lease, view, grantable[lease.key], now)
            signals += availability_signals(view, grantable[lease.key], now)
    return signals + [notice for move in locked.changed_moves if (notice := fetch_notice(move))]


def _threshold_events(locked: Locked, moved: Iterable[Key]) -> Iterator[Event]:
    for key in moved:
        spec = locked.quotas.get(parse_quota_key(key.quota)[0])
        if isinstance(spec, AllowanceQuota):
            yield from thresholds_reached(locked.pools[key].pool, locked.as_read.used[key], thresholds_of(spec))


def _overdrawn_events(locked: Locked) -> Iterator[Event]:
    for name, before in locked.as_read.overdrawn.items():
        if locked.leases[name].overdrawn > before:
            yield overdrawn_event(locked.leases[name], before)
