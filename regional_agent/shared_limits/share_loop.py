"""The loop that reports the demand for shared rates and slots, and stores the shares that the coordinator grants.

No request waits for it: the store decides by the share that it has, and falls back by its own clock when none comes. A
limit whose demand is under half of its base share, or is in its bucket for seconds, is not reported at all, unless
another region wants more than it has and the coordinator asks. Slots are not reported before they are scarce. Each
report covers all agents of the region: their demand adds up in the store.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import structlog

from protocol.clock import Clock
from protocol.limits.rates import Rate
from protocol.messages import ItemRefused, RateReport, RateShare, SharesRequest, SharesResponse, SlotReport, SlotShare
from protocol.outcomes import DenialReason, GrantRefusal
from regional_agent.admission.key_states import KeyState, KeyStates
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.slices import LIFETIME_MS
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.rules.set_aside import SET_ASIDE_MS, SetAside
from regional_agent.metrics import AgentMetrics
from regional_agent.shared_limits.rules import (
    AVERAGES_MS,
    CHECK_FALL_MS,
    NANO_UNITS,
    URGENT_AFTER_MS,
    RateDemand,
    has_fallen,
    is_urgent,
    needs_confirmation,
    needs_no_report,
)
from regional_agent.shared_limits.shared_limit import SLOT_MICRO, CurrentShare, SharedLimit
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

MOST_REPORTED = 10_000
MOST_IN_MESSAGE = 250  # the scripts that report these and take in their shares block the store for 2 ms
RETRY_REPORT_MS = 5_000  # after a report that failed
REFUSED_MS = 60_000
PAUSE_MS = 1_000
REPORT_SLOTS_EVERY_MS = 1_000  # unless the coordinator asks


class ShareLoop:
    def __init__(
        self,
        agent: str,
        scripts: Scripts,
        epochs: EpochManager,
        keys: KeyStates,
        coordinator: CoordinatorClient,
        metrics: AgentMetrics,
        clock: Clock,
    ) -> None:
        self._agent = agent
        self._scripts = scripts
        self._epochs = epochs
        self._keys = keys
        self._coordinator = coordinator
        self._metrics = metrics
        self._clock = clock
        self._reported: OrderedDict[str, SharedLimit] = OrderedDict()  # limits that are due at some time
        self._wake = asyncio.Event()
        self.set_aside = SetAside()  # limits whose report the coordinator refused as it is
        self.policies: Policies | None = None
        self.raises = 0  # times that a share was raised: what a smaller share denied may be admitted now

    # --- called for each decision ------------------------------------------------------------------------------------

    def record_demand(
        self, state: KeyState, charge: RateCharge, units: int, now_ms: int, *, size: int, checks: int = 0
    ) -> None:
        """Count units that were requested, in requests of that size.

        No bucket gives more than its burst at once. What an adjustment takes beyond that is debt and not demand.
        """
        if size > charge.burst > 0:
            units, size = units // size * charge.burst, charge.burst
        self._keys.count(state, units, checks, now_ms)
        limit = state.shared
        if limit is not None and charge.is_shared and limit.demand.note(units, now_ms, size) and limit.due_ms is None:
            limit.terms = _terms(charge)
            if not needs_no_report(limit.demand_micro(now_ms), limit.base_share_micro, limit.nano_units):
                self._report_at(limit, now_ms)

    def record_bucket(self, state: KeyState, charge: RateCharge, nano_units: int, rate_micro: int, now_ms: int) -> None:
        """Note what is in the bucket and the rate in force. Report at once if demand outgrows them.

        Most keys need no more than they have, even for twice the demand of a moment. Their demand is not even measured,
        for that costs as much as a check.
        """
        if not charge.is_shared:
            return
        limit = state.shared
        if limit is None:
            if needs_no_report(2 * state.units * 1_000_000_000 // LIFETIME_MS, charge.rate_micro, nano_units):
                return
            limit = self._follow(state, _terms(charge), now_ms)
        limit.nano_units = nano_units
        if 10 * nano_units >= 3 * charge.burst * NANO_UNITS or now_ms < limit.report.at_ms + URGENT_AFTER_MS:
            return
        share_micro = max(rate_micro, limit.report.demand_micro)
        if is_urgent(nano_units, charge.burst, limit.demand_micro(now_ms), share_micro):
            self._report_at(limit, now_ms)

    def record_proxies(
        self, state: KeyState, charge: RateCharge, units: int, nano_units: int, rate_micro: int, now_ms: int
    ) -> None:
        """Count units that proxies requested since the last call. They decide by themselves, so no check shows them."""
        if not charge.is_shared:
            return
        limit = state.shared or self._follow(state, _terms(charge), now_ms)
        limit.terms = _terms(charge)
        limit.demand.note(units, now_ms, 1)
        is_little = needs_no_report(limit.demand_micro(now_ms), limit.base_share_micro, limit.nano_units)
        if limit.due_ms is None and not is_little:
            self._report_at(limit, now_ms)
        self.record_bucket(state, charge, nano_units, rate_micro, now_ms)

    def record_slots(self, state: KeyState, charge: SlotCharge, policy: PolicyDecision, now_ms: int) -> None:
        """Count a request for slots. Report if none is left, or soon none will be."""
        is_denied = policy.reason == DenialReason.SLOTS_TAKEN
        if not charge.is_shared or not (is_denied or 10 * policy.remaining < 3 * policy.limit):
            return
        limit = state.shared or self._follow(state, charge, now_ms)
        limit.terms = charge
        if is_denied:
            limit.note_denied_slots(charge.cost, now_ms)
        if is_denied or limit.due_ms is None:
            reported_ms = limit.report.at_ms
            self._report_at(limit, max(now_ms, reported_ms + REPORT_SLOTS_EVERY_MS) if reported_ms else now_ms)

    def request_report(self, quota: str) -> None:
        """Report at once: the coordinator asks, for other regions want more than they have."""
        terms = self.policies.shared(quota) if self.policies else None
        if terms is not None:
            now_ms, state = self._clock.monotonic_ms(), self._keys.of(quota)
            limit = state.shared or self._follow(state, terms, now_ms)
            limit.terms = terms
            self._report_at(limit, now_ms)

    def now_ms(self) -> int:
        return self._clock.monotonic_ms()

    def reported_limits(self) -> list[SharedLimit]:
        return list(self._reported.values())

    def _follow(self, state: KeyState, terms: Rate | SlotCharge, now_ms: int) -> SharedLimit:
        """Measure the demand of a key from now on, beginning with what was counted of it."""
        per_second = state.demand.per_second_milli(now_ms) / 1000
        demand = RateDemand(now_ms, state.demand.units, averages=(per_second,) * len(AVERAGES_MS))
        limit = state.shared = SharedLimit(state.quota, terms, demand)
        limit.refused_until_ms = self.set_aside.until_ms(state.quota)
        return limit

    def _report_at(self, limit: SharedLimit, due_ms: int) -> None:
        if due_ms < limit.refused_until_ms:
            return
        self._set_due(limit, due_ms if limit.due_ms is None else min(due_ms, limit.due_ms))
        self._wake.set()

    def _set_due(self, limit: SharedLimit, due_ms: int | None) -> None:
        limit.due_ms = due_ms
        if due_ms is None:
            self._reported.pop(limit.quota, None)
            return
        self._reported[limit.quota] = limit
        if len(self._reported) > MOST_REPORTED:
            _, oldest = self._reported.popitem(last=False)
            oldest.due_ms = None

    # --- reports and shares ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._pause()
            now_ms = self._clock.monotonic_ms()
            self._find_falls(now_ms)
            due = [limit for limit in self.reported_limits() if limit.due_ms is not None and limit.due_ms <= now_ms]
            if due:
                await self._report_due(due[:MOST_IN_MESSAGE], now_ms)

    def _find_falls(self, now_ms: int) -> None:
        """Report a fall of demand at once where others want more. No request would show it."""
        for limit in self._reported.values():
            if limit.may_fall and now_ms >= limit.check_fall_ms:
                limit.check_fall_ms = now_ms + CHECK_FALL_MS
                if has_fallen(limit.local_micro(now_ms), limit.report.local_micro, limit.share.micro):
                    limit.due_ms = now_ms

    async def _pause(self) -> None:
        times = [limit.due_ms for limit in self._reported.values() if limit.due_ms is not None]
        times += [limit.check_fall_ms for limit in self._reported.values() if limit.may_fall]
        due_ms = min(times, default=None)
        timeout_s = None if due_ms is None else max(0, due_ms - self._clock.monotonic_ms()) / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _report_due(self, due: Sequence[SharedLimit], now_ms: int) -> None:
        incarnation = self._epochs.current
        for limit in due:
            limit.due_ms, limit.check_fall_ms = now_ms + RETRY_REPORT_MS, now_ms + CHECK_FALL_MS
            limit.report = limit.report._replace(at_ms=now_ms, local_micro=limit.local_micro(now_ms))
        if incarnation is None:
            return
        try:
            await self._exchange(incarnation, {limit.quota: limit for limit in due}, now_ms)
        except Fenced:
            self._epochs.invalidate()
        except (CoordinatorUnavailable, CoordinatorRefused, StoreUnavailable, StoreError) as error:
            self._metrics.exchange_failures.inc()
            log.warning("share report failed", reason=str(error))
            await asyncio.sleep(PAUSE_MS / 1000)

    async def _exchange(self, incarnation: StoreIncarnation, due: dict[str, SharedLimit], now_ms: int) -> None:
        rates, slots = await self._read_reports(incarnation, due, now_ms)
        response = await self._send(rates.reports, slots.reports)
        terms_and_shares = [(due[share.quota].terms, share) for share in response.rates if share.quota in due]
        rate_shares = [(terms, share) for terms, share in terms_and_shares if isinstance(terms, Rate)]
        slot_shares = [share for share in response.slots if share.quota in due]
        if rate_shares:
            await self._scripts.share_rates(incarnation, rates.mono_us, rate_shares)
        if slot_shares:
            await self._scripts.share_slots(incarnation, slots.mono_us, slot_shares)
        for rate in rates.reports:
            limit = due[rate.quota]
            limit.report = limit.report._replace(demand_micro=rate.demand_micro, previous_share_micro=rate.rate_micro)
        for slot in slots.reports:
            limit = due[slot.quota]
            limit.report = limit.report._replace(demand_micro=slot.wanted * SLOT_MICRO)
        self._apply_shares(due, [*(share for _, share in rate_shares), *slot_shares], now_ms)
        for refused in response.refused:
            if refused.quota in due:
                self._refuse(due[refused.quota], refused, now_ms)

    async def _send(self, rates: Sequence[RateReport], slots: Sequence[SlotReport]) -> SharesResponse:
        """Halve a message that is refused as a whole, until the report that is at fault stands alone."""
        try:
            return await self._coordinator.shares(SharesRequest(rates=list(rates), slots=list(slots)))
        except CoordinatorRefused as error:
            if not error.is_about_content:
                raise
            if len(rates) + len(slots) == 1:
                quota = rates[0].quota if rates else slots[0].quota
                return SharesResponse(rates=[], refused=[_invalid(quota, str(error))])
            first = await self._send(rates[: len(rates) // 2], slots[: (len(slots) + 1) // 2])
            second = await self._send(rates[len(rates) // 2 :], slots[(len(slots) + 1) // 2 :])
            return SharesResponse(
                rates=first.rates + second.rates,
                slots=first.slots + second.slots,
                refused=first.refused + second.refused,
            )

    def _refuse(self, limit: SharedLimit, refused: ItemRefused, now_ms: int) -> None:
        """Report a limit no more for a while. The region keeps its base share."""
        self._set_due(limit, None)
        limit.refused_until_ms = now_ms + REFUSED_MS
        if refused.refusal is GrantRefusal.INVALID:
            limit.refused_until_ms = now_ms + SET_ASIDE_MS
            self.set_aside.add(limit.quota, refused.reason or refused.refusal.value, now_ms)
            self._metrics.refusals.items.labels("share").inc()
            log.error("share report refused: the limit is set aside", quota=limit.quota, reason=refused.reason)

    async def _read_reports(
        self, incarnation: StoreIncarnation, due: dict[str, SharedLimit], now_ms: int
    ) -> tuple[RateReports, SlotReports]:
        """Add this agent's demand in the store. Return the region's, all rates and all slots of one moment each."""
        rates, slots = [], []
        for limit in due.values():
            if isinstance(limit.terms, Rate):
                demand_micro = limit.demand_micro(now_ms)
                rates.append(AgentRateDemand(limit.quota, limit.terms, demand_micro, limit.share.is_contended))
            else:
                slots.append(AgentSlotDemand(limit.terms, limit.waiting_slots(now_ms)))
        rate_reports = (
            await self._scripts.report_rates(incarnation, self._agent, rates) if rates else RateReports(0, [])
        )
        slot_reports = (
            await self._scripts.report_slots(incarnation, self._agent, slots) if slots else SlotReports(0, [])
        )
        return rate_reports, slot_reports

    def _apply_shares(self, due: dict[str, SharedLimit], shares: Iterable[RateShare | SlotShare], sent_ms: int) -> None:
        for granted in shares:
            limit = due[granted.quota]
            before, limit.share = limit.share, CurrentShare.granted(granted, sent_ms)
            is_rate = isinstance(granted, RateShare)
            self.raises += is_rate and limit.share.micro > before.micro
            needs_report = granted.contended or not needs_no_report(
                limit.report.demand_micro, limit.base_share_micro, limit.nano_units
            )
            self._set_due(limit, sent_ms + granted.refresh_in_ms if needs_report else None)
            if is_rate and needs_confirmation(limit.report.previous_share_micro, limit.share.micro, granted.contended):
                self._set_due(limit, sent_ms + URGENT_AFTER_MS)


def _invalid(quota: str, reason: str) -> ItemRefused:
    return ItemRefused(quota=quota, refusal=GrantRefusal.INVALID, reason=reason)


def _terms(charge: RateCharge) -> Rate:
    return Rate(charge.rate_micro, charge.burst)
