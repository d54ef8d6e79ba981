"""The decision of an exchange, pure: from what was read under locks to what is written and replied.

An exchange goes through three hands, and this module is all but the database. What is to be read next depends on what
was read before, so the decision comes in steps, each a pure function of what is there by then:

    judge     the lanes are locked              which exchanges count, by their number; which keys are of their lane
    sort      the catalogue is read             what is wanted, and which wants lead nowhere
    books     pools and leases are locked       what there is, new leases included
    decide    nothing more is read              who booked what, who gets what, who is told what
    respond   all is written, receipts are in   what the region is told

An exchange that is refused (a gap, a conflict, lost data, …) changes nothing and holds up none of the others. The code
works on any number of calls at once.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from coordinator.exchange.rules.allocation import demand_milli_of
from coordinator.exchange.rules.balances import Correction, Entry, Key, Lease, Movement, Pool, Report
from coordinator.exchange.rules.budget import Budget, Take
from coordinator.exchange.rules.granting import (
    Offered,
    Shelf,
    Terms,
    Wanted,
    came_free,
    fetch,
    is_calm,
    lease_reply,
    offer_of,
    push,
    recalls,
    refusal_of,
    serve,
    sort_wants,
    touch,
    waits,
)
from coordinator.exchange.rules.plausibility import ClaimBounds, reason_to_hold
from coordinator.exchange.rules.settlement import (
    EpochState,
    Lane,
    Quarantined,
    QuarantineReason,
    Verdict,
    is_empty,
    judge_number,
    judge_totals,
    keep,
    key_of,
    may_become_overage,
    settle,
)
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.notice import Notice
from coordinator.periods.rules.closing import Late, late_of, open_key, settle_late
from coordinator.proof.rules import next_head
from coordinator.rebalancing.rules.division import Division, Move, by_weight, came_back, division_of, fetched_by
from coordinator.webhooks.rules import Event, Used, overdrawn_event, thresholds_reached, used_of
from protocol.identifiers import lane_of, parse_quota_key
from protocol.lease import LeaseState
from protocol.limits.document import AllowanceQuota, Mode, Quota, overdraft_of, thresholds_of
from protocol.messages import (
    ExchangeFault,
    ExchangeReply,
    ExchangeResponse,
    FrozenBatch,
    LeaseReply,
    LeaseWant,
    LiveState,
    Receipt,
    Versions,
    WantRefused,
)
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.periods import is_over


class Incoming(NamedTuple):
    """One exchange of a call, parsed."""

    batch: FrozenBatch
    body_hash: bytes
    live: LiveState
    refused: Sequence[WantRefused] = ()  # wants that are malformed


class Call(NamedTuple):
    region: str
    fingerprint: str
    incoming: Sequence[Incoming]
    refused: Sequence[tuple[int, ExchangeReply]] = ()  # exchanges that are malformed, by their place in the request


class LockedPool(NamedTuple):
    pool: Pool
    period_is_open: bool
    closed_at: datetime | None = None  # None as long as its period is not closed
    moves: int = 0  # so many are open: people bring units of it from region to region
    is_kept: bool = True  # False of a closed period in which nothing was ever booked for this quota


class BookedReport(NamedTuple):
    """A report as it is to be written."""

    report: Report
    body_hash: bytes
    head: bytes
    quarantined: Sequence[Quarantined]


class Decision(NamedTuple):
    """Everything that is to be written, and who is told of it. Without a report booked, nothing moves."""

    booked: Sequence[BookedReport]
    pools: Sequence[Pool]  # of which something moved
    new_leases: Sequence[Lease]
    leases: Sequence[Lease]  # all that was touched, the new ones included
    states: Mapping[tuple[int, Key], LeaseState]  # as they were read: the decision holds for those only
    notices: Sequence[Notice]
    pushed: Sequence[Movement] = ()  # grants to those who waited for what came free
    regressed: Sequence[FrozenBatch] = ()  # kept for people: they show that the ledger lost data
    regions: Mapping[int, str] = MappingProxyType({})  # by epoch, of the regressed
    corrections: Sequence[Correction] = ()  # for what belongs to closed periods
    moves: Sequence[Move] = ()  # that came a step further
    events: Sequence[Event] = ()  # that people asked to be told


Receipts = Mapping[tuple[int, int], Receipt]  # by epoch and lane

LONGEST_REASON = 256
_NOT_JUDGED = Verdict(ExchangeOutcome.UNKNOWN_EPOCH)


@dataclass(slots=True)
class Work:
    """One exchange on its way through."""

    call: Call
    incoming: Incoming
    report: Report
    wants: Sequence[LeaseWant]  # those that can be looked at
    lane: Lane | None = None
    verdict: Verdict = _NOT_JUDGED
    wanted: list[Wanted] = field(default_factory=list)
    refused: list[WantRefused] = field(default_factory=list)
    refusals: dict[Key, GrantRefusal | None] = field(default_factory=dict)
    held: dict[Key, QuarantineReason] = field(default_factory=dict)  # reports that wait for people, without a lease
    quarantined: list[Quarantined] = field(default_factory=list)
    keys: Sequence[Key] = ()  # the pools it is about, each once: known when its wants are sorted, as are the new ones
    new_keys: Sequence[Key] = ()  # pools and leases that must exist from now on
    current_keys: Collection[Key] = ()  # those of the periods that wanted quotas are in now
    leases: dict[Key, Lease] = field(default_factory=dict)  # of its epoch, among the books

    @property
    def is_applied(self) -> bool:
        return self.verdict.outcome is ExchangeOutcome.APPLIED

    @property
    def is_booked(self) -> bool:
        """Its number counts from now on."""
        return self.is_applied or self.verdict.is_kept

    @property
    def shows_a_regressed_ledger(self) -> bool:
        """By a number or by totals that the ledger had given and does not know: until people have seen to it."""
        return self.verdict.outcome in (ExchangeOutcome.GAP, ExchangeOutcome.LEDGER_REGRESSED)

    @property
    def is_acknowledged(self) -> bool:
        """With a receipt: the region may forget it."""
        return self.is_answered or self.verdict.outcome is ExchangeOutcome.RETIRED

    @property
    def is_answered(self) -> bool:
        """With the totals as they are now."""
        return self.verdict.outcome in (ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED)

    def name_keys(self) -> None:
        frozen, wanted = self.incoming.batch.leases, [wanted.key for wanted in self.wanted]
        self.keys = list(dict.fromkeys([*map(key_of, frozen), *wanted]))
        self.current_keys = {each.key for each in self.wanted if not each.is_ahead}
        if self.is_applied:
            # Of what it was never granted, a region may still have consumed: truth is never refused.
            done = [key_of(lease) for lease in frozen if not is_empty(lease)]
            self.new_keys = list(dict.fromkeys([*wanted, *done]))

    def refuse(self, quotas: Collection[str], reason: str) -> None:
        """Refuse what is wanted of these quota keys for now: nothing is locked or made for it."""
        refused = [each for each in self.wanted if each.key.quota in quotas]
        if refused:
            self.wanted = [each for each in self.wanted if each.key.quota not in quotas]
            names = dict.fromkeys(each.key.quota for each in refused)
            self.refused += [
                WantRefused(quota=quota, refusal=GrantRefusal.OVER_BUDGET, reason=reason) for quota in names
            ]
            self.name_keys()
            self.hold({})

    def hold(self, held: Mapping[Key, QuarantineReason]) -> None:
        """Keep these reports for people: nothing is locked or made for them."""
        self.held |= {key: held[key] for key in self.new_keys if key in held}
        if self.held:
            self.keys = [key for key in self.keys if key not in self.held]
            self.new_keys = [key for key in self.new_keys if key not in self.held]


@dataclass(slots=True)
class Books:
    """What is locked, and then decided on."""

    pools: Mapping[Key, LockedPool]
    leases: dict[tuple[int, Key], Lease]
    by_pool: Mapping[Key, Sequence[Lease]]
    states: Mapping[tuple[int, Key], LeaseState]  # as they were read
    grantable: Mapping[Key, int]  # likewise
    used: Mapping[Key, Used]  # likewise
    overdrawn: Mapping[tuple[int, Key], int]  # likewise, of the leases that may be
    quotas: Mapping[str, Quota]  # what is in force
    new: Sequence[Lease]
    lates: Mapping[tuple[int, Key], Late]  # those of the leases whose periods are closed
    closed: Collection[Key]  # those of the pools whose periods are
    divisions: Mapping[Key, Division]  # how people divided each pool
    moves: Sequence[tuple[Move, Move]]  # those that are open, each with what it was when it was read
    pushable: Collection[int] = ()  # epochs that are current and held so, though nobody speaks for them here
    limits: Mapping[str, int] = field(default_factory=dict)  # of the quota keys of which something may be pushed
    demands_milli: Counter[Key] = field(default_factory=Counter)  # of each pool's leases together, once all is booked
    # By region and pool: how much more overage it may report without people's approval. Only where it may report any.
    overage_left: dict[str, dict[Key, int]] = field(default_factory=lambda: defaultdict(dict))

    def shelf(self, lease: Lease) -> Shelf:
        locked = self.pools[lease.key]
        demand_milli = self.demands_milli[lease.key]
        division = self.divisions[lease.key]
        return Shelf(
            locked.pool,
            locked.period_is_open,
            lease.region,
            self.by_pool[lease.key],
            division,
            demand_milli,
            overdraft_of_key(self.quotas, lease.key),
        )

    @property
    def changed_moves(self) -> list[Move]:
        return [move for move, as_read in self.moves if move != as_read]


# --- judge, sort, books: what there is --------------------------------------------------------------------------------


def works_of(call: Call) -> list[Work]:
    return [_work_of(call, incoming) for incoming in call.incoming]


def _work_of(call: Call, incoming: Incoming) -> Work:
    report = Report(call.region, incoming.batch.epoch, incoming.batch.lane, incoming.batch.seq)
    return Work(call, incoming, report, incoming.live.wants, refused=list(incoming.refused))


def judge(works: Iterable[Work], lanes: Mapping[tuple[int, int], Lane]) -> None:
    """Judge exchanges by their numbers and bytes, and refuse what belongs to another lane."""
    for work in works:
        lane = work.lane = lanes.get((work.report.epoch, work.report.lane))
        work.verdict = judge_number(lane, work.call.fingerprint, work.incoming.batch.seq, work.incoming.body_hash)
        if lane is not None:
            work.verdict = _refuse_foreign_lease(work.incoming.batch, lane) or work.verdict
            _refuse_foreign_wants(work, lane)


def _refuse_foreign_lease(batch: FrozenBatch, lane: Lane) -> Verdict | None:
    """A batch is one hash, so that a lease of another lane refuses all of it."""
    for place, lease in enumerate(batch.leases):
        if (own := lane_of(lease.quota, lane.lanes)) != lane.lane:
            fault = ExchangeFault(field=f"frozen.leases[{place}].quota", rule="lane", reason=_belongs(lease.quota, own))
            return Verdict(ExchangeOutcome.REFUSED, fault=fault)
    return None


def _refuse_foreign_wants(work: Work, lane: Lane) -> None:
    lanes = [lane_of(want.quota, lane.lanes) for want in work.wants]
    work.refused += [
        WantRefused(quota=want.quota, refusal=GrantRefusal.INVALID, rule="lane", reason=_belongs(want.quota, own))
        for want, own in zip(work.wants, lanes, strict=True)
        if own != lane.lane
    ]
    work.wants = [want for want, own in zip(work.wants, lanes, strict=True) if own == lane.lane]


def _belongs(quota: str, lane: int) -> str:
    return f"{quota} belongs to lane {lane}"[:LONGEST_REASON]


def asked_about(works: Iterable[Work]) -> set[str]:
    """Quota keys whose limits the decision takes."""
    return {want.quota for work in works for want in work.wants}


def apart(works: Iterable[Work], catalogue: Catalogue) -> set[str]:
    """Quota keys that are told of and that each region has a limit of: it is needed, for that is what it is told."""
    told = {lease.quota for work in works for lease in work.incoming.batch.leases}
    return {quota for quota in told if catalogue.mode_of(quota) is Mode.REGIONAL}


def sort(works: Iterable[Work], catalogue: Catalogue, terms: Terms, now: datetime) -> None:
    offered = cache(lambda quota: offer_of(catalogue, quota, terms, now))  # the same quota is wanted by many
    for work in works:
        _sort_wants(work, catalogue, offered)
        work.name_keys()


def _sort_wants(work: Work, catalogue: Catalogue, offered: Offered) -> None:
    if not work.is_answered:
        return
    if work.lane and work.lane.epoch_state is not EpochState.CURRENT:
        work.refused += [WantRefused(quota=want.quota, refusal=GrantRefusal.EPOCH_FENCED) for want in work.wants]
    elif not catalogue.is_active(work.call.region):
        # Said, and not left out: who waits for it would wait in vain.
        work.refused += [WantRefused(quota=want.quota, refusal=GrantRefusal.REGION_NOT_ACTIVE) for want in work.wants]
    else:
        work.wanted, refused = sort_wants(work.wants, offered)
        work.refused += refused


def pools_about(works: Iterable[Work], now: datetime) -> set[Key]:
    """For each of a period that is over, also the one of now: it may be closed, and then that is where things go."""
    about = {key for work in works if work.is_answered for key in work.keys}
    return about | {open_key(key, now) for key in about if is_over(key.period, now)}


def closed_keys(pools: Mapping[Key, LockedPool]) -> list[Key]:
    return [key for key, locked in pools.items() if locked.closed_at]


def late_pools(closed: Iterable[Key], corrections: Iterable[Correction], now: datetime) -> set[Key]:
    """In which what is known of closed ones may be booked: they must be there."""
    return {open_key(key, now) for key in closed} | {each.key for each in corrections}


def pools_needed(works: Iterable[Work]) -> set[Key]:
    """Those that must be there, so that what was done or is wanted has a place."""
    return {key for work in works for key in work.new_keys}


def keys_without_pool(works: Iterable[Work], pools: Mapping[Key, LockedPool]) -> tuple[set[Key], set[Key]]:
    """Return the keys that need a pool and have none: those that are wanted, and those that are only reported."""
    missing = {key for work in works for key in work.new_keys if key not in pools or not pools[key].is_kept}
    wanted = {each.key for work in works for each in work.wanted} & missing
    return wanted, missing - wanted


def hold_reports(
    works: Iterable[Work],
    reported: Iterable[Key],
    catalogue: Catalogue,
    known_periods: Collection[str],
    terms: Terms,
    now: datetime,
) -> None:
    """Keep reports for people that name no quota or no period that they can be booked on."""
    held = {
        key: reason
        for key in reported
        if (reason := reason_to_hold(catalogue, key, known_periods, terms.late_days, now))
    }
    for work in works if held else ():
        work.hold(held)


def keep_within_budgets(
    works: Sequence[Work], unseen: Collection[str], new_periods: Collection[str], take: Take
) -> None:
    """Refuse wants, and keep reports for people, that would make more new keys or periods than their region may.

    `unseen`: the quota keys that have no pool in any period. `new_periods`: those that are not in the books.
    """
    for region, own in _by_region(works).items():
        wanted = {each.key.quota for work in own for each in work.wanted}
        keys = list(dict.fromkeys(key for work in own for key in work.new_keys))
        reported = [key for key in keys if key.quota not in wanted]
        periods = list(dict.fromkeys(key.period for key in reported if key.period in new_periods))
        no_periods = set(periods[take(region, Budget.NEW_PERIODS, len(periods)) :])
        quotas = list(dict.fromkeys(key.quota for key in keys if key.quota in unseen))
        no_quotas = set(quotas[take(region, Budget.NEW_KEYS, len(quotas)) :])
        held = {key for key in reported if key.quota in no_quotas or key.period in no_periods}
        for work in own if no_quotas or held else ():
            work.refuse(no_quotas & wanted, "the region has wanted too many new keys in this minute")
            work.hold(dict.fromkeys(held, QuarantineReason.OVER_BUDGET))


def without_held(works: Iterable[Work], pools: Mapping[Key, LockedPool]) -> dict[Key, LockedPool]:
    """Leave out what nothing is booked in: that a period of a report that is kept for people is closed."""
    held = {key for work in works for key in work.held}
    return {key: locked for key, locked in pools.items() if locked.is_kept or key not in held}


def _by_region(works: Iterable[Work]) -> dict[str, list[Work]]:
    by_region: dict[str, list[Work]] = defaultdict(list)
    for work in works:
        by_region[work.report.region].append(work)
    return by_region


class RegionalOverage(NamedTuple):
    """Names a region's overage of one pool."""

    region: str
    key: Key


