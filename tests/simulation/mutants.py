"""Mutants: each removes one guard, and the simulation must catch it. If it does not, the guard is not needed or not
tested.

A mutant is a function that takes the world and yields patches of real modules or edits of the Lua scripts.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from coordinator.adjustments.rules import AdjustmentState
from coordinator.clock import ComparedClock
from coordinator.exchange import parsing as frozen_module
from coordinator.exchange.rules import (
    allocation,
    balances,
    decision,
    granting,
    locked,
    posting,
    replies,
    settlement,
    submissions,
)
from coordinator.exchange.rules.allocation import grant_units
from coordinator.exchange.rules.balances import Account, Cause
from coordinator.exchange.rules.plausibility import ClaimBounds
from coordinator.exchange.rules.posting import drain_lines, movement, post, split
from coordinator.exchange.rules.replies import lease_reply
from coordinator.exchange.rules.settlement import EpochState, SettlementVerdict, judge_number
from coordinator.exchange.rules.submissions import Submission
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.periods.rules import carry_over, closing
from coordinator.periods.rules.closing import Obstacle
from coordinator.rebalancing.rules import division
from coordinator.suspense import rules as suspense_rules
from protocol.lease import LeaseState
from protocol.limits.document import Mode
from protocol.messages import EpochOpened, OpenEpoch, body_hash
from protocol.outcomes import ExchangeOutcome
from regional_agent.admission.policies import CompiledPolicy
from regional_agent.leasing.coordinator_client import CoordinatorUnavailable
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.exchange_loop import ExchangeLoop
from regional_agent.leasing.shutdown import Shutdown
from regional_agent.store import connection, durability
from regional_agent.store.connection import StoreConnection
from regional_agent.store.durability import InReplicas, read_links
from regional_agent.store_outage import booking
from regional_agent.store_outage.booking import JournalBooking
from regional_agent.store_outage.journal import Journal
from tests.simulation.faults import OF_REPLICAS
from tests.simulation.lua_edits import edit_lua
from tests.simulation.simulated import ledger_model
from tests.simulation.simulated.disks import VirtualSegment
from tests.simulation.simulated.ledger_model import LedgerModel, Name, Transaction
from tests.simulation.simulated.network import Coordinators
from tests.simulation.world import World

Mutant = Callable[[World], contextlib.AbstractContextManager[None]]
Patches = Callable[[World], Iterator[Any]]
MUTANTS: dict[str, Mutant] = {}
DRAWN_FROM: dict[str, tuple[str, ...]] = {}  # the kinds of events of a mutant's runs; all kinds by default


def mutant(patches: Patches) -> Patches:
    """Register a mutant under its function's name; it yields the patches that make it."""

    @contextlib.contextmanager
    def made(world: World) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in patches(world):
                stack.enter_context(each)
            yield

    MUTANTS[patches.__name__] = made
    return patches


def drawn_from(*kinds: str) -> Callable[[Patches], Patches]:
    """Draw the runs of a mutant from these kinds of events, where its guard matters only in rare histories."""

    def named(patches: Patches) -> Patches:
        DRAWN_FROM[patches.__name__] = kinds
        return patches

    return named


# --- required by the design -------------------------------------------------------------------------------------------


@mutant
def grants_as_deltas(world: World) -> Iterator[Any]:
    """A reply says what was granted now, and the region adds it to its total."""
    real = lease_reply

    def only_now(lease: Any, *rest: Any, **named: Any) -> Any:
        reply = real(lease, *rest, **named)
        before = told.get((lease.epoch, lease.key), 0)
        told[lease.epoch, lease.key] = lease.granted
        return msgspec.structs.replace(reply, granted=max(0, lease.granted - before))

    told: dict[Any, int] = {}
    yield patch.object(replies, "lease_reply", only_now)
    yield edit_lua(
        world,
        ("settle", "granted, overage = tonumber(ARGV[at + 2]),", "granted, overage = ARGV[at + 2] + (f[1] or 0),"),
    )


@mutant
def returns_as_deltas(world: World) -> Iterator[Any]:
    """Each reported return is booked as a new one."""
    real = settlement._settle_lease

    def settle_lease(report: Any, frozen: Any, pool: Any, lease: Any, *_: Any, **own: Any) -> Any:
        again = msgspec.structs.replace(frozen, returned=lease.returned + frozen.returned)
        return real(report, again, pool, lease)

    yield patch.object(settlement, "_settle_lease", settle_lease)


@mutant
def tell_before_stop(world: World) -> Iterator[Any]:
    """Returned units may still be spent until the receipt arrives."""
    yield edit_lua(
        world,
        (
            "algorithms/allowance",
            "- consumed - number(f[5]) - number(f[6])",
            "- consumed - number(redis.call('HGET', KEYS[key], 'stopped')) - number(f[6])",
        ),
        (
            "settle",
            "answer[#answer + 1] = install(KEYS[2 * i + 2], ARGV[argument_of(i)], argument_of(i))",
            "local key = KEYS[2 * i + 2]\nanswer[#answer + 1] = install(key, ARGV[argument_of(i)], argument_of(i))\n"
            "redis.call('HSET', key, 'stopped', redis.call('HGET', key, 'returned') or 0)",
        ),
    )


@mutant
def reclaimed_from_the_last_report(world: World) -> Iterator[Any]:
    """A lease that expired gives back what its last report left of it."""
    real = LedgerModel.expire_leases

    def reclaim(self: LedgerModel, now: Any) -> Transaction:
        transaction = real(self, now)
        for name, lease in list(transaction.writes.items()):
            if name.table == "lease" and lease.suspense:
                pool = transaction.writes[Name("pool", lease.key)]
                entry = movement(lease, "reclaimed")
                post(entry, pool, lease, Account.SUSPENSE, Account.UNALLOCATED, lease.suspense, Cause.RETURNED)
        return transaction

    yield patch.object(LedgerModel, "expire_leases", reclaim)


