"""A rate that several regions share, on virtual time: the formulas that ship, beside a static split and Doorman's.

The omniscient limiter is one bucket for all regions. What a limiter admits *conforms* as far as that bucket, asked for
what was admitted only, would have let it pass; the rest is overshoot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.allocation.network import Network
from benchmarks.allocation.score import jain
from benchmarks.allocation.shares import StoredShare, kept_micro, share_of_grant
from benchmarks.allocation.traces import (
    TICK_MS,
    Shape,
    Trace,
    diurnal,
    flash,
    on_off,
    rotating,
    surge,
    trace,
    zipf,
)
from benchmarks.frame import Case, Figure, figure
from coordinator.shared_limits.rules import DemandReport, Grant, Shared, share_out, terms_of
from protocol.limits.fair_shares import Member, fair_shares
from protocol.limits.rates import Sharing
from regional_agent.shared_limits.rules import (
    CHECK_FALL_MS,
    URGENT_AFTER_MS,
    RateDemand,
    has_fallen,
    is_urgent,
    needs_confirmation,
    needs_no_report,
    requested_micro,
)

LIMIT = 3_333  # units a second: two thirds of what is asked for
REACTED = 0.9  # of its fair share, after a jump
UNSAID_MS = 5_000
LENGTH_S = 60
MICRO = 1_000_000
PARTS = 1_000_000_000

SHAPES: Mapping[str, Shape] = {
    "Zipf, steady": Shape(10, zipf, LIMIT, LENGTH_S),
    "diurnal": Shape(10, diurnal(60), LIMIT, LENGTH_S),
    "flash crowd": Shape(10, flash(20, 35), LIMIT, LENGTH_S),
    "on/off": Shape(10, on_off, LIMIT, LENGTH_S),
    "rotating": Shape(10, rotating(10), LIMIT, LENGTH_S),
    "surge, everywhere at once": Shape(10, surge(20, 35), LIMIT, LENGTH_S),
}


@dataclass(slots=True)
class Bucket:
    """Whole units are admitted; what comes in between is kept in millionths."""

    burst: float
    tokens: float
    filled_ms: int = 0

    def fill(self, rate: float, now_ms: int) -> None:
        self.tokens = min(self.burst, self.tokens + rate * (now_ms - self.filled_ms) / 1000)
        self.filled_ms = now_ms

    def take(self, units: int, rate: float, now_ms: int) -> int:
        self.fill(rate, now_ms)
        taken = min(units, int(self.tokens))
        self.tokens -= taken
        return taken


def full(burst: float) -> Bucket:
    return Bucket(burst, burst)


class Shares(Protocol):
    """A way to say which part of the limit a region may use."""

    @property
    def network(self) -> Network: ...
    def rate(self, region: int, /) -> float: ...
    def asked(self, region: int, units: int, bucket: Bucket, /) -> None: ...
    def spent(self, region: int, units: int, /) -> None: ...
    def turn(self, buckets: Sequence[Bucket], /) -> None: ...


class Static:
    def __init__(self, made: Trace) -> None:
        self.network, self._rate = Network(made, "static"), made.limit / made.regions

    def rate(self, _region: int) -> float:
        return self._rate

    def asked(self, _region: int, _units: int, _bucket: Bucket) -> None:
        """The demand of a fixed limiter has no effect."""

    def spent(self, _region: int, _units: int) -> None:
        """Spent units have no effect on a fixed limiter."""

    def turn(self, _buckets: Sequence[Bucket]) -> None:
        """Turns have no effect on a fixed limiter."""


class Doorman:
    """Each region says every so often what it wanted since; of too much each gets its proportional part.

    What others have, for as long as their leases last, is not given again.
    """

    def __init__(self, made: Trace, every_ms: int) -> None:
        self.network, self._every_ms, self._limit = Network(made, "doorman"), every_ms, float(made.limit)
        self._wanted = [0] * made.regions
        self._wants = [0.0] * made.regions
        self._has = [(0.0, 0)] * made.regions  # as the server knows it: how much, until when
        self._rates = [(made.limit / made.regions, 4 * every_ms)] * made.regions  # as the region does
        self._safe = made.limit / made.regions
        self._at_ms = [every_ms * region // made.regions for region in range(made.regions)]

    def rate(self, region: int) -> float:
        rate, until_ms = self._rates[region]
        return rate if self.network.now_ms < until_ms else self._safe

    def asked(self, region: int, units: int, _bucket: Bucket) -> None:
        self._wanted[region] += units

    def spent(self, _region: int, _units: int) -> None:
        """Follow the demand."""

    def turn(self, _buckets: Sequence[Bucket]) -> None:
        for region, at_ms in enumerate(self._at_ms):
            if self.network.now_ms >= at_ms:
                self._at_ms[region] = self.network.now_ms + self._every_ms
                self._ask(region, self._wanted[region] * 1000 / self._every_ms)
                self._wanted[region] = 0

    def _ask(self, region: int, wants: float) -> None:
        sent_ms = self.network.now_ms

        def answer() -> None:
            gets = self._gets(region, wants)
            self.network.send(region, lambda: self._hear(region, gets, sent_ms))

        self.network.send(region, answer)

    def _gets(self, region: int, wants: float) -> float:
        now_ms = self.network.now_ms
        self._wants[region] = wants
        taken = sum(has for other, (has, until_ms) in enumerate(self._has) if other != region and now_ms < until_ms)
        total = sum(self._wants)
        part = wants if total <= self._limit else self._limit * wants / total
        gets = max(0.0, min(part, self._limit - taken))
        self._has[region] = gets, now_ms + 4 * self._every_ms
        return gets

    def _hear(self, region: int, gets: float, sent_ms: int) -> None:
        self._rates[region] = gets, sent_ms + 4 * self._every_ms


@dataclass(slots=True)
class Key:
    """A region's part of the rate, and the times of its reports."""

    region: str
    demand: RateDemand = field(default_factory=lambda: RateDemand(0))
    share: StoredShare = field(default_factory=StoredShare)
    is_contended: bool = False
    due_ms: int | None = None
    told_ms: int = 0
    told_micro: int = 0
    nano_units: int = 0  # in the bucket, at the last request
    spent: int = 0
    look_ms: int = 0  # for a fall of its demand


