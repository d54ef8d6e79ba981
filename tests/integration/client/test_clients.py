"""The Python clients call an agent over real sockets."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from leasehold import AgentUnavailable, AsyncClient, Client, Denied, RequestRejected
from regional_agent.leasing.rules import contact
from regional_agent.main import create_app
from tests.integration.regional_agent.world import EXPORT, World
from tests.waiting import attempts, until
from web.serving import serve

pytestmark = pytest.mark.anyio

OPEN = {"tenant": "acme", "route": "/v1/open"}


@asynccontextmanager
async def served_agent(world: World, uds: str | None = None, *, leased: bool = True) -> AsyncIterator[str]:
    app = create_app(world.settings("us-east", uds=uds))
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(app, host="127.0.0.1", port=0, uds=uds, on_listening=listening.set_result))
    try:
        url = await listening
        region = app.state.region
        await until(lambda: region.has_epochs and region.admission.policies is not None)
        address = url if uds is None else f"unix://{uds}"
        async with AsyncClient(address) as client, asyncio.timeout(60):
            while leased and not (await client.check(EXPORT, mode="peek")).allowed:  # noqa: ASYNC110 - what is leased has no event
                await asyncio.sleep(0.01)  # the very first request waits for a lease, but not for ever
        yield address
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


async def test_threads_and_loops_get_the_same_answers(world: World) -> None:
    async with served_agent(world) as url, AsyncClient(url) as client:
        with Client(url) as blocking:
            first = await client.check(EXPORT, cost=3)
            second = await asyncio.to_thread(blocking.check, EXPORT, cost=2)
        assert (first.allowed, second.allowed) == (True, True)
        assert (first.policies[0].remaining, second.policies[0].remaining) == (97, 95)
        assert (first.headers["x-ratelimit-remaining"], second.headers["x-ratelimit-remaining"]) == ("97", "95")
        denied = await client.check(EXPORT, cost=101)
        assert (denied.allowed, denied.denied_by, denied.degraded) == (False, "export", None)
        assert (denied.reason, denied.retry_after_ms) == ("never", None)
        assert "retry-after" not in denied.headers
        waited = await client.wait(EXPORT, cost=101, timeout_s=3_600)
        assert waited.reason == "never", "it does not wait for what can never pass"


async def test_a_unix_socket_works_like_tcp(world: World, tmp_path: Path) -> None:
    async with served_agent(world, str(tmp_path / "agent.sock")) as url, AsyncClient(url) as client:
        assert (await client.check(EXPORT)).allowed
        with Client(url) as blocking:
            assert (await asyncio.to_thread(blocking.check, EXPORT)).allowed


async def test_a_repeated_operation_is_charged_once(world: World) -> None:
    async with served_agent(world) as url, AsyncClient(url) as client:
        decisions = [await client.check(EXPORT, cost=5, operation_id="export-7") for _ in range(3)]
        assert {each.policies[0].remaining for each in decisions} == {95}
        with pytest.raises(RequestRejected) as refused:
            await client.check(EXPORT, cost=6, operation_id="export-7")
        assert (refused.value.status, refused.value.problem["type"]) == (422, "/problems/operation-conflict")


async def test_a_limited_function_is_not_called_when_denied(world: World) -> None:
    calls: list[str] = []
    async with served_agent(world) as url, AsyncClient(url) as client:

        @client.limited(lambda tenant: EXPORT | {"tenant": tenant}, cost=60)
        async def export(tenant: str) -> str:
            calls.append(tenant)
            return "done"

        assert await export("acme") == "done"
        with pytest.raises(Denied) as denied:
            await export("acme")
        assert denied.value.decision.denied_by == "export"
        assert await export("globex") == "done"
    assert calls == ["acme", "globex"]


async def test_a_hold_books_what_was_committed(world: World) -> None:
    async with served_agent(world) as url, AsyncClient(url) as client:
        async with client.holding(EXPORT, units=40) as holding:
            assert not (await client.check(EXPORT, cost=61)).allowed
            await holding.commit(25)
        with Client(url) as blocking:
            await asyncio.to_thread(_fails_in_a_hold, blocking)
        held = await client.hold(EXPORT, units=75, ttl_ms=60_000, operation_id="rest")
        await client.extend(held, 90_000)
        await client.release(held)
        await client.release(held)
        with pytest.raises(RequestRejected) as refused:
            await client.commit(held, 1)
        assert (refused.value.status, refused.value.problem["state"]) == (409, "released")
        with pytest.raises(Denied):
            await client.hold(EXPORT, units=76, ttl_ms=60_000, operation_id="more")


def _fails_in_a_hold(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.holding(EXPORT, units=75):
        raise ZeroDivisionError


async def test_a_check_is_explained(world: World) -> None:
    async with served_agent(world) as url:
        async with AsyncClient(url) as client:
            found = await client.explain(EXPORT, cost=5, costs={"exports": 9})
            assert {each.policy: (each.matches, each.cost) for each in found.policies}["export"] == (True, 9)
            with pytest.raises(RequestRejected):
                await client.explain(EXPORT, costs={"exprots": 9})
        with Client(url) as blocking:
            assert await asyncio.to_thread(blocking.explain, EXPORT, cost=5, costs={"exports": 9}) == found
    with pytest.raises(AgentUnavailable):
        await AsyncClient(url, on_failure="open").explain(EXPORT)


async def test_a_batch_is_answered_in_order(world: World) -> None:
    async with served_agent(world) as url, AsyncClient(url) as client:
        lines: list[dict[str, Any]] = [{"subject": EXPORT, "cost": cost} for cost in (60, 60, 40)]
        assert [each.allowed for each in await client.check_batch(lines)] == [True, False, True]


async def test_a_rejected_check_of_a_batch_leaves_the_other_decisions(world: World) -> None:
    async with served_agent(world) as url, AsyncClient(url) as client:
        lines: list[dict[str, Any]] = [{"subject": EXPORT, "cost": cost} for cost in (60, -1, 40)]
        first, refused, last = await client.check_batch(lines)
        assert (first.allowed, last.allowed) == (True, True)
        assert isinstance(refused, RequestRejected)
        assert refused.status == 422


async def test_the_failure_mode_answers_for_a_stopped_agent(world: World) -> None:
    async with served_agent(world) as url:
        clients = [AsyncClient(url, on_failure=mode) for mode in ("open", "closed", "raise")]
        assert [(await client.check(OPEN)).degraded for client in clients] == [None] * 3
    opened, closed, raising = clients
    assert (await opened.check(OPEN)).allowed
    assert not (await closed.check(OPEN)).allowed
    with pytest.raises(AgentUnavailable):
        await raising.check(OPEN)
    for client in clients:
        await client.close()


async def test_a_request_that_waits_for_units_does_not_make_the_agent_unavailable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator replies late, and the policy lets a first request wait for units."""
    monkeypatch.setattr(contact, "KNOWN_AFTER_MS", 60_000)  # an agent that is cut off would not let them wait
    async with served_agent(world) as url, AsyncClient(url, timeout_ms=50) as client:
        late = asyncio.Event()

        async def hold_back() -> None:
            world.weather.before_replies_to["/exchanges"] = hold_back  # of an exchange that is sent again, too
            await late.wait()

        world.weather.before_replies_to["/exchanges"] = hold_back
        waiting = [asyncio.ensure_future(client.check(EXPORT | {"tenant": f"new-{n}"})) for n in range(8)]
        await until_it_is_asked_for_its_health(url, 8)  # each has waited for longer than the client's time-out
        assert not any(task.done() for task in waiting)
        assert (await client.check(OPEN)).degraded is None
        late.set()
        decisions = await asyncio.gather(*waiting)
        assert [(decision.allowed, decision.degraded) for decision in decisions] == [(True, None)] * 8


async def until_it_is_asked_for_its_health(url: str, times: int) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        async for _ in attempts():
            metrics = (await http.get("/metrics")).text
            asked = re.search(r'leasehold_http_requests_total.*route="/healthz".* (\d+)', metrics)
            if asked and int(asked[1]) >= times:
                return
    raise AssertionError(f"it was not asked {times} times")


async def test_an_invalid_request_is_rejected_with_its_field(world: World) -> None:
    async with served_agent(world) as url, AsyncClient(url, on_failure="open") as client:
        with pytest.raises(RequestRejected) as refused:
            await client.check(EXPORT, cost=0)
        assert refused.value.problem["invalid_parameters"][0]["field"] == "cost"
