"""Shadow policies report and count what they would decide, and never deny."""

import asyncio
from typing import Any

import pytest

from tests.integration.regional_agent.admission.test_holds import hold, say
from tests.integration.regional_agent.store_outage.test_failures import metric
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

SEARCH, OPEN, NOWHERE, REPORT = (
    {"tenant": "acme", "route": route} for route in ("/v1/search", "/v1/open", "/v1/nowhere", "/v1/reports")
)


def trial(**more: Any) -> dict[str, list[dict[str, Any]]]:
    """Return one rate in shadow, of which this region has five units."""
    quota = {"name": "trial", "kind": "rate", "limit": "3/hour, burst 15", "sharing": "regional"}
    return {
        "quotas": [quota],
        "policies": [{"name": "trial", "by": ["tenant"], "quota": "trial", "shadow": True, **more}],
    }


@pytest.fixture
async def agent(world: World) -> Agent:
    await world.try_out(trial())
    return await world.agent()


def shadow_of(answer: Any) -> tuple[bool, int]:
    """Return whether it was allowed, and what remains."""
    (told,) = (policy for policy in answer.json()["policies"] if policy["shadow"])
    return told["allowed"], told["remaining"]


async def counted(agent: Agent, answer: str) -> float:
    reason = "limit" if answer == "shadow_denied" else ""
    return await metric(agent, f'leasehold_checks_total{{answer="{answer}",policy="trial",reason="{reason}"}}')


async def test_a_shadow_decision_is_returned_and_counted_and_denies_nothing(agent: Agent) -> None:
    answers = [await agent.check(SEARCH) for _ in range(8)]
    assert [shadow_of(answer) for answer in answers] == [(True, n) for n in (4, 3, 2, 1, 0)] + [(False, 0)] * 3
    for answer in answers:
        told = answer.json()
        assert (answer.status_code, told["allowed"], told["denied_by"], told["retry_after_ms"]) == (200, True, None, 0)
        assert "trial" not in answer.headers["ratelimit"] + answer.headers["ratelimit-policy"]
        assert answer.headers["x-ratelimit-limit"] == "30"
        assert "retry-after" not in answer.headers
    assert [await counted(agent, answer) for answer in ("shadow_allowed", "shadow_denied")] == [5, 3]