def overages_in_question(works: Iterable[Work]) -> set[RegionalOverage]:
    """Return where a report may become overage, so that what the region has used beyond its grants must be known."""
    return {
        RegionalOverage(work.report.region, lease.key)
        for work in works
        if work.is_applied
        for frozen in work.incoming.batch.leases
        if (lease := work.leases.get(key_of(frozen))) and may_become_overage(frozen, lease)
    }


def bound_overages(
    books: Books, overages: Mapping[RegionalOverage, int], limits: Mapping[str, int], bounds: ClaimBounds
) -> None:
    """Note how much more of each a region may report: `overages` is what it has used beyond its grants until now."""
    for (region, key), overage in overages.items():
        pool = books.pools[key].pool
        limit = max(limits.get(key.quota, 0), pool.spendable + pool.soft_cap_extension)
        books.overage_left[region][key] = max(0, bounds.most_overage(limit) - overage)


def epochs_about(works: Iterable[Work]) -> set[int]:
    return {work.report.epoch for work in works if work.is_answered}


def divisions_of(catalogue: Catalogue, pools: Iterable[Key], moves: Iterable[Move]) -> dict[Key, Division]:
    """`moves`: all that are open of these pools."""
    unless_set, by_pool = by_weight(catalogue), defaultdict[Key, list[Move]](list)
    for move in moves:
        by_pool[move.key].append(move)
    return {key: division_of(catalogue, key, by_pool.get(key, ()), unless_set) for key in pools}


