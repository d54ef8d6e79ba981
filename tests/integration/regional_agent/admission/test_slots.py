"""Slots limit how much runs at once, are taken with all other quotas or not at all, and are released."""

import asyncio
import threading
from typing import Any

import pytest

from leasehold import AgentUnavailable, AsyncClient, Client, Denied, RequestRejected
from leasehold.client._async.limiter import AsyncOpenHold
from leasehold.client._sync.limiter import OpenHold
from leasehold.client.agent_protocol import HeldUnits
from tests.integration.client.test_clients import served_agent
from tests.integration.client.test_middleware import engine_of
from tests.integration.regional_agent.admission.test_holds import hold, pass_ms, say
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World

pytestmark = pytest.mark.anyio

REPORT = {"tenant": "acme", "route": "/v1/reports", "method": "POST"}
BIG = REPORT | {"route": "/v1/big/reports"}
SLOT_TTL_MS = 300_000  # as in the document; a region has two slots of the six
POLICIES: list[dict[str, Any]] = [
    {"name": f"{quota}-big", "match": {"route": "/v1/big/reports"}, "by": ["tenant"], "quota": quota, "cost": cost}
    for quota, cost in (("api", 1), ("exports", 1), ("reports", 2))
]


@pytest.fixture
async def agent(world: World) -> Agent:
    document = DOCUMENT | {"policies": [*DOCUMENT["policies"], *POLICIES]}
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    return await world.agent()


async def left(agent: Agent, subject: dict[str, str] = REPORT) -> dict[str, int]:
    answer = (await agent.check(subject, mode="peek")).json()
    return {policy["quota"]: policy["remaining"] for policy in answer["policies"]}


async def in_use(agent: Agent) -> list[dict[str, Any]]:
    slots: list[dict[str, Any]] = (await agent.http.get("/v1/status")).json()["slots"]
    return slots


async def test_the_regions_share_runs_at_once_through_any_agent(world: World, agent: Agent) -> None:
    other = await world.agent()
    asked = (hold(each, 1, subject=REPORT, operation_id=f"{n}") for n in range(20) for each in (agent, other))
    answers = await asyncio.gather(*asked)
    taken = {answer.json()["hold_id"] for answer in answers if answer.status_code == 201}
    assert len(taken) == 2
    denied = next(answer for answer in answers if answer.status_code == 429).json()
    assert (denied["denied_by"], denied["retry_after_ms"]) == ("report", 1000)
    assert await in_use(agent) == [{"quota": "reports:tenant=acme", "in_use": 2, "holders": 2}]
    for hold_id in taken:
        assert (await say(other, hold_id, "release")).json()["state"] == "released"
    assert (await left(agent), await in_use(agent)) == ({"reports": 2}, [])


async def test_rate_allowance_and_slot_are_taken_together_or_not_at_all(agent: Agent) -> None:
    await agent.lease(80)
    first = await hold(agent, 30, subject=BIG, operation_id="first")
    assert first.status_code == 201, first.text
    after = await left(agent, BIG)
    assert after == {"api": 9, "exports": 70, "reports": 0}
    denied = await hold(agent, 30, subject=BIG, operation_id="second")
    assert (denied.status_code, denied.json()["denied_by"]) == (429, "reports-big")
    assert await left(agent, BIG) == after
    done = await say(agent, first.json()["hold_id"], "commit", units=12)
    assert (done.json()["state"], done.json()["committed"]) == ("committed", 12)
    assert await left(agent, BIG) == {"api": 9, "exports": 88, "reports": 2}


async def test_an_absent_holder_loses_its_slot_after_its_ttl_and_an_active_one_keeps_it(agent: Agent) -> None:
    gone, goes_on = [
        (await hold(agent, 1, subject=REPORT, operation_id=name, ttl_ms=3_600_000)).json() for name in ("a", "b")
    ]
    assert gone["expires_in_ms"] == SLOT_TTL_MS, "its quota says how long at most"
    await pass_ms(agent, SLOT_TTL_MS - 1_000)
    extended = await say(agent, goes_on["hold_id"], "extend", ttl_ms=3_600_000)
    assert 0 <= SLOT_TTL_MS - extended.json()["expires_in_ms"] < 1_000
    assert await left(agent) == {"reports": 0}
    await pass_ms(agent, 1_000)
    assert await left(agent) == {"reports": 1}
    assert [each["holders"] for each in await in_use(agent)] == [1]
    late = await say(agent, gone["hold_id"], "extend", ttl_ms=1_000)
    assert (late.status_code, late.json()["type"], late.json()["state"]) == (409, "/problems/hold-ended", "lapsed")
    assert (await say(agent, gone["hold_id"], "release")).status_code == 200
    assert await left(agent) == {"reports": 1}, "what it had lost is not given back again"


async def test_a_client_has_a_slot_while_its_block_runs(world: World, agent: Agent) -> None:
    async with served_agent(world) as url, AsyncClient(url) as client:
        async with client.slot(REPORT) as slot, client.slot(REPORT):
            assert await left(agent) == {"reports": 0}
            await slot.extend()
            with pytest.raises(Denied):
                async with client.slot(REPORT):
                    raise AssertionError("there were two")
        with pytest.raises(ZeroDivisionError):
            async with client.slot(BIG, units=5):
                raise ZeroDivisionError
        assert await left(agent, BIG) == {"api": 9, "exports": 100, "reports": 2}, "what failed has used nothing"
        with Client(url) as blocking:
            await asyncio.to_thread(_work, blocking)
        assert await left(agent, BIG) == {"api": 8, "exports": 95, "reports": 2}


