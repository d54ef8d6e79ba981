"""The ledger of the simulation against Postgres: the same random calls, and equal replies and equal rows after each.

So what the simulation finds true of its ledger is true of the real one, as far as one transaction at a time can tell.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest

from coordinator.access.rules.audit import Actor
from coordinator.adjustments.adjust import (
    ProposedAdjustment,
    approve_adjustment,
    propose_adjustment,
    withdraw_adjustment,
)
from coordinator.adjustments.read_adjustments import Adjustment
from coordinator.adjustments.rules import AdjustmentKind, AdjustmentRefusal
from coordinator.adjustments.rules import AdjustmentTerms as Adjusting
from coordinator.database.connection import Connection, read_sums_as_integers
from coordinator.database.notify import CHANNEL
from coordinator.epochs.fence import fence_lost
from coordinator.epochs.lost_ledger import rebase_lane
from coordinator.epochs.open import open_epoch
from coordinator.epochs.rebind import rebind_epoch
from coordinator.epochs.retire import retire_epoch
from coordinator.epochs.rules.split_brain import MOST_OPENINGS
from coordinator.exchange.expire_leases import expire_leases
from coordinator.exchange.parsing import parse_exchanges
from coordinator.exchange.recall import recall_outstanding, recall_suspense
from coordinator.exchange.rules.balances import CORRECTION_COLUMNS, LEASE_COLUMNS, POOL_COLUMNS, Correction, Key, Lease
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.posting import Movement, Report, Transfer
from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.exchange.statements.lanes import lock_lane
from coordinator.exchange.statements.transfers import TRANSFER_COLUMNS
from coordinator.exchange.transaction import apply_exchanges
from coordinator.limits.in_force import Documents
from coordinator.limits.put_limits import put_limits
from coordinator.overrides.operations import add_override
from coordinator.overrides.read_overrides import Override
from coordinator.periods.close import CloseRequest, close_period
from coordinator.periods.rules.closing import HOLD_WAIT
from coordinator.rebalancing.follow import cancel_rebalance, follow
from coordinator.rebalancing.moves import move_of_row
from coordinator.rebalancing.rebalance import RebalanceRequest, begin_rebalance
from coordinator.rebalancing.rules.plan import Planner, plan_division, plan_even_out, plan_move
from coordinator.rebalancing.rules.region_settings import NOTHING_SET, Setting
from coordinator.rebalancing.schemas import AnyRebalance, EvenOut, MoveUnits, Rebalance, RegionSettingPatch, Weigh
from coordinator.regions.put_region import put_region
from coordinator.suspense.resolve import Proposal, approve_resolution, propose_resolution
from coordinator.suspense.rules import ResolutionKind, ResolutionRefusal
from coordinator.usage.reconcile import read_settled
from protocol.identifiers import lane_of, subject_key
from protocol.lease import LeaseState
from protocol.limits.document import PeriodKind
from protocol.messages import EpochOpened, Exchange, ExchangeRequest, LiveState, OpenEpoch, RebindEpoch
from protocol.outcomes import EpochRefusal
from protocol.periods import Calendar, moment_of, period_at
from regional_agent.store_outage.rules.records import Entry, batches
from tests.budget import cases
from tests.simulation.simulated import ledger_model
from tests.simulation.simulated.ledger_model import LedgerModel, Transaction
from tests.simulation.world import ALL_LEASED, Modes, document

pytestmark = pytest.mark.anyio
LANES = 2
TERMS = LeaseTerms(lease_ms=4_000)
REGIONS = ("us-east", "eu-west")
QUOTAS = ("exports:tenant=acme", "mails:tenant=acme")
GRACE, HOUR = timedelta(seconds=1), timedelta(hours=1)
PEOPLE = (UUID(int=1), UUID(int=2))
KINDS = (ResolutionKind.WRITE_OFF, ResolutionKind.CHARGE, ResolutionKind.ESTIMATE, ResolutionKind.UNATTRIBUTED)


class Both:
    """The model and the real one, asked the same."""

    def __init__(self, connection: Connection, seed: int) -> None:
        self.real = connection
        self.documents = Documents()
        self.model = LedgerModel(LANES)
        self.chance = random.Random(seed)
        self.hands = random.Random(f"hands {seed}")  # of ops: their own draws
        self.finance = random.Random(f"finance {seed}")  # likewise
        self.adjusted: Counter[str] = Counter()  # what people were answered
        self.transfers: Counter[tuple[object, ...]] = Counter()
        self.quarantined: list[tuple[object, ...]] = []
        self.model.on_commit = self._note
        self.now = datetime(2026, 11, 18, 12, 59, 30, tzinfo=UTC)
        self.epochs: dict[str, list[tuple[int, str]]] = {region: [] for region in REGIONS}
        self.said: dict[Any, tuple[str, LiveState]] = {}  # the last batch of each lane, to be said again
        self.nonces: dict[int, str] = {}
        self.rebound: list[EpochOpened | EpochRefusal] = []
        self.rebased = self.recalled = self.begun = 0

    async def limit(self, units: int, modes: Modes = ALL_LEASED) -> None:
        wanted = document(units, modes)
        await put_limits(self.real, wanted, lambda _: True, None, self.now)
        self.model.commit(self.model.put_limits(wanted))

    async def override(self) -> None:
        """Override one tenant or all, now or soon, for a while."""
        subject = self.chance.choice([{}, {"tenant": "acme"}])
        limit = self.chance.choice([10, 200, 500])
        starts = self.now + timedelta(seconds=self.chance.choice([0, 0, 3]))
        ends = starts + timedelta(seconds=self.chance.choice([1, 5, 20]))
        id_ = UUID(int=self.chance.getrandbits(128))
        wanted = Override(id_, "exports", subject, limit, starts, ends, "a test", self.now, "test")
        added = await add_override(self.real, wanted, Actor("test"), self.now)
        assert not added.faults
        self.model.commit(
            self.model.add_override(ledger_model.Override(subject_key("exports", subject), limit, starts, ends))
        )

    async def region(self, name: str, status: str) -> None:
        await put_region(self.real, name, 1, status, None, self.now)
        self.model.commit(self.model.put_region(name, status))

    async def open(self, region: str, *, lost_data: bool) -> None:
        number = len(self.epochs[region])
        nonce = f"{self.chance.getrandbits(128):032x}"
        previous = self.chance.choice(self.epochs[region][-2:])[0] if self.epochs[region] else None
        request = OpenEpoch(nonce=nonce, fingerprint=f"{region}-{number}", previous=previous, lost_data=lost_data)
        epoch = await self._open(region, request)
        self.epochs[region].append((epoch, request.fingerprint))
        self.nonces[epoch] = nonce

    async def _open(self, region: str, request: OpenEpoch) -> int:
        opened = await self._ask(region, request)
        assert isinstance(opened, EpochOpened)
        return opened.epoch

    async def _ask(self, region: str, request: OpenEpoch) -> EpochOpened | EpochRefusal | None:
        real = await open_epoch(self.real, region, request, LANES, Actor("test"), self.now)
        model, transaction = self.model.open_epoch(region, request, self.now)
        self.model.commit(transaction)
        assert real == model
        return real

    async def contest(self, region: str) -> None:
        """Let two stores under one name open epochs in turn, until one of them is refused."""
        answers: list[EpochOpened | EpochRefusal | None] = []
        while EpochRefusal.TWO_STORES not in answers:
            assert len(answers) <= 2 * MOST_OPENINGS
            fingerprint = f"{region}: {len(answers) % 2}"
            request = OpenEpoch(nonce=f"{self.chance.getrandbits(128):032x}", fingerprint=fingerprint)
            answers.append(await self._ask(region, request))
            if isinstance(opened := answers[-1], EpochOpened):
                self.epochs[region].append((opened.epoch, fingerprint))
                self.nonces[opened.epoch] = request.nonce

    async def open_a_cell(self, region: str) -> None:
        """Open epochs of a Cluster, or of a single store that replaces it."""
        cells = self.chance.choice([1, 2, 3])
        previous = self.chance.choice(list(self.model.epochs))
        request = OpenEpoch(
            nonce=f"{self.chance.getrandbits(128):032x}",
            fingerprint=f"{region}-{self.chance.getrandbits(32)}",
            previous=previous,
            lost_data=self.chance.random() < 0.5,
            cell=self.chance.randrange(cells),
            cells=cells,
        )
        await self._open(region, request)

    async def tell_journal(self, number: int) -> None:
        """Open journals of quotas with and without leases, twice."""
        region, fingerprint = REGIONS[number % len(REGIONS)], f"journal:{number}"
        request = OpenEpoch(nonce=f"{number:032x}", fingerprint=fingerprint, lost_data=False, journal=True)
        epoch = await self._open(region, request)
        assert await self._open(region, request) == epoch
        periods = (f"{self.now:%Y-%m-%dT%H}", f"{self.now:%Y-%m-%d}")  # as the quotas of the document have them
        minute = int(self.now.timestamp()) // 60
        entries = [
            Entry(quota, period, minute, '{"degraded":"open"}', 1 + number % 9)
            for quota, period in zip(QUOTAS, periods, strict=True)
        ]
        for batch in [*batches(entries, epoch, LANES)] * 2:
            exchange = Exchange(frozen=msgspec.json.encode(batch).decode())
            told = ExchangeRequest(fingerprint=fingerprint, exchanges=[exchange])
            await self._apply(parse_exchanges(region, msgspec.json.encode(told)))
        consumed = {key.quota: lease.consumed for (number, key), lease in self.model.leases.items() if number == epoch}
        assert consumed == {entry.quota: entry.units for entry in entries}

    async def rebind(self, region: str) -> None:
        """Mostly as an honest store would ask; now and then it is behind, or of another incarnation, or the epoch is
        over.
        """
        number = self.chance.choices([-1, -2], [6, 1])[0] if len(self.epochs[region]) > 1 else -1
        epoch, fingerprint = self.epochs[region][number]
        behind = self.chance.choices([0, 1], [5, 1])[0]
        request = RebindEpoch(
            nonce=self.nonces[epoch],
            previous=self.chance.choices([fingerprint, "nobody"], [6, 1])[0],
            fingerprint=f"{fingerprint}+",
            seqs=[max(0, self.model.lane_rows[epoch, lane].last_seq - behind) for lane in range(LANES)],
        )
        real = await rebind_epoch(self.real, region, epoch, request, Actor("test"), self.now)
        model, transaction = self.model.rebind_epoch(region, epoch, request)
        self.model.commit(transaction)
        assert real == model
        self.rebound.append(real)
        if isinstance(real, EpochOpened):
            self.epochs[region][number] = (epoch, request.fingerprint)

    async def expire(self) -> None:
        await expire_leases(self.real, self.now)
        self.model.commit(self.model.expire_leases(self.now))

    async def retire(self) -> None:
        """The oldest that has a lease in quarantine, else the oldest."""
        _, epoch = min((each.state is not LeaseState.QUARANTINED, each.epoch) for each in self.model.leases.values())
        assert await retire_epoch(self.real, epoch, "a test", Actor(str(UUID(int=1))), self.now)
        self.model.commit(self.model.retire_epoch(epoch, self.now))

    async def rebase(self) -> None:
        """People have read what a lane has shown, and approve that it goes on."""
        if not (kept := self.model.regressed()):
            return
        name = self.chance.choice(kept)
        id_ = UUID(int=self.chance.getrandbits(128))
        async with self.real.transaction():
            lane = await lock_lane(self.real, *name[:2])
            assert lane is not None
            refusal = await rebase_lane(self.real, lane, name[2], id_, self.now)
        expected, transaction = self.model.rebase(name, id_, self.now)
        assert refusal == expected
        self.rebased += bool(transaction.writes)
        self.model.commit(transaction)

    async def propose(self) -> None:
        """Somebody proposes how a lease's suspense, or its quarantine, ends; somebody else may approve it later."""
        books: list[Lease | Correction] = [*self.model.leases.values(), *self.model.corrections.values()]
        if names := [(each.epoch, Key(each.key.quota, each.charge_period)) for each in books if each.to_carry]:
            await self._propose(self.chance.choice(names), self.chance.choice(KINDS))

    async def _propose(self, name: tuple[int, Key], kind: ResolutionKind) -> None:
        async with self.real.transaction():
            proposal = Proposal(*name, kind, 1, "a test")
            real = await propose_resolution(self.real, proposal, Actor(str(UUID(int=1))), self.now)
        id_ = "" if isinstance(real, ResolutionRefusal) else str(real.id)
        refusal, transaction = self.model.propose(name, kind, 1, id_, self.now)
        assert refusal == (real if isinstance(real, ResolutionRefusal) else None)
        self.model.commit(transaction)

    async def approve(self) -> None:
        if names := [name for name, proposal in self.model.proposals.items() if proposal]:
            await self._approve(self.chance.choice(names))

    async def _approve(self, name: tuple[int, Key]) -> None:
        if (proposal := self.model.proposals.get(name)) is None:
            return
        async with self.real.transaction():
            real = await approve_resolution(self.real, UUID(proposal.id), Actor(str(UUID(int=2))), self.now)
        refusal, transaction = self.model.approve(name, proposal.id, self.now)
        assert refusal == (real if isinstance(real, ResolutionRefusal) else None)
        self.model.commit(transaction)

    async def close(self) -> None:
        """Somebody asks for it, or it goes on by itself."""
        periods = sorted({key.period for key in self.model.pools})
        await self._close(self.chance.choice(periods), self.chance.choice([None, True, True, False]))

    async def _close(self, period: str, carries: bool | None) -> None:
        request = None if carries is None else CloseRequest(Actor("test"), carry_suspense=carries)
        async with self.real.transaction():
            settled = await read_settled(self.real, period)
            real = await close_period(self.real, period, request, settled, GRACE, self.now)
        missing, transaction = self.model.close_period(period, carries, GRACE, self.now)
        if missing is not None:
            assert real is not None
            assert sorted(map(repr, real.missing)) == sorted(map(repr, missing))
        self.model.commit(transaction)

    async def recall(self) -> None:
        """Expire and recall leases of all periods, and compare the signals."""
        periods, heard = {key.period for key in self.model.pools}, set[str]()
        transactions = [self.model.recall_outstanding(period, self.now) for period in periods]
        transactions.append(self.model.recall_suspense(self.now))
        expected = {msgspec.json.encode(each).decode() for recalled in transactions for each in recalled.notices}
        await self.real.add_listener(CHANNEL, lambda *notice: heard.add(str(notice[-1])))
        async with self.real.transaction():
            for period in periods:
                await recall_outstanding(self.real, period, self.now)
            await recall_suspense(self.real, self.now)
        async with asyncio.timeout(20):
            while not heard >= expected:
                await self.real.fetchval("SELECT 1")
        await self.real.reset()
        assert heard == expected
        self.recalled += len(heard)

    async def close_at_last(self, period: str) -> None:
        """Resolve what is in the way of a close."""
        await self.expire()
        for name, lease in list(self.model.leases.items()):
            if name[1].period == period and lease.state is not LeaseState.CLOSED:
                for kind in (ResolutionKind.WRITE_OFF, ResolutionKind.UNATTRIBUTED):
                    await self._approve(name)
                    if lease.state is LeaseState.QUARANTINED or self.model.proposals.get(name):
                        await self._propose(name, kind)
                await self._approve(name)
        await self._close(period, True)
        self.now += GRACE
        await self._close(period, None)
        if not self.model.period(period).closed_at:  # it waits for what is held, and not for ever
            self.now += HOLD_WAIT
            await self._close(period, None)

    async def say(self) -> None:
        region = self.chance.choice(REGIONS)
        epoch, fingerprint = self.chance.choice(self.epochs[region][-2:])
        lane = self.chance.randrange(LANES)
        again = self.chance.random() < 0.2
        frozen, live = self.said.get((epoch, lane), (None, None)) if again else (None, None)
        if frozen is None or live is None:
            frozen, live = self._batch(epoch, lane), self._live(lane)
            self.said[epoch, lane] = (frozen, live)
        request = ExchangeRequest(fingerprint=fingerprint, exchanges=[Exchange(frozen=frozen, live=live)])
        await self._apply(parse_exchanges(region, msgspec.json.encode(request)))

    async def _apply(self, call: ExchangeCall) -> None:
        async with self.real.transaction():
            (applied,) = await apply_exchanges(self.real, self.documents, [call], TERMS, self.now)
        async with self.real.transaction():
            await fence_lost(self.real, call.region, applied.lost, self.now)
        response, transaction = self.model.apply_exchange(call, TERMS, self.now)
        self.model.commit(transaction)
        for region, lost in transaction.lost:
            self.model.commit(self.model.fence_lost(region, lost, self.now))
        assert _plain(applied.response) == _plain(response)
        assert transaction.lost == ([(call.region, list(applied.lost))] if applied.lost else [])

    def _live(self, lane: int) -> LiveState:
        demands = [
            {
                "quota": quota,
                "demand_milli": self.chance.choice([0, 5_000, 40_000]),
                "waiting": self.chance.randint(0, 3),
            }
            for quota in QUOTAS
            if lane_of(quota, LANES) == lane
        ]
        return msgspec.convert({"demands": demands}, LiveState)

    def _batch(self, epoch: int, lane: int) -> str:
        """Mostly what an honest region would say; now and then a wrong number, total or line."""
        row = self.model.lane_rows[epoch, lane]
        seq = row.last_seq + self.chance.choices([1, 0, 2], [12, 1, 1])[0]
        mine = [lease for (number, _), lease in self.model.leases.items() if number == epoch]
        leases = [self._lease(lease) for lease in mine if lane_of(lease.key.quota, LANES) == lane]
        body = {"epoch": epoch, "lane": lane, "seq": max(1, seq), "leases": leases}
        return msgspec.json.encode(body).decode()

    def _lease(self, lease: Lease) -> dict[str, Any]:
        """Request units of this period or of the next one."""
        late = self.model.late_books(lease.epoch, lease.key)
        said = max(late, key=lambda each: each.key.period) if late else lease
        left = lease.unaccounted + lease.suspense_carried_out
        used = self.chance.randint(0, left + self.chance.choice([0, 0, 0, 4]))
        returned = self.chance.randint(0, max(0, left - used)) if self.chance.random() < 0.4 else 0
        lie = self.chance.choices([0, -1, 1], [40, 1, 1])[0]
        line = {"minute": 29_000_000, "dimensions": {"policy": "export"}, "units": used + max(0, lie)}
        return {
            "quota": lease.key.quota,
            "period": lease.key.period,
            "granted": lease.granted + (self.chance.random() < 0.02),
            "overage": lease.overage,
            "consumed": max(0, said.region_consumed + used + min(0, lie)),
            "returned": said.region_returned + returned,
            "lines": [line] if line["units"] else [],
        }

    async def adjust(self) -> None:
        """Somebody proposes to correct the books, or somebody, maybe the same, ends what is proposed."""
        by = self.finance.choice(PEOPLE)
        if not self.model.adjustments or self.finance.random() < 0.4:
            await self._propose_adjustment(by)
            return
        id_ = self.finance.choice(list(self.model.adjustments))
        ends = self.finance.choices([approve_adjustment, withdraw_adjustment], [5, 1])[0]
        async with self.real.transaction():
            if ends is approve_adjustment:
                real = await approve_adjustment(self.real, self.documents, id_, Actor(str(by)), self.now)
                told, transaction = self.model.approve_adjustment(id_, by, self.now)
            else:
                real = await withdraw_adjustment(self.real, id_, Actor(str(by)), self.now)
                told, transaction = self.model.withdraw_adjustment(id_, by, self.now)
        self._compare_adjustment(real, told, transaction)

    async def _propose_adjustment(self, by: UUID) -> None:
        hour = period_at(Calendar(PeriodKind.HOUR), self.now - self.finance.choice([0, 0, 0, 1, -1]) * HOUR).id
        key = self.finance.choice([Key(QUOTAS[0], hour), Key(QUOTAS[0], hour), Key(QUOTAS[1], f"{self.now:%Y-%m-%d}")])
        kind, units = self.finance.choice(list(AdjustmentKind)), self.finance.randint(1, 40)
        ids = [UUID(int=self.finance.getrandbits(128)), *list(self.model.adjustments)[:1]]
        id_, terms = self.finance.choices(ids, [9, 1][: len(ids)])[0], Adjusting(key, kind, units)
        async with self.real.transaction():
            wanted = ProposedAdjustment(id_, terms, "a test", "A-1")
            real = await propose_adjustment(self.real, self.documents, wanted, Actor(str(by)), self.now)
        self._compare_adjustment(real, *self.model.propose_adjustment(id_, terms, by, self.now))

    def _compare_adjustment(
        self,
        real: Adjustment | AdjustmentRefusal,
        told: ledger_model.Adjustment | AdjustmentRefusal,
        transaction: Transaction,
    ) -> None:
        self.model.commit(transaction)
        self.adjusted[real.name if isinstance(real, AdjustmentRefusal) else real.state.name] += 1
        if isinstance(real, AdjustmentRefusal) or isinstance(told, AdjustmentRefusal):
            assert real == told
            return
        names = ("proposed_by", "expires_at", "approved_by", "approved_at", "booked_in", "withdrawn_by", "withdrawn_at")
        assert {name: getattr(real, name) for name in names} == {name: getattr(told, name) for name in names}
        assert (real.quota, real.period, real.kind, real.units) == (*told.terms.key, *told.terms[1:])

    async def rebalance(self) -> None:
        """Somebody begins one, those that run come further, or somebody stops one."""
        await self.hands.choice(
            [self._move, self._move, self._even_out, self._weigh, self._follow, self._follow, self._cancel]
        )()

    async def _move(self) -> None:
        """Move units from the region with the most idle ones; most leased units are spent or returned at once."""
        source = max(REGIONS, key=self._idle)
        target = next(region for region in REGIONS if region != source)
        asked = MoveUnits.model_validate(
            {
                "mode": "move",
                "quota": QUOTAS[0],
                "from": source,
                "to": target,
                "units": self.hands.choice([1, 10, 60]),
            }
        )
        await self._begin(asked, lambda table, now: plan_move(table, source, target, asked.units, now))

    def _idle(self, region: str) -> int:
        key = Key(QUOTAS[0], period_at(Calendar(PeriodKind.HOUR), self.now).id)
        return sum(
            lease.outstanding for lease in self.model.leases.values() if (lease.key, lease.region) == (key, region)
        )

    async def _even_out(self) -> None:
        await self._begin(EvenOut(mode="even_out", quota=QUOTAS[0]), plan_even_out)

    async def _weigh(self) -> None:
        weight, floor, ceiling = (self.hands.choice(each) for each in ((None, 1, 3), (None, 5, 15), (None, 15, 60)))
        region = self.hands.choice(REGIONS)
        words = RegionSettingPatch(weight=weight, floor=floor, ceiling=ceiling)
        asked = Weigh(mode="weigh", quota="exports", settings={region: words})
        await self._begin(asked, plan_division, {region: Setting(weight, floor, ceiling)})

    async def _begin(self, asked: AnyRebalance, planner: Planner, settings: dict[str, Setting] | None = None) -> None:
        wish = RebalanceRequest(UUID(int=self.hands.getrandbits(128)), asked, Actor("test"), lambda _: True)
        async with self.real.transaction():
            real = await begin_rebalance(self.real, self.documents, wish, self.now)
        if not isinstance(real, Rebalance):
            return
        if settings:
            self.model.commit(self.model.set("exports:", settings))
        period = period_at(Calendar(PeriodKind.HOUR), self.now).id
        plan, transaction = self.model.begin_moves(Key(QUOTAS[0], period), planner, wish.id, self.now)
        assert real.plan.moves == (plan.moves if plan else [])
        self.model.commit(transaction)
        self.begun += bool(plan)

    async def _follow(self) -> None:
        for id_ in self.model.rows["rebalance"]:
            async with self.real.transaction():
                await follow(self.real, self.documents, id_, self.now)
            self.model.commit(self.model.follow_moves(id_, self.now))

    async def _cancel(self) -> None:
        if ids := list(self.model.rows["rebalance"]):
            id_ = self.hands.choice(ids)
            async with self.real.transaction():
                await cancel_rebalance(self.real, id_, Actor("test"), self.now)
            self.model.commit(self.model.cancel_moves(id_))

    async def _compare_moves(self) -> None:
        rows = await self.real.fetch("SELECT * FROM rebalance_move WHERE ended_at IS NULL")
        moves = [move for move in self.model.rows["move"].values() if move is not None]
        assert sorted(map(repr, map(move_of_row, rows))) == sorted(map(repr, moves))
        counted = {Key(row["quota"], row["period"]): row["open_moves"] for row in await self.real.fetch(_MOVING)}
        assert counted == Counter(move.key for move in moves)
        settings = {(row["key"], row["region"]): row["weight"] for row in await self.real.fetch(_SETTINGS)}
        kept = self.model.rows["setting"].items()
        assert settings == {name: each.weight for name, each in kept if each != NOTHING_SET}

    async def compare(self) -> None:
        await self._compare_moves()
        pools = {
            (row["quota"], row["period"]): {name: row[name] for name in POOL_COLUMNS}
            for row in await self.real.fetch("SELECT * FROM pool")
        }
        assert pools == {tuple(key): _columns(pool, POOL_COLUMNS) for key, pool in self.model.pools.items()}
        names = (*LEASE_COLUMNS, "region", "reported_at", "expires_at")
        leases = {
            (row["epoch"], row["quota"], row["period"]): {name: row[name] for name in names} | {"state": row["state"]}
            for row in await self.real.fetch("SELECT * FROM lease")
        }
        assert leases == {
            (epoch, *key): _columns(lease, names) | {"state": lease.state.value}
            for (epoch, key), lease in self.model.leases.items()
        }
        await self._compare_what_is_booked()
        await self._compare_periods()
        lanes = {
            (row["epoch"], row["lane"]): (row["last_seq"], row["last_hash"], row["head"])
            for row in await self.real.fetch("SELECT * FROM lane")
        }
        assert lanes == {name: tuple(row) for name, row in self.model.lane_rows.items()}
        epochs = {
            row["epoch"]: tuple(row[name] for name in ("state", "fingerprint", "lost_data", "loss_is_assumed", "lanes"))
            for row in await self.real.fetch("SELECT * FROM region_epoch")
        }
        assert epochs == {
            number: (epoch.state.value, epoch.fingerprint, epoch.lost_data, epoch.loss_is_assumed, epoch.lanes)
            for number, epoch in self.model.epochs.items()
        }

    async def _compare_what_is_booked(self) -> None:
        """Every transfer, with what it names, and what people are to look at."""
        spaced = """replace(replace(dimensions::text, '": "', '":"'), '", "', '","')"""  # as Postgres writes it
        columns = ", ".join(spaced if name == "dimensions" else name for name in TRANSFER_COLUMNS[:-1])
        transfers = Counter(tuple(row) for row in await self.real.fetch(f"SELECT {columns} FROM transfer"))
        assert transfers == self.transfers
        kept = await self.real.fetch("SELECT epoch, lane, seq, quota, period, reason FROM quarantine")
        assert sorted(map(tuple, kept)) == sorted(self.quarantined)

    async def _compare_periods(self) -> None:
        rows = await self.real.fetch("SELECT id, state, close_requested_at, carries_suspense, closed_at FROM period")
        assert {id_: tuple(row) for id_, *row in rows} == {row["id"]: self.model.period(row["id"]) for row in rows}
        names = ("region", *CORRECTION_COLUMNS)
        corrections = {
            (row["epoch"], row["quota"], row["charge_period"], row["period"]): {name: row[name] for name in names}
            for row in await self.real.fetch("SELECT * FROM correction")
        }
        assert corrections == {name: _columns(each, names) for name, each in self.model.corrections.items()}

    def _note(self, transaction: Transaction) -> None:
        self.quarantined += transaction.quarantined
        for entry in transaction.entries:
            self.transfers.update(_booked(entry, each) for each in entry.transfers)