def moved_keys(pools: Mapping[Key, LockedPool]) -> list[Key]:
    """Of which moves are open: they have to be read."""
    return [key for key, locked in pools.items() if locked.moves]


def divided_keys(divisions: Mapping[Key, Division], quotas: Mapping[str, Quota]) -> list[Key]:
    """Of which something is kept for a region, or from it, by people or for when it is cut off: all leases count."""
    return [key for key, division in divisions.items() if not division.is_plain or overdraft_of_key(quotas, key)]


def overdraft_of_key(quotas: Mapping[str, Quota], key: Key) -> int:
    spec = quotas.get(parse_quota_key(key.quota)[0])
    return overdraft_of(spec) if spec else 0


def books_of(
    works: Sequence[Work],
    pools: Mapping[Key, LockedPool],
    read: Iterable[Lease],
    corrections: Iterable[Correction],
    divisions: Mapping[Key, Division],
    quotas: Mapping[str, Quota],
    now: datetime,
) -> Books:
    """`read`: of the pools, all leases that may still be granted to, and those of the epochs that are spoken for; of
    pools that people divided, all.
    """
    leases = {(lease.epoch, lease.key): lease for lease in read}
    new = list(_new_leases(works, leases, now))
    leases |= {(lease.epoch, lease.key): lease for lease in new}
    by_pool: dict[Key, list[Lease]] = defaultdict(list)
    for lease in leases.values():
        by_pool[lease.key].append(lease)
    for work in works:
        epoch = work.report.epoch
        work.leases = {key: leases[epoch, key] for key in work.keys if (epoch, key) in leases}
    return Books(
        pools,
        leases,
        by_pool,
        states={name: lease.state for name, lease in leases.items()},
        grantable={key: locked.pool.grantable for key, locked in pools.items()},
        used={key: used_of(locked.pool) for key, locked in pools.items()},
        overdrawn={name: lease.overdrawn for name, lease in leases.items() if lease.overdraft},
        quotas=quotas,
        new=new,
        lates=_lates(works, leases, pools, corrections, now),
        closed=frozenset(closed_keys(pools)),
        divisions=divisions,
        moves=[(move, copy(move)) for division in divisions.values() for move in division.moves],
    )


