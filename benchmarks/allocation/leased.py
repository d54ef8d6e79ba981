"""Leasehold's own allocation on virtual time: what decides here is the code that ships.

A region's `Quotas` says when to ask, for what, and who may wait; the coordinator's `domain.exchange` decides, whole:
judge, sort, settle, grant, recall, push, reply. Here is only what is around them: totals instead of a store with its
scripts, a dict instead of Postgres, a network that loses, delays and doubles, and the turns of the conversation.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.allocation.network import Network
from benchmarks.allocation.score import Score
from benchmarks.allocation.traces import Trace
from benchmarks.allocation.waiting import Queue
from coordinator.exchange.rules.balances import Key, Lease, Pool
from coordinator.exchange.rules.decision import decide
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.locked import (
    Bounds,
    LockedPool,
    limits_of,
    lock,
    needed_pools,
    pushable_quotas,
    waiting_epochs,
)
from coordinator.exchange.rules.replies import respond
from coordinator.exchange.rules.settlement import EpochState, Lane, expire
from coordinator.exchange.rules.submissions import ExchangeCall, Submission, classify, match_wants
from coordinator.limits.rules.entitlement import Catalogue, RegionShare
from coordinator.notice import Notice
from coordinator.rebalancing.rules.division import by_weight
from coordinator.settings import CoordinatorSettings
from protocol.limits.document import DEFAULT_HORIZON, AllowanceQuota, PeriodKind
from protocol.messages import (
    ExchangeReply,
    ExchangeResponse,
    FrozenBatch,
    FrozenLease,
    LiveState,
    Receipt,
    Signal,
    UsageLine,
)
from protocol.outcomes import ExchangeOutcome
from protocol.units import MAX_UNITS
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.reply_timeout import exchange_backoff, reply_timeout_ms
from regional_agent.leasing.settlement import ACKNOWLEDGED, answered_quotas, next_renewal_ms
from regional_agent.store.types import PolicyDecision

QUOTA = "units:tenant=acme"
REPORT_EVERY_MS = 500  # how often agents look for reports that are due, by default
FIRST_PAUSE_MS = 1_000  # lua/parts/report_due.lua
EXPIRY_EVERY_MS = 1_000
TERMS = LeaseTerms(CoordinatorSettings.model_fields["lease_ms"].default)


class Coordinator:
    """One lane for each region, whose epoch is its number and one."""

    def __init__(
        self, trace: Trace, period: str, horizon: str, network: Network, tell: Callable[[Notice], None]
    ) -> None:
        spec = AllowanceQuota(name="units", limit=trace.limit, period=PeriodKind(period), horizon=horizon)
        self._regions = [name_of(region) for region in range(trace.regions)]
        self._catalogue = Catalogue(
            1, {"units": spec}, None, {}, {name: RegionShare("active", 1) for name in self._regions}
        )
        self._lanes = {
            (epoch, 0): Lane(epoch, 0, 0, None, b"", EpochState.CURRENT, name, 1)
            for epoch, name in enumerate(self._regions, 1)
        }
        self._receipts = {name: Receipt(position=0, head="") for name in self._lanes}
        self._division = by_weight(self._catalogue)
        self._pools: dict[Key, Pool] = {}
        self._leases: dict[tuple[int, Key], Lease] = {}
        self._network, self._tell = network, tell
        network.later(EXPIRY_EVERY_MS, self._expire)

    def exchange(self, call: ExchangeCall) -> ExchangeResponse:
        """Decide exchanges as the product's transaction does."""
        now = self._network.now()
        matched = match_wants(classify([call], self._lanes), self._catalogue, TERMS, now)
        for key in needed_pools(matched):
            self._pools.setdefault(key, Pool(key))
        pools = {key: LockedPool(pool, period_is_open=True) for key, pool in self._pools.items()}
        divisions = dict.fromkeys(pools, self._division)
        locked = lock(matched, pools, self._leases.values(), [], divisions, self._catalogue.quotas, now)
        pushable = waiting_epochs(locked, now)
        limits = limits_of(self._catalogue, pushable_quotas(locked, pushable))
        decided = decide(locked, Bounds(pushable, limits, {}), TERMS, now)
        self._leases |= {(lease.epoch, lease.key): lease for lease in decided.new_leases}
        for booked in decided.booked:
            name = booked.report.epoch, booked.report.lane
            self._lanes[name] = self._lanes[name]._replace(last_seq=booked.report.seq, last_hash=booked.body_hash)
        for notice in decided.notices:
            self._tell(notice)
        return respond(call, decided.exchanges, locked, self._catalogue, self._receipts, TERMS, now)

    def _expire(self) -> None:
        for lease in self._leases.values():
            expire(self._pools[lease.key], lease, self._network.now())
        self._network.later(EXPIRY_EVERY_MS, self._expire)


def name_of(region: int) -> str:
    return f"region-{region}"


