"""Rates and slots that are shared with other regions by demand: what is wanted here is told, and shares are heard.

Nothing of this is in a request's way: the store decides by the share that it has, and falls back by its own clock when
none comes. A key whose demand is under half of its safe share is not spoken of at all, unless another region wants more
than it has and the coordinator asks. Of slots nothing is said before they are scarce. Each report is of all agents of
the region: they add up in the store.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from protocol.clock import Clock
from protocol.limits.rates import Rate
from protocol.messages import (
    RateReport,
    RateShare,
    SharesRequest,
    SharesResponse,
    SlotReport,
    SlotShare,
    WantRefused,
)
from protocol.outcomes import DenialReason, GrantRefusal
from regional_agent.admission.policies import Policies
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.set_aside import SET_ASIDE_MS, SetAside
from regional_agent.metrics import Metrics
from regional_agent.shared_limits.rules import (
    LOOK_EVERY_MS,
    URGENT_AFTER_MS,
    InVain,
    RateDemand,
    cannot_wait,
    has_fallen,
    is_to_confirm,
    needs_no_message,
    wanted_micro,
)
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    AgentRateDemand,
    AgentSlotDemand,
    Fenced,
    PolicyDecision,
    RateCharge,
    RateReports,
    SlotCharge,
    SlotReports,
    StoreIncarnation,
)

log = structlog.get_logger()

MOST_KEYS = 10_000
MOST_IN_MESSAGE = 250  # the scripts that report of them and take their shares in hold the store for 2 ms then
UNSAID_MS = 5_000  # a report that failed is repeated after that
REFUSED_MS = 60_000
PAUSE_MS = 1_000
PARTS = 1_000_000_000
SLOT_MICRO = 1_000_000
SLOTS_AGAIN_MS = 1_000  # between two reports of slots that nobody asked for


@dataclass(slots=True)
class Key:
    """One rate, or one quota's slots, as this agent sees it; of slots in millionths."""

    quota: str
    shared: Rate | SlotCharge
    demand: RateDemand
    in_vain: InVain = field(default_factory=InVain)  # of slots
    due_ms: int | None = None  # when it is spoken of next; None: it need not be
    refused_until_ms: int = 0  # before that it is not spoken of
    told_ms: int = 0
    told_micro: int = 0  # what was wanted then, in the whole region
    told_here_micro: int = 0  # likewise, of this agent
    had_micro: int = 0  # the share that was in force then
    in_bucket: int = 0  # in parts, as the store said last
    look_ms: int = 0  # for a fall of what is wanted
    rate_micro: int = 0  # the share that was heard last
    expires_ms: int = 0
    is_contended: bool = False
    bound_milli: int = 0  # of a rate, in all regions: beyond limit and burst in the worst case, and at most so far
    overshoot_milli: int = 0

    @property
    def safe_micro(self) -> int:
        """Its safe share."""
        return self.shared.rate_micro if isinstance(self.shared, Rate) else self.shared.safe * SLOT_MICRO

    def demand_micro(self, now_ms: int) -> int:
        return self.demand.per_second_micro(now_ms)

    @property
    def is_looked_at(self) -> bool:
        return self.is_contended and self.told_here_micro > 0 and self.due_ms is not None

    def wanted_here_micro(self, now_ms: int) -> int:
        if not isinstance(self.shared, Rate):
            return 0
        return wanted_micro(self.demand_micro(now_ms), self.in_bucket, self.shared.burst, self.is_contended)


