"""Decide what each proxy may use of a region's share of a rate. Pure: times are arguments, numbers are integers.

A proxy admits requests by itself, from a token bucket that it was assigned, and reports afterwards how many. The share
is divided by the reported demands with the rule that divides a limit among regions (`fair_shares`); the checks that the
store decides are one more member. Nothing that a proxy sends confirms an assignment, and what it sends may be lost with
its stream. So what counts is the most that may be in force at a proxy:

    the last assignment      until `until_ms`: its time to live, from when it is delivered at the latest
    the one before           for `DELIVERY_MS` more, because the proxy may not have the last one yet

What the filter's configuration lets a proxy admit without an assignment is known to Envoy only, and not counted here.

**Units are taken from the region's bucket before a proxy can use them**, like a token slice. So checks, proxies and
other agents never sell a unit twice. A report says what was used; what the proxy can no longer use is returned, unless
the bucket has been full meanwhile and would have lost it. So bucket and unused units together never hold more than the
burst, but for what the proxies' own buckets hold.

An assignment grows only by what is free, or what the bucket can pay. It is not taken back, so the bucket may be driven
below zero only by what was in force already: when the region's share falls, and by proxies that are silent. That is a
debt, which is paid back by dividing less. `bound_nano` is the most that proxies may admit so, beyond the region's share
and burst; it is published.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct, field

from protocol.limits.fair_shares import Member, fair_shares
from protocol.limits.rates import MAX_RATE_MICRO
from regional_agent.shared_limits.rules import AVERAGES_MS, RateDemand

NANO_UNITS = 1_000_000_000  # a millionth of a unit per second brings one per millisecond
TICK_MS = 125  # from one division to the next, and from one payment to the next
LATE_MS = 125  # by so much a division may be late
TIME_TO_LIVE_MS = 3_000  # whole seconds: Envoy reads no fractions
REFRESH_MS = 1_500
DELIVERY_MS = 1_000  # a message arrives within this time, or its stream has ended
CONFIRM_MS = DELIVERY_MS - LATE_MS  # a proxy that does not confirm a message by then loses its connection
SILENT_MS = 3_000  # without a report: the assignment is not refreshed
IDLE_MS = 60_000  # without a request: the bucket is abandoned
CHANGED = 8  # an assignment that differs less than by this part of it stays as it is
LEFT = 32  # or by this part, where as much is left of the limit
REPAID_IN_MS = 1_000  # a debt
SPENT_IN_MS = 4_000  # what lies in the bucket beyond its half
BURST_PART = 4  # the part of the burst that the proxies' own buckets have
MOST_TOKENS_MS = 1_000  # of its rate in a proxy's bucket

P = TypeVar("P", bound=Hashable)


class Assignment(NamedTuple):
    """A token bucket for a proxy. It begins full, and is a new one whenever either number changes."""

    rate_micro: int
    tokens: int


NOTHING = Assignment(0, 0)


class Part(Struct, eq=False):
    """The part of a rate that one proxy has, as far as it can be known here."""

    demand: RateDemand
    reported_ms: int
    demand_micro: int = 0
    ceiling_micro: int = MAX_RATE_MICRO  # by the other rates that limit the same requests
    assigned: Assignment = NOTHING
    former: Assignment = NOTHING  # at most, before this assignment
    former_until_ms: int = 0
    former_expires_ms: int = 0  # where the change never arrives
    until_ms: int = 0
    is_connected: bool = True
    open_nano: int = 0  # units that were taken for it, and that it has not reported

    def in_force_micro(self, now_ms: int) -> int:
        rate_micro = self.assigned.rate_micro if now_ms < self.until_ms else 0
        return max(rate_micro, self.former.rate_micro) if now_ms < self.former_until_ms else rate_micro

    def tokens(self, now_ms: int) -> int:
        """Return the most that its buckets hold."""
        return self.assigned.tokens + (self.former.tokens if now_ms < self.former_until_ms else 0)

    def is_to_change(self, target_micro: int, now_ms: int, *, is_over: bool, is_left: bool) -> bool:
        """Return whether to assign another rate. Where too much is in force, or something is left, less is enough.

        The last change has arrived by then, so at most one is on the way.
        """
        if now_ms < self.former_until_ms:
            return False
        more_micro = target_micro - self.assigned.rate_micro
        is_short = is_left and more_micro > 0 and self.demand_micro > self.assigned.rate_micro
        part = LEFT if is_short or (is_over and more_micro < 0) else CHANGED
        return abs(more_micro) * part > self.assigned.rate_micro

    def is_reporting(self, now_ms: int) -> bool:
        return self.is_connected and now_ms < self.reported_ms + SILENT_MS

    def is_over(self, now_ms: int) -> bool:
        """Return whether nothing is in force at a proxy that is not connected."""
        return not self.is_connected and now_ms >= max(self.until_ms, self.former_until_ms)


class Share(NamedTuple):
    """The region's share of a rate, and its bucket, as the store had them."""

    rate_micro: int
    burst: int
    level_nano: int


