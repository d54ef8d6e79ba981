"""One proposal and one approval end the suspense of many leases: of those that the proposal found, and of no other."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from coordinator.access.issue_token import issue_token
from coordinator.exchange.expire_leases import expire_leases
from coordinator.suspense import bulk
from leasehold.cli.app import app
from protocol.identifiers import lane_of
from tests.integration.coordinator.agent_harness import PERIOD, Agent, AgentHarness, exchange, lease, want
from tests.integration.coordinator.fixtures import NOON, connected

pytestmark = pytest.mark.anyio

TENANTS = 250
NOTHING: Mapping[str, Any] = {}


def quota_of(number: int) -> str:
    return f"exports:tenant=t{number:03}"


async def lease_to(agent: Agent, quotas: list[str], seq: int = 1) -> None:
    """Grant 10 units of each quota, in one call."""
    by_lane = defaultdict(list)
    for quota in quotas:
        by_lane[lane_of(quota, agent.lanes)].append(quota)
    exchanges = [
        exchange(agent.frozen(seq, quota=lane[0]), [want(quota, waiting=10) for quota in lane])
        for lane in by_lane.values()
    ]
    for reply in (await agent.call(*exchanges)).replies:
        assert reply.outcome == "applied"
        assert all(each.granted == 10 for each in reply.leases)


async def expire_all(agent_harness: AgentHarness) -> None:
    agent_harness.clock.move(seconds=70)
    async with connected(agent_harness.url) as coordinator:
        while True:
            async with coordinator.transaction():
                if (await expire_leases(coordinator, agent_harness.clock.now())).is_all:
                    return


async def fail_over(agent_harness: AgentHarness, agent: Agent, tenants: int = TENANTS) -> list[str]:
    """Lease to a store that fails over, and wait until the leases of its epoch are in suspense."""
    quotas = [quota_of(number) for number in range(tenants)]
    await lease_to(agent, quotas)
    ended = agent.epoch
    agent.fingerprint = "another life"
    assert (await agent.open()).json()["epoch"] > ended
    await expire_all(agent_harness)
    return quotas


async def propose(client: httpx.AsyncClient, kind: str = "write_off", /, **only: Any) -> httpx.Response:
    return await client.post("/v1/suspense/bulk", json={"filter": only, "kind": kind, "reason": "its disk was lost"})


async def approve(client: httpx.AsyncClient, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Approve to the end, and return the answer of each call."""
    answers: list[dict[str, Any]] = []
    body: dict[str, str] = {}
    while not answers or answers[-1]["next"]:
        answer = await client.post(f"/v1/suspense/bulk/{made['id']}:approve", json=body)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        body = {"after": answers[-1]["next"]}
    return answers


async def sums(agent_harness: AgentHarness) -> dict[str, int]:
    row = await agent_harness.owner.fetchrow(
        "SELECT sum(suspense)::int AS suspense, sum(estimated)::int AS estimated, sum(written_off)::int AS written_off,"
        " sum(consumed)::int AS consumed FROM pool WHERE name = 'exports'"
    )
    assert row is not None
    return dict(row)


