"""One allowance as this agent sees it: its demand, what was requested of it, and when it is due.

A quota is leased or central. Of a leased quota units are granted ahead, so that no request waits. Of a central quota
nothing is granted ahead: each request asks the coordinator for its own units (central.py).
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from protocol.backoff import Backoff
from protocol.messages import LeaseDemand
from protocol.outcomes import GrantRefusal
from protocol.units import MAX_UNITS
from regional_agent.leasing.rules.demand import Demand
from regional_agent.leasing.rules.refill import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, RETRY_MS, low_water
from regional_agent.store.types import PolicyDecision


class GrantAnswer(StrEnum):
    """The answer to a request that waits for units."""

    RETRY = "retry"  # the store may have units; a request that finds none may wait again
    LAST_RETRY = "last_retry"  # the store has all the units that there will be
    COORDINATOR_LOST = "coordinator_lost"
    TIMED_OUT = "timed_out"


MAY_RETRY = (GrantAnswer.RETRY, GrantAnswer.LAST_RETRY)


@dataclass(slots=True, eq=False)
class Quota(ABC):
    name: str
    demand: Demand
    waiting: int = 0  # units of the requests that wait
    is_requested: bool = False  # the next exchange is to request a grant
    exhausted_until_ms: int = 0  # the coordinator grants nothing before that
    refusal: GrantRefusal | None = None  # why, until then
    retry_at_ms: int = 0  # do not request a grant before that
    requested_at_ms: int | None = None  # while there is no answer
    renew_at_ms: int | None = None  # while there is a lease
    held: int = 0  # units that services hold, as far as this agent knows
    check_held_at_ms: int = 0
    postponed_until_ms: int = 0  # the lane pauses, or the quota is set aside
    backoff: Backoff = field(default_factory=partial(Backoff, FIRST_PAUSE_MS, LONGEST_PAUSE_MS))
    news: asyncio.Event | None = None  # set when the next answer arrives, while a request waits
    retries_seen: int = 0  # calls to retry all quotas that it took part in
    is_followed: bool = False
    ticket: int = 0  # of its entry in the schedule
    scheduled_ms: int | None = None

    @property
    def is_idle(self) -> bool:
        return not self.is_requested and not self.waiting and not self.held and self.renew_at_ms is None

    @property
    def due_at_ms(self) -> int | None:
        """Return when to exchange for it: to request a grant, to renew its lease, or to check its holds."""
        if self.is_requested:
            return max(self.retry_at_ms, self.postponed_until_ms)
        moments = [self.renew_at_ms, self.check_held_at_ms if self.held else None]
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(first, self.postponed_until_ms)

    # --- what a leased and a central quota do differently ------------------------------------------------------------

    @property
    @abstractmethod
    def is_central(self) -> bool: ...

    @abstractmethod
    def is_low(self, decision: PolicyDecision, now_ms: int, round_trip_ms: int) -> bool:
        """Return whether to request more units before they are needed."""

    @abstractmethod
    def on_coordinator_lost(self, *, is_outage: bool) -> None:
        """Answer waiting requests after failed exchanges. It is an outage once they have failed for a while."""

    @abstractmethod
    def on_mode_changed(self) -> None:
        """Answer the requests that wait in the mode that ends."""

    def begin_request(self) -> None:  # noqa: B027 - only a central quota has something to do
        """Note that an exchange requests units for everything that waits now."""

    def notify(self, answer: GrantAnswer) -> None:  # noqa: ARG002 - a central quota uses it
        """Let the requests that wait try again."""
        news, self.news = self.news, None
        if news is not None:
            news.set()

    # --- requests and answers ----------------------------------------------------------------------------------------

    def request(self, now_ms: int) -> None:
        if not self.is_requested:
            self.requested_at_ms = now_ms
        self.is_requested = True

    def grant_request(self, now_ms: int) -> LeaseDemand:
        self.begin_request()
        return LeaseDemand(
            quota=self.name,
            demand_milli=self.demand.per_second_milli(now_ms),
            waiting=min(self.waiting, MAX_UNITS),
            held=min(self.held, MAX_UNITS),
        )

    def on_grant(self, units: int, now_ms: int) -> None:
        """Note that the lease is good, with so many units more."""
        self.requested_at_ms = None
        self.exhausted_until_ms = 0
        if units > 0:
            self.backoff.succeeded()
            self.is_requested, self.retry_at_ms = False, 0
        else:
            # Nothing yet, but other regions were asked to return some. Requests go on waiting, up to their own limit.
            self.is_requested = self.waiting > 0
            self.retry_at_ms = now_ms + RETRY_MS
        self.notify(GrantAnswer.RETRY)

    def on_refusal(self, now_ms: int, ends_in_ms: int, refusal: GrantRefusal | None, check_held_ms: int) -> None:
        """Note that nothing is left before the period ends."""
        self.is_requested, self.exhausted_until_ms, self.renew_at_ms = False, now_ms + ends_in_ms, None
        self.check_held_at_ms, self.refusal = now_ms + check_held_ms, refusal
        self.back_off(now_ms, ends_in_ms)
        self.notify(GrantAnswer.LAST_RETRY)

    def back_off(self, now_ms: int, ends_in_ms: int = LONGEST_PAUSE_MS) -> None:
        """Pause requests, no longer than the period lasts. A failure during a pause does not prolong it."""
        if not self.backoff.is_pausing(now_ms):
            self.backoff.failed(now_ms, ends_in_ms)

    def end_back_off(self) -> None:
        self.backoff.succeeded()
        self.exhausted_until_ms, self.retry_at_ms = 0, 0


@dataclass(slots=True, eq=False)
class LeasedQuota(Quota):
    """Units are granted ahead: more are requested when the lease falls below its low water mark."""

    @property
    def is_central(self) -> bool:
        return False

    def is_low(self, decision: PolicyDecision, now_ms: int, round_trip_ms: int) -> bool:
        if self.is_requested or self.backoff.is_pausing(now_ms):
            return False
        demand_milli = self.demand.per_second_milli(now_ms)
        return decision.available <= low_water(decision.last_grant, demand_milli, round_trip_ms)

    def on_coordinator_lost(self, *, is_outage: bool) -> None:
        if is_outage:
            self.notify(GrantAnswer.RETRY)

    def on_mode_changed(self) -> None:
        self.notify(GrantAnswer.RETRY)
        self.is_requested = False
