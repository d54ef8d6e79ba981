"""From a want to a grant, and from the books to what a region is told of its lease.

Whoever gets nothing is told why, or that there is hope: while another region holds units, those are asked back by a
signal, and whoever waits hears of it when they come free.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from coordinator.exchange.rules.allocation import (
    LAST_KEPT_MS,
    Ask,
    decayed,
    demand_milli_of,
    extend,
    fund,
    grant,
    grant_units,
    needed,
    units_in,
)
from coordinator.exchange.rules.balances import Key, Lease, Movement, Pool, Report, movement
from coordinator.exchange.rules.plausibility import ClaimBounds
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.notice import Notice
from coordinator.rebalancing.rules.division import (
    Division,
    arrived,
    funded_for,
    grantable_to,
    is_capped,
    kept_of_move,
    spare_of,
)
from protocol.lease import LeaseEvent, LeaseState, after
from protocol.limits.document import Mode
from protocol.messages import LeaseReply, LeaseWant, Signal, WantRefused
from protocol.outcomes import GrantRefusal
from protocol.periods import Period, next_period, period_at, period_of

WAITS_AT_MOST = timedelta(seconds=5)
BOUNDS_REMEMBERED = 100  # of periods at one moment: all that a gather tells of the same one
MILLI_A_SECOND = 1_000_000  # thousandths of a unit a second, for one unit a millisecond
ANSWERING = timedelta(milliseconds=100)  # about as long as a signal and its answer are under way


class Wanted(NamedTuple):
    """A want that a lease may answer."""

    key: Key
    want: LeaseWant
    entitlement: Entitlement
    unheard: int = 0  # granted before, of which the region did not know yet when it asked
    is_ahead: bool = False  # of the period after the current one

    @property
    def waiting(self) -> int:
        return max(0, self.want.waiting - self.unheard)


class Terms(NamedTuple):
    """For how long a region may spend what it was told it has, and be late with what it spent."""

    lease_ms: int
    refresh_ms: int
    late_days: int = 35  # after its period was closed; what comes later waits for people
    claims: ClaimBounds = ClaimBounds()

    @property
    def margin_ms(self) -> int:
        """The coordinator counts from its commit and waits longer than any region's clock may drift."""
        return self.lease_ms // 10

    def is_near_its_end(self, period: Period, now: datetime) -> bool:
        """The next period's lease is given ahead: no earlier than whoever renews in time is sure to ask once more."""
        lead = min(timedelta(milliseconds=self.lease_ms), (period.ends_at - period.starts_at) / 4)
        return period.ends_at - now <= lead


class Shelf(NamedTuple):
    """One pool, as one of its leases sees it."""

    pool: Pool
    period_is_open: bool
    region: str
    leases: Sequence[Lease]  # all that are known of the pool; where people divided it, all that there are
    division: Division
    demand_milli: int = 0  # of all of them together
    overdraft: int = 0  # of all regions that are cut off, together in the period

    @property
    def others(self) -> list[Lease]:
        """Leases of other regions that may be granted to. Looked for when they matter: a gather has many leases."""
        return [each for each in self.leases if each.state is LeaseState.ACTIVE and each.region != self.region]

    @property
    def grantable(self) -> int:
        return self.grantable_to(self.region)

    def grantable_to(self, region: str) -> int:
        return grantable_to(region, self.pool, self.leases, self.division)

    def spare_of(self, lease: Lease) -> int:
        return spare_of(lease, self.pool, self.leases, self.division)

    @property
    def is_capped(self) -> bool:
        """The region has all that it may have of the period, whatever others hold."""
        return is_capped(self.region, self.pool, self.leases, self.division)


class Offer(NamedTuple):
    """What a quota's leases are given by now: of the period that is, and near its end of the next one as well."""

    entitlement: Entitlement
    key: Key
    ahead: Key | None = None


Offered: TypeAlias = Callable[[str], Offer | GrantRefusal]


