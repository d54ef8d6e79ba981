"""The checks of a database, a schema, the ledger and a coordinator judge facts as the documentation says."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from coordinator.diagnosis import rules
from coordinator.diagnosis.facts import (
    CoordinatorFacts,
    DiskFacts,
    LateJob,
    LedgerFacts,
    RegionFacts,
    SchemaFacts,
    ServerFacts,
    Standby,
    TableSize,
    WebhookFacts,
)
from protocol.diagnosis.checks import CheckState, UnknownSetting, judge

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "synchronous_standby_names": "ANY 1 (a, b)",
    "max_connections": "100",
}
STANDBYS = (Standby("a", "streaming", "quorum"), Standby("b", "streaming", "quorum"))
SERVER = ServerFacts(
    version="18.1",
    version_number=180_001,
    settings=SETTINGS,
    standbys=STANDBYS,
    is_standby=False,
    is_encrypted=True,
    is_local=False,
    verifies_certificate=True,
    connections=10,
    oldest_transaction_age=1_000_000,
    commits_ms=(1.0, 2.0, 3.0),
    clock_ahead_ms=3,
    free_bytes=None,
    may_see_statistics=True,
)
SCHEMA = SchemaFacts(
    revision="0002",
    newest_known="0002",
    is_behind=False,
    role="coordinator",
    is_superuser=False,
    owns_ledger=False,
    guard_fault=None,
    guards_are_known=True,
    sizes=(TableSize("transfer", 3, 3 << 30), TableSize("report", 1, 1 << 30)),
    transfers_a_day=1_000,
    transfers=4_000,
)
LEDGER = LedgerFacts(
    now=NOW,
    sealed_at=NOW - timedelta(seconds=40),
    verified_at=NOW - timedelta(days=2),
    last_verification_fault=None,
    late_jobs=(),
    webhooks=(WebhookFacts("https://example.com/hook", 0, 0, is_paused=False),),
    unconfirmed=None,
    regions=(RegionFacts("us-east", timedelta(seconds=5), False, False, 0),),
    suspense_units=0,
    suspense_since=None,
)
COORDINATOR = CoordinatorFacts((), 5_000, has_installation_name=True, has_archive=True, log_level="info")


def states(checks: Any, facts: Any) -> dict[str, str]:
    return {each.check: each.state.value for each in judge(checks, facts, "it")}


def problems(checks: Any, facts: Any) -> dict[str, str]:
    return {check: state for check, state in states(checks, facts).items() if state != "ok"}


def with_settings(**changed: str) -> ServerFacts:
    return SERVER._replace(settings={**SETTINGS, **changed})


@pytest.mark.parametrize(
    ("checks", "facts"),
    [
        (rules.SERVER_CHECKS, SERVER),
        (rules.SCHEMA_CHECKS, SCHEMA),
        (rules.LEDGER_CHECKS, LEDGER),
        (rules.COORDINATOR_CHECKS, COORDINATOR),
        (rules.DISK_CHECKS, DiskFacts(500 << 30, 1 << 30)),
    ],
)
def test_nothing_is_wrong_with_what_a_production_installation_looks_like(checks: Any, facts: Any) -> None:
    assert problems(checks, facts) == {}
    assert {each.remedy for each in judge(checks, facts, "it")} == {""}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (with_settings(fsync="off"), {"database_durability": "failed"}),
        (with_settings(full_page_writes="off"), {"database_durability": "failed"}),
        (with_settings(synchronous_commit="off"), {"database_durability": "failed"}),
        (with_settings(synchronous_commit="local"), {"database_durability": "warning"}),
        (with_settings(synchronous_standby_names=""), {"database_replication": "warning"}),
        (with_settings(synchronous_standby_names="ANY 2 (a, b)"), {"database_replication": "warning"}),
        (with_settings(synchronous_standby_names="FIRST 3 (a, b, c)"), {"database_replication": "failed"}),
        (with_settings(synchronous_standby_names="2 (a, b)"), {"database_replication": "warning"}),
        (with_settings(synchronous_standby_names="a"), {}),
        (SERVER._replace(standbys=()), {"database_replication": "failed"}),
        (SERVER._replace(standbys=(Standby("a", "catchup", "quorum"),)), {"database_replication": "failed"}),
        (SERVER._replace(standbys=(Standby("a", "streaming", "async"),)), {"database_replication": "failed"}),
        (SERVER._replace(may_see_statistics=False), {"database_replication": "unknown"}),
        (SERVER._replace(is_standby=True), {"database_replication": "failed"}),
        (SERVER._replace(commits_ms=(60.0, 70.0, 1.0)), {"database_commits": "warning"}),
        (SERVER._replace(commits_ms=(500.0, 700.0, 1.0)), {"database_commits": "failed"}),
        (SERVER._replace(commits_ms=()), {"database_commits": "unknown"}),
        (SERVER._replace(clock_ahead_ms=-1_500), {"database_clock": "warning"}),
        (SERVER._replace(connections=80), {"database_connections": "warning"}),
        (SERVER._replace(connections=95), {"database_connections": "failed"}),
        (SERVER._replace(oldest_transaction_age=1_100_000_000), {"database_age": "warning"}),
        (SERVER._replace(oldest_transaction_age=2_000_000_000), {"database_age": "failed"}),
        (SERVER._replace(is_encrypted=False), {"database_tls": "warning"}),
        (SERVER._replace(verifies_certificate=False), {"database_tls": "warning"}),
        (SERVER._replace(is_encrypted=False, is_local=True), {}),
        (SERVER._replace(version_number=140_000), {"database_version": "warning"}),
    ],
)
def test_a_server_is_judged_by_its_settings_standbys_and_measurements(
    facts: ServerFacts, expected: Mapping[str, str]
) -> None:
    assert problems(rules.SERVER_CHECKS, facts) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"revision": None}, {"database_schema": "failed"}),
        ({"revision": "0001", "is_behind": True}, {"database_schema": "failed"}),
        ({"revision": "0003"}, {}),
        ({"is_superuser": True}, {"database_role": "failed"}),
        ({"owns_ledger": True}, {"database_role": "failed"}),
        ({"guard_fault": "trigger transfer.x: it is missing"}, {"database_role": "failed"}),
        ({"guards_are_known": False}, {"database_role": "unknown"}),
    ],
)
def test_a_schema_is_judged_by_its_revision_and_its_guards(
    changed: dict[str, Any], expected: Mapping[str, str]
) -> None:
    assert problems(rules.SCHEMA_CHECKS, SCHEMA._replace(**changed)) == expected


def test_growth_is_the_bytes_of_the_transfers_of_a_day() -> None:
    assert rules.growth_a_day(SCHEMA) == 1 << 30
    assert rules.growth_a_day(SCHEMA._replace(transfers_a_day=None)) is None
    [size] = [each for each in judge(rules.SCHEMA_CHECKS, SCHEMA, "it") if each.check == "database_size"]
    assert size.found == "4.0 GiB (transfer 3.0 GiB in 3 partitions, report 1.0 GiB); grows by 1.0 GiB a day"


@pytest.mark.parametrize(
    ("free", "growth", "state"),
    [
        (None, 1 << 30, "unknown"),
        (500 << 30, None, "ok"),
        (20 << 30, 1 << 30, "warning"),
        (2 << 30, 1 << 30, "failed"),
        (900 << 20, 0, "warning"),
        (100 << 20, 0, "failed"),
    ],
)
def test_a_disk_is_judged_by_the_days_that_it_lasts(free: int | None, growth: int | None, state: str) -> None:
    assert states(rules.DISK_CHECKS, DiskFacts(free, growth)) == {"database_disk": state}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"sealed_at": None}, {"seals": "warning"}),
        ({"sealed_at": NOW - timedelta(minutes=4)}, {"seals": "warning"}),
        ({"sealed_at": NOW - timedelta(minutes=20)}, {"seals": "failed"}),
        ({"verified_at": None}, {"verification": "warning"}),
        ({"verified_at": NOW - timedelta(days=8)}, {"verification": "warning"}),
        ({"last_verification_fault": "a row was changed"}, {"verification": "failed"}),
        ({"late_jobs": (LateJob("seal", timedelta(minutes=30)),)}, {"jobs": "failed"}),
        ({"webhooks": (WebhookFacts("https://a", 2, 0, is_paused=False),)}, {"webhooks": "warning"}),
        ({"webhooks": (WebhookFacts("https://a", 0, 3, is_paused=False),)}, {"webhooks": "warning"}),
        ({"webhooks": (WebhookFacts("https://a", 0, 0, is_paused=True),)}, {"webhooks": "warning"}),
        ({"webhooks": ()}, {}),
        ({"unconfirmed": "it was restored"}, {"installation": "warning"}),
        ({"regions": ()}, {"regions": "unknown"}),
        ({"regions": (RegionFacts("a", None, False, False, 0),)}, {"regions": "warning"}),
        ({"regions": (RegionFacts("a", timedelta(minutes=2), False, False, 0),)}, {"regions": "warning"}),
        ({"regions": (RegionFacts("a", timedelta(minutes=2), True, False, 0),)}, {}),
        ({"regions": (RegionFacts("a", timedelta(), False, True, 0),)}, {"regions": "failed"}),
        ({"regions": (RegionFacts("a", timedelta(), False, False, 2),)}, {"regions": "failed"}),
        ({"suspense_units": 3, "suspense_since": NOW - timedelta(days=8)}, {"suspense": "warning"}),
        ({"suspense_units": 3, "suspense_since": NOW - timedelta(days=1)}, {}),
    ],
)
def test_the_ledger_is_judged_by_its_own_work(changed: dict[str, Any], expected: Mapping[str, str]) -> None:
    assert problems(rules.LEDGER_CHECKS, LEDGER._replace(**changed)) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"unknown_settings": (UnknownSetting("LEASEHOLD_COORDINATOR_PROT", "LEASEHOLD_COORDINATOR_PORT"),)},
            {"coordinator_settings": "warning"},
        ),
        ({"clock_limit_ms": 0}, {"coordinator_clock_limit": "warning"}),
        ({"has_installation_name": False}, {"coordinator_installation_name": "warning"}),
        ({"log_level": "debug"}, {"coordinator_log": "warning"}),
        ({"kafka_protocol": "sasl_plaintext"}, {"coordinator_kafka": "warning"}),
    ],
)
def test_a_coordinator_is_judged_by_its_settings(changed: dict[str, Any], expected: Mapping[str, str]) -> None:
    facts = COORDINATOR._replace(**changed)
    assert problems(rules.COORDINATOR_CHECKS, facts) == expected
    [found] = [each for each in judge(rules.COORDINATOR_CHECKS, facts, "it") if each.state is CheckState.WARNING]
    assert found.remedy


def test_a_coordinator_that_sends_to_kafka_fails_while_kafka_takes_nothing() -> None:
    sending = COORDINATOR._replace(kafka_protocol="sasl_ssl")
    assert problems(rules.COORDINATOR_CHECKS, sending) == {}
    failing = sending._replace(kafka_finding="Kafka does not take the decision log")
    assert problems(rules.COORDINATOR_CHECKS, failing) == {"coordinator_kafka": "failed"}