@dataclass(slots=True)
class Store:
    """A region's totals, and what its scripts do with them."""

    period: str = ""
    granted: int = 0
    overage: int = 0
    consumed: int = 0
    returned: int = 0
    last_grant: int = 0
    expires_ms: int = 0
    due_ms: int | None = None  # when there is something to report
    reported_ms: int = 0
    pause_ms: int = 0
    report_within_ms: int = 0
    report_at: int = 0
    seq: int = 0
    told: int = 0  # of what was consumed
    frozen: FrozenBatch | None = None

    @property
    def available(self) -> int:
        return self.granted + self.overage - self.consumed - self.returned

    def is_due(self, now_ms: int) -> bool:
        return self.due_ms is not None and self.due_ms <= now_ms

    def spend(self, units: int, now_ms: int) -> int:
        """check.lua. Gives how many were admitted."""
        taken = min(units, self.available) if now_ms < self.expires_ms else 0
        self.consumed += taken
        if taken and self.consumed >= self.report_at > self.consumed - taken:
            self.due_ms = 0
        elif taken and self.due_ms is None:
            self._note_usage(now_ms)
        return taken

    def _note_usage(self, now_ms: int) -> None:
        """report_due.lua."""
        is_quiet = now_ms - self.reported_ms >= self.report_within_ms
        self.pause_ms = 0 if is_quiet else min(self.report_within_ms, max(FIRST_PAUSE_MS, 2 * self.pause_ms))
        self.due_ms = max(now_ms, self.reported_ms + self.pause_ms)

    def freeze(self, epoch: int, now_ms: int) -> FrozenBatch:
        if self.frozen is None:
            lines = (
                [UsageLine(minute=0, dimensions={}, units=self.consumed - self.told)]
                if self.consumed > self.told
                else []
            )
            totals = {
                "granted": self.granted,
                "overage": self.overage,
                "consumed": self.consumed,
                "returned": self.returned,
            }
            leases = [FrozenLease(quota=QUOTA, period=self.period, lines=lines, **totals)] if self.period else []
            self.frozen = FrozenBatch(epoch=epoch, lane=0, seq=self.seq + 1, leases=leases)
            self.told, self.due_ms, self.reported_ms = self.consumed, None, now_ms
        return self.frozen

    def settle(self, reply: ExchangeReply, sent_ms: int) -> dict[str, int]:
        if self.frozen is not None and self.frozen.seq == reply.seq:
            self.seq, self.frozen = reply.seq, None
        gained = {}
        for lease in reply.leases:
            more = max(0, lease.granted - self.granted)
            self.period, self.granted = lease.period, max(self.granted, lease.granted)
            self.overage = max(self.overage, lease.overage)
            self.expires_ms = max(self.expires_ms, sent_ms + lease.expires_in_ms)
            self.last_grant = more or self.last_grant
            self.report_within_ms, self.report_at = lease.report_within_ms, lease.report_at
            gained[lease.quota] = more
        return gained

    def give_back(self, keep: int) -> int:
        units = max(0, self.available - keep)
        self.returned += units
        if units or self.due_ms is not None:
            self.due_ms = 0
        return units


