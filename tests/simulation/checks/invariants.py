"""Invariants: what must hold after every step, and what must hold once all faults are healed.

Each invariant is a function that yields its violations. Reports of runs and the table of mutants name it by its
function.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from coordinator.exchange.rules.balances import Account, Correction, Key, Lease, Pool
from coordinator.exchange.rules.settlement import EpochState
from coordinator.limits.rules.entitlement import Entitlement, entitlement
from coordinator.usage.rules.reconciliation import CORRECTION, LEASE, POOL, SHARED, Adjusted, reconcile
from protocol.identifiers import lane_of
from protocol.lease import LeaseState
from protocol.limits.document import AllowanceQuota, Mode
from protocol.periods import is_over, next_period, period_at, period_of
from tests.simulation.simulated.model_queries import adjusted, read_books
from tests.simulation.simulated.network import CALL_TIMEOUT_S, TRANSACTION_S
from tests.simulation.simulated.operators import GRACE, LIAR
from tests.simulation.world import LANES, OVERDRAFT, TERMS, World, is_current


@dataclass
class Watch:
    """The state remembered from step to step, to notice when something goes back."""

    funded: dict[Key, int] = field(default_factory=dict)  # the largest value so far
    totals: dict[tuple[int, Key], tuple[int, ...]] = field(default_factory=dict)
    seqs: dict[Any, int] = field(default_factory=dict)
    lost: dict[tuple[int, Key], int] = field(default_factory=dict)  # what lost leases had returned
    kept: dict[Any, tuple[int, ...]] = field(default_factory=dict)  # in the stores
    waiting: dict[Any, tuple[str, int]] = field(default_factory=dict)  # leases ahead: their period, and when it starts
    closed: dict[str, list[Any]] = field(default_factory=dict)  # periods, with their final balances
    looked_at: datetime | None = None
    quiet: dict[str, tuple[Any, datetime]] = field(default_factory=dict)  # since when a region has no faults
    calm: dict[str, tuple[Any, float]] = field(default_factory=dict)  # since when no fault affects a region
    looked_s: float = 0.0
    scarce_s: dict[str, float] = field(default_factory=dict)  # when too few units of a quota were unallocated last
    ledger_lost: int = 0  # a close may be lost with the rest, and done again in the same step


Invariant = Callable[[World, Watch], Iterator[str]]
WRITTEN_EVERY_US = 1_000
ADMITTED_WITHIN_S = 2.0
LOOKED_EVERY_S = 0.5
REPORTED_WITHIN_S = TERMS.lease_ms / 2000 + 3.0  # and as long as it takes to find, send and book it
MOST_AT_ONCE = 10  # units, more than any request costs
ASKED_AHEAD = timedelta(seconds=5)  # a lease is given ahead for four of them, and asked for twice meanwhile
_NEVER_NEGATIVE = tuple(name for name in POOL if name != "adjustment")  # more may be debited than credited
_SHARED = tuple(dict.fromkeys((*SHARED, *CORRECTION)))  # accounts of pools that are sums over leases and corrections


def nobody_raised(world: World, _: Watch) -> Iterator[str]:
    yield from world.bugs


def books_balance(world: World, watch: Watch) -> Iterator[str]:
    """All identities hold, no account is negative, and a pool is the sum of its leases and corrections."""
    parts: list[tuple[Any, tuple[str, ...]]] = [(lease, LEASE) for lease in world.ledger.leases.values()]
    parts += [(each, CORRECTION) for each in world.ledger.corrections.values()]
    sums: dict[Key, dict[str, int]] = {key: dict.fromkeys(_SHARED, 0) for key in world.ledger.pools}
    for key, made in adjusted(world.ledger).items():
        sums[key]["written_off"] += made.written_off
    for part, accounts in parts:
        if not part.balances or any(getattr(part, name) < 0 for name in accounts):
            yield f"{part}"
        for name in _SHARED:
            sums[part.key][name] += getattr(part, name, 0)
    for key, pool in world.ledger.pools.items():
        if (
            not pool.balances
            or pool.funded + pool.credited < 0
            or any(getattr(pool, name) < 0 for name in _NEVER_NEGATIVE)
        ):
            yield f"{pool}"
        yield from (f"{name} of {pool} is {total}" for name, total in sums[key].items() if getattr(pool, name) != total)


def closed_means_closed(world: World, watch: Watch) -> Iterator[str]:
    """A closed period's rows are never added, changed or removed."""
    if world.ledger_lost != watch.ledger_lost:
        watch.ledger_lost = world.ledger_lost
        watch.closed.clear()
    for period in [period for period, row in world.ledger.rows["period"].items() if row and row.state == "closed"]:
        books = [
            row
            for table in ("pool", "lease", "correction")
            for row in world.ledger.rows[table].values()
            if row.key.period == period
        ]
        if period not in watch.closed:
            watch.closed[period] = [copy(row) for row in books]
            yield from (f"{each} in a closed period" for each in books if getattr(each, "outstanding", 0))
        elif watch.closed[period] != books:
            yield f"{period} was {watch.closed[period]}, is {books}"
    reopened = [period for period in watch.closed if world.ledger.period(period).state != "closed"]
    for period in reopened:
        del watch.closed[period]
        yield f"{period} is open again"