def offer_of(catalogue: Catalogue, quota: str, terms: Terms, now: datetime) -> Offer | GrantRefusal:
    found = entitlement(catalogue, quota)
    if isinstance(found, GrantRefusal):
        return found
    period = period_at(found.calendar, now, found.written)
    key = Key(quota, period.id)
    # Nor is anything given ahead by an override: it may be over when the next one begins.
    is_ahead = not found.is_overridden and found.mode is not Mode.CENTRAL
    if is_ahead and terms.is_near_its_end(period, now):
        return Offer(found, key, Key(quota, next_period(period, found.written).id))
    return Offer(found, key)


def sort_wants(wants: Iterable[LeaseWant], offered: Offered) -> tuple[list[Wanted], list[WantRefused]]:
    """Those that a lease of the current period may answer, near its end one of the next as well; and the rest."""
    wanted, refused = list[Wanted](), []
    for want in wants:
        offer = offered(want.quota)
        if isinstance(offer, GrantRefusal):
            refused.append(WantRefused(quota=want.quota, refusal=offer))
            continue
        wanted.append(Wanted(offer.key, want, offer.entitlement))
        if offer.ahead:
            # Who waits or holds does so in the period that is; of the next one only the demand is known.
            ahead = LeaseWant(quota=want.quota, demand_milli=want.demand_milli)
            wanted.append(Wanted(offer.ahead, ahead, offer.entitlement, is_ahead=True))
    return wanted, refused


def serve(report: Report, wanted: Wanted, lease: Lease, shelf: Shelf, now: datetime) -> GrantRefusal | None:
    """Grant what the formulas give, and note what is still missing. The answer says why it is not more."""
    refusal = _refusal(lease, shelf)
    if refusal:
        return refusal
    asked, wanted = wanted, _bounded(wanted, shelf.pool)
    want, pool = wanted.want, shelf.pool
    _fund(report, wanted, shelf)
    lease.overdraft = max(lease.overdraft, _overdraft_for(lease, shelf))
    units = min(lease.room, _units_for(wanted, lease, shelf, now))
    grant(report, pool, lease, units)
    arrived(units, lease.region, shelf.division.moves)
    lease.demand_milli, lease.waiting = want.demand_milli, max(0, wanted.waiting - units)
    is_unmet = asked.waiting > units or units + wanted.unheard == 0
    if shelf.is_capped:
        lease.waiting = 0  # in vain: nobody is to give back anything for it
    elif shelf.grantable or any(map(shelf.spare_of, shelf.others)):
        return None
    return GrantRefusal.EXHAUSTED if is_unmet else None


def _bounded(wanted: Wanted, pool: Pool) -> Wanted:
    """Take a want for no more than its quota can give: what is spendable in the period, all of it in a millisecond.

    What is beyond that no limit could serve, and it would outweigh whatever other regions need.
    """
    want, entitlement = wanted.want, wanted.entitlement
    beside_limit = pool.spendable - pool.funded  # credits, and what was carried over
    most = max(entitlement.limit, pool.funded) + beside_limit + max(entitlement.extension, pool.soft_cap_extension)
    most_milli = most * MILLI_A_SECOND
    if want.waiting <= most and want.demand_milli <= most_milli:
        return wanted
    bounded = replace(want, waiting=min(want.waiting, most), demand_milli=min(want.demand_milli, most_milli))
    return wanted._replace(want=bounded)


def _fund(report: Report, wanted: Wanted, shelf: Shelf) -> None:
    pool, limit, extension = shelf.pool, wanted.entitlement.limit, wanted.entitlement.extension
    fund(report, pool, funded_for(limit, pool, shelf.leases, shelf.division))
    if extension or pool.soft_cap_extension:
        need = needed(limit, wanted.waiting, wanted.want.demand_milli, wanted.entitlement.horizon_ms)
        extend(report, pool, extension, need)


def _overdraft_for(lease: Lease, shelf: Shelf) -> int:
    """Its region's part by weight, of what no other lease was told: kept for the whole period, whatever becomes of the
    epoch. So regions that do not know of each other overdraw no more together than the quota says.
    """
    if not shelf.overdraft:
        return 0
    others = [each for each in shelf.leases if each is not lease]
    own = sum(each.overdraft for each in others if each.region == lease.region)
    return max(0, min(_part_of(shelf, lease.region) - own, shelf.overdraft - sum(each.overdraft for each in others)))


