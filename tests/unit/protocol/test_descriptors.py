"""Descriptors of Envoy become subjects by the limits document, whatever a proxy's clients put into them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import check
from protocol.limits.descriptors import DescriptorMapping, UnreadableDescriptor, label_name
from protocol.limits.document import EnvoyDomain, EnvoyRules
from protocol.limits.subjects import address_of, check_values, fields_of

RULES = EnvoyRules(domains={"edge": EnvoyDomain(entries={"x-org": "tenant", "x-model": "labels.model", "peer": "ip"})})
MAPPING = DescriptorMapping(RULES)
NAMES = {"domain": "edge"}

values = st.text(max_size=2000) | st.binary(max_size=400).map(lambda raw: raw.decode(errors="backslashreplace"))
keys = st.sampled_from(["x-org", "tenant", "peer", "remote_address", "path", "method", "generic_key"]) | st.text(
    min_size=1
)


def fields(*entries: tuple[str, str], domain: str = "edge") -> dict[str, str]:
    """Return the fields of a descriptor's subject, without the two labels that each has."""
    found = fields_of(MAPPING.subject(domain, entries))
    assert found.pop("labels.domain") == domain
    assert found.pop("labels.descriptor") == ".".join(key for key, _ in entries)
    return found


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("remote_address", "ip"),
        ("path", "route"),
        ("method", "method"),
        ("user", "user"),
        ("tenant", "tenant"),
        ("api_key", "api_key"),
        ("generic_key", "labels.generic_key"),
        ("header_match", "labels.header_match"),
        ("X-Api-Version", "labels.x_api_version"),
        ("2fa", "labels.x_2fa"),
        ("x-org", "tenant"),
        ("x-model", "labels.model"),
    ],
)
def test_an_entry_becomes_the_field_of_its_key(key: str, field: str) -> None:
    assert fields((key, "10.0.0.1")) == {field: "10.0.0.1"}


def test_another_domain_has_the_usual_fields() -> None:
    assert fields(("x-org", "acme"), domain="other") == {"labels.x_org": "acme"}


def test_the_order_of_the_entries_is_in_a_label() -> None:
    both = [MAPPING.subject("edge", entries).labels for entries in ((("a", "1"), ("b", "2")), (("b", "2"), ("a", "1")))]
    assert [(each or {})["descriptor"] for each in both] == ["a.b", "b.a"]


def test_an_entry_whose_field_is_taken_becomes_a_label() -> None:
    assert fields(("remote_address", "10.0.0.1"), ("masked_remote_address", "10.0.0.0/8")) == {
        "ip": "10.0.0.1",
        "labels.masked_remote_address": "10.0.0.0/8",
    }
    assert fields(("generic_key", "a"), ("generic_key", "b"), ("generic_key", "c")) == {
        "labels.generic_key": "a",
        "labels.generic_key_2": "b",
        "labels.generic_key_3": "c",
    }
    assert fields(("domain", "a")) == {"labels.domain_2": "a"}


def test_values_that_no_field_accepts_are_changed_and_stay_different() -> None:
    assert fields(("masked_remote_address", "10.1.0.0/16")) == {"ip": "10.1.0.0"}
    assert fields(("peer", "unknown")) == {"ip": "0.0.0.0"}
    assert fields(("tenant", "")) == {"tenant": "-"}
    assert fields(("tenant", "a\nb")) == {"tenant": "a%0Ab"}
    long = [fields(("tenant", "x" * 400 + end))["tenant"] for end in "ab"]
    assert len({*long}) == 2
    assert {len(each) for each in long} == {256}


@given(st.lists(st.tuples(keys, values), min_size=1, max_size=14))
def test_no_value_makes_a_descriptor_unreadable(entries: list[tuple[str, str]]) -> None:
    subject = MAPPING.subject("edge", entries)
    found = fields_of(subject)
    if "ip" in found:
        address_of(found)
    for name, value in found.items():
        assert value.isprintable()
        assert 1 <= len(value) <= {"route": 1024, "method": 16}.get(name, 256)
        if len(value) < 40:
            check_values("quota", [(name, value)])
    assert msgspec.convert(msgspec.to_builtins(subject), check.Subject) == subject, "it could come over HTTP as well"


@given(st.text())
def test_every_key_has_a_valid_label(key: str) -> None:
    assert fields_of(MAPPING.subject("edge", [(key or "k", "v")]))
    name = label_name(key)
    assert len(name) <= 32
    assert name[0].isascii()
    assert name[0].isalpha()


def test_more_entries_than_labels_are_refused_by_name() -> None:
    with pytest.raises(UnreadableDescriptor, match="has 17 labels"):
        MAPPING.subject("edge", [(f"k{number}", "v") for number in range(15)])