def late_is_booked_once(world: World, _: Watch) -> Iterator[str]:
    """A lease of a closed period has one open correction, where all late evidence is booked."""
    books: dict[Any, list[Correction]] = defaultdict(list)
    for (epoch, quota, charge_period, _period), each in world.ledger.corrections.items():
        if not world.ledger.is_closed(each.key):
            books[epoch, quota, charge_period].append(each)
        elif each.suspense_carried:
            yield f"{each} still waits in a closed period"
    yield from (f"{each}" for each in books.values() if len(each) > 1)


def never_oversold(world: World, watch: Watch) -> Iterator[str]:
    """Units admitted by leases are covered: by what was funded, credited and carried over into the period, the soft
    cap's extension and the overdraft, less what was carried over out of the period.
    """
    overdrafts = _overdrafts(world)
    for key, pool in world.ledger.pools.items():
        spendable = pool.funded + pool.credited + pool.carried_over_in + pool.soft_cap_extension + overdrafts[key]
        watch.funded[key] = max(spendable, watch.funded.get(key, 0))
    if world.ledger_lost:
        return
    for (quota, period), units in world.truth.total.items():
        if world.is_unseen(None, quota, period):
            continue
        key = Key(quota, period)
        funded, gone = (
            watch.funded.get(key, 0),
            world.ledger.pools[key].carried_over_out if key in world.ledger.pools else 0,
        )
        if units > funded - gone:
            yield f"{quota} in {period}: {units} admitted, {funded} funded, and {gone} of it went over into the next"


def nothing_is_funded_that_nobody_promised(world: World, _: Watch) -> Iterator[str]:
    """A pool is funded by no more than the largest limit, override or soft cap that was ever in force."""
    yield from world.limits.promised


def what_is_included_is_the_limit(world: World, _: Watch) -> Iterator[str]:
    """Over all regions, usage within the limit and overage are told apart to the unit."""
    yield from world.limits.included


def an_adjustment_is_booked_once(world: World, _: Watch) -> Iterator[str]:
    """An approved adjustment is booked once, by the approval's reply or, after a loss of the ledger, by its row."""
    if not world.ledger_lost and world.approved != {
        id_: each for id_, each in world.ledger.adjustments.items() if each.booked_in
    }:
        yield f"{world.approved} were approved, {world.ledger.adjustments} are in the books"
    made = adjusted(world.ledger)
    for key, pool in world.ledger.pools.items():
        adjustment, credited, _written_off = made.get(key, Adjusted())
        if (pool.adjustment, pool.credited) != (adjustment, credited):
            yield f"{pool}, of which {credited} were credited, and {adjustment} adjusted in all"


def a_debit_takes_what_is_free(world: World, _: Watch) -> Iterator[str]:
    """A debit takes nothing that a region holds or has used."""
    yield from world.limits.debited


def what_goes_over_was_left(world: World, _: Watch) -> Iterator[str]:
    yield from world.limits.carried_over


def what_goes_over_arrives_once(world: World, _: Watch) -> Iterator[str]:
    """The units that a closed period carries over are exactly those that the next period gets."""
    gone, came = Counter[tuple[str, str]](), Counter[Key]()
    for (key, _epoch, charge_period, src, dst, _cause), units in world.ledger.rows["moved"].items():
        if Account.CARRIED_OVER_IN in (src, dst):
            gone[key.quota, charge_period] += units
            came[key] += units
    for key, pool in world.ledger.pools.items():
        if (pool.carried_over_out, pool.carried_over_in) != (gone[key], came[key]):
            yield f"{pool}: {gone[key]} of it went over into another period, {came[key]} came into it"
        if pool.carried_over_out and not world.ledger.is_closed(key):
            yield f"{pool}: of a period that is open units went over"


def _overdrafts(world: World) -> Counter[Key]:
    kept: Counter[Key] = Counter()
    for lease in world.ledger.leases.values():
        kept[lease.key] += lease.overdraft
    return kept


def an_overdraft_is_there_once(world: World, _: Watch) -> Iterator[str]:
    """All regions and epochs together overdraw a quota at most by its overdraft, which is the published bound."""
    for key, units in _overdrafts(world).items():
        if units > OVERDRAFT:
            yield f"{units} of {key}"


def who_is_heard_overdraws_nothing(world: World, _: Watch) -> Iterator[str]:
    yield from world.overdrawn_while_heard


def within_its_lease(world: World, _: Watch) -> Iterator[str]:
    """An epoch admits at most what it was granted and did not return, plus its overdraft."""
    if world.ledger_lost:
        return
    for (epoch, quota, period), units in world.truth.enforced.items():
        if world.is_unseen(world.ledger.epochs[epoch].region, quota, period):
            continue
        lease = world.ledger.leases.get((epoch, Key(quota, period)))
        if lease is None or units > lease.granted + max(lease.overage, lease.overdraft) - lease.returned:
            yield f"{units} admitted in epoch {epoch}, of {lease}"