def _part_of(shelf: Shelf, region: str) -> int:
    return shelf.division.part_of(shelf.overdraft, region) if shelf.overdraft else 0


def _units_for(wanted: Wanted, lease: Lease, shelf: Shelf, now: datetime) -> int:
    """By demand, or exactly what is waited for; and what people had brought here for it."""
    grantable = shelf.grantable
    if shelf.division.is_central:
        by_demand = min(grantable, wanted.waiting)
    else:
        by_demand = grant_units(grantable, wanted.entitlement.limit, _ask(wanted, lease, shelf, now))
    return max(by_demand, min(grantable, by_demand + shelf.division.travelling_to(lease.region)))


def _refusal(lease: Lease, shelf: Shelf) -> GrantRefusal | None:
    if not shelf.period_is_open:
        return GrantRefusal.PERIOD_NOT_OPEN
    if after(lease.state, LeaseEvent.GRANT) is None:
        return refusal_of(lease)
    return None if lease.room else GrantRefusal.TOTAL_TOO_LARGE


def refusal_of(lease: Lease) -> GrantRefusal | None:
    """Why a lease gets nothing, now or any more."""
    return _REFUSALS.get(lease.state)


_REFUSALS = {
    LeaseState.EXPIRED: GrantRefusal.LEASE_EXPIRED,
    LeaseState.FENCED: GrantRefusal.EPOCH_FENCED,
    LeaseState.LOST: GrantRefusal.EPOCH_FENCED,
    LeaseState.QUARANTINED: GrantRefusal.QUARANTINED,
    LeaseState.RETIRED: GrantRefusal.EPOCH_FENCED,
    LeaseState.CLOSED: GrantRefusal.PERIOD_NOT_OPEN,
}
_HOPEFUL = (None, GrantRefusal.LEASE_EXPIRED)


def _ask(wanted: Wanted, lease: Lease, shelf: Shelf, now: datetime) -> Ask:
    want, division = wanted.want, shelf.division
    weight = division.weight_of(lease.region)
    return Ask(
        demand_milli=want.demand_milli,
        waiting=wanted.waiting,
        available=max(0, lease.outstanding - want.held),
        last_grant=lease.last_grant,
        total_demand_milli=_weighed_demand_milli(want.demand_milli, lease, shelf, now),
        weight=weight,
        total_weight=weight if division.is_regional else division.total_weight,
        horizon_ms=wanted.entitlement.horizon_ms,
    )


def _weighed_demand_milli(demand_milli: int, lease: Lease, shelf: Shelf, now: datetime) -> int:
    """Of all regions, with what this one wants now. Where all weigh alike their sum is there already."""
    division, others_milli = shelf.division, shelf.demand_milli - demand_milli_of(lease, now)
    weight = division.weight_of(lease.region)
    if division.is_regional:
        return weight * demand_milli
    if division.is_even:
        return weight * (demand_milli + others_milli)
    others = (each for each in shelf.leases if each is not lease)
    weighed = (division.weight_of(each.region) * demand_milli_of(each, now) for each in others)
    return weight * demand_milli + sum(weighed)


def push(
    shelf: Shelf, limit: int, epochs: Collection[int], cause: Sequence[object], now: datetime
) -> list[tuple[Movement, Lease]]:
    """Units came free while leases of these epochs wait: they are theirs now, and the signal tells them to fetch it.

    The longest waiting first. `cause` is what freed them, and names the movements. What is funded beyond the limit is
    for nobody: it goes when somebody asks (`fund`).
    """
    if shelf.division.is_regional:
        return []  # what came free is its region's own
    waiting = [lease for lease in shelf.others if lease.epoch in epochs and _waits(lease, now)]
    pushed, surplus = [], max(0, shelf.pool.funded - limit)
    for lease in sorted(waiting, key=lambda each: (each.reported_at, each.epoch)):
        free = max(0, shelf.grantable_to(lease.region) - surplus)
        units = min(lease.waiting, lease.room, free) if shelf.period_is_open else 0
        entry = movement(lease, "pushed", *cause)
        grant(entry, shelf.pool, lease, units)
        arrived(units, lease.region, shelf.division.moves)
        lease.waiting -= units
        if units:
            pushed.append((entry, lease))
    return pushed