def _lates(
    works: Iterable[Work],
    leases: Mapping[tuple[int, Key], Lease],
    pools: Mapping[Key, LockedPool],
    corrections: Iterable[Correction],
    now: datetime,
) -> dict[tuple[int, Key], Late]:
    lates: dict[tuple[int, Key], Late] = {}
    if not closed_keys(pools):
        return lates
    for work in works:
        found = [leases[name] for key in work.keys if (name := (work.report.epoch, key)) in leases]
        if work.lane:
            lates |= {
                (late.lease.epoch, late.lease.key): late for late in lates_of(work.lane, found, pools, corrections, now)
            }
    return lates


def lates_of(
    lane: Lane,
    leases: Iterable[Lease],
    pools: Mapping[Key, LockedPool],
    corrections: Iterable[Correction],
    now: datetime,
) -> Iterator[Late]:
    """Those of a lane's leases whose periods are closed, each with the books that were opened for it since."""
    known: dict[tuple[int, Key], list[Correction]] = defaultdict(list)
    for each in corrections:
        known[each.epoch, Key(each.key.quota, each.charge_period)].append(each)
    open_pools = {key: locked.pool for key, locked in pools.items() if not locked.closed_at}
    for lease in leases:
        if closed_at := pools[lease.key].closed_at:
            about = known[lease.epoch, lease.key]
            closed, returns_count = pools[lease.key].pool, not lane.lost_data
            yield late_of(lease, closed_at, about, open_pools, now, closed=closed, returns_count=returns_count)