class ShareLoop:
    def __init__(
        self,
        agent: str,
        scripts: Scripts,
        epochs: EpochManager,
        quotas: Quotas,
        coordinator: CoordinatorClient,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._agent = agent
        self._scripts = scripts
        self._epochs = epochs
        self._quotas = quotas
        self._coordinator = coordinator
        self._metrics = metrics
        self._clock = clock
        self._keys: OrderedDict[str, Key] = OrderedDict()
        self._quiet: OrderedDict[str, None] = OrderedDict()  # keys that are not spoken of, the first to be so first
        self._wake = asyncio.Event()
        self.set_aside = SetAside()  # keys that the coordinator refused as they are
        self.policies: Policies | None = None
        self.heard = 0  # how often a share was more than before: what a smaller one denied is open again

    # --- told by admission and slices ---------------------------------------------------------------------------------

    def note(self, charge: RateCharge, units: int, size: int = 1) -> None:
        """So many units were asked for, in requests of that size.

        No bucket gives more than its burst at once. What an adjustment takes beyond that is debt and not demand.
        """
        if size > charge.burst > 0:
            units, size = units // size * charge.burst, charge.burst
        self._quotas.record_rate_demand(charge.quota, units)
        if not charge.is_shared:
            return
        now_ms = self._clock.monotonic_ms()
        key = self._keys.get(charge.quota) or self._new(charge.quota, _safe(charge), now_ms)
        if key.demand.note(units, now_ms, size) and key.due_ms is None:
            key.shared = _safe(charge)
            if not needs_no_message(key.demand_micro(now_ms), key.safe_micro):
                self._speak_of(key, now_ms)

    def look(self, charge: RateCharge, available: int, rate_micro: int) -> None:
        """What the store said is in the bucket, in parts, and the rate in force: does the next report have to wait?"""
        key = self._keys.get(charge.quota) if charge.is_shared else None
        if key is None:
            return
        key.in_bucket = available
        if 10 * available >= 3 * charge.burst * PARTS:
            return
        now_ms = self._clock.monotonic_ms()
        if now_ms < key.told_ms + URGENT_AFTER_MS:
            return
        if cannot_wait(available, charge.burst, key.demand_micro(now_ms), max(rate_micro, key.told_micro)):
            self._speak_of(key, now_ms)

    def note_slots(self, charge: SlotCharge, policy: PolicyDecision) -> None:
        """They were asked for. Who has none left, or soon, says so."""
        is_in_vain = policy.reason == DenialReason.SLOTS_TAKEN
        if not charge.is_shared or not (is_in_vain or 10 * policy.remaining < 3 * policy.limit):
            return
        now_ms = self._clock.monotonic_ms()
        key = self._keys.get(charge.quota) or self._new(charge.quota, charge, now_ms)
        key.shared = charge
        if is_in_vain:
            key.in_vain.note(charge.cost, now_ms)
        if is_in_vain or key.due_ms is None:
            self._speak_of(key, max(now_ms, key.told_ms + SLOTS_AGAIN_MS) if key.told_ms else now_ms)

    def asked(self, quota: str) -> None:
        """The coordinator would like to know: others want more than they have."""
        shared = self.policies.shared(quota) if self.policies else None
        if shared is not None:
            now_ms = self._clock.monotonic_ms()
            key = self._keys.get(quota) or self._new(quota, shared, now_ms)
            key.shared = shared
            self._speak_of(key, now_ms)

    def now_ms(self) -> int:
        return self._clock.monotonic_ms()

    def spoken_of(self) -> list[Key]:
        return [key for key in self._keys.values() if key.due_ms is not None]

    def _new(self, quota: str, shared: Rate | SlotCharge, now_ms: int) -> Key:
        if len(self._keys) >= MOST_KEYS:
            quiet = next(iter(self._quiet), None) or next(iter(self._keys))
            del self._keys[quiet]
            self._quiet.pop(quiet, None)
        key = self._keys[quota] = Key(quota, shared, RateDemand(now_ms))
        self._quiet[quota] = None
        key.refused_until_ms = self.set_aside.until_ms(quota)
        return key

    def _speak_of(self, key: Key, due_ms: int) -> None:
        if due_ms < key.refused_until_ms:
            return
        self._set_due(key, due_ms if key.due_ms is None else min(due_ms, key.due_ms))
        self._wake.set()

    def _set_due(self, key: Key, due_ms: int | None) -> None:
        key.due_ms = due_ms
        if due_ms is not None:
            self._quiet.pop(key.quota, None)
        elif key.quota in self._keys:
            self._quiet[key.quota] = None

    # --- the conversation ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._pause()
            now_ms = self._clock.monotonic_ms()
            self._look_for_falls(now_ms)
            due = [key for key in self.spoken_of() if key.due_ms is not None and key.due_ms <= now_ms]
            if due:
                await self._speak(due[:MOST_IN_MESSAGE], now_ms)

    def _look_for_falls(self, now_ms: int) -> None:
        """Where others want more, the end of what is wanted here is said at once. No request tells of it."""
        for key in self._keys.values():
            if key.is_looked_at and now_ms >= key.look_ms:
                key.look_ms = now_ms + LOOK_EVERY_MS
                if has_fallen(key.wanted_here_micro(now_ms), key.told_here_micro, key.rate_micro):
                    key.due_ms = now_ms

    async def _pause(self) -> None:
        moments = [key.due_ms for key in self._keys.values() if key.due_ms is not None]
        moments += [key.look_ms for key in self._keys.values() if key.is_looked_at]
        due_ms = min(moments, default=None)
        timeout_s = None if due_ms is None else max(0, due_ms - self._clock.monotonic_ms()) / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _speak(self, due: Sequence[Key], now_ms: int) -> None:
        incarnation = self._epochs.current
        for key in due:
            key.due_ms, key.told_ms, key.look_ms = now_ms + UNSAID_MS, now_ms, now_ms + LOOK_EVERY_MS
            key.told_here_micro = key.wanted_here_micro(now_ms)
        if incarnation is None:
            return
        try:
            await self._exchange(incarnation, {key.quota: key for key in due}, now_ms)
        except Fenced:
            self._epochs.invalidate()
        except (CoordinatorUnavailable, CoordinatorRefused, StoreUnavailable, StoreError) as error:
            self._metrics.exchange_failures.inc()
            log.warning("shares could not be asked for", reason=str(error))
            await asyncio.sleep(PAUSE_MS / 1000)

    async def _exchange(self, incarnation: StoreIncarnation, due: dict[str, Key], now_ms: int) -> None:
        rates, slots = await self._report(incarnation, due, now_ms)
        response = await self._ask(rates.reports, slots.reports)
        shared_and_rates = [(due[share.quota].shared, share) for share in response.rates if share.quota in due]
        of_rates = [(safe, share) for safe, share in shared_and_rates if isinstance(safe, Rate)]
        of_slots = [share for share in response.slots if share.quota in due]
        if of_rates:
            await self._scripts.share_rates(incarnation, rates.mono_us, of_rates)
        if of_slots:
            await self._scripts.share_slots(incarnation, slots.mono_us, of_slots)
        for rate in rates.reports:
            due[rate.quota].told_micro, due[rate.quota].had_micro = rate.demand_micro, rate.rate_micro
        for slot in slots.reports:
            due[slot.quota].told_micro = slot.wanted * SLOT_MICRO
        self._hear(due, [*(share for _, share in of_rates), *of_slots], now_ms)
        for refused in response.refused:
            if refused.quota in due:
                self._refused(due[refused.quota], refused, now_ms)

    async def _ask(self, rates: Sequence[RateReport], slots: Sequence[SlotReport]) -> SharesResponse:
        """Halve a message that is refused as a whole, until what it is refused for stands alone."""
        try:
            return await self._coordinator.shares(SharesRequest(rates=list(rates), slots=list(slots)))
        except CoordinatorRefused as error:
            if not error.is_about_content:
                raise
            if len(rates) + len(slots) == 1:
                quota = rates[0].quota if rates else slots[0].quota
                return SharesResponse(rates=[], refused=[_invalid(quota, str(error))])
            first = await self._ask(rates[: len(rates) // 2], slots[: (len(slots) + 1) // 2])
            second = await self._ask(rates[len(rates) // 2 :], slots[(len(slots) + 1) // 2 :])
            return SharesResponse(
                rates=first.rates + second.rates,
                slots=first.slots + second.slots,
                refused=first.refused + second.refused,
            )

    def _refused(self, key: Key, refused: WantRefused, now_ms: int) -> None:
        """It has its safe part, and is not spoken of for a while."""
        self._set_due(key, None)
        key.refused_until_ms = now_ms + REFUSED_MS
        if refused.refusal is GrantRefusal.INVALID:
            key.refused_until_ms = now_ms + SET_ASIDE_MS
            self.set_aside.add(key.quota, refused.reason or refused.refusal.value, now_ms)
            self._metrics.refusals.items.labels("share").inc()
            log.error("the coordinator refused a share; it is set aside", quota=key.quota, reason=refused.reason)

    async def _report(
        self, incarnation: StoreIncarnation, due: dict[str, Key], now_ms: int
    ) -> tuple[RateReports, SlotReports]:
        """As the store has them: each in one moment."""
        rates, slots = [], []
        for key in due.values():
            if isinstance(key.shared, Rate):
                rates.append(AgentRateDemand(key.quota, key.shared, key.demand_micro(now_ms), key.is_contended))
            else:
                slots.append(AgentSlotDemand(key.shared, key.in_vain.recent(now_ms)))
        of_rates = await self._scripts.report_rates(incarnation, self._agent, rates) if rates else RateReports(0, [])
        of_slots = await self._scripts.report_slots(incarnation, self._agent, slots) if slots else SlotReports(0, [])
        return of_rates, of_slots

    def _hear(self, due: dict[str, Key], shares: Iterable[RateShare | SlotShare], sent_ms: int) -> None:
        for share in shares:
            key = due[share.quota]
            micro = share.rate_micro if isinstance(share, RateShare) else share.units * SLOT_MICRO
            self.heard += isinstance(share, RateShare) and micro > key.rate_micro
            key.rate_micro, key.is_contended = micro, share.contended
            if isinstance(share, RateShare):
                key.bound_milli, key.overshoot_milli = share.bound_milli, share.overshoot_milli
            key.expires_ms = sent_ms + share.expires_in_ms
            is_quiet = not share.contended and needs_no_message(key.told_micro, key.safe_micro)
            self._set_due(key, None if is_quiet else sent_ms + share.refresh_in_ms)
            if isinstance(share, RateShare) and is_to_confirm(key.had_micro, micro, share.contended):
                self._set_due(key, sent_ms + URGENT_AFTER_MS)


def _invalid(quota: str, reason: str) -> WantRefused:
    return WantRefused(quota=quota, refusal=GrantRefusal.INVALID, reason=reason)


def _safe(charge: RateCharge) -> Rate:
    return Rate(charge.rate_micro, charge.burst)
