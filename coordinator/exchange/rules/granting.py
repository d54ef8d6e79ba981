"""Rules for granting: which lease may meet a demand, and how much it is granted now.

A region that gets nothing is told why. While another region holds units that it does not need, those are recalled by a
signal (`signals.py`), and the region that waits is signalled when units become available.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from coordinator.exchange.rules.allocation import (
    PoolDemand,
    decayed,
    demand_milli_of,
    extend,
    fund,
    grant,
    grant_units,
    needed,
)
from coordinator.exchange.rules.balances import Key, Lease, Pool
from coordinator.exchange.rules.pacing import horizon_ms, rest_lasts_ms
from coordinator.exchange.rules.plausibility import ClaimBounds
from coordinator.exchange.rules.posting import Movement, Report, movement
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.rebalancing.rules.division import (
    Division,
    funded_for,
    grantable_to,
    is_capped,
    note_regranted,
    spare_of,
)
from protocol.lease import LeaseEvent, LeaseState, after
from protocol.limits.document import AllowanceQuota, Mode, overdraft_of
from protocol.messages import ItemRefused, LeaseDemand
from protocol.outcomes import GrantRefusal
from protocol.periods import Period, next_period, period_at, period_of

WAITS_AT_MOST = timedelta(seconds=5)
MILLI_A_SECOND = 1_000_000  # thousandths of a unit a second, for one unit a millisecond


class GrantRequest(NamedTuple):
    """A want that a lease may answer."""

    key: Key
    want: LeaseDemand
    entitlement: Entitlement
    in_flight: int = 0  # granted before, but not yet known to the region when it sent the want
    is_ahead: bool = False  # of the period after the current one

    @property
    def waiting(self) -> int:
        return max(0, self.want.waiting - self.in_flight)


class LeaseTerms(NamedTuple):
    """The time for which a region may spend its leases, and the time for which it may report usage late."""

    lease_ms: int
    late_days: int = 35  # after its period was closed; what comes later waits for people
    claims: ClaimBounds = ClaimBounds()

    @property
    def margin_ms(self) -> int:
        """The coordinator counts from its commit and waits longer than any region's clock may drift."""
        return self.lease_ms // 10

    def is_near_its_end(self, period: Period, now: datetime) -> bool:
        """Tell whether the next period's lease is given ahead.

        It begins as late as it can so that a region that renews in time is sure to send one exchange before the end.
        """
        lead = min(timedelta(milliseconds=self.lease_ms), (period.ends_at - period.starts_at) / 4)
        return period.ends_at - now <= lead


class PoolView(NamedTuple):
    """One pool, as one of its leases sees it."""

    pool: Pool
    period_is_open: bool
    region: str
    leases: Sequence[Lease]  # all that are known of the pool; where people divided it, all that there are
    division: Division
    demand_milli: int = 0  # of all of them together
    allowance: AllowanceQuota | None = None  # None: the limits document has it no more

    @property
    def overdraft(self) -> int:
        """Return how many units all disconnected regions together may admit beyond their leases in the period."""
        return 0 if self.allowance is None else overdraft_of(self.allowance)

    @property
    def others(self) -> list[Lease]:
        """Leases of other regions that may be granted to. Computed when they matter: a batch has many leases."""
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
        """True if the region has all that it may have of the period, whatever others hold."""
        return is_capped(self.region, self.pool, self.leases, self.division)

    def overdraft_part_of(self, region: str) -> int:
        return self.division.part_of(self.overdraft, region) if self.overdraft else 0


# --- from demands to requests -----------------------------------------------------------------------------------------


class EntitledPeriod(NamedTuple):
    """A quota key's entitlement in the current period and, near its end, the key in the next one."""

    entitlement: Entitlement
    key: Key
    ahead: Key | None = None


FindEntitledPeriod: TypeAlias = Callable[[str], EntitledPeriod | GrantRefusal]


def find_entitled_period(
    catalogue: Catalogue, quota: str, terms: LeaseTerms, now: datetime
) -> EntitledPeriod | GrantRefusal:
    found = entitlement(catalogue, quota)
    if isinstance(found, GrantRefusal):
        return found
    period = period_at(found.calendar, now, found.written)
    key = Key(quota, period.id)
    # An override gives nothing ahead either: it may be over when the next period begins.
    is_ahead = not found.is_overridden and found.mode is not Mode.CENTRAL
    if is_ahead and terms.is_near_its_end(period, now):
        return EntitledPeriod(found, key, Key(quota, next_period(period, found.written).id))
    return EntitledPeriod(found, key)