class Ours:
    """`domain.sharing` of both sides; in between what an agent does around them, without its store and its HTTP."""

    def __init__(self, made: Trace, sharing: Sharing) -> None:
        self.network = Network(made, sharing.value)
        self._names = [f"region-{number}" for number in range(made.regions)]
        members = dict.fromkeys(self._names, Member(1))
        self._terms = terms_of(made.limit * MICRO, sharing, members, burst=made.limit)
        self._shared = Shared(since_ms=0, at_ms=0)
        self._keys = [Key(name) for name in self._names]

    def rate(self, region: int) -> float:
        return self._in_force_micro(self._keys[region]) / MICRO

    def _in_force_micro(self, key: Key) -> int:
        return key.share.in_force_micro(self.network.now_ms * 1000, self._terms.base_share_micro(key.region))

    def spent(self, region: int, units: int) -> None:
        self._keys[region].spent += units

    def asked(self, region: int, units: int, bucket: Bucket) -> None:
        key, now_ms = self._keys[region], self.network.now_ms
        key.demand.note(units, now_ms, 1)
        wanted, safe = key.demand.per_second_micro(now_ms), self._terms.base_share_micro(key.region)
        key.nano_units = available = int(bucket.tokens * PARTS)
        if key.due_ms is None and not needs_no_report(wanted, safe, available):
            key.due_ms = now_ms
        rate = max(self._in_force_micro(key), key.told_micro)
        if now_ms >= key.told_ms + URGENT_AFTER_MS and is_urgent(available, int(bucket.burst), wanted, rate):
            key.due_ms = now_ms

    def turn(self, buckets: Sequence[Bucket]) -> None:
        for number, (key, bucket) in enumerate(zip(self._keys, buckets, strict=True)):
            self._look(key, bucket)
            if key.due_ms is not None and self.network.now_ms >= key.due_ms:
                self._speak(number, key, bucket)

    def _look(self, key: Key, bucket: Bucket) -> None:
        now_ms = self.network.now_ms
        if not key.is_contended or now_ms < key.look_ms:
            return
        key.look_ms = now_ms + CHECK_FALL_MS
        if has_fallen(self._wanted(key, bucket), key.told_micro, self._in_force_micro(key)):
            key.due_ms = now_ms

    def _wanted(self, key: Key, bucket: Bucket) -> int:
        demand = key.demand.per_second_micro(self.network.now_ms)
        return requested_micro(demand, int(bucket.tokens * PARTS), int(bucket.burst), key.is_contended)

    def _speak(self, number: int, key: Key, bucket: Bucket) -> None:
        now_ms = self.network.now_ms
        wanted = self._wanted(key, bucket)
        key.due_ms, key.told_ms, key.told_micro = now_ms + UNSAID_MS, now_ms, wanted
        key.look_ms = now_ms + CHECK_FALL_MS
        rate = kept_micro(wanted, key.share.rate_micro, key.is_contended)
        key.share = key.share.lowered(rate)
        name = key.share.number_at(now_ms * 1000)
        report = DemandReport(key.region, wanted, name, self._in_force_micro(key), key.spent)

        def answer() -> None:
            answered = share_out(self._shared, report, self._terms, self.network.now_ms)
            self.network.send(number, lambda: self._hear(key, answered.grant, now_ms))
            for other in answered.asked:
                self._hint(self._names.index(other))

        self.network.send(number, answer)

    def _hint(self, number: int) -> None:
        def heed() -> None:
            self._keys[number].due_ms = self.network.now_ms

        self.network.send(number, heed)

    def _hear(self, key: Key, grant: Grant, sent_ms: int) -> None:
        mono_us, had_micro = self.network.now_ms * 1000, self._in_force_micro(key)
        given = share_of_grant(grant.number, grant.rate_micro, grant.after_micro, grant.expires_in_ms, sent_ms * 1000)
        key.share = key.share.replaced_by(given, sent_ms * 1000, mono_us)
        key.is_contended = grant.is_contended
        base_micro = self._terms.base_share_micro(key.region)
        is_quiet = not grant.is_contended and needs_no_report(key.told_micro, base_micro, key.nano_units)
        key.due_ms = None if is_quiet else sent_ms + grant.refresh_in_ms
        if needs_confirmation(had_micro, grant.rate_micro, grant.is_contended):
            key.due_ms = sent_ms + URGENT_AFTER_MS