def _new_leases(works: Iterable[Work], leases: Mapping[tuple[int, Key], Lease], now: datetime) -> Iterator[Lease]:
    for work in works:
        is_current = work.lane is not None and work.lane.epoch_state is EpochState.CURRENT
        over = LeaseState.LOST if work.lane and work.lane.lost_data else LeaseState.FENCED
        state = LeaseState.ACTIVE if is_current else over
        for key in work.new_keys:
            if (work.report.epoch, key) not in leases:
                yield Lease(key, work.report.epoch, work.call.region, now, now, state)


def waiting_epochs(works: Iterable[Work], books: Books, now: datetime) -> set[int]:
    """Others that wait for what may come free here. To push to them, their epochs must be held, if they are current."""
    here = {work.report.epoch for work in works}
    return {lease.epoch for lease in books.leases.values() if lease.epoch not in here and waits(lease, now)}


def pushed_of(books: Books) -> set[str]:
    """Quota keys of which something may be pushed: no more than their limits leave."""
    return {lease.key.quota for lease in books.leases.values() if lease.epoch in books.pushable and lease.waiting}


def limits_of(catalogue: Catalogue, quotas: Iterable[str]) -> dict[str, int]:
    """What has none any more is given to nobody."""
    found = {quota: entitlement(catalogue, quota) for quota in quotas}
    return {quota: each.limit for quota, each in found.items() if isinstance(each, Entitlement)}


