"""Coordinator and agents agree on these values to the letter."""

import string
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.limits.rules.validation import faults_of
from protocol.identifiers import lane_of, parse_quota_key, quota_key
from protocol.lease import TRANSITIONS, LeaseEvent, LeaseState, after
from protocol.limits.document import LimitsDocument
from protocol.limits.rates import (
    MAX_LOG,
    MAX_REFILL_S,
    SLOW_MICRO,
    WINDOWS,
    Rate,
    RateAlgorithm,
    base_rate,
    parse_duration_ms,
    parse_rate,
    share_of,
)
from protocol.messages import FrozenBatch, LeaseDemand, body_hash
from regional_agent.store.types import CALENDAR_WINDOW

ROOT = Path(__file__).parents[3]
LANES = [3, 2, 3]  # in the names of keys of stores that are in use
FIELDS = st.text(string.ascii_lowercase + "_", min_size=1)


@given(st.dictionaries(FIELDS, st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_a_quota_key_can_be_read_back_whatever_its_values_are(dimensions: dict[str, str]) -> None:
    key = quota_key("exports", list(dimensions.items()))
    assert parse_quota_key(key) == ("exports", dimensions)
    assert key.isascii()
    assert not set(key) & set(" |{}\n")


@pytest.mark.parametrize(
    "text", ["", "exports", "Exports:tenant=a", "exports:tenant", "exports:tenant=%2", "exports:a=b=c"]
)
def test_an_invalid_quota_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quota key"):
        parse_quota_key(text)


def test_lanes_are_the_same_everywhere_and_always() -> None:
    assert [lane_of(f"exports:tenant={tenant}", 4) for tenant in ("acme", "globex", "initech")] == LANES
    assert {lane_of(f"exports:tenant=t{i}", 4) for i in range(100)} == {0, 1, 2, 3}


def test_only_active_leases_may_be_granted_to() -> None:
    granted = {state for state in LeaseState if after(state, LeaseEvent.GRANT) is not None}
    assert granted == {LeaseState.ACTIVE}


def test_every_state_may_be_fenced_and_none_leaves_quarantine_by_itself() -> None:
    over = (LeaseState.RETIRED, LeaseState.CLOSED)
    assert all(after(state, LeaseEvent.FENCE) for state in LeaseState if state not in over)
    assert not any(after(LeaseState.CLOSED, event) for event in LeaseEvent)
    assert [event for event in LeaseEvent if after(LeaseState.RETIRED, event)] == [
        LeaseEvent.EXPIRE,
        LeaseEvent.CLOSE,
    ]
    ways_out = {
        event for (state, event), target in TRANSITIONS.items() if LeaseState.QUARANTINED is state is not target
    }
    assert ways_out == {LeaseEvent.RESOLVE}  # only people end a quarantine


def test_wrong_units_are_refused() -> None:
    for text in (
        b'{"epoch":1,"lane":0,"seq":0}',
        b'{"epoch":1,"lane":64,"seq":1}',
        b'{"epoch":1,"lane":0,"seq":"1"}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=FrozenBatch)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"quota":"q:","waiting":-1}', type=LeaseDemand)


def test_an_exchange_is_its_bytes() -> None:
    assert body_hash('{"a":1}') != body_hash('{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100/second, burst 200", (100_000_000, 200)),
        ("10/minute", (166_666, 1)),
        ("1000/minute, burst 200", (16_666_666, 200)),
        ("7200/hour", (2_000_000, 2)),
        ("3/hour, burst 30", (833, 30)),
        ("5 / second , burst 1", (5_000_000, 1)),
        ("10 per 10 minutes", (16_666, 1)),
        ("20/15 minutes, burst 20", (22_222, 20)),
        ("1000/day", (11_574, 1)),
        ("10000000 per week, burst 9000000", (16_534_391, 9_000_000)),
        ("0.5/second", (500_000, 1)),
        ("2.25 per second, burst 3", (2_250_000, 3)),
    ],
)
def test_rates_as_people_write_them(text: str, expected: tuple[int, int]) -> None:
    assert parse_rate(text) == (*expected, 0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "10", "10/fortnight", "0/second", "1/second, burst 0", "-1/second", "1e3/second", "10 per0 hours", 10),
        *("10 per 0 minutes", "1/second, burst 9000001", "9000001/second", "1 per 54 weeks", "1 per 372 days"),
        *("1/week, burst 1000", "1.5.5/second", "\u0661/second", "5/week burst 5", "10 per 10minutes"),
    ],
)
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize("algorithm", sorted(WINDOWS))
def test_a_window_is_what_may_pass_in_it(algorithm: str) -> None:
    assert parse_rate("1000/minute", algorithm) == (16_666_666, 1000, 60_000)
    assert base_rate(parse_rate("10/hour", algorithm), 1, 3) == (925, 3, 3_600_000)
    assert base_rate(parse_rate("2/hour", algorithm), 1, 3).burst == 1
    with pytest.raises(ValueError, match=f"{algorithm} has no burst"):
        parse_rate("10/second, burst 20", algorithm)
    with pytest.raises(ValueError, match="a window"):
        parse_rate("9000001/hour", algorithm)