def _of_a_journal(world: World, epoch: int) -> bool:
    return world.ledger.epochs[epoch].fingerprint.startswith("journal:")


def a_journal_is_booked_once(world: World, _: Watch) -> Iterator[str]:
    """The entries of a journal on disk are booked once, whichever epochs report them."""
    for (quota, period), (booked, kept) in _journals(world).items():
        if booked > kept:
            yield f"{quota} in {period}: {kept} in journals, {booked} booked"


def _journals(world: World) -> dict[tuple[str, str], tuple[int, int]]:
    booked: Counter[tuple[str, str]] = Counter()
    for (epoch, key), lease in world.ledger.leases.items():
        if _of_a_journal(world, epoch):
            booked[key.quota, key.period] += lease.consumed
    for (epoch, quota, charge_period, _period), each in world.ledger.corrections.items():
        if _of_a_journal(world, epoch):
            booked[quota, charge_period] += each.consumed
    kept: Counter[tuple[str, str]] = Counter()
    for disk in world.disks.values():
        kept.update(disk.kept())
    return {name: (booked[name], kept[name]) for name in booked.keys() | kept.keys()}


def what_was_told_without_the_store_is_on_disk(world: World, _: Watch) -> Iterator[str]:
    kept: Counter[str] = Counter()
    for (quota, _period), (_booked, units) in _journals(world).items():
        kept[quota] += units
    for quota, units in world.truth.heard_without.items():
        if units > kept[quota]:
            yield f"{quota}: {units} told, {kept[quota]} on disk"


def never_booked_twice(world: World, _: Watch) -> Iterator[str]:
    booked: Counter[tuple[int, str, str]] = Counter()
    for (epoch, key), lease in world.ledger.leases.items():
        if not _of_a_journal(world, epoch) and lease.region != LIAR:
            booked[epoch, key.quota, key.period] += lease.consumed
    for (epoch, quota, charge_period, _period), each in world.ledger.corrections.items():
        if not _of_a_journal(world, epoch):
            booked[epoch, quota, charge_period] += each.consumed
    for about, units in booked.items():
        if units > world.truth.admitted.get(about, 0):
            yield f"{units} booked of {about}, {world.truth.admitted.get(about, 0)} admitted"


def labels_are_booked_once(world: World, _: Watch) -> Iterator[str]:
    """Usage has the labels of its requests: of each no more is booked than was admitted, nor told than was admitted."""
    all_admitted = Counter[tuple[str, str]]()
    for (region, quota, period, labels), admitted, booked in _by_labels(world):
        all_admitted[quota, labels] += admitted
        if booked > admitted:
            yield f"{quota} in {period} with {labels} in {region}: {admitted} admitted, {booked} booked"
    for about, units in world.truth.heard_labelled.items():
        if units > all_admitted[about]:
            yield f"{about}: {units} told, {all_admitted[about]} admitted"


def _by_labels(world: World) -> Iterator[tuple[tuple[str, str, str, str], int, int]]:
    """Yield region, quota, period and labels of usage that has some, with what was admitted and what is booked."""
    admitted = Counter({about: units for about, units in world.truth.labelled.items() if about[-1]})
    for region, disk in world.disks.items():
        for (quota, period, labels), units in disk.kept_by_labels().items():
            admitted[region, quota, period, labels] += units if labels else 0
    booked = world.ledger.rows["labelled"]
    for about in admitted.keys() | booked.keys():
        yield about, admitted[about], booked.get(about, 0)


def a_rate_is_kept(world: World, _: Watch) -> Iterator[str]:
    """A store admits no more than its part of a rate allows, and what refunds and resets gave back."""
    for machine in world.machines.values():
        yield from machine.rates.beyond


def totals_only_grow(world: World, watch: Watch) -> Iterator[str]:
    if world.ledger_lost:
        return
    for name in world.ledger.touched:
        lease = world.ledger.leases[name]
        totals = (lease.granted, lease.overage, lease.consumed, lease.returned)
        if any(new < old for new, old in zip(totals, watch.totals.get(name, (0, 0, 0, 0)), strict=True)):
            yield f"{lease} was {watch.totals[name]}"
        watch.totals[name] = totals
    for lane, row in world.ledger.lane_rows.items():
        if row.last_seq < watch.seqs.get(lane, 0):
            yield f"lane {lane} went back to {row.last_seq}"
        watch.seqs[lane] = row.last_seq


def what_is_lost_returns_nothing(world: World, watch: Watch) -> Iterator[str]:
    """Returns of an epoch whose store lost data are not booked, because the units may have been spent as well."""
    for name in world.ledger.proved:  # it may have returned and been lost again between two checks
        watch.lost.pop(name, None)
    for name, lease in world.ledger.leases.items():
        if lease.state is LeaseState.LOST:
            if lease.returned > watch.lost.setdefault(name, lease.returned):
                yield f"{lease}, had returned {watch.lost[name]}"
        else:
            watch.lost.pop(name, None)