def _work(client: Client) -> None:
    with client.slot(BIG, units=5) as slot:
        slot.extend(1_000)


async def test_a_decorated_function_has_a_slot_while_it_runs(world: World, agent: Agent) -> None:
    begun, may_end = asyncio.Semaphore(0), asyncio.Event()
    async with served_agent(world) as url, AsyncClient(url) as client:

        @client.in_slot(lambda tenant: REPORT | {"tenant": tenant})
        async def report(tenant: str) -> str:
            begun.release()
            await may_end.wait()
            return f"for {tenant}"

        running = [asyncio.ensure_future(report("acme")) for _ in range(2)]
        for _ in running:
            await begun.acquire()
        assert await left(agent) == {"reports": 0}
        with pytest.raises(Denied):
            await report("acme")
        may_end.set()
        assert await asyncio.gather(*running) == ["for acme"] * 2
        assert await left(agent) == {"reports": 2}

        @client.in_slot(lambda: REPORT)
        async def fails() -> None:
            raise ZeroDivisionError

        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await fails()
        assert await left(agent) == {"reports": 2}


ANSWERS: list[Exception | None] = [None, AgentUnavailable("away"), None, RequestRejected(409, {"state": "lapsed"})]


class Scripted(Client):
    """Extensions of a hold are answered, refused and unreachable in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[int] = []
        self.refused = threading.Event()

    def extend(self, hold: HeldUnits, ttl_ms: int) -> None:
        self.said.append(ttl_ms)
        answer = ANSWERS[len(self.said) - 1]
        if isinstance(answer, RequestRejected):
            self.refused.set()
        if answer is not None:
            raise answer


class AsyncScripted(AsyncClient):
    def __init__(self) -> None:
        super().__init__()
        self._other = Scripted()
        self.said, self.refused = self._other.said, asyncio.Event()

    async def extend(self, hold: HeldUnits, ttl_ms: int) -> None:
        try:
            self._other.extend(hold, ttl_ms)
        finally:
            if self._other.refused.is_set():
                self.refused.set()


def test_a_thread_extends_a_hold_until_its_block_ends_or_the_hold_has_ended() -> None:
    with Scripted() as client:
        with OpenHold(client, HeldUnits("h", 1, 30)).renewed():
            assert client.refused.wait(10)
        assert client.said == [30] * 4
        with OpenHold(client, HeldUnits("h", 1, 10**9)).renewed():
            pass  # it does not wait for its next turn
    assert not [thread for thread in threading.enumerate() if thread.name == "leasehold-keeping"]


async def test_a_task_extends_a_hold_until_its_block_ends_or_the_hold_has_ended() -> None:
    async with AsyncScripted() as client, asyncio.timeout(60):
        async with AsyncOpenHold(client, HeldUnits("h", 1, 30)).renewed():
            await client.refused.wait()
        assert client.said == [30] * 4
        async with AsyncOpenHold(client, HeldUnits("h", 1, 10**9)).renewed():
            pass


async def test_a_slot_of_a_function_that_takes_long_is_extended(world: World, agent: Agent) -> None:
    extended = asyncio.Event()

    class Seeing(AsyncClient):
        async def extend(self, hold: HeldUnits, ttl_ms: int) -> None:
            await AsyncClient.extend(self, hold, ttl_ms)
            extended.set()

    async with served_agent(world) as url, Seeing(url) as client:

        @client.in_slot(lambda: REPORT, ttl_ms=3_000)
        async def report() -> None:
            async with asyncio.timeout(30):
                await extended.wait()

        await report()
        assert await left(agent) == {"reports": 2}


async def test_an_engine_holds_in_process_as_an_agent_does(world: World, agent: Agent) -> None:
    async with engine_of(world) as engine:
        assert (await engine.check(EXPORT, cost=80, mode="peek")).allowed
        held = await engine.hold(EXPORT, units=40, ttl_ms=60_000, operation_id="one")
        assert held.hold_id == (await engine.hold(EXPORT, units=40, ttl_ms=60_000, operation_id="one")).hold_id
        with pytest.raises(Denied):
            await engine.hold(EXPORT, units=90, ttl_ms=60_000, operation_id="two")
        await engine.extend(held, 90_000)
        await engine.commit(held, 25)
        await engine.commit(held, 25)
        for call in (engine.commit(held, 26), engine.release(held)):
            with pytest.raises(RequestRejected) as refused:
                await call
            assert (refused.value.status, refused.value.problem["type"]) == (409, "/problems/hold-ended")
        with pytest.raises(RequestRejected) as unknown:
            await engine.release(HeldUnits("nonsense", 1, 1))
        assert unknown.value.status == 404
        with pytest.raises(RequestRejected) as wrong:
            await engine.hold(EXPORT, units=0, ttl_ms=60_000, operation_id="three")
        assert wrong.value.status == 422
        async with engine.slot(REPORT) as slot, slot.renewed():
            assert await left(agent) == {"reports": 1}
        assert await left(agent) == {"reports": 2}
        await engine.region.store.close()
        with pytest.raises(AgentUnavailable):
            await engine.extend(held, 1_000)
    assert await left(agent, EXPORT) == {"exports": 75}
