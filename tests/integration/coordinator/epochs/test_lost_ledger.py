"""A ledger that was restored to an older state is recognized, grants stop, and people resume the lane."""

from typing import Any

import asyncpg
import httpx
import msgspec
import pytest

from coordinator.epochs.rules.lost_ledger import KEPT_AGAIN
from coordinator.exchange.expire_leases import expire_leases
from coordinator.limits.put_limits import put_limits
from coordinator.proof.verify import verify
from coordinator.regions.put_region import put_region
from protocol.identifiers import lane_of
from protocol.limits.document import LimitsDocument
from protocol.messages import ExchangeReply
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from tests.integration.coordinator.agent_harness import (
    DOCUMENT,
    EXPORTS,
    MAILS,
    PERIOD,
    Agent,
    AgentHarness,
    lease,
    leased,
    want,
)
from tests.integration.coordinator.fixtures import WIN_DEADLOCKS, connected, put_off

pytestmark = pytest.mark.anyio
_BOOKS = ("pool", "lease", "lane", "report", "transfer", "usage_hour", "usage_day", "quarantine")
_TABLES = (*_BOOKS, "resolution", "region_epoch", "audit")


async def back_up(agent_harness: AgentHarness) -> None:
    await put_off(agent_harness.owner, "seal")  # it would prove that reports are missing
    await agent_harness.owner.execute("CREATE SCHEMA backup")
    for table in _TABLES:
        await agent_harness.owner.execute(f"CREATE TABLE backup.{table} AS SELECT * FROM {table}")


async def put_back(agent_harness: AgentHarness) -> None:
    """Restore Postgres below the coordinator: everything later is lost."""
    async with agent_harness.owner.transaction():
        await agent_harness.owner.execute(WIN_DEADLOCKS)
        await agent_harness.owner.execute("SET LOCAL session_replication_role = replica")
        await agent_harness.owner.execute(f"TRUNCATE {', '.join(_TABLES)} CASCADE")
        for table in _TABLES:
            restored = f"INSERT INTO {table} OVERRIDING SYSTEM VALUE SELECT * FROM backup.{table}"
            await agent_harness.owner.execute(restored)


def rebasing(agent: Agent, **more: Any) -> dict[str, Any]:
    return {"epoch": agent.epoch, "lane": lane_of(EXPORTS, agent.lanes), "kind": "rebase", "reason": "restored"} | more


async def proposed(agent_harness: AgentHarness, agent: Agent) -> dict[str, Any]:
    answer = await (await agent_harness.client("adjust:propose")).post("/v1/suspense:propose", json=rebasing(agent))
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def approved(agent_harness: AgentHarness, resolution: dict[str, Any]) -> httpx.Response:
    return await (await agent_harness.client("adjust:approve")).post(f"/v1/suspense/{resolution['id']}:approve")


async def rebased(agent_harness: AgentHarness, agent: Agent) -> None:
    answer = await approved(agent_harness, await proposed(agent_harness, agent))
    assert answer.status_code == 200, answer.text


async def all_is_proven(agent_harness: AgentHarness) -> None:
    async with connected(agent_harness.url) as connection, connection.transaction(isolation="repeatable_read"):
        verification = await verify(connection, agent_harness.clock.now())
    assert verification.intact, verification.fault
    report = await (await agent_harness.client("usage:read")).get(f"/v1/periods/{PERIOD}/reconciliation")
    assert report.json()["status"] == "balanced", report.json()["findings"]


async def worked(agent: Agent) -> None:
    """Make three exchanges after the second, with grants, usage and returns."""
    await agent.say(3, lease(granted=10, consumed=7, units=4), demands=[want(waiting=20)])
    await agent.say(4, lease(granted=30, consumed=15, returned=5, units=8))
    await agent.say(5, lease(granted=30, consumed=18, returned=5, units=3), demands=[want(waiting=10)])


LAST = lease(granted=40, consumed=24, returned=7, units=6)  # the store's next frozen batch


async def offered(agent: Agent) -> ExchangeReply:
    return await agent.say(6, LAST, demands=[want(waiting=5)])


