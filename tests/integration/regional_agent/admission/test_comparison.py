"""The rows of docs/comparison.md: functional tests of Gubernator and integration tests of Envoy's rate limit service.

Each test has the name that its row gives, and runs the row against a real agent with a real store and coordinator. A
region has a third of all weight, so limits are written three times as large as theirs. Their seconds are hours here,
and pass on the store's clock.
"""

import asyncio
import re
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import httpx
import pytest

from regional_agent.store import keys
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = [pytest.mark.anyio, pytest.mark.extended]

PAGE = Path(__file__).parents[4] / "docs" / "comparison.md"
SUBJECT = {"tenant": "acme", "route": "/v1/x", "method": "GET"}
OK, OVER = 200, 429
RATE: dict[str, Any] = {"kind": "rate", "sharing": "regional", "slices": False}


def rate(limit: str, algorithm: str = "token_bucket", name: str = "q", **more: Any) -> dict[str, Any]:
    return RATE | {"name": name, "limit": limit, "algorithm": algorithm} | more


async def put(world: World, *quotas: dict[str, Any], policies: list[dict[str, Any]] | None = None) -> int:
    """Put a document; without policies each quota counts all requests by tenant. Return its version."""
    policies = policies or [{"name": each["name"], "by": ["tenant"], "quota": each["name"]} for each in quotas]
    answer = await world.admin.put("/v1/limits", json={"quotas": list(quotas), "policies": policies})
    assert answer.is_success, answer.text
    version: int = answer.json()["version"]
    return version


async def hit(agent: Agent, hits: int = 1, **changed: Any) -> tuple[int, int]:
    """Return status and remaining. No hits are a look."""
    mode: dict[str, Any] = {"mode": "peek"} if hits == 0 else {"cost": hits}
    answer = await agent.check(SUBJECT | changed, **mode)
    return answer.status_code, answer.json()["policies"][0]["remaining"]


async def pass_hours(agent: Agent, hours: float) -> None:
    """Let time pass on the store's clock. The agent keeps denials by its own, so it forgets them."""
    await agent.region.store.call("HINCRBY", keys.FENCE, "mono", int(hours * 3_600_000_000))
    agent.region.share_loop.raises += 1


async def takes(agent: Agent, *rows: tuple[int, int, int, float]) -> None:
    """Check rows of hits, status, remaining, and hours that pass afterwards."""
    for place, (hits, status, remaining, hours) in enumerate(rows):
        assert await hit(agent, hits) == (status, remaining), place
        await pass_hours(agent, hours)


# --- Gubernator -------------------------------------------------------------------------------------------------------


async def test_over_the_limit(world: World) -> None:
    await put(world, rate("6 per 9 hours, burst 6"))
    await takes(await world.agent(), (1, OK, 1, 0), (1, OK, 0, 0), (1, OVER, 0, 0))


async def test_several_limits_in_one_call(world: World) -> None:
    await put(world, rate("6 per 9 hours, burst 6"))
    agent = await world.agent()
    checks = [
        {"subject": SUBJECT | {"tenant": tenant}, "cost": cost} for tenant, cost in (("a", 1), ("b", 2), ("b", 1))
    ]
    answer = await agent.http.post("/v1/check:batch", json={"checks": checks})
    assert [each["status"] for each in answer.json()["items"]] == [OK, OK, OVER]


async def test_a_bucket_that_is_full_again_at_once(world: World) -> None:
    await put(world, rate("6 per 5 hours", "fixed_window"))
    await takes(await world.agent(), (1, OK, 1, 0), (1, OK, 0, 5), (1, OK, 1, 0))


async def test_a_window_of_the_calendar(world: World) -> None:
    await put(world, rate("180 per 6 seconds", "fixed_window", align="calendar"))
    agent = await world.agent()
    for _ in range(10):
        denied = await _four_hits_in_one_window(agent)
        if denied is not None:
            break
    else:
        raise AssertionError("four checks never took less than six seconds")
    await asyncio.sleep(denied.json()["retry_after_ms"] / 1000)
    agent.region.share_loop.raises += 1
    assert await hit(agent) == (OK, 59)