@mutant
def same_epoch_after_a_store_loss(world: World) -> Iterator[Any]:
    """The coordinator gives a new incarnation of the store the epoch that the region had."""
    real = LedgerModel.open_epoch

    def same(self: LedgerModel, region: str, request: Any, now: Any) -> Any:
        for number, epoch in self.epochs.items():
            if epoch.region == region and epoch.state is EpochState.CURRENT:
                changed = epoch._replace(fingerprint=request.fingerprint, nonce=request.nonce)
                return EpochOpened(epoch=number, lanes=epoch.lanes), Transaction({Name("epoch", number): changed})
        return real(self, region, request, now)

    yield patch.object(LedgerModel, "open_epoch", same)


@mutant
def final_total_read_before_the_fence(world: World) -> Iterator[Any]:
    """An ended epoch is settled by its last report before the end."""
    yield edit_lua(
        world,
        (
            "freeze",
            "local by_period, taken, is_complete",
            "local read = redis.call('HGET', lease, 'consumed')\n"
            "if read then redis.call('HSET', lease, 'read', read) end\n"
            "local by_period, taken, is_complete",
        ),
        (
            "return_units",
            "local units = return_current()",
            "local read = fence[2] ~= ARGV[2] and redis.call('HGET', KEYS[2], 'read')\n"
            "if read then redis.call('HSET', KEYS[2], 'consumed', read) redis.call('DEL', KEYS[4]) end\n"
            "local units = return_current()",
        ),
    )


@mutant
def uncommitted_state_across_a_fail_over(world: World) -> Iterator[Any]:
    """A commit does not wait for the replica: a reply may be lost with the primary."""
    yield patch.object(Coordinators, "fail_over", lambda self, commits: self.ledger.lose(commits))


@mutant
def period_missing_from_a_message(world: World) -> Iterator[Any]:
    """The store takes a lease of the next period for more of the one it has."""
    yield edit_lua(
        world,
        (
            "settle",
            "local period, is_current = ARGV[at + 1],",
            "ARGV[at + 1] = redis.call('HGET', key, 'period') or ARGV[at + 1]\n"
            "local period, is_current = ARGV[at + 1],",
        ),
    )


# --- epochs, sequence numbers and receipts ---------------------------------------------------------------------------


@mutant
def fingerprint_not_checked(world: World) -> Iterator[Any]:
    """A store keeps its epoch in every incarnation, and the coordinator does not compare fingerprints either."""
    real = judge_number
    yield edit_lua(
        world,
        (
            "begin_incarnation",
            "local before = fence()",
            "if fence()[3] then redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1]) end\nlocal before = fence()",
        ),
    )
    yield patch.object(
        submissions,
        "judge_number",
        lambda lane, fingerprint, *rest: real(lane, lane.fingerprint if lane else fingerprint, *rest),
    )


@mutant
def old_nonce_brings_back_the_epoch(world: World) -> Iterator[Any]:
    """A new incarnation keeps the nonce of the one before, and the coordinator knows it again."""

    def again(number: int, epoch: Any, region: str, request: Any) -> EpochOpened:
        world.ledger.epochs[number] = epoch._replace(fingerprint=request.fingerprint)
        return EpochOpened(epoch=number, lanes=epoch.lanes)

    yield edit_lua(world, ("begin_incarnation", "'nonce', ARGV[2],", "'nonce', before[2] or ARGV[2],"))
    yield patch.object(LedgerModel, "again", staticmethod(again))


@mutant
def seq_not_checked(world: World) -> Iterator[Any]:
    """A batch is applied whatever its sequence number."""
    yield patch.object(settlement, "_judge_seq", lambda lane, seq, body: SettlementVerdict(ExchangeOutcome.APPLIED))


@mutant
def live_fields_in_the_hash(world: World) -> Iterator[Any]:
    """The hash of an exchange includes its demand, which changes."""
    real = frozen_module._parse_exchange

    def parse(raw: bytes, lanes: Any) -> Any:
        parsed = real(raw, lanes)
        return parsed._replace(body_hash=body_hash(raw.decode())) if isinstance(parsed, Submission) else parsed

    yield patch.object(frozen_module, "_parse_exchange", parse)


@mutant
def two_batches_in_flight(world: World) -> Iterator[Any]:
    """A lane freezes a new batch while one waits for its receipt."""
    yield edit_lua(
        world,
        (
            "freeze",
            "if lane[2] then return",
            "if lane[2] and #ARGV >= 5 then\n"
            "lane[1] = lane[3]\n"
            "redis.call('HSET', KEYS[2], 'seq', lane[3])\n"
            "elseif lane[2] then return",
        ),
    )


@mutant
def evidence_fenced_with_the_grants(world: World) -> Iterator[Any]:
    """Reports of an ended epoch are refused."""
    real = judge_number

    def deaf(lane: Any, *rest: Any) -> SettlementVerdict:
        is_over = lane is not None and lane.epoch_state is EpochState.FENCED
        return SettlementVerdict(ExchangeOutcome.UNKNOWN_EPOCH) if is_over else real(lane, *rest)

    yield patch.object(submissions, "judge_number", deaf)


