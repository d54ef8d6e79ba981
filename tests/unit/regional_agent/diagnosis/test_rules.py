"""The checks of a store and of an agent judge facts as the documentation says."""

from collections.abc import Mapping
from typing import Any

import pytest

from protocol.diagnosis.checks import UnknownSetting, judge
from regional_agent.diagnosis.facts import AgentFacts, DecisionTimes, StoreFacts
from regional_agent.diagnosis.rules import AGENT_CHECKS, STORE_CHECKS

MIB = 1 << 20
INFO = {
    "redis_version": "7.4.0",
    "role": "master",
    "connected_slaves": "0",
    "maxmemory_policy": "noeviction",
    "evicted_keys": "0",
    "aof_enabled": "1",
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "used_memory": str(100 * MIB),
    "maxmemory": str(1000 * MIB),
}
CONFIG = {"appendonly": "yes", "appendfsync": "everysec", "no-appendfsync-on-rewrite": "no"}
STORE = StoreFacts(
    is_single=True,
    is_encrypted=True,
    is_local=False,
    info=INFO,
    config=CONFIG,
    is_exempt=False,
    vouches_for_noeviction=False,
    clock_ahead_ms=2,
    times=DecisionTimes(p99_ms=1.5, set_ms=5, most_ms=50, measured=200),
)
AGENT = AgentFacts(
    unknown_settings=(),
    has_state_dir=True,
    has_journal=True,
    journal_free_bytes=1000 * MIB,
    journal_max_bytes=16 * MIB,
    coordinator_urls=["https://coordinator.example.com"],
    exchange_ms=80,
    longest_wait_ms=5_000,
    log_level="info",
)


def problems(checks: Any, facts: Any) -> dict[str, str]:
    found = judge(checks, facts, "it")
    return {each.check: each.state.value for each in found if each.state.value != "ok"}


def with_info(**changed: str | None) -> StoreFacts:
    return STORE._replace(info={name: value for name, value in {**INFO, **changed}.items() if value is not None})


REPLICA = "ip=10.0.0.2,port=6379,state=online,offset=1,lag={}"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (STORE, {}),
        (with_info(maxmemory_policy="allkeys-lru"), {"store_eviction": "failed"}),
        (with_info(evicted_keys="3"), {"store_eviction": "warning"}),
        (with_info(maxmemory_policy=None), {"store_eviction": "unknown"}),
        (with_info(maxmemory_policy=None)._replace(vouches_for_noeviction=True), {}),
        (with_info(aof_enabled="0"), {"store_durability": "warning"}),
        (STORE._replace(config=None), {"store_durability": "unknown"}),
        (STORE._replace(config={**CONFIG, "appendfsync": "no"}), {"store_durability": "warning"}),
        (
            STORE._replace(config={**CONFIG, "appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}),
            {"store_durability": "warning"},
        ),
        (STORE._replace(is_exempt=True, config={**CONFIG, "appendfsync": "always"}), {}),
        (with_info(aof_last_write_status="err"), {"store_writes": "failed"}),
        (with_info(rdb_last_bgsave_status="err"), {"store_writes": "failed"}),
        (with_info(used_memory=str(800 * MIB)), {"store_memory": "warning"}),
        (with_info(used_memory=str(960 * MIB)), {"store_memory": "failed"}),
        (with_info(maxmemory="0", total_system_memory=str(120 * MIB)), {"store_memory": "warning"}),
        (with_info(maxmemory="0"), {"store_memory": "unknown"}),
        (with_info(role="slave"), {"store_replicas": "failed"}),
        (STORE._replace(is_single=False), {"store_replicas": "warning"}),
        (with_info(connected_slaves="1", slave0=REPLICA.format(0))._replace(is_single=False), {}),
        (
            with_info(connected_slaves="1", slave0=REPLICA.format(30))._replace(is_single=False),
            {"store_replicas": "warning"},
        ),
        (STORE._replace(clock_ahead_ms=-2_000), {"store_clock": "warning"}),
        (STORE._replace(clock_ahead_ms=None), {"store_clock": "unknown"}),
        (STORE._replace(times=None), {"store_timeout": "unknown"}),
        (STORE._replace(times=DecisionTimes(8.0, 5, 50, 200)), {"store_timeout": "warning"}),
        (STORE._replace(times=DecisionTimes(26.0, 5, 50, 200)), {"store_timeout": "failed"}),
        (STORE._replace(times=DecisionTimes(26.0, 5, 50, 3)), {"store_timeout": "unknown"}),
        (STORE._replace(is_encrypted=False), {"store_tls": "warning"}),
        (STORE._replace(is_encrypted=False, is_local=True), {}),
        (with_info(redis_version="6.2.7"), {"store_version": "failed"}),
        (with_info(redis_version="7.0.15"), {}),
        (with_info(redis_version="7.2.4", valkey_version="8.1.0"), {}),
        (with_info(redis_version=None), {"store_version": "unknown"}),
    ],
)
def test_a_store_is_judged_by_its_settings_state_and_times(facts: StoreFacts, expected: Mapping[str, str]) -> None:
    assert problems(STORE_CHECKS, facts) == expected


def test_the_remedy_of_a_slow_store_names_the_time_out_to_set() -> None:
    facts = STORE._replace(times=DecisionTimes(8.0, 5, 50, 200))
    [slow] = [each for each in judge(STORE_CHECKS, facts, "it") if each.check == "store_timeout"]
    assert slow.remedy == "Set LEASEHOLD_AGENT_DECISION_TIMEOUT_MS to 17."


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"unknown_settings": (UnknownSetting("LEASEHOLD_AGENT_X", None),)}, {"agent_settings": "warning"}),
        ({"has_state_dir": False}, {"agent_state_dir": "warning"}),
        ({"has_journal": False}, {"agent_journal": "warning"}),
        ({"journal_free_bytes": 20 * MIB}, {"agent_journal": "warning"}),
        ({"journal_free_bytes": None}, {"agent_journal": "unknown"}),
        ({"coordinator_urls": ["https://a.example.com", "http://b.example.com"]}, {"agent_coordinator_tls": "warning"}),
        ({"coordinator_urls": ["http://127.0.0.1:8400"]}, {}),
        ({"exchange_ms": 0}, {"agent_exchange_time": "unknown"}),
        ({"exchange_ms": 2_600}, {"agent_exchange_time": "warning"}),
        ({"exchange_ms": 5_000}, {"agent_exchange_time": "failed"}),
        ({"log_level": "debug"}, {"agent_log": "warning"}),
    ],
)
def test_an_agent_is_judged_by_its_settings_and_its_way_to_the_coordinator(
    changed: dict[str, Any], expected: Mapping[str, str]
) -> None:
    assert problems(AGENT_CHECKS, AGENT._replace(**changed)) == expected