@pytest.fixture
async def behind(agent_harness: AgentHarness, agent: Agent) -> Agent:
    """A region that knows three exchanges more than the ledger."""
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=3))
    await back_up(agent_harness)
    await worked(agent)
    await put_back(agent_harness)
    return agent


async def test_the_batch_is_kept_and_shown_and_nothing_is_granted(agent_harness: AgentHarness, behind: Agent) -> None:
    for _ in range(2):
        reply = await offered(behind)
        assert (reply.outcome, reply.expected_seq, reply.leases, reply.receipt) == (ExchangeOutcome.GAP, 3, [], None)
    (kept,) = (await (await agent_harness.client("usage:read")).get("/v1/quarantine?evidence=true")).json()["data"]
    lane = lane_of(EXPORTS, behind.lanes)
    assert (kept["epoch"], kept["lane"], kept["seq"], kept["quota"]) == (behind.epoch, lane, 6, "")
    assert (kept["reason"], kept["is_open"]) == ("ledger_regressed", True)
    assert [(each["granted"], each["overage"]) for each in kept["evidence"]["leases"]] == [(40, 0)]
    region = (await (await agent_harness.client("quota:read")).get("/v1/regions/us-east")).json()
    assert region["regressed_lanes"] == 1
    metrics = await agent_harness.metrics()
    assert 'leasehold_coordinator_regressed_lanes{region="us-east"} 1.0' in metrics
    assert await agent_harness.transfers() == [("funded", 1000), ("grant", 10), ("usage", 3)]


async def test_lanes_that_wait_are_listed_with_what_the_ledger_lacks_and_the_proposal(
    agent_harness: AgentHarness, behind: Agent
) -> None:
    reader = await agent_harness.client("usage:read")
    waiting = "/v1/lanes?waiting=true&region=us-east"
    assert (await reader.get(waiting)).json()["data"] == []
    await offered(behind)
    [lane] = (await reader.get(waiting)).json()["data"]
    assert (lane["epoch"], lane["lane"]) == (behind.epoch, lane_of(EXPORTS, behind.lanes))
    assert (lane["last_seq"], lane["waiting_seq"], lane["lacking"], lane["proposal"]) == (2, 6, 3, None)
    proposal = await proposed(agent_harness, behind)
    [lane] = (await reader.get(waiting)).json()["data"]
    assert lane["proposal"] == proposal["id"]
    every = (await reader.get("/v1/lanes?page_size=1")).json()
    assert (len(every["data"]), every["data"][0]["lane"]) == (1, 0)
    assert (await reader.get("/v1/lanes?region=mars")).status_code == 422
    await rebased(agent_harness, behind)
    await offered(behind)
    assert (await reader.get(waiting)).json()["data"] == []


async def test_people_resume_the_lane_and_the_batch_keeps_its_lines(agent_harness: AgentHarness, behind: Agent) -> None:
    await offered(behind)
    await rebased(agent_harness, behind)
    reply = await offered(behind)
    assert (reply.outcome, leased(reply).granted, leased(reply).refusal) == (ExchangeOutcome.APPLIED, 45, None)
    mine = await agent_harness.lease(behind)
    assert (mine["granted"], mine["consumed"], mine["returned"], mine["outstanding"]) == (45, 24, 7, 14)
    usage = await agent_harness.owner.fetch("SELECT units, dimensions ->> 'policy' FROM transfer WHERE cause = 'usage'")
    assert sorted(map(tuple, usage)) == [(3, "export"), (6, "export"), (15, "unattributed")]
    (kept,) = (await (await agent_harness.client("usage:read")).get("/v1/quarantine?evidence=true")).json()["data"]
    assert kept["is_open"] is False
    region = (await (await agent_harness.client("quota:read")).get("/v1/regions/us-east")).json()
    assert region["regressed_lanes"] == 0
    assert await agent_harness.one("SELECT count(*) FROM report WHERE epoch = $1", behind.epoch) == 6
    await all_is_proven(agent_harness)
    assert (await behind.say(7, lease(granted=45, consumed=25, returned=7, units=1))).outcome is ExchangeOutcome.APPLIED


