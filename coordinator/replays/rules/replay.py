"""Replay logged checks under another document, and count what it would deny.

A check that meets several policies is admitted by all of them or by none. So each policy is counted alone first, which
tells how much it cannot admit. Then each check counts for one policy alone: the limits that admit the smallest part of
their demand take their checks first. What they cannot admit of disjoint checks may be added up, and no check is counted
twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from coordinator.replays.rules.bounds import Demand, Estimate
from coordinator.replays.rules.limits import Limited, Limits
from coordinator.replays.rules.matching import Matcher, Met, UnknownReason, stated_cost

MOST_REMEMBERED = 20_000


class LoggedCheck(NamedTuple):
    """Checks of one row of the log."""

    at: datetime
    tenant: str
    region: str
    checks: float  # that the row stands for
    variance: float  # of that number
    denied_by: str | None  # the policy
    is_denied: bool
    subject: Mapping[str, str]
    subject_text: str  # as it is logged: equal subjects meet the same policies
    charged: Mapping[str, tuple[str, int]]  # quota and cost by policy
    own_costs: Mapping[str, int]  # by policy, of the document in force then


class _Row(NamedTuple):
    """Checks whose denial is not certain."""

    second: int
    tenant: str
    checks: float
    variance: float


class _Counter(NamedTuple):
    """One counter of a limit, and which rows charge it how many units for each check."""

    limited: Limited
    is_shadow: bool
    demand: Demand
    charges: list[tuple[int, int]]


class PolicyCount:
    """The checks of one tenant that one policy meets."""

    def __init__(self) -> None:
        self.checks = 0.0
        self.denied = 0.0  # by this policy, in the traffic
        self.certain = 0.0
        self.unknown: defaultdict[UnknownReason, float] = defaultdict(float)
        self.by_counter: defaultdict[int, float] = defaultdict(float)  # checks


class TenantCount:
    def __init__(self) -> None:
        self.checks = 0.0
        self.variance = 0.0
        self.denied = 0.0
        self.certain = 0.0
        self.policies: defaultdict[int, PolicyCount] = defaultdict(PolicyCount)


class PolicyResult(NamedTuple):
    """The checks of a tenant that one policy, counted alone, would deny."""

    place: int
    checks: float
    denied: float
    would_deny: Estimate
    unknown: Mapping[UnknownReason, float]
    window_s: int  # the longest in which its demand was counted


class TenantResult(NamedTuple):
    tenant: str
    checks: float
    variance: float
    denied: float
    would_deny: Estimate
    policies: list[PolicyResult]


class Replay:
    """The replay of one document."""

    def __init__(self, matcher: Matcher, limits: Limits, start: datetime, end: datetime) -> None:
        self._matcher = matcher
        self._limits = limits
        self._start = start
        self._whole_s = max(1, int((end - start).total_seconds()))
        self._rows: list[_Row] = []
        self._numbers: dict[tuple[str, bool], int] = {}
        self._counters: list[_Counter] = []
        self._tenants: defaultdict[str, TenantCount] = defaultdict(TenantCount)
        self._met: dict[tuple[str, str], list[Met]] = {}

    def add(self, check: LoggedCheck) -> None:
        tenant = self._tenants[check.tenant]
        tenant.checks += check.checks
        tenant.variance += check.variance
        tenant.denied += check.checks if check.is_denied else 0.0
        met = self._meet(check)
        stated = stated_cost(check.charged, check.own_costs)
        is_unmatched = all(each.policy.spec.shadow for each in met)
        is_certain, charges = self._matcher.denies_unmatched and is_unmatched, []
        for each in met:
            count = tenant.policies[each.policy.place]
            count.checks += check.checks
            count.denied += check.checks if check.denied_by == each.policy.spec.name else 0.0
            found = each.unknown or self._limits.of(each, check.tenant, check.region, check.at)
            if isinstance(found, UnknownReason):
                count.unknown[found] += check.checks
            elif found is not None:
                units = stated.units(each)
                if units > found.capacity.burst:
                    count.certain += check.checks
                    is_certain = is_certain or not each.policy.spec.shadow
                else:
                    charges.append((self._charge(each, found, units, count, check), units))
        tenant.certain += check.checks if is_certain else 0.0
        if charges and not is_certain:
            for number, units in charges:
                self._counters[number].charges.append((len(self._rows), units))
            self._rows.append(_Row(self._second(check), check.tenant, check.checks, check.variance))

    def _meet(self, check: LoggedCheck) -> list[Met]:
        """Return what a check meets, and remember it: most rows repeat one of a few subjects."""
        who = check.tenant, check.subject_text
        found = self._met.get(who)
        if found is None:
            if len(self._met) >= MOST_REMEMBERED:
                self._met.clear()
            found = self._met[who] = self._matcher.meet(check.tenant, check.subject)
        return found

    def _charge(self, met: Met, limited: Limited, units: int, count: PolicyCount, check: LoggedCheck) -> int:
        """Add the check to the demand for its counter, and return the number of this."""
        is_shadow = met.policy.spec.shadow
        number = self._numbers.setdefault((limited.counter, is_shadow), len(self._counters))
        if number == len(self._counters):
            self._counters.append(_Counter(limited, is_shadow, Demand(), []))
        demand = self._counters[number].demand
        demand.add(self._second(check), check.checks * units, check.variance * units * units)
        count.by_counter[number] += check.checks
        return number

    def _second(self, check: LoggedCheck) -> int:
        return int((check.at - self._start).total_seconds())

    # --- the results --------------------------------------------------------------------------------------------------

    def results(self) -> list[TenantResult]:
        """Return what would be denied, by tenant."""
        alone = [self._part_beyond(each.demand, each.limited) for each in self._counters]
        together = self._together(alone)
        return [
            TenantResult(
                name,
                count.checks,
                count.variance,
                count.denied,
                Estimate(count.certain, count.certain, count.certain).plus(together[name]),
                [self._policy_result(place, each, alone) for place, each in sorted(count.policies.items())],
            )
            for name, count in self._tenants.items()
        ]

    def _part_beyond(self, demand: Demand, limited: Limited) -> Estimate | UnknownReason:
        """Return the part of a demand that cannot be admitted, or why that is not known."""
        beyond = demand.beyond(limited.capacity, self._whole_s)
        if beyond is None:
            return UnknownReason.TOO_FEW_SAMPLES
        if limited.is_partial and not beyond.low:
            return UnknownReason.PARTIAL_PERIOD
        return Estimate().plus(beyond, 1 / demand.units) if demand.units else Estimate()

    def _policy_result(self, place: int, count: PolicyCount, alone: list[Estimate | UnknownReason]) -> PolicyResult:
        would_deny, window_s = Estimate(count.certain, count.certain, count.certain), 0
        unknown: defaultdict[UnknownReason, float] = defaultdict(float, count.unknown)
        for number, checks in count.by_counter.items():
            part, counter = alone[number], self._counters[number]
            if isinstance(part, UnknownReason):
                unknown[part] += checks
            else:
                would_deny = would_deny.plus(part, checks)
                window_s = max(window_s, counter.demand.window_s(counter.limited.capacity, self._whole_s))
        return PolicyResult(place, count.checks, count.denied, would_deny, unknown, window_s)

    def _together(self, alone: list[Estimate | UnknownReason]) -> Mapping[str, Estimate]:
        """Return by tenant how many checks all policies together would deny, beyond those that are certain."""
        found: defaultdict[str, Estimate] = defaultdict(Estimate)
        counted = [False] * len(self._rows)
        parts = [(part.high, number) for number, part in enumerate(alone) if isinstance(part, Estimate) and part.high]
        for _, number in sorted(parts, reverse=True):
            counter = self._counters[number]
            left = [(row, units) for row, units in counter.charges if not counted[row]]
            part = Estimate() if counter.is_shadow else self._part_beyond(self._demand(left), counter.limited)
            if isinstance(part, Estimate) and part.high:
                for row in dict.fromkeys(row for row, _ in left):
                    tenant, counted[row] = self._rows[row].tenant, True
                    found[tenant] = found[tenant].plus(part, self._rows[row].checks)
        return found

    def _demand(self, charges: Iterable[tuple[int, int]]) -> Demand:
        demand = Demand()
        for number, units in charges:
            row = self._rows[number]
            demand.add(row.second, row.checks * units, row.variance * units * units)
        return demand