def make_grant_requests(
    demands: Iterable[LeaseDemand], find: FindEntitledPeriod
) -> tuple[list[GrantRequest], list[ItemRefused]]:
    """Return requests to leases of the current period, near its end to those of the next as well, and refused wants."""
    requests, refused = list[GrantRequest](), []
    for want in demands:
        entitled = find(want.quota)
        if isinstance(entitled, GrantRefusal):
            refused.append(ItemRefused(quota=want.quota, refusal=entitled))
            continue
        requests.append(GrantRequest(entitled.key, want, entitled.entitlement))
        if entitled.ahead:
            # Requests wait, and units are held, in the current period. Of the next one only the demand is known.
            ahead = LeaseDemand(quota=want.quota, demand_milli=want.demand_milli)
            requests.append(GrantRequest(entitled.ahead, ahead, entitled.entitlement, is_ahead=True))
    return requests, refused


# --- granting ---------------------------------------------------------------------------------------------------------


def serve_request(
    report: Report, request: GrantRequest, lease: Lease, view: PoolView, now: datetime
) -> GrantRefusal | None:
    """Grant what the formulas give, and note what is still missing. Return why it is not more."""
    if refusal := _refusal(lease, view):
        return refusal
    bounded, pool = _bounded(request, view.pool), view.pool
    _fund(report, bounded, view)
    lease.overdraft = max(lease.overdraft, _overdraft_for(lease, view))
    units = min(lease.room, _units_for(bounded, lease, view, now))
    grant(report, pool, lease, units)
    note_regranted(units, lease.region, view.division.moves)
    lease.demand_milli, lease.waiting = bounded.want.demand_milli, max(0, bounded.waiting - units)
    is_unmet = request.waiting > units or units + request.in_flight == 0
    if view.is_capped:
        lease.waiting = 0  # in vain: no region is to give anything back for it
    elif view.grantable or any(map(view.spare_of, view.others)):
        return None
    return GrantRefusal.EXHAUSTED if is_unmet else None


def _bounded(request: GrantRequest, pool: Pool) -> GrantRequest:
    """Take a want for no more than its quota can give: what is spendable in the period, all of it in a millisecond.

    No limit could serve more than that, and it would outweigh what other regions need.
    """
    want, entitlement = request.want, request.entitlement
    beside_limit = pool.spendable - pool.funded  # credits, and what was carried over
    most = max(entitlement.limit, pool.funded) + beside_limit + max(entitlement.extension, pool.soft_cap_extension)
    most_milli = most * MILLI_A_SECOND
    if want.waiting <= most and want.demand_milli <= most_milli:
        return request
    bounded = replace(want, waiting=min(want.waiting, most), demand_milli=min(want.demand_milli, most_milli))
    return request._replace(want=bounded)


def _fund(report: Report, request: GrantRequest, view: PoolView) -> None:
    pool, limit, extension = view.pool, request.entitlement.limit, request.entitlement.extension
    fund(report, pool, funded_for(limit, pool, view.leases, view.division))
    if extension or pool.soft_cap_extension:
        need = needed(limit, request.waiting, request.want.demand_milli, request.entitlement.horizon.shortest_ms)
        extend(report, pool, extension, need)


def _overdraft_for(lease: Lease, view: PoolView) -> int:
    """Return the region's part by weight of what is not kept for another lease.

    It is kept for the whole period, whatever becomes of the epoch. So regions that do not know of each other overdraw
    no more together than the quota allows.
    """
    if not view.overdraft:
        return 0
    others = [each for each in view.leases if each is not lease]
    own = sum(each.overdraft for each in others if each.region == lease.region)
    left = view.overdraft - sum(each.overdraft for each in others)
    return max(0, min(view.overdraft_part_of(lease.region) - own, left))


def _units_for(request: GrantRequest, lease: Lease, view: PoolView, now: datetime) -> int:
    """Return units by demand, or exactly those that are waited for; and those that people moved here for the region."""
    grantable = view.grantable
    if view.division.is_central:
        by_demand = min(grantable, request.waiting)
    else:
        by_demand = grant_units(grantable, request.entitlement.limit, _pool_demand(request, lease, view, now))
    return max(by_demand, min(grantable, by_demand + view.division.travelling_to(lease.region)))


