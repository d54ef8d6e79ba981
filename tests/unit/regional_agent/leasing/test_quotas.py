"""What an agent wants of each allowance, and when."""

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from prometheus_client import generate_latest

from protocol.messages import LeaseWant
from protocol.units import MAX_UNITS
from regional_agent.leasing.quotas import UNANSWERED_MS, HotKey, Leasing
from regional_agent.leasing.rules.refill import LONGEST_PAUSE_MS
from regional_agent.metrics import Metrics
from regional_agent.store.types import PolicyDecision

QUOTA = "exports:tenant=acme"


@dataclass
class StandingClock:
    now_ms: int = 1_000

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.now_ms / 1000, UTC)

    def monotonic_ms(self) -> int:
        return self.now_ms


def spent(available: int, last_grant: int = 100) -> PolicyDecision:
    return PolicyDecision(0, 1000, available, 0, 0, available, last_grant, 0)


def test_a_lease_is_renewed_when_its_time_comes_even_if_nobody_uses_it() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    leasing.leased(QUOTA, 31_000)
    assert (leasing.due(), leasing.next_due_in_ms()) == ([], 30_000)
    clock.now_ms = 31_000
    assert (leasing.due(), leasing.next_due_in_ms()) == ([QUOTA], 0)
    assert leasing.want_of(QUOTA).waiting == 0
    leasing.leased(QUOTA, None)
    assert (leasing.due(), leasing.next_due_in_ms()) == ([], None)


def test_below_the_low_water_mark_more_is_asked_for_at_once() -> None:
    leasing = Leasing(StandingClock())
    leasing.note(QUOTA, 1, spent(available=80))
    assert leasing.due() == []
    leasing.note(QUOTA, 1, spent(available=20))
    assert leasing.due() == [QUOTA]
    assert leasing.wake.is_set()


def test_what_did_not_come_is_asked_for_a_little_later_and_a_hint_makes_it_now() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    leasing.note(QUOTA, 1, spent(available=0))
    leasing.granted(QUOTA, 0)
    assert leasing.due() == [], "nobody waits for it"
    leasing.note(QUOTA, 1, spent(available=0))
    assert leasing.due() == [], "a quarter of a second has not passed"
    leasing.hint(QUOTA)
    assert leasing.due() == [QUOTA]


def test_once_nothing_is_left_nobody_waits_until_there_is_hope_again() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    leasing.note(QUOTA, 1, spent(available=0))
    leasing.leased(QUOTA, 0)
    leasing.refused(QUOTA)
    assert leasing.due() == []
    assert (leasing.may_wait(QUOTA), leasing.outlook(QUOTA).is_exhausted) == (False, True)
    clock.now_ms += 500
    assert leasing.may_wait(QUOTA)
    leasing.refused(QUOTA)
    leasing.hint(None)
    assert (leasing.may_wait(QUOTA), leasing.outlook(QUOTA).is_exhausted) == (True, False)


def test_who_lost_hope_for_want_of_an_answer_asks_as_soon_as_the_coordinator_is_heard_again() -> None:
    """Pauses grow to half a minute: a region that was cut off was back for so long, and denied still."""
    clock = StandingClock()
    leasing = Leasing(clock)
    leasing.waits(QUOTA, 1)
    leasing.waits_no_more(QUOTA, 1)
    leasing.granted(QUOTA, 0)
    leasing.waited_in_vain(QUOTA)
    leasing.reached()
    assert not leasing.may_wait(QUOTA), "it was never cut off: nothing is there"
    leasing.cut_off()
    leasing.wake.clear()
    leasing.reached()
    assert leasing.may_wait(QUOTA)
    assert leasing.wake.is_set()
    leasing.note(QUOTA, 1, spent(available=0))
    clock.now_ms += 250
    assert leasing.due() == [QUOTA]


