"""Regions, people and time act on the ledger in any order, on a real Postgres, and its invariants hold after each step.

Correct rows (ledger_queries.py) may still result from a wrong step, so each step is checked as well
(ledger_invariants.py). Hypothesis draws the steps and shortens what fails. Each run is one transaction that is rolled
back, and each step is a savepoint in it, so the next run finds the same empty ledger. `LEASEHOLD_EXAMPLES` is the
number of runs.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import UUID

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from coordinator.access.rules.audit import Actor
from coordinator.adjustments.adjust import (
    ProposedAdjustment,
    approve_adjustment,
    propose_adjustment,
    withdraw_adjustment,
)
from coordinator.adjustments.read_adjustments import Adjustment
from coordinator.adjustments.rules import AdjustmentKind
from coordinator.adjustments.rules import AdjustmentTerms as Adjusting
from coordinator.database.connection import Connection
from coordinator.epochs.fence import fence_lost
from coordinator.epochs.open import open_epoch
from coordinator.epochs.rebind import rebind_epoch
from coordinator.epochs.retire import retire_epoch
from coordinator.exchange.expire_leases import expire_leases
from coordinator.exchange.parsing import parse_exchanges
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.exchange.transaction import Applied, apply_exchanges
from coordinator.limits.in_force import Documents
from coordinator.limits.put_limits import LimitsOutcome, put_limits
from coordinator.overrides.operations import add_override, delete_override
from coordinator.overrides.read_overrides import Override
from coordinator.periods.close import CloseRefused, CloseRequest, PeriodClose, close_period
from coordinator.periods.rules.closing import Missing, Obstacle
from coordinator.proof.verify import verify
from coordinator.regions.put_region import put_region
from coordinator.suspense.resolve import Proposal, Resolution, approve_resolution, propose_resolution
from coordinator.suspense.rules import ResolutionKind
from coordinator.usage.reconcile import read_settled
from protocol.identifiers import lane_of
from protocol.limits.document import LimitsDocument, PeriodKind
from protocol.messages import (
    EpochOpened,
    Exchange,
    ExchangeRequest,
    FrozenBatch,
    FrozenLease,
    LeaseDemand,
    LiveState,
    OpenEpoch,
    RebindEpoch,
)
from protocol.outcomes import EpochRefusal, ExchangeOutcome, GrantRefusal
from protocol.periods import Calendar, period_at, period_of
from tests.budget import size
from tests.conftest import restricted
from tests.integration.coordinator.state_machine.ledger_invariants import (
    BOOKED,
    Name,
    Seen,
    expected,
    faults_of_answer,
    faults_of_step,
    may_be_kept,
    see,
    set_aside,
    tenth,
)
from tests.integration.coordinator.state_machine.ledger_queries import everything, faults_of_books
from tests.integration.coordinator.state_machine.region import Lie, StoreIncarnation, Truth
from tests.simulation.world import document

EXAMPLES = size("LEASEHOLD_EXAMPLES", 15, short=4)
STEPS = 50
LANES = 2
TERMS = LeaseTerms(lease_ms=4_000)
REGIONS = ("us-east", "eu-west")
BEYOND = {"exports:tenant=acme": 0, "mails:tenant=acme": 100}  # the limit, by the cap
QUOTAS = {"exports:tenant=acme": PeriodKind.HOUR, "mails:tenant=acme": PeriodKind.DAY}
PEOPLE = [Actor(str(UUID(int=number))) for number in (1, 2)]
KINDS = [kind for kind in ResolutionKind if kind is not ResolutionKind.REBASE]  # which is of a lane
ENDS = [ResolutionKind.WRITE_OFF, ResolutionKind.CHARGE, ResolutionKind.ESTIMATE]
TOTALS = ("granted", "overage", "consumed", "returned", "outstanding", "suspense", "estimated", "written_off")
FINDS_A_FAULT = {Obstacle.UNBALANCED, Obstacle.OUTSTANDING, Obstacle.NOT_OVER}
LOST = {ExchangeOutcome.CONFLICT, ExchangeOutcome.STORE_REGRESSED}
_A_MOMENT = timedelta(seconds=1)
T = TypeVar("T")

regions = st.sampled_from(REGIONS)
quotas = st.sampled_from(sorted(QUOTAS))
people = st.sampled_from(PEOPLE)
units = st.integers(1, 40)
nth = st.integers(0, 5)  # an index into the rows of that moment, from the end


def promised(limit: int) -> LimitsDocument:
    """Return a quota whose soft cap equals its limit, so that people may debit more than is left."""
    base = document(limit)
    quotas = [replace(each, cap={"overage": 100}) if each.name == "mails" else each for each in base.quotas]
    return replace(base, quotas=quotas)


class Ledger(RuleBasedStateMachine):
    """The state machine; an instance is one run."""

    loop: asyncio.AbstractEventLoop
    connection: Connection

    def __init__(self) -> None:
        super().__init__()
        self.documents, self.truth = Documents(), Truth()
        self.now = datetime(2026, 11, 18, 12, 59, 50, tzinfo=UTC)
        self.incarnations: dict[str, list[StoreIncarnation]] = {region: [] for region in REGIONS}
        self.proposals: list[UUID] = []
        self.adjustments: list[UUID] = []
        self.overrides = 0
        self.nonces = 0
        self.most: Counter[str] = Counter()  # ever granted as overdraft of a quota
        self.whole = self.connection.transaction()
        self.run(self.whole.start())
        self.seen = self.run(see(self.connection))

    def teardown(self) -> None:
        self.run(self.whole.rollback())

    def run(self, operation: Awaitable[T]) -> T:
        return self.loop.run_until_complete(operation)

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, operation: Awaitable[T]) -> T:
        """Run a step as the coordinator does, in a transaction of its own."""

        async def step() -> T:
            async with self.connection.transaction():
                return await operation

        answer, before = self.run(step()), self.seen
        self.seen = self.run(see(self.connection))
        assert list(faults_of_step(before, self.seen, self.now)) == []
        return answer

    @contextmanager
    def nothing_changes(
        self, *, unless: Callable[[], object] = lambda: False, but: frozenset[str] = frozenset()
    ) -> Iterator[None]:
        before = self.run(everything(self.connection))
        yield
        if not unless():
            after = self.run(everything(self.connection))
            assert {name for name, held in after.items() if held != before[name]} <= but

    def refused_or(self, kind: type[T], operation: Awaitable[object]) -> T | None:
        """Return the answer if it is of this kind; any other is a refusal, and has changed nothing."""
        answer: list[object] = []
        with self.nothing_changes(unless=lambda: isinstance(answer[0], kind)):
            answer.append(self.step(operation))
        return answer[0] if isinstance(answer[0], kind) else None

    # --- the world ---------------------------------------------------------------------------------------------------

    @initialize(limit=st.sampled_from([60, 120]))
    def begin(self, limit: int) -> None:
        self.put_limits(limit)
        for region in REGIONS:
            self.put_region(region, "active")
            self.a_store_begins(region, kept=False, older=None)
        for _ in range(2):
            self.speak(set(REGIONS), waiting=10, demand_milli=5_000, is_heard=True)

    @rule(ms=st.sampled_from([10, 300, 1_500, 5_000, 30_000, 3_600_000]))
    def time_passes(self, ms: int) -> None:
        self.now += timedelta(milliseconds=ms)

    @rule(region=regions, quota=quotas, units=units)
    def spend(self, region: str, quota: str, units: int) -> None:
        self.incarnation(region).spend(self.key(quota), units, self.now)

    @rule(region=regions, quota=quotas, units=units)
    def spend_without_asking(self, region: str, quota: str, units: int) -> None:
        self.incarnation(region).spend_without_asking(self.key(quota), units)

    @rule(region=regions, quota=quotas, keep=st.integers(0, 5))
    def give_back(self, region: str, quota: str, keep: int) -> None:
        self.incarnation(region).give_back(keep, quota)

    @rule(region=regions)
    def back_up(self, region: str) -> None:
        self.incarnation(region).back_up()

    # --- epochs ------------------------------------------------------------------------------------------------------

    @rule(region=regions, kept=st.booleans(), older=st.none() | nth)
    def a_store_begins(self, region: str, kept: bool, older: int | None) -> None:
        """Replace the incarnation by another one, which may claim that its store kept all data of one of them."""
        before = self.incarnations[region][-1] if self.incarnations[region] else None
        known = self.incarnation(region, older) if before and older is not None else None
        is_whole = known is not None and (kept if known is before else not known.forgot)
        self.nonces += 1
        nonce, fingerprint = f"{self.nonces:032x}", f"{region}-{self.nonces}"
        previous = known.epoch if known else None
        request = OpenEpoch(nonce=nonce, fingerprint=fingerprint, previous=previous, lost_data=not is_whole)
        opened = self.refused_or(EpochOpened, open_epoch(self.connection, region, request, LANES, PEOPLE[0], self.now))
        if opened:
            assert self.status(region) != "down"
            if before:
                before.end(lost_data=not kept)
            self.incarnations[region].append(
                StoreIncarnation(region, opened.epoch, nonce, fingerprint, opened.lanes, self.truth)
            )

    @rule(region=regions, is_another=st.booleans())
    def an_epoch_is_asked_for_again(self, region: str, is_another: bool) -> None:
        incarnation = self.incarnation(region)
        request = OpenEpoch(nonce=incarnation.nonce, fingerprint=incarnation.fingerprint + "+" * is_another)
        with self.nothing_changes():
            answer = self.step(open_epoch(self.connection, region, request, LANES, PEOPLE[0], self.now))
        is_first = incarnation is self.incarnations[region][0]  # without a claim that the previous epoch is intact
        opened = EpochOpened(epoch=incarnation.epoch, lanes=LANES, is_whole=is_first)
        known = EpochRefusal.NONCE_OF_ANOTHER_INCARNATION if is_another else opened
        assert answer in (known, EpochRefusal.REGION_DOWN)

    @rule(region=regions, older=nth, is_behind=st.booleans(), is_stranger=st.booleans())
    def a_store_goes_on(self, region: str, older: int, is_behind: bool, is_stranger: bool) -> None:
        incarnation = self.incarnation(region, older)
        previous = "a stranger" if is_stranger else incarnation.fingerprint
        request = RebindEpoch(
            nonce=incarnation.nonce,
            previous=previous,
            fingerprint=f"{incarnation.fingerprint}+",
            seqs=[]
            if is_behind
            else [incarnation.memory.seqs[lane] + (lane in incarnation.memory.frozen) for lane in range(LANES)],
        )
        state, numbers = (
            self.state(incarnation),
            [self.seen.lanes[incarnation.epoch, lane]["last_seq"] for lane in range(LANES)],
        )
        rebind = rebind_epoch(self.connection, region, incarnation.epoch, request, PEOPLE[0], self.now)
        if self.refused_or(EpochOpened, rebind):
            assert state == "current"
            assert not is_stranger
            assert not (is_behind and any(numbers))
            incarnation.fingerprint = request.fingerprint

    @rule(region=regions, older=nth, by=people)
    def retire(self, region: str, older: int, by: Actor) -> None:
        epoch = self.incarnation(region, older).epoch
        self.step(retire_epoch(self.connection, epoch, "it is gone", by, self.now))
        with self.nothing_changes():
            self.step(retire_epoch(self.connection, epoch, "once more", by, self.now))

    # --- exchanges ---------------------------------------------------------------------------------------------------

    @rule(
        speakers=st.sets(regions, min_size=1),
        waiting=st.sampled_from([0, 1, 10, 30]),
        demand_milli=st.sampled_from([0, 5_000, 40_000]),
        is_heard=st.booleans(),
    )
    def speak(self, speakers: set[str], waiting: int, demand_milli: int, is_heard: bool) -> None:
        """Exchange in several regions at once, in one batch."""
        incarnations = [self.incarnation(region) for region in sorted(speakers)]
        calls = [self.call(incarnation, self.live(waiting, demand_milli)) for incarnation in incarnations]
        answers = self.deliver(calls)
        for incarnation, applied in zip(incarnations, answers, strict=True):
            self.hear(incarnation, applied, is_heard=is_heard)

    @rule(region=regions, lie=st.sampled_from(Lie), is_heard=st.booleans())
    def lie(self, region: str, lie: Lie, is_heard: bool) -> None:
        incarnation = self.incarnation(region)
        (applied,) = self.deliver([self.call(incarnation, LiveState(), lie)])
        self.hear(incarnation, applied, is_heard=is_heard)

    @rule(region=regions, older=nth, gives_back=st.booleans())
    def look_back(self, region: str, older: int, gives_back: bool) -> None:
        """Report the evidence of an ended epoch by the next incarnation, which may want more for it."""
        incarnation = self.incarnation(region, 1 + older)
        if gives_back and incarnation.is_over:
            incarnation.give_back()
        demands, fingerprint = self.live(waiting=10, demand_milli=5_000), self.incarnation(region).fingerprint
        call = self.call(incarnation, demands, fingerprint=fingerprint)
        (applied,) = self.deliver([call])
        if self.state(incarnation) == "fenced":
            for incoming, reply in zip(call.submissions, applied.response.replies, strict=True):
                refused = {want.quota: GrantRefusal.EPOCH_FENCED for want in incoming.demands}
                assert reply.outcome not in BOOKED or refused == {each.quota: each.refusal for each in reply.refused}
        self.hear(incarnation, applied, is_heard=True)

    @rule(region=regions, older=nth, which=nth)
    def say_again(self, region: str, older: int, which: int) -> None:
        incarnation = self.incarnation(region, older)
        if not incarnation.sent:
            return
        lane, frozen = incarnation.sent[-1 - which % len(incarnation.sent)]
        (applied,) = self.deliver([self.saying(incarnation, frozen)])
        assert applied.response.replies[0].lane == lane

    @rule(region=regions, lane=st.integers(0, LANES - 1))
    def say_what_no_store_says(self, region: str, lane: int) -> None:
        """Exchange in one batch with a malformed exchange of another region, which must delay nothing."""
        incarnation, other = (
            self.incarnation(region),
            self.incarnation(next(each for each in REGIONS if each != region)),
        )
        batch = self.batch(incarnation, lane)
        promised = [replace(lease, granted=lease.granted + 10_000) for lease in batch.leases]
        for said in (replace(batch, seq=batch.seq + 1), replace(batch, leases=promised)):
            calls = [self.saying(incarnation, msgspec.json.encode(said).decode()), self.call(other, LiveState())]
            self.deliver(calls)
        self.deliver([self.saying(incarnation, msgspec.json.encode(self.batch(other, lane)).decode())])
        exchange = Exchange(frozen=msgspec.json.encode(batch).decode())
        self.deliver([self.request(region, "another incarnation", [exchange])])

    @rule(
        region=regions,
        lane=st.integers(0, LANES - 1),
        forgot=st.sampled_from(["bytes", "consumed", "returned"]),
        is_denied=st.booleans(),
    )
    def go_back(self, region: str, lane: int, forgot: str, is_denied: bool) -> None:
        """Report a last number again with another content, or smaller totals than before: that ends the epoch.

        This holds whatever the next incarnation claims, for instance that nothing was lost.
        """
        incarnation = self.incarnation(region)
        batch = self.batch(incarnation, lane)
        less = [each for each in batch.leases if self.has_told(incarnation, each, forgot)]
        if batch.seq == 1 or self.state(incarnation) != "current" or not (forgot == "bytes" or less):
            return
        if forgot == "bytes":
            said = " " + msgspec.json.encode(replace(batch, seq=batch.seq - 1, leases=[])).decode()
        else:
            leases = [replace(each, **{forgot: 0}) for each in less]
            said = msgspec.json.encode(replace(batch, leases=leases)).decode()
        (applied,) = self.deliver([self.saying(incarnation, said)])
        assert applied.lost == [incarnation.epoch]
        if is_denied:
            self.a_store_begins(region, kept=True, older=0)

    def has_told(self, incarnation: StoreIncarnation, lease: FrozenLease, total: str) -> bool:
        known = self.seen.leases.get(Name(incarnation.epoch, Key(lease.quota, lease.period)))
        return total != "bytes" and known is not None and known[f"said_{total}"] > 0

    @rule(region=regions, quota=quotas, units=units)
    def work(self, region: str, quota: str, units: int) -> None:
        """Make the most frequent steps: spend and report."""
        self.incarnation(region).spend(self.key(quota), units, self.now)
        self.speak({region}, waiting=10, demand_milli=5_000, is_heard=True)

    @rule(region=regions, ms=st.sampled_from([4_200, 5_000]), returns=st.booleans())
    def be_cut_off(self, region: str, ms: int, returns: bool) -> None:
        """Silence a region until its leases expire, or almost that long; then let it report again."""
        self.now += timedelta(milliseconds=ms)
        self.expire()
        if returns:
            self.incarnation(region).give_back()
        self.speak({region}, waiting=10, demand_milli=5_000, is_heard=True)

    @rule(
        region=regions,
        quota=quotas,
        units=units,
        end=st.tuples(st.sampled_from(ENDS), st.integers(0, 20)),
        lie=st.none() | st.sampled_from(Lie),
    )
    def be_judged_before_it_is_heard_or_after(
        self, region: str, quota: str, units: int, end: tuple[ResolutionKind, int], lie: Lie | None
    ) -> None:
        """Let people end the suspense of its leases, and its report come a moment later, or earlier.

        The result must be the same, since evidence replaces an estimate.
        """
        incarnation = self.incarnation(region)
        incarnation.spend(self.key(quota), units, self.now)
        self.now += timedelta(milliseconds=5_000)
        self.expire()
        proposals = [
            self.proposed(Name(row[0], Key(*row[1:])), *end) for row in self.run(self.connection.fetch(_TO_JUDGE))
        ]
        call = self.call(incarnation, LiveState(), lie)

        def judge() -> None:
            for id_ in filter(None, proposals):
                self.step(approve_resolution(self.connection, id_, PEOPLE[1], self.now))

        def hear() -> None:
            self.deliver([call])

        ends = [self.tried(judge, hear), self.tried(hear, judge)]
        both = ends[0].keys() & ends[1].keys()
        assert {name: ends[0][name] for name in both} == {name: ends[1][name] for name in both}
        judge()
        self.speak({region}, waiting=10, demand_milli=5_000, is_heard=True)

    @rule(region=regions, quota=quotas, units=units)
    def the_ledger_is_put_back(self, region: str, quota: str, units: int) -> None:
        """Restore the ledger, which loses grants and reports; people resume each lane, and no usage is lost."""
        incarnation = self.incarnation(region)
        if self.state(incarnation) != "current" or self.is_shown_behind(incarnation):
            return
        backup, before = self.connection.transaction(), self.quarantined()
        self.run(backup.start())
        for _ in range(2):
            self.work(region, quota, units)
        self.run(backup.rollback())
        self.seen = self.run(see(self.connection))
        incarnation.spend(self.key(quota), units, self.now)
        self.speak({region}, waiting=0, demand_milli=0, is_heard=True)
        for lane in range(LANES):
            proposal = Proposal(incarnation.epoch, lane, ResolutionKind.REBASE, 0, "a backup")
            found = self.refused_or(Resolution, propose_resolution(self.connection, proposal, PEOPLE[0], self.now))
            if found:
                self.step(approve_resolution(self.connection, found.id, PEOPLE[1], self.now))
        self.speak({region}, waiting=0, demand_milli=0, is_heard=True)
        assert (incarnation.memory.frozen, self.quarantined() - before) == ({}, set())

    def is_shown_behind(self, incarnation: StoreIncarnation) -> bool:
        """Show the loss by a batch of a future number; a second batch of that number would not be kept."""
        whole = [kept for kept in self.seen.kept if kept.epoch == incarnation.epoch and not kept.quota]
        return any(kept.seq > self.seen.lanes[kept.epoch, kept.lane]["last_seq"] for kept in whole)

    def quarantined(self) -> set[Name]:
        return {name for name, lease in self.seen.leases.items() if lease["state"] == "quarantined"}

    def proposed(self, name: Name, kind: ResolutionKind, charged: int) -> UUID | None:
        proposal = Proposal(*name, kind, charged, "so it was")
        found = self.refused_or(Resolution, propose_resolution(self.connection, proposal, PEOPLE[0], self.now))
        return found.id if found else None

    def tried(self, *steps: Callable[[], None]) -> dict[Name, list[int]]:
        """Return the leases after these steps, which are rolled back; quarantined ones are left out."""
        attempt = self.connection.transaction()
        self.run(attempt.start())
        try:
            for step in steps:
                step()
            leases = self.seen.leases.items()
            return {n: [row[column] for column in TOTALS] for n, row in leases if row["state"] != "quarantined"}
        finally:
            self.run(attempt.rollback())
            self.seen = self.run(see(self.connection))

    # --- people and background jobs ----------------------------------------------------------------------------------

    @rule()
    def expire(self) -> None:
        before = self.seen
        self.step(expire_leases(self.connection, self.now))
        self.who_may_still_spend_is_waited_for(set_aside(before, self.seen))
        with self.nothing_changes():
            self.step(expire_leases(self.connection, self.now))

    @rule(which=nth, kind=st.sampled_from(KINDS), charged=st.integers(0, 20), by=people)
    def propose(self, which: int, kind: ResolutionKind, charged: int, by: Actor) -> None:
        leases = self.run(self.connection.fetch(_TO_JUDGE))
        if leases:
            epoch, quota, period = leases[which % len(leases)]
            proposal = Proposal(epoch, Key(quota, period), kind, charged, "so it was")
            found = self.refused_or(Resolution, propose_resolution(self.connection, proposal, by, self.now))
            self.proposals += [found.id] if found else []

    @rule(which=nth, by=people)
    def approve(self, which: int, by: Actor) -> None:
        """Run the jobs twice: the second run must do nothing."""
        if self.proposals:
            id_ = self.proposals[-1 - which % len(self.proposals)]
            found = self.refused_or(Resolution, approve_resolution(self.connection, id_, by, self.now))
            assert found is None or found.approved_by != found.proposed_by
            with self.nothing_changes():
                self.step(approve_resolution(self.connection, id_, by, self.now))

    @rule(
        quota=quotas,
        is_of_before=st.booleans(),
        kind=st.sampled_from(AdjustmentKind),
        units=st.sampled_from([1, 20, 90]),
        by=people,
    )
    def propose_to_adjust(self, quota: str, is_of_before: bool, kind: AdjustmentKind, units: int, by: Actor) -> None:
        """Close the current period, or the previous one, which may be closed already. Repeating it changes nothing."""
        key = self.key(quota)
        if is_of_before:
            key = Key(quota, period_at(period_of(key.period).calendar, period_of(key.period).starts_at - _A_MOMENT).id)
        id_ = UUID(int=2**64 + len(self.adjustments))
        wanted = ProposedAdjustment(id_, Adjusting(key, kind, units), "an outage", "a ticket")

        def propose() -> Adjustment | None:
            return self.refused_or(
                Adjustment, propose_adjustment(self.connection, self.documents, wanted, by, self.now)
            )

        found = propose()
        if found:
            self.adjustments.append(id_)
            with self.nothing_changes():
                assert propose() == found

    @rule(which=nth, by=people, is_withdrawn=st.sampled_from([False, False, False, True]))
    def end_an_adjustment(self, which: int, by: Actor, is_withdrawn: bool) -> None:
        """Adjust once, by two people, unless withdrawn.

        Only free units are debited, and written off usage is billed no more.
        """
        if not self.adjustments:
            return
        id_ = self.adjustments[-1 - which % len(self.adjustments)]
        billed = self.run(self.connection.fetchval(_BILLED, id_))

        async def end() -> object:
            if is_withdrawn:
                return await withdraw_adjustment(self.connection, id_, by, self.now)
            return await approve_adjustment(self.connection, self.documents, id_, by, self.now)

        before = self.seen
        found = self.refused_or(Adjustment, end())
        with self.nothing_changes():
            self.step(end())
        if found and not is_withdrawn and self.seen.pools != before.pools:
            pool = self.seen.pools[Key(found.quota, str(found.booked_in))]
            assert found.approved_by != found.proposed_by
            assert found.kind is not AdjustmentKind.DEBIT or pool["unallocated"] >= pool["overage"]
            assert found.kind is not AdjustmentKind.WRITE_OFF or found.units <= billed

    @rule(quota=quotas, is_beyond=st.booleans())
    def debit_all_that_is_left(self, quota: str, is_beyond: bool) -> None:
        """Debit also units that exist only because of the soft cap."""
        pool = self.seen.pools.get(self.key(quota))
        left = pool["unallocated"] - pool["overage"] if pool else 0
        units = left if pool is None or is_beyond else min(left, pool["spendable"])
        if units > 0:
            self.propose_to_adjust(quota, is_of_before=False, kind=AdjustmentKind.DEBIT, units=units, by=PEOPLE[0])
            self.end_an_adjustment(0, by=PEOPLE[1], is_withdrawn=False)

    @rule(quota=quotas, units=units, carries=st.booleans())
    def a_period_ends(self, quota: str, units: int, carries: bool) -> None:
        """Let the leases of a period expire and close it, unless people must act first; then let regions report their
        usage of it.
        """
        period = self.key(quota).period
        if not self.all_of_it_is_known(period):
            return
        for region in REGIONS:
            self.incarnation(region).spend(self.key(quota), units, self.now)
        self.now = period_of(period).ends_at + timedelta(milliseconds=5_000)
        self.expire()
        closed = self.refused_or(PeriodClose, self.closing(period, carries))
        if closed:
            with self.nothing_changes():
                self.step(self.closing(period, carries))
        self.speak(set(REGIONS), waiting=0, demand_milli=0, is_heard=True)

    async def closing(self, period: str, carries: bool) -> PeriodClose | CloseRefused | None:
        request = CloseRequest(PEOPLE[0], carry_suspense=carries)
        settled = await read_settled(self.connection, period)
        answer = await close_period(self.connection, period, request, settled, timedelta(0), self.now)
        assert answer is None or list(_faults(answer.missing)) == []
        return answer

    def all_of_it_is_known(self, period: str) -> bool:
        """Use a lease of the ledger, without a check."""
        incarnations = [incarnation for each in self.incarnations.values() for incarnation in each]
        names = {
            Name(incarnation.epoch, key)
            for incarnation in incarnations
            for key in incarnation.memory.held
            if key.period == period
        }
        return names <= self.seen.leases.keys()

    @rule(limit=st.sampled_from([5, 60, 120, 300]))
    def put_limits(self, limit: int) -> None:
        self.most |= Counter({"exports:tenant=acme": limit, "mails:tenant=acme": 40 + limit // 2})
        put = put_limits(self.connection, promised(limit), lambda _: True, None, self.now)
        assert self.step(put).outcome in (LimitsOutcome.APPLIED, LimitsOutcome.UNCHANGED)

    @rule(limit=st.sampled_from([5, 60, 120]))
    def be_too_late_with_limits(self, limit: int) -> None:
        with self.nothing_changes():
            self.step(put_limits(self.connection, promised(limit), lambda _: False, None, self.now))

    @rule(region=regions, status=st.sampled_from(["active", "active", "draining", "down"]))
    def put_region(self, region: str, status: str) -> None:
        self.step(put_region(self.connection, region, 1, status, None, self.now))

    @rule(limit=st.sampled_from([10, 200, 500]), is_of_one=st.booleans(), seconds=st.sampled_from([1, 20, 4_000]))
    def override(self, limit: int, is_of_one: bool, seconds: int) -> None:
        self.overrides += 1
        self.most |= Counter({"exports:tenant=acme": limit})
        ends_at = self.now + timedelta(seconds=seconds)
        wanted = Override(
            UUID(int=self.overrides),
            "exports",
            {"tenant": "acme"} if is_of_one else {},
            limit,
            self.now,
            ends_at,
            "a test",
            self.now,
            "test",
        )
        self.step(add_override(self.connection, wanted, PEOPLE[0], self.now))
        with self.nothing_changes():
            self.step(add_override(self.connection, wanted, PEOPLE[0], self.now))

    @rule(which=nth)
    def end_an_override(self, which: int) -> None:
        if self.overrides:
            id_ = UUID(int=1 + which % self.overrides)
            self.step(delete_override(self.connection, id_, PEOPLE[0], self.now))
            with self.nothing_changes():
                self.step(delete_override(self.connection, id_, PEOPLE[0], self.now))

    # --- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.run(faults_of_books(self.connection)) == []

    @invariant()
    def nothing_is_funded_that_nobody_promised(self) -> None:
        """Grants of a ledger that lost them are excepted, because they are missing from it."""
        pools = self.seen.pools.items()
        assert [key for key, pool in pools if pool["funded"] > self.most[key.quota] + pool["rebased"]] == []
        assert [key for key, pool in pools if pool["soft_cap_extension"] > BEYOND[key.quota]] == []

    @invariant()
    def nothing_is_sold_twice(self) -> None:
        """Compare all admissions of regions on their leases, reported or not, lost or not."""
        pools = self.seen.pools
        there = {key: pool["funded"] + pool["soft_cap_extension"] + pool["credited"] for key, pool in pools.items()}
        over = {key: units for key, units in self.truth.admitted.items() if units > there.get(key, 0)}
        assert over == {}, there

    @invariant()
    def nothing_is_booked_twice(self) -> None:
        booked = {(row[0], Key(*row[1:3])): row[3] for row in self.run(self.connection.fetch(_CONSUMED))}
        assert {name: units for name, units in booked.items() if units > self.truth.done[name]} == {}

    @rule()
    def verify_all(self) -> None:
        """Recompute everything from the chains."""
        with self.nothing_changes():
            verification = self.step(verify(self.connection, self.now))
        assert verification.intact, verification.fault

    def who_may_still_spend_is_waited_for(self, names: list[Name]) -> None:
        """Allow a tenth of a lease more, because clocks drift."""
        incarnations = {incarnation.epoch: incarnation for each in self.incarnations.values() for incarnation in each}
        for name in names:
            held = incarnations[name.epoch].memory.held.get(name.key)
            until = held.expires_at if held and not incarnations[name.epoch].is_over else None
            assert until is None or until + tenth(TERMS.lease_ms) <= self.now, name

    # --- messages ----------------------------------------------------------------------------------------------------

    def incarnation(self, region: str, older: int = 0) -> StoreIncarnation:
        incarnations = self.incarnations[region]
        return incarnations[-1 - older % len(incarnations)]

    def key(self, quota: str) -> Key:
        return Key(quota, period_at(Calendar(QUOTAS[quota]), self.now).id)

    def state(self, incarnation: StoreIncarnation) -> object:
        return self.run(self.connection.fetchval("SELECT state FROM region_epoch WHERE epoch = $1", incarnation.epoch))

    def status(self, region: str) -> object:
        return self.run(self.connection.fetchval("SELECT status FROM region WHERE name = $1", region))

    def live(self, waiting: int, demand_milli: int) -> LiveState:
        """Return the wants of all quotas; `call` gives each lane its own."""
        return LiveState(
            demands=[LeaseDemand(quota=quota, demand_milli=demand_milli, waiting=waiting) for quota in QUOTAS]
        )

    def call(
        self, incarnation: StoreIncarnation, live: LiveState, lie: Lie | None = None, fingerprint: str | None = None
    ) -> ExchangeCall:
        exchanges = [
            Exchange(
                frozen=incarnation.freeze(lane, self.now, lie),
                live=LiveState(demands=[want for want in live.demands if lane_of(want.quota, LANES) == lane]),
            )
            for lane in range(LANES)
        ]
        return self.request(incarnation.region, fingerprint or incarnation.fingerprint, exchanges)

    def saying(self, incarnation: StoreIncarnation, frozen: str) -> ExchangeCall:
        return self.request(
            incarnation.region, self.incarnation(incarnation.region).fingerprint, [Exchange(frozen=frozen)]
        )

    def request(self, region: str, fingerprint: str, exchanges: list[Exchange]) -> ExchangeCall:
        request = ExchangeRequest(fingerprint=fingerprint, exchanges=exchanges)
        return parse_exchanges(region, msgspec.json.encode(request))

    def batch(self, incarnation: StoreIncarnation, lane: int) -> FrozenBatch:
        """Return its next report, if the coordinator is not ahead of it."""
        last_seq = self.run(self.connection.fetchval(_LAST_SEQ, incarnation.epoch, lane))
        leases = [
            replace(lease, lines=[])
            for lease in msgspec.json.decode(incarnation.freeze(lane, self.now), type=FrozenBatch).leases
        ]
        return FrozenBatch(epoch=incarnation.epoch, lane=lane, seq=last_seq + 1, leases=leases)

    def deliver(self, calls: Sequence[ExchangeCall]) -> list[Applied]:
        answers: list[Applied] = []
        before = self.seen
        # Evidence of a ledger's data loss is kept for people, and has no other effect.
        with self.nothing_changes(unless=lambda: _outcomes(answers) & BOOKED, but=frozenset({"quarantine"})):
            answers += self.step(apply_exchanges(self.connection, self.documents, calls, TERMS, self.now))
        self.each_is_answered_as_it_must_be(calls, answers, before)
        for call, applied in zip(calls, answers, strict=True):
            self.step(fence_lost(self.connection, call.region, applied.lost, self.now))
            assert {self.seen.lanes[epoch, 0]["state"] for epoch in applied.lost} <= {"fenced", "retired"}
            for incarnation in self.incarnations[call.region]:
                incarnation.is_over |= incarnation.epoch in applied.lost
        return answers

    def each_is_answered_as_it_must_be(
        self, calls: Sequence[ExchangeCall], answers: list[Applied], before: Seen
    ) -> None:
        may_be = set(before.kept)
        for call, applied in zip(calls, answers, strict=True):
            for incoming, reply in zip(call.submissions, applied.response.replies, strict=True):
                assert reply.outcome is expected(call, incoming, before)
                assert reply.outcome not in LOST or incoming.batch.epoch in applied.lost
                answer = faults_of_answer(self.connection, incoming, reply, before, self.seen)
                assert self.run(answer) == []
                may_be |= may_be_kept(incoming, reply)
        assert self.seen.kept.keys() <= may_be

    def hear(self, incarnation: StoreIncarnation, applied: Applied, *, is_heard: bool) -> None:
        if not is_heard:
            return
        for reply in applied.response.replies:
            incarnation.take_in(reply, self.now)
        if applied.response.drain:
            incarnation.give_back()


def _outcomes(answers: Sequence[Applied]) -> set[ExchangeOutcome]:
    return {reply.outcome for applied in answers for reply in applied.response.replies}


def _faults(missing: Sequence[Missing]) -> Iterator[Missing]:
    """Return the blockers of a close that need no people; drift is expected of quarantined leases."""
    quarantined = {(each.quota, each.epoch) for each in missing if each.what is Obstacle.QUARANTINE}
    for each in missing:
        if each.what in FINDS_A_FAULT and (each.quota, each.epoch) not in quarantined:
            yield each


_CONSUMED = """
SELECT epoch, quota, period, sum(consumed) FROM (SELECT epoch, quota, period, consumed FROM lease
    UNION ALL SELECT epoch, quota, charge_period, consumed FROM correction) AS booked GROUP BY 1, 2, 3