def waits(lease: Lease, now: datetime) -> bool:
    """May something be pushed to it?"""
    return lease.state is LeaseState.ACTIVE and _waits(lease, now)


# --- hints to other regions -------------------------------------------------------------------------------------------


def is_calm(pool: Pool, division: Division, was_grantable: int) -> bool:
    """Nobody is to be told anything of it, whoever spoke: there was something and still is, and for all alike."""
    if not (division.is_plain and was_grantable and pool.grantable):
        return False
    return not has_fallen(was_grantable, pool.grantable, pool.funded)


def recalls(lease: Lease, shelf: Shelf, was_grantable: int, now: datetime) -> list[Notice]:
    """Others are asked for what lies idle there: when nothing is left and somebody waits, and long before that each
    time that the pool has fallen to a quarter. What a region will need itself in so short a time it keeps.
    """
    keep_ms = _keep_ms(lease, shelf, was_grantable, now)
    if keep_ms is None:
        return []
    keeps = [(other, _keep(other, shelf, keep_ms, now)) for other in shelf.others]
    quota = lease.key.quota
    return [
        Notice(Signal(kind="recall", quota=quota, keep=keep), other.region)
        for other, keep in keeps
        if other.outstanding > keep
    ]


def _keep(other: Lease, shelf: Shelf, keep_ms: int, now: datetime) -> int:
    """Of what it said that it needs: that may be over. Asked again and again, at the end it keeps nothing of it."""
    needs = units_in(demand_milli_of(other, now), keep_ms)
    if not shelf.grantable:
        needs = min(needs, other.outstanding // 2)
    return max(needs, other.outstanding - shelf.spare_of(other))


def _keep_ms(lease: Lease, shelf: Shelf, was_grantable: int, now: datetime) -> int | None:
    """Half of what is left lasts so long for all; of nothing, what is spent before a grant could come."""
    if not shelf.grantable:
        return LAST_KEPT_MS if lease.waiting and not _are_answering(shelf, now) else None
    grantable = shelf.pool.grantable
    if not shelf.demand_milli or not has_fallen(was_grantable, grantable, shelf.pool.funded):
        return None
    return grantable * 1_000_000 // (2 * shelf.demand_milli)


def _are_answering(shelf: Shelf, now: datetime) -> bool:
    """Another region began to wait just before, so all were asked: asked again by each, they would say the same."""
    return any(each.waiting and now - each.reported_at < ANSWERING for each in shelf.others)


def has_fallen(was: int, units: int, limit: int) -> bool:
    """Through a quarter of the limit, or a quarter of that, and so on."""
    mark = limit // 4
    while mark > was:
        mark //= 4
    return units < mark


def came_free(shelf: Shelf, was_grantable: int, now: datetime) -> list[Notice]:
    """There was nothing, and now there is: whoever waits hears of it, once."""
    if was_grantable or not shelf.pool.grantable:
        return []
    signal = Signal(kind="grant", quota=shelf.pool.key.quota)
    return [Notice(signal, other.region) for other in shelf.others if _waits(other, now)]


def fetch(lease: Lease) -> Notice:
    return Notice(Signal(kind="grant", quota=lease.key.quota), lease.region)


def _waits(lease: Lease, now: datetime) -> bool:
    """Requests do not wait for long: what was said a while ago is over, however it ended; and so is an ended period."""
    is_recent = lease.waiting > 0 and now - lease.reported_at < WAITS_AT_MOST
    return is_recent and now < period_of(lease.key.period).ends_at


# --- what a region is told --------------------------------------------------------------------------------------------


def touch(lease: Lease, terms: Terms, now: datetime) -> None:
    """The region was heard about this lease: its demand begins to age, and it may spend for another while."""
    lease.demand_milli = decayed(lease.demand_milli, lease.reported_at, now)
    lease.waiting = 0
    lease.reported_at = now
    if lease.state in _MAY_SPEND_AGAIN:
        lease.expires_at = now + timedelta(milliseconds=terms.lease_ms + terms.margin_ms)


_MAY_SPEND_AGAIN = (LeaseState.ACTIVE, LeaseState.EXPIRED)


def lease_reply(
    lease: Lease,
    shelf: Shelf,
    terms: Terms,
    refusal: GrantRefusal | None,
    now: datetime,
    *,
    is_current: bool = False,
) -> LeaseReply:
    pool, period = shelf.pool, _bounds_of(lease.key.period, now)
    may_spend = shelf.period_is_open and lease.state is LeaseState.ACTIVE
    ends_in_ms = period.ends_in_ms
    return LeaseReply(
        quota=lease.key.quota,
        period=lease.key.period,
        granted=lease.granted,
        overage=lease.overage,
        limit=shelf.division.own_of(lease.region) if shelf.division.is_regional else pool.spendable,
        unallocated=shelf.grantable if shelf.division.is_regional else pool.grantable,
        starts_in_ms=period.starts_in_ms,
        expires_in_ms=min(_spendable_for_ms(lease, terms, now), ends_in_ms) if may_spend else 0,
        ends_in_ms=ends_in_ms,
        refresh_in_ms=terms.refresh_ms,
        first_minute=period.first_minute,
        last_minute=period.last_minute,
        final=not shelf.period_is_open or refusal_of(lease) not in _HOPEFUL or not ends_in_ms,
        recall_keep=_recall_keep(lease, shelf, now),
        overdraft=min(lease.overdraft, _part_of(shelf, lease.region)) if lease.state in _MAY_SPEND_AGAIN else 0,
        refusal=refusal,
        consumed=lease.region_consumed,
        returned=lease.region_returned,
        current=is_current,
        beyond_limit=_beyond_limit(lease, pool),
    )


def _beyond_limit(lease: Lease, pool: Pool) -> int:
    """Return how many of the units that a region may still admit its services need not be told of as `remaining`.

    A soft cap lends units beyond the limit as they are needed, so what can be admitted grows with use.
    """
    return max(0, pool.grantable + lease.outstanding - pool.included_left) if pool.soft_cap_extension else 0


class _Bounds(NamedTuple):
    """A period's, as a region is told them at one moment."""

    starts_in_ms: int
    ends_in_ms: int
    first_minute: int
    last_minute: int


@functools.lru_cache(maxsize=BOUNDS_REMEMBERED)
def _bounds_of(period_id: str, now: datetime) -> _Bounds:
    period = period_of(period_id)
    return _Bounds(period.starts_in_ms(now), period.ends_in_ms(now), period.first_minute, period.last_minute)


def _recall_keep(lease: Lease, shelf: Shelf, now: datetime) -> int | None:
    """The recall once more, for whoever missed the signal; and what has expired comes back before it is good again.

    Where each request asks, whatever it did not take comes back at once.
    """
    if lease.state is LeaseState.EXPIRED:
        return 0
    if shelf.division.is_central:
        return 0 if lease.outstanding else None
    others_wait = not shelf.pool.grantable and any(_waits(other, now) for other in shelf.others)
    if not others_wait and not shelf.division.moves:
        return None  # nobody asks for any of it
    spare = shelf.spare_of(lease) if others_wait and not lease.waiting else 0
    keep = min(lease.outstanding - spare, kept_of_move(lease, shelf.division.missing_from(lease.region), now))
    return keep if keep < lease.outstanding else None


def _spendable_for_ms(lease: Lease, terms: Terms, now: datetime) -> int:
    """Never longer than the ledger remembers, less the margin: a replay extends nothing."""
    return max(0, (lease.expires_at - now) // timedelta(milliseconds=1) - terms.margin_ms)
