"""What people do while all this runs, and what callers do who are none of our agents."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from coordinator.domain.books import Key, Lease
from coordinator.domain.resolution import ResolutionKind, ResolutionRefusal, Terms, propose
from coordinator.domain.settlement import EpochState
from protocol.identifiers import lane_of
from protocol.lease import LeaseState
from protocol.messages import Exchange, ExchangeRequest, FrozenLease, LiveState, OpenEpoch, Versions
from protocol.policy import LimitsDocument, Part, QuotaSpec
from tests.simulation.faults import Event

if TYPE_CHECKING:
    from tests.simulation.world import World

CHANGED_FOR = 8  # steps
APPROVED_AFTER = 12  # steps: evidence may come between what was proposed and what is approved
KINDS = (ResolutionKind.WRITE_OFF, ResolutionKind.CHARGE, ResolutionKind.ESTIMATE)


# --- suspense ---------------------------------------------------------------------------------------------------------


def resolve(world: "World", event: Event) -> None:
    """One person proposes how the region's suspense, or its quarantine, ends; later another approves."""
    for name, lease in world.ledger.leases.items():
        if lease.region == event.region and (terms := _proposed(lease, KINDS[event.number])):
            approve = functools.partial(_approve, world, name, terms, f"{event.step} {name}")
            world.until[event.step + APPROVED_AFTER].append(approve)
            return


def _proposed(lease: Lease, kind: ResolutionKind) -> Terms | None:
    if lease.state is LeaseState.QUARANTINED:
        kind = ResolutionKind.UNATTRIBUTED
    terms = propose(lease, kind, lease.suspense // 2)
    return None if isinstance(terms, ResolutionRefusal) else terms


def _approve(world: "World", name: tuple[int, Key], terms: Terms, resolution: str) -> None:
    refusal, transaction = world.ledger.resolve(name, terms, resolution, world.clock.now())
    if refusal is None:
        world.commit(transaction)


def rebase(world: "World") -> None:
    """People hear the alarm of a ledger that lost data, and let each lane go on that has shown it."""
    for name in world.ledger.regressed():
        if name not in world.rebased:
            world.rebased.add(name)
            refusal, transaction = world.ledger.rebase(name, f"rebase {name}", world.clock.now())
            if refusal is None:
                world.coordinators.outcomes["rebased"] += 1
                world.commit(transaction)


# --- documents --------------------------------------------------------------------------------------------------------


def change_document(world: "World", event: Event) -> None:
    """Below running agents: a quota that is gone, one of another kind, one of which their plan gives nothing."""
    before = world.ledger.rows["limits"][0]
    if before.default_plan is None:  # else it is changed already
        quotas = [quota for quota in before.quotas if quota.name != "exports"] + _VARIANTS[event.number]
        names = {quota.name for quota in quotas}
        policies = [policy for policy in before.policies if policy.quota in names]
        plans = {"free": Part(), "pro": Part()}
        changed = LimitsDocument(quotas=quotas, policies=policies, plans=plans, default_plan="free")
        world.commit(world.ledger.put_limits(changed))
        world.until[event.step + CHANGED_FOR].append(lambda: world.commit(world.ledger.put_limits(before)))


_VARIANTS = msgspec.convert(
    (
        [],
        [{"name": "exports", "kind": "rate", "limit": "50/second, burst 60"}],
        [{"name": "exports", "kind": "allowance", "limit": {"pro": 50}, "period": "hour"}],
    ),
    tuple[list[QuotaSpec], ...],
)


# --- calls of strangers -----------------------------------------------------------------------------------------------


def strange_call(world: "World", event: Event) -> None:
    """Somebody with the region's token who is none of its agents. What is refused changes nothing."""
    calls = list(_strange_calls(world, event.region))
    kind, body = calls[event.number % len(calls)]
    transaction = world.coordinators.decide(kind, event.region, body)
    changed = {name.table for name in transaction.writes} - {"regressed"}  # what is kept for people changes nothing
    if changed or transaction.lost:
        world.bugs.append(f"a call that is refused would change something: {kind} {body!r}")


def _strange_calls(world: "World", region: str) -> Iterator[tuple[str, bytes]]:
    yield "exchange", _exchange(10**6, 0, 1, "nobody")
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


_QUOTA = "exports:tenant=acme"
_LANE = lane_of(_QUOTA, 2)
_MUCH = 10**9
_NEVER_GRANTED = FrozenLease(
    quota=_QUOTA, period="2026-11-18T09", granted=_MUCH, overage=_MUCH, consumed=_MUCH, returned=_MUCH
)


def _exchange(epoch: int, lane: int, seq: int, fingerprint: str, *leases: FrozenLease) -> bytes:
    frozen = msgspec.json.encode({"epoch": epoch, "lane": lane, "seq": seq, "leases": leases}).decode()
    exchanges = [Exchange(frozen=frozen, live=LiveState(wants=[], rates=[]))]
    return msgspec.json.encode(ExchangeRequest(fingerprint=fingerprint, versions=Versions(), exchanges=exchanges))
