"""Requests whose policies lie in several cells of a Cluster are charged in all or none, once, as in a single store."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from msgspec.structs import replace

from regional_agent.admission.answers import Verdict
from regional_agent.admission.pending_check import Caller
from regional_agent.admission.plan import CheckPlan
from regional_agent.cluster.cell import Cell
from regional_agent.cluster.rules.cells import cell_of
from regional_agent.envoy.door.methods import GrpcError
from regional_agent.envoy.rls.rate_limit import RateLimitService
from regional_agent.store.connection import StoreUnavailable
from regional_agent.store.types import HoldState, StoreRequest
from tests.integration.regional_agent.cluster.clusters import Nodes, a_cluster
from tests.integration.regional_agent.envoy.grpc_harness import descriptor
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

ALLOWANCES = ("team", "person", "key")
DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}},
    "default_plan": "free",
    "quotas": [
        {"name": "team", "kind": "allowance", "limit": 60, "period": "month"},
        {"name": "person", "kind": "allowance", "limit": 40, "period": "month"},
        {"name": "key", "kind": "allowance", "limit": 90, "period": "month"},
        {"name": "wide", "kind": "allowance", "limit": 10_000, "period": "month"},
        {"name": "bucket", "kind": "rate", "limit": "3/hour, burst 30", "sharing": "regional"},
        {"name": "window", "kind": "rate", "limit": "25/hour", "sharing": "regional", "algorithm": "fixed_window"},
        {"name": "jobs", "kind": "concurrency", "limit": 18, "slot_ttl": "5m"},
    ],
    "policies": [
        {"name": "team", "match": {"route": "/all"}, "by": ["tenant"], "quota": "team"},
        {"name": "team-alone", "match": {"route": "/team"}, "by": ["tenant"], "quota": "team"},
        {"name": "key-alone", "match": {"route": "/key"}, "by": ["api_key"], "quota": "key"},
        # A service's hold is charged when it expires; that of an unfinished check is not.
        {
            "name": "person",
            "match": {"route": "/all"},
            "by": ["user"],
            "quota": "person",
            "on_hold_expiry": "charge",
        },
        {"name": "key", "match": {"route": "/all"}, "by": ["api_key"], "quota": "key"},
        {"name": "wide-team", "match": {"route": "/wide"}, "by": ["tenant"], "quota": "wide", "wait": "5s"},
        {"name": "wide-person", "match": {"route": "/wide"}, "by": ["user"], "quota": "wide", "wait": "5s"},
        {"name": "wide-key", "match": {"route": "/wide"}, "by": ["api_key"], "quota": "wide", "wait": "5s"},
        {"name": "fast", "match": {"route": "/rates"}, "by": ["tenant"], "quota": "bucket"},
        {"name": "steady", "match": {"route": "/rates"}, "by": ["user"], "quota": "window"},
        {"name": "team-chat", "match": {"labels": {"model": ["large", "small"]}}, "by": ["tenant"], "quota": "team"},
        {"name": "chat", "match": {"route": "/chat"}, "by": ["labels.model"], "quota": "bucket"},
        {"name": "mixed", "match": {"route": "/mixed"}, "by": ["user"], "quota": "bucket"},
        {"name": "mixed-team", "match": {"route": "/mixed"}, "by": ["tenant"], "quota": "team"},
        {"name": "counted", "match": {"route": "/counted"}, "by": ["user"], "quota": "window"},
        {"name": "counted-team", "match": {"route": "/counted"}, "by": ["tenant"], "quota": "team"},
        {"name": "work", "match": {"route": "/work"}, "by": ["user"], "quota": "jobs"},
        {"name": "work-team", "match": {"route": "/work"}, "by": ["tenant"], "quota": "team"},
        {"name": "open-team", "match": {"route": "/open"}, "by": ["tenant"], "quota": "team"},
        {
            "name": "open-user",
            "match": {"route": "/open"},
            "by": ["user"],
            "quota": "bucket",
            "on_store_failure": "open",
        },
    ],
}
SUBJECT = {"tenant": "acme", "user": "ann", "api_key": "k-1"}


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with a_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(standing: Nodes) -> Nodes:
    standing.forget_everything()
    return standing


@pytest.fixture
async def limited(world: World) -> World:
    assert (await world.admin.put("/v1/limits", json=DOCUMENT)).is_success
    return world


@pytest.fixture
async def agent(limited: World, nodes: Nodes) -> AsyncIterator[Agent]:
    yield await limited.agent(store_url=nodes.url)
    await limited.agents.aclose()


def subject(route: str, **changed: str) -> dict[str, str]:
    return {**SUBJECT, "route": route, **changed}


def cells_of(of: dict[str, str]) -> list[int]:
    fields = {"team": "tenant", "person": "user", "key": "api_key"}
    return [cell_of(f"{quota}:{field}={of[field]}") for quota, field in fields.items()]


async def ready(agent: Agent, *subjects: dict[str, str], units: int = 1) -> None:
    """Lease some units in every cell, because requests do not wait for leases here."""
    for each in subjects:
        async for _ in attempts():
            if (await agent.check(each, mode="peek", cost=units)).status_code == 200:
                break
        else:
            raise AssertionError(f"{each} never has {units}")


async def has_all(agent: Agent, own: dict[str, str]) -> None:
    """Lease all that /all needs, so that each policy denies only for lack of its own units."""
    for route, units in (("/all", 40), ("/team", 60), ("/key", 90)):
        await ready(agent, {**own, "route": route}, units=units)


async def booked(world: World, agent: Agent) -> dict[str, int]:
    """Return the figures of each quota, once everything is reported."""
    await until(lambda: all(not cell.exchange_loop.stopped_lanes for cell in agent.whole.cells))
    for cell in agent.whole.cells:
        incarnation = cell.epochs.current
        assert incarnation is not None
        await cell.exchange.report_everything(incarnation)
    return {quota: await world.usage(quota=quota) for quota in ALLOWANCES}


def told(answer: httpx.Response) -> tuple[Any, ...]:
    body = answer.json()
    policies = [(each["policy"], each["allowed"], each["limit"], each["remaining"]) for each in body["policies"]]
    return answer.status_code, body["denied_by"], body["degraded"], policies


def likened(answer: httpx.Response) -> tuple[Any, ...]:
    """A single store's certain denial may be served from the cache, though more policies would deny by now."""
    status, _, degraded, policies = told(answer)
    return status, degraded, policies if status == 200 else None