async def test_a_total_alone_shows_the_loss_too(agent_harness: AgentHarness, agent: Agent) -> None:
    """Only a grant was lost, whose reply had arrived."""
    await agent.say(1, demands=[want(waiting=10)])
    frozen = lease(granted=25, overage=2, consumed=4)
    assert (await agent.say(2, frozen)).outcome is ExchangeOutcome.LEDGER_REGRESSED
    assert (await agent_harness.lease(agent))["granted"] == 10
    await rebased(agent_harness, agent)
    assert leased(await agent.say(2, frozen)).granted == 25
    mine = await agent_harness.lease(agent)
    assert (mine["granted"], mine["overage"], mine["consumed"], mine["outstanding"]) == (25, 2, 4, 23)
    await all_is_proven(agent_harness)


async def test_a_lease_that_the_ledger_lost_is_created_again(agent_harness: AgentHarness, agent: Agent) -> None:
    await back_up(agent_harness)
    await agent.say(1, demands=[want(waiting=10)])
    await put_back(agent_harness)
    assert (await agent.say(2, lease(granted=10, consumed=4))).outcome is ExchangeOutcome.GAP
    await rebased(agent_harness, agent)
    assert (await agent.say(2, lease(granted=10, consumed=4))).outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.lease(agent))["consumed"] == 4
    await all_is_proven(agent_harness)


async def test_units_granted_twice_are_funded_beyond_the_limit_until_returned(
    agent_harness: AgentHarness, behind: Agent
) -> None:
    """While the ledger lacked the grant, other regions were granted nearly all."""
    other = await agent_harness.agent("eu-west")
    granted = leased(await other.say(1, demands=[want(waiting=980)])).granted
    assert granted == 980
    await offered(behind)
    await rebased(agent_harness, behind)
    pool = await agent_harness.pool()
    assert (pool["funded"], pool["unallocated"]) == (1020, 0)
    await offered(behind)
    await other.say(2, lease(granted=980, returned=500), demands=[want(demand_milli=1)])
    assert (await agent_harness.pool())["funded"] == 1000, "what comes back pays for it"
    await all_is_proven(agent_harness)


async def test_a_fenced_epoch_is_booked_and_granted_nothing(agent_harness: AgentHarness, behind: Agent) -> None:
    newer = Agent(behind.client, behind.region, "another incarnation")
    await newer.open()
    await offered(behind)
    await rebased(agent_harness, behind)
    reply = await offered(behind)
    assert leased(reply).refusal is GrantRefusal.EPOCH_FENCED
    mine = await agent_harness.lease(behind)
    assert (mine["state"], mine["granted"], mine["consumed"]) == ("lost", 40, 24)
    await all_is_proven(agent_harness)


async def test_a_retired_epoch_is_not_booked_and_its_evidence_is_kept(
    agent_harness: AgentHarness, behind: Agent
) -> None:
    retiring = await (await agent_harness.client("alloc:write")).post(
        f"/v1/epochs/{behind.epoch}:retire", json={"reason": "x"}
    )
    assert retiring.status_code == 200
    await offered(behind)
    await rebased(agent_harness, behind)
    assert (await offered(behind)).outcome is ExchangeOutcome.RETIRED
    assert (await agent_harness.lease(behind))["granted"] == 10
    assert await agent_harness.one("SELECT count(*) FROM quarantine WHERE reason = 'epoch_retired'") == 1


async def test_usage_of_a_quarantined_lease_still_waits_for_people(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=3, units=1))
    await agent.say(4, lease(granted=20, consumed=9, units=2))
    await rebased(agent_harness, agent)
    await agent.say(4, lease(granted=20, consumed=9, units=2))
    mine = await agent_harness.lease(agent)
    assert (mine["state"], mine["granted"], mine["consumed"], mine["region_consumed"]) == ("quarantined", 20, 0, 9)


