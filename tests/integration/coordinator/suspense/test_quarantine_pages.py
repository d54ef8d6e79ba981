"""The quarantine is listed in pages bounded in bytes, without report bodies unless requested."""

from typing import Any

import pytest

from coordinator.suspense.read_suspense import MOST_EVIDENCE_BYTES
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, lease

pytestmark = pytest.mark.anyio
ROWS = 12


@pytest.fixture
async def evidence(agent_harness: AgentHarness, agent: Agent) -> None:
    """Insert rows of about a mebibyte each, four of which fill a page."""
    await agent.say(1, *(lease(period=f"2031-{month:02}", consumed=1) for month in range(1, ROWS + 1)))
    await agent_harness.owner.execute(
        """UPDATE quarantine SET evidence = evidence || jsonb_build_object(
        'filler', (SELECT string_agg(md5(number::text || period), '') FROM generate_series(1, 30000) AS number))"""
    )


async def listed(agent_harness: AgentHarness, query: str) -> list[list[dict[str, Any]]]:
    client, pages, after = await agent_harness.client("usage:read"), [], ""
    while True:
        answer = await client.get(f"/v1/quarantine?{query}{after}")
        assert answer.status_code == 200, answer.text
        pages.append(answer.json()["data"])
        next_ = answer.json()["page"]["next"]
        if next_ is None:
            return pages
        after = f"&page_after={next_}"


@pytest.mark.usefixtures("evidence")
async def test_a_page_omits_the_reports(agent_harness: AgentHarness) -> None:
    ((*rows,),) = await listed(agent_harness, "")
    assert [row["period"] for row in rows] == [f"2031-{month:02}" for month in range(1, ROWS + 1)]
    assert {row["evidence"] for row in rows} == {None}
    assert all(row["stored_bytes"] > 100_000 for row in rows)


@pytest.mark.usefixtures("evidence")
async def test_pages_with_reports_are_bounded_in_bytes(agent_harness: AgentHarness) -> None:
    pages = await listed(agent_harness, "evidence=true")
    assert [len(page) for page in pages] == [4, 4, 4]
    assert all(sum(len(row["evidence"]["filler"]) for row in page) <= MOST_EVIDENCE_BYTES for page in pages)
    assert [row["period"] for page in pages for row in page] == [f"2031-{month:02}" for month in range(1, ROWS + 1)]


@pytest.mark.usefixtures("evidence")
async def test_a_row_that_is_larger_than_a_page_is_a_page_by_itself(agent_harness: AgentHarness) -> None:
    await agent_harness.owner.execute(
        """UPDATE quarantine SET evidence = evidence || jsonb_build_object('more', repeat('x', 5000000))
        WHERE period = '2031-02'"""
    )
    assert [len(page) for page in await listed(agent_harness, "evidence=true")] == [1, 1, 4, 4, 2]


@pytest.mark.usefixtures("evidence")
@pytest.mark.parametrize(("query", "sizes"), [("page_size=5", [5, 5, 2]), ("page_size=3&evidence=true", [3, 3, 3, 3])])
async def test_a_page_has_no_more_rows_than_requested(
    agent_harness: AgentHarness, query: str, sizes: list[int]
) -> None:
    assert [len(page) for page in await listed(agent_harness, query)] == sizes