async def test_a_fail_over_of_many_tenants_ends_by_one_proposal_and_one_approval(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await fail_over(agent_harness, agent)
    proposer, approver = await agent_harness.client("adjust:propose"), await agent_harness.client("adjust:approve")
    made = (await propose(proposer, region=["us-east"], reason=["lost"])).json()
    assert (made["leases"], made["units"], made["charged"], made["approved"]) == (TENANTS, 10 * TENANTS, 0, 0)
    assert (await sums(agent_harness))["suspense"] == 10 * TENANTS, "nothing is booked before the approval"
    answers = await approve(approver, made)
    assert [each["approved"] for each in answers] == [bulk.MOST_PER_CALL, TENANTS]
    assert not any(each["refused"] for each in answers)
    expected = {"suspense": 0, "estimated": 0, "written_off": 10 * TENANTS, "consumed": 0}
    assert await sums(agent_harness) == expected
    assert [each["approved"] for each in await approve(approver, made)] == [TENANTS]
    assert await sums(agent_harness) == expected, "repeating it changes nothing"
    assert (await approver.get("/v1/suspense")).json()["data"] == []
    rows = await agent_harness.owner.fetch(
        "SELECT action, count(*) AS entries, count(DISTINCT object) AS objects FROM audit"
        " WHERE action LIKE 'resolution%' GROUP BY action ORDER BY action"
    )
    assert [tuple(row) for row in rows] == [
        ("resolution.approved", TENANTS, TENANTS),
        ("resolution.proposed", TENANTS, TENANTS),
    ]


async def test_a_charge_bills_what_is_still_in_suspense(agent_harness: AgentHarness, agent: Agent) -> None:
    await fail_over(agent_harness, agent, tenants=3)
    proposer, approver = await agent_harness.client("adjust:propose"), await agent_harness.client("adjust:approve")
    made = (await propose(proposer, "charge", tenant=["t000", "t002"])).json()
    assert (made["leases"], made["units"], made["charged"]) == (2, 20, 20)
    await approve(approver, made)
    assert await sums(agent_harness) == {"suspense": 10, "estimated": 20, "written_off": 0, "consumed": 0}


async def test_leases_that_are_found_later_are_not_swept_in(agent_harness: AgentHarness, agent: Agent) -> None:
    first = await fail_over(agent_harness, agent, tenants=2)
    proposer, approver = await agent_harness.client("adjust:propose"), await agent_harness.client("adjust:approve")
    made = (await propose(proposer, quota=["exports"])).json()
    await lease_to(agent, [quota_of(900)])
    await expire_all(agent_harness)
    await approve(approver, made)
    left = (await approver.get("/v1/suspense")).json()["data"]
    assert [row["quota"] for row in left] == [quota_of(900)]
    assert (await sums(agent_harness))["written_off"] == 10 * len(first)


async def test_the_proposer_cannot_approve_any_of_it(agent_harness: AgentHarness, agent: Agent) -> None:
    await fail_over(agent_harness, agent, tenants=2)
    both = await agent_harness.client("adjust:propose", "adjust:approve")
    made = (await propose(both)).json()
    answer = await both.post(f"/v1/suspense/bulk/{made['id']}:approve", json={})
    assert (answer.status_code, answer.json()["refusal"]) == (409, "same_person")
    assert (await sums(agent_harness))["suspense"] == 20


async def test_a_newer_proposal_takes_its_lease_out_of_a_bulk(agent_harness: AgentHarness, agent: Agent) -> None:
    ended = agent.epoch
    quotas = await fail_over(agent_harness, agent, tenants=2)
    proposer, approver = await agent_harness.client("adjust:propose"), await agent_harness.client("adjust:approve")
    made = (await propose(proposer)).json()
    single = {"epoch": ended, "quota": quotas[0], "period": PERIOD, "kind": "charge", "reason": "its contract"}
    assert (await proposer.post("/v1/suspense:propose", json=single)).status_code == 201
    listed = (await approver.get(f"/v1/suspense?bulk={made['id']}")).json()["data"]
    assert [row["quota"] for row in listed] == [quotas[1]]
    assert (await approver.get(f"/v1/suspense/bulk/{made['id']}")).json()["leases"] == 1
    await approve(approver, made)
    assert (await sums(agent_harness))["suspense"] == 10


async def test_what_does_not_fit_its_lease_any_more_is_refused_by_itself(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """A lease goes into quarantine after the proposal; the others are carried out all the same."""
    quotas = [quota_of(number) for number in range(2)]
    await lease_to(agent, quotas)
    await expire_all(agent_harness)
    proposer, approver = await agent_harness.client("adjust:propose"), await agent_harness.client("adjust:approve")
    made = (await propose(proposer)).json()
    await agent.say(2, lease(quotas[0], granted=10, consumed=7, units=5), quota=quotas[0])
    (answer,) = await approve(approver, made)
    assert [each["refusal"] for each in answer["refused"]] == ["quarantined"]
    assert (await sums(agent_harness))["written_off"] == 10
    quarantined = (await propose(proposer, "unattributed", quota=["exports"])).json()
    assert quarantined["leases"] == 1
    await approve(approver, quarantined)
    assert (await sums(agent_harness))["consumed"] == 7


async def test_commands_propose_and_approve(agent_harness: AgentHarness, agent: Agent) -> None:
    await fail_over(agent_harness, agent, tenants=3)
    with capture_logs():  # command and coordinator share this process's output
        async with agent_harness.served() as url:
            await _propose_and_approve_by_commands(agent_harness, url)
    assert (await sums(agent_harness))["estimated"] == 30


async def _propose_and_approve_by_commands(agent_harness: AgentHarness, url: str) -> None:
    tokens = [(await issue_token(agent_harness.owner, ["admin"], who, NOON)).token for who in ("Ada", "Grace")]

    async def typed(token: str, *words: str) -> Result:
        environment = {"LEASEHOLD_URL": url, "LEASEHOLD_TOKEN": token}
        return await asyncio.to_thread(CliRunner().invoke, app, ("suspense", *words), env=environment)

    proposed = await typed(tokens[0], "propose", "charge", "--region", "us-east", "--reason", "r", "--json")
    made = json.loads(proposed.stdout)
    assert "Ada" in (await typed(tokens[1], "list", "--bulk", made["id"])).stdout
    refused = await typed(tokens[0], "approve", made["id"], "-y")
    assert (refused.exit_code, refused.stderr) == (
        1,
        "leasehold: The proposer cannot approve. Use another token.\n",
    )
    done = await typed(tokens[1], "approve", made["id"], "-y")
    assert (done.exit_code, done.stderr) == (0, ""), "waiting prints nothing where there is no terminal"
    assert (await typed(tokens[1], "list", "--json")).stdout == "[]\n"


@pytest.mark.parametrize(
    ("only", "found"),
    [
        (NOTHING, 3),
        ({"tenant": "t001"}, 1),
        ({"quota": "exports"}, 3),
        ({"quota": "exports:tenant=t002"}, 1),
        ({"quota": "mails"}, 0),
        ({"region": "us-east"}, 3),
        ({"region": "eu-west"}, 0),
        ({"epoch": 1}, 3),
        ({"epoch": 99}, 0),
        ({"period": PERIOD}, 3),
        ({"period": "2026-10"}, 0),
        ({"reason": "lost"}, 3),
        ({"reason": "expired"}, 0),
        ({"tenant": "t001", "reason": "expired"}, 0),
    ],
)
async def test_conditions_find_leases(
    agent_harness: AgentHarness, agent: Agent, only: dict[str, Any], found: int
) -> None:
    await agent_harness.add_region("eu-west")
    await fail_over(agent_harness, agent, tenants=3)
    client = await agent_harness.client("adjust:propose")
    assert len((await client.get("/v1/suspense", params=only)).json()["data"]) == found
    answer = await propose(client, **{name: [value] for name, value in only.items()})
    assert (answer.status_code, answer.json().get("leases")) == ((201, found) if found else (404, None))


@pytest.mark.parametrize(
    ("only", "rule"),
    [
        ({"region": ["nowhere"]}, "known"),
        ({"quota": ["exprots"]}, "known"),
        ({"period": ["novemer"]}, "format"),
        ({"reason": ["gone"]}, "enum"),
        ({"regoin": ["us-east"]}, "unknown"),
    ],
)
async def test_misspelt_conditions_are_refused(
    agent_harness: AgentHarness, agent: Agent, only: dict[str, Any], rule: str
) -> None:
    client = await agent_harness.client("adjust:propose")
    assert agent.epoch
    for answer in (await client.get("/v1/suspense", params=only), await propose(client, **only)):
        assert answer.status_code == 422
        (fault,) = answer.json()["invalid_parameters"]
        assert (fault["field"].split(".")[-1].split("[")[0], fault["rule"]) == (next(iter(only)), rule)


async def test_a_proposal_of_too_many_is_refused_whole(
    agent_harness: AgentHarness, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fail_over(agent_harness, agent, tenants=3)
    monkeypatch.setattr(bulk, "MOST_LEASES", 2)
    answer = await propose(await agent_harness.client("adjust:propose"))
    assert (answer.status_code, answer.json()["invalid_parameters"][0]["rule"]) == (422, "at_most")
    assert await agent_harness.one("SELECT count(*) FROM resolution") == 0
