"""A rate that many proxies share over RLQS, on virtual time: the rules that ship, beside static assignments.

A proxy does here what Envoy's filter does: it admits from a token bucket that is new and full whenever its assignment
changes, keeps an assignment until its time to live is over, and reports once a second. Messages take their time. Where
a stream ends, what was sent before is lost.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.allocation.network import Network
from benchmarks.allocation.rates import LIMIT, MICRO, Bucket, Ours, Passed, full, measured
from benchmarks.allocation.traces import TICK_MS, Shape, Trace, diurnal, flash, on_off, rotating, trace, zipf
from benchmarks.frame import Case, figure
from protocol.limits.rates import Sharing
from regional_agent.envoy.quota import rules
from regional_agent.envoy.quota.rules import NANO_UNITS, NOTHING, Assignment, Division, Share, bound_nano

REPORT_MS = 1_000
RECONNECT_MS = 1_000
LENGTH_S = 60


class Usage(NamedTuple):
    """A report: what was admitted and requested, and in how many whole seconds, as Envoy says it."""

    used: int
    requested: int
    elapsed_s: int


@dataclass(slots=True)
class Proxy:
    """One proxy's bucket, and what it has not reported."""

    assigned: Assignment = NOTHING
    until_ms: int = 0
    level_nano: int = 0
    filled_ms: int = 0
    used: int = 0
    requested: int = 0
    reported_ms: int = 0
    stream: int = 1  # how often it has connected
    is_alive: bool = True

    def receive(self, assignment: Assignment, time_to_live_ms: int, now_ms: int) -> None:
        self._fill(now_ms)
        if assignment != self.assigned or now_ms >= self.until_ms:
            self.assigned, self.level_nano = assignment, assignment.tokens * NANO_UNITS
        self.until_ms = now_ms + time_to_live_ms

    def request(self, units: int, now_ms: int) -> int:
        """Return how many of some requests are admitted."""
        self._fill(now_ms)
        self.requested += units
        admitted = min(units, self.level_nano // NANO_UNITS) if now_ms < self.until_ms else 0
        self.level_nano -= admitted * NANO_UNITS
        self.used += admitted
        return admitted

    def report(self, now_ms: int) -> Usage:
        usage = Usage(self.used, self.requested, (now_ms - self.reported_ms) // 1000)
        self.used, self.requested, self.reported_ms = 0, 0, now_ms
        return usage

    def _fill(self, now_ms: int) -> None:
        gained = self.assigned.rate_micro * (min(now_ms, self.until_ms) - min(self.filled_ms, self.until_ms))
        self.level_nano = min(self.assigned.tokens * NANO_UNITS, self.level_nano + max(0, gained))
        self.filled_ms = now_ms


@dataclass
class Region:
    """A region's bucket, and its agent's division of the share."""

    burst: int
    share_micro: int
    level_nano: int = 0
    filled_ms: int = 0
    division: Division[int] = field(init=False)
    sent: dict[int, tuple[Assignment, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.level_nano = self.burst * NANO_UNITS
        share = Share(self.share_micro, self.burst, self.level_nano)
        self.division = Division(share, 0, agent_micro=self.share_micro)

    def fill(self, now_ms: int) -> None:
        self.level_nano += self.share_micro * (now_ms - self.filled_ms)
        self.level_nano, self.filled_ms = min(self.level_nano, self.burst * NANO_UNITS), now_ms

    def check(self, units: int, now_ms: int) -> int:
        """Return how many checks of a unit each the store admits."""
        self.fill(now_ms)
        admitted = min(units, max(0, self.level_nano) // NANO_UNITS)
        self.level_nano -= admitted * NANO_UNITS
        return admitted

    def pay(self, now_ms: int) -> int:
        self.fill(now_ms)
        units = self.division.payment(now_ms)
        self.level_nano = min(self.burst * NANO_UNITS, self.level_nano - units * NANO_UNITS)
        self.division.paid(Share(self.share_micro, self.burst, self.level_nano))
        return units

    def turn(self, now_ms: int) -> dict[int, Assignment]:
        """Pay, divide, and return what to send: what changes, and what has to be refreshed."""
        self.division.agent_micro = self.share_micro
        due = {}
        for proxy, assignment in self.division.divide(now_ms).items():
            before, sent_ms = self.sent.get(proxy, (None, 0))
            if assignment != before or now_ms >= sent_ms + rules.REFRESH_MS:
                self.division.assign(proxy, assignment, now_ms)
                self.sent[proxy] = assignment, now_ms
                due[proxy] = assignment
        return due


class Fleet(Protocol):
    """A way to limit the requests of all proxies."""

    messages: int

    def turn(self, now_ms: int, /) -> None: ...
    def request(self, proxy: int, units: int, now_ms: int, /) -> int: ...


class Static:
    """Each proxy has its own bucket, whatever the others do."""

    def __init__(self, made: Trace, per_proxy: float) -> None:
        self.messages, self._rate = 0, per_proxy
        self._buckets = [full(per_proxy) for _ in range(made.regions)]

    def turn(self, _now_ms: int) -> None:
        """Static assignments follow nothing."""

    def request(self, proxy: int, units: int, now_ms: int) -> int:
        return self._buckets[proxy].take(units, self._rate, now_ms)


class Quotas:
    """The rules that ship: proxies that are connected to the agents of some regions, in equal numbers."""

    def __init__(self, made: Trace, regions: int = 1, delay_ms: tuple[int, int] = (1, 20)) -> None:
        self._chance = random.Random(f"proxies/{made.name}/{made.seed}")  # noqa: S311
        self._delay_ms, self._limit = delay_ms, made.limit
        across = Trace(made.name, made.seed, regions, made.limit, (), round_trips_ms=[80.0] * regions)
        self._ours = Ours(across, Sharing.ADAPTIVE) if regions > 1 else None
        self.network = Network(across, "proxies")
        self.regions = [Region(made.limit // regions, made.limit * MICRO // regions) for _ in range(regions)]
        self._mirrors = [Bucket(made.limit / regions, made.limit / regions) for _ in range(regions)]
        self.proxies = [Proxy() for _ in range(made.regions)]
        self._region_of = [proxy * regions // made.regions for proxy in range(made.regions)]
        self._report_ms = [REPORT_MS * proxy // made.regions for proxy in range(made.regions)]
        self._turn_ms = self.messages = 0

    @property
    def bound_units(self) -> float:
        """Return the published bound of all regions together."""
        bounds = [
            bound_nano(self._limit * MICRO, region.burst, self._region_of.count(number))
            for number, region in enumerate(self.regions)
        ]
        return sum(bounds) / NANO_UNITS + (self._limit if self._ours else 0)

    def request(self, proxy: int, units: int, now_ms: int) -> int:
        return self.proxies[proxy].request(units, now_ms)

    def turn(self, now_ms: int) -> None:
        self.network.run_until(now_ms)
        if self._ours:
            self._ours.network.run_until(now_ms)
        for number, each in enumerate(self.proxies):
            if each.is_alive and now_ms >= self._report_ms[number]:
                self._report_ms[number] += REPORT_MS
                self._report(number, each)
        if now_ms >= self._turn_ms:
            self._turn_ms += rules.TICK_MS
            for region_number in range(len(self.regions)):
                self._turn_region(region_number, now_ms)
        if self._ours:
            self._ours.turn(self._mirrors)

    def reset_stream(self, proxy: int) -> None:
        """End a proxy's stream; what is on the way is lost, and it connects again."""
        self.regions[self._region_of[proxy]].division.leave(proxy, self.network.now_ms)
        self.proxies[proxy].stream += 1
        self._report_ms[proxy] = self.network.now_ms + RECONNECT_MS

    def _report(self, number: int, proxy: Proxy) -> None:
        usage = proxy.report(self.network.now_ms)
        stream, region = proxy.stream, self.regions[self._region_of[number]]

        def arrive() -> None:
            if proxy.stream != stream:
                return
            region.division.report(number, *usage, self.network.now_ms)

        self._send(arrive)

    def _turn_region(self, number: int, now_ms: int) -> None:
        region = self.regions[number]
        if self._ours:
            region.share_micro = int(self._ours.rate(number) * MICRO)
        sends = region.turn(now_ms)
        units = region.pay(now_ms)
        if self._ours:
            demand = region.division.demand_micro(now_ms) * rules.TICK_MS // NANO_UNITS
            self._ours.asked(number, demand, self._mirrors[number])
            self._ours.spent(number, units)
            self._mirrors[number].tokens = region.level_nano / NANO_UNITS
            self._mirrors[number].filled_ms = now_ms
        for proxy, assignment in sends.items():
            self._assign(proxy, assignment)

    def _assign(self, number: int, assignment: Assignment) -> None:
        proxy, stream = self.proxies[number], self.proxies[number].stream

        def arrive() -> None:
            if proxy.stream == stream:
                proxy.receive(assignment, rules.TIME_TO_LIVE_MS, self.network.now_ms)

        self._send(arrive)

    def _send(self, arrive: Callable[[], None]) -> None:
        self.messages += 1
        self.network.later(self._chance.uniform(*self._delay_ms), arrive)


class Played(NamedTuple):
    conforming: float  # of what an omniscient limiter admits
    admitted: float  # the same, with what is beyond the limit
    overshoot_s: float
    jain: float
    messages_a_second: float  # for each proxy


def play(made: Trace, fleet: Fleet) -> Played:
    passed = Passed(made)
    for tick, arrivals in enumerate(made.ticks):
        now_ms = tick * TICK_MS
        fleet.turn(now_ms)
        for proxy, units in arrivals:
            passed.admit(proxy, fleet.request(proxy, units, now_ms), tick)
    found = measured(passed, None, fleet.messages)
    omniscient, due = full(made.limit), 0
    for tick, arrivals in enumerate(made.ticks):
        due += omniscient.take(sum(units for _, units in arrivals), made.limit, tick * TICK_MS)
    per_second = fleet.messages * 1000 / made.length_ms / made.regions
    return Played(found.conforming, sum(passed.by_tick) / due, found.overshoot_s, found.jain, per_second)


SHAPES: Mapping[str, Shape] = {
    "uneven (Zipf)": Shape(3, zipf, LIMIT, LENGTH_S),
    "moving (diurnal)": Shape(3, diurnal(30), LIMIT, LENGTH_S),
    "flash crowd": Shape(3, flash(20, 35), LIMIT, LENGTH_S),
    "on/off": Shape(3, on_off, LIMIT, LENGTH_S),
    "rotating": Shape(3, rotating(10), LIMIT, LENGTH_S),
}
MAKES: Mapping[str, Callable[[Trace], Fleet]] = {
    "static: the whole limit for each": lambda made: Static(made, made.limit),
    "static: an equal part for each": lambda made: Static(made, made.limit / made.regions),
    "Leasehold": Quotas,
}


def compared(seeds: Sequence[int]) -> dict[str, list[Case]]:
    """Return for each shape of demand what three proxies admit by each kind of assignment."""
    return {
        f"three proxies: {name}": [
            _case(limiter, [play(made, makes(made)) for made in (trace(name, shape, seed) for seed in seeds)])
            for limiter, makes in MAKES.items()
        ]
        for name, shape in SHAPES.items()
    }


def _case(name: str, runs: Sequence[Played]) -> Case:
    return Case(
        name,
        {
            "admitted ÷ omniscient": figure([each.admitted for each in runs], 3),
            "conforming ÷ omniscient": figure([each.conforming for each in runs], 3),
            "overshoot, s of the limit": figure([each.overshoot_s for each in runs], 2),
            "Jain against max-min": figure([each.jain for each in runs], 3),
            "messages a second and proxy": figure([each.messages_a_second for each in runs], 2),
        },
    )