def test_a_message_that_was_lost_ends_no_hope_but_the_answer_that_nothing_is_there_does() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    leasing.waits(QUOTA, 1)
    clock.now_ms += UNANSWERED_MS - 1
    leasing.waited_in_vain(QUOTA)
    assert leasing.may_wait(QUOTA), "it is said again, and whoever comes meanwhile waits for it"
    leasing.granted(QUOTA, 0)
    leasing.waited_in_vain(QUOTA)
    assert not leasing.may_wait(QUOTA), "there was an answer, and nothing came"
    leasing.granted(QUOTA, 5)
    leasing.waits(QUOTA, 1)
    clock.now_ms += UNANSWERED_MS
    leasing.waited_in_vain(QUOTA)
    assert not leasing.may_wait(QUOTA), "nobody answers any more"


def test_what_is_exhausted_is_so_no_longer_than_its_period_lasts() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    leasing.refused(QUOTA, ends_in_ms=200)
    assert (leasing.may_wait(QUOTA), leasing.outlook(QUOTA).is_exhausted) == (False, True)
    clock.now_ms += 200
    assert (leasing.may_wait(QUOTA), leasing.outlook(QUOTA).is_exhausted) == (True, False)
    leasing.note(QUOTA, 1, spent(available=20))
    assert leasing.due() == [QUOTA], "the new period's lease is refilled at its low water mark"


def test_a_refusal_until_a_far_end_is_asked_about_again_within_half_a_minute() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    for _ in range(20):
        leasing.refused(QUOTA, ends_in_ms=30 * 86_400_000)
        clock.now_ms += LONGEST_PAUSE_MS
        leasing.note(QUOTA, 1, spent(available=0))
        assert leasing.due() == [QUOTA]


def test_a_quota_is_no_longer_exhausted_once_the_coordinator_does_not_refuse_it() -> None:
    """Nothing came yet, but others are asked for some: the limit is not the reason of a denial any more."""
    leasing = Leasing(StandingClock())
    leasing.refused(QUOTA, ends_in_ms=30 * 86_400_000)
    leasing.granted(QUOTA, 0)
    assert not leasing.outlook(QUOTA).is_exhausted


def test_the_hottest_keys_are_what_is_asked_for_most_of_rates_and_allowances() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    for number in (n for n in range(50) if n != 45):
        leasing.note_rate(f"api:tenant=t{number}", number)
    leasing.note(QUOTA, 45, spent(100))
    leasing.want_of("exports:tenant=silent")
    clock.now_ms += 1_000
    hottest = leasing.hottest(7)
    expected = [f"api:tenant=t{number}" for number in (49, 48, 47, 46)] + [QUOTA] + ["api:tenant=t44", "api:tenant=t43"]
    assert [key.quota for key in hottest] == expected
    assert "exports:tenant=silent" not in {key.quota for key in leasing.hottest(100)}
    clock.now_ms += 60_000
    assert leasing.hottest(1) == [], "what was hot has cooled down"


def test_only_what_is_hot_is_a_series_and_only_as_long_as_it_is() -> None:
    metrics = Metrics()

    def told() -> list[str]:
        lines = generate_latest(metrics.registry).decode().splitlines()
        return [line for line in lines if line.startswith("leasehold_hot_key_units_per_second")]

    metrics.hot_keys.show([HotKey("api:tenant=a", 250_000), HotKey("api:tenant=b", 99_999)])
    assert told() == ['leasehold_hot_key_units_per_second{quota="api:tenant=a"} 250.0']
    metrics.hot_keys.show([])
    assert told() == []


def test_no_want_holds_a_number_that_a_message_does_not_carry() -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    for _ in range(3):
        leasing.note(QUOTA, MAX_UNITS, spent(available=0))
        leasing.waits(QUOTA, MAX_UNITS)
        leasing.note_held(QUOTA, MAX_UNITS)
    clock.now_ms += 1
    want = leasing.want_of(QUOTA)
    assert msgspec.json.decode(msgspec.json.encode(want), type=LeaseWant) == want
