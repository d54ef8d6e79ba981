"""Lanes that failed alone are suspects for a while, within bounds, and never because of another region."""

from coordinator.exchange.rules.suspects import MOST_LANES, MOST_REGIONS, SUSPECTED_FOR_S, Suspects


def test_a_suspect_is_known_for_a_while_or_until_it_is_cleared() -> None:
    suspects = Suspects()
    suspects.add("us-east", [(1, 2), (1, 3)], 0.0)
    assert suspects.includes("us-east", [(1, 2), (7, 7)], 1.0)
    suspects.clear("us-east", [(1, 2)])
    assert not suspects.includes("us-east", [(1, 2)], 1.0)
    assert suspects.includes("us-east", [(1, 3)], SUSPECTED_FOR_S - 1)
    assert not suspects.includes("us-east", [(1, 3)], SUSPECTED_FOR_S)


def test_the_lane_of_another_region_is_not_a_suspect() -> None:
    suspects = Suspects()
    suspects.add("us-east", [(1, 2)], 0.0)
    assert not suspects.includes("eu-west", [(1, 2)], 0.0)


def test_a_region_with_many_suspect_lanes_becomes_a_suspect() -> None:
    suspects = Suspects()
    for epoch in range(1_000):
        suspects.add("us-east", [(epoch, 0)], 0.0)
    assert suspects.includes("us-east", [(5_000, 0)], 1.0)
    assert len(suspects._until_s["us-east"]) == MOST_LANES + 1
    assert not suspects.includes("us-east", [(5_000, 0)], SUSPECTED_FOR_S)


def test_regions_are_forgotten_when_they_are_many() -> None:
    suspects = Suspects()
    for number in range(MOST_REGIONS + 1):
        suspects.add(f"region-{number}", [(1, 0)], number * SUSPECTED_FOR_S)
    assert list(suspects._until_s) == [f"region-{MOST_REGIONS}"]
