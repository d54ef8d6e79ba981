"""All allowances that this agent follows: what it requests of each, and the requests that wait for units.

A check that leaves little marks its quota as due, and the exchange loop takes it along in the next exchange. A request
waits only when the lease is spent and its policy allows it: then its cost is part of what is requested.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import fields
from heapq import nlargest

import structlog

from protocol.clock import Clock
from protocol.messages import ExchangeReply, LeaseDemand, LeaseReply
from protocol.outcomes import GrantRefusal
from regional_agent.admission.rules.denial_causes import LeaseOutlook
from regional_agent.leasing.central import CentralQuota
from regional_agent.leasing.quota import GrantAnswer, LeasedQuota, Quota
from regional_agent.leasing.rules.contact import CoordinatorContact
from regional_agent.leasing.rules.demand import Demand, HotKey, hottest
from regional_agent.leasing.rules.refill import LONGEST_PAUSE_MS
from regional_agent.leasing.rules.set_aside import SET_ASIDE_MS, SetAside
from regional_agent.leasing.schedule import MOST_FOLLOWED, QuotaSchedule
from regional_agent.store.types import PolicyDecision

log = structlog.get_logger()

MOST_DUE = 100  # quotas in one exchange
LOG_AGAIN_MS = 60_000
# An expired lease is good again once its rest was returned, and a closed epoch is replaced: requests go on waiting.
TEMPORARY = (None, GrantRefusal.LEASE_EXPIRED, GrantRefusal.EPOCH_FENCED)
# Nothing is granted before the period ends, unless a limit is raised.
USED_UP = (GrantRefusal.EXHAUSTED, GrantRefusal.NO_LIMIT, GrantRefusal.TOTAL_TOO_LARGE)
UNANSWERED_MS = 1_000  # a request without an answer may have been lost: for so long it does not begin a back-off
CHECK_HELD_MS = 10_000  # no script of an idle lease would notice that a hold has expired


class Quotas:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._schedule = QuotaSchedule()
        self._retries = 0  # calls to retry all quotas
        self._surplus: set[str] = set()  # central quotas of which units may lie idle
        self.turned_away = 0  # times that an allowance was not followed, for there are too many
        self._turned_away_log_ms = 0
        self._central: frozenset[str] = frozenset()
        self._is_coordinator_lost = False
        self.contact = CoordinatorContact()
        self.set_aside = SetAside()  # quotas whose grant request the coordinator refused as it is
        self.round_trip_ms = 0
        self.check_held_ms = CHECK_HELD_MS
        self.wake = asyncio.Event()

    # --- called for each decision ------------------------------------------------------------------------------------

    def record_demand(self, name: str, units: int, decision: PolicyDecision) -> None:
        """Count the demand of a decided request, and request more units below the low water mark."""
        quota = self._quota(name)
        self._schedule.touch(quota)
        quota.demand.note(units, decision.limit)
        now_ms = self._clock.monotonic_ms()
        if quota.is_low(decision, now_ms, self.round_trip_ms) and not self._is_set_aside(name, now_ms):
            self._request(quota)

    def add_held(self, name: str, units: int) -> None:
        quota = self._quota(name)
        if not quota.held:
            quota.check_held_at_ms = self._clock.monotonic_ms() + self.check_held_ms
        quota.held += units
        self._schedule.update(quota)

    # --- requests that wait ------------------------------------------------------------------------------------------

    def may_wait(self, name: str) -> bool:
        """Return whether more units may come.

        None come while the region is cut off, was told that nothing is left, or has set the quota aside, nor if the
        quota is not followed.
        """
        now_ms = self._clock.monotonic_ms()
        quota = self._quota(name)
        is_hopeless = self.contact.is_lost(now_ms) or self._is_set_aside(name, now_ms) or not quota.is_followed
        return not (is_hopeless or quota.backoff.is_pausing(now_ms))

    async def wait(self, name: str, units: int, timeout_ms: int) -> bool:
        """Wait for the next answer about a quota with these units requested. Return False if none came in time."""
        news, in_time = self.start_waiting(name, units), False
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                in_time = await news.wait()
        except TimeoutError:
            self.on_wait_timeout(name)
        finally:
            self.stop_waiting(name, units)
        return in_time

    def start_waiting(self, name: str, units: int) -> asyncio.Event:
        """Request units that a request waits for. Return the event that the next answer sets."""
        quota = self._quota(name)
        quota.waiting += units
        quota.news = quota.news or asyncio.Event()
        self._request(quota)
        return quota.news

    def on_wait_timeout(self, name: str) -> None:
        """Back off, unless the request is so young that it may have been lost: then it is sent again."""
        quota, now_ms = self._quota(name), self._clock.monotonic_ms()
        if quota.requested_at_ms is None or now_ms >= quota.requested_at_ms + UNANSWERED_MS:
            quota.back_off(now_ms)

    def stop_waiting(self, name: str, units: int) -> None:
        quota = self._quota(name)
        quota.waiting = max(0, quota.waiting - units)
        self._schedule.update(quota)

    # --- central quotas ----------------------------------------------------------------------------------------------

    def set_central(self, central: frozenset[str]) -> None:
        """Make the quotas of these names central, and all others leased."""
        if central == self._central:
            return
        self._central = central
        for quota in list(self._schedule):
            if quota.is_central != self._is_central(quota.name):
                self._change_mode(quota)

    def _change_mode(self, before: Quota) -> None:
        before.on_mode_changed()
        quota = self._new(before.name)
        for each in fields(Quota):
            setattr(quota, each.name, getattr(before, each.name))
        quota.ticket, quota.scheduled_ms = 0, None
        self._schedule.replace(before, quota)
        if quota.is_central and quota.renew_at_ms is not None:
            self._request(quota)  # what was granted ahead goes back
        self._schedule.update(quota)

    def _is_central(self, name: str) -> bool:
        return name.partition(":")[0] in self._central

    async def request_units(self, name: str, units: int, timeout_ms: int, *, again: bool) -> GrantAnswer:
        """Request the units of one check of a central quota. A caller that may retry then calls `finish_attempt`."""
        quota = self._quota(name)
        if not isinstance(quota, CentralQuota):  # the mode has changed since the check was planned
            return GrantAnswer.RETRY if await self.wait(name, units, timeout_ms) else GrantAnswer.TIMED_OUT
        may_request = quota.is_followed and not self._is_set_aside(name, self._clock.monotonic_ms())
        if self._is_coordinator_lost or not may_request:
            return GrantAnswer.COORDINATOR_LOST
        if not again:
            quota.retry_at_ms = 0
        quota.waiting += units
        self._request(quota)
        try:
            return await quota.queue.wait(timeout_ms)
        finally:
            self.stop_waiting(name, units)

    def finish_attempt(self, name: str) -> None:
        """Note that a request which may retry has tried the store."""
        quota = self._quota(name)
        if isinstance(quota, CentralQuota) and quota.queue.retrying:
            quota.queue.finish_attempt()
            self._return_if_possible(quota)

    def return_surplus_later(self, name: str) -> bool:
        """Return what lies idle of a central quota with the next exchange. Return False if the quota is leased.

        Requests that may still retry come first.
        """
        quota = self._quota(name) if self._is_central(name) else None
        if not isinstance(quota, CentralQuota):
            return False
        quota.queue.has_surplus = True
        self._surplus.add(name)
        self._return_if_possible(quota)
        return True

    def _return_if_possible(self, quota: CentralQuota) -> None:
        if quota.queue.may_return:
            self._surplus.add(quota.name)
            self.wake.set()

    def take_surplus(self) -> list[str]:
        """Return, once, the quotas whose surplus no request will take."""
        found = []
        for name in list(self._surplus):
            quota = self._schedule.find(name)
            if not isinstance(quota, CentralQuota) or not quota.queue.has_surplus:
                self._surplus.discard(name)
            elif quota.queue.may_return:
                quota.queue.has_surplus = False
                found.append(name)
                self._surplus.discard(name)
        return found

    def central_quotas(self) -> list[str]:
        """Return quotas to give back in full at shutdown."""
        return list(self._schedule.central)

    # --- the coordinator is lost, or reached again -------------------------------------------------------------------

    def on_coordinator_lost(self) -> None:
        """Answer requests that wait for an exchange that failed."""
        self._is_coordinator_lost = True
        is_outage = self.contact.is_lost(self._clock.monotonic_ms())
        for quota in list(self._schedule.waiting.values()):
            quota.on_coordinator_lost(is_outage=is_outage)
            self._schedule.update(quota)

    def on_coordinator_reached(self) -> None:
        """Retry all quotas after an outage, though their back-off is not over."""
        if self._is_coordinator_lost:
            self._is_coordinator_lost = False
            self.retry_all()

    # --- called by the exchange loop ---------------------------------------------------------------------------------

    def due(self, most: int = MOST_DUE) -> list[str]:
        """Return quotas to exchange for now, the longest due first."""
        return [quota.name for quota in self._schedule.due(self._clock.monotonic_ms(), most)]

    def next_due_in_ms(self) -> int | None:
        first_ms = self._schedule.first_due_ms()
        return None if first_ms is None else max(0, first_ms - self._clock.monotonic_ms())

    def grant_request(self, name: str) -> LeaseDemand:
        return self._quota(name).grant_request(self._clock.monotonic_ms())

    def set_held(self, name: str, units: int) -> None:
        """Note what the store says is held, and check again after a while: an expired hold is to be reported."""
        quota = self._quota(name)
        quota.held, quota.check_held_at_ms = units, self._clock.monotonic_ms() + self.check_held_ms
        self._schedule.update(quota)

    def schedule_renewal(self, name: str, renew_at_ms: int | None) -> None:
        """Renew a lease in time even if it is idle: an expired lease cannot be spent."""
        quota = self._quota(name)
        quota.renew_at_ms = renew_at_ms
        self._schedule.update(quota)

    def apply_reply(self, answered: Iterable[str], reply: ExchangeReply, gained: Mapping[str, int]) -> None:
        """Grant or refuse each quota that a reply answers. `gained` has the units that may newly be spent."""
        refused = {each.quota: LONGEST_PAUSE_MS for each in reply.refused if each.refusal not in TEMPORARY}
        current = current_leases(reply.leases)
        refused |= {lease.quota: lease.ends_in_ms for lease in current if lease.refusal not in TEMPORARY}
        refusals = {each.quota: each.refusal for each in current}
        refusals |= {each.quota: each.refusal for each in reply.refused}
        for name in answered:
            if gained.get(name, 0) == 0 and name in refused:
                self.on_refusal(name, refused[name], refusals[name])
            else:
                self.on_grant(name, gained.get(name, 0))

    def on_grant(self, name: str, units: int) -> None:
        """Let requests that wait try again: the lease is good, with so many units more."""
        quota = self._quota(name)
        quota.on_grant(units, self._clock.monotonic_ms())
        self._schedule.update(quota)

    def on_refusal(
        self, name: str, ends_in_ms: int = LONGEST_PAUSE_MS, refusal: GrantRefusal | None = GrantRefusal.EXHAUSTED
    ) -> None:
        """Deny requests that wait: nothing is left, and nothing comes back before the period ends."""
        quota = self._quota(name)
        quota.on_refusal(self._clock.monotonic_ms(), ends_in_ms, refusal, self.check_held_ms)
        self._schedule.update(quota)

    def set_quota_aside(self, name: str, reason: str) -> None:
        """Request nothing of a quota for a while: the coordinator refused its grant request as it is."""
        now_ms = self._clock.monotonic_ms()
        self.set_aside.add(name, reason, now_ms)
        quota = self._schedule.find(name)
        if quota is not None:
            quota.postponed_until_ms = now_ms + SET_ASIDE_MS
            self.on_refusal(name, SET_ASIDE_MS)

    def postpone(self, name: str, for_ms: int) -> None:
        """Request units after a while, for the lane pauses. Requests go on waiting."""
        quota = self._quota(name)
        quota.postponed_until_ms = self._clock.monotonic_ms() + for_ms
        self._schedule.update(quota)

    def _is_set_aside(self, name: str, now_ms: int) -> bool:
        return bool(self.set_aside) and self.set_aside.has(name, now_ms)

    def on_lane_stopped(self, name: str) -> None:
        """Deny requests that wait: no exchange will ask for them."""
        self._quota(name).begin_request()
        self.on_refusal(name, refusal=None)

    # --- signals -----------------------------------------------------------------------------------------------------

    def retry(self, name: str) -> None:
        """Request units at once: some became available."""
        quota = self._schedule.find(name)
        if quota is not None:
            self._end_back_off(quota)
            # Units that arrived for requests which do not wait any more are to go back.
            quota.is_requested = quota.is_requested or quota.waiting > 0 or quota.is_central
            self._schedule.update(quota)
        self.wake.set()

    def retry_all(self) -> None:
        """Request units of all quotas at once: a limit may have been raised, or the coordinator is back."""
        self._retries += 1  # each quota takes part when it is looked at next
        for quota in list(self._schedule.waiting.values()):
            self._end_back_off(quota)
            quota.is_requested = True
            self._schedule.update(quota)
        self.wake.set()

    def _end_back_off(self, quota: Quota) -> None:
        quota.retries_seen = self._retries
        quota.end_back_off()

    def fetch(self, name: str) -> None:
        """Request units that were moved to this region, though there is no demand here yet."""
        if self._is_set_aside(name, self._clock.monotonic_ms()):
            return
        self._quota(name).is_requested = True
        self.retry(name)

    # --- what is known -----------------------------------------------------------------------------------------------

    def outlook(self, name: str) -> LeaseOutlook:
        """Return why there may be no units of a quota here."""
        quota, now_ms = self._quota(name), self._clock.monotonic_ms()
        return LeaseOutlook(
            is_exhausted=quota.refusal in USED_UP and now_ms < quota.exhausted_until_ms,
            is_cut_off=self.contact.is_lost(now_ms),
            is_draining=self.contact.is_draining,
        )

    def demand_milli(self, name: str) -> int:
        return self._quota(name).demand.per_second_milli(self._clock.monotonic_ms())

    def count_followed(self) -> int:
        return len(self._schedule)

    def in_demand(self, most: int) -> list[str]:
        """Return leased quotas that have a lease here or lack one, the highest demand first."""
        found = [quota for quota in self._schedule.recent() if quota.is_requested or quota.renew_at_ms is not None]
        now_ms = self._clock.monotonic_ms()
        hottest = nlargest(most, found, key=lambda quota: quota.demand.per_second_milli(now_ms))
        return [quota.name for quota in hottest if not quota.is_central]

    def hottest(self, most: int) -> list[HotKey]:
        """Return the allowances with the highest demand, the hottest first."""
        recent = ((quota.name, quota.demand) for quota in self._schedule.recent())
        return hottest(recent, self._clock.monotonic_ms(), most)

    # --- within ------------------------------------------------------------------------------------------------------

    def _quota(self, name: str) -> Quota:
        """Return the state of a quota. A new one is followed from now on, unless there are too many."""
        quota = self._schedule.find(name)
        if quota is not None:
            if quota.retries_seen != self._retries:
                self._end_back_off(quota)
            return quota
        quota = self._new(name)
        quota.postponed_until_ms = self.set_aside.until_ms(name)
        if self._schedule.is_full:
            self._turn_away(name)
        else:
            self._schedule.follow(quota)
        return quota

    def _new(self, name: str) -> Quota:
        kind = CentralQuota if self._is_central(name) else LeasedQuota
        return kind(name, Demand(self._clock.monotonic_ms()), retries_seen=self._retries)

    def _turn_away(self, name: str) -> None:
        self.turned_away += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._turned_away_log_ms:
            self._turned_away_log_ms = now_ms + LOG_AGAIN_MS
            log.error("too many allowances are in use: new ones get no lease", quota=name, most=MOST_FOLLOWED)

    def _request(self, quota: Quota) -> None:
        quota.request(self._clock.monotonic_ms())
        self._schedule.update(quota)
        self.wake.set()


def current_leases(leases: Iterable[LeaseReply]) -> list[LeaseReply]:
    """Return each quota's lease of its current period; of a quota that was not requested, all that have begun."""
    leases = list(leases)
    known = {lease.quota for lease in leases if lease.current}
    return [lease for lease in leases if lease.current or (lease.quota not in known and not lease.starts_in_ms)]