def test_the_subject_lies_in_several_cells() -> None:
    assert len(set(cells_of(SUBJECT))) == 3


async def test_the_answers_are_those_of_a_single_store(limited: World, agent: Agent) -> None:
    """Send the same random checks of two customers, one in each kind of region."""
    single = await limited.agent("eu-west")
    others = {"tenant": "other", "user": "otto", "api_key": "k-2"}
    routes = ("/all", "/rates", "/mixed")
    chance = random.Random(20)
    for each, own in ((agent, SUBJECT), (single, others)):
        await has_all(each, own)
    for _ in range(120):
        route, cost, mode = (
            chance.choice(routes),
            chance.choice([1, 1, 2, 3, 9]),
            chance.choice(["enforce"] * 4 + ["peek"]),
        )
        answers = [
            likened(await each.check({**own, "route": route}, cost=cost, mode=mode))
            for each, own in ((agent, SUBJECT), (single, others))
        ]
        assert answers[0] == answers[1]
    assert {told(await agent.check(subject(route)))[0] for route in routes} == {429}


@pytest.mark.extended
async def test_labels_are_counted_in_the_cells_of_their_keys(limited: World, agent: Agent) -> None:
    keys = {model: f"bucket:labels.model={model}" for model in ("large", "small")}
    assert len({cell_of("team:tenant=acme"), *map(cell_of, keys.values())}) > 1
    chats = {model: {"tenant": "acme", "route": "/chat", "labels": {"model": model}} for model in keys}
    await ready(agent, {**SUBJECT, "route": "/team"}, units=20)
    left = {"large": 10, "small": 10}
    for model in ("large", "small", "large", "large"):
        answer = (await agent.check(chats[model])).json()
        left[model] -= 1
        assert {each["policy"]: each["remaining"] for each in answer["policies"]}["chat"] == left[model]
    assert (await booked(limited, agent))["team"] == 4


