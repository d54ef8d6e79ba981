"""Decide which share of a rate, or of slots, each region may use now. Pure: times are arguments, numbers are integers.

A rate renews itself, so what a region does not need now is lent to others, and taken back when that changes. A region
reports its demand and is granted a share, which lasts for a few refreshes. No region is waited for, so a grant may be
lost, late or delivered twice. Therefore a region's *holding* is not its last grant, but the most that may be in force
there, of each share that it was granted and has not shown to be superseded:

    its rate                        until `until_ms`
    its fallback                    until `kept_until_ms`: never above its base share, nor above what is certainly free
    its base share                  from then on: limit * weight / all weights. A region that is disconnected for long
                                    has it again

Grants are numbered; a store takes only a higher number than its own, and a report names it. So a report confirms the
grant that it names, and earlier grants are over.

    strict     no share beyond what is left of the limit after the holdings of all other regions
    adaptive   the fair share at once. What that is beyond the limit lasts for a second at most, and all that was ever
               granted so is counted as a debt, which no grant may bring above `WORST_MS` of the limit: the published
               worst case. As long as there is a debt, less than the limit is divided. Units of the limit that no
               region held for a while are granted later, up to a tenth of the worst case and within it: an ideal rate
               limiter would have them in its bucket.

Slots (a concurrency) are shared like a strict rate, in millionths of a slot, of which whole ones are granted. One thing
is added: slots that were taken by a share *last* for `slot_ttl` after the share is over. So a report has what is held,
the share or what is in use if that is more; holdings last, and nothing is granted anew, so much longer. The slots of a
store that lost its data stay reserved until all of them have run out.

A region's report is believed as far as it can be true: no more in force than it was ever granted, or its base share; no
number that is far ahead of the clock. So a false report takes nothing from other regions. While the coordinator has no
memory yet, more may be in force than it knows: then no region is granted more than it has, until that has run out. All
that is remembered fits into 64 bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, field

from protocol.limits.fair_shares import Member, fair_shares
from protocol.limits.rates import Sharing, base_slots, share_of

NANO_UNITS = 1_000_000_000  # in a unit: a rate of a millionth of a unit per second brings one per millisecond
REFRESH_MS = 5_000
CONTENDED_REFRESH_MS = 2_000
QUICK_REFRESH_MS = 250  # while a region has less than its fair share, or more than is certainly free
REFRESHES = 4  # that may be missed before a share expires
KEPT_MS = 40_000  # after its grant, a share and its fallback are forgotten
# A region counts from before its report, a coordinator from its decision: a region ignores a later reply.
LATEST_REPLY_MS = 5_000
MARGIN_MS = 250  # by how much the clocks of coordinators may differ
LONGEST_MS = REFRESHES * REFRESH_MS + MARGIN_MS
WORST_MS = 1_000
MOST_REMEMBERED = 2**62  # of a number in a state: it has 64 bits
FARTHEST_NUMBER_MS = 366 * 86_400_000  # numbers are times: one farther ahead than this is no clock error
MOST_DEMAND = 1_000  # times the limit: enough to show which region has much more demand than there is
MOST_PERHAPS = 8
PAID_BACK_IN_MS = 2_000
CARRIED = 10  # the part of the worst case that may be unused limit, granted later
CARRIED_IN_MS = 1_000
NEAR = 16  # a share that lacks less than this part is as good as the fair one
WORTH_ASKING = 32  # for a region that lacks more than this part of its share
ASK_AGAIN_MS = 500  # after a signal that a region did not answer
SLOT_MICRO = 1_000_000
SLOT_REFRESH_MS = 1_000  # while a slot is waited for: work takes longer than a bucket to fill
TURN_MS = 10_000  # of slots that do not divide, another region has the odd ones first


class SharingTerms(NamedTuple):
    """A shared limit: how much, among which regions, and how."""

    limit_micro: int
    sharing: Sharing
    members: Mapping[str, Member]
    base_shares: Mapping[str, int]
    lasting_ms: int = 0  # so long after a share is over, what was taken by it may be in use; only of slots
    bursts: Mapping[str, int] = {}  # units that each store's bucket holds; only of rates

    @property
    def is_slots(self) -> bool:
        return self.lasting_ms > 0

    @property
    def longest_ms(self) -> int:
        """Return for how long after a decision something may be in use by it."""
        return LONGEST_MS + self.lasting_ms

    def base_share_micro(self, region: str) -> int:
        """Return what is reserved for a region. A region that does not share the limit has nothing."""
        return self.base_shares.get(region, 0)

    @property
    def worst(self) -> int:
        """Return the published bound of the overshoot, in nano units."""
        return self.limit_micro * WORST_MS if self.sharing is Sharing.ADAPTIVE else 0


def terms_of(
    limit_micro: int,
    sharing: Sharing,
    members: Mapping[str, Member],
    weights: Mapping[str, int] | None = None,
    burst: int = 0,
) -> SharingTerms:
    """`weights`: by which stores know their base shares, where people weigh the members otherwise."""
    weights = weights or {region: member.weight for region, member in members.items()}
    total = max(1, sum(weights.values()))
    base_shares = {region: limit_micro * weight // total for region, weight in weights.items()}
    bursts = {region: share_of(burst, weight, total) for region, weight in weights.items()}
    return SharingTerms(limit_micro, sharing, members, base_shares, bursts=bursts)


def terms_of_slots(
    limit: int, slot_ttl_ms: int, members: Mapping[str, Member], weights: Mapping[str, int] | None = None
) -> SharingTerms:
    weights = weights or {region: member.weight for region, member in members.items()}
    total = max(1, sum(weights.values()))
    base_shares = {region: base_slots(limit, weight, total) * SLOT_MICRO for region, weight in weights.items()}
    return SharingTerms(limit * SLOT_MICRO, Sharing.STRICT, members, base_shares, slot_ttl_ms)


class DemandReport(NamedTuple):
    """A region's report of one limit, as its store had it at one moment."""

    region: str
    demand_micro: int
    number: int  # of the grant that is in its store; 0: none
    rate_micro: int  # in force there; of slots, what is in use if that is more
    spent: int = 0  # units, so far, since it first had a share
    epoch: int = 0  # of slots
    lost_ms: int = 0  # for so long yet, slots may be in use that its store has forgotten