def a_store_only_moves_forward(world: World, watch: Watch) -> Iterator[str]:
    """No total in a store goes back within one incarnation."""
    for name, machine in world.machines.items():
        for key in machine.store.data:
            if ":lease:" in key:
                f = machine.store.hash(key)
                totals = tuple(int(f.get(total, 0)) for total in ("granted", "overage", "consumed", "returned"))
                about = (name, machine.restarts, key, f.get("period"))
                if any(new < old for new, old in zip(totals, watch.kept.get(about, totals), strict=True)):
                    yield f"{key} of {name}: {totals}, was {watch.kept[about]}"
                watch.kept[about] = totals


def no_period_begins_early(world: World, watch: Watch) -> Iterator[str]:
    """A lease of the next period is not spent before the store's clock, or the coordinator, says that the period began.

    The fence may be a moment behind that clock: it is written when a millisecond has passed.
    """
    for name, machine in world.machines.items():
        mono = int(machine.store.hash("lh:fence").get("mono", 0))
        for key in [key for key in machine.store.data if ":lease:" in key]:
            f, about = machine.store.hash(key), (name, machine.restarts, key)
            period, starts = watch.waiting.pop(about, ("", 0))
            has_begun = mono + WRITTEN_EVERY_US > starts or (
                period and period_of(period).starts_at <= world.clock.now()
            )
            if f.get("period") == period and not has_begun:
                yield f"{key} of {name}: {period} at {mono}, starts at {starts}"
            if "next:period" in f:
                watch.waiting[about] = (f["next:period"], int(f["next:starts"]))


def the_next_lease_comes_in_time(world: World, watch: Watch) -> Iterator[str]:
    """Without faults in the last seconds of a period, a region has a lease of the next period when that begins."""
    now, before = world.clock.now(), watch.looked_at
    watch.looked_at = now
    begins_at = now.replace(minute=0, second=0, microsecond=0)
    for region in world.machines:
        what = _what_could_go_wrong(world, region)
        if watch.quiet.get(region, (None, now))[0] != what:
            watch.quiet[region] = (what, now)
        is_quiet = what is not None and watch.quiet[region][1] <= begins_at - ASKED_AHEAD
        if is_quiet and before and before < begins_at <= now:
            yield from _without_the_next(world, region, begins_at)


def _what_could_go_wrong(world: World, region: str) -> Any:
    """Return None during a fault, else a value that changes whenever a fault has come and gone."""
    machine, weather, coordinators = world.machines[region], world.weather[region], world.coordinators
    agents, cells = [agent for agent in world.alive(region) if agent.real is not None], _cells(world, region)
    epochs = {cell.epochs.current.epoch if cell.epochs.current else None for cell in cells}
    current = {number for number, epoch in world.ledger.epochs.items() if is_current(epoch, region)}
    allowances = [quota for quota in world.ledger.rows["limits"][0].quotas if isinstance(quota, AllowanceQuota)]
    modes = tuple(quota.mode for quota in allowances)
    calendars = tuple((quota.period, quota.time_zone) for quota in allowances)
    is_wrong = (
        not (machine.is_up and weather.sends and weather.hears and coordinators.is_up)
        or bool(coordinators.skews)
        or (
            machine.is_slow
            or coordinators.transaction_s > TRANSACTION_S
            or world.is_unseen(region)
            or world.ledger_lost
        )
        or (not epochs or epochs != current or world.ledger.rows["limits"][0].default_plan is not None)
        or any(agent.stopping.is_set() for agent in agents)
        or any(cell.exchange_loop.stopped_lanes for cell in cells)
        or any(cell.exchange_loop.is_pausing for cell in cells)  # because of an earlier fault
        or not world.ledger.rows["region"][region].is_active
        or bool(world.ledger.overridden(world.clock.now()))  # with an override no next lease is granted ahead
        or Mode.CENTRAL in modes  # likewise
    )
    changes = (machine.restarts, machine.hang_ups, machine.offset_us, weather.troubles, world.clock.slept)
    return None if is_wrong else (*changes, coordinators.deaths, *modes, *calendars, *(agent.name for agent in agents))


def _renews(cell: Any, quota: str) -> bool:
    """Return whether this agent renews its lease of the quota in time."""
    followed = cell.quotas._schedule.find(quota)
    return followed is not None and followed.renew_at_ms is not None


def _cells(world: World, region: str) -> list[Any]:
    return [cell for agent in world.alive(region) if agent.real is not None for cell in agent.real.cells]


def _without_the_next(world: World, region: str, begins_at: datetime) -> Iterator[str]:
    store = world.machines[region].store
    for (number, key), lease in world.ledger.leases.items():
        is_held = lease.state is LeaseState.ACTIVE and lease.expires_at > begins_at
        period = period_of(key.period)
        is_kept = any(_renews(cell, key.quota) for cell in _cells(world, region))  # or the agent that did is gone
        found = entitlement(world.ledger.catalogue([key.quota], begins_at), key.quota)
        is_held = is_held and isinstance(found, Entitlement) and found.calendar == period.calendar
        if is_held and is_kept and period.ends_at == begins_at and is_current(world.ledger.epochs[number], region):
            name = f"lh:{{{lane_of(key.quota, LANES)}}}:lease:{number}:{key.quota}"
            kept = store.hash(name)
            ahead = next_period(period).id
            # A lease that was granted ahead and returned when the quota's period changed is granted once it is current.
            if ahead not in (kept.get("period"), kept.get("next:period")) and f"ended:{ahead}" not in kept:
                yield f"{name} of {region} at {begins_at}: {kept}"