@mutant
def returns_of_lost_data_accepted(world: World) -> Iterator[Any]:
    """Returns of a store that lost data are granted to others, though the units may have been spent."""
    yield patch.object(settlement, "RETURNS_COUNT", frozenset(LeaseState))


@mutant
def suspense_put_back_into_the_pool(world: World) -> Iterator[Any]:
    """Unaccounted units of a lost epoch are granted to others."""
    real = LedgerModel.open_epoch

    def open_epoch(self: LedgerModel, region: str, request: Any, now: Any) -> Any:
        opened, transaction = real(self, region, request, now)
        for name, lease in list(transaction.writes.items()):
            if name.table == "lease" and lease.outstanding:
                pool = transaction.writes.setdefault(Name("pool", lease.key), copy(self.pools[lease.key]))
                entry = movement(lease, "freed")
                post(entry, pool, lease, Account.OUTSTANDING, Account.UNALLOCATED, lease.outstanding, Cause.RETURNED)
        return opened, transaction

    yield patch.object(LedgerModel, "open_epoch", open_epoch)


@mutant
def estimated_booked_as_consumed(world: World) -> Iterator[Any]:
    """An estimate counts as consumed, and is booked again when evidence arrives."""
    real = post

    def booked(entry: Any, pool: Any, lease: Any, src: Any, dst: Any, *rest: Any) -> None:
        real(entry, pool, lease, src, Account.CONSUMED if dst is Account.ESTIMATED else dst, *rest)

    yield patch.object(suspense_rules, "post", booked)


@mutant
def expired_lease_granted_before_it_returned(world: World) -> Iterator[Any]:
    """An expired lease is valid again, with its unaccounted units, as soon as its region is back."""
    real = settlement._settle_lease

    def settle_lease(report: Any, frozen: Any, pool: Any, lease: Any, *_: Any, **own: Any) -> Any:
        reason = real(report, frozen, pool, lease)
        if lease.state is LeaseState.EXPIRED:
            post(report, pool, lease, Account.SUSPENSE, Account.UNALLOCATED, lease.suspense, Cause.RETURNED)
            lease.state = LeaseState.ACTIVE
        return reason

    yield patch.object(settlement, "_settle_lease", settle_lease)


@mutant
def expiry_counted_from_the_reply(world: World) -> Iterator[Any]:
    """The region counts a lease's time from the reply, not from the request."""
    yield edit_lua(world, ("settle", "partition.forget()", "partition.forget()\nsent = clock.mono"))


@mutant
def commit_after_the_reply(world: World) -> Iterator[Any]:
    """The reply is sent before the commit: a coordinator that dies in between has promised what is not booked."""

    def conclude(self: Coordinators, transaction: Transaction) -> bool:
        if self.dies_before_commit:
            self.dies_before_commit -= 1
            return True
        self.ledger.commit(transaction)
        return True

    yield patch.object(Coordinators, "conclude", conclude)


@mutant
def accounting_keys_with_a_ttl(world: World) -> Iterator[Any]:
    """A region's counts expire when they are not used for a while."""
    yield edit_lua(
        world,
        (
            "algorithms/allowance",
            "redis.call('HINCRBY', KEYS[key], 'consumed', units)",
            "redis.call('HINCRBY', KEYS[key], 'consumed', units)\nredis.call('PEXPIRE', KEYS[key], 3000)",
        ),
    )


@mutant
def no_report_on_sigterm(world: World) -> Iterator[Any]:
    """An agent stops without a final report."""

    async def silent(self: Shutdown, *, return_unspent: bool) -> None:
        return

    yield patch.object(Shutdown, "finish", silent)


# --- stores, grants and periods ---------------------------------------------------------------------------------------


@mutant
def every_store_is_exempt(world: World) -> Iterator[Any]:
    """A store that may have lost its last writes continues in its epoch."""

    async def is_exempt(self: StoreConnection) -> bool:
        return True

    yield patch.object(StoreConnection, "is_exempt", is_exempt)


@mutant
def a_store_goes_on_without_its_numbers(world: World) -> Iterator[Any]:
    """A backup that replaces a store continues in its epoch."""
    real = LedgerModel.rebind_epoch

    def rebind(self: LedgerModel, region: str, number: int, request: Any) -> Any:
        return real(self, region, number, msgspec.structs.replace(request, seqs=[]))

    yield patch.object(LedgerModel, "rebind_epoch", rebind)


@mutant
@drawn_from("store_loses_a_moment", "store_rolls_back", "burst", "stop_agent", "start_agent")
def an_epoch_is_taken_for_whole(world: World) -> Iterator[Any]:
    """Every store claims to have all data of its older epoch."""
    real = EpochManager._whole_epoch

    async def kept(self: EpochManager, fence: Any, fingerprint: str) -> Any:
        await real(self, fence, fingerprint)
        return fence.epoch

    yield patch.object(EpochManager, "_whole_epoch", kept)


@mutant
def totals_follow_the_last_reply(world: World) -> Iterator[Any]:
    """A late reply takes back what a newer one gave."""
    yield edit_lua(
        world,
        ("settle", "whole(math.max(granted, tonumber(f[1] or 0)))", "whole(granted)"),
        ("settle", "whole(math.max(overage, tonumber(f[2] or 0)))", "whole(overage)"),
    )


@mutant
def a_duplicate_grants(world: World) -> Iterator[Any]:
    """A message that was booked before gets a grant again."""
    real = decision._grant

    def grant(settled: Any, *rest: Any) -> Any:
        wanted = {request.key for request in settled.matched.requests}
        if settled.verdict.outcome is ExchangeOutcome.REPLAYED and set(settled.leases) >= wanted:
            settled = settled._replace(verdict=SettlementVerdict(ExchangeOutcome.APPLIED))
        return real(settled, *rest)

    yield patch.object(decision, "_grant", grant)


