"""People may write quota keys without percent-encoding; the canonical key is the one that agents build."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.identifiers import canonical_quota_key, quota_key

VALUES = st.text(max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["tenant", "api_key", "ip"]), VALUES), unique_by=lambda pair: pair[0]))
def test_a_canonical_key_stays_as_it_is(dimensions: list[tuple[str, str]]) -> None:
    key = quota_key("exports", dimensions)
    assert canonical_quota_key(key) == key


@given(VALUES.filter(lambda value: not {",", "%"} & set(value)))
def test_a_value_without_comma_and_percent_sign_may_be_written_as_it_is(value: str) -> None:
    assert canonical_quota_key(f"exports:tenant={value}") == quota_key("exports", [("tenant", value)])


def test_an_encoded_value_may_be_spelt_in_lower_case() -> None:
    assert canonical_quota_key("exports:tenant=a%2cb") == "exports:tenant=a%2Cb"
    assert unquote(canonical_quota_key("exports:tenant=1=2")) == "exports:tenant=1=2"


@pytest.mark.parametrize(
    "text", ["exports", "", ":tenant=acme", "exports:tenant", "exports:=acme", "exports:tenant=a,b"]
)
def test_what_is_no_key_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="Write it as exports:tenant=acme"):
        canonical_quota_key(text)
