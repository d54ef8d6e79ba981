"""Rows of the decision log: keys are hashed, and the policy that decided comes first."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from coordinator.decision_log.rules.hashing import KeyHasher, PlainKeys, is_hash
from coordinator.decision_log.rules.rows import AHEAD, DecisionRow, rows_of
from protocol.decision_log.messages import DecisionBatch, DecisionsLost, LoggedDecision, LoggedPolicy

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
SINCE = NOW - timedelta(days=7)
HASHER = KeyHasher(b"k" * 32)


def policy(name: str, **fields: Any) -> LoggedPolicy:
    given: dict[str, Any] = {
        "quota": f"{name}s:tenant=acme",
        "cost": 1,
        "limit": 10,
        "share": 10,
        "remaining": 5,
    } | fields
    return LoggedPolicy(policy=name, **given)


def decision(at: datetime = NOW, outcome: Any = "admitted", **fields: Any) -> LoggedDecision:
    given: dict[str, Any] = {"mode": "enforce", "subject": {"tenant": "acme"}} | fields
    return LoggedDecision(at_ms=int(at.timestamp() * 1000), outcome=outcome, **given)


def made(*decisions: LoggedDecision, lost: list[DecisionsLost] | None = None, hasher: KeyHasher = HASHER) -> Any:
    batch = DecisionBatch(id="0f" * 12, agent="agent-1", decisions=list(decisions), lost=lost or [])
    return rows_of("eu-west", batch, hasher, SINCE, NOW)


def row(each: LoggedDecision, hasher: KeyHasher = HASHER) -> DecisionRow:
    [found] = made(each, hasher=hasher).rows
    return DecisionRow(*found)


def test_users_keys_addresses_and_labels_are_hashed_and_tenant_and_route_are_not() -> None:
    subject = {"tenant": "acme", "route": "/v1/x", "api_key": "ak_7", "ip": "2001:DB8::1", "labels.model": "large"}
    key = "api:api_key=ak_7,tenant=acme,ip=2001%3Adb8%3A%3A1"
    found = row(decision(subject=subject, policies=[policy("search", quota=key)]))
    for text in (found.subject or "", found.quota or ""):
        assert not any(value in text.lower() for value in ("ak_7", "2001", "large"))
    assert (found.tenant, "/v1/x" in (found.subject or "")) == ("acme", True)
    assert found.quota == HASHER.quota(key)
    assert HASHER.value("ip", "2001:db8::1") in (found.quota or "")
    assert HASHER.value("ip", "2001:db8::1") in (found.subject or ""), "one address in two forms has one hash"


def test_hashes_differ_by_key_and_by_field_and_repeat_for_equal_values() -> None:
    assert is_hash(HASHER.hash("user", "jane"))
    assert HASHER.hash("user", "jane") == KeyHasher(b"k" * 32).hash("user", "jane")
    others = [HASHER.hash("api_key", "jane"), HASHER.hash("user", "joe"), KeyHasher(b"j" * 32).hash("user", "jane")]
    assert HASHER.hash("user", "jane") not in others


def test_a_document_may_keep_values_as_they_are() -> None:
    found = row(decision(subject={"tenant": "acme", "api_key": "ak_7"}), PlainKeys(b"k" * 32))
    assert found.subject == '{"api_key":"ak_7"}'


def test_the_policy_that_denied_is_the_rows_and_the_tightest_one_of_an_admission() -> None:
    policies = [policy("a", remaining=9), policy("b", remaining=2), policy("c", remaining=0, shadow=True)]
    denied = row(decision(outcome="denied", policy="a", reason="limit", policies=policies))
    assert (denied.policy, denied.name, denied.quota, denied.remaining) == ("a", "as", "as:tenant=acme", 9)
    assert '"policy":"b"' in (denied.others or "")
    admitted = row(decision(policies=policies))
    assert (admitted.policy, admitted.remaining) == ("b", 2)
    shadow = row(decision(outcome="shadow_denied", policy="c", policies=policies))
    assert (shadow.policy, shadow.outcome) == ("c", "shadow_denied")


def test_a_denial_of_a_block_has_no_policy() -> None:
    found = row(decision(outcome="denied", reason="blocked"))
    assert (found.policy, found.quota, found.reason) == (None, None, "blocked")


@pytest.mark.parametrize("at", [SINCE - timedelta(seconds=1), NOW + AHEAD])
def test_decisions_of_times_that_are_not_kept_are_refused_one_by_one(at: datetime) -> None:
    found = made(decision(at), decision(NOW))
    assert (len(found.rows), found.refused) == (1, 1)


def test_a_text_that_is_no_quota_key_refuses_its_decision_only() -> None:
    found = made(decision(policies=[policy("a", quota="no key")]), decision(NOW))
    assert (len(found.rows), found.refused) == (1, 1)


def test_losses_are_rows_with_ids_of_their_own() -> None:
    minute_ms = int(NOW.timestamp() * 1000)
    found = made(decision(), lost=[DecisionsLost(minute_ms, 9)])
    first, lost = found.rows
    assert (lost.outcome, lost.tenant, lost.times, lost.at) == ("lost", "", 9, NOW)
    assert first.id != lost.id