@mutant
def more_granted_than_there_is(world: World) -> Iterator[Any]:
    """Grants look at the limit and not at what is left."""
    real = grant_units
    yield patch.object(granting, "grant_units", lambda grantable, limit, ask: real(limit, limit, ask))


@mutant
def lines_do_not_have_to_add_up(world: World) -> Iterator[Any]:
    """The total is booked as one line, whatever the usage lines say."""
    real = frozen_module._parse_exchange

    def parse(raw: bytes, lanes: Any) -> Any:
        exchange = json.loads(raw)
        body = json.loads(exchange["frozen"])
        for lease in body["leases"]:
            lease["lines"] = lease["lines"] * 2
        return real(json.dumps(exchange | {"frozen": json.dumps(body)}).encode(), lanes)

    yield patch.object(frozen_module, "_parse_exchange", parse)
    yield patch.object(settlement, "_disagreement", lambda *_: None)


@mutant
def taken_over_before_the_period_ends(world: World) -> Iterator[Any]:
    """A lease of the next period is spent a little before that begins."""
    yield edit_lua(
        world,
        ("parts/period_change", "mono < tonumber(starts)", "mono + 1000000 < tonumber(starts)"),
        ("algorithms/allowance", "clock.mono >= tonumber(f[13])", "clock.mono + 1000000 >= tonumber(f[13])"),
    )


@mutant
@drawn_from("fair_weather", "later")
def next_period_is_not_given_ahead(world: World) -> Iterator[Any]:
    """A lease of the next period is granted only once that has begun."""
    yield patch.object(granting.LeaseTerms, "is_near_its_end", lambda *_: False)


@mutant
def last_report_of_a_period_dropped_unreported(world: World) -> Iterator[Any]:
    """The store deletes ended periods after any receipt."""
    yield edit_lua(
        world,
        (
            "settle",
            "if f[5] then",
            "if f[5] and dropped == 1 then redis.call('HDEL', key, 'ended:' .. period)\nelseif f[5] then",
        ),
    )


@mutant
@drawn_from("bad_weather", "burst", "later")
def late_grant_of_an_ended_period_kept(world: World) -> Iterator[Any]:
    """A late grant for an ended period is not returned.

    Two guards return it: one while the store knows the period, and one for a period that it has forgotten. Each hides
    that the other is missing, because the period is forgotten soon and the coordinator repeats what it granted.
    """
    yield edit_lua(
        world,
        ("settle", "elseif not is_late then return_unknown_grant(key, quota, at) end", "end"),
        (
            "settle",
            "granted, overage = math.max(granted, ended.granted), math.max(overage, ended.overage)",
            "granted, overage = ended.granted, ended.overage",
        ),
    )


@mutant
@drawn_from("ledger_loses", "burst", "partition", "kill_agent", "start_agent")
def a_lost_ledger_goes_unnoticed(world: World) -> Iterator[Any]:
    """A region that knows more than the ledger is believed, and nothing is reported."""
    judge_seq, judge_lease = settlement._judge_seq, settlement._judge_lease

    def believed(outcome: ExchangeOutcome, alarm: ExchangeOutcome) -> ExchangeOutcome:
        return ExchangeOutcome.APPLIED if outcome is alarm else outcome

    yield patch.object(
        settlement,
        "_judge_seq",
        lambda *about: SettlementVerdict(believed(judge_seq(*about).outcome, ExchangeOutcome.GAP)),
    )
    yield patch.object(
        settlement,
        "_judge_lease",
        lambda *about, **more: believed(judge_lease(*about, **more), ExchangeOutcome.LEDGER_REGRESSED),
    )


@mutant
@drawn_from("period_closed", "burst", "hours_pass")
def close_does_not_wait_for_outstanding(world: World) -> Iterator[Any]:
    """A period is closed while a region holds units of it that were not recalled."""
    real = closing.missing_for_close

    def missing(*about: Any, **more: Any) -> list[Any]:
        return [each for each in real(*about, **more) if each.what not in (Obstacle.OUTSTANDING, Obstacle.HELD)]

    def close_lease(lease: Any) -> None:
        lease.state = LeaseState.CLOSED

    yield patch.object(LedgerModel, "recall_outstanding", lambda *_: Transaction())
    yield patch.object(ledger_model, "missing_for_close", missing)
    yield patch.object(ledger_model, "close_lease", close_lease)


@mutant
def late_usage_booked_in_the_closed_period(world: World) -> Iterator[Any]:
    """Late usage is booked as if the period were open."""
    yield patch.object(locked, "_lates", lambda *_: {})


@mutant
@drawn_from("partition", "region_is_mute", "period_closed", "hours_pass", "later")
def late_usage_booked_beside_what_was_carried(world: World) -> Iterator[Any]:
    """Late usage goes to the current period, even if the carried suspense is elsewhere."""
    real = closing.late_of

    def late_of(lease: Any, closed_at: Any, corrections: Any, open_pools: Any, now: Any, **more: Any) -> Any:
        running = closing.open_key(lease.key, now)
        return real(lease, closed_at, corrections, {running: open_pools[running]}, now, **more)

    yield patch.object(locked, "late_of", late_of)


@mutant
@drawn_from(*OF_REPLICAS, "burst", "later")
def replicas_are_not_waited_for(_: World) -> Iterator[Any]:
    """A reply counts at once, whatever replicas have acknowledged."""
    yield patch.object(InReplicas, "is_confirmed", lambda *_: True)