async def test_the_resolution_is_unaffected_by_evidence_and_expiry_meanwhile(
    agent_harness: AgentHarness, behind: Agent
) -> None:
    await offered(behind)
    resolution = await proposed(agent_harness, behind)
    agent_harness.clock.move(seconds=70)
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        await expire_leases(coordinator, agent_harness.clock.now())
    assert (await approved(agent_harness, resolution)).status_code == 200
    reply = await offered(behind)
    assert (reply.outcome, leased(reply).refusal) == (ExchangeOutcome.APPLIED, GrantRefusal.LEASE_EXPIRED)
    await all_is_proven(agent_harness)


async def test_the_resolution_is_approved_by_another_person_and_once(
    agent_harness: AgentHarness, behind: Agent
) -> None:
    await offered(behind)
    both = await agent_harness.client("adjust:propose", "adjust:approve")
    old = (await both.post("/v1/suspense:propose", json=rebasing(behind))).json()
    refused = await both.post(f"/v1/suspense/{old['id']}:approve")
    assert (refused.status_code, refused.json()["refusal"]) == (409, "same_person")
    new = await proposed(agent_harness, behind)
    assert (await approved(agent_harness, old)).status_code == 404, "another has taken its place"
    (kept,) = (await (await agent_harness.client("usage:read")).get("/v1/quarantine?evidence=true")).json()["data"]
    assert kept["proposal"]["id"] == new["id"]
    first, again = await approved(agent_harness, new), await approved(agent_harness, new)
    assert first.json() == again.json()
    assert [cause for cause, _ in await agent_harness.transfers()].count("rebased") == 1
    deeds = await agent_harness.owner.fetch(
        "SELECT action, details FROM audit WHERE action LIKE 'resolution%' ORDER BY id"
    )
    assert [row["action"] for row in deeds] == ["resolution.proposed"] * 2 + ["resolution.approved"]


@pytest.mark.extended
async def test_new_numbers_are_kept_ever_more_rarely_and_repeated_ones_always(
    agent_harness: AgentHarness, behind: Agent
) -> None:
    """A holder of the region's token cannot fill the table, and its store is resolved all the same."""
    for seq in range(100, 120):
        assert (await behind.say(seq)).outcome is ExchangeOutcome.GAP
    assert await _kept_numbers(agent_harness) == [100, 101, 102, 103]
    agent_harness.clock.time += KEPT_AGAIN
    await offered(behind)
    assert await _kept_numbers(agent_harness) == [6, 100, 101, 102, 103]
    agent_harness.clock.time += KEPT_AGAIN
    await behind.say(104)
    await offered(behind)
    assert await _kept_numbers(agent_harness) == [6, 100, 101, 102, 103]
    await rebased(agent_harness, behind)
    assert (await offered(behind)).outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.lease(behind))["consumed"] == 24
    await all_is_proven(agent_harness)
    agent_harness.clock.time += KEPT_AGAIN
    await behind.say(105)
    assert 105 in await _kept_numbers(agent_harness), "what the lane has come to does not count any more"


async def _kept_numbers(agent_harness: AgentHarness) -> list[int]:
    rows = await agent_harness.owner.fetch("SELECT seq FROM quarantine ORDER BY seq")
    return [row["seq"] for row in rows]


async def test_invalid_resolutions_are_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    client = await agent_harness.client("adjust:propose")
    cases = [
        (rebasing(agent), 409, "not_regressed"),
        (rebasing(agent, epoch=99), 404, None),
        (rebasing(agent, lane=63), 404, None),
        (rebasing(agent, quota=MAILS, period=PERIOD), 422, None),
        (rebasing(agent, kind="charge"), 422, None),
        (rebasing(agent) | {"lane": None}, 422, None),
    ]
    for body, status, refusal in cases:
        answer = await client.post("/v1/suspense:propose", json=body)
        assert (answer.status_code, answer.json().get("refusal")) == (status, refusal), body


async def test_more_numbers_than_can_be_filled_are_refused_and_nothing_changes(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(300_000, lease(granted=10))
    answer = await approved(agent_harness, await proposed(agent_harness, agent))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "too_far_behind")
    assert await agent_harness.one("SELECT count(*) FROM report") == 0


