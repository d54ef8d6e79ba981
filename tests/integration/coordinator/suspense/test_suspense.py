"""Two people resolve suspense and quarantine, and late evidence replaces what they assumed."""

from typing import Any

import asyncpg
import httpx
import pytest

from coordinator.exchange.expire_leases import expire_leases
from tests.integration.coordinator.agent_harness import EXPORTS, MAILS, PERIOD, Agent, AgentHarness, lease, leased, want
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio


async def in_suspense(agent_harness: AgentHarness, agent: Agent, units: int = 10) -> None:
    await agent.say(1, demands=[want(waiting=units)])
    agent_harness.clock.move(seconds=70)
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        await expire_leases(coordinator, agent_harness.clock.now())


def proposal(agent: Agent, kind: str, **more: Any) -> dict[str, Any]:
    return {"epoch": agent.epoch, "quota": EXPORTS, "period": PERIOD, "kind": kind, "reason": "why"} | more


async def proposed(agent_harness: AgentHarness, agent: Agent, kind: str, **more: Any) -> dict[str, Any]:
    client = await agent_harness.client("adjust:propose")
    answer = await client.post("/v1/suspense:propose", json=proposal(agent, kind, **more))
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def approved(agent_harness: AgentHarness, resolution: dict[str, Any]) -> httpx.Response:
    client = await agent_harness.client("adjust:approve")
    return await client.post(f"/v1/suspense/{resolution['id']}:approve")


async def resolved(agent_harness: AgentHarness, agent: Agent, kind: str, **more: Any) -> None:
    answer = await approved(agent_harness, await proposed(agent_harness, agent, kind, **more))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("kind", "more", "estimated", "written_off"),
    [("write_off", {}, 0, 10), ("charge", {}, 10, 0), ("estimate", {"units": 4}, 4, 6)],
)
async def test_suspense_ends_in_one_of_three_ways(
    agent_harness: AgentHarness, agent: Agent, kind: str, more: dict[str, int], estimated: int, written_off: int
) -> None:
    """The region returns after all, and its report replaces what was assumed."""
    await in_suspense(agent_harness, agent)
    await resolved(agent_harness, agent, kind, **more)
    pool = await agent_harness.pool()
    assert (pool["suspense"], pool["estimated"], pool["written_off"]) == (0, estimated, written_off)
    assert (pool["consumed"], pool["unallocated"]) == (0, 990)
    await agent.say(2, lease(granted=10, consumed=7, returned=3))
    pool = await agent_harness.pool()
    assert (pool["consumed"], pool["estimated"], pool["written_off"], pool["unallocated"]) == (7, 0, 0, 993)
    assert (await agent_harness.lease(agent))["state"] == "active"


@pytest.mark.parametrize("evidence_first", [False, True])
async def test_evidence_has_the_same_result_before_and_after_the_approval(
    agent_harness: AgentHarness, agent: Agent, evidence_first: bool
) -> None:
    await in_suspense(agent_harness, agent)
    resolution = await proposed(agent_harness, agent, "estimate", units=4)
    if not evidence_first:
        await approved(agent_harness, resolution)
    await agent.say(2, lease(granted=10, consumed=3))
    if evidence_first:
        await approved(agent_harness, resolution)
    mine = await agent_harness.lease(agent)
    assert (mine["consumed"], mine["estimated"], mine["written_off"], mine["suspense"]) == (3, 1, 6, 0)


async def test_the_proposer_cannot_approve(agent_harness: AgentHarness, agent: Agent) -> None:
    await in_suspense(agent_harness, agent)
    both = await agent_harness.client("adjust:propose", "adjust:approve")
    resolution = (await both.post("/v1/suspense:propose", json=proposal(agent, "charge"))).json()
    answer = await both.post(f"/v1/suspense/{resolution['id']}:approve")
    assert (answer.status_code, answer.json()["refusal"]) == (409, "same_person")
    with pytest.raises(asyncpg.CheckViolationError, match="resolution_has_two_people"):
        await agent_harness.owner.execute("UPDATE resolution SET approved_by = proposed_by, approved_at = now()")
    assert (await agent_harness.pool())["suspense"] == 10


async def test_a_second_approval_changes_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await in_suspense(agent_harness, agent)
    resolution = await proposed(agent_harness, agent, "charge")
    first, again = await approved(agent_harness, resolution), await approved(agent_harness, resolution)
    assert first.json() == again.json()
    assert (await agent_harness.transfers())[-1] == ("charged", 10)
    deeds = await agent_harness.owner.fetch("SELECT action FROM audit WHERE action LIKE 'resolution%' ORDER BY id")
    assert [row["action"] for row in deeds] == ["resolution.proposed", "resolution.approved"]


