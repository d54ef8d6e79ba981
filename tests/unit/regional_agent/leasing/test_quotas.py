"""What an agent requests of each allowance, and when."""

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from prometheus_client import generate_latest

from protocol.messages import LeaseDemand
from protocol.units import MAX_UNITS
from regional_agent.leasing.quotas import UNANSWERED_MS, Quotas
from regional_agent.leasing.rules.demand import HotKey
from regional_agent.leasing.rules.refill import LONGEST_PAUSE_MS
from regional_agent.metrics import AgentMetrics
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


def test_a_lease_is_renewed_in_time_even_if_it_is_unused() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    quotas.schedule_renewal(QUOTA, 31_000)
    assert (quotas.due(), quotas.next_due_in_ms()) == ([], 30_000)
    clock.now_ms = 31_000
    assert (quotas.due(), quotas.next_due_in_ms()) == ([QUOTA], 0)
    assert quotas.grant_request(QUOTA).waiting == 0
    quotas.schedule_renewal(QUOTA, None)
    assert (quotas.due(), quotas.next_due_in_ms()) == ([], None)


def test_below_the_low_water_mark_a_refill_is_requested_at_once() -> None:
    quotas = Quotas(StandingClock())
    quotas.record_demand(QUOTA, 1, spent(available=80))
    assert quotas.due() == []
    quotas.record_demand(QUOTA, 1, spent(available=20))
    assert quotas.due() == [QUOTA]
    assert quotas.wake.is_set()


def test_a_missing_grant_is_requested_again_later_or_at_once_after_a_signal() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    quotas.record_demand(QUOTA, 1, spent(available=0))
    quotas.on_grant(QUOTA, 0)
    assert quotas.due() == [], "nobody waits for it"
    quotas.record_demand(QUOTA, 1, spent(available=0))
    assert quotas.due() == [], "a quarter of a second has not passed"
    quotas.retry(QUOTA)
    assert quotas.due() == [QUOTA]


def test_requests_do_not_wait_for_an_exhausted_quota() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    quotas.record_demand(QUOTA, 1, spent(available=0))
    quotas.schedule_renewal(QUOTA, 0)
    quotas.on_refusal(QUOTA)
    assert quotas.due() == []
    assert (quotas.may_wait(QUOTA), quotas.outlook(QUOTA).is_exhausted) == (False, True)
    clock.now_ms += 500
    assert quotas.may_wait(QUOTA)
    quotas.on_refusal(QUOTA)
    quotas.retry_all()
    assert (quotas.may_wait(QUOTA), quotas.outlook(QUOTA).is_exhausted) == (True, False)


def test_an_exhausted_quota_is_requested_again_once_the_coordinator_is_back() -> None:
    """Pauses grow to half a minute: a region that was partitioned used to keep denying for so long
    after it was back.
    """
    clock = StandingClock()
    quotas = Quotas(clock)
    quotas.start_waiting(QUOTA, 1)
    quotas.stop_waiting(QUOTA, 1)
    quotas.on_grant(QUOTA, 0)
    quotas.on_wait_timeout(QUOTA)
    quotas.on_coordinator_reached()
    assert not quotas.may_wait(QUOTA), "it was never cut off: nothing is there"
    quotas.on_coordinator_lost()
    quotas.wake.clear()
    quotas.on_coordinator_reached()
    assert quotas.may_wait(QUOTA)
    assert quotas.wake.is_set()
    quotas.record_demand(QUOTA, 1, spent(available=0))
    clock.now_ms += 250
    assert quotas.due() == [QUOTA]


def test_a_lost_message_ends_no_wait_and_an_answer_of_nothing_does() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    quotas.start_waiting(QUOTA, 1)
    clock.now_ms += UNANSWERED_MS - 1
    quotas.on_wait_timeout(QUOTA)
    assert quotas.may_wait(QUOTA), "it is said again, and whoever comes meanwhile waits for it"
    quotas.on_grant(QUOTA, 0)
    quotas.on_wait_timeout(QUOTA)
    assert not quotas.may_wait(QUOTA), "there was an answer, and nothing came"
    quotas.on_grant(QUOTA, 5)
    quotas.start_waiting(QUOTA, 1)
    clock.now_ms += UNANSWERED_MS
    quotas.on_wait_timeout(QUOTA)
    assert not quotas.may_wait(QUOTA), "nobody answers any more"


def test_a_quota_is_exhausted_at_most_until_its_period_ends() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    quotas.on_refusal(QUOTA, ends_in_ms=200)
    assert (quotas.may_wait(QUOTA), quotas.outlook(QUOTA).is_exhausted) == (False, True)
    clock.now_ms += 200
    assert (quotas.may_wait(QUOTA), quotas.outlook(QUOTA).is_exhausted) == (True, False)
    quotas.record_demand(QUOTA, 1, spent(available=20))
    assert quotas.due() == [QUOTA], "the new period's lease is refilled at its low water mark"


def test_a_refusal_with_a_distant_end_is_checked_within_half_a_minute() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    for _ in range(20):
        quotas.on_refusal(QUOTA, ends_in_ms=30 * 86_400_000)
        clock.now_ms += LONGEST_PAUSE_MS
        quotas.record_demand(QUOTA, 1, spent(available=0))
        assert quotas.due() == [QUOTA]


def test_a_quota_is_no_longer_exhausted_once_the_coordinator_does_not_refuse_it() -> None:
    """No grant came yet, but other regions were signalled to return units: the limit is no longer the reason of a
    denial.
    """
    quotas = Quotas(StandingClock())
    quotas.on_refusal(QUOTA, ends_in_ms=30 * 86_400_000)
    quotas.on_grant(QUOTA, 0)
    assert not quotas.outlook(QUOTA).is_exhausted


def test_the_hottest_keys_have_the_highest_demand() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    for number in range(50):
        quotas.record_demand(f"exports:tenant=t{number}", number, spent(100))
    quotas.grant_request("exports:tenant=silent")
    clock.now_ms += 1_000
    assert [key.quota for key in quotas.hottest(3)] == [f"exports:tenant=t{number}" for number in (49, 48, 47)]
    assert "exports:tenant=silent" not in {key.quota for key in quotas.hottest(100)}
    clock.now_ms += 60_000
    assert quotas.hottest(1) == [], "what was hot has cooled down"


def test_only_hot_keys_are_metric_series_and_only_while_they_are_hot() -> None:
    metrics = AgentMetrics()

    def told() -> list[str]:
        lines = generate_latest(metrics.registry).decode().splitlines()
        return [line for line in lines if line.startswith("leasehold_hot_key_units_per_second")]

    metrics.hot_keys.show([HotKey("api:tenant=a", 250_000), HotKey("api:tenant=b", 99_999)])
    assert told() == ['leasehold_hot_key_units_per_second{quota="api:tenant=a"} 250.0']
    metrics.hot_keys.show([])
    assert told() == []


def test_wants_hold_only_numbers_that_a_message_can_carry() -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    for _ in range(3):
        quotas.record_demand(QUOTA, MAX_UNITS, spent(available=0))
        quotas.start_waiting(QUOTA, MAX_UNITS)
        quotas.add_held(QUOTA, MAX_UNITS)
    clock.now_ms += 1
    want = quotas.grant_request(QUOTA)
    assert msgspec.json.decode(msgspec.json.encode(want), type=LeaseDemand) == want