class Grant(NamedTuple):
    number: int
    rate_micro: int
    after_micro: int  # what it falls back to
    expires_in_ms: int
    refresh_in_ms: int
    is_contended: bool


class Given(Struct, array_like=True):
    """A share that a region may have. Number 0 stands for none, which is the base share."""

    number: int = 0
    rate_micro: int = 0
    after_micro: int = 0
    until_ms: int = 0
    kept_until_ms: int = 0

    def most_within(self, from_ms: int, to_ms: int, base_share_micro: int) -> int:
        most = self.rate_micro if from_ms < self.until_ms else self.after_micro
        return max(most, base_share_micro) if to_ms >= self.kept_until_ms else most


class Holding(Struct, array_like=True):
    """The shares that one region may have: the one in its last report, or any that was granted since."""

    demand_micro: int | None = None  # None: it has not reported yet
    heard_ms: int = 0
    perhaps: list[Given] = field(default_factory=lambda: [Given()])
    spent: int = 0  # units, when it named a share last as soon as it could
    counted: int = 0  # what it held since then, while all together held more than the limit
    asked_ms: int = 0  # by a hint
    epoch: int = 0
    lost_micro: int = 0  # what its store, before it lost its data, may have had in use
    lost_until_ms: int = 0
    missing: int = 0  # in its bucket: so much of what it did not use may be used yet, and was not lost

    def most_within(self, from_ms: int, to_ms: int, base_share_micro: int) -> int:
        """Return the most in force in the interval. Lost slots that may be in use count besides later grants."""
        if from_ms >= self.lost_until_ms:
            return self.given_within(from_ms, to_ms, base_share_micro)
        lost_micro = self.lost_micro + self.given_within(from_ms, min(to_ms, self.lost_until_ms - 1), base_share_micro)
        if to_ms < self.lost_until_ms:
            return lost_micro
        return max(lost_micro, self.given_within(self.lost_until_ms, to_ms, base_share_micro))

    def given_within(self, from_ms: int, to_ms: int, base_share_micro: int) -> int:
        return max(each.most_within(from_ms, to_ms, base_share_micro) for each in self.perhaps)


class Shared(Struct, array_like=True):
    """All that a coordinator remembers of one limit. It may be lost: then it has no holdings."""

    since_ms: int
    at_ms: int
    holdings: dict[str, Holding] = field(default_factory=dict)
    debt: int = 0  # what may have been admitted beyond the limit and is not paid back, in nano units
    most_debt: int = 0
    balance: int = 0  # what is to be paid back yet, likewise; below zero: what was left of the limit, to be given out

    @property
    def known(self) -> list[str]:
        return [region for region, holding in self.holdings.items() if holding.demand_micro is not None]


