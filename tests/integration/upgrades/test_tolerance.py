"""An agent of this release works with a coordinator of the next one, which says more in every message."""

import asyncio
from typing import Any

import pytest

from protocol.compatibility.releases import RELEASE, Capability
from protocol.limits import requirements
from regional_agent.leasing.rules import reading
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World
from tests.integration.upgrades.next_release import ANSWERS, REQUESTS, NextRelease
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search"}
SHARED_SEARCH = {"tenant": "acme", "route": "/v1/shared"}
SHARED: dict[str, list[dict[str, Any]]] = {
    "quotas": [{"name": "shared", "kind": "rate", "limit": "30/second, burst 5", "sharing": "adaptive"}],
    "policies": [{"name": "shared", "match": {"route": "/v1/shared"}, "by": ["tenant"], "quota": "shared"}],
}


@pytest.fixture
def next_release(world: World) -> NextRelease:
    """Put the next release in the coordinator's place, behind the same address."""
    found = NextRelease(world.weather.app)
    world.weather.app = found
    return found


async def reasons(agent: Agent) -> tuple[int, dict[str, str]]:
    answer = await agent.http.get("/readyz")
    return answer.status_code, {each["code"]: each["text"] for each in answer.json()["reasons"]}


async def becomes(agent: Agent, status: int, *codes: str) -> dict[str, str]:
    found: tuple[int, dict[str, str]] = (0, {})
    async for _ in attempts():
        found = await reasons(agent)
        if (found[0], set(found[1])) == (status, set(codes)):
            return found[1]
    raise AssertionError(found)


async def test_every_message_may_have_further_fields_in_both_directions(
    world: World, next_release: NextRelease
) -> None:
    await world.try_out(SHARED)
    agent = await world.agent()
    await until(lambda: agent.whole.admission.blocks is not None)
    assert (await agent.check()).status_code == 200
    answer = await world.admin.post("/v1/blocks", json={"field": "tenant", "value": "evil", "reason": "a test"})
    assert answer.is_success, answer.text
    reset = {"quota": "api", "subject": {"tenant": "acme"}, "reason": "a test"}
    assert (await world.admin.post("/v1/resets", json=reset)).is_success
    expected = {f"request of {each}" for each in REQUESTS} | {f"answer of {each}" for each in ANSWERS} | {"signals"}
    async for _ in attempts():
        await asyncio.gather(*(agent.check(SHARED_SEARCH) for _ in range(10)))  # only a rate in demand is shared
        if next_release.grown >= expected:
            break
    assert next_release.grown >= expected, expected - next_release.grown
    async for _ in attempts():
        if (await agent.check({**EXPORT, "tenant": "evil"})).status_code == 429:
            break
    assert await becomes(agent, 200) == {}
    async for _ in attempts():
        if await world.usage() == 1:
            break
    assert (await world.quota())["consumed"] == 1
    status = (await agent.http.get("/v1/status")).json()
    assert (status["release"], status["coordinator_release"]) == (RELEASE, "0.999.0")
    assert status["stopped_lanes"] == {}


async def test_a_policy_of_an_unknown_kind_keeps_its_last_version_and_the_others_change(
    world: World, next_release: NextRelease
) -> None:
    agent = await world.agent()
    await becomes(agent, 200)

    def with_a_budget(name: str, answer: Any) -> Any:
        if name == "policies":
            quotas = {each["name"]: each for each in answer["document"]["quotas"]}
            quotas["api"]["kind"] = "budget"
        return answer

    next_release.change = with_a_budget
    wider = [{**each, "limit": 1} if each["name"] == "exports" else each for each in DOCUMENT["quotas"]]
    assert (await world.admin.put("/v1/limits", json={**DOCUMENT, "quotas": wider})).is_success
    text = (await becomes(agent, 200, "newer_policies"))["newer_policies"]
    assert "quotas.api" in text
    assert RELEASE in text
    answer = (await agent.check(SEARCH)).json()
    assert [(each["policy"], each["limit"]) for each in answer["policies"]] == [("search", 30)]
    assert [(await agent.check()).status_code for _ in range(2)] == [200, 429]
    next_release.change = lambda _, answer: answer
    assert (await world.admin.put("/v1/limits", json=DOCUMENT)).is_success
    assert await becomes(agent, 200) == {}


async def test_an_agent_sets_a_policy_aside_whose_field_needs_what_it_lacks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition that an older agent ignored would apply the policy to everybody."""
    agent = await world.agent()
    await becomes(agent, 200)
    monkeypatch.setattr(reading, "CAPABILITIES", frozenset())
    monkeypatch.setattr(requirements, "NEEDED", {"policies.local_fraction": Capability.REQUIREMENTS})
    wider = [{**each, "limit": 1} if each["name"] == "exports" else each for each in DOCUMENT["quotas"]]
    assert (await world.admin.put("/v1/limits", json={**DOCUMENT, "quotas": wider})).is_success
    text = (await becomes(agent, 200, "newer_policies"))["newer_policies"]
    assert "policies.local" in text
    assert "policies.search" not in text
    assert (await agent.check({**SEARCH, "route": "/v1/local"})).json()["policies"][0]["policy"] == "local"


async def test_a_new_agent_without_any_version_of_a_policy_is_not_ready(
    world: World, next_release: NextRelease
) -> None:
    def with_a_budget(name: str, answer: Any) -> Any:
        if name == "policies":
            answer["document"]["quotas"][1]["kind"] = "budget"
        return answer

    next_release.change = with_a_budget
    agent = await world.agent()
    assert "not all of them are enforced" in (await becomes(agent, 503, "newer_policies"))["newer_policies"]
    assert (await agent.check()).status_code == 200  # what can be read is enforced


async def test_a_refusal_that_an_agent_does_not_know_is_asked_again(world: World, next_release: NextRelease) -> None:
    agent = await world.agent()
    saturated = 0

    def saturate(name: str, answer: Any) -> Any:
        nonlocal saturated
        if name == "exchanges":
            for lease in [lease for reply in answer["replies"] for lease in reply["leases"]]:
                lease["refusal"] = "saturated"
                saturated += 1
        return answer

    next_release.change = saturate
    await agent.check()
    await until(lambda: saturated)
    next_release.change = lambda _, answer: answer
    async for _ in attempts():
        if (await agent.check()).status_code == 200:
            break
    assert await becomes(agent, 200) == {}


async def test_an_outcome_that_an_agent_does_not_know_stops_its_lane_until_it_ends(
    world: World, next_release: NextRelease
) -> None:
    agent = await world.agent()
    assert (await agent.check()).status_code == 200

    def postpone(name: str, answer: Any) -> Any:
        for reply in answer["replies"] if name == "exchanges" else ():
            reply["outcome"] = "postponed"
        return answer

    next_release.change = postpone
    assert (await agent.check()).status_code == 429
    await until(lambda: agent.region.exchange_loop.stopped_lanes)
    stopped = (await agent.http.get("/v1/status")).json()["stopped_lanes"]
    assert set(stopped.values()) == {"postponed"}
    next_release.change = lambda _, answer: answer
    agent.region.exchange_loop.offer_again_ms = 0
    await until(lambda: not agent.region.exchange_loop.stopped_lanes)
    assert (await agent.check()).status_code == 200
    async for _ in attempts():
        if (await world.usage()) == 2:
            break
    assert (await world.quota())["consumed"] == 2