class Division(Struct, Generic[P], eq=False):
    """One rate, divided among the proxies of one agent."""

    share: Share
    paid_until_ms: int
    agent_micro: int = 0  # what this agent may divide of the share; others may have proxies, too
    checks_micro: int = 0  # the demand of checks here, which the store decides
    parts: dict[P, Part] = field(default_factory=dict)
    due_nano: int = 0  # to be taken from the bucket with the next payment
    returnable_nano: int = 0  # of what is unreported: what the bucket has room for
    most_debt_nano: int = 0

    # --- reports ------------------------------------------------------------------------------------------------------

    def join(self, proxy: P, now_ms: int) -> Part:
        """Return a proxy's part, which is made where there is none."""
        part = self.parts.get(proxy)
        if part is None:
            part = self.parts[proxy] = Part(RateDemand(now_ms), now_ms)
        part.is_connected = True
        return part

    def report(self, proxy: P, used: int, requested: int, elapsed_s: int, now_ms: int) -> None:
        """Apply a report: units that were used and requested since the last one, so many whole seconds ago.

        Reports may be late and then follow each other at once, so their own time is believed as far as it says.
        """
        part = self.join(proxy, now_ms)
        elapsed_ms = now_ms - part.reported_ms
        if elapsed_s:
            elapsed_ms = min(max(elapsed_ms, elapsed_s * 1000), elapsed_s * 1000 + 999)
        part.demand.since_ms = now_ms - elapsed_ms
        if elapsed_ms and not any(part.demand.averages):
            part.demand.averages = (requested * 1000 / elapsed_ms,) * len(AVERAGES_MS)
        part.reported_ms = now_ms
        if part.demand.note(requested, now_ms, 1):
            part.demand_micro = part.demand.per_second_micro(now_ms)
        part.open_nano -= used * NANO_UNITS
        if part.open_nano < 0:  # it was used before anything was assigned
            self.due_nano, part.open_nano = self.due_nano - part.open_nano, 0
        self._return_surplus(part, now_ms)

    def leave(self, proxy: P, now_ms: int) -> None:
        """Note that a stream has ended: what was assigned is in force yet, and a change on the way may be lost."""
        part = self.parts.get(proxy)
        if part is not None:
            part.is_connected = False
            if now_ms < part.former_until_ms:
                part.former_until_ms = max(part.former_until_ms, part.former_expires_ms)

    def _return_surplus(self, part: Part, now_ms: int) -> None:
        """Return what a proxy can no longer use: its bucket was full."""
        reserved_micro = part.in_force_micro(now_ms)
        usable = part.tokens(now_ms) * NANO_UNITS + reserved_micro * (TICK_MS + DELIVERY_MS)
        surplus = max(0, part.open_nano - usable)
        part.open_nano -= surplus
        returned = min(surplus, self.returnable_nano)
        self.returnable_nano -= returned
        self.due_nano -= returned

    # --- payments -----------------------------------------------------------------------------------------------------

    def payment(self, now_ms: int) -> int:
        """Return the units to take from the bucket now; below zero, to return. They pay for the time to the next one.

        What is taken for a proxy that has become silent is taken as long as it may use it.
        """
        until_ms = now_ms + TICK_MS
        for proxy, part in list(self.parts.items()):
            if part.is_over(now_ms):
                part.assigned = part.former = NOTHING
                self._return_surplus(part, now_ms)
                del self.parts[proxy]
                continue
            self._take(part, part.in_force_micro(now_ms) * (until_ms - self.paid_until_ms))
        self.paid_until_ms = until_ms
        units = self.due_nano // NANO_UNITS
        self.due_nano -= units * NANO_UNITS
        return units

    def _take(self, part: Part, nano_units: int) -> None:
        part.open_nano += nano_units
        self.due_nano += nano_units
        self.returnable_nano += nano_units

    def paid(self, share: Share) -> None:
        """Apply the store's answer to a payment."""
        self.share = share
        room = max(0, share.burst * NANO_UNITS - share.level_nano)
        self.returnable_nano = min(self.returnable_nano, room, sum(part.open_nano for part in self.parts.values()))
        self.most_debt_nano = max(self.most_debt_nano, -share.level_nano)

    def refused(self, units: int) -> None:
        """Note that the store took no payment: it is due yet."""
        self.due_nano += units * NANO_UNITS

    # --- assignments --------------------------------------------------------------------------------------------------

    def divide(self, now_ms: int) -> dict[P, Assignment]:
        """Return the assignment of each proxy that reports. It changes only where it differs by a `CHANGED`th."""
        parts = {proxy: part for proxy, part in self.parts.items() if part.is_reporting(now_ms)}
        silent_micro = sum(part.in_force_micro(now_ms) for proxy, part in self.parts.items() if proxy not in parts)
        limit_micro = max(0, self.agent_micro - silent_micro + self._spare_micro())
        members = [*(Member(1, ceiling_micro=part.ceiling_micro) for part in parts.values()), Member(1)]
        demands = [*(part.demand_micro for part in parts.values()), self.checks_micro]
        shares = fair_shares(limit_micro, members, demands)[:-1]
        held_micro = sum(part.in_force_micro(now_ms) for part in parts.values())
        lacking_micro = sum(
            max(0, target - part.assigned.rate_micro)
            for part, target in zip(parts.values(), shares, strict=True)
            if (target - part.assigned.rate_micro) * CHANGED > part.assigned.rate_micro
        )
        is_over = held_micro + lacking_micro > limit_micro + limit_micro // LEFT
        is_left = held_micro < limit_micro - limit_micro // LEFT
        wanted = {
            proxy: target
            for (proxy, part), target in zip(parts.items(), shares, strict=True)
            if part.is_to_change(target, now_ms, is_over=is_over, is_left=is_left)
        }
        return self._within(limit_micro, held_micro, parts, wanted)

    def _spare_micro(self) -> int:
        """Return what the bucket adds to the share: what lies beyond its half, or else less than nothing: a debt."""
        level_nano, half = self.share.level_nano - self.due_nano, self.share.burst * NANO_UNITS // 2
        return max(0, level_nano - half) // SPENT_IN_MS - max(0, -level_nano) // REPAID_IN_MS

    def _within(
        self, limit_micro: int, held_micro: int, parts: Mapping[P, Part], wanted: Mapping[P, int]
    ) -> dict[P, Assignment]:
        """Let assignments grow by no more than the limit has room for when all others have theirs, and by no more than
        is free already, or than half of the bucket can pay until then.
        """
        rates = {
            proxy: min(wanted.get(proxy, MAX_RATE_MICRO), part.assigned.rate_micro) for proxy, part in parts.items()
        }
        grows = {proxy: rate - rates[proxy] for proxy, rate in wanted.items() if rate > rates[proxy]}
        payable_micro = max(0, self.share.level_nano - self.due_nano) // (2 * (DELIVERY_MS + TICK_MS))
        allowed_micro = max(0, min(limit_micro - sum(rates.values()), limit_micro - held_micro + payable_micro))
        asked_micro = max(allowed_micro, sum(grows.values()), 1)
        for proxy, more_micro in grows.items():
            rates[proxy] += more_micro * allowed_micro // asked_micro
        return {
            proxy: Assignment(rate, self._tokens(rate)) if proxy in wanted else parts[proxy].assigned
            for proxy, rate in rates.items()
        }

    def _tokens(self, rate_micro: int) -> int:
        """Return what a proxy's bucket may hold: its part of a part of the burst, and at least one unit."""
        if not rate_micro:
            return 0
        by_burst = self.share.burst * rate_micro // (BURST_PART * max(1, self.share.rate_micro))
        return max(1, min(by_burst, rate_micro * MOST_TOKENS_MS // NANO_UNITS))

    def assign(self, proxy: P, assignment: Assignment, now_ms: int) -> None:
        """Note what is sent to a proxy now. A changed assignment is a new bucket, and it is full."""
        part = self.parts[proxy]
        if assignment != part.assigned:
            held_micro = part.in_force_micro(now_ms)
            part.former = Assignment(held_micro, part.tokens(now_ms))
            part.former_until_ms = now_ms + DELIVERY_MS
            part.former_expires_ms = max(part.until_ms, part.former_expires_ms)
            part.assigned = assignment
            self._take(part, assignment.tokens * NANO_UNITS)
        part.until_ms = now_ms + TIME_TO_LIVE_MS + DELIVERY_MS

    def demand_micro(self, now_ms: int) -> int:
        """Return the demand of all proxies that report, for the region's own demand."""
        return sum(part.demand_micro for part in self.parts.values() if part.is_reporting(now_ms))


def bound_nano(limit_micro: int, burst: int, proxies: int) -> int:
    """Return the most that a region's proxies may admit beyond its share and burst.

    What their own buckets hold: their part of the burst, at least a unit each, and as much again where assignments
    change. What is in force when the whole limit, as the region's share, is taken away: as long as an assignment may be
    in force, and the time that was paid in advance.
    """
    held = 2 * (burst // BURST_PART + proxies) * NANO_UNITS
    silent_ms = TIME_TO_LIVE_MS + DELIVERY_MS + 2 * (TICK_MS + LATE_MS)
    return held + limit_micro * silent_ms
