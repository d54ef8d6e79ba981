"""The conversation with the coordinator: freeze, exchange, acknowledge.

One exchange carries what a lane has to report and what it would like to have. Its batch is frozen in the store before
it is sent and stays there, byte for byte, until its receipt is in: an agent may die at any point in between, and this
one or any other of the region sends the same bytes again. One call is under way at a time; it takes along all lanes
that have something to say.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from protocol.clock import Clock
from protocol.identifiers import lane_of
from protocol.messages import (
    Exchange,
    ExchangeFault,
    ExchangeReply,
    ExchangeRequest,
    ExchangeResponse,
    LeaseReply,
    LiveState,
    Versions,
)
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from regional_agent.leasing.coordinator_client import (
    CoordinatorClient,
    CoordinatorFailed,
    CoordinatorRefused,
    CoordinatorUnavailable,
)
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.lanes import Lanes
from regional_agent.leasing.quotas import Leasing
from regional_agent.leasing.rules.reply_timeout import LONGEST_PAUSE_MS, exchange_backoff, reply_timeout_ms
from regional_agent.metrics import Metrics
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced, FrozenBytes, LeaseLost, StoreIncarnation
from regional_agent.store_outage.booking import JournalBooking

log = structlog.get_logger()
T = TypeVar("T")

MOST_QUOTAS = 100
MOST_ROUNDS = 10_000
DRAINED_LOOK_MS = 1_000  # how often a drained region asks whether it is restored
MOST_CALL_BYTES = 4 * 1024 * 1024  # of frozen batches in one call: the coordinator reads 16 MiB
# The coordinator answered 500 so often in a row: parts of the message are tried by themselves, then and now and again.
SUSPICIOUS_FAILURES, TRY_PARTS_EVERY = 2, 8
PAUSE_AFTER_FAILURE_MS = 30_000  # of a lane that alone is answered so
OFFER_AGAIN_MS = 30_000  # what another agent left behind, and what was refused, in case people have resolved it

# A batch may be dropped once the coordinator has booked it, now or before; or keeps it for people to judge.
ACKNOWLEDGED = {ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED, ExchangeOutcome.RETIRED}
# The store has forgotten what it told: its epoch is over, and another is opened.
EVIDENCE_OF_LOSS = {ExchangeOutcome.CONFLICT, ExchangeOutcome.STORE_REGRESSED}
# There will be no more, but what there is may be spent.
RENEWED_WITHIN_MS = 30_000  # a lease that is not used: whatever is left of its time then, it has to outlast an outage
SPENDABLE = (None, GrantRefusal.EXHAUSTED, GrantRefusal.TOTAL_TOO_LARGE)
FAILURES = (CoordinatorUnavailable, CoordinatorRefused, StoreUnavailable, StoreError)


class NoReply(CoordinatorUnavailable):
    """Nothing came in time. It may be there all the same."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """One lane's part of a call that is under way."""

    lane: int
    frozen: FrozenBytes
    asked: list[str]

    def with_first_half_of_wants(self) -> "Spoken":
        return replace(self, asked=self.asked[: len(self.asked) // 2])


Culprit = tuple[Spoken, CoordinatorRefused | CoordinatorFailed]


class ExchangeLoop:
    def __init__(
        self,
        *,
        scripts: Scripts,
        coordinator: CoordinatorClient,
        leasing: Leasing,
        epochs: EpochManager,
        journal: JournalBooking,
        metrics: Metrics,
        clock: Clock,
        interval_ms: int,
    ) -> None:
        self._scripts = scripts
        self._coordinator = coordinator
        self._leasing = leasing
        self._epochs = epochs
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._interval_ms = interval_ms
        self._backoff = exchange_backoff()
        self._report_at_ms = 0
        self._sent_ms = 0
        self._resend: set[int] = set()  # lanes whose batch may still wait for its receipt
        self._looked_back: StoreIncarnation | None = None
        self._older_news = 0  # how often there was a reason to look at older epochs
        self._older_seen = -1
        self._drains = False
        self._region_look_at_ms: int | None = None  # when to exchange though there is nothing to say
        self.lanes = Lanes()
        self._failures = 0  # in a row, of the coordinator over what it was sent
        self._offered_at_ms = clock.monotonic_ms()
        self.offer_again_ms = OFFER_AGAIN_MS
        self.versions = Versions()
        self.heard_of: Callable[[Versions], None] = lambda _: None
        self.reported_at_ms = clock.monotonic_ms()

    async def run(self) -> None:
        while True:
            await self._pause()
            await self._speak()

    @property
    def stopped_lanes(self) -> dict[tuple[int, int], ExchangeOutcome]:
        """By epoch and lane."""
        return {lane: stop.outcome for lane, stop in self.lanes.stopped.items()}

    @property
    def is_pausing(self) -> bool:
        """Something failed, and nothing is said for a while."""
        return self._backoff.pause > 0

    def report_now(self) -> None:
        self._report_at_ms = 0
        self._leasing.wake.set()

    def look_back_again(self) -> None:
        """An epoch that is over has evidence again: work was committed to a hold of it."""
        self._older_news += 1
        self.report_now()

    async def finish(self, *, return_unspent: bool) -> int:
        """The last words: what was spent is booked and, where the agent is told to, the rest returned.

        Gives the units that cannot be returned yet, for they are held.
        """
        incarnation = self._epochs.current
        self._backoff = exchange_backoff(LONGEST_PAUSE_MS)  # said once: it is waited for as long as for any
        await self._journal.book_last(incarnation)
        if incarnation is None:
            return 0
        if return_unspent:
            await self._return_everything(incarnation)
        for quota in self._leasing.central():
            await self._scripts.return_units(incarnation, quota, 0)
        await self._report_everything(incarnation)
        return await self._scripts.held_units(incarnation) if return_unspent else 0

    async def _return_everything(self, incarnation: StoreIncarnation) -> int:
        """Gives the units that were."""
        leased = await self._scripts.leased_quotas(incarnation)
        return sum([await self._scripts.return_units(incarnation, quota, 0, ahead=True) for quota in leased])

    async def _report_everything(self, incarnation: StoreIncarnation) -> None:
        for _ in range(MOST_ROUNDS):
            # Each round looks at every lane: another agent may have frozen a batch meanwhile, and died with it.
            self._resend = set(range(incarnation.lanes))
            if not await self._exchange(incarnation, asked={}, reports=True):
                return

    # --- one turn ----------------------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Until somebody wants something, a report is due, or the pause after a failure is over."""
        if self._backoff.pause:
            await asyncio.sleep(max(0, self._backoff.until - self._clock.monotonic_ms()) / 1000)
            return
        moments = [self._report_at_ms - self._clock.monotonic_ms(), self._leasing.next_due_in_ms()]
        timeout_ms = max(0, min(moment for moment in moments if moment is not None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await self._leasing.wake.wait()
        self._leasing.wake.clear()

    async def _speak(self) -> None:
        incarnation, began_ms = self._epochs.current, self._clock.monotonic_ms()
        try:
            await self._journal.book(incarnation)
            if incarnation is None:
                await self._wait_for_epoch()
            else:
                await self._look_back(incarnation)
                await self._say_what_is_due(incarnation)
            self._backoff.succeeded()
            self._metrics.cut_off.heard()
            self._leasing.reached()
            self._note_reached()
        except LeaseLost as lost:
            self._lost_data(incarnation, str(lost))
        except Fenced:
            self._epochs.invalidate()
        except FAILURES as error:
            if self.is_pausing or not isinstance(error, NoReply):  # one message may get lost
                self._leasing.cut_off()
            self._backoff.failed(began_ms)
            self._metrics.exchange_failures.inc()
            if isinstance(error, (CoordinatorUnavailable, CoordinatorRefused)):
                is_refused = isinstance(error, CoordinatorRefused)
                self._leasing.contact.failed(self._clock.monotonic_ms(), str(error), is_refused=is_refused)
            log.warning("an exchange failed", reason=str(error), next_pause_ms=self._backoff.pause)
            if isinstance(error, CoordinatorUnavailable) and incarnation is not None:
                await self._was_unheard(incarnation)

    def _note_reached(self) -> None:
        failed_ms = self._leasing.contact.reached(self._clock.monotonic_ms())
        if failed_ms is not None:
            log.info("coordinator reached again", failed_ms=failed_ms)

    def _lost_data(self, incarnation: StoreIncarnation | None, reason: str) -> None:
        """End the epoch: another is opened, and what this one had outstanding is kept apart for people."""
        if incarnation is not None and incarnation == self._epochs.current:
            self._metrics.epochs.lost.inc()
            log.error("the store lost data: its epoch is over", epoch=incarnation.epoch, reason=reason)
            self._epochs.on_data_loss(incarnation)

    async def _was_unheard(self, incarnation: StoreIncarnation) -> None:
        """The store knows it for all agents: whoever is answered takes it back there."""
        with contextlib.suppress(StoreUnavailable, StoreError, Fenced):  # seen to where it was asked for more than this
            self._metrics.cut_off.show(await self._scripts.note_coordinator_lost(incarnation))

    async def _wait_for_epoch(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_ms / 1000):
                await self._epochs.established.wait()

    async def _look_back(self, incarnation: StoreIncarnation) -> None:
        """Evidence of older epochs is true, and comes before anything else; in a new incarnation the leases come after
        it.
        """
        self._offer_again(incarnation)
        news = self._older_news
        if news != self._older_seen or self._looked_back != incarnation:
            await self._report_older(incarnation)
            self._older_seen = news
        if self._looked_back == incarnation:
            return
        for quota in await self._scripts.leased_quotas(incarnation):
            self._leasing.leased(quota, renew_at_ms=0)  # left by an agent that is gone: at once
        self._resend = set(range(incarnation.lanes))
        self._looked_back = incarnation

    async def _report_older(self, incarnation: StoreIncarnation) -> None:
        """What is held of an epoch stays reserved until each hold has ended, which is looked at before it is closed."""
        for older in await self._scripts.older_epochs(incarnation):
            held = await self._scripts.held_units(older)
            await self._close(older)
            if not held and not self.lanes.has_stopped(older.epoch):
                await self._scripts.forget_epoch(older)
        if self._drains:
            await self._return_everything(incarnation)

    async def _close(self, older: StoreIncarnation) -> None:
        """Its final totals: no script admits on it any more, so what is not held is returned, and then told.

        A reply may tell of more that was granted to it, and whose reply was lost: that is returned as well.
        """
        for _ in range(MOST_ROUNDS):
            returned = await self._return_everything(older)
            await self._report_everything(older)
            if not returned:
                return

    def _offer_again(self, incarnation: StoreIncarnation) -> None:
        """An agent that died may have left a batch in a lane where nothing else happens: whoever is alive sends it."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._offered_at_ms + self.offer_again_ms:
            self._offered_at_ms = now_ms
            self._resend = set(range(incarnation.lanes))
            self._older_news += 1
            self.lanes.offer_again(now_ms)

    async def _look_at_stopped_lanes(self, incarnation: StoreIncarnation) -> None:
        """A lane goes on as soon as any agent of the region had its batch accepted: the store's number tells."""
        for (epoch, lane), stop in list(self.lanes.stopped.items()):
            of = incarnation._replace(epoch=epoch, lanes=max(incarnation.lanes, lane + 1))
            if await self._scripts.frozen_seq(of, lane) != stop.seq:
                self._goes_on(of, lane)

    async def _say_what_is_due(self, incarnation: StoreIncarnation) -> None:
        await self._give_back_what_nobody_took(incarnation)
        now_ms = self._clock.monotonic_ms()
        reports = now_ms >= self._report_at_ms
        if reports:
            self._report_at_ms = now_ms + self._interval_ms
            await self._look_at_stopped_lanes(incarnation)
        asked = _by_lane(incarnation, self._leasing.due(MOST_QUOTAS), quota_of=str)
        await self._exchange(incarnation, asked=asked, reports=reports)
        if reports:
            self.reported_at_ms = now_ms

    async def _give_back_what_nobody_took(self, incarnation: StoreIncarnation) -> None:
        """Of what requests asked the coordinator for: who hung up has left some."""
        for quota in self._leasing.to_give_back():
            if await self._scripts.return_units(incarnation, quota, 0):
                self._report_at_ms = 0

    async def _exchange(self, incarnation: StoreIncarnation, *, asked: dict[int, list[str]], reports: bool) -> bool:
        """One call with all lanes that have something to say. False if there was nothing to say."""
        lanes = range(incarnation.lanes) if reports else sorted({*asked, *self._resend})
        frozen = await asyncio.gather(*(self._freeze(incarnation, lane, asked.get(lane, [])) for lane in lanes))
        spoken = [part for part in frozen if part is not None]
        if not spoken:
            return False
        self._resend |= {part.lane for part in spoken}
        for parts in _calls_of(spoken):
            await self._deliver(incarnation, parts)
        return True

    async def _freeze(self, incarnation: StoreIncarnation, lane: int, asked: list[str]) -> Spoken | None:
        now_ms = self._clock.monotonic_ms()
        if not self.lanes.is_offered((incarnation.epoch, lane), now_ms):
            paused_for_ms = self.lanes.paused_for_ms((incarnation.epoch, lane), now_ms)
            for quota in asked:
                if paused_for_ms:
                    self._leasing.postpone(quota, paused_for_ms)
                else:
                    self._leasing.cannot_ask(quota)
            return None
        dirty = await self._scripts.dirty_quotas(incarnation, lane, MOST_QUOTAS)
        is_look = self._is_region_look(lane)
        if not dirty and not asked and not is_look and not await self._must_resend(incarnation, lane):
            return None
        quotas = [*dirty, *(quota for quota in asked if quota not in dirty)]
        frozen = await self._scripts.freeze(incarnation, lane, quotas)
        if incarnation == self._epochs.current:
            for quota, units in frozen.held.items():
                self._leasing.held(quota, units)
        return Spoken(lane, frozen, asked)

    def look_at_region(self) -> None:
        """Ask the coordinator for the region's status soon, though there may be nothing to report."""
        self._region_look_at_ms = self._clock.monotonic_ms()
        self.report_now()

    def _is_region_look(self, lane: int) -> bool:
        """Return whether the first lane exchanges for the region's status alone: only a reply says `drain`."""
        at_ms, now_ms = self._region_look_at_ms, self._clock.monotonic_ms()
        if lane or at_ms is None or now_ms < at_ms:
            return False
        self._region_look_at_ms = None
        return True

    async def _must_resend(self, incarnation: StoreIncarnation, lane: int) -> bool:
        waits = lane in self._resend and await self._scripts.frozen_seq(incarnation, lane) is not None
        if not waits:
            self._resend.discard(lane)
        return waits

    async def _deliver(self, incarnation: StoreIncarnation, parts: list[Spoken]) -> None:
        """Deliver one call. What it is refused for is set aside, and the rest goes on."""
        doubts_itself = (self._failures + 1) % TRY_PARTS_EVERY == SUSPICIOUS_FAILURES
        try:
            culprits = await self._deliver_or_halve(incarnation, parts, doubts_itself=doubts_itself)
        except CoordinatorFailed:
            self._failures += 1
            raise
        if len(culprits) == len(parts) and isinstance(culprits[0][1], CoordinatorFailed):
            self._failures += 1
            raise culprits[0][1]  # all of them fail alike: it is an outage, and none of them is the cause
        for part, error in culprits:
            if isinstance(error, CoordinatorFailed):
                self._pause_lane(incarnation, part, PAUSE_AFTER_FAILURE_MS, str(error))
            else:
                self._refused(incarnation, part, ExchangeOutcome.REFUSED, reason=str(error))
        self._failures = 0

    async def _deliver_or_halve(
        self, incarnation: StoreIncarnation, parts: list[Spoken], *, doubts_itself: bool
    ) -> list[Culprit]:
        """Halve a call that is refused as a whole, until a lane stands alone, and then its wants.

        Return the lanes whose batch is refused even alone. A want that is refused alone is set aside. With
        `doubts_itself` an answer of 500 counts as a refusal: the coordinator may have a fault with this call only.
        """
        halve = partial(self._deliver_or_halve, incarnation, doubts_itself=doubts_itself)
        try:
            response = await self._call(incarnation, parts)
        except (CoordinatorRefused, CoordinatorFailed) as error:
            if not (error.is_about_content if isinstance(error, CoordinatorRefused) else doubts_itself):
                raise
            if len(parts) > 1:
                middle = len(parts) // 2
                return await halve(parts[:middle]) + await halve(parts[middle:])
            [part] = parts
            if not part.asked:
                return [(part, error)]
            culprits = await halve([part.with_first_half_of_wants()])
            if len(part.asked) == 1 and not culprits:
                self._set_want_aside(part.asked[0], str(error))
            return culprits
        await self._take_in(incarnation, parts, response)
        return []

    def _set_want_aside(self, quota: str, reason: str) -> None:
        self._metrics.refusals.items.labels("want").inc()
        log.error("the coordinator refused a want; it is set aside", quota=quota, reason=reason)
        self._leasing.refuse(quota, reason)

    async def _call(self, incarnation: StoreIncarnation, spoken: list[Spoken]) -> ExchangeResponse:
        exchanges = [
            Exchange(
                frozen=part.frozen.bytes,
                live=LiveState(wants=[self._leasing.want_of(quota) for quota in part.asked]),
            )
            for part in spoken
        ]
        request = ExchangeRequest(fingerprint=incarnation.fingerprint, versions=self.versions, exchanges=exchanges)
        self._sent_ms = self._clock.monotonic_ms()
        response = await self._ask(request)
        self._leasing.round_trip_ms = self._clock.monotonic_ms() - self._sent_ms
        self._metrics.exchange_seconds.observe(self._leasing.round_trip_ms / 1000)
        return response

    async def _ask(self, request: ExchangeRequest) -> ExchangeResponse:
        """Requests wait for what it grants, and the next one would say the same."""
        try:
            async with asyncio.timeout(reply_timeout_ms(self._backoff, self._leasing.round_trip_ms) / 1000):
                return await self._coordinator.exchange(request)
        except TimeoutError:
            raise NoReply("no reply in time") from None

    # --- the reply ---------------------------------------------------------------------------------------------------

    async def _take_in(self, incarnation: StoreIncarnation, spoken: list[Spoken], response: ExchangeResponse) -> None:
        for part, reply in zip(spoken, response.replies, strict=False):  # in the order of the request
            await self._settle(incarnation, part, reply)
        self.heard_of(response.versions)
        self._drains = self._leasing.contact.is_draining = response.drain
        self._region_look_at_ms = self._clock.monotonic_ms() + DRAINED_LOOK_MS if response.drain else None
        if response.drain:
            await self._return_everything(incarnation)

    async def _settle(self, incarnation: StoreIncarnation, part: Spoken, reply: ExchangeReply) -> None:
        self._metrics.exchanges.labels(reply.outcome.value).inc()
        if reply.outcome in ACKNOWLEDGED:
            gained = await self._scripts.settle(incarnation, part.lane, part.frozen.mono_us, reply)
            self._resend.discard(part.lane)
            self._goes_on(incarnation, part.lane)
            if part.frozen.has_more:
                self.report_now()
            if _is_over(reply):
                self._epochs.on_epoch_closed(incarnation)
            self._tell(answered_by(reply, part.asked, gained), reply, gained)
            for quota, leases in _by_quota(reply.leases).items():
                renewal_in_ms = renewal_of(leases)
                self._leasing.leased(quota, None if renewal_in_ms is None else self._sent_ms + renewal_in_ms)
            for lease in reply.leases:
                if lease.recall_keep is not None and not lease.starts_in_ms:
                    await self.answer_recall(incarnation, lease.quota, lease.recall_keep, lease.period)
        elif reply.outcome is ExchangeOutcome.REFUSED:
            self._refused_by_itself(incarnation, part, reply.fault)
        elif reply.outcome is ExchangeOutcome.WRONG_FINGERPRINT:
            # Said by or to an incarnation that is over. What was not booked stays in the store, and is said again.
            self._epochs.on_wrong_fingerprint(incarnation)
        elif reply.outcome is not ExchangeOutcome.STALE:
            self._refused(incarnation, part, reply.outcome, reply.expected_seq)
        elif await self._scripts.frozen_seq(incarnation, part.lane) == part.frozen.seq:
            # Nobody was quicker: read again, the store itself is behind. It has forgotten what it reported.
            self._refused(incarnation, part, ExchangeOutcome.STORE_REGRESSED)

    async def answer_recall(
        self, incarnation: StoreIncarnation, quota: str, keep: int, period: str | None = None
    ) -> None:
        """By a signal, or by a reply, for whoever missed that. What is given back is told in the next turn, at once."""
        if self._leasing.gives_back_later(quota):
            return
        if await self._scripts.return_units(incarnation, quota, keep, period=period):
            self.report_now()

    def _tell(self, asked: Sequence[str], reply: ExchangeReply, gained: dict[str, int]) -> None:
        self._leasing.answered(asked, reply, gained)
        for each in reply.refused:
            if each.refusal is GrantRefusal.INVALID:
                self._set_want_aside(each.quota, each.reason or each.refusal.value)

    def _refused(
        self,
        incarnation: StoreIncarnation,
        part: Spoken,
        outcome: ExchangeOutcome,
        expected_seq: int | None = None,
        reason: str = "",
    ) -> None:
        """The batch was not booked. It stays in the store and is offered again, as evidence of its epoch."""
        if outcome in EVIDENCE_OF_LOSS and incarnation == self._epochs.current:
            self._metrics.epochs.lost.inc()
            self._epochs.on_data_loss(incarnation)
            consequence = "the epoch is over"
        else:
            lane, now_ms = (incarnation.epoch, part.lane), self._clock.monotonic_ms()
            self.lanes.stop(lane, part.frozen.seq, outcome, reason, now_ms)
            consequence = "a lane has stopped"
        if outcome is ExchangeOutcome.REFUSED:
            self._metrics.refusals.items.labels("lane").inc()
        log.error(
            consequence,
            epoch=incarnation.epoch,
            lane=part.lane,
            seq=part.frozen.seq,
            outcome=outcome.value,
            expected_seq=expected_seq,
            reason=reason,
        )

    def _refused_by_itself(self, incarnation: StoreIncarnation, part: Spoken, fault: ExchangeFault | None) -> None:
        reason = "" if fault is None else f"{fault.field}: {fault.reason}" if fault.field else fault.reason
        if fault is not None and fault.again_in_ms is not None:
            self._pause_lane(incarnation, part, fault.again_in_ms, reason)
        else:
            self._refused(incarnation, part, ExchangeOutcome.REFUSED, reason=reason or "no reason was given")

    def _pause_lane(self, incarnation: StoreIncarnation, part: Spoken, for_ms: int, reason: str) -> None:
        """Something else stood in the way, or may have: the same bytes are sent again after a while."""
        self.lanes.pause((incarnation.epoch, part.lane), self._clock.monotonic_ms(), for_ms)
        for quota in part.asked:
            self._leasing.postpone(quota, for_ms)
        log.warning(
            "a lane pauses", epoch=incarnation.epoch, lane=part.lane, seq=part.frozen.seq, ms=for_ms, reason=reason
        )

    def _goes_on(self, incarnation: StoreIncarnation, lane: int) -> None:
        if self.lanes.goes_on((incarnation.epoch, lane)):
            log.info("a stopped lane goes on", epoch=incarnation.epoch, lane=lane)
            self._leasing.hint(None)


def _calls_of(spoken: Sequence[Spoken]) -> list[list[Spoken]]:
    """Lanes that travel together: as many as one call may be long."""
    calls: list[list[Spoken]] = []
    room = 0
    for part in spoken:
        size = len(part.frozen.bytes)
        if not calls or size > room:
            calls.append([])
            room = MOST_CALL_BYTES
        calls[-1].append(part)
        room -= size
    return calls


def _is_over(reply: ExchangeReply) -> bool:
    """The epoch gets nothing any more: another was opened for its region since, or people gave it up."""
    refusals = {lease.refusal for lease in reply.leases} | {want.refusal for want in reply.refused}
    return reply.outcome is ExchangeOutcome.RETIRED or GrantRefusal.EPOCH_FENCED in refusals


def answered_by(reply: ExchangeReply, asked: Sequence[str], gained: Mapping[str, int]) -> Sequence[str]:
    """A replay grants nothing, so who asked still asks; but for what was granted when the reply was lost."""
    return asked if reply.outcome is ExchangeOutcome.APPLIED else [quota for quota in asked if gained.get(quota)]


def renewal_of(leases: Sequence[LeaseReply]) -> int | None:
    """When a quota's leases are asked for again, counted from the request that these answer.

    Half-way to where one ends with nothing after it, and within RENEWED_WITHIN_MS, so that an idle lease outlasts an
    outage as well. Never for what is over or has nothing left to lose.
    """
    good = [lease for lease in leases if not lease.final and lease.refusal in SPENDABLE]
    continued = {lease.starts_in_ms for lease in good if lease.starts_in_ms}
    ends = {lease.ends_in_ms if lease.refusal else min(lease.expires_in_ms, 2 * RENEWED_WITHIN_MS) for lease in good}
    ends -= continued
    return min(ends) // 2 if ends else None


def _by_quota(leases: Iterable[LeaseReply]) -> dict[str, list[LeaseReply]]:
    by_quota: dict[str, list[LeaseReply]] = defaultdict(list)
    for lease in leases:
        by_quota[lease.quota].append(lease)
    return by_quota


def _by_lane(incarnation: StoreIncarnation, items: Iterable[T], quota_of: Callable[[T], str]) -> dict[int, list[T]]:
    by_lane: dict[int, list[T]] = defaultdict(list)
    for item in items:
        by_lane[lane_of(quota_of(item), incarnation.lanes)].append(item)
    return by_lane