@pytest.mark.parametrize("clients", [200])
async def test_of_many_at_once_exactly_the_limit_passes_and_each_is_booked_in_all(
    limited: World, agent: Agent, clients: int
) -> None:
    await ready(agent, subject("/all"), units=40)
    answers = await asyncio.gather(*(agent.check(subject("/all")) for _ in range(clients)))
    statuses = Counter(answer.status_code for answer in answers)
    # Concurrent checks may be denied by units that the other holds.
    assert set(statuses) == {200, 429}
    admitted = statuses[200]
    while (await agent.check(subject("/all"))).status_code == 200:
        admitted += 1
    assert admitted == 40
    assert await booked(limited, agent) == {"team": 40, "person": 40, "key": 40}


async def test_a_denial_takes_nothing_anywhere(limited: World, agent: Agent) -> None:
    await has_all(agent, SUBJECT)
    assert (await agent.check(subject("/all"), cost=30)).status_code == 200
    for _ in range(3):
        answer = await agent.check(subject("/all"), cost=11)
        assert told(answer) == (
            429,
            "person",
            None,
            [("team", True, 60, 30), ("person", False, 40, 10), ("key", True, 90, 60)],
        )
    assert (await agent.check(subject("/all"), cost=10)).status_code == 200
    assert await booked(limited, agent) == {"team": 40, "person": 40, "key": 40}


class RateLimitCall:
    """A call of Envoy's protocol without a connection."""

    has_disconnected = False
    metadata: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        self.response: asyncio.Future[RateLimitResponse] = asyncio.get_running_loop().create_future()

    def respond(self, message: bytes) -> None:
        self.response.set_result(RateLimitResponse.FromString(message))

    def fail(self, error: GrpcError) -> None:
        self.response.set_exception(error)


@pytest.mark.extended
async def test_descriptors_in_several_cells_are_admitted_together_or_not_at_all(limited: World, agent: Agent) -> None:
    await has_all(agent, SUBJECT)
    team, key = {"path": "/team", "tenant": "acme"}, {"path": "/key", "api_key": "k-1"}
    assert cell_of("team:tenant=acme") != cell_of("key:api_key=k-1")
    service = RateLimitService(agent.whole.admission)

    async def ask(hits: int) -> list[tuple[int, str, int]]:
        call, descriptors = RateLimitCall(), [descriptor(team), descriptor(key)]
        request = RateLimitRequest(domain="edge", descriptors=descriptors, hits_addend=hits)
        service.should_rate_limit(request.SerializeToString(), call)
        statuses = (await call.response).statuses
        return [(each.code, each.current_limit.name, each.limit_remaining) for each in statuses]

    assert await ask(50) == [(1, "team-alone", 10), (1, "key-alone", 40)]
    assert await ask(11) == [(2, "team-alone", 10), (1, "key-alone", 40)]
    assert await ask(10) == [(1, "team-alone", 0), (1, "key-alone", 30)]
    assert await booked(limited, agent) == {"team": 60, "person": 0, "key": 60}


async def test_an_operation_over_several_cells_is_charged_once(limited: World, agent: Agent) -> None:
    await ready(agent, subject("/all"), units=40)
    told_at_once = await asyncio.gather(*(agent.check(subject("/all"), cost=5, operation_id="o-1") for _ in range(8)))
    again = await agent.check(subject("/all"), cost=5, operation_id="o-1")
    assert {answer.status_code for answer in (*told_at_once, again)} == {200}
    assert (await agent.check(subject("/all"), cost=35)).status_code == 200
    assert (await agent.check(subject("/all"))).status_code == 429
    assert (await agent.check(subject("/all"), cost=5, operation_id="o-1")).status_code == 200, "though nothing is left"
    other_body = await agent.check(subject("/all"), cost=6, operation_id="o-1")
    assert (other_body.status_code, other_body.json()["type"]) == (422, "/problems/operation-conflict")
    assert await booked(limited, agent) == {"team": 40, "person": 40, "key": 40}


