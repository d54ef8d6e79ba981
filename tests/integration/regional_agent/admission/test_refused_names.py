"""The agent refuses values that no quota key may hold, by field, before anything counts or is sent."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from leasehold import AsyncClient, RequestRejected
from tests.integration.client.test_clients import served_agent
from tests.integration.client.test_middleware import engine_of
from tests.integration.regional_agent.admission.test_checks import problem
from tests.integration.regional_agent.http.test_fast_path import Doors, opened
from tests.integration.regional_agent.world import EXPORT, World

pytestmark = pytest.mark.anyio

MORE: dict[str, list[dict[str, Any]]] = {
    "quotas": [
        {"name": "seats", "kind": "allowance", "limit": 100, "period": "month"},
        {"name": "pages", "kind": "rate", "limit": "300/second"},
    ],
    "policies": [
        {"name": "seat", "match": {"route": "/v1/seats"}, "by": ["tenant", "user"], "quota": "seats"},
        {"name": "page", "match": {"route": "/pages/*"}, "by": ["route"], "quota": "pages"},
    ],
}
SEAT = {"tenant": "a" * 250, "user": "b" * 250, "route": "/v1/seats"}
HOSTILE = {
    "slashes": (EXPORT | {"tenant": "/" * 170}, "subject.tenant"),
    "accents": (EXPORT | {"tenant": "é" * 100}, "subject.tenant"),
    "two plain values": (SEAT, "subject.tenant"),
    "a long URL": ({"tenant": "acme", "route": "/pages/" + "x" * 600}, "subject.route"),
    "a tab": (EXPORT | {"tenant": "acme\tinc"}, "subject.tenant"),
    "a newline": (EXPORT | {"tenant": "acme\n"}, "subject.tenant"),
}


@pytest.fixture
async def doors(world: World) -> AsyncIterator[Doors]:
    await world.try_out(MORE)
    async with opened(world) as doors:
        yield doors


async def test_every_operation_refuses_the_value_with_its_field(doors: Doors) -> None:
    for what, (subject, field) in HOSTILE.items():
        for client in (doors.fast, doors.slow):
            answer = await client.post("/v1/check", json={"subject": subject})
            assert problem(answer) == (422, "/problems/invalid-request", [field]), what
            hold = {"subject": subject, "units": 1, "ttl_ms": 1000, "operation_id": what}
            assert problem(await client.post("/v1/holds", json=hold)) == (422, "/problems/invalid-request", [field])
            checks = [{"subject": EXPORT}, {"subject": subject}, {"subject": EXPORT}]
            items = (await client.post("/v1/check:batch", json={"checks": checks})).json()["items"]
            assert [item["status"] for item in items] == [200, 422, 200], what
            assert [each["field"] for each in items[1]["problem"]["invalid_parameters"]] == [field]


TOO_LATE = "no reply in time"  # of a busy machine


def reasons_of_failed_exchanges(logs: Sequence[Mapping[str, Any]]) -> set[str]:
    return {entry["reason"] for entry in logs if entry["event"] == "exchange failed"}


async def test_others_are_served_as_before(doors: Doors) -> None:
    with capture_logs() as logs:
        for subject, _ in HOSTILE.values():
            await doors.slow.post("/v1/check", json={"subject": subject})
        bystander = await doors.slow.post("/v1/check", json={"subject": EXPORT | {"tenant": "bystander"}})
    assert bystander.status_code == 200
    assert reasons_of_failed_exchanges(logs) <= {TOO_LATE}


async def test_the_engine_and_the_client_name_the_field(world: World) -> None:
    await world.try_out(MORE)
    async with engine_of(world) as engine, served_agent(world) as url, AsyncClient(url) as client:
        for asks in (engine, client):
            for subject, field in HOSTILE.values():
                with pytest.raises(RequestRejected) as refused:
                    await asks.check(subject)
                assert refused.value.status == 422
                assert [each["field"] for each in refused.value.problem["invalid_parameters"]] == [field]


@pytest.mark.parametrize("cost", [9_007_199_254_740_991, 10**14])
async def test_an_absurd_adjustment_does_not_affect_other_tenants(world: World, cost: int) -> None:
    """Its demand exceeded what a message can carry, so every exchange of the agent used to be refused."""
    agent = await world.agent()
    with capture_logs() as logs:
        await agent.check(EXPORT | {"tenant": "big"}, cost=cost, mode="adjust")
        for number in range(5):
            assert (await agent.check(EXPORT | {"tenant": f"fresh-{number}"})).status_code == 200
    assert reasons_of_failed_exchanges(logs) <= {TOO_LATE}


async def test_a_malformed_check_of_a_batch_is_answered_by_itself(world: World, doors: Doors) -> None:
    one = {"subject": EXPORT}
    wrong: list[tuple[Any, list[str]]] = [
        ({"subject": EXPORT, "cost": -1}, ["cost"]),
        ({"subject": EXPORT, "cots": 1}, ["cots"]),
        ({"subject": EXPORT | {"shoe": "44"}}, ["subject.shoe"]),
        ({"subject": EXPORT | {"tenant": "a\0"}}, ["body"]),
        (7, ["body"]),
        (None, ["body"]),
    ]
    before = await _used(doors.slow)
    for check, fields in wrong:
        for client in (doors.fast, doors.slow):
            answer = await client.post("/v1/check:batch", json={"checks": [one, check, one]})
            assert answer.status_code == 200, check
            items = answer.json()["items"]
            assert [item["status"] for item in items] == [200, 422, 200], check
            assert [each["field"] for each in items[1]["problem"]["invalid_parameters"]] == fields
            alone = await doors.post(client, check)
            for name in ("type", "title", "detail", "status", "invalid_parameters"):
                assert items[1]["problem"][name] == alone.json()[name]
    assert await _used(doors.slow) == before + 4 * len(wrong)


async def test_a_repeated_name_in_one_check_of_a_batch_refuses_that_check(doors: Doors) -> None:
    twice = b'{"checks": [{"subject": {"route": "/a"}}, {"subject": {"tenant": "a", "tenant": "b"}}]}'
    for client in (doors.fast, doors.slow):
        answer = await doors.post(client, twice, "/v1/check:batch")
        assert [item["status"] for item in answer.json()["items"]] == [200, 422]
    outer = b'{"checks": [{"subject": {"route": "/a"}}], "checks": [{"subject": {"route": "/b"}}]}'
    for client in (doors.fast, doors.slow):
        assert (await doors.post(client, outer, "/v1/check:batch")).status_code == 422


async def _used(client: httpx.AsyncClient) -> int:
    answer = await client.post("/v1/check", json={"subject": EXPORT, "mode": "peek"})
    return 100 - int(answer.json()["policies"][0]["remaining"])