@mutant
@drawn_from(*OF_REPLICAS, "burst", "later")
def replicas_are_told_by_their_address(_: World) -> Iterator[Any]:
    """Whatever process listens at the address of a replica acknowledges in its name."""
    for module in (durability, connection):
        yield patch.object(module, "read_links", lambda info: read_links(info)._replace(made="1.0"))


@mutant
@drawn_from(*OF_REPLICAS, "region_is_deaf", "burst", "later")
def a_replay_names_no_grant_of_an_ended_epoch(_: World) -> Iterator[Any]:
    """A batch is replayed with the leases that it reports, and with no other."""
    yield patch.object(submissions, "with_granted", lambda exchanges, _granted: exchanges)


@mutant
@drawn_from(*OF_REPLICAS, "region_is_deaf", "burst", "later")
def an_ended_epoch_keeps_what_it_is_granted_late(world: World) -> Iterator[Any]:
    """A reply to an older epoch raises totals, and what they gained stays there."""
    yield edit_lua(world, ("settle", "    idle.return_idle(key, quota, KEYS[3], prefix, 0)\n", ""))


@mutant
@drawn_from("tries", "tries_reset")
def each_agent_does_a_reset(world: World) -> Iterator[Any]:
    """A store does not remember which resets it has done."""
    yield edit_lua(world, ("reset_rates", "if number > known then", "if number > 0 then"))


@mutant
@drawn_from("burst", "later")
def labels_are_those_of_the_policy(_: World) -> Iterator[Any]:
    """Usage is booked with the label of another request."""
    real = CompiledPolicy.usage_dimensions

    def usage_dimensions(self: CompiledPolicy, subject: Any, route_class: str) -> str:
        return real(self, subject | {"labels.model": "small"} if "labels.model" in subject else subject, route_class)

    yield patch.object(CompiledPolicy, "usage_dimensions", usage_dimensions)


@mutant
@drawn_from("store_usurped", "store_fails_over", "store_fails_back", "burst")
def what_a_copy_said_is_remembered(world: World) -> Iterator[Any]:
    """Returns reported for an epoch that seemed lost stand when it is proved."""
    real = LedgerModel._prove

    def prove(self: LedgerModel, number: int, epoch: Any, transaction: Transaction) -> None:
        said = {name: lease.region_returned for name, lease in self.leases.items() if name[0] == number}
        real(self, number, epoch, transaction)
        for name, lease in transaction.writes.items():
            if name.table == "lease" and name.key in said:
                lease.region_returned = said[name.key]

    yield patch.object(LedgerModel, "_prove", prove)


# Named in the design, but without a guard in this version that could be removed.
WITHOUT_A_GUARD: dict[str, str] = {}


# --- journals ---------------------------------------------------------------------------------------------------------

STORES_AWAY = ("store_down", "store_slow", "store_hangs_up", "kill_agent", "start_agent", "coordinator_dies_after")


@mutant
@drawn_from(*STORES_AWAY)
def journal_booked_twice(world: World) -> Iterator[Any]:
    """Each report of a journal opens a new epoch."""
    nonces = world.chance("other nonces")

    def open_epoch(nonce: str, **rest: Any) -> Any:
        return OpenEpoch(nonce=nonces.randbytes(16).hex(), **rest)

    yield patch.object(booking, "OpenEpoch", open_epoch)


@mutant
@drawn_from(*STORES_AWAY)
def journal_not_flushed(world: World) -> Iterator[Any]:
    """Services get replies before the flush: entries may be lost with the agent."""
    real = VirtualSegment.append

    async def append(self: VirtualSegment, data: bytes) -> None:
        world.loop.create_task(real(self, data))

    yield patch.object(VirtualSegment, "append", append)


@mutant
@drawn_from(*STORES_AWAY)
def journal_dropped_before_its_receipt(world: World) -> Iterator[Any]:
    """A journal is deleted when it is sent, whatever the reply."""
    real = JournalBooking._book

    async def book(self: JournalBooking, segment: Any, incarnation: Any) -> None:
        try:
            await real(self, segment, incarnation)
        except CoordinatorUnavailable:
            self._journal.drop(segment, segment.read())

    yield patch.object(JournalBooking, "_book", book)


@mutant
@drawn_from(*STORES_AWAY)
def leftover_journals_forgotten(world: World) -> Iterator[Any]:
    """An agent that starts does not look for journals of killed agents."""
    yield patch.object(Journal, "recover", lambda self: None)


# --- holds ------------------------------------------------------------------------------------------------------------

WORK_IS_HELD = ("burst", "later", "store_restarts", "kill_agent", "start_agent")


@mutant
@drawn_from(*WORK_IS_HELD)
def held_units_are_admitted_as_well(world: World) -> Iterator[Any]:
    """Units of a hold may be admitted to others."""
    yield edit_lua(
        world, ("algorithms/allowance", "- consumed - number(f[5]) - number(f[6])", "- consumed - number(f[5])")
    )


@mutant
@drawn_from(*WORK_IS_HELD)
def held_units_are_given_back(world: World) -> Iterator[Any]:
    """A recall, or the end of the period, returns units of a hold."""
    yield edit_lua(
        world,
        ("parts/idle", "- number(f[5]) - keep", "- keep"),
        ("parts/period_change", "- ended.consumed - ended.held)", "- ended.consumed)"),
    )


