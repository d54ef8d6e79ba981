"""What people do during a run, and what callers do who are none of the region's agents."""

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from coordinator.adjustments.rules import AdjustmentKind, AdjustmentRefusal
from coordinator.adjustments.rules import AdjustmentTerms as Adjusting
from coordinator.exchange.rules.balances import Cause, Correction, Key, Lease, Pool
from coordinator.exchange.rules.settlement import EpochState
from coordinator.overrides.rules import faults_of_change, faults_of_override
from coordinator.rebalancing.rules.plan import Planner, plan_even_out, plan_move
from coordinator.rebalancing.rules.region_settings import NOTHING_SET, Setting
from coordinator.suspense.rules import ResolutionKind
from protocol.identifiers import lane_of, subject_key
from protocol.limits.document import DocumentPart, LimitsDocument, PeriodKind, Quota
from protocol.messages import (
    EpochOpened,
    Exchange,
    ExchangeRequest,
    FrozenLease,
    LiveState,
    OpenEpoch,
    RebindEpoch,
    UsageLine,
)
from protocol.periods import Calendar, is_over, period_at
from tests.simulation.faults import REGIONS, Event
from tests.simulation.simulated.ledger_model import Adjustment, Name, Override, Transaction

if TYPE_CHECKING:
    from tests.simulation.world import World

CHANGED_FOR = 8  # steps
GIVEN_UP_AFTER = 60  # likewise
GRACE = timedelta(seconds=1)  # between the request of a close and the close
LATER_THAN_LATE = timedelta(days=36)
APPROVED_AFTER = 12  # steps; evidence may arrive between proposal and approval
ADJUSTED_AFTER = 5  # steps; units that were free at the proposal may be leased by then
KINDS = (ResolutionKind.WRITE_OFF, ResolutionKind.CHARGE, ResolutionKind.ESTIMATE)


# --- suspense ---------------------------------------------------------------------------------------------------------


def resolve(world: "World", event: Event) -> None:
    """Propose a resolution of the region's suspense or quarantine, and approve it later as another person."""
    for book in _books(world):
        name = (book.epoch, Key(book.key.quota, book.charge_period))
        if book.region == event.region and propose(world, name, KINDS[event.number], f"{event.step} {name}"):
            approve = functools.partial(_approve, world, name, f"{event.step} {name}")
            world.until[event.step + APPROVED_AFTER].append(approve)
            return


def _books(world: "World") -> list[Lease | Correction]:
    return [*world.ledger.leases.values(), *world.ledger.corrections.values()]


def propose(world: "World", name: tuple[int, Key], kind: ResolutionKind, id_: str) -> bool:
    """Propose a resolution. A quarantine can only end by the region's totals."""
    for each in (kind, ResolutionKind.UNATTRIBUTED):
        refusal, transaction = world.ledger.propose(name, each, 1, id_, world.clock.now())
        world.commit(transaction)
        if refusal is None:
            return True
    return False


def _approve(world: "World", name: tuple[int, Key], id_: str) -> None:
    world.resolved.add(name)
    _, transaction = world.ledger.approve(name, id_, world.clock.now())
    world.commit(transaction)


def rebase(world: "World") -> None:
    """Approve that each lane which showed a loss of the ledger continues."""
    for name in world.ledger.regressed():
        if name not in world.rebased:
            world.rebased.add(name)
            refusal, transaction = world.ledger.rebase(name, f"rebase {name}", world.clock.now())
            if refusal is None:
                world.coordinators.outcomes["rebased"] += 1
                world.commit(transaction)


# --- adjustments ------------------------------------------------------------------------------------------------------


def adjust(world: "World", event: Event) -> None:
    """Propose a credit, a debit or a write-off, of the current hour, of the hour before or of the day."""
    kind = _ADJUSTS[event.kind]
    now = world.clock.now()
    quota, calendar = (_MAILS, PeriodKind.DAY) if event.number % 4 == 0 else (_QUOTA, PeriodKind.HOUR)
    at = now - timedelta(hours=1) if event.number % 5 == 0 else now
    terms = Adjusting(Key(quota, period_at(Calendar(calendar), at).id), kind, event.number)
    id_ = UUID(int=_ADJUSTMENTS + event.step)
    told = _heard(world, lambda: world.ledger.propose_adjustment(id_, terms, _PROPOSER, world.clock.now()))
    if not isinstance(told, AdjustmentRefusal):
        decide = functools.partial(_withdraw if event.number % 7 == 0 else _approve_adjustment, world, id_)
        world.until[event.step + ADJUSTED_AFTER].append(decide)