def _booked(entry: Report | Movement, transfer: Transfer) -> tuple[object, ...]:
    """Return the row without its creation time."""
    if isinstance(entry, Movement):
        origin: tuple[object, ...] = (entry.movement_id, None, None, None)
    else:
        origin = (None, entry.lane, entry.seq, transfer.line)
    return (
        transfer.key.period,
        transfer.key.quota,
        transfer.src,
        transfer.dst,
        transfer.units,
        transfer.cause,
        entry.region,
        entry.epoch,
        *origin,
        transfer.part,
        None if transfer.minute is None else moment_of(transfer.minute),
        None if transfer.dimensions is None else msgspec.json.encode(transfer.dimensions).decode(),
        transfer.charge_period,
    )


def _columns(row: Any, names: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _plain(response: Any) -> Any:
    """Return reports without positions, for a sequence leaves gaps, and in no order."""
    plain = msgspec.to_builtins(response)
    for reply in plain["replies"]:
        if reply["receipt"]:
            del reply["receipt"]["position"]
        reply["leases"].sort(key=lambda lease: (lease["quota"], lease["period"]))
    return plain


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    connection: Connection = await asyncpg.connect(database)
    await read_sums_as_integers(connection)
    yield connection
    await connection.close()


@pytest.mark.parametrize(
    "seed", cases([2, 5, 6, 7], short=1)
)  # histories in which all that is asserted at the end occurs
async def test_the_model_and_postgres_answer_alike_and_hold_the_same(connection: Connection, seed: int) -> None:
    both = Both(connection, seed)
    await both.limit(116)
    for region in REGIONS:
        await both.region(region, "active")
        await both.open(region, lost_data=True)
    for step in range(120):
        both.now += timedelta(milliseconds=both.chance.choice([5, 100, 400, 2_500]))
        if step % 20 == 10:
            await both.tell_journal(step)
        await _something(both, both.chance.random())
        await both.compare()
        await both.rebalance()
        await both.compare()
        await both.adjust()
        await both.compare()
        await both.recall()
    await both.retire()
    await both.compare()
    both.now += timedelta(hours=1)
    await both.close_at_last("2026-11-18T12")
    await both.compare()
    for step in range(80):
        if step % 8 == 0:
            await both.limit(116, Modes.of(step // 8))  # each mode, and others beside it
        both.now += timedelta(milliseconds=both.chance.choice([5, 100, 400, 2_500]))
        await _something(both, both.chance.uniform(NO_NEW_EPOCHS, 1))
        await both.adjust()
        await both.compare()
        await both.recall()
    await both.contest(both.chance.choice(REGIONS))
    await both.compare()
    for _ in range(30):
        await both.open_a_cell(both.chance.choice(REGIONS))
        await both.compare()
    assert any(isinstance(answer, EpochOpened) for answer in both.rebound)
    assert both.model.rows["override"]
    consumed = {key.period for (_, key), lease in both.model.leases.items() if lease.consumed}
    assert consumed >= {"2026-11-18T12", "2026-11-18T13", "2026-11-18"}
    assert both.rebased
    assert both.recalled
    assert both.begun
    assert both.adjusted.keys() >= {"PROPOSED", "APPROVED", "SAME_PERSON", "WITHDRAWN"}, both.adjusted
    assert both.model.period("2026-11-18T12").closed_at
    assert any(pool.carried_over_in for pool in both.model.pools.values())
    assert both.model.corrections


NO_NEW_EPOCHS = 0.06
_MOVING = "SELECT quota, period, open_moves FROM pool WHERE open_moves <> 0"
_SETTINGS = "SELECT key, region, weight FROM region_setting"


async def _something(both: Both, what: float) -> None:
    if what < 0.03:
        await both.limit(both.chance.choice([22, 116, 298]))  # of each another part goes over
    elif what < NO_NEW_EPOCHS:
        await both.open(both.chance.choice(REGIONS), lost_data=both.chance.random() < 0.5)
    elif what < 0.08:
        await both.region(both.chance.choice(REGIONS), both.chance.choice(["active", "draining"]))
    elif what < 0.11:
        await both.rebind(both.chance.choice(REGIONS))
    elif what < 0.15:
        await both.override()
    elif what < 0.21:
        await both.expire()
    elif what < 0.28:
        await both.rebase()
    elif what < 0.33:
        await both.close()
    elif what < 0.36:
        await both.propose()
    elif what < 0.40:
        await both.approve()
    else:
        await both.say()