class Region:
    """An agent: its admission of this one quota, and its conversation."""

    def __init__(
        self, number: int, network: Network, score: Score, ask: Callable[["Region", ExchangeCall, int], None]
    ) -> None:
        self.number, self.epoch = number, number + 1
        self._network, self._score, self._ask = network, score, ask
        self.store, self.quotas, self._queue = Store(), Quotas(network), Queue()
        self._news: asyncio.Event | None = None
        self._call = 0  # the one that is under way; 0: none
        self._calls = 0
        self._next_ms = self._sent_ms = self._report_at_ms = 0
        self._backoff = exchange_backoff()
        self._asked: list[str] = []

    # --- admission ---------------------------------------------------------------------------------------------------

    def arrive(self, units: int, tick: int) -> None:
        taken = self.store.spend(units, self._network.now_ms)
        self._score.admit(self.number, taken)
        decision = PolicyDecision(0, MAX_UNITS, 0, 0, 0, self.store.available, self.store.last_grant, 0)
        self.quotas.record_demand(QUOTA, units, decision)
        if taken < units:
            if self.quotas.may_wait(QUOTA):
                self._queue.put(units - taken, tick, self._network.now_ms)
                self._news = self.quotas.start_waiting(QUOTA, units - taken)
            else:
                self._score.deny(self.number, units - taken, tick)

    def _heed_news(self) -> None:
        """Let a waiting request ask the store again, and wait on if there is hope."""
        if self._news is None or not self._news.is_set():
            return
        waiting = self._queue.units
        self.quotas.stop_waiting(QUOTA, waiting)
        taken = self.store.spend(waiting, self._network.now_ms)
        self._score.admit(self.number, self._queue.take(taken))
        self._news = None
        if not self._queue.cohorts:
            return
        if self.quotas.may_wait(QUOTA):
            self._news = self.quotas.start_waiting(QUOTA, self._queue.units)
        else:
            for cohort in self._queue.overdue(self._network.now_ms + 10**9):
                self._score.deny(self.number, cohort.units, cohort.tick)

    def _give_up(self) -> None:
        for cohort in self._queue.overdue(self._network.now_ms):
            self.quotas.on_wait_timeout(QUOTA)
            self.quotas.stop_waiting(QUOTA, cohort.units)
            self._score.deny(self.number, cohort.units, cohort.tick)

    # --- conversation ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Says what is due, unless a call is under way."""
        self._give_up()
        now_ms, wake = self._network.now_ms, self.quotas.wake
        if self._call or now_ms < self._backoff.until or not (wake.is_set() or now_ms >= self._next_ms):
            return
        wake.clear()
        asked, reports = self.quotas.due(), now_ms >= self._report_at_ms
        if reports:
            self._report_at_ms = now_ms + REPORT_EVERY_MS
        if asked or self.store.frozen or (reports and self.store.is_due(now_ms)):
            self._speak(asked)
        due_in_ms = self.quotas.next_due_in_ms()
        self._next_ms = self._report_at_ms if due_in_ms is None else min(self._report_at_ms, now_ms + due_in_ms)

    def _speak(self, asked: list[str]) -> None:
        batch = self.store.freeze(self.epoch, self._network.now_ms)
        live = LiveState(demands=[self.quotas.grant_request(quota) for quota in asked])
        self._calls += 1
        self._call, self._asked, self._sent_ms = self._calls, asked, self._network.now_ms
        name, number = name_of(self.number), self._call
        self._ask(self, ExchangeCall(name, name, [Submission(batch, repr(batch).encode(), live.demands)]), number)
        reply_within_ms = reply_timeout_ms(self._backoff, self.quotas.round_trip_ms)
        self._network.later(int(reply_within_ms), lambda: self._fail(number))

    def _fail(self, number: int) -> None:
        if number == self._call:
            self._call = 0
            if self._backoff.pause:  # one message may get lost
                self.quotas.on_coordinator_lost()
            self._backoff.failed(self._sent_ms)

    def hear(self, response: ExchangeResponse, number: int) -> None:
        if number != self._call:
            return
        self._call = 0
        self._backoff.succeeded()
        self.quotas.on_coordinator_reached()
        self.quotas.round_trip_ms = self._network.now_ms - self._sent_ms
        for reply in response.replies:
            self._settle(reply)
        self._heed_news()
        self.turn()

    def _settle(self, reply: ExchangeReply) -> None:
        if reply.outcome not in ACKNOWLEDGED:
            assert reply.outcome is ExchangeOutcome.STALE, reply.outcome
            return
        gained = self.store.settle(reply, self._sent_ms)
        self.quotas.apply_reply(answered_quotas(reply, self._asked, gained), reply, gained)
        renewal_in_ms = next_renewal_ms(reply.leases)
        self.quotas.schedule_renewal(QUOTA, None if renewal_in_ms is None else self._sent_ms + renewal_in_ms)
        for lease in reply.leases:
            if lease.recall_keep is not None and self.store.give_back(lease.recall_keep):
                self._report_now()

    def heed(self, signal: Signal) -> None:
        if signal.kind == "recall":
            self.give_back(signal.keep)
        elif signal.kind == "grant":
            self.quotas.retry(QUOTA)
        self.turn()

    def _report_now(self) -> None:
        self._report_at_ms = 0
        self.quotas.wake.set()

    def give_back(self, keep: int) -> None:
        self.store.give_back(keep)
        self._report_now()


class Leased:
    """Regions and a coordinator, with a network in between."""

    name = "Leasehold"

    def __init__(self, trace: Trace, score: Score, period: str = "hour", horizon: str = DEFAULT_HORIZON) -> None:
        self.network = Network(trace, self.name)
        self.coordinator = Coordinator(trace, period, horizon, self.network, self._signal)
        self.regions = [Region(number, self.network, score, self._ask) for number in range(trace.regions)]
        self.asking = 0
        self.stranded = 0  # units of the region that is cut off, when it is
        if trace.cut:
            self.network.later(trace.cut.from_ms, self._note_stranded)
        if trace.cut and trace.settled_at_ms is not None:
            lost = self.regions[trace.cut.region]
            self.network.later(trace.settled_at_ms, lambda: lost.give_back(0))

    def _note_stranded(self) -> None:
        assert self.network.cut is not None
        self.stranded = self.regions[self.network.cut.region].store.available

    @property
    def messages(self) -> int:
        return self.network.messages

    def arrive(self, region: int, units: int, tick: int) -> None:
        self.regions[region].arrive(units, tick)

    def turn(self) -> None:
        for region in self.regions:
            region.turn()

    def _ask(self, region: Region, call: ExchangeCall, number: int) -> None:
        about = 1 if call.submissions[0].demands else 0
        self.asking += about

        def answer() -> None:
            response = self.coordinator.exchange(call)
            self.asking += about
            self.network.send(region.number, lambda: region.hear(response, number))

        self.network.send(region.number, answer)

    def _signal(self, notice: Notice) -> None:
        for region in self.regions:
            if notice.region in (None, name_of(region.number)):
                self.asking += 1
                self._send(region, notice.signal)

    def _send(self, region: Region, signal: Signal) -> None:
        self.network.send(region.number, lambda: region.heed(signal))