def whoever_asks_is_admitted_in_time(world: World, watch: Watch) -> Iterator[str]:
    """Without faults and with units unallocated, requests are denied for no longer than two seconds."""
    now_s = world.loop.time()
    if now_s - watch.looked_s > LOOKED_EVERY_S:  # what happened in between is unknown
        watch.calm = {region: (what, max(since_s, now_s)) for region, (what, since_s) in watch.calm.items()}
        watch.scarce_s.clear()
    watch.looked_s = now_s
    free = {quota: _is_free(world, quota) for quota in {quota for _, quota in world.denials}}
    for quota, is_free in free.items():
        watch.scarce_s[quota] = watch.scarce_s.get(quota, now_s) if is_free else now_s
    for region in world.machines:
        what = _what_could_stop(world, region)
        before, _ = watch.calm.setdefault(region, (what, now_s))
        if what is None or before != what:  # how long a lost reply is waited for
            watch.calm[region] = (what, now_s + CALL_TIMEOUT_S)
    for (region, quota), denials in world.denials.items():
        since_s = max(denials.first_asked_s, watch.calm[region][1], watch.scarce_s[quota])
        is_long = denials.last_asked_s - since_s > ADMITTED_WITHIN_S
        if is_long and not _may_deny(world, region, quota):
            yield f"{quota} in {region}: denied by {denials.by} for {denials.last_asked_s - since_s:.2f} s"


def usage_is_reported_in_time(world: World, watch: Watch) -> Iterator[str]:
    """Without faults no usage waits for its report for longer than half of its lease, whatever its quota says."""
    now_s = world.loop.time()
    for region, (what, since_s) in watch.calm.items():
        if what is None or now_s - since_s < REPORTED_WITHIN_S:
            continue
        for cell in _cells(world, region):
            if not cell.exchange_loop.is_pausing and cell.exchange.unreported_ms() > 1000 * REPORTED_WITHIN_S:
                yield f"{region} has usage that is {cell.exchange.unreported_ms()} ms old and not booked"


def _is_free(world: World, quota: str) -> bool:
    """Return whether the current period has enough unallocated units for any request."""
    now = world.clock.now()
    found = entitlement(world.ledger.catalogue([quota], now), quota)
    if not isinstance(found, Entitlement):
        return False
    key = Key(quota, period_at(found.calendar, now, found.written).id)
    pool = world.ledger.pools.get(key) or Pool(key)
    is_open = world.ledger.period(key.period).state == "open"
    return is_open and pool.unallocated + found.limit - pool.funded - pool.overage >= MOST_AT_ONCE


def _what_could_stop(world: World, region: str) -> Any:
    """Return None during a fault, else a value that changes whenever a fault has come and gone."""
    machine, weather, coordinators = world.machines[region], world.weather[region], world.coordinators
    agents, cells = [agent for agent in world.alive(region) if agent.real is not None], _cells(world, region)
    epochs = {cell.epochs.current.epoch if cell.epochs.current else None for cell in cells}
    current = {number for number, epoch in world.ledger.epochs.items() if is_current(epoch, region)}
    is_wrong = (
        not (machine.is_up and weather.sends and weather.hears and coordinators.is_up)
        or bool(coordinators.skews)
        or (machine.is_slow or coordinators.transaction_s > TRANSACTION_S or world.ledger_lost)
        or (not epochs or epochs != current)
        or any(agent.stopping.is_set() for agent in agents)
        or any(cell.exchange_loop.stopped_lanes for cell in cells)
        or not world.ledger.rows["region"][region].is_active
    )
    changes = (machine.restarts, machine.hang_ups, machine.offset_us, weather.troubles, world.clock.slept)
    return None if is_wrong else (*changes, coordinators.deaths, *(agent.name for agent in agents))


def _may_deny(world: World, region: str, quota: str) -> bool:
    """Return whether people limit what the region may have, or reserve units for one of its leases."""
    catalogue = world.ledger.catalogue([quota], world.clock.now())
    if any(world.ledger.rows["setting"].values()) or catalogue.mode_of(quota) is Mode.REGIONAL:
        return True
    if any(move is not None for move in world.ledger.rows["move"].values()):
        return True
    return any(
        lease.region == region and key.quota == quota and lease.state is LeaseState.QUARANTINED
        for (_, key), lease in world.ledger.leases.items()
    )


def one_epoch_admits(world: World, _: Watch) -> Iterator[str]:
    """In a region's store no epoch admits after a newer one has admitted."""
    while world.admissions:
        admission = world.admissions.popleft()
        machine = world.machines[admission.region]
        if admission.epoch < machine.admitting_epoch:
            yield f"epoch {admission.epoch} admits after {machine.admitting_epoch}"
        machine.admitting_epoch = max(machine.admitting_epoch, admission.epoch)


