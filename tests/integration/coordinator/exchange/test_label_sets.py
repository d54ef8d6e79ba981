"""Usage is told apart by a bounded number of label sets; the units of all others are booked as well."""

from collections.abc import Sequence

import pytest

from coordinator.exchange.rules import label_sets
from protocol.limits.usage_labels import OTHER_LABELS
from protocol.outcomes import ExchangeOutcome
from protocol.periods import minute_of
from tests.integration.coordinator.agent_harness import (
    EXPORTS,
    Agent,
    AgentHarness,
    books_are_their_transfers,
    lease,
)
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio
MINUTE = minute_of(NOON)


def line(labels: str, units: int = 1, minute: int = MINUTE) -> dict[str, object]:
    return {"minute": minute, "dimensions": {"policy": "export", "labels": labels}, "units": units}


async def report(agent: Agent, seq: int, lines: Sequence[dict[str, object]], consumed: int) -> None:
    reply = await agent.say(seq, lease(consumed=consumed) | {"lines": lines})
    assert reply.outcome is ExchangeOutcome.APPLIED, reply


async def booked(agent_harness: AgentHarness) -> dict[str, int]:
    rows = await agent_harness.owner.fetch(
        """SELECT dimensions ->> 'labels' AS labels, sum(units)::bigint AS units, count(*) AS lines
           FROM transfer WHERE cause = 'usage' GROUP BY 1"""
    )
    assert {row["labels"]: row["units"] for row in rows} == {
        row["labels"]: row["units"]
        for row in await agent_harness.owner.fetch(
            "SELECT labels, sum(units)::bigint AS units FROM labelled_usage GROUP BY 1"
        )
    }
    return {row["labels"]: row["units"] for row in rows}


async def test_sets_beyond_the_bound_are_booked_as_others(
    agent_harness: AgentHarness, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_sets, "MAX_LABEL_SETS", 3)
    await report(agent, 1, [line(f"model=m{number}") for number in range(2)], 2)
    await report(agent, 2, [line(f"model=m{number}", 10) for number in range(5)], 52)
    await report(agent, 3, [line("model=m4", 100), line("model=m0", 100)], 252)
    assert await booked(agent_harness) == {"model=m0": 111, "model=m1": 11, "model=m2": 10, OTHER_LABELS: 120}
    lines = "SELECT count(*) FROM transfer WHERE dimensions ->> 'labels' = '*' AND seq = 2"
    assert await agent_harness.one(lines) == 1, "the lines of one minute are one"
    await books_are_their_transfers(agent_harness.owner)
    assert "leasehold_coordinator_usage_lines_with_other_labels_total 2.0" in await agent_harness.metrics()


async def test_each_quota_key_and_period_has_a_bound_of_its_own(
    agent_harness: AgentHarness, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_sets, "MAX_LABEL_SETS", 1)
    await report(agent, 1, [line("model=a")], 1)
    other = "exports:tenant=globex"
    reply = await agent.say(1, lease(other, consumed=1) | {"lines": [line("model=b")]}, quota=other)
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await booked(agent_harness) == {"model=a": 1, "model=b": 1}


async def test_labels_that_no_agent_writes_are_booked_as_others(agent_harness: AgentHarness, agent: Agent) -> None:
    await report(agent, 1, [line("large"), line("model=large,"), line("Model=x"), line("")], 4)
    assert await booked(agent_harness) == {OTHER_LABELS: 4}
    assert await agent_harness.one("SELECT count(*) FROM label_set") == 0


async def test_reports_that_wait_for_people_use_up_no_room(agent_harness: AgentHarness, agent: Agent) -> None:
    invented = "invented:tenant=acme"
    reply = await agent.say(1, lease(invented, consumed=1) | {"lines": [line("model=a")]}, quota=invented)
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await agent_harness.one("SELECT count(*) FROM label_set") == 0


async def test_usage_without_labels_reads_no_sets(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, lease(EXPORTS, consumed=7))
    assert await agent_harness.one("SELECT count(*) FROM labelled_usage") == 0