@mutant
@drawn_from(*WORK_IS_HELD)
def a_hold_that_ran_out_is_committed_as_if_it_were_open(world: World) -> Iterator[Any]:
    """An expired hold's units were free again, and its commit takes them from held units once more."""
    yield edit_lua(
        world,
        (
            "parts/holds",
            "local held = part.state == 'open' and",
            "local held = (part.state == 'open' or part.state == 'lapsed') and",
        ),
    )


@mutant
@drawn_from(*WORK_IS_HELD)
def a_hold_ends_twice(world: World) -> Iterator[Any]:
    """A hold can be ended a second time."""
    yield edit_lua(
        world,
        (
            "parts/holds",
            "part.state, part.committed, part.due = state, units, clock.mono + ENDED_US\n  write(part)",
            "part.state, part.committed, part.due = state, units, clock.mono + ENDED_US\n  write(part)\n"
            "part.state = 'open'\nwrite(part)",
        ),
    )


@mutant
@drawn_from(*WORK_IS_HELD)
def what_a_commit_says_beyond_its_hold_is_forgotten(world: World) -> Iterator[Any]:
    """A commit of more than was held is booked only up to the hold."""
    yield edit_lua(
        world, ("parts/holds", "math.max(0, units - paid)", "math.max(0, math.min(units, part.units) - paid)")
    )


@mutant
@drawn_from(*WORK_IS_HELD)
def what_was_charged_is_committed_once_more(world: World) -> Iterator[Any]:
    """A commit after the hold was charged is booked in full."""
    yield edit_lua(world, ("parts/holds", "local paid = part.state == 'charged' and part.units or 0", "local paid = 0"))


@mutant
@drawn_from(*WORK_IS_HELD, "period_closed")
def a_hold_never_runs_out(world: World) -> Iterator[Any]:
    """A hold without an outcome never expires."""
    yield edit_lua(world, ("parts/holds", "if due and tonumber(due) <= clock.mono then", "if false then"))


@mutant
@drawn_from(*WORK_IS_HELD, "store_usurped")
def a_period_is_forgotten_with_its_holds(world: World) -> Iterator[Any]:
    """A booked period is deleted, though a commit of one of its holds may come."""
    yield edit_lua(
        world, ("settle", "if is_booked and has_ended and ended.holds == 0 then", "if is_booked and has_ended then")
    )


# --- what people divide -----------------------------------------------------------------------------------------------

PEOPLE_DIVIDE = ("set", "moved", "evened_out", "burst", "later")


@mutant
@drawn_from(*PEOPLE_DIVIDE)
def a_floor_is_not_kept(world: World) -> Iterator[Any]:
    """Units of one region's floor are granted to others."""
    yield patch.object(division.Division, "floors", lambda self, funded: {})


@mutant
@drawn_from(*PEOPLE_DIVIDE)
def a_ceiling_is_passed_over(world: World) -> Iterator[Any]:
    """A region is granted its demand beyond its ceiling or pin."""
    yield patch.object(division, "room_below_ceiling", lambda region, taken, of: 2**63 if of.weight_of(region) else 0)


@mutant
@drawn_from(*PEOPLE_DIVIDE)
def who_weighs_nothing_is_granted_to(world: World) -> Iterator[Any]:
    """The demand of a region without weight counts like any other."""
    real = division.room_below_ceiling

    def room_below_ceiling(region: str, taken: Any, of: Any) -> int:
        part = of.parts.get(region, division.RegionalPart())
        return real(region, taken, division.Division({**of.parts, region: part._replace(weight=part.weight or 1)}))

    yield patch.object(division, "room_below_ceiling", room_below_ceiling)


@mutant
@drawn_from(*PEOPLE_DIVIDE)
def what_is_on_its_way_is_granted_to_others(world: World) -> Iterator[Any]:
    """Units that were returned for a region are granted to others."""
    real = division._kept_for_others

    def kept_for_others(region: str, taken: Any, of: Any, funded: int) -> int:
        return real(region, taken, division.Division(of.parts), funded)

    yield patch.object(division, "_kept_for_others", kept_for_others)


@mutant
@drawn_from(*PEOPLE_DIVIDE)
def a_move_makes_units(world: World) -> Iterator[Any]:
    """Recalled units count as returned as soon as their source reports."""

    def note_returned(_: Any, key: Any, region: str, moves: Any) -> None:
        for move in moves:
            if move.source == region:
                move.returned = move.units

    yield patch.object(decision, "note_returned", note_returned)


@mutant
@drawn_from(*PEOPLE_DIVIDE)
def a_move_is_done_twice(world: World) -> Iterator[Any]:
    """A grant to the target is not noted, so the target is granted it again."""
    yield patch.object(granting, "note_regranted", lambda *_: None)


# --- limits and caps --------------------------------------------------------------------------------------------------

LIMITS_ARE_REACHED = ("burst", "later", "limit", "adjust")


@mutant
@drawn_from(*LIMITS_ARE_REACHED)
def a_limit_is_funded_twice(world: World) -> Iterator[Any]:
    """The limit is funded again although it is funded already."""
    real = allocation.fund
    yield patch.object(granting, "fund", lambda entry, pool, limit: real(entry, pool, 2 * limit))


@mutant
@drawn_from(*LIMITS_ARE_REACHED)
def a_soft_cap_has_no_end(world: World) -> Iterator[Any]:
    """Units beyond the limit are granted whatever the cap."""
    real = allocation.extend
    yield patch.object(granting, "extend", lambda entry, pool, at_most, need: real(entry, pool, 2**40, need))