async def test_a_new_proposal_takes_the_place_of_the_open_one(agent_harness: AgentHarness, agent: Agent) -> None:
    """An approval applies to the proposal that was read."""
    await in_suspense(agent_harness, agent)
    old, new = await proposed(agent_harness, agent, "charge"), await proposed(agent_harness, agent, "write_off")
    assert (await approved(agent_harness, old)).status_code == 404
    assert (await approved(agent_harness, new)).status_code == 200
    assert (await agent_harness.pool())["written_off"] == 10


async def test_a_quarantine_ends_with_the_difference_as_one_line_without_a_policy(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, units=5))
    kept = (await (await agent_harness.client("usage:read")).get("/v1/quarantine?evidence=true")).json()["data"]
    assert [(row["reason"], row["evidence"]["consumed"], row["is_open"]) for row in kept] == [
        ("lines_disagree", 7, True)
    ]
    await resolved(agent_harness, agent, "unattributed")
    mine = await agent_harness.lease(agent)
    assert (mine["state"], mine["consumed"], mine["suspense"]) == ("expired", 7, 3)
    line = await agent_harness.owner.fetchrow("SELECT units, dimensions->>'policy' FROM transfer WHERE cause = 'usage'")
    assert line is not None
    assert tuple(line) == (7, "unattributed")
    told = leased(await agent.say(3, lease(granted=10, consumed=8, returned=2, units=1), demands=[want(waiting=5)]))
    assert (told.granted, told.refusal) == (15, None)
    report = await (await agent_harness.client("usage:read")).get(f"/v1/periods/{PERIOD}/reconciliation")
    assert report.json()["status"] == "balanced"


async def test_ending_a_quarantine_of_excess_returns_frees_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=4, returned=11))
    await resolved(agent_harness, agent, "unattributed")
    mine, pool = await agent_harness.lease(agent), await agent_harness.pool()
    assert (mine["consumed"], mine["returned"], mine["overage"], mine["state"]) == (4, 11, 5, "active")
    assert pool["unallocated"] - pool["overage"] == 996


async def test_invalid_resolutions_are_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    client = await agent_harness.client("adjust:propose")
    cases = [
        (proposal(agent, "charge"), 409, "nothing_in_suspense"),
        (proposal(agent, "unattributed"), 409, "not_quarantined"),
        (proposal(agent, "charge", quota=MAILS), 404, None),
        (proposal(agent, "charge", epoch=99), 404, None),
        (proposal(agent, "charge", units=1), 422, None),
        (proposal(agent, "estimate"), 422, None),
        (proposal(agent, "forget"), 422, None),
    ]
    for body, status, refusal in cases:
        answer = await client.post("/v1/suspense:propose", json=body)
        assert (answer.status_code, answer.json().get("refusal")) == (status, refusal)
    agent_harness.clock.move(seconds=70)
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        await expire_leases(coordinator, agent_harness.clock.now())
    answer = await client.post("/v1/suspense:propose", json=proposal(agent, "estimate", units=11))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "more_than_in_suspense")
    reader = await agent_harness.client("usage:read")
    assert (await reader.post("/v1/suspense:propose", json=proposal(agent, "charge"))).status_code == 403
    approver = await agent_harness.client("adjust:approve")
    assert (await approver.post("/v1/suspense/nothing:approve")).status_code == 404


async def test_open_suspense_and_quarantine_are_listed_page_by_page(agent_harness: AgentHarness, agent: Agent) -> None:
    other = await agent_harness.agent("eu-west")
    await other.say(1, demands=[want(waiting=5)])
    await in_suspense(agent_harness, agent)
    resolution = await proposed(agent_harness, agent, "charge")
    reader = await agent_harness.client("usage:read")
    first = (await reader.get("/v1/suspense?page_size=1")).json()
    second = (await reader.get(f"/v1/suspense?page_size=1&page_after={first['page']['next']}")).json()
    rows = [*first["data"], *second["data"]]
    assert [(row["region"], row["suspense"]) for row in rows] == [("us-east", 10), ("eu-west", 5)]
    assert [row["proposal"] and row["proposal"]["id"] for row in rows] == [resolution["id"], None]
    assert second["page"]["next"] is None


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE resolution SET charged = 0",
        "UPDATE resolution SET approved_by = NULL, approved_at = NULL",
        "DELETE FROM resolution",
        "TRUNCATE resolution",
    ],
)
async def test_even_the_owner_of_the_database_cannot_change_an_approval(
    agent_harness: AgentHarness, agent: Agent, sql: str
) -> None:
    await in_suspense(agent_harness, agent)
    await resolved(agent_harness, agent, "charge")
    with pytest.raises(asyncpg.RaiseError, match="is refused"):
        await agent_harness.owner.execute(sql)