class SharingReply(NamedTuple):
    grant: Grant
    asked: Sequence[str]  # regions that should report at once


def share_out(shared: Shared, report: DemandReport, terms: SharingTerms, now_ms: int) -> SharingReply:
    """Apply a region's report and decide its share. Changes `shared`."""
    now_ms = max(now_ms, shared.at_ms)
    for region in terms.members:
        shared.holdings.setdefault(region, Holding())
    count(shared, terms, now_ms)
    report = plausible(shared, report, terms, now_ms)
    hear(shared, report, terms, now_ms)
    targets = targets_of(shared, terms, now_ms)
    is_contended = _is_contended(shared, terms, now_ms)
    grant = _grant(shared, report, targets.get(report.region, 0), terms, is_contended, now_ms)
    return SharingReply(grant, _to_ask(shared, report.region, terms, targets, grant, now_ms))


def _to_ask(
    shared: Shared, region: str, terms: SharingTerms, targets: Mapping[str, int], told: Grant, now_ms: int
) -> list[str]:
    """Return the regions that should report at once: those that could give up something, because they have not reported
    yet or may use more than they should, and those that could have more, because something is left.
    """
    is_short = told.refresh_in_ms < CONTENDED_REFRESH_MS
    is_left = told.is_contended and held_micro(shared, terms, now_ms, now_ms + terms.longest_ms) < terms.limit_micro
    asked = []
    for other, holding in shared.holdings.items():
        has_micro, target_micro = holding.most_within(now_ms, now_ms, 0), targets.get(other, 0)
        is_silent = told.is_contended and holding.demand_micro is None
        could_give = is_short and has_micro > target_micro
        could_take = is_left and has_micro < target_micro - target_micro // WORTH_ASKING
        if other != region and (is_silent or could_give or could_take) and now_ms >= holding.asked_ms + ASK_AGAIN_MS:
            holding.asked_ms = now_ms
            asked.append(other)
    return asked


# --- what is held -----------------------------------------------------------------------------------------------------


def held_micro(shared: Shared, terms: SharingTerms, from_ms: int, to_ms: int) -> int:
    """Return the most that all regions together may be using at any time of an interval."""
    return sum(
        holding.most_within(from_ms, to_ms, terms.base_share_micro(region))
        for region, holding in shared.holdings.items()
    )


