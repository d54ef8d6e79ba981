"""Who has a slot, by what the nodes of a Cluster say; and which cell a quota lies in."""

import pytest

from protocol.identifiers import quota_key
from regional_agent.cluster.rules.cells import CELLS, cell_of, operation_cell
from regional_agent.cluster.rules.slot_map import Place, nodes_of, places_of, slot_of

ONE = "one 10.0.0.1:7000@17000,node-one master - 0 0 {one} connected 0-8191 [9842->-two]"
TWO = "two 10.0.0.2:7000@17000,,shard-id=x {two_is} - 0 0 {two} connected 8192-16383"
REPLICA = "three ::1:7000@17000 slave one 0 0 1 connected"


def told(one: int = 1, two: int = 2, two_is: str = "master") -> str:
    return "\n".join([ONE.format(one=one), TWO.format(two=two, two_is=two_is), REPLICA])


def test_a_slot_is_the_crc_of_the_tag() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert [slot_of(b"%d" % cell) for cell in (0, 1, 2, 3)] == [13907, 9842, 5649, 1584]


def test_of_two_claims_the_later_counts_whoever_is_asked() -> None:
    """A failover of the first shard, which its former primary has not heard of."""
    late = "four 10.0.0.4:7000@17000 master - 0 0 3 connected 0-8191"
    for answers in ([told(), late], [late, told()]):
        places = places_of([b"1", b"3"], [("10.0.0.1", answer) for answer in answers])
        assert places == {b"1": Place("10.0.0.2", 7000, "two", 2), b"3": Place("10.0.0.4", 7000, "four", 3)}


def test_a_failover_and_failback_leave_a_trace() -> None:
    before, after = (places_of([b"3"], [("10.0.0.1", told(one=epoch))]) for epoch in (1, 5))
    assert before != after


def test_what_is_on_its_way_is_where_it_was_and_a_replica_has_nothing() -> None:
    assert places_of([b"1"], [("10.0.0.1", told())])[b"1"].node == "two"
    assert places_of([b"1"], [("10.0.0.1", told(two_is="slave"))]) == {}


def test_a_primary_that_failed_has_its_slots_until_another_has_them() -> None:
    assert places_of([b"1"], [("10.0.0.1", told(two_is="master,fail"))])[b"1"].node == "two"


def test_a_node_that_does_not_know_its_address_is_where_it_was_asked() -> None:
    alone = "one :7000@17000 myself,master - 0 0 1 connected 0 1-16383"
    assert places_of([b"1"], [("10.0.0.9", alone)]) == {b"1": Place("10.0.0.9", 7000, "one", 1)}
    assert nodes_of([("10.0.0.9", alone), ("10.0.0.1", told())]) == {
        ("10.0.0.9", 7000),
        ("10.0.0.1", 7000),
        ("10.0.0.2", 7000),
        ("::1", 7000),
    }


@pytest.mark.parametrize("tenant", ["acme", "a,b=c:d", "größe", ""])
def test_all_that_is_counted_by_a_tenant_lies_with_its_operations(tenant: str) -> None:
    dimensions = [[("tenant", tenant)], [("tenant", tenant), ("user", "x")], [("route", "y"), ("tenant", tenant)]]
    assert {cell_of(quota_key("exports", each)) for each in dimensions} == {operation_cell(tenant)}


def test_what_is_counted_otherwise_lies_by_its_own_key_and_every_cell_has_some() -> None:
    assert {cell_of(quota_key("exports", [("user", str(n))])) for n in range(500)} == set(range(CELLS))
    assert {operation_cell(str(n)) for n in range(500)} == set(range(CELLS))