# --- decide -----------------------------------------------------------------------------------------------------------


def decide(works: Sequence[Work], books: Books, terms: Terms, now: datetime) -> Decision:
    """Book what counts, then grant what is wanted. It changes the works and the books, and says what to write."""
    for work in works:
        _settle(work, books, terms, now)
        _bring_back(work, books)
    for key, leases in books.by_pool.items():
        books.demands_milli[key] = sum(demand_milli_of(lease, now) for lease in leases)
    for work in works:
        _grant(work, books, now)
    pushed = list(_push(works, books, now))
    applied = [work for work in works if work.is_applied]
    booked = [_booked(work, now) for work in works if work.is_booked]
    entries: list[Entry] = [*(each.report for each in booked), *(entry for entry, _ in pushed)]
    moved = {transfer.key for entry in entries for transfer in entry.transfers}
    touched = {(lease.epoch, lease.key): lease for work in applied for lease in work.leases.values()}
    touched |= {(lease.epoch, lease.key): lease for _, lease in pushed}
    touched = {name: lease for name, lease in touched.items() if name not in books.lates}  # those stay as they are
    return Decision(
        booked,
        pools=[books.pools[key].pool for key in sorted(moved)],
        new_leases=[lease for lease in books.new if (lease.epoch, lease.key) in touched],
        leases=list(touched.values()),
        states=books.states,
        notices=list(dict.fromkeys([*_notices(works, books, now), *(fetch(lease) for _, lease in pushed)])),
        pushed=[entry for entry, _ in pushed],
        regressed=[work.incoming.batch for work in works if work.shows_a_regressed_ledger],
        regions={work.report.epoch: work.report.region for work in works if work.shows_a_regressed_ledger},
        corrections=[late.book for late in books.lates.values() if late.has_changed],
        moves=books.changed_moves,
        events=[*(each for key in sorted(moved) for each in _reached(books, key)), *_overdrawn(books)],
    )