async def test_an_operation_of_a_dead_agent_continues_where_it_stopped(
    limited: World, agent: Agent, nodes: Nodes
) -> None:
    """The held units wait for the operation: any agent that gets it again spends them, and no other request."""
    await ready(agent, subject("/all"), units=40)
    last = agent.whole.cells[cells_of(SUBJECT)[1]]
    spends = last.scripts.update_hold

    async def dies(*_: Any) -> HoldState:
        raise StoreUnavailable("the agent dies here")

    last.scripts.update_hold = dies  # type: ignore[method-assign, assignment]
    answer = await agent.check(subject("/all"), cost=5, operation_id="o-1")
    assert (answer.status_code, answer.json()["degraded"]) == (503, "closed"), "nobody is told that it was admitted"
    last.scripts.update_hold = spends  # type: ignore[method-assign]
    other = await limited.agent(store_url=nodes.url)
    for each in (other, agent, other):
        assert (await each.check(subject("/all"), cost=5, operation_id="o-1")).status_code == 200
    assert await booked(limited, agent) == {"team": 5, "person": 5, "key": 5}


async def dies_before_the_last_cell_spends(agent: Agent) -> Cell:
    """Record an operation, and let its agent die before one of its cells has spent its hold."""
    last = agent.whole.cells[cells_of(SUBJECT)[1]]
    spends = last.scripts.update_hold

    async def dies(*_: Any) -> HoldState:
        raise StoreUnavailable("the agent dies here")

    last.scripts.update_hold = dies  # type: ignore[method-assign, assignment]
    assert (await agent.check(subject("/all"), cost=5, operation_id="o-1")).status_code == 503
    last.scripts.update_hold = spends  # type: ignore[method-assign]
    return last


@pytest.mark.extended
async def test_an_operation_of_a_dead_agent_can_be_repeated_after_its_hold_expired(
    limited: World, agent: Agent
) -> None:
    """It is charged only in the cells that have not spent it, and once."""
    await ready(agent, subject("/all"), units=40)
    await dies_before_the_last_cell_spends(agent)
    for number in cells_of(SUBJECT):
        await agent.whole.cells[number].store.call("HINCRBY", f"lh:{{{number}}}:fence", "mono", 60_001_000)
    await ready(agent, subject("/all"), units=35)
    for _ in range(3):
        answer = await agent.check(subject("/all"), cost=5, operation_id="o-1")
        assert answer.status_code == 200, answer.text
    assert await booked(limited, agent) == {"team": 5, "person": 5, "key": 5}


@pytest.mark.extended
async def test_a_cell_that_lost_an_operation_is_charged_again(limited: World, agent: Agent) -> None:
    """A missing record is no proof that it was spent."""
    await ready(agent, subject("/all"), units=40)
    last = await dies_before_the_last_cell_spends(agent)
    lost = [name for name in await names_of(last) if b":holds:" in name or b":hold_deadlines:" in name]
    assert lost
    await last.store.call("DEL", *lost)
    for _ in range(3):
        answer = await agent.check(subject("/all"), cost=5, operation_id="o-1")
        assert answer.status_code == 200, answer.text
    assert await booked(limited, agent) == {"team": 5, "person": 5, "key": 5}


@pytest.mark.extended
async def test_an_operation_whose_record_vanishes_after_reading_is_charged_everywhere(
    limited: World, agent: Agent
) -> None:
    await ready(agent, subject("/all"), units=40)
    await dies_before_the_last_cell_spends(agent)
    cells = [agent.whole.cells[number] for number in cells_of(SUBJECT)]
    [home] = [cell for cell in cells if any(b":op:" in name for name in await names_of(cell))]
    [record] = [name for name in await names_of(home) if b":op:" in name]
    finds = home.find_operation

    async def vanishes(operation: Any) -> Any:
        known = await finds(operation)
        await home.store.call("DEL", record)
        return known

    home.find_operation = vanishes  # type: ignore[method-assign]
    assert (await agent.check(subject("/all"), cost=5, operation_id="o-1")).status_code == 200
    assert await booked(limited, agent) == {"team": 5, "person": 5, "key": 5}


async def names_of(cell: Cell) -> list[bytes]:
    return [name for name in await cell.store.call("KEYS", "*") if b"{%d}" % (cell.number or 0) in name]


