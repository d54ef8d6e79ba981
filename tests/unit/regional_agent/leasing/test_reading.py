"""An agent reads what a newer coordinator sends item by item, and keeps what it knew of the rest."""

from typing import Any

import msgspec
import pytest

from protocol.limits.document import PolicyBundle
from regional_agent.leasing.rules.reading import Reading, SetAside, read_blocks, read_bundle

RATE: dict[str, Any] = {"name": "api", "kind": "rate", "limit": "1/second"}
EXPORTS: dict[str, Any] = {"name": "exports", "kind": "allowance", "limit": 10, "period": "month"}
SEARCH: dict[str, Any] = {"name": "search", "quota": "api", "by": ["tenant"]}
EXPORT: dict[str, Any] = {"name": "export", "quota": "exports", "by": ["tenant"]}
DOCUMENT: dict[str, Any] = {"quotas": [RATE, EXPORTS], "policies": [SEARCH, EXPORT]}


def bundle(document: dict[str, Any], **more: Any) -> bytes:
    envelope = {"version": 2, "subscriptions": {"acme": "pro"}, "weight": 1, "total_weight": 2, "hold_key": "AAAA"}
    began_at = {"acme": "2026-11-01T00:00:00Z"}
    return msgspec.json.encode({**envelope, "document": document, "began_at": began_at, **more})


def read(document: dict[str, Any], before: PolicyBundle | None = None, **more: Any) -> Reading[PolicyBundle]:
    return read_bundle(bundle(document, **more), before)


KNOWN = read(DOCUMENT).content
UNKNOWN_QUOTAS = [
    {**RATE, "kind": "budget"},
    {**RATE, "algorithm": "leaky_cauldron"},
    {**RATE, "limit": ["another form"]},
]


def test_unknown_fields_are_ignored() -> None:
    added: dict[str, Any] = {"added": {"deep": [1]}}
    document = {"quotas": [{**RATE, **added}, EXPORTS], "policies": [{**SEARCH, "match": added}, EXPORT], **added}
    assert read(document, None, overrides=[], **added) == Reading(KNOWN)


@pytest.mark.parametrize("quota", UNKNOWN_QUOTAS)
def test_a_quota_that_cannot_be_read_stays_as_it_was_and_the_rest_changes(quota: dict[str, Any]) -> None:
    wider = {**EXPORTS, "limit": 20}
    content, [set_aside] = read({"quotas": [quota, wider], "policies": [SEARCH, EXPORT]}, KNOWN)
    assert set_aside[::2] == ("quotas.api", True)
    assert [each.limit for each in content.document.quotas] == ["1/second", 20]
    assert content.document.policies == KNOWN.document.policies
    assert (content.hold_key, content.began_at) == (KNOWN.hold_key, KNOWN.began_at)


@pytest.mark.parametrize("quota", UNKNOWN_QUOTAS)
def test_a_quota_that_was_never_known_is_left_out_with_its_policies(quota: dict[str, Any]) -> None:
    overrides = [{"key": "api:tenant=acme", "limit": "2/second"}, {"key": "exports:tenant=acme", "limit": 2}]
    content, set_aside = read({**DOCUMENT, "quotas": [quota, EXPORTS]}, overrides=overrides)
    assert [each.name for each in content.document.quotas] == ["exports"]
    assert [each.name for each in content.document.policies] == ["export"]
    assert [each.key for each in content.overrides] == ["exports:tenant=acme"]
    assert [(each.item, each.is_kept) for each in set_aside] == [("quotas.api", False), ("policies.search", False)]


def test_a_policy_that_cannot_be_read_keeps_its_quota_too() -> None:
    """The newer document counts by another quota: the policy's last known version needs the earlier one."""
    newer = {**SEARCH, "quota": "budget", "on_store_failure": "ask_a_neighbour"}
    content, set_aside = read({"quotas": [EXPORTS], "policies": [newer, EXPORT]}, KNOWN)
    assert [(each.item, each.is_kept) for each in set_aside] == [("policies.search", True)]
    assert content.document.policies == KNOWN.document.policies
    assert {each.name for each in content.document.quotas} == {"api", "exports"}


def test_an_item_that_needs_an_unknown_capability_is_set_aside_though_it_can_be_read() -> None:
    requires = {"policies.search": ["countries"], "policies.export": ["requirements"], "quotas.gone": ["countries"]}
    elsewhere = {**SEARCH, "by": []}
    content, set_aside = read({**DOCUMENT, "policies": [elsewhere, EXPORT]}, KNOWN, requires=requires)
    assert set_aside == [SetAside("policies.search", "it needs the capability countries", is_kept=True)]
    assert content.document.policies == KNOWN.document.policies


def test_another_part_that_cannot_be_read_stays_as_it_was() -> None:
    before = read({**DOCUMENT, "unmatched": "deny"}).content
    content, [set_aside] = read({**DOCUMENT, "unmatched": "challenge"}, before)
    assert (content.document.unmatched, set_aside.item, set_aside.is_kept) == ("deny", "unmatched", True)
    content, [set_aside] = read({**DOCUMENT, "unmatched": "challenge"})
    assert (content.document.unmatched, set_aside.is_kept) == ("allow", False)


def test_a_bundle_without_its_envelope_is_refused_whole() -> None:
    with pytest.raises(msgspec.ValidationError, match="version"):
        read_bundle(b'{"document": {}}', KNOWN)


def test_a_block_of_an_unknown_field_is_left_out() -> None:
    rows = [{"field": "country", "value": "XX"}, {"field": "tenant", "value": "acme", "added": 1}]
    content, set_aside = read_blocks(msgspec.json.encode({"version": 3, "data": rows}), None)
    assert (content.version, [each.value for each in content.data]) == (3, ["acme"])
    assert [(each.item, each.is_kept) for each in set_aside] == [("blocks[0]", False)]