def _approve_adjustment(world: "World", id_: UUID) -> None:
    """Approve as another person, and note the reply, by which the ledger is judged."""
    own = _heard(world, lambda: world.ledger.approve_adjustment(id_, _PROPOSER, world.clock.now()))
    told = _heard(world, lambda: world.ledger.approve_adjustment(id_, _APPROVER, world.clock.now()))
    if not isinstance(own, AdjustmentRefusal):
        world.bugs.append(f"who proposed an adjustment approved it: {own}")
    if not isinstance(told, AdjustmentRefusal):
        world.approved[id_] = told


def _withdraw(world: "World", id_: UUID) -> None:
    _heard(world, lambda: world.ledger.withdraw_adjustment(id_, _PROPOSER, world.clock.now()))


def _heard(
    world: "World", ask: Callable[[], tuple[Adjustment | AdjustmentRefusal, Transaction]]
) -> Adjustment | AdjustmentRefusal:
    """Repeat a request, as a person does, until it is committed and the reply arrives; return the reply."""
    while True:
        told, transaction = ask()
        if world.coordinators.conclude(transaction) and world.answers.random() < _ANSWERED:
            break
    what = f"AdjustmentRefusal.{told.name}" if isinstance(told, AdjustmentRefusal) else f"adjusted {told.terms.kind}"
    world.coordinators.outcomes[what] += 1
    return told


# --- periods ----------------------------------------------------------------------------------------------------------


def close(world: "World", event: Event) -> None:
    """Request the close of an ended period, and now and then of one that has not ended."""
    now = world.clock.now()
    for period in _periods(world):
        if is_over(period, now) or event.number == 1:
            _close(world, period, carries=event.number > 0)


def continue_closing(world: "World") -> None:
    """Continue requested closes as coordinators do, unless something still ends by itself."""
    now = world.clock.now()
    for period, row in list(world.ledger.rows["period"].items()):
        if row.state == "closing":
            recalled = world.ledger.recall_outstanding(period, now)
            world.commit(recalled)
            if not recalled.notices and now >= row.close_requested_at + GRACE:
                _close(world, period, carries=None)


def close_at_last(world: "World") -> None:
    """Remove what is in the way of a close, and request it."""
    for name, proposal in list(world.ledger.proposals.items()):
        if proposal is not None:
            _approve(world, name, proposal.id)
    for name in _in_the_way(world):
        if propose(world, name, ResolutionKind.WRITE_OFF, f"at last {world.step} {name}"):
            _approve(world, name, f"at last {world.step} {name}")
    for period in _periods(world):
        if is_over(period, world.clock.now()):
            _close(world, period, carries=True)


def _in_the_way(world: "World") -> list[tuple[int, Key]]:
    names = [(each.epoch, Key(each.key.quota, each.charge_period)) for each in _books(world) if each.is_quarantined]
    return [*names, *(name for name, proposal in world.ledger.proposals.items() if proposal)]


def _periods(world: "World") -> list[str]:
    return sorted({key.period for key in world.ledger.pools})


def _close(world: "World", period: str, *, carries: bool | None) -> None:
    missing, transaction = world.ledger.close_period(period, carries, GRACE, world.clock.now())
    world.coordinators.outcomes.update(f"Obstacle.{each.what.name}" for each in missing or ())
    over = [each for entry in transaction.entries for each in entry.transfers if each.cause is Cause.CARRIED_OVER]
    if world.coordinators.conclude(transaction):  # otherwise the coordinator died, and the close is requested again
        world.coordinators.outcomes["carried over"] += len(over) // 2


def let_hours_pass(world: "World", event: Event) -> None:
    """Advance all clocks: stores and coordinators see another time."""
    world.clock.slept += timedelta(hours=event.number % 3 + 1) if event.number else LATER_THAN_LATE
    world.days_passed |= not event.number


# --- rebalances -------------------------------------------------------------------------------------------------------


def move(world: "World", event: Event) -> None:
    """Move idle units of the hour from one region to the next, and cancel the move a while later."""
    target = REGIONS[(REGIONS.index(event.region) + 1) % len(REGIONS)]
    _begin_moves(world, event, lambda table, now: plan_move(table, event.region, target, event.number, now))