async def _four_hits_in_one_window(agent: Agent) -> httpx.Response | None:
    """Return the denial of the last one, or None if the window ended before it."""

    async def now_ms() -> int:
        seconds, micros = await agent.region.store.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    window_ms = 6_000
    await asyncio.sleep((window_ms - await now_ms() % window_ms) / 1000)
    began = await now_ms() // window_ms
    seen = [await hit(agent), await hit(agent), await hit(agent, 58)]
    denied = await agent.check(SUBJECT)
    if await now_ms() // window_ms != began:
        return None
    assert (seen, denied.status_code) == ([(OK, 59), (OK, 58), (OK, 0)], OVER)
    return denied


async def test_a_request_for_more_than_there_is_takes_nothing(world: World) -> None:
    for algorithm in ("token_bucket", "leaky_bucket"):
        await put(world, rate("6000 per 1000 hours, burst 6000", algorithm, name=algorithm.replace("_", "-")))
        agent = await world.agent()
        rows = [(1000, OK, 1000), (1500, OVER, 1000), (500, OK, 500), (400, OK, 100), (100, OK, 0), (1, OVER, 0)]
        await takes(agent, *((*row, 0.0) for row in rows))
        await world.agents.aclose()


async def test_a_leaky_bucket(world: World) -> None:
    await put(world, rate("30 per 30 hours, burst 30", "gcra"))
    await takes(
        await world.agent(),
        *((1, OK, 9, 1), (1, OK, 8, 1), (1, OK, 7, 1.5), (0, OK, 8, 3), (0, OK, 9, 0), (9, OK, 0, 0)),
        *((1, OVER, 0, 3.1), (0, OK, 1, 60), (0, OK, 10, 60), (10, OK, 0, 29), (9, OK, 0, 3), (1, OK, 0, 0)),
    )


async def test_a_leaky_bucket_with_a_burst(world: World) -> None:
    await put(world, rate("30 per 30 hours, burst 60", "gcra"))
    await takes(
        await world.agent(),
        *((1, OK, 19, 1), (1, OK, 18, 1), (1, OK, 17, 1.5), (0, OK, 18, 3), (0, OK, 19, 0), (19, OK, 0, 0)),
        *((1, OVER, 0, 3.1), (0, OK, 1, 60), (0, OK, 20, 1)),
    )


async def test_a_leaky_bucket_of_a_minute(world: World) -> None:
    await put(world, rate("180 per 60 hours, burst 180", "gcra"))
    await takes(await world.agent(), (1, OK, 59, 0.5), (1, OK, 58, 1.2), (1, OK, 58, 0))


async def test_a_leaky_bucket_of_a_fast_rate(world: World) -> None:
    await put(world, rate("6000 per 6000 hours, burst 6000", "leaky_bucket"))
    await takes(await world.agent(), (1, OK, 1999, 0), (100, OK, 1899, 0))


async def test_a_limit_of_nothing(world: World) -> None:
    refused = await world.admin.put("/v1/limits", json={"quotas": [rate("0/second")], "policies": []})
    assert [each["field"] for each in refused.json()["invalid_parameters"]] == ["quotas[0].limit"]
    block = {"field": "tenant", "value": "acme", "reason": "no access"}
    assert (await world.admin.post("/v1/blocks", json=block)).is_success
    await put(world, rate("3/second"))
    agent = await world.agent()
    await until(lambda: agent.region.admission.blocks is not None)
    assert (await agent.check(SUBJECT)).json()["blocked_by"] == "tenant"