def _reached(books: Books, key: Key) -> list[Event]:
    spec = books.quotas.get(parse_quota_key(key.quota)[0])
    return (
        thresholds_reached(books.pools[key].pool, books.used[key], thresholds_of(spec))
        if isinstance(spec, AllowanceQuota)
        else []
    )


def _overdrawn(books: Books) -> Iterator[Event]:
    for name, was in books.overdrawn.items():
        if books.leases[name].overdrawn > was:
            yield overdrawn_event(books.leases[name], was)


def _push(works: Iterable[Work], books: Books, now: datetime) -> Iterator[tuple[Movement, Lease]]:
    """What is left after all who speak here were served goes to those who wait elsewhere."""
    for work in works:
        if work.is_applied and books.pushable:
            cause = (work.report.epoch, work.report.lane, work.report.seq)
            for lease in work.leases.values():
                limit = books.limits.get(lease.key.quota, 0)
                yield from push(books.shelf(lease), limit, books.pushable, cause, now)


def _settle(work: Work, books: Books, terms: Terms, now: datetime) -> None:
    if work.verdict.is_kept:
        work.quarantined = keep(work.incoming.batch)
    if not work.is_applied:
        return
    leases = work.leases
    outcome = judge_totals(work.incoming.batch, leases, books.closed)
    if outcome is not ExchangeOutcome.APPLIED:
        work.verdict, work.wanted, work.refused = Verdict(outcome), [], []
        return
    pools = {key: books.pools[key].pool for key in leases}
    for lease in leases.values():
        touch(lease, terms, now)
    frozen_leases = work.incoming.batch.leases
    work.quarantined = [
        Quarantined(key, work.held[key], frozen) for frozen in frozen_leases if (key := key_of(frozen)) in work.held
    ]
    own = {key for key in leases if books.divisions[key].is_regional}
    overage_left = books.overage_left[work.report.region]
    if not books.lates:
        work.quarantined += settle(work.report, frozen_leases, pools, leases, own, overage_left)
        return
    lates = {key: books.lates[lease.epoch, key] for key, lease in leases.items() if (lease.epoch, key) in books.lates}
    open_leases = [each for each in frozen_leases if key_of(each) not in lates]
    late_leases = [each for each in frozen_leases if key_of(each) in lates]
    work.quarantined += [
        *settle(work.report, open_leases, pools, leases, own, overage_left),
        *settle_late(work.report, late_leases, lates, terms.late_days, now, overage_left),
    ]


def _bring_back(work: Work, books: Books) -> None:
    """Before anything is granted: what came back for another region is nobody else's."""
    for key in work.leases:
        if moves := books.divisions[key].moves:
            came_back(work.report, key, work.call.region, moves)