@pytest.mark.extended
async def test_holds_of_a_dead_agent_are_freed(limited: World, agent: Agent) -> None:
    await ready(agent, subject("/all"), units=40)
    cells = [agent.whole.cells[number] for number in cells_of(SUBJECT)]
    real = [cell.scripts.update_hold for cell in cells]

    async def dies(*_: Any) -> HoldState:
        raise StoreUnavailable("the agent dies here")

    for cell in cells:
        cell.scripts.update_hold = dies  # type: ignore[method-assign, assignment]
    assert (await agent.check(subject("/all"), cost=30)).status_code == 503
    for cell, tell in zip(cells, real, strict=True):
        cell.scripts.update_hold = tell  # type: ignore[method-assign]
    assert (await agent.check(subject("/all"), cost=30)).status_code == 429
    for cell in cells:
        await cell.store.call("HINCRBY", f"lh:{{{cell.number}}}:fence", "mono", 60_001_000)
    await ready(agent, subject("/all"), units=40)
    assert (await agent.check(subject("/all"), cost=40)).status_code == 200
    assert await booked(limited, agent) == {"team": 40, "person": 40, "key": 40}


@pytest.mark.extended
async def test_a_flood_denied_by_one_policy_uses_no_window_of_another(agent: Agent) -> None:
    """A window could not take the units back."""
    bob = await agent.check(subject("/rates", user="bob"), cost=8)
    assert told(bob)[3] == [("fast", True, 30, 2), ("steady", True, 25, 0)]
    for _ in range(20):
        denied = await agent.check(subject("/rates"), cost=3)
        assert told(denied)[3] == [("fast", False, 30, 2), ("steady", True, 25, 8)]


@pytest.mark.extended
async def test_a_hold_over_cells_reserves_and_commits_by_quota(world: World, agent: Agent) -> None:
    own = next(
        each
        for number in range(100)
        if len(set(cells_of(each := subject("/all", user=f"u-{number}", api_key=f"k-{number}")))) == 3
    )
    await ready(agent, own, units=9)
    body = {"subject": own, "units": 1, "costs": {"person": 9, "key": 5}, "ttl_ms": 60_000, "operation_id": "by quota"}
    made = await agent.http.post("/v1/holds", json=body)
    assert made.status_code == 201, made.text
    commit = f"/v1/holds/{made.json()['hold_id']}:commit"
    refused = await agent.http.post(commit, json={"costs": {"wide": 1}})
    assert refused.json()["invalid_parameters"][0]["field"] == "costs.wide"
    for _ in range(2):
        done = (await agent.http.post(commit, json={"costs": {"person": 4}})).json()
        quotas = {each["quota"]: (each["units"], each["committed"]) for each in done["quotas"]}
        assert quotas == {"team": (1, 1), "person": (9, 4), "key": (5, 5)}
    assert await booked(world, agent) == {"team": 1, "person": 4, "key": 5}


@pytest.mark.extended
async def test_a_refund_over_cells_is_given_once_and_a_reset_reaches_its_cell(world: World, agent: Agent) -> None:
    assert told(await agent.check(subject("/rates"), cost=5))[3] == [("fast", True, 30, 5), ("steady", True, 25, 3)]
    for _ in range(2):
        answer = await agent.check(subject("/rates"), cost=3, mode="refund", operation_id="back")
        assert told(answer)[3] == [("fast", True, 30, 8), ("steady", True, 25, 6)]
    reset = {"quota": "window", "subject": {"user": "ann"}, "reason": "called"}
    assert (await world.admin.post("/v1/resets", json=reset)).status_code == 201
    async for _ in attempts():
        if told(peek := await agent.check(subject("/rates"), mode="peek"))[3][1] == ("steady", True, 25, 8):
            break
    assert told(peek)[3] == [("fast", True, 30, 8), ("steady", True, 25, 8)]


class IgnoredVerdict:
    has_disconnected = False
    trace_context = None

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        assert isinstance(verdict, Verdict)


