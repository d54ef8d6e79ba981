"""Requests that no enforced policy matches are counted, and the limits document allows, warns about or denies them."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.integration.regional_agent.store_outage.test_failures import metric
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, IN_SHADOW, Agent, World

pytestmark = pytest.mark.anyio

NOWHERE = {"tenant": "acme", "route": "/v1/nowhere/", "method": "get"}
HEAVY = {"tenant": "acme", "route": "/v1/heavy"}
CLASSES = {"heavy": [{"route": "/v1/heavy"}]}


async def agent_with(world: World, unmatched: str, **more: Any) -> Agent:
    document = DOCUMENT | {"unmatched": unmatched, "route_classes": CLASSES} | more
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    return await world.agent()


async def counted(agent: Agent, route_class: str) -> float:
    return await metric(agent, f'leasehold_unmatched_checks_total{{route_class="{route_class}"}}')


async def test_unmatched_requests_are_allowed_by_default_and_counted_by_route_class(world: World) -> None:
    agent = await agent_with(world, "allow")
    assert (await world.admin.get("/v1/limits")).json()["document"]["unmatched"] == "allow"
    for subject in (NOWHERE, NOWHERE, HEAVY):
        answer = await agent.check(subject)
        assert (answer.status_code, answer.json()["policies"], answer.json()["unmatched"]) == (200, [], None)
        assert "leasehold-unmatched" not in answer.headers
    assert (await agent.check(EXPORT | {"route": "//v1/%65xports/?x"})).json()["policies"][0]["policy"] == "export"
    assert [await counted(agent, name) for name in ("*", "heavy")] == [2, 1]


async def test_a_warning_is_a_field_a_header_and_few_lines_in_the_log(world: World) -> None:
    agent = await agent_with(world, "warn")
    with capture_logs() as lines:
        answers = [await agent.check(NOWHERE) for _ in range(20)]
    for answer in answers:
        assert (answer.status_code, answer.json()["unmatched"]) == (200, "warn")
        assert answer.headers["leasehold-unmatched"] == "warn"
    noted = [line for line in lines if line["event"] == "request matched no policy"]
    assert 1 <= len(noted) < 20, "five in each window of ten seconds"
    assert (noted[0]["route"], noted[0]["method"], noted[0]["allowed"]) == ("/v1/nowhere", "GET", True)
    matched = await agent.check(EXPORT)
    assert (matched.json()["unmatched"], "leasehold-unmatched" in matched.headers) == (None, False)
    held = await agent.http.post(
        "/v1/holds", json={"subject": NOWHERE, "units": 1, "ttl_ms": 1000, "operation_id": "op-1"}
    )
    assert (held.status_code, held.headers["leasehold-unmatched"]) == (201, "warn")


async def test_a_denial_has_its_own_problem_in_checks_batches_and_holds(world: World) -> None:
    agent = await agent_with(world, "deny")
    denied = await agent.check(NOWHERE)
    told = denied.json()
    assert (denied.status_code, told["type"], told["unmatched"]) == (429, "/problems/unmatched", "deny")
    assert (told["denied_by"], told["retry_after_ms"], "retry-after" in denied.headers) == (None, None, False)
    assert "unmatched: deny" in told["detail"]
    assert (await agent.check(NOWHERE, mode="peek")).status_code == 429
    hold = {"subject": NOWHERE, "units": 1, "ttl_ms": 1000, "operation_id": "op-1"}
    assert (await agent.http.post("/v1/holds", json=hold)).json()["unmatched"] == "deny"
    batch = {"checks": [{"subject": NOWHERE}, {"subject": EXPORT}, {"subject": NOWHERE}]}
    items = (await agent.http.post("/v1/check:batch", json=batch)).json()["items"]
    assert [(item["status"], item["answer"]["unmatched"]) for item in items] == [
        (429, "deny"),
        (200, None),
        (429, "deny"),
    ]
    done = (await agent.check(NOWHERE, mode="adjust")).json()
    assert (done["allowed"], done["unmatched"]) == (True, "warn"), "work that is done is never denied"


@pytest.mark.parametrize(("unmatched", "status"), [("warn", 200), ("deny", 429)])
async def test_a_shadow_policy_does_not_make_a_request_matched(world: World, unmatched: str, status: int) -> None:
    shadows = {name: [*DOCUMENT[name], *each] for name, each in IN_SHADOW.items()}
    agent = await agent_with(world, unmatched, **shadows)
    answer = await agent.check(NOWHERE)
    assert (answer.status_code, answer.json()["unmatched"]) == (status, unmatched)
    assert len(answer.json()["policies"]) == (2 if unmatched == "warn" else 0), "shadows of the allowed are counted"
    assert await counted(agent, "*") == 1