def test_windows_of_days_and_weeks() -> None:
    assert parse_rate("5/week", "sliding_log") == (8, 5, 604_800_000)
    assert parse_rate("9000000 per 53 weeks", "fixed_window") == (280_772, 9_000_000, 53 * 604_800_000)
    assert parse_rate("10 per 10 minutes", "sliding_window").window_ms == 600_000
    with pytest.raises(ValueError, match="write 1 per 2 seconds"):
        parse_rate("0.5/second", "fixed_window")


@given(st.integers(1, 9_000_000), st.integers(1, 371), st.data())
def test_a_slow_rate_is_as_exact_as_a_bucket_can_count_it(units: int, days: int, data: st.DataObject) -> None:
    """In binary fractions that Lua's numbers hold beside the burst, and wrong by less than one in 10,000."""
    true_micro = Fraction(units * 1_000_000, days * 86_400)
    assume(true_micro < SLOW_MICRO)
    burst = data.draw(st.integers(1, min(9_000_000, int(true_micro * MAX_REFILL_S / 1_000_000))))
    rate = parse_rate(f"{units} per {days} days, burst {burst}")
    assert rate.is_slow
    counted = Fraction(rate.rate_micro)
    assert 0 <= true_micro - counted < true_micro / 10_000
    assert burst * 1_000_000_000 * counted.denominator <= 2**53
    assert float(repr(rate.rate_micro)) == rate.rate_micro, "the store reads the same number"


def test_an_algorithm_that_stores_every_request_is_bounded() -> None:
    assert parse_rate(f"{MAX_LOG}/hour", "sliding_log").burst == MAX_LOG
    with pytest.raises(ValueError, match="at most 10000 a window"):
        parse_rate(f"{MAX_LOG + 1}/hour", "sliding_log")


def test_every_algorithm_of_a_rate_has_its_file() -> None:
    others = {"allowance", "concurrency", CALENDAR_WINDOW}
    assert {path.stem for path in (ROOT / "lua" / "algorithms").glob("*.lua")} - others == set(RateAlgorithm)


def test_durations_as_people_write_them() -> None:
    assert [parse_duration_ms(text) for text in ("400ms", "10s", "5m", "1h", "1d")] == [
        400,
        10_000,
        300_000,
        3_600_000,
        86_400_000,
    ]
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration_ms("soon")


def faults(**document: object) -> dict[str, str]:
    return {fault.field: fault.rule for fault in faults_of(msgspec.convert(document, LimitsDocument))}