def count(shared: Shared, terms: SharingTerms, now_ms: int) -> None:
    """Count what may have been admitted beyond the limit since the last count. Below the limit, the debt is paid back.

    In strict mode nothing is counted while the coordinator lacks memory: then more is only not known to be free. For
    slots nothing is ever owed: where a limit was lowered, slots in use beyond it end in their time.
    """
    if terms.is_slots or (terms.sharing is Sharing.STRICT and not _knows_all(shared, terms, shared.at_ms)):
        shared.at_ms = now_ms
        return
    for begin_ms, end_ms in _stretches(shared, shared.at_ms, now_ms):
        excess = _excess_micro(shared, terms, begin_ms) * (end_ms - begin_ms)
        shared.debt = min(MOST_REMEMBERED, max(0, shared.debt + excess))
        shared.balance = min(MOST_REMEMBERED, max(-(terms.worst // CARRIED), shared.balance + excess))
        for region, holding in shared.holdings.items() if excess > 0 else ():
            has_micro = holding.most_within(begin_ms, begin_ms, terms.base_share_micro(region))
            holding.counted = min(MOST_REMEMBERED, holding.counted + has_micro * (end_ms - begin_ms))
    shared.at_ms = now_ms


def _stretches(shared: Shared, from_ms: int, to_ms: int) -> Iterator[tuple[int, int]]:
    """Return the intervals in which holdings do not change: they change where something ends."""
    given = [each for holding in shared.holdings.values() for each in holding.perhaps]
    ends = {end for each in given for end in (each.until_ms, each.kept_until_ms)}
    return pairwise(sorted({from_ms, to_ms, *(end for end in ends if from_ms < end < to_ms)}))


def _excess_micro(shared: Shared, terms: SharingTerms, at_ms: int) -> int:
    """Return by how much the regions hold more than the limit."""
    return held_micro(shared, terms, at_ms, at_ms) - terms.limit_micro


class Beyond(NamedTuple):
    """Thousandths of a unit of a rate beyond its limit and burst, rounded up."""

    bound_milli: int  # in the worst case, which is published
    overshoot_milli: int  # that may have been so far, at most


def beyond(shared: Shared, terms: SharingTerms) -> Beyond:
    return Beyond(_milli(terms.worst), _milli(max(shared.most_debt, shared.debt)))


def _milli(parts: int) -> int:
    return -(-parts * 1000 // NANO_UNITS)


def plausible(shared: Shared, report: DemandReport, terms: SharingTerms, now_ms: int) -> DemandReport:
    """Bound a report by what can be true of a region with these remembered grants."""
    holding = shared.holdings.setdefault(report.region, Holding())
    has_micro = holding.given_within(now_ms, now_ms, terms.base_share_micro(report.region))
    most_micro = max(has_micro, *(each.rate_micro for each in holding.perhaps))
    is_forgotten = now_ms < shared.since_ms + terms.longest_ms  # so that it may have more than is remembered
    if terms.is_slots and _is_lost(holding, report, now_ms):
        report, most_micro = report._replace(number=0), 0  # it gives nothing out before all that it had has run out
    elif is_forgotten and terms.is_slots:
        most_micro = max(most_micro, terms.limit_micro)
    elif is_forgotten and terms.sharing is Sharing.STRICT and report.number and report.rate_micro > most_micro:
        holding.lost_until_ms = shared.since_ms + terms.longest_ms  # no share grows until then
    return report._replace(
        demand_micro=min(report.demand_micro, MOST_DEMAND * terms.limit_micro),
        number=min(report.number, now_ms + FARTHEST_NUMBER_MS),
        rate_micro=min(report.rate_micro, most_micro),
        lost_ms=min(report.lost_ms, terms.longest_ms),
    )


def _is_lost(holding: Holding, report: DemandReport, now_ms: int) -> bool:
    """Return whether the store lost its data and has no share granted since, or another store took its place."""
    is_new = report.epoch > holding.epoch
    given = () if is_new else [each.number for each in holding.perhaps if each.number]
    is_lost = report.lost_ms > 0 or now_ms < holding.lost_until_ms
    return report.epoch < holding.epoch or (is_lost and report.number not in given)


def hear(shared: Shared, report: DemandReport, terms: SharingTerms, now_ms: int) -> None:
    """Apply a report. A late one, of a superseded share or an earlier epoch, changes nothing."""
    holding = shared.holdings.setdefault(report.region, Holding())
    if report.epoch > holding.epoch:
        _begin_epoch(holding, report, terms, now_ms)
    if report.epoch < holding.epoch or 0 < report.number < holding.perhaps[0].number:
        return
    if report.number and report.number == holding.perhaps[-1].number:
        _refund(shared, holding, report.spent, terms.bursts.get(report.region, 0) * NANO_UNITS)
    shared.most_debt = max(shared.most_debt, shared.debt)
    holding.demand_micro, holding.heard_ms = report.demand_micro, now_ms
    numbers = {each.number for each in holding.perhaps}
    if report.number and report.number not in numbers and any(numbers):
        return  # no share that is remembered: all that was given may be in force, and nothing else
    later = [each for each in holding.perhaps if each.number > report.number]
    named = next((each for each in holding.perhaps if each.number == report.number), None)
    holding.perhaps = [_as_named(named, report, terms, holding.lost_until_ms, now_ms), *later]


def _begin_epoch(holding: Holding, report: DemandReport, terms: SharingTerms, now_ms: int) -> None:
    """Begin an epoch. A store that lost data has no share, and no base share before all that it had has run out."""
    holding.epoch = report.epoch
    is_lost_already = now_ms < holding.lost_until_ms and holding.perhaps[-1].number == 0  # nothing was given since
    if report.lost_ms and not is_lost_already:
        has_micro = holding.most_within(now_ms, now_ms, terms.base_share_micro(report.region))
        holding.lost_micro = min(terms.limit_micro, has_micro)
        holding.lost_until_ms = now_ms + report.lost_ms + MARGIN_MS
        holding.perhaps = [Given(kept_until_ms=holding.lost_until_ms)]


def _as_named(named: Given | None, report: DemandReport, terms: SharingTerms, safe_from_ms: int, now_ms: int) -> Given:
    """Return the share that a report names. The region may have lowered it by itself, and may have more than its rate
    for a while if the coordinator does not know the share.
    """
    if not report.number and not terms.is_slots:
        return Given()
    if not report.number:
        return Given(0, report.rate_micro, 0, now_ms + terms.longest_ms, safe_from_ms)
    if named is None:
        return Given(report.number, report.rate_micro, 0, now_ms + terms.longest_ms, 0)
    named.rate_micro = min(named.rate_micro, report.rate_micro)
    named.after_micro = min(named.after_micro, report.rate_micro)
    return named


def _refund(shared: Shared, holding: Holding, spent: int, full: int) -> None:
    """Subtract from the debt what a region did not use while more than the limit was held. All that it used counts as
    used then. What is left in its bucket is used later, so only what overflows is refunded.
    """
    used = (spent - holding.spent) * NANO_UNITS
    if used >= 0:
        missing = holding.missing + used - holding.counted
        unspent = max(0, -missing)
        shared.debt -= min(shared.debt, unspent)
        shared.balance -= min(max(0, shared.balance), unspent)
        holding.missing = min(max(0, missing), full)
    holding.spent, holding.counted = spent, 0


# --- what it should be ------------------------------------------------------------------------------------------------


def targets_of(shared: Shared, terms: SharingTerms, now_ms: int) -> dict[str, int]:
    """Return fair shares of the limit, less a part of the debt, plus what was left before."""
    repaid_micro = min(terms.limit_micro // 4, max(0, shared.balance) // PAID_BACK_IN_MS) if terms.worst else 0
    demands = [_demand(shared, region, terms, now_ms) for region in terms.members]
    divided_micro = terms.limit_micro - repaid_micro + _carried_micro(shared)
    shares = fair_shares(divided_micro, list(terms.members.values()), demands)
    if terms.is_slots:
        shares = whole_slots(terms.limit_micro, shares, now_ms // TURN_MS)
    return dict(zip(terms.members, shares, strict=True))


def _carried_micro(shared: Shared) -> int:
    return max(0, -shared.balance) // CARRIED_IN_MS


def whole_slots(limit_micro: int, shares: Sequence[int], turn: int) -> list[int]:
    """Give the odd slots to the regions that lack most of one; among equals, to another one each turn."""
    whole = [share - share % SLOT_MICRO for share in shares]
    left = (limit_micro - sum(whole)) // SLOT_MICRO
    lacking = [place for place, share in enumerate(shares) if share % SLOT_MICRO]
    lacking.sort(key=lambda place: (-(shares[place] % SLOT_MICRO), (place + turn) % len(shares)))
    for place in lacking[:left]:
        whole[place] += SLOT_MICRO
    return whole


def _demand(shared: Shared, region: str, terms: SharingTerms, now_ms: int) -> int:
    """Return the demand to count. Without any report it is under half of the base share, later up to all of it."""
    holding, base_share_micro = shared.holdings[region], terms.base_share_micro(region)
    if holding.demand_micro is not None and now_ms < holding.heard_ms + LONGEST_MS:
        return holding.demand_micro
    is_young = holding.demand_micro is None and now_ms < shared.since_ms + LONGEST_MS
    return base_share_micro // 2 if is_young else base_share_micro


def _is_contended(shared: Shared, terms: SharingTerms, now_ms: int) -> bool:
    """Return whether a region would use more than its base share."""
    return any(
        holding.demand_micro is not None
        and now_ms < holding.heard_ms + LONGEST_MS
        and holding.demand_micro > terms.base_share_micro(region)
        for region, holding in shared.holdings.items()
    )


def _grant(
    shared: Shared, report: DemandReport, target_micro: int, terms: SharingTerms, is_contended: bool, now_ms: int
) -> Grant:
    holding, base_share_micro = shared.holdings[report.region], terms.base_share_micro(report.region)
    over_ms, is_lost = now_ms + terms.longest_ms, now_ms < holding.lost_until_ms
    own_micro = holding.most_within(now_ms, over_ms, base_share_micro)
    left_micro = terms.limit_micro + own_micro - held_micro(shared, terms, now_ms, over_ms)
    left_micro -= holding.lost_micro if is_lost else 0
    refresh_ms = CONTENDED_REFRESH_MS if is_contended else REFRESH_MS
    carried_micro = _carried_micro(shared)
    if carried_micro:
        carried_micro = min(carried_micro, _room(shared, terms, REFRESHES * refresh_ms, now_ms))
    free_micro, near_micro = max(0, left_micro + carried_micro), target_micro - target_micro // NEAR
    offer = _Offer(min(target_micro, free_micro), REFRESHES * refresh_ms)
    if terms.sharing is Sharing.STRICT and not _knows_all(shared, terms, now_ms):
        offer = _Offer(min(offer.rate_micro, report.rate_micro), offer.expires_in_ms)
    elif terms.sharing is Sharing.ADAPTIVE and offer.rate_micro < near_micro:
        offer = max(offer, *_ahead(shared, holding, left_micro, target_micro, terms, now_ms))
    is_short = offer.rate_micro < near_micro or offer.rate_micro > free_micro
    short_ms = SLOT_REFRESH_MS if terms.is_slots else QUICK_REFRESH_MS
    grant = Grant(
        number=max(now_ms, holding.perhaps[-1].number + 1),
        rate_micro=offer.rate_micro,
        after_micro=min(offer.rate_micro, base_share_micro, max(0, left_micro)),
        expires_in_ms=offer.expires_in_ms,
        refresh_in_ms=short_ms if is_short else refresh_ms,
        is_contended=is_contended,
    )
    _hold(holding, grant, report.rate_micro if terms.is_slots else 0, terms, now_ms)
    return grant


class _Offer(NamedTuple):
    rate_micro: int
    expires_in_ms: int


def _ahead(
    shared: Shared, holding: Holding, left_micro: int, target_micro: int, terms: SharingTerms, now_ms: int
) -> Iterator[_Offer]:
    """Yield offers beyond what is certainly free: as much as keeps the debt within the worst case, whichever region
    falls silent; or else what the region has, for no longer than it has it.
    """
    lasts_ms = REFRESHES * QUICK_REFRESH_MS
    over_micro = _room(shared, terms, lasts_ms, now_ms)
    yield _Offer(max(0, min(target_micro, left_micro + over_micro)), lasts_ms)
    has = holding.perhaps[0]
    lasts_ms = has.until_ms - MARGIN_MS - now_ms
    if lasts_ms > 0:  # an expired share would last a margin longer than was counted
        yield _Offer(min(target_micro, has.rate_micro), lasts_ms)


def _room(shared: Shared, terms: SharingTerms, lasts_ms: int, now_ms: int) -> int:
    """Return by how much the limit may be exceeded for so long, in addition to earlier such grants."""
    if shared.debt >= terms.worst:
        return 0
    stretches = _stretches(shared, now_ms, now_ms + terms.longest_ms)
    will_owe = sum(max(0, _excess_micro(shared, terms, begin)) * (end - begin) for begin, end in stretches)
    return max(0, terms.worst - shared.debt - will_owe) // (lasts_ms + MARGIN_MS)


def _knows_all(shared: Shared, terms: SharingTerms, now_ms: int) -> bool:
    """Return whether no unknown share can be in force: without memory there may be one until it is over."""
    knows = {region for region in shared.known if now_ms >= shared.holdings[region].lost_until_ms}
    return now_ms >= shared.since_ms + terms.longest_ms or terms.members.keys() <= knows


def _hold(holding: Holding, grant: Grant, used_micro: int, terms: SharingTerms, now_ms: int) -> None:
    """Add a grant to the holding. Until a report names it, it or an earlier one is in force."""
    until_ms = now_ms + grant.expires_in_ms + MARGIN_MS + terms.lasting_ms
    kept_until_ms = now_ms + KEPT_MS + terms.lasting_ms - LATEST_REPLY_MS - MARGIN_MS
    most_micro = max(grant.rate_micro, used_micro)
    given = Given(grant.number, most_micro, grant.after_micro, until_ms, kept_until_ms)
    holding.perhaps.append(given)
    if len(holding.perhaps) > MOST_PERHAPS:
        _merge(holding.perhaps)


def _merge(perhaps: list[Given]) -> None:
    """Merge the two neighbours that overstate least, so that a high share of long ago does not last on."""
    place = min(range(len(perhaps) - 1), key=lambda place: _excess_of_merging(perhaps[place], perhaps[place + 1]))
    perhaps[place : place + 2] = [_either(perhaps[place], perhaps[place + 1], is_first=place == 0)]


def _excess_of_merging(one: Given, other: Given) -> int:
    """Return the higher rate, for the longer of both times."""
    lower, higher = sorted((one, other), key=lambda given: given.rate_micro)
    return (higher.rate_micro - lower.rate_micro) * max(0, lower.until_ms - higher.until_ms)


def _either(one: Given, other: Given, *, is_first: bool) -> Given:
    """Return one share for two. The first keeps its number, by which late reports are recognised; others keep the later
    one.
    """
    return Given(
        one.number if is_first else other.number,
        max(one.rate_micro, other.rate_micro),
        max(one.after_micro, other.after_micro),
        max(one.until_ms, other.until_ms),
        min(one.kept_until_ms, other.kept_until_ms),
    )