def even_out(world: "World", event: Event) -> None:
    _begin_moves(world, event, plan_even_out)


def _begin_moves(world: "World", event: Event, planner: Planner) -> None:
    now, id_ = world.clock.now(), UUID(int=event.step + 1)
    plan, transaction = world.ledger.begin_moves(
        Key(_QUOTA, period_at(Calendar(PeriodKind.HOUR), now).id), planner, id_, now
    )
    if plan:
        world.coordinators.outcomes["moves"] += len(plan.moves)
        world.commit(transaction)
        world.until[event.step + GIVEN_UP_AFTER].append(lambda: world.commit(world.ledger.cancel_moves(id_)))


def follow_moves(world: "World") -> None:
    """Follow rebalances as coordinators do."""
    for id_ in list(world.ledger.rows["rebalance"]):
        world.commit(world.ledger.follow_moves(id_, world.clock.now()))


def divide(world: "World", event: Event) -> None:
    """Set a region's weight, floor and ceiling, and reset them a while later."""
    number = event.number
    setting = Setting(number % 4, number if number % 3 else None, 2 * number if number % 2 else None)
    world.commit(world.ledger.set("exports:", {event.region: setting}))
    unset = {event.region: NOTHING_SET}
    world.until[event.step + CHANGED_FOR].append(lambda: world.commit(world.ledger.set("exports:", unset)))


def reset_tries(world: "World", _: Event) -> None:
    """Let every region forget what a rate has counted of a tenant."""
    world.commit(world.ledger.add_reset("tries", {"tenant": "acme"}, world.clock.now()))
    world.coordinators.outcomes["reset"] += 1


# --- documents --------------------------------------------------------------------------------------------------------


def override(world: "World", event: Event) -> None:
    """Add an override, which may end before the lease that was granted by it."""
    subject = {"tenant": "acme"} if event.number % 2 else {}
    now = world.clock.now()
    until = now + timedelta(seconds=1 + event.number % 5)
    if not faults_of_override(world.ledger.rows["limits"][0], "exports", subject, event.number):
        world.commit(world.ledger.add_override(Override(subject_key("exports", subject), event.number, now, until)))


def change_document(world: "World", event: Event) -> None:
    """Change the document under running agents: a quota is gone, of another kind, or without a limit for the plan."""
    before = world.ledger.rows["limits"][0]
    if before.default_plan is None:  # otherwise it is changed already
        quotas = [quota for quota in before.quotas if quota.name != "exports"] + _VARIANTS[event.number]
        names = {quota.name for quota in quotas}
        policies = [policy for policy in before.policies if policy.quota in names]
        plans = {"free": DocumentPart(), "pro": DocumentPart()}
        changed = LimitsDocument(quotas=quotas, policies=policies, plans=plans, default_plan="free")
        if faults_of_change(changed, world.ledger.overridden(world.clock.now())):
            return  # the coordinator refuses it
        world.commit(world.ledger.put_limits(changed))
        world.until[event.step + CHANGED_FOR].append(lambda: world.commit(world.ledger.put_limits(before)))


_VARIANTS = msgspec.convert(
    (
        [],
        [{"name": "exports", "kind": "rate", "limit": "50/second, burst 60"}],
        [{"name": "exports", "kind": "allowance", "limit": {"pro": 50}, "period": "hour"}],
    ),
    tuple[list[Quota], ...],
)


def change_period(world: "World", event: Event) -> None:
    world.calendars = world.calendars._replace(exports=("hour", "day", "hour", "month")[event.number % 4])
    _change_calendars(world)


def change_zone(world: "World", event: Event) -> None:
    zones = ("UTC", "Asia/Tokyo", "Europe/Berlin", "America/New_York")
    world.calendars = world.calendars._replace(mails_zone=zones[event.number])
    _change_calendars(world)


def _change_calendars(world: "World") -> None:
    if world.ledger.rows["limits"][0].default_plan is None:  # otherwise another document is in force for some steps
        world.put_limits(world.limit, world.modes)


# --- a lying region -----------------------------------------------------------------------------------------------

LIAR = "mallory"