def test_every_fault_of_a_document_is_named_at_once() -> None:
    assert faults(
        plans={"free": {}, "Pro!": {}},
        default_plan="gold",
        quotas=[
            {"name": "a", "kind": "allowance", "limit": {"gold": 5}, "period": "day"},
            {"name": "a", "kind": "allowance", "limit": -1, "period": "day", "cap": {"overdraft": -50},
             "time_zone": "Berlin"},
            {"name": "r", "kind": "rate", "limit": "fast", "algorithm": "sliding_log", "sharing": "strict"},
            {"name": "s", "kind": "rate", "limit": "5/week, burst 5", "sharing": "adaptive", "align": "calendar"},
            {"name": "w", "kind": "rate", "limit": "5/day", "algorithm": "fixed_window", "time_zone": "Europe/Berlin"},
            {"name": "z", "kind": "rate", "limit": "5/day", "algorithm": "fixed_window", "align": "calendar",
             "time_zone": "Berlin"},
        ],
        policies=[
            {"name": "p", "quota": "none", "by": ["shoe_size"], "match": {"route": "v1/*/x"}, "wait": "long"},
            {"name": "o", "quota": "a", "by": ["tenant"], "on_store_failure": "open"},
            {"name": "l", "quota": "a", "by": ["tenant"], "on_store_failure": "local"},
        ],
    ) == {
        "plans.Pro!": "name",
        "default_plan": "known",
        "quotas[1].name": "unique",
        "quotas[0].limit.gold": "known",
        "quotas[0].limit": "plans",
        "quotas[1].limit": "units",
        "quotas[1].time_zone": "zone",
        "quotas[1].cap.overdraft": "units",
        "quotas[2].limit": "rate",
        "quotas[2].sharing": "shareable",
        "quotas[3].limit": "shareable",
        "quotas[3].align": "supported",
        "quotas[4].time_zone": "align",
        "quotas[5].time_zone": "zone",
        "policies[0].quota": "known",
        "policies[0].by[0]": "known",
        "policies[0].match.route": "path",
        "policies[0].wait": "duration",
    }  # fmt: skip


def test_a_shadow_policy_bills_nothing_and_uses_no_enforced_quota() -> None:
    quotas = [
        {"name": "exports", "kind": "allowance", "limit": 5, "period": "month"},
        {"name": "api", "kind": "rate", "limit": "5/second"},
        {"name": "trial", "kind": "rate", "limit": "5/second"},
        {"name": "slots", "kind": "concurrency", "limit": 5},
    ]
    enforced = {"name": "enforced", "quota": "api", "by": ["tenant"]}
    tried = [
        {"name": f"p{number}", "quota": quota, "by": ["tenant"], "shadow": True}
        for number, quota in enumerate(("exports", "api", "trial", "trial", "slots"))
    ]
    assert faults(quotas=quotas, policies=[*tried, enforced]) == {
        "policies[0].shadow": "supported",
        "policies[1].shadow": "quota",
    }
    assert faults(quotas=quotas, policies=tried[1:]) == {}


@given(
    st.integers(1, 9_000_000_000),
    st.integers(1, 9_000_000),
    st.lists(st.integers(0, 1_000_000), min_size=1, max_size=50),
)
def test_all_shares_together_never_exceed_the_rate(rate_micro: int, burst: int, weights: list[int]) -> None:
    shares = [base_rate(Rate(rate_micro, burst), weight, sum(weights)) for weight in weights]
    assert sum(share.rate_micro for share in shares) <= rate_micro
    # A region that takes part can burst by one unit at least, so tiny bursts may add up to one a region.
    assert sum(share.burst for share in shares) <= max(burst, burst + len(weights) - 1)
    assert all((share.burst > 0) == (weight > 0) for share, weight in zip(shares, weights, strict=True))
    assert base_rate(Rate(0, 0), 1, 1) == Rate(0, 0)
    slow = [base_rate(parse_rate("5/week, burst 5"), weight, sum(weights)) for weight in weights]
    assert sum(Fraction(share.rate_micro) for share in slow) <= Fraction(5_000_000, 604_800)
    assert share_of(0, 1, 1) == 0


@pytest.mark.parametrize(("sharing", "rule"), [("adaptive", "shareable"), ("strict", None), ("regional", None)])
def test_slots_are_shared_strictly_or_by_weight(sharing: str, rule: str | None) -> None:
    slots = {"name": "slots", "kind": "concurrency", "limit": 5, "sharing": sharing}
    assert faults(quotas=[slots]) == ({"quotas[0].sharing": rule} if rule else {})