def _refusal(lease: Lease, view: PoolView) -> GrantRefusal | None:
    if not view.period_is_open:
        return GrantRefusal.PERIOD_NOT_OPEN
    if after(lease.state, LeaseEvent.GRANT) is None:
        return refusal_of(lease)
    return None if lease.room else GrantRefusal.TOTAL_TOO_LARGE


def refusal_of(lease: Lease) -> GrantRefusal | None:
    """Return why a lease gets nothing, now or in future."""
    return _REFUSALS.get(lease.state)


_REFUSALS = {
    LeaseState.EXPIRED: GrantRefusal.LEASE_EXPIRED,
    LeaseState.FENCED: GrantRefusal.EPOCH_FENCED,
    LeaseState.LOST: GrantRefusal.EPOCH_FENCED,
    LeaseState.QUARANTINED: GrantRefusal.QUARANTINED,
    LeaseState.RETIRED: GrantRefusal.EPOCH_FENCED,
    LeaseState.CLOSED: GrantRefusal.PERIOD_NOT_OPEN,
}


def _pool_demand(request: GrantRequest, lease: Lease, view: PoolView, now: datetime) -> PoolDemand:
    want, division = request.want, view.division
    weight = division.weight_of(lease.region)
    total_milli = _weighed_demand_milli(want.demand_milli, lease, view, now)
    rest_ms = rest_lasts_ms(view.grantable * max(1, weight), total_milli)
    return PoolDemand(
        demand_milli=want.demand_milli,
        waiting=request.waiting,
        available=max(0, lease.outstanding - want.held),
        last_grant=lease.last_grant,
        total_demand_milli=total_milli,
        weight=weight,
        total_weight=weight if division.is_regional else division.total_weight,
        horizon_ms=horizon_ms(request.entitlement.horizon, rest_ms),
    )


def _weighed_demand_milli(demand_milli: int, lease: Lease, view: PoolView, now: datetime) -> int:
    """Return the demand of all regions, with what this one wants now. If all weigh alike, the sum is known already."""
    division, others_milli = view.division, view.demand_milli - demand_milli_of(lease, now)
    weight = division.weight_of(lease.region)
    if division.is_regional:
        return weight * demand_milli
    if division.is_even:
        return weight * (demand_milli + others_milli)
    others = (each for each in view.leases if each is not lease)
    weighed = (division.weight_of(each.region) * demand_milli_of(each, now) for each in others)
    return weight * demand_milli + sum(weighed)


def push_to_waiting(
    view: PoolView, limit: int, epochs: Collection[int], cause: Sequence[object], now: datetime
) -> list[tuple[Movement, Lease]]:
    """Grant what became available to leases of these epochs that wait, the longest waiting first.

    `cause` is what made it available, and names the movements. What is funded beyond the limit is granted to no lease:
    it goes with the next request (`fund`).
    """
    if view.division.is_regional:
        return []  # each region has units of its own
    waiting = [lease for lease in view.others if lease.epoch in epochs and is_waiting(lease, now)]
    pushed, surplus = [], max(0, view.pool.funded - limit)
    for lease in sorted(waiting, key=lambda each: (each.reported_at, each.epoch)):
        free = max(0, view.grantable_to(lease.region) - surplus)
        units = min(lease.waiting, lease.room, free) if view.period_is_open else 0
        entry = movement(lease, "pushed", *cause)
        grant(entry, view.pool, lease, units)
        note_regranted(units, lease.region, view.division.moves)
        lease.waiting -= units
        if units:
            pushed.append((entry, lease))
    return pushed


def is_waiting(lease: Lease, now: datetime) -> bool:
    """Tell whether requests wait for units of a lease that may be granted to.

    Requests do not wait for long: a want of some seconds ago has ended, however it ended, and so has an ended period.
    """
    is_recent = lease.waiting > 0 and now - lease.reported_at < WAITS_AT_MOST
    return lease.state is LeaseState.ACTIVE and is_recent and now < period_of(lease.key.period).ends_at


def record_contact(lease: Lease, terms: LeaseTerms, now: datetime) -> None:
    """Note that the region reported this lease: its demand begins to age, and it may spend for another while."""
    lease.demand_milli = decayed(lease, now)
    lease.waiting = 0
    lease.reported_at = now
    if lease.state in MAY_SPEND_AGAIN:
        lease.expires_at = now + timedelta(milliseconds=terms.lease_ms + terms.margin_ms)


MAY_SPEND_AGAIN = (LeaseState.ACTIVE, LeaseState.EXPIRED)