MAKES: Mapping[str, Callable[[Trace], Shares]] = {
    "static split": Static,
    "Doorman, every 5 s": lambda made: Doorman(made, 5_000),
    "Doorman, every second": lambda made: Doorman(made, 1_000),
    "Leasehold, strict": lambda made: Ours(made, Sharing.STRICT),
    "Leasehold, adaptive": lambda made: Ours(made, Sharing.ADAPTIVE),
}


class Measured(NamedTuple):
    conforming: float  # of what the omniscient limiter admits
    overshoot_s: float  # beyond the bucket, in seconds of the limit
    reaction_ms: int | None  # of the region where demand jumps
    jain: float  # against max-min, of the demand that was meant
    messages: int


def play(name: str, seed: int, makes: Callable[[Trace], Shares]) -> Measured:
    return play_on(trace(name, SHAPES[name], seed), makes, JUMPS.get(name))


def play_on(made: Trace, makes: Callable[[Trace], Shares], jump: "Jump | None" = None) -> Measured:
    limiter, limit, now_ms = makes(made), made.limit, 0
    buckets = [full(limit / made.regions) for _ in range(made.regions)]
    passed, reaction_ms = Passed(made), None
    for tick, arrivals in enumerate(made.ticks):
        now_ms = tick * TICK_MS
        limiter.network.run_until(now_ms)
        for region, bucket in enumerate(buckets):
            bucket.fill(limiter.rate(region), now_ms)
        for region, units in arrivals:
            taken = buckets[region].take(units, limiter.rate(region), now_ms)
            limiter.asked(region, units, buckets[region])
            limiter.spent(region, taken)
            passed.admit(region, taken, tick)
        limiter.turn(buckets)
        if jump and reaction_ms is None and now_ms >= jump.at_ms and limiter.rate(jump.region) >= REACTED * jump.fair:
            reaction_ms = now_ms - jump.at_ms
    if jump and reaction_ms is None:
        reaction_ms = now_ms - jump.at_ms  # not at all
    return measured(passed, reaction_ms, limiter.network.messages)


