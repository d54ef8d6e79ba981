"""The table of regions counts the agents that live, and not those in whose place they are."""

from leasehold.cli.operations.regions import agents_of

STOPPED = {"release": "0.1.0", "last_seen_at": "2026-11-20T15:39:06Z"}
LIVE = {"release": "0.2.0", "last_seen_at": "2026-11-20T16:19:11Z"}
IDLE = {"release": "0.2.0", "last_seen_at": "2026-11-20T16:18:15Z"}


def test_agents_that_stopped_are_not_counted() -> None:
    assert agents_of([STOPPED, LIVE, IDLE], "2026-11-20T16:19:12Z") == "2 of 0.2.0"


def test_the_agents_of_a_silent_region_are_those_that_it_had() -> None:
    assert agents_of([STOPPED], "2026-11-20T15:39:07Z") == "1 of 0.1.0"
    assert agents_of([STOPPED], None) == "1 of 0.1.0"