@pytest.mark.extended
async def test_a_check_denied_between_peek_and_hold_returns_units_to_the_bucket(agent: Agent) -> None:
    """Another request spends the window after the peek, and before the hold."""
    peek = (await agent.check(subject("/rates"), mode="peek")).json()
    full = next(each["share"] for each in peek["policies"] if each["policy"] == "fast")
    bucket, window = (agent.whole.cells[cell_of(key)] for key in ("bucket:tenant=acme", "window:user=ann"))
    ask, asked = window.admission.decide_in_store, 0

    def late(plan: CheckPlan, caller: Caller) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            spent = StoreRequest("enforce", plan.request.charges)
            ask(replace(plan, request=spent, hold_ms=None, is_subrequest=False), IgnoredVerdict(), times=25)
        ask(plan, caller)

    window.admission.decide_in_store = late  # type: ignore[method-assign, assignment]
    answer = await agent.check(subject("/rates"))
    assert asked == 2, "it was asked, and then told to set aside"
    assert told(answer)[:2] == (429, "steady")
    window.admission.decide_in_store = ask  # type: ignore[method-assign]
    await until(lambda: bucket.breaker.calls >= 3)
    told_later = {
        each["policy"]: each["remaining"] for each in (await agent.check(subject("/rates"))).json()["policies"]
    }
    assert told_later == {"fast": full, "steady": 0}


async def test_a_hold_over_several_cells_is_one_hold(limited: World, agent: Agent) -> None:
    await ready(agent, subject("/all"), units=40)
    body = {"subject": subject("/all"), "units": 7, "ttl_ms": 60_000, "operation_id": "h-1"}
    made = [await agent.http.post("/v1/holds", json=body) for _ in range(2)]
    assert [answer.status_code for answer in made] == [201, 201]
    first, again = (answer.json() for answer in made)
    assert first["hold_id"] == again["hold_id"]
    assert len(agent.whole.holds.seal.open(first["hold_id"]).by_cell) == 3
    path = f"/v1/holds/{first['hold_id']}"
    assert (await agent.http.get(path)).json()["state"] == "open"
    assert (await agent.check(subject("/all"), cost=34)).status_code == 429, "it is set aside in all of them"
    extended = await agent.http.post(f"{path}:extend", json={"ttl_ms": 120_000})
    assert extended.json()["expires_in_ms"] > 100_000
    for _ in range(2):
        committed = await agent.http.post(f"{path}:commit", json={"units": 9})
        assert (committed.status_code, committed.json()["committed"]) == (200, 9)
    assert (await agent.http.post(f"{path}:release")).status_code == 409
    assert await booked(limited, agent) == {"team": 9, "person": 9, "key": 9}


@pytest.mark.extended
async def test_a_slot_in_another_cell_comes_back_with_its_hold(agent: Agent) -> None:
    await ready(agent, subject("/all"), units=40)
    bodies = [
        {"subject": subject("/work"), "units": 2, "ttl_ms": 60_000, "operation_id": f"w-{number}"}
        for number in range(7)
    ]
    held = [await agent.http.post("/v1/holds", json=body) for body in bodies]
    assert [answer.status_code for answer in held] == [201] * 6 + [429]
    assert held[-1].json()["denied_by"] == "work"
    hold_id = held[0].json()["hold_id"]
    assert (await agent.http.post(f"/v1/holds/{hold_id}:release")).json()["state"] == "released"
    assert (await agent.http.post("/v1/holds", json=bodies[-1])).status_code == 201


@pytest.mark.extended
async def test_an_adjustment_is_booked_in_all_cells_whatever_is_left_as_in_a_single_store(
    limited: World, agent: Agent
) -> None:
    single = await limited.agent("eu-west")
    asked = (agent, SUBJECT), (single, {"tenant": "other", "user": "otto", "api_key": "k-2"})
    for each, own in asked:
        await has_all(each, own)
    for route, cost in (("/all", 30), ("/all", 70), ("/rates", 12), ("/mixed", 2), ("/all", 1)):
        adjusted = [
            told(await each.check({**own, "route": route}, cost=cost, mode="adjust", operation_id=f"{route}-{cost}"))
            for each, own in asked
            for _ in range(2)
        ]
        assert adjusted[0][0] == 200
        assert adjusted[0] == adjusted[2], "the second time it is told as it is by then"
        denied = [told(await each.check({**own, "route": "/all"}))[0] for each, own in asked]
        assert denied[0] == denied[1] == (200 if cost == 30 else 429)
    assert await booked(limited, agent) == {"team": 208, "person": 204, "key": 204}