class Passed:
    """Note what a limiter admitted, by region and tick."""

    def __init__(self, made: Trace) -> None:
        self.trace = made
        self.by_region = [0] * made.regions
        self.by_tick = [0] * len(made.ticks)

    def admit(self, region: int, units: int, tick: int) -> None:
        self.by_region[region] += units
        self.by_tick[tick] += units


def measured(passed: Passed, reaction_ms: int | None, messages: int) -> Measured:
    made, limit = passed.trace, passed.trace.limit
    omniscient, conforming = full(limit), full(limit)
    due = conform = 0
    level = most = 0.0  # admitted beyond what the rate brings
    for tick, (arrivals, here) in enumerate(zip(made.ticks, passed.by_tick, strict=True)):
        due += omniscient.take(sum(units for _, units in arrivals), limit, tick * TICK_MS)
        conform += conforming.take(here, limit, tick * TICK_MS)
        level = max(0.0, level + here - limit * TICK_MS / 1000)
        most = max(most, level)
    parts = [has / share for has, share in zip(passed.by_region, _fair(made), strict=True) if share]
    return Measured(conform / due, max(0.0, most - limit) / limit, reaction_ms, jain(parts), messages)


def _fair(made: Trace) -> list[float]:
    """Max-min, of what is asked for in each second."""
    shares = [0.0] * made.regions
    per_second = 1000 // TICK_MS
    for begin in range(0, len(made.ticks), per_second):
        wanted = [0] * made.regions
        for arrivals in made.ticks[begin : begin + per_second]:
            for region, units in arrivals:
                wanted[region] += units
        given = fair_shares(made.limit, [Member(1)] * made.regions, wanted)
        shares = [sum(each) for each in zip(shares, map(min, given, wanted), strict=True)]
    return shares


class Jump(NamedTuple):
    """A jump of one region's demand, and the region's fair share from then on."""

    region: int
    at_ms: int
    fair: float


JUMPS = {"flash crowd": Jump(9, 20_000, 0.25 * LIMIT)}


Results = Mapping[str, Mapping[str, Sequence[Measured]]]  # by trace and limiter, one for each seed


def compared(seeds: Sequence[int]) -> Results:
    return {
        name: {each: [play(name, seed, makes) for seed in seeds] for each, makes in MAKES.items()} for name in SHAPES
    }


def tables(results: Results) -> dict[str, list[Case]]:
    return {f"a rate: {name}": [_case(*each) for each in by_limiter.items()] for name, by_limiter in results.items()}


def _case(name: str, runs: Sequence[Measured]) -> Case:
    columns: dict[str, Figure | str] = {
        "conforming ÷ omniscient": figure([each.conforming for each in runs], 3),
        "overshoot, s of the limit": figure([each.overshoot_s for each in runs], 3),
        "Jain against max-min": figure([each.jain for each in runs], 3),
        "messages a second": figure([each.messages / LENGTH_S for each in runs], 1),
    }
    if runs[0].reaction_ms is not None:
        columns["reaction, ms"] = figure([float(each.reaction_ms or 0) for each in runs], 0)
    return Case(name, columns)