@mutant
@drawn_from(*LIMITS_ARE_REACHED)
def overage_is_told_by_each_lease(world: World) -> Iterator[Any]:
    """Each region's usage is compared with the limit alone."""

    def use(entry: Any, pool: Any, lease: Any, lines: Any) -> None:
        told, beyond = split(lines, max(0, pool.spendable - lease.consumed))
        drain_lines(entry, pool, lease, Account.CONSUMED, told, Cause.USAGE)
        pool.overage_used += beyond

    yield patch.object(settlement, "use", use)


@mutant
@drawn_from(*LIMITS_ARE_REACHED)
def overage_is_told_once_more(world: World) -> Iterator[Any]:
    """Overage is marked but not counted, so the next report is marked as overage again."""
    real = posting.use

    def use(entry: Any, pool: Any, lease: Any, lines: Any) -> None:
        beyond = pool.overage_used
        real(entry, pool, lease, lines)
        pool.overage_used = beyond

    yield patch.object(settlement, "use", use)


@mutant
@drawn_from("partition", "region_is_mute", "period_closed", "hours_pass", "later", "adjust")
def late_usage_is_within_the_limit_that_runs(world: World) -> Iterator[Any]:
    """Late usage is compared with what the current period has left."""
    real = closing.late_of

    def late_of(*about: Any, closed: Any, **more: Any) -> Any:
        late = real(*about, closed=closed, **more)
        late.closed = late.pool
        return late

    yield patch.object(locked, "late_of", late_of)


# --- adjustments ------------------------------------------------------------------------------------------------------

ADJUSTED = ("credited", "debited", "written_off", "mode", "limit", "burst", "later", "coordinator_dies_after")


@mutant
@drawn_from(*ADJUSTED)
def an_adjustment_is_approved_once_more(world: World) -> Iterator[Any]:
    """A repeated approval is booked again."""
    yield patch.object(ledger_model, "state_of", lambda *_: AdjustmentState.PROPOSED)


@mutant
@drawn_from(*ADJUSTED)
def what_is_credited_is_beyond_the_limit(world: World) -> Iterator[Any]:
    """Usage of credited units is marked as overage."""
    yield patch.object(balances.Pool, "spendable", property(lambda pool: pool.funded + pool.carried_over_in))


@mutant
@drawn_from(*ADJUSTED)
def what_is_credited_is_funded_as_well(world: World) -> Iterator[Any]:
    """In regional mode, a region that took a credit is funded for it as well."""
    real = division.funded_for

    def funded_for(limit: int, pool: Any, leases: Any, divided: Any) -> int:
        return real(limit, replace(pool, credited=0), leases, divided)

    yield patch.object(granting, "funded_for", funded_for)
    yield patch.object(ledger_model, "funded_for", funded_for)


@mutant
@drawn_from("credited", "debited", "mode", "burst")
def a_credit_that_was_taken_is_debited(world: World) -> Iterator[Any]:
    """In regional mode, another region's own units are debited, and funded again later."""
    yield patch.object(ledger_model, "debitable", lambda pool, *_: min(pool.grantable, pool.entitled))


# --- what goes over into the next period ------------------------------------------------------------------------------

GOES_OVER = ("burst", "period_closed", "hours_pass", "later", "partition", "limit", "coordinator_dies_after", "adjust")


@mutant
@drawn_from(*GOES_OVER)
def what_was_left_is_carried_over_twice(world: World) -> Iterator[Any]:
    real = carry_over.carry_over

    def twice(pool: Any, into: Any, units: int) -> Any:
        entry = real(pool, into, units)
        post(entry, into, None, Account.CARRIED_OVER_IN, Account.UNALLOCATED, units, Cause.CARRIED_OVER)
        return entry

    yield patch.object(ledger_model, "carry_over", twice)


@mutant
@drawn_from("region_lost", "burst", "later", "period_closed", "hours_pass")
def what_is_in_suspense_is_carried_over(world: World) -> Iterator[Any]:
    """Suspense is carried over as unused, though a silent region may have spent it."""
    real = LedgerModel._left

    def left(self: LedgerModel, period: str, now: Any) -> Any:
        names, over = real(self, period, now)
        return names, [each._replace(units=each.units + self.pools[each.key].suspense) for each in over]

    def out(self: LedgerModel, part: Any, transaction: Transaction, now: Any) -> None:
        pool = transaction.writes.setdefault(Name("pool", part.key), copy(self.pools[part.key]))
        entry = movement(part, "freed")
        post(entry, pool, part, part.waiting_account, Account.UNALLOCATED, part.to_carry, Cause.RETURNED)
        transaction.entries.append(entry)

    real_carry = LedgerModel._carry

    def carry_or_free(self: LedgerModel, part: Any, transaction: Transaction, now: Any) -> None:
        goes_over = any(each.key == part.key for each in left(self, part.key.period, now)[1])
        (out if goes_over and isinstance(part, balances.Lease) else real_carry)(self, part, transaction, now)

    yield patch.object(LedgerModel, "_left", left)
    yield patch.object(LedgerModel, "_carry", carry_or_free)


@mutant
@drawn_from(*GOES_OVER)
def what_came_into_a_period_goes_over_again(world: World) -> Iterator[Any]:
    yield patch.object(carry_over, "unused_of", lambda pool: max(0, pool.grantable - pool.soft_cap_extension))


@mutant
@drawn_from(*GOES_OVER)
def what_went_over_is_included_as_well(world: World) -> Iterator[Any]:
    """Late usage of the closed period counts as within its limit, though a part of that was carried over."""
    real = balances.Pool.included_left.fget  # type: ignore[attr-defined]  # it is a property
    yield patch.object(balances.Pool, "included_left", property(lambda pool: real(replace(pool, carried_over_out=0))))