async def test_an_adjustment_that_one_cell_cannot_book_is_booked_in_none(limited: World, agent: Agent) -> None:
    """The cell has no lease yet, and the window of the other could not take the units back."""
    limited.weather.swallows_requests = True
    answer = await agent.check(subject("/counted"), cost=3, mode="adjust")
    assert (answer.status_code, answer.json()["denied_by"]) == (429, "counted-team")
    limited.weather.swallows_requests = False
    await ready(agent, subject("/counted"))
    peek = (await agent.check(subject("/counted"), mode="peek")).json()
    counted = next(each for each in peek["policies"] if each["policy"] == "counted")
    assert counted["remaining"] == counted["share"] == 8
    assert (await agent.check(subject("/counted"), cost=10, mode="adjust")).status_code == 200
    assert told(await agent.check(subject("/counted")))[:2] == (429, "counted")


@pytest.mark.extended
async def test_an_adjustment_of_a_dead_agent_continues_where_it_stopped(
    limited: World, agent: Agent, nodes: Nodes
) -> None:
    await ready(agent, subject("/all"), units=40)
    last = agent.whole.cells[cells_of(SUBJECT)[1]]
    spends = last.scripts.update_hold

    async def dies(*_: Any) -> HoldState:
        raise StoreUnavailable("the agent dies here")

    last.scripts.update_hold = dies  # type: ignore[method-assign, assignment]
    body = {"cost": 100, "mode": "adjust", "operation_id": "a-1"}
    assert (await agent.check(subject("/all"), **body)).status_code == 503
    last.scripts.update_hold = spends  # type: ignore[method-assign]
    other = await limited.agent(store_url=nodes.url)
    for each in (other, agent):
        assert (await each.check(subject("/all"), **body)).status_code == 200
    assert await booked(limited, agent) == {"team": 100, "person": 100, "key": 100}


@pytest.mark.extended
async def test_each_cell_is_called_three_times_and_once_to_be_denied(agent: Agent) -> None:
    """Each cell is called to peek, hold and spend; a script reaches one slot, so a shard's cells
    are called one by one.
    """
    await has_all(agent, SUBJECT)
    cells = [agent.whole.cells[number] for number in cells_of(SUBJECT)]
    told: Counter[str] = Counter()

    def counted(run: Any) -> Any:
        async def update_hold(*of: Any) -> HoldState:
            told["told"] += 1
            state: HoldState = await run(*of)
            return state

        return update_hold

    for cell in cells:
        cell.scripts.update_hold = counted(cell.scripts.update_hold)  # type: ignore[method-assign]
    for cost, status, asked, spent in ((1, 200, 2, 3), (50, 429, 1, 0)):
        before, told["told"] = [cell.breaker.calls for cell in cells], 0
        assert (await agent.check(subject("/all"), cost=cost)).status_code == status
        assert [cell.breaker.calls for cell in cells] == [each + asked for each in before]
        assert told["told"] == spent


@pytest.mark.extended
async def test_metrics_count_each_policy_once(agent: Agent) -> None:
    await ready(agent, subject("/all"), units=40)
    before = agent.region.metrics.checks.counts["allowed"]["person", ""]
    assert (await agent.check(subject("/all"))).status_code == 200
    assert agent.region.metrics.checks.counts["allowed"]["person", ""] == before + 1