def nothing_after_expiry(world: World, _: Watch) -> Iterator[str]:
    """No region spends a lease for longer than the ledger believes."""
    if not world.ledger_lost:
        yield from world.late_admissions


def no_lane_stops(world: World, _: Watch) -> Iterator[str]:
    """No lane stops, unless a store or the ledger lost data: then a stopped lane shows it."""
    if world.ledger_lost:
        return
    for agent in world.agents:
        if agent.is_alive and agent.real is not None and agent.region not in world.lossy_regions:
            for (epoch, lane), outcome in agent.real.cells[0].exchange_loop.stopped_lanes.items():
                yield f"lane {lane} of epoch {epoch} of {agent.region}: {outcome.value}"


def no_quarantine(world: World, _: Watch) -> Iterator[str]:
    """Quarantine stays empty, unless a store lost data unnoticed or the region lies."""
    if world.ledger_lost:
        return
    for lease in world.ledger.leases.values():
        about = (lease.region, lease.key.quota, lease.key.period)
        if lease.state is LeaseState.QUARANTINED and lease.region != LIAR and not world.is_unseen(*about):
            yield f"{lease}"
    for each in world.ledger.corrections.values():
        about = (each.region, each.key.quota, each.charge_period)
        if each.quarantined and each.region != LIAR and not world.days_passed and not world.is_unseen(*about):
            yield f"{each}"


def what_a_region_invents_is_not_booked(world: World, _: Watch) -> Iterator[str]:
    """Invented reports wait in quarantine until people approve a resolution."""
    for lease in world.ledger.leases.values():
        if lease.region == LIAR and lease.consumed and (lease.epoch, lease.key) not in world.resolved:
            yield f"{lease}"


def told_what_is_true(world: World, _: Watch) -> Iterator[str]:
    """A service is never told of more units than its store admitted."""
    for quota, units in world.truth.heard.items():
        if units > world.truth.executed[quota]:
            yield f"{quota}: {units} told, {world.truth.executed[quota]} admitted"
    for about, units in world.truth.answered.items():
        if units > world.truth.checked[about]:
            yield f"{about}: {units} answered, {world.truth.checked[about]} admitted"


def no_hold_is_forgotten(world: World, _: Watch) -> Iterator[str]:
    """The outcome of a hold is booked even after its period or epoch has ended."""
    yield from world.forgotten_holds


def last_words_are_heard(world: World, _: Watch) -> Iterator[str]:
    """The last agent of a region that stops without faults leaves nothing unreported."""
    yield from world.unreported_after_stop


def a_ceiling_is_kept(world: World, _: Watch) -> Iterator[str]:
    """No region is granted more of a period than its ceiling."""
    yield from world.divided.broken["a_ceiling_is_kept"]


def a_floor_is_kept(world: World, _: Watch) -> Iterator[str]:
    """After a grant there is still enough for other regions' floors and moves."""
    yield from world.divided.broken["a_floor_is_kept"]


def a_move_is_of_units_that_came_back(world: World, _: Watch) -> Iterator[str]:
    """A move makes no units and is done once: each return and each grant counts for it once."""
    yield from world.divided.broken["a_move_is_of_units_that_came_back"]


def each_region_has_its_own_limit(world: World, _: Watch) -> Iterator[str]:
    """In regional mode a region is granted no more than its own limit."""
    yield from world.divided.broken["each_region_has_its_own_limit"]


def nothing_is_granted_ahead_of_a_request(world: World, _: Watch) -> Iterator[str]:
    """In central mode nothing is granted ahead of a request."""
    yield from world.divided.broken["nothing_is_granted_ahead_of_a_request"]


ALWAYS: tuple[Invariant, ...] = (
    nobody_raised,
    books_balance,
    closed_means_closed,
    late_is_booked_once,
    never_oversold,
    nothing_is_funded_that_nobody_promised,
    what_is_included_is_the_limit,
    an_adjustment_is_booked_once,
    a_debit_takes_what_is_free,
    what_goes_over_was_left,
    what_goes_over_arrives_once,
    an_overdraft_is_there_once,
    who_is_heard_overdraws_nothing,
    within_its_lease,
    never_booked_twice,
    a_journal_is_booked_once,
    labels_are_booked_once,
    a_rate_is_kept,
    what_was_told_without_the_store_is_on_disk,
    totals_only_grow,
    a_store_only_moves_forward,
    no_period_begins_early,
    the_next_lease_comes_in_time,
    whoever_asks_is_admitted_in_time,
    usage_is_reported_in_time,
    what_is_lost_returns_nothing,
    one_epoch_admits,
    nothing_after_expiry,
    no_lane_stops,
    no_quarantine,
    what_a_region_invents_is_not_booked,
    told_what_is_true,
    no_hold_is_forgotten,
    last_words_are_heard,
    a_ceiling_is_kept,
    a_floor_is_kept,
    a_move_is_of_units_that_came_back,
    each_region_has_its_own_limit,
    nothing_is_granted_ahead_of_a_request,
)


# --- when all is healed and quiet -------------------------------------------------------------------------------------


