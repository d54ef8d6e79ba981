"""Whatever one region reports of a rate or of slots, the others keep their base shares, and nothing overflows."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.shared_limits.rules import (
    LONGEST_MS,
    MOST_REMEMBERED,
    NANO_UNITS,
    SLOT_MICRO,
    DemandReport,
    Grant,
    Shared,
    SharingReply,
    SharingTerms,
    beyond,
    share_out,
    terms_of_slots,
)
from protocol.limits.fair_shares import Member as Weighed
from protocol.limits.rates import MAX_RATE_MICRO, Sharing
from protocol.units import MAX_UNITS
from tests.budget import examples
from tests.unit.coordinator.shared_limits.test_rules import LIMIT, NAMES, World, terms

SAFE = LIMIT // 3
HONEST = ("a", "c")
numbers = st.sampled_from([0, 1, 123, SAFE, LIMIT, 10 * LIMIT, MAX_UNITS]) | st.integers(0, MAX_UNITS)
pauses_ms = st.sampled_from([0, 1, 250, 999, 2_000, 5_000])
lies = st.tuples(numbers, numbers | st.just(-1), numbers, numbers, pauses_ms)


def last_number(shared: Shared) -> int:
    holding = shared.holdings.get("b")
    return holding.perhaps[-1].number if holding else 0


def is_stored_and_said(shared: Shared, of: SharingTerms, grant: Grant) -> None:
    """Check that a record survives its round trip and stays within what a region may report."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=Shared) == shared
    assert all(0 <= number <= MAX_UNITS for number in grant[:5])
    assert all(0 <= milli <= MAX_UNITS for milli in beyond(shared, of))


@pytest.mark.parametrize("sharing", list(Sharing)[:2])
@settings(max_examples=examples(150))
@given(told=st.lists(lies, min_size=1, max_size=30))
def test_honest_regions_keep_their_parts_of_a_rate(
    sharing: Sharing, told: list[tuple[int, int, int, int, int]]
) -> None:
    """Check the sum of the honest shares: in the end, a false report takes only the base share of its own region.

    A strict rate returns borrowed units before any share grows again. A region that says that it lost its share is
    counted with its base share from then on, and both honest regions may return as much for it, each because the other
    has not confirmed yet. So together they keep half of their base shares until the longest grant has ended. Regions
    that pay back debts keep three quarters when adaptive.
    """
    of, is_strict = terms(sharing), sharing is Sharing.STRICT
    in_the_end = 2 * SAFE if is_strict else 2 * SAFE * 3 // 4 - SAFE // 8
    at_least = SAFE if is_strict else in_the_end
    world = World(of)
    for name in HONEST:
        world.regions[name].demand_micro = LIMIT
        world.exchange(name, 1)
    for demand, number, rate, spent, pause_ms in told:
        named = last_number(world.shared) if number < 0 else number
        answer = share_out(world.shared, DemandReport("b", demand, named, rate, spent), of, world.now_ms)
        is_stored_and_said(world.shared, of, answer.grant)
        for name in 3 * HONEST:
            world.exchange(name, 1)
        assert sum(world.rate_of(name) for name in HONEST) >= at_least
        world.pass_time(pause_ms)
        assert world.most_over <= of.worst
    for _ in range(of.longest_ms // 1_000 + 1):
        world.pass_time(1_000)
        for name in 3 * HONEST:
            world.exchange(name, 1)
    assert sum(world.rate_of(name) for name in HONEST) >= in_the_end
    assert world.most_over <= of.worst


def test_a_share_that_was_never_given_takes_nothing_from_the_others() -> None:
    """A single message used to bring the others to nothing."""
    world = World(terms(Sharing.ADAPTIVE))
    for name in HONEST:
        world.regions[name].demand_micro = LIMIT
    for _ in range(12):
        share_out(world.shared, DemandReport("b", MAX_UNITS, 123, MAX_UNITS, MAX_UNITS), world.terms, world.now_ms)
        for name in HONEST:
            world.exchange(name, 1)
        world.pass_time(2_000)
    assert min(world.rate_of(name) for name in HONEST) >= SAFE - SAFE // 1_000
    assert world.shared.most_debt <= world.terms.worst


def test_the_largest_limits_and_long_silences_stay_within_64_bits() -> None:
    of = SharingTerms(
        MAX_RATE_MICRO, Sharing.ADAPTIVE, dict.fromkeys(NAMES, Weighed(1)), dict.fromkeys(NAMES, MAX_RATE_MICRO)
    )
    shared = Shared(0, 0)
    for now_ms in range(0, 400 * LONGEST_MS, LONGEST_MS):
        answer = share_out(shared, DemandReport("b", MAX_UNITS, 5, MAX_UNITS, MAX_UNITS), of, now_ms)
        is_stored_and_said(shared, of, answer.grant)
    assert shared.debt <= MOST_REMEMBERED


# --- slots ------------------------------------------------------------------------------------------------------------

SLOTS = 9
slot_terms = terms_of_slots(SLOTS, 60_000, {name: Weighed(1) for name in NAMES})


class Slots:
    """Let two regions want more slots than there are and take what they are granted."""

    def __init__(self, now_ms: int) -> None:
        self.shared = Shared(0, 0)
        self.now_ms = now_ms
        self.held = dict.fromkeys(HONEST, SLOTS // 3)
        self.numbers = dict.fromkeys(HONEST, 0)

    def exchange(self) -> None:
        for name in HONEST:
            held_micro = self.held[name] * SLOT_MICRO
            report = DemandReport(name, SLOTS * SLOT_MICRO, self.numbers[name], held_micro, 0, epoch=1)
            grant = share_out(self.shared, report, slot_terms, self.now_ms).grant
            self.held[name], self.numbers[name] = grant.rate_micro // SLOT_MICRO, grant.number

    def lie(self, demand: int, number: int, held: int, epoch: int, lost_ms: int) -> SharingReply:
        named = last_number(self.shared) if number < 0 else number
        report = DemandReport("b", demand * SLOT_MICRO, named, held * SLOT_MICRO, 0, epoch, lost_ms)
        return share_out(self.shared, report, slot_terms, self.now_ms)


@settings(max_examples=examples(150))
@given(told=st.lists(st.tuples(numbers, numbers | st.just(-1), numbers, numbers, numbers, pauses_ms), max_size=30))
def test_honest_regions_keep_their_slots(told: list[tuple[int, int, int, int, int, int]]) -> None:
    """Report a key whose reports are kept for long enough to know what was granted."""
    slots = Slots(slot_terms.longest_ms)
    slots.exchange()
    for demand, number, held, epoch, lost_ms, pause_ms in told:
        answer = slots.lie(demand, number, held, epoch, lost_ms)
        is_stored_and_said(slots.shared, slot_terms, answer.grant)
        for _ in range(3):
            slots.exchange()
        assert sum(slots.held.values()) >= SLOTS - SLOTS // 3
        slots.now_ms += pause_ms


def test_a_published_debt_is_bounded() -> None:
    world = World(terms(Sharing.ADAPTIVE))
    for second in range(60):
        lie = DemandReport("b", MAX_UNITS, world.now_ms + second, MAX_UNITS, 0)
        share_out(world.shared, lie, world.terms, world.now_ms)
        world.exchange("a", 1)
        world.pass_time(1_000)
    assert beyond(world.shared, world.terms).overshoot_milli <= LIMIT * 1_000 * 1_000 // NANO_UNITS