def _grant(work: Work, books: Books, now: datetime) -> None:
    if not work.is_applied:
        return
    leases = work.leases
    heard = {key_of(frozen): frozen.granted for frozen in work.incoming.batch.leases}
    for wanted in work.wanted:
        lease = leases[wanted.key]
        unheard = max(0, lease.granted - heard.get(wanted.key, lease.granted))
        shelf, asked = books.shelf(lease), wanted._replace(unheard=unheard) if unheard else wanted
        demand_was_milli = demand_milli_of(lease, now)
        work.refusals[wanted.key] = serve(work.report, asked, lease, shelf, now)
        books.demands_milli[lease.key] += demand_milli_of(lease, now) - demand_was_milli


def _notices(works: Iterable[Work], books: Books, now: datetime) -> list[Notice]:
    notices: list[Notice] = []
    spoken_of = [lease for work in works if work.is_applied for lease in work.leases.values()]
    calm = {key for key in {lease.key for lease in spoken_of} if _is_calm(books, key)}
    for lease in spoken_of:
        if lease.key not in calm:
            shelf = books.shelf(lease)
            notices += recalls(lease, shelf, books.grantable[lease.key], now)
            notices += came_free(shelf, books.grantable[lease.key], now)
    return notices + [notice for move in books.changed_moves if (notice := fetched_by(move))]


def _is_calm(books: Books, key: Key) -> bool:
    return is_calm(books.pools[key].pool, books.divisions[key], books.grantable[key])


def _booked(work: Work, now: datetime) -> BookedReport:
    assert work.lane is not None
    head = next_head(work.lane.head, work.report, work.incoming.body_hash, now)
    return BookedReport(work.report, work.incoming.body_hash, head, work.quarantined)


# --- respond ----------------------------------------------------------------------------------------------------------


def replayed(works: Iterable[Work]) -> list[tuple[int, int, int]]:
    """Reports that were booked before, and whose receipts are to be given again: epoch, lane, seq."""
    return [
        (work.report.epoch, work.report.lane, work.report.seq)
        for work in works
        if work.is_acknowledged and not work.is_booked
    ]


def lost(works: Iterable[Work]) -> list[int]:
    """Epochs of which there is evidence that their store lost data: they are over."""
    return sorted({work.report.epoch for work in works if work.verdict.outcome in _EVIDENCE_OF_LOSS})


_EVIDENCE_OF_LOSS = (ExchangeOutcome.CONFLICT, ExchangeOutcome.STORE_REGRESSED)


def respond(
    call: Call,
    works: Sequence[Work],
    books: Books,
    catalogue: Catalogue,
    receipts: Receipts,
    terms: Terms,
    now: datetime,
) -> ExchangeResponse:
    """Answer one call: its exchanges in their order, the refused ones included."""
    replies = [_reply(work, books, receipts, terms, now) for work in works]
    for place, reply in call.refused:
        replies.insert(place, reply)
    return ExchangeResponse(
        replies=replies,
        versions=Versions(policies=catalogue.version, blocks=catalogue.block_version),
        drain=catalogue.must_return(call.region),
    )


def _reply(work: Work, books: Books, receipts: Receipts, terms: Terms, now: datetime) -> ExchangeReply:
    batch, verdict = work.incoming.batch, work.verdict
    if not work.is_answered:
        return ExchangeReply(
            lane=batch.lane,
            seq=batch.seq,
            outcome=verdict.outcome,
            receipt=receipts[batch.epoch, batch.lane] if work.is_acknowledged else None,
            expected_seq=verdict.expected_seq,
            fault=verdict.fault,
        )
    return ExchangeReply(
        lane=batch.lane,
        seq=batch.seq,
        outcome=verdict.outcome,
        receipt=receipts[batch.epoch, batch.lane],
        leases=[_lease_reply(work, lease, books, terms, now) for lease in work.leases.values()],
        refused=work.refused,
    )


def _lease_reply(work: Work, lease: Lease, books: Books, terms: Terms, now: datetime) -> LeaseReply:
    refusal = work.refusals.get(lease.key) or refusal_of(lease)
    is_current = lease.key in work.current_keys
    return lease_reply(lease, books.shelf(lease), terms, refusal, now, is_current=is_current)