def every_journal_is_booked(world: World, _: Watch) -> Iterator[str]:
    """Every journal is booked, but those of a lost region and what waits in quarantine: usage by a calendar that the
    quota had only for a while, of which nothing was ever granted.
    """
    if world.ledger_lost:
        return
    for region, disk in world.disks.items():
        if region not in world.lost_regions and disk.files:
            yield f"{sorted(disk.files)} of {region} are not booked"
    if world.lost_regions or any(
        _of_a_journal(world, number) and epoch.state is EpochState.RETIRED
        for number, epoch in world.ledger.epochs.items()
    ):
        return
    for (quota, period), (booked, kept) in _journals(world).items():
        if booked != kept and (quota, period) not in world.ledger.held_for_people:
            yield f"{quota} in {period}: {kept} in journals, {booked} booked"


def booked_is_admitted(world: World, _: Watch) -> Iterator[str]:
    """Booked usage is exactly what was admitted. If a store lost data, the difference is within what is unaccounted
    for.
    """
    if world.ledger_lost:
        return
    for (epoch, quota, period), units in world.truth.admitted.items():
        region, is_retired = world.ledger.epochs[epoch].region, world.ledger.epochs[epoch].state is EpochState.RETIRED
        lease = world.ledger.leases.get((epoch, Key(quota, period)))
        late = world.ledger.late_books(epoch, Key(quota, period))
        booked = (lease.consumed if lease else 0) + sum(each.consumed for each in late)
        if is_retired or any(each.quarantined for each in late):
            continue  # people decide what the rest of the evidence counts
        if region not in world.lossy_regions and region not in world.lost_regions and booked != units:
            yield f"{quota} in {period}, epoch {epoch} of {region}: {units} admitted, {booked} booked, {lease}"


def labels_are_exact(world: World, _: Watch) -> Iterator[str]:
    """Usage of each label is booked to the unit, in regions where nothing was lost and nothing waits for people."""
    if world.ledger_lost or world.days_passed:
        return
    excused = world.lossy_regions | world.lost_regions | {region for region, _, _ in world.unseen}
    excused |= {epoch.region for epoch in world.ledger.epochs.values() if epoch.state is EpochState.RETIRED}
    for (region, quota, period, labels), admitted, booked in _by_labels(world):
        is_held = (quota, period) in world.ledger.held_for_people
        if booked != admitted and region not in excused and not is_held:
            yield f"{quota} in {period} with {labels} in {region}: {admitted} admitted, {booked} booked"


def what_is_missing_is_bounded(world: World, _: Watch) -> Iterator[str]:
    """Units admitted but not booked are at most those outstanding or in suspense, for every epoch."""
    if world.ledger_lost:
        return
    for (epoch, quota, period), units in world.truth.enforced.items():
        if world.is_unseen(world.ledger.epochs[epoch].region, quota, period):
            continue
        lease = world.ledger.leases.get((epoch, Key(quota, period)))
        bound = _bound(lease) if lease else 0
        bound += sum(_bound_late(each) for each in world.ledger.late_books(epoch, Key(quota, period)))
        if units > bound:
            yield f"{quota} in {period}, epoch {epoch}: {units} admitted, at most {bound} in the books"


def _bound(lease: Lease) -> int:
    return lease.consumed + lease.outstanding + lease.suspense + lease.estimated + lease.written_off


def _bound_late(late: Correction) -> int:
    """Return the bound for late usage, including what it replaces in closed periods."""
    return late.consumed + late.suspense_carried + late.estimated + late.written_off - late.replaced - late.recovered


def both_sides_agree(world: World, _: Watch) -> Iterator[str]:
    """After a later message the store has the ledger's totals, so that a lost grant strands no units."""
    if world.ledger_lost:
        return
    for name, machine in world.machines.items():
        if name in world.lost_regions or name in world.lossy_regions:
            continue
        fence = machine.store.hash("lh:fence")
        for key, lease in _current(world, name, fence.get("epoch")):
            yield from _differs(machine, key, lease)


def _current(world: World, region: str, epoch: str | None) -> Iterator[tuple[Key, Lease]]:
    for (number, key), lease in world.ledger.leases.items():
        if lease.region == region and str(number) == epoch and lease.state is LeaseState.ACTIVE:
            yield key, lease


def _differs(machine: Any, key: Key, lease: Lease) -> Iterator[str]:
    for name in machine.store.data:
        if f":lease:{lease.epoch}:" in name and name.endswith(key.quota):
            kept = machine.store.hash(name)
            prefix = next((each for each in ("", "next:") if kept.get(f"{each}period") == key.period), None)
            if prefix is None:
                return
            told = {total: int(kept.get(prefix + total, 0)) for total in ("granted", "consumed", "returned")}
            booked = {total: getattr(lease, total) for total in told}
            if told != booked:
                yield f"{key} in epoch {lease.epoch}: store {told}, ledger {booked}"
            return


