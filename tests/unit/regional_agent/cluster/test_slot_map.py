"""Slots belong to nodes as the nodes of a Cluster report, and each quota lies in one cell."""

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


def test_the_later_of_two_claims_counts_whichever_node_replies() -> None:
    """The first shard fails over, and its former primary does not know of it."""
    late = "four 10.0.0.4:7000@17000 master - 0 0 3 connected 0-8191"
    for answers in ([told(), late], [late, told()]):
        places = places_of([b"1", b"3"], [("10.0.0.1", answer) for answer in answers])
        assert places == {b"1": Place("10.0.0.2", 7000, "two", 2), b"3": Place("10.0.0.4", 7000, "four", 3)}


def test_a_failover_and_failback_leave_a_trace() -> None:
    before, after = (places_of([b"3"], [("10.0.0.1", told(one=epoch))]) for epoch in (1, 5))
    assert before != after


def test_a_migrating_slot_stays_with_its_source_and_a_replica_has_none() -> None:
    assert places_of([b"1"], [("10.0.0.1", told())])[b"1"].node == "two"
    assert places_of([b"1"], [("10.0.0.1", told(two_is="slave"))]) == {}


def test_a_primary_that_failed_has_its_slots_until_another_has_them() -> None:
    assert places_of([b"1"], [("10.0.0.1", told(two_is="master,fail"))])[b"1"].node == "two"


def test_a_node_without_an_address_has_the_one_it_was_reached_at() -> None:
    alone = "one :7000@17000 myself,master - 0 0 1 connected 0 1-16383"
    assert places_of([b"1"], [("10.0.0.9", alone)]) == {b"1": Place("10.0.0.9", 7000, "one", 1)}
    assert nodes_of([("10.0.0.9", alone), ("10.0.0.1", told())]) == {
        ("10.0.0.9", 7000),
        ("10.0.0.1", 7000),
        ("10.0.0.2", 7000),
        ("::1", 7000),
    }


@pytest.mark.parametrize("tenant", ["acme", "a,b=c:d", "größe", ""])
def test_quotas_counted_by_tenant_lie_with_the_tenants_operations(tenant: str) -> None:
    dimensions = [[("tenant", tenant)], [("tenant", tenant), ("user", "x")], [("route", "y"), ("tenant", tenant)]]
    assert {cell_of(quota_key("exports", each)) for each in dimensions} == {operation_cell(tenant)}


def test_other_quotas_lie_by_their_own_key_and_every_cell_has_some() -> None:
    assert {cell_of(quota_key("exports", [("user", str(n))])) for n in range(500)} == set(range(CELLS))
    assert {operation_cell(str(n)) for n in range(500)} == set(range(CELLS))
