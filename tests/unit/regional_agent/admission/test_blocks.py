"""Blocks match subjects exactly as the plainest implementation does."""

from ipaddress import ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as st

from protocol.blocks import BlockedValue, BlockList
from protocol.check import BlockField
from regional_agent.admission.blocks import Blocked, Blocks

HEARD_AT_MS = 1000
TEXTS = st.sampled_from(["a", "b", "c"])
NETWORKS = st.sampled_from(["10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "2001:db8::/32", "2001:db8::/64", "0.0.0.0/0"])
ENDS = st.none() | st.integers(0, 10)
BLOCKED = st.one_of(
    st.builds(
        BlockedValue,
        field=st.sampled_from([BlockField.TENANT, BlockField.USER, BlockField.API_KEY]),
        value=TEXTS,
        ends_in_ms=ENDS,
    ),
    st.builds(BlockedValue, field=st.just(BlockField.IP), value=NETWORKS, ends_in_ms=ENDS),
)
LISTS = st.lists(BLOCKED, max_size=8, unique_by=lambda each: (each.field, each.value))
IPS = st.sampled_from(["10.1.2.3", "::ffff:10.1.2.3", "10.9.9.9", "192.0.2.1", "2001:db8::1", "2001:db8:1::1", "none"])
SUBJECTS = st.fixed_dictionaries(
    {}, optional={"tenant": TEXTS, "user": TEXTS, "api_key": TEXTS, "ip": IPS, "route": st.just("/")}
)


@given(LISTS, SUBJECTS, st.integers(0, 12))
def test_a_subject_is_blocked_where_any_of_its_fields_is(
    listed: list[BlockedValue], subject: dict[str, str], age_ms: int
) -> None:
    meant = [
        each for each in listed if _is_for(each, subject) and (each.ends_in_ms is None or each.ends_in_ms > age_ms)
    ]
    found = Blocks(BlockList(version=1, data=listed), HEARD_AT_MS).find(subject, HEARD_AT_MS + age_ms)
    if not meant:
        assert found is None
        return
    assert found is not None
    assert any(found.field is each.field for each in meant)
    ends = [each.ends_in_ms for each in meant]
    last = None if None in ends else HEARD_AT_MS + max(end for end in ends if end is not None)
    assert found.ends_at_ms == last


def _is_for(each: BlockedValue, subject: dict[str, str]) -> bool:
    value = subject.get(each.field.value)
    if each.field is not BlockField.IP or value in (None, "none"):
        return value == each.value
    address = ip_address(str(value).removeprefix("::ffff:"))
    return address in ip_network(each.value)


def test_a_block_ends_at_its_exact_millisecond() -> None:
    listed = BlockList(version=1, data=[BlockedValue(field=BlockField.USER, value="u", ends_in_ms=5)])
    blocks = Blocks(listed, HEARD_AT_MS)
    assert blocks.find({"user": "u"}, HEARD_AT_MS + 4) == Blocked(BlockField.USER, HEARD_AT_MS + 5)
    assert blocks.find({"user": "u"}, HEARD_AT_MS + 5) is None