async def test_several_servers_count_one_limit(world: World) -> None:
    await put(world, rate("60 per 100 hours, burst 60"))
    agents = [await world.agent(), await world.agent()]
    answers = await asyncio.gather(*(agents[number % 2].check(SUBJECT) for number in range(50)))
    assert [each.status_code for each in answers].count(OK) == 20
    assert {(await each.check(SUBJECT)).status_code for each in agents} == {OVER}
    more = SUBJECT | {"tenant": "globex"}
    assert [(await agents[n % 2].check(more, cost=15)).status_code for n in range(2)] == [OK, OVER]


async def test_several_regions_count_one_limit(world: World) -> None:
    quota = {"name": "q", "kind": "allowance", "limit": 10, "period": "day", "mode": "central"}
    await put(world, quota, policies=[{"name": "q", "by": ["tenant"], "quota": "q", "wait": "10s"}])
    agents = [await world.agent("us-east"), await world.agent("eu-west")]
    answers = await asyncio.gather(*(agents[number % 2].check(SUBJECT) for number in range(16)))
    assert [each.status_code for each in answers].count(OK) == 10


async def test_a_changed_limit(world: World) -> None:
    await put(world, rate("300 per 9 hours", "fixed_window"))
    agent = await world.agent()
    seen = [await hit(agent), await hit(agent)]
    for limit, times in ((30, 2), (600, 1)):
        version = await put(world, rate(f"{limit} per 9 hours", "fixed_window"))
        await until(lambda: agent.region.admission.policies.version >= version)  # type: ignore[union-attr]  # noqa: B023
        seen += [await hit(agent) for _ in range(times)]
    assert [remaining for _, remaining in seen] == [99, 98, 7, 6, 195]


async def test_health(world: World) -> None:
    agent = await world.agent()
    assert [(await agent.http.get(path)).status_code for path in ("/healthz", "/readyz")] == [OK, OK]


async def test_a_reset(world: World) -> None:
    await put(world, rate("30 per 30 hours, burst 30"))
    agent = await world.agent()
    await takes(agent, (10, OK, 0, 0))
    reset = {"quota": "q", "subject": {"tenant": "acme"}, "reason": "support"}
    assert (await world.admin.post("/v1/resets", json=reset)).is_success
    async for _ in attempts():
        if await hit(agent, 0) == (OK, 10):
            break
    await takes(agent, (1, OK, 9, 0))


async def test_units_that_are_given_back(world: World) -> None:
    await put(world, rate("30 per 30 hours, burst 30"))
    agents = [await world.agent(), await world.agent()]
    await takes(agents[0], (8, OK, 2, 0))
    for agent, refunded, remaining in ((agents[0], 1, 3), (agents[1], 2, 5)):
        assert (await agent.check(SUBJECT, cost=refunded, mode="refund")).status_code == OK
        assert await hit(agents[0], 0) == (OK, remaining)


# --- Envoy's rate limit service ---------------------------------------------------------------------------------------


async def test_what_nothing_limits_is_admitted(world: World) -> None:
    await put(world, rate("3/hour"), policies=[{"name": "q", "match": {"route": "/other"}, "by": [], "quota": "q"}])
    answer = await (await world.agent()).check(SUBJECT)
    assert (answer.status_code, answer.json()["policies"]) == (OK, [])


async def test_headers_of_a_limit_a_second(world: World) -> None:
    await put(world, rate("150/second", "fixed_window"))
    answer = await (await world.agent()).check(SUBJECT)
    assert answer.headers["RateLimit-Policy"] == '"q";q=150;w=1'
    assert answer.headers["RateLimit"].startswith('"q";r=49;t=')
    assert [answer.headers[f"X-RateLimit-{name}"] for name in ("Limit", "Remaining")] == ["150", "49"]


async def test_25_requests_of_20_a_minute(world: World) -> None:
    await put(world, rate("60/hour", "fixed_window"))
    agent = await world.agent()
    before = [await hit(agent) for _ in range(25)]
    assert before == [(OK, 19 - n) for n in range(20)] + [(OVER, 0)] * 5