"""
# The units that each adjustment is about, by the transfers: usage and estimates, less earlier write-offs.
_BILLED = """
SELECT coalesce(sum(CASE WHEN dst IN ('consumed', 'estimated') THEN moved.units ELSE 0 END
    - CASE WHEN src = 'estimated' OR cause = 'replaces_estimate' THEN moved.units ELSE 0 END
    - CASE WHEN src = 'adjustment' AND dst = 'written_off' THEN moved.units ELSE 0 END), 0)::bigint
FROM adjustment LEFT JOIN transfer AS moved ON (moved.quota, charge_period) = (adjustment.quota, adjustment.period)
WHERE adjustment.id = $1
"""
_LAST_SEQ = "SELECT last_seq FROM lane WHERE epoch = $1 AND lane = $2"
_TO_JUDGE = """
SELECT epoch, quota, period FROM lease WHERE suspense > 0 OR state = 'quarantined'
UNION SELECT epoch, quota, charge_period FROM correction WHERE suspense_carried > 0 OR quarantined ORDER BY 1, 3, 2
"""


@pytest.fixture
def ledger(database: str) -> Iterator[type[Ledger]]:
    """Make runs one after the other on one connection, with the coordinator's own role."""
    with asyncio.Runner() as runner:
        Ledger.loop, Ledger.connection = runner.get_loop(), runner.run(asyncpg.connect(restricted(database)))
        yield Ledger
        runner.run(Ledger.connection.close())


def test_no_sequence_of_steps_breaks_an_invariant(ledger: type[Ledger]) -> None:
    run_state_machine_as_test(
        ledger,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