# --- overdrafts -------------------------------------------------------------------------------------------------------

CUT_OFF = ("partition", "burst", "limit", "later", "store_loses_a_moment")


@mutant
@drawn_from(*CUT_OFF)
def an_overdraft_has_no_end(world: World) -> Iterator[Any]:
    """A region's debt is not subtracted from its overdraft."""
    yield edit_lua(world, ("algorithms/allowance", "redis.call('HINCRBY', state.lease, 'owed', text)", ""))


@mutant
@drawn_from(*CUT_OFF)
def whoever_is_denied_overdraws(world: World) -> Iterator[Any]:
    """Every denied request overdraws, connected or not."""
    yield edit_lua(
        world,
        (
            "parts/partition",
            "return not is_old(f[2], mono) and mono - tonumber(f[1]) >= PARTITIONED_AFTER_US",
            "return true",
        ),
    )


@mutant
@drawn_from(*CUT_OFF)
def each_epoch_has_an_overdraft_of_its_own(world: World) -> Iterator[Any]:
    """Each new epoch, and each region, gets the full overdraft."""
    yield patch.object(granting, "_overdraft_for", lambda lease, shelf: shelf.overdraft)


# --- the modes of an allowance ----------------------------------------------------------------------------------------


@mutant
@drawn_from("mode", "limit", "region_drains", "region_returns", "burst")
def a_region_takes_what_is_another_s(world: World) -> Iterator[Any]:
    """In regional mode all regions take from one pool."""
    yield patch.object(division, "_grantable_of_own", lambda region, pool, leases, division: pool.grantable)


@mutant
@drawn_from("mode", "limit", "region_drains", "region_returns", "burst")
def what_is_funded_forgets_who_left(world: World) -> Iterator[Any]:
    """The funding ignores what regions that left have used of the period."""

    def funded_for(limit: int, pool: Any, leases: Any, divided: Any) -> int:
        return sum(map(divided.own_of, divided.parts)) if divided.is_regional else limit

    yield patch.object(granting, "funded_for", funded_for)


@mutant
@drawn_from("mode", "burst", "later")
def what_is_central_is_granted_by_demand(world: World) -> Iterator[Any]:
    real = granting._units_for

    def units_for(wanted: Any, lease: Any, shelf: Any, now: Any) -> int:
        leased = replace(shelf.division, mode=Mode.LEASED) if shelf.division.is_central else shelf.division
        return real(wanted, lease, shelf._replace(division=leased), now)

    yield patch.object(granting, "_units_for", units_for)


@mutant
@drawn_from("mode", "burst", "later", "region_is_deaf", "bad_weather")
def what_nobody_took_is_not_asked_back(world: World) -> Iterator[Any]:
    """The coordinator does not recall idle units of a central quota."""
    real = replies._recall_keep

    def recall_keep(lease: Any, shelf: Any, now: Any) -> int | None:
        return real(lease, shelf._replace(division=replace(shelf.division, mode=Mode.LEASED)), now)

    yield patch.object(replies, "_recall_keep", recall_keep)


@mutant
@drawn_from("mode", "burst", "later", "region_is_deaf", "bad_weather")
def what_nobody_took_is_not_given_back(world: World) -> Iterator[Any]:
    """The agent ignores the recall of idle units of a central quota."""

    async def keep(self: ExchangeLoop, incarnation: Any) -> None:
        self._quotas.take_surplus()

    yield patch.object(ExchangeLoop, "_return_untaken", keep)


# --- what changes under way -------------------------------------------------------------------------------------------


@mutant
@drawn_from("fair_weather", "period_changes", "burst", "later")
def no_reply_says_which_period_is_current(world: World) -> Iterator[Any]:
    """A lease of a period that began before the store's own is taken for a late grant."""
    yield edit_lua(world, ("settle", "ARGV[at + 13] == '1'", "false"))


@mutant
@drawn_from("hours_pass", "burst", "limit", "kill_agent", "start_agent", "period_changes")
def a_lease_that_was_used_waits_with_totals_of_zero(world: World) -> Iterator[Any]:
    """A reply from before a period's end begins it again, after it was booked and forgotten here."""
    yield edit_lua(world, ("settle", "not is_late and not has_ended and not was_used", "not is_late and not has_ended"))


@mutant
@drawn_from("coordinator_clock", "burst", "later")
def a_wrong_clock_is_believed(world: World) -> Iterator[Any]:
    """A coordinator whose clock is hours ahead of its database's goes on deciding."""
    yield patch.object(ComparedClock, "_why_not_trusted", lambda self, now: None)


@mutant
@drawn_from("region_lies", "burst", "later")
def every_claim_is_plausible(world: World) -> Iterator[Any]:
    """Usage beyond a region's grants is booked, however much it is."""
    yield patch.object(ClaimBounds, "most_overage", lambda self, limit: 2**53)


@mutant
@drawn_from("catalogue_changes_late", "burst", "later")
def a_limit_is_not_looked_at_behind_the_locks(world: World) -> Iterator[Any]:
    """The transaction uses what it read before it locked the pools, whatever was committed in between."""
    yield patch.object(Catalogue, "decides_like", lambda self, other: True)


@mutant
@drawn_from("store_forgets_a_lease", "burst", "later")
def a_lease_that_was_lost_is_installed_anew(world: World) -> Iterator[Any]:
    """A store that has no lease of what it used is given one with nothing consumed."""
    lost = "if is_current and is_lost(i) then return {'lost', "
    yield edit_lua(
        world,
        ("settle", lost, "if false then return {'lost', "),
        ("freeze", lost, "if false then return {'lost', "),
    )
