"""Lanes that the coordinator refused pause before the next exchange, and items set aside are forgotten in time."""

from itertools import pairwise

from protocol.outcomes import ExchangeOutcome
from regional_agent.leasing.rules.lanes import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, Lanes
from regional_agent.leasing.rules.set_aside import MOST_ITEMS, SetAside

LANE = (7, 2)


def test_a_stopped_lane_is_offered_again_when_people_may_have_resolved_it() -> None:
    lanes = Lanes()
    assert lanes.stop(LANE, 3, ExchangeOutcome.GAP, "", now_ms=0)
    assert not lanes.may_send(LANE, 10)
    assert lanes.has_stopped(7)
    lanes.offer_again(20)
    assert lanes.may_send(LANE, 20)
    assert not lanes.stop(LANE, 3, ExchangeOutcome.GAP, "", now_ms=21)
    assert lanes.resume(LANE)
    assert lanes.may_send(LANE, 22)


def test_a_refused_exchange_is_repeated_at_growing_intervals() -> None:
    lanes, now_ms, offered_at_ms = Lanes(), 0, [0]
    while now_ms < 4 * 3_600_000:
        lanes.stop(LANE, 3, ExchangeOutcome.REFUSED, "frozen: too large", now_ms)
        while not lanes.may_send(LANE, now_ms):
            now_ms += FIRST_PAUSE_MS
            lanes.offer_again(now_ms)
        offered_at_ms.append(now_ms)
    pauses = [later - earlier for earlier, later in pairwise(offered_at_ms)]
    assert pauses[:5] == [FIRST_PAUSE_MS * 2**n for n in range(5)]
    assert set(pauses[5:]) == {LONGEST_PAUSE_MS}


def test_a_paused_lane_is_offered_after_its_pause() -> None:
    lanes = Lanes()
    lanes.pause(LANE, now_ms=100, for_ms=50)
    assert (lanes.may_send(LANE, 149), lanes.paused_for_ms(LANE, 149)) == (False, 1)
    assert lanes.may_send(LANE, 150)
    assert not lanes.has_stopped(7)


def test_items_set_aside_are_forgotten_after_a_while_and_beyond_a_bound() -> None:
    aside = SetAside()
    for number in range(MOST_ITEMS + 1):
        aside.add(f"quota-{number}", "too long", now_ms=0, for_ms=100)
    assert not aside.has("quota-0", 50), "the oldest is forgotten beyond the bound"
    assert aside.has("quota-1", 99)
    assert not aside.has("quota-1", 100)
    assert len(aside.items(99)) == MOST_ITEMS - 1
    assert aside.items(100) == []
