"""Releases state themselves, refuse what is too old by name, and read what a newer one adds."""

import tomllib
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from protocol.compatibility import releases
from protocol.compatibility.open_enums import OpenEnum
from protocol.compatibility.releases import (
    CAPABILITIES,
    OLDEST_PEER,
    RELEASE,
    Peer,
    is_too_old,
    minor_of,
    peer_of,
    stated,
    too_old,
)
from protocol.compatibility.strict import strict
from protocol.limits.document import LimitsDocument
from protocol.outcomes import ExchangeOutcome, GrantRefusal

ROOT = Path(__file__).parents[3]


def test_the_release_is_the_one_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == RELEASE


def test_the_oldest_peer_is_the_minor_release_before() -> None:
    """A release that skips one would leave no order in which an installation can be upgraded."""
    assert minor_of(OLDEST_PEER) == (0, max(1, minor_of(RELEASE)[1] - 1))


def test_what_a_process_states_is_what_its_peer_reads() -> None:
    assert peer_of(stated("agent-1")) == Peer(RELEASE, CAPABILITIES, "agent-1")
    assert peer_of(stated()) == Peer(RELEASE, CAPABILITIES)


@pytest.mark.parametrize("release", ["", "0", "newest", "0.1.0\r\nX: 1", "0.1." + 30 * "0", "\u0660.\u0661"])
def test_a_malformed_release_counts_as_none(release: str) -> None:
    assert peer_of({releases.RELEASE_HEADER: release}) is None


def test_malformed_names_and_capabilities_are_left_out() -> None:
    headers = {releases.RELEASE_HEADER: "0.2.0", releases.CAPABILITIES_HEADER: "one,T W O,,three"}
    peer = peer_of(headers | {releases.AGENT_HEADER: "ä"})
    assert peer == Peer("0.2.0", frozenset({"one", "three"}))


@pytest.mark.parametrize(("release", "is_refused"), [("0.0.9", True), (OLDEST_PEER, False), ("0.9.0.dev0", False)])
def test_only_an_older_release_is_refused(release: str, is_refused: bool) -> None:
    assert is_too_old(release) is is_refused


def test_the_refusal_names_both_releases_and_the_order() -> None:
    text = too_old("the coordinator", "0.0.9", "This agent")
    assert {RELEASE, "0.0.9"} <= set(text.replace(",", " ").replace(". ", " ").split())
    assert releases.UPGRADE_ORDER in text


def test_an_unknown_value_of_an_answer_is_kept_and_equals_no_member() -> None:
    for type_ in (ExchangeOutcome, GrantRefusal):
        found = msgspec.json.decode(b'"saturated"', type=type_)
        assert (found, found.value, isinstance(found, type_)) == ("saturated", "saturated", True)
        assert found not in list(type_)
        assert msgspec.json.encode(found) == b'"saturated"'
        assert msgspec.json.decode(msgspec.json.encode(list(type_)), type=list[type_]) == list(type_)  # type: ignore[valid-type]
    with pytest.raises(ValueError, match="1 is not a valid"):
        GrantRefusal(1)  # type: ignore[arg-type]


class Colour(OpenEnum):
    RED = "red"


class Inner(Struct, frozen=True, kw_only=True):
    colours: list[Colour] = []


class Outer(Struct, frozen=True, kw_only=True):
    inner: dict[str, Inner] | None = None
    first: Inner = Inner()


@pytest.mark.parametrize("text", [b'{"added": 1}', b'{"inner": {"a": {"added": 1}}}', b'{"first": {"added": 1}}'])
def test_strict_types_refuse_unknown_fields_at_every_depth(text: bytes) -> None:
    assert msgspec.json.decode(text, type=Outer) in (Outer(), Outer(inner={"a": Inner()}))
    with pytest.raises(msgspec.ValidationError, match="unknown field `added`"):
        msgspec.json.decode(text, type=strict(Outer))


@pytest.mark.parametrize(
    "document",
    [
        {"added": None},
        {"quotas": [{"name": "a", "kind": "rate", "limit": "1/second", "added": None}]},
        {"policies": [{"name": "p", "quota": "a", "by": [], "match": {"added": None}}]},
        {"plans": {"free": {"added": 1}}},
        {"route_classes": {"a": [{"route": "/", "added": 1}]}},
        {"routes": {"added": True}},
    ],
)
def test_a_limits_document_is_tolerant_for_services_and_strict_for_people(document: dict[str, object]) -> None:
    text = msgspec.json.encode(document)
    msgspec.json.decode(text, type=LimitsDocument)
    with pytest.raises(msgspec.ValidationError, match="unknown field `added`"):
        msgspec.json.decode(text, type=strict(LimitsDocument))