async def test_two_limits_at_once(world: World) -> None:
    await put(world, rate("60/hour", "fixed_window", "twenty"), rate("30/day", "fixed_window", "ten"))
    agent = await world.agent()
    answers = [(await agent.check(SUBJECT)).json() for _ in range(15)]
    assert [each["allowed"] for each in answers] == [True] * 10 + [False] * 5
    left = [{each["policy"]: each["remaining"] for each in answer["policies"]} for answer in answers]
    assert left[9] == {"twenty": 10, "ten": 0}
    assert left[14] == left[9], "what one limit denies is not counted by the other"
    assert answers[14]["denied_by"] == "ten"


async def test_the_time_until_the_reset_falls(world: World) -> None:
    await put(world, rate("60/day", "fixed_window"))
    agent = await world.agent()

    async def reset_ms() -> int:
        return int((await agent.check(SUBJECT)).json()["policies"][0]["reset_ms"])

    first = await reset_ms()
    await pass_hours(agent, 2)
    assert 79_000_000 - first < 0
    assert await reset_ms() <= first - 7_200_000


async def test_denials_are_answered_from_memory(world: World) -> None:
    await put(world, rate("3 per 10 hours"))
    agent = await world.agent()
    assert [(await agent.check(SUBJECT)).status_code for _ in range(2)] == [OK, OVER]
    before = agent.region.breaker.calls
    assert {(await agent.check(SUBJECT)).status_code for _ in range(10)} == {OVER}
    assert agent.region.breaker.calls == before


async def test_hits_addend(world: World) -> None:
    await put(world, rate("60/hour", "fixed_window"))
    await takes(await world.agent(), (7, OK, 13, 0), (14, OVER, 13, 0), (13, OK, 0, 0))


async def test_a_reload(world: World) -> None:
    await put(world, rate("3/hour", "fixed_window"))
    agent = await world.agent()
    assert [(await hit(agent))[0] for _ in range(2)] == [OK, OVER]
    version = await put(world, rate("9/hour", "fixed_window"))
    await until(lambda: agent.region.admission.policies.version >= version)  # type: ignore[union-attr]
    assert [(await hit(agent))[0] for _ in range(3)] == [OK, OK, OVER]


async def test_share_threshold(world: World) -> None:
    policies = [
        {"name": "files", "match": {"route": "/files/*"}, "by": ["tenant"], "quota": "q"},
        {"name": "own", "match": {"route": "/own/*"}, "by": ["tenant", "route"], "quota": "q"},
    ]
    await put(world, rate("30/hour", "fixed_window"), policies=policies)
    agent = await world.agent()
    assert {(await hit(agent, route="/files/a.pdf"))[0] for _ in range(10)} == {OK}
    assert (await hit(agent, route="/files/b.csv")) == (OVER, 0)
    assert {await hit(agent, route=f"/own/{number}") for number in range(10)} == {(OK, 9)}


async def test_shadow_mode(world: World) -> None:
    policies = [{"name": "q", "by": ["tenant"], "quota": "q", "shadow": True}]
    await put(world, rate("9/hour", "fixed_window"), policies=policies)
    agent = await world.agent()
    answers = [await agent.check(SUBJECT) for _ in range(5)]
    assert {each.status_code for each in answers} == {OK}
    assert [each.json()["policies"][0]["allowed"] for each in answers] == [True] * 3 + [False] * 2


async def test_unlimited(world: World) -> None:
    policies = [
        {"name": "q", "match": {"route": "/v1/x"}, "by": ["tenant"], "quota": "q"},
        {"name": "free", "match": {"route": "/v1/free"}, "by": ["tenant"], "quota": "free"},
    ]
    await put(world, rate("3/hour"), rate("unlimited", name="free"), policies=policies)
    agent = await world.agent()
    answers = [await agent.check(SUBJECT | {"route": "/v1/free"}) for _ in range(10)]
    assert {each.status_code for each in answers} == {OK}
    assert answers[0].json()["policies"][0]["unlimited"] is True