def an_ended_period_is_settled(world: World, _: Watch) -> Iterator[str]:
    """Regions that are up hold nothing of an ended period: they have returned what they did not spend.

    The exception is a first grant whose reply was lost, if the region reported nothing before the period ended.
    """
    if world.ledger_lost:
        return
    for name, machine in world.machines.items():
        epoch = machine.store.hash("lh:fence").get("epoch", "0")
        if name in world.lost_regions or name in world.lossy_regions:
            continue
        for (number, key), lease in world.ledger.leases.items():
            if world.is_unseen(name, key.quota, key.period):
                continue
            is_over = number == int(epoch) and period_of(key.period).ends_at < world.clock.now()
            late = world.ledger.late_books(number, key)
            books: list[Lease | Correction] = [lease, *late]
            has_told = any(book.region_consumed + book.region_returned > 0 for book in books)
            waits = lease.outstanding + lease.suspense + sum(each.suspense_carried for each in late)
            if is_over and has_told and waits and not any(each.quarantined for each in late):
                yield f"{lease} in {name}, {late}"


def nothing_of_what_is_central_lies_idle(world: World, _: Watch) -> Iterator[str]:
    """In central mode no region that is up holds units when no request waits any more."""
    if world.ledger_lost:
        return
    for name, machine in world.machines.items():
        if name in world.lost_regions or name in world.lossy_regions:
            continue
        for key, lease in _current(world, name, machine.store.hash("lh:fence").get("epoch")):
            catalogue = world.ledger.catalogue([key.quota], world.clock.now())
            is_central = catalogue.mode_of(key.quota) is Mode.CENTRAL
            if world.is_unseen(name, key.quota, key.period):
                continue
            if is_central and lease.outstanding and not is_over(key.period, world.clock.now()):
                yield f"{lease}"


def a_proven_promotion_leaves_nothing_to_people(world: World, _: Watch) -> Iterator[str]:
    """An epoch that a promoted replica has all of leaves no units outstanding or in suspense."""
    if world.ledger_lost:
        return
    for lease in world.ledger.leases.values():
        is_lost = lease.region in world.lost_regions or lease.region in world.lossy_regions
        if lease.epoch in world.ledger.kept and not is_lost and lease.outstanding + lease.suspense:
            yield f"{lease}"


def three_ways_agree(world: World, _: Watch) -> Iterator[str]:
    """Transfers, projections and the regions' totals agree in the reconciliation."""
    for period in sorted({key.period for key in world.ledger.pools}):
        if world.is_unseen(None, None, period):
            continue
        findings = reconcile(period, read_books(world.ledger, period), world.clock.now()).findings
        yield from (f"{period}: {each}" for each in findings)


def what_is_over_is_closed(world: World, _: Watch) -> Iterator[str]:
    """An ended period can be closed, unless holds with a stated end keep it open."""
    now = world.clock.now()
    for period in sorted({key.period for key in world.ledger.pools}):
        if is_over(period, now) and world.ledger.period(period).state != "closed":
            missing = world.ledger.close_period(period, True, GRACE, now)[0]
            if not missing or any(each.until is None or each.until <= now for each in missing):
                yield f"{period}: {missing}"


def an_epoch_everywhere(world: World, _: Watch) -> Iterator[str]:
    """Every region that is up has an incarnation and an epoch again."""
    for agent in world.agents:
        if agent.is_alive and agent.real is not None and agent.real.cells[0].epochs.current is None:
            yield f"{agent.name} has no epoch"


def a_ledger_that_lost_data_is_noticed(world: World, _: Watch) -> Iterator[str]:
    """A region that knows more than a ledger that lost data shows it, as soon as it reports anything in that epoch.

    If a late copy of all that was lost arrived first and was booked again, nothing is missing any more.
    """
    repaired = {world.ledger.epochs[number].region for number, _, _ in world.rebased}
    excused = world.coordinators.alarmed | repaired | world.lossy_regions | world.lost_regions
    for region, told in world.told_and_lost.items():
        current = world.machines[region].store.hash("lh:fence").get("epoch")
        forgotten = {name for name in told - world.ledger.rows["receipt"].keys() if str(name[0]) == current}
        if forgotten and region not in excused:
            yield f"{region} has receipts for {sorted(forgotten)}, the ledger has not, and nobody noticed"


def lanes_go_on(world: World, _: Watch) -> Iterator[str]:
    """Once people have approved it, a lane that showed a loss of the ledger continues."""
    for epoch, lane, seq in world.ledger.regressed():
        region = world.ledger.epochs[epoch].region
        is_current = world.machines[region].store.hash("lh:fence").get("epoch") == str(epoch)
        if is_current and region not in world.lost_regions:
            yield f"lane {lane} of epoch {epoch} of {region} stands before {seq}"


AT_THE_END: tuple[Invariant, ...] = (
    every_journal_is_booked,
    booked_is_admitted,
    labels_are_exact,
    what_is_missing_is_bounded,
    both_sides_agree,
    an_ended_period_is_settled,
    an_epoch_everywhere,
    a_ledger_that_lost_data_is_noticed,
    lanes_go_on,
    nothing_of_what_is_central_lies_idle,
    a_proven_promotion_leaves_nothing_to_people,
    three_ways_agree,
    what_is_over_is_closed,
)