@pytest.mark.extended
@pytest.mark.parametrize(("route", "limit"), [("/wide", 10_000), ("/all", 40)])
async def test_a_shard_killed_during_requests_neither_loses_nor_oversells_units(
    limited: World, tmp_path: Path, route: str, limit: int
) -> None:
    """Every client repeats its operation until it is answered. Each admission is booked in all cells, once."""
    with a_cluster(tmp_path, appendfsync="always") as nodes:
        agent = await limited.agent(store_url=nodes.url)
        asked = subject(route)
        victim = nodes.of_cell(cells_of(SUBJECT)[1])
        await ready(agent, asked, units=min(limit, 50))
        answers: Counter[int] = Counter()
        told_closed: set[str] = set()

        async def client(operation: str) -> int:
            async for _ in attempts():
                status = (await agent.check(asked, operation_id=operation)).status_code
                answers[status] += 1
                if status != 503:
                    return status
                told_closed.add(operation)
            return 503

        async def killer() -> None:
            await until(lambda: answers[200] >= 10)
            victim.kill()
            await until(lambda: answers[503] >= 10)
            await asyncio.to_thread(victim.start)

        killing = asyncio.create_task(killer())
        ended: Counter[int] = Counter()
        for turn in range(20):  # ten at a time, so that some are always in progress
            ended.update(await asyncio.gather(*(client(f"o-{turn}-{number}") for number in range(10))))
        await killing
        assert told_closed
        assert ended[200] + ended[429] + ended[503] == 200
        await until(lambda: agent.whole.has_epochs)
        by_key = [await usage_of(limited, agent, quota) for quota in quotas_of(asked)]
        assert all(ended[200] <= units <= ended[200] + ended[503] + len(told_closed) for units in by_key), (
            ended,
            by_key,
        )
        assert max(by_key) <= limit
        assert ended[200] >= (150 if limit > 200 else 10)
        await limited.agents.aclose()


def quotas_of(asked: dict[str, str]) -> list[str]:
    name = {"/wide": ["wide"] * 3}.get(asked["route"], list(ALLOWANCES))
    fields = ("tenant", "user", "api_key")
    return [f"{quota}:{field}={asked[field]}" for quota, field in zip(name, fields, strict=True)]


async def usage_of(world: World, agent: Agent, key: str) -> int:
    """Return what the ledger has of it once everything is reported."""
    await booked(world, agent)
    rows = await world._rows("SELECT coalesce(sum(consumed), 0)::bigint AS units FROM lease WHERE quota = $1", key)
    return int(rows[0]["units"])


# --- central quotas ---------------------------------------------------------------------------------------------------

SCARCEST = 12
CENTRAL = {
    **DOCUMENT,
    "quotas": [
        {"name": name, "kind": "allowance", "limit": limit, "period": "month", "mode": "central"}
        for name, limit in (("team", SCARCEST + 9), ("person", SCARCEST), ("key", SCARCEST + 30))
    ],
    "policies": [
        {"name": name, "match": {"route": "/all"}, "by": [field], "quota": name, "wait": "10s"}
        for name, field in (("team", "tenant"), ("person", "user"), ("key", "api_key"))
    ],
}


async def until_nothing_is_held(world: World, consumed: int) -> None:
    found: list[dict[str, Any]] = []
    async for _ in attempts():
        found = (await world.admin.get("/v1/allocations")).json()["data"]
        if [(each["consumed"], each["outstanding"]) for each in found] == [(consumed, 0)] * len(ALLOWANCES):
            return
    raise AssertionError(found)


async def answered(agent: Agent) -> int:
    """Repeat a check where the coordinator took too long, on a busy machine: then nothing was consumed."""
    async for _ in attempts():
        if (status := (await agent.check(subject("/all"))).status_code) != 503:
            return status
    raise AssertionError("the coordinator never answers")


@pytest.mark.extended
async def test_central_quotas_in_several_cells_are_spent_to_the_scarcest_limit(world: World, nodes: Nodes) -> None:
    """One region's three quotas lie in three cells, another's in one store; no region keeps unspent units."""
    assert len(set(cells_of(SUBJECT))) == len(ALLOWANCES)
    assert (await world.admin.put("/v1/limits", json=CENTRAL)).is_success
    several, single = await world.agent("us-east", store_url=nodes.url), await world.agent("ap-south")

    async def spend(agent: Agent, times: int) -> list[int]:
        return [await answered(agent) for _ in range(times)]

    first = [await answered(agent) for agent in (several, single)]
    crowd = await asyncio.gather(*(spend(agent, 4) for agent in (several, single) for _ in range(3)))
    answers = Counter([*first, *(status for each in crowd for status in each)])
    assert set(answers) == {200, 429}
    assert answers[200] <= SCARCEST
    await until_nothing_is_held(world, answers[200])
    left = SCARCEST - answers[200]
    assert await spend(several, left + 2) == [200] * left + [429] * 2, "who was denied too early left it for others"
    assert await spend(single, 2) == [429] * 2
    await until_nothing_is_held(world, SCARCEST)
    await world.agents.aclose()