def lie(world: "World", event: Event) -> None:
    """Report as a region with a valid token what never happened: absurd totals, invented periods and quotas."""
    world.commit(world.ledger.put_region(LIAR, "active"))
    epochs = [number for number, epoch in world.ledger.epochs.items() if epoch.region == LIAR]
    if not epochs:
        opening = OpenEpoch(nonce="f" * 32, fingerprint=LIAR)
        opened, transaction = world.ledger.open_epoch(LIAR, opening, world.clock.now())
        if not world.coordinators.conclude(transaction) or not isinstance(opened, EpochOpened):
            return
        epochs = [opened.epoch]
    now = period_at(Calendar(PeriodKind.HOUR), world.clock.now()).id
    quota, period = ((_QUOTA, now), (_QUOTA, "2031-01-01T07"), ("never:tenant=acme", now), (_MAILS, now))[event.number]
    lane = lane_of(quota, 2)
    lies = FrozenLease(
        quota=quota,
        period=period,
        granted=0,
        overage=0,
        consumed=_MUCH,
        returned=0,
        lines=[UsageLine(minute=0, dimensions={}, units=_MUCH)],
    )
    seq = world.ledger.lane_rows[epochs[0], lane].last_seq + 1
    transaction = world.coordinators.decide("exchange", LIAR, _exchange(epochs[0], lane, seq, LIAR, lies))
    world.coordinators.conclude(transaction)


# --- calls of strangers -----------------------------------------------------------------------------------------------


def strange_call(world: "World", event: Event) -> None:
    """Call as a stranger with the region's token. Refused calls must change nothing."""
    calls = list(_strange_calls(world, event.region))
    kind, body = calls[event.number % len(calls)]
    transaction = world.coordinators.decide(kind, event.region, body)
    if transaction.lost or any(_changes(world, name, row) for name, row in transaction.writes.items()):
        world.bugs.append(f"a call that is refused would change something: {kind} {body!r}")


def _changes(world: "World", name: Name, row: object) -> bool:
    """Return what a call changed. Kept evidence and an empty pool, which its lock creates, are no changes."""
    is_made = name.table == "pool" and name.key not in world.ledger.pools
    return name.table != "regressed" and not (is_made and row == Pool(name.key))


def _strange_calls(world: "World", region: str) -> Iterator[tuple[str, bytes]]:
    yield "exchange", _exchange(10**6, 0, 1, "nobody")
    yield (
        "rebind_epoch",
        msgspec.json.encode(RebindEpoch(nonce="0" * 32, previous="a store", fingerprint="its copy", seqs=[])),
    )
    for number, epoch in world.ledger.epochs.items():
        if epoch.region == region and epoch.state is EpochState.CURRENT:
            last = world.ledger.lane_rows[number, 0].last_seq
            yield "open_epoch", msgspec.json.encode(OpenEpoch(nonce=epoch.nonce, fingerprint="a copy of the store"))
            yield "exchange", _exchange(number, 0, last + 1, "a copy of the store")
            yield "exchange", _exchange(number, 0, last + 2, epoch.fingerprint)
            said = world.ledger.lane_rows[number, _LANE].last_seq
            yield "exchange", _exchange(number, _LANE, said + 1, epoch.fingerprint, _NEVER_GRANTED)
            if last > 1:
                yield "exchange", _exchange(number, 0, last - 1, epoch.fingerprint)


_QUOTA, _MAILS = "exports:tenant=acme", "mails:tenant=acme"
_PROPOSER, _APPROVER, _ADJUSTMENTS = UUID(int=1), UUID(int=2), 1 << 64
_ANSWERED = 0.8  # the share of replies that arrive
_ADJUSTS = {
    "credited": AdjustmentKind.CREDIT,
    "debited": AdjustmentKind.DEBIT,
    "written_off": AdjustmentKind.WRITE_OFF,
}
_LANE = lane_of(_QUOTA, 2)
_MUCH = 10**9
_NEVER_GRANTED = FrozenLease(
    quota=_QUOTA, period="2026-11-18T09", granted=_MUCH, overage=_MUCH, consumed=_MUCH, returned=_MUCH
)


def _exchange(epoch: int, lane: int, seq: int, fingerprint: str, *leases: FrozenLease) -> bytes:
    frozen = msgspec.json.encode({"epoch": epoch, "lane": lane, "seq": seq, "leases": leases}).decode()
    exchanges = [Exchange(frozen=frozen, live=LiveState(demands=[]))]
    return msgspec.json.encode(ExchangeRequest(fingerprint=fingerprint, exchanges=exchanges))