async def test_a_lane_that_reached_the_number_is_not_rebased(agent_harness: AgentHarness, agent: Agent) -> None:
    """The number in evidence was wrong; the region itself continued."""
    await agent.say(2)
    resolution = await proposed(agent_harness, agent)
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=1))
    answer = await approved(agent_harness, resolution)
    assert (answer.status_code, answer.json()["refusal"]) == (409, "not_regressed")
    await all_is_proven(agent_harness)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE resolution SET lane = NULL",
        "UPDATE resolution SET seq = NULL",
        "UPDATE resolution SET kind = 'charge'",
        f"UPDATE resolution SET quota = '{EXPORTS}', period = '{PERIOD}'",
        "UPDATE resolution SET lane = 63",
    ],
)
async def test_a_resolution_is_of_a_lease_or_of_a_lane(agent_harness: AgentHarness, agent: Agent, sql: str) -> None:
    await agent.say(2)
    await proposed(agent_harness, agent)
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.ForeignKeyViolationError), match="resolution_"):
        await agent_harness.owner.execute(sql)


# --- version numbers that come again ----------------------------------------------------------------------------------


async def forget_limits(agent_harness: AgentHarness, since: int) -> None:
    """Restore the database to its state at that version, as from a backup."""
    async with agent_harness.owner.transaction():
        await agent_harness.owner.execute(WIN_DEADLOCKS)
        await agent_harness.owner.execute("SET LOCAL session_replication_role = replica")
        await agent_harness.owner.execute("DELETE FROM limits_version WHERE version > $1", since)
        await agent_harness.owner.execute("UPDATE policy_version SET version = $1", since)


@pytest.mark.extended
async def test_a_running_coordinator_follows_a_document_whose_number_comes_again(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    before = await agent_harness.one("SELECT version FROM policy_version")
    await agent_harness.limit([{"name": "exports", "kind": "allowance", "limit": 900, "period": "month"}])
    await agent.say(1, demands=[want(waiting=10)])
    assert (await agent_harness.pool())["funded"] == 900
    lost = (await agent.client.get("/v1/policies")).headers["ETag"]
    await forget_limits(agent_harness, before)
    agent_harness.clock.move(seconds=1)
    document = msgspec.convert(
        DOCUMENT | {"quotas": [{"name": "exports", "kind": "allowance", "limit": 50, "period": "month"}]},
        LimitsDocument,
    )
    async with agent_harness.owner.transaction():
        await put_limits(agent_harness.owner, document, lambda _: True, None, agent_harness.clock.now())
    version = await agent_harness.one("SELECT version FROM policy_version")
    assert version == before + 1, "the number has to come again"
    reply = await agent.say(2, lease(granted=10, consumed=1), demands=[want(waiting=900)])
    assert ((await agent_harness.pool())["funded"], leased(reply).granted) == (50, 50)
    answer = await agent.client.get(f"/v1/policies?since={version}", headers={"If-None-Match": lost})
    assert answer.status_code == 200
    assert answer.json()["document"]["quotas"][0]["limit"] == 50
    assert answer.headers["ETag"] != lost


@pytest.mark.extended
async def test_a_running_coordinator_follows_regions_whose_number_comes_again(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    before = await agent_harness.one("SELECT version FROM policy_version")
    async with agent_harness.owner.transaction():
        await put_region(agent_harness.owner, "us-east", 5, None, None, agent_harness.clock.now())
    await agent.say(1, demands=[want(waiting=10)])
    await forget_limits(agent_harness, before)
    async with agent_harness.owner.transaction():
        await put_region(agent_harness.owner, "us-east", 1, "draining", None, agent_harness.clock.now())
    assert await agent_harness.one("SELECT version FROM policy_version") == before + 1
    reply = await agent.say(2, lease(granted=10, consumed=1), demands=[want(waiting=900)])
    assert [each.refusal for each in reply.refused] == [GrantRefusal.REGION_NOT_ACTIVE]