async def test_a_limit_for_one_value(world: World) -> None:
    await put(world, rate("9/hour", "fixed_window"))
    override = {"quota": "q", "subject": {"tenant": "bkthomps"}, "limit": "3/hour", "reason": "replaces"}
    assert (await world.admin.post("/v1/overrides", json=override)).is_success
    agent = await world.agent()
    assert [(await hit(agent, tenant="bkthomps"))[0] for _ in range(2)] == [OK, OVER]
    assert [(await hit(agent, tenant="foo"))[0] for _ in range(4)] == [OK, OK, OK, OVER]


async def test_descriptors_of_any_name(world: World) -> None:
    def policy(name: str, by: list[str], **labels: str) -> dict[str, Any]:
        return {"name": name, "match": {"labels": labels}, "by": by, "quota": name}

    policies = [
        policy("shady", ["labels.foo"], baz="not-so-shady"),
        policy("fake", ["labels.foo", "labels.source_cluster"], source_cluster="proxy", destination_cluster="fake"),
    ]
    await put(world, rate("9/hour", "fixed_window", "shady"), rate("6/hour", "fixed_window", "fake"), policies=policies)
    agent = await world.agent()
    two = {"foo": "pelle", "baz": "not-so-shady"}
    assert [(await hit(agent, labels=two))[0] for _ in range(4)] == [OK, OK, OK, OVER]
    assert (await hit(agent, labels=two | {"foo": "other"})) == (OK, 2)
    three = {"foo": "my_foo", "source_cluster": "proxy", "destination_cluster": "fake"}
    assert [(await hit(agent, labels=three))[0] for _ in range(3)] == [OK, OK, OVER]
    assert (await agent.check(SUBJECT | {"labels": two | {"baz": "test"}})).json()["policies"] == []


async def test_hits_addend_of_a_descriptor(world: World) -> None:
    await put(world, rate("9/hour", "fixed_window", "requests"), rate("3000/hour", "fixed_window", "tokens"))
    agent = await world.agent()
    answers = [await agent.check(SUBJECT, costs={"tokens": 400}) for _ in range(3)]
    left = [{each["policy"]: each["remaining"] for each in answer.json()["policies"]} for answer in answers]
    assert left == [{"requests": 2, "tokens": 600}, {"requests": 1, "tokens": 200}, {"requests": 1, "tokens": 200}]
    assert [each.status_code for each in answers] == [OK, OK, OVER]


async def test_a_quota_that_is_refreshed(world: World) -> None:
    await put(world, rate("6/hour", "fixed_window"))
    await takes(await world.agent(), (1, OK, 1, 0), (1, OK, 0, 0), (1, OVER, 0, 1), (1, OK, 1, 0))


async def test_statistics_by_policy_and_reason(world: World) -> None:
    await put(world, rate("6/hour", "fixed_window"))
    agent = await world.agent()
    assert [(await hit(agent))[0] for _ in range(3)] == [OK, OK, OVER]
    text = (await agent.http.get("/metrics")).text
    assert 'leasehold_checks_total{answer="allowed",policy="q",reason=""} 2.0' in text
    assert 'leasehold_checks_total{answer="denied",policy="q",reason="limit"} 1.0' in text


# --- the page ---------------------------------------------------------------------------------------------------------


def test_each_row_of_the_page_is_run_or_gives_a_reason() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "their test" not in line]
    named: set[str] = set()
    for _, verdict, reason, test in rows:
        found = re.findall(r"`([\w/.]+)`", test)
        assert bool(found) is (verdict in {"passes", "otherwise"}), (verdict, test)
        assert found or (reason and verdict in {"refused", "missing"}), (verdict, reason)
        named.update(name for name in found if "/" not in name)
        for path in (name for name in found if "/" in name):
            assert (PAGE.parents[1] / path).exists(), path
    assert named == {name for name, value in globals().items() if name[:5] == "test_" and iscoroutinefunction(value)}