async def test_a_shadow_alone_adds_no_headers_and_no_denial(agent: Agent) -> None:
    answers = [await agent.check(NOWHERE) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert shadow_of(answers[5]) == (False, 0)
    assert not any(name.startswith(("ratelimit", "x-ratelimit")) for name in answers[5].headers)


async def test_retry_after_is_of_the_enforced_policy(agent: Agent) -> None:
    assert [(await agent.check(SEARCH, cost=cost)).status_code for cost in (5, 4)] == [200, 200]
    denied = (await agent.check(SEARCH, cost=4)).json()
    enforced, shadow = denied["policies"]
    assert (denied["denied_by"], shadow["allowed"]) == ("search", False)
    assert denied["retry_after_ms"] == enforced["retry_after_ms"] < shadow["retry_after_ms"]


async def test_a_denial_names_the_enforced_policy_and_is_not_cached_for_a_shadow(agent: Agent) -> None:
    for cost in (5, 90, 4):
        assert (await agent.check(EXPORT, cost=cost)).status_code == 200, "the shadow has five, once"
    denied = await agent.check(EXPORT, cost=4)
    assert (denied.status_code, denied.json()["denied_by"], shadow_of(denied)) == (429, "export", (False, 0))
    before = agent.region.store.calls
    assert (await agent.check(EXPORT, cost=4)).status_code == 429
    assert agent.region.store.calls > before, "units of an allowance may come at any moment, whatever its shadow says"


async def test_a_request_waits_for_its_lease_whatever_its_shadow_decides(world: World) -> None:
    await world.try_out(trial())
    world.weather.swallows_requests = False
    agent = await world.agent()
    assert (await agent.check(EXPORT, cost=20)).status_code == 200, "there was no lease, and 20 are above the trial's 5"


async def test_a_hot_key_with_a_shadow_is_counted_to_the_unit(world: World) -> None:
    await world.try_out(
        {
            "quotas": [
                {"name": "hot", "kind": "rate", "limit": "3000/second, burst 30000", "sharing": "regional"},
                {"name": "trial", "kind": "rate", "limit": "3/hour, burst 300", "sharing": "regional"},
            ],
            "policies": [
                {"name": "hot", "match": {"route": "/v1/hot*"}, "by": ["tenant"], "quota": "hot"},
                {"name": "trial", "match": {"route": "/v1/hot"}, "by": ["tenant"], "quota": "trial", "shadow": True},
            ],
        }
    )
    agent = await world.agent(report_interval_ms=60_000)
    answers = await asyncio.gather(*(agent.check({"tenant": "acme", "route": "/v1/hot"}) for _ in range(300)))
    assert [answer.status_code for answer in answers] == [200] * 300
    assert sorted(shadow_of(answer)[1] for answer in answers if shadow_of(answer)[0]) == list(range(100))
    assert agent.region.slices.taken == 0


# --- holds ------------------------------------------------------------------------------------------------------------


async def test_a_shadow_of_slots_denies_no_hold_and_no_check(world: World) -> None:
    await world.try_out()
    agent = await world.agent()
    assert (await agent.check(EXPORT, cost=80, mode="peek")).status_code == 200
    held = [(await hold(agent, 10, subject=EXPORT, operation_id=f"{n}")).json() for n in range(3)]
    told = [{each["policy"]: each["allowed"] for each in answer["policies"]} for answer in held]
    assert [each["trial-slot"] for each in told] == [True, True, False]
    slots = (await agent.http.get("/v1/status")).json()["slots"]
    assert slots == [{"quota": "trial-slots:tenant=acme", "in_use": 2, "holders": 2}]
    checked = (await agent.check(EXPORT)).json()
    assert (checked["allowed"], checked["policies"][-1]) == (True, checked["policies"][-1] | {"allowed": False})
    for answer in held:
        assert (await say(agent, answer["hold_id"], "commit", units=7)).json()["state"] == "committed"
    assert (await agent.http.get("/v1/status")).json()["slots"] == []


async def test_a_hold_with_shadows_only_is_granted_and_ends_without_units(world: World) -> None:
    await world.try_out()
    agent = await world.agent()
    for number in range(3):
        answer = await hold(agent, 1, subject=NOWHERE, operation_id=f"{number}")
        assert answer.status_code == 201
    assert (await say(agent, answer.json()["hold_id"], "commit", units=1)).json()["state"] == "nothing_held"


# --- without the store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "says"), [("closed", [False] * 4), ("open", [True] * 4), ("local", [True] * 2 + [False] * 2)]
)
async def test_the_failure_mode_of_a_shadow_is_returned_and_denies_nothing(
    world: World, mode: str, says: list[bool]
) -> None:
    await world.try_out(trial(on_store_failure=mode, **({"local_fraction": 0.4} if mode == "local" else {})))
    agent = await world.agent()
    await agent.whole.store.close()
    for subject, degraded in ((OPEN | {"tenant": "other"}, "open"), (NOWHERE, None)):
        answers = [await agent.check(subject) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [shadow_of(answer)[0] for answer in answers] == says
        assert answers[0].json()["degraded"] == degraded
    closed = await agent.check(SEARCH)
    assert (closed.status_code, closed.json()["denied_by"]) == (503, "search")


async def test_a_denial_during_a_store_outage_takes_nothing_of_a_shadow(world: World) -> None:
    await world.try_out(trial(on_store_failure="local"))
    agent = await world.agent()
    await agent.whole.store.close()
    local = {"tenant": "acme", "route": "/v1/local"}
    assert (await agent.check(local, cost=5)).status_code == 200, "all that it may give by itself"
    denied = await agent.check(local)
    assert (denied.status_code, denied.json()["denied_by"], shadow_of(denied)) == (429, "local", (True, 0))
    assert [shadow_of(await agent.check(NOWHERE)) for _ in range(2)] == [(True, 0), (False, 0)], "the one that it has"


async def test_enforcement_continues_from_the_count_of_a_shadow(world: World, agent: Agent) -> None:
    for _ in range(5):
        await agent.check(NOWHERE)
    before = agent.region.admission.policies
    await world.try_out(trial(shadow=False))
    await until(lambda: agent.region.admission.policies is not before)
    denied = await agent.check(NOWHERE)
    assert (denied.status_code, denied.json()["denied_by"]) == (429, "trial")
