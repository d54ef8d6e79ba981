"""People move units from region to region: planned, recalled, returned, granted again, and stopped at each step."""

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest

from coordinator.access.rules.audit import Actor
from coordinator.database.connection import Connection
from coordinator.exchange.expire_leases import expire_leases
from coordinator.limits.in_force import Documents
from coordinator.rebalancing.follow import follow
from coordinator.rebalancing.holds import end_holds
from coordinator.rebalancing.rebalance import RebalanceRequest, begin_rebalance
from coordinator.rebalancing.refusals import NewerRebalances, NothingToMove
from coordinator.rebalancing.schemas import MoveUnits, Rebalance, RegionSettingPatch, Weigh
from coordinator.signals import SignalSubscription
from protocol.messages import Signal
from protocol.outcomes import GrantRefusal
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import (
    EXPORTS,
    PERIOD,
    Agent,
    AgentHarness,
    lease,
    leased,
    want,
)
from tests.integration.coordinator.fixtures import connected, put_off
from tests.integration.coordinator.interleaving import (
    Step,
    closes,
    committed,
    one_after_the_other,
    says,
)

pytestmark = pytest.mark.anyio

EAST_TO_SOUTH = {"mode": "move", "quota": EXPORTS, "from": "us-east", "to": "ap-south", "units": 300}

MOVE = {"mode": "move", "quota": EXPORTS, "from": "us-east", "to": "ap-south", "units": 300}


class Ops:
    """An operator who moves allowances."""

    def __init__(self, agent_harness: AgentHarness, client: httpx.AsyncClient) -> None:
        self.agent_harness, self.client = agent_harness, client

    async def asks(self, wish: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.client.post("/v1/rebalances", json=wish, headers=headers)

    async def plans(self, wish: dict[str, Any]) -> dict[str, Any]:
        answer = await self.asks(wish | {"dry_run": True})
        assert answer.status_code == 200, answer.text
        planned: dict[str, Any] = answer.json()
        assert (planned["id"], planned["state"]) == (None, "planned")
        return planned

    async def begins(self, wish: dict[str, Any]) -> dict[str, Any]:
        answer = await self.asks(wish)
        assert answer.status_code == 201, answer.text
        begun: dict[str, Any] = answer.json()
        return begun

    async def follows(self, id_: str) -> dict[str, Any]:
        """Advance rebalances, as any coordinator does every second."""
        async with connected(restricted(self.agent_harness.url)) as connection, connection.transaction():
            await follow(connection, Documents(), UUID(id_), self.agent_harness.clock.now())
        return await self.sees(id_)

    async def sees(self, id_: str) -> dict[str, Any]:
        answer = await self.client.get(f"/v1/rebalances/{id_}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def cancels(self, id_: str) -> dict[str, Any]:
        answer = await self.client.post(f"/v1/rebalances/{id_}:cancel", json={})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def allocation(self, **params: str) -> dict[str, Any]:
        [found] = (await self.client.get("/v1/allocations", params=params)).json()["data"]
        return {**found, "regions": {each["region"]: each for each in found["regions"]}}


@pytest.fixture
async def ops(agent_harness: AgentHarness) -> Ops:
    """Stop background jobs, which the test runs itself."""
    await put_off(agent_harness.owner, "follow_rebalances")
    return Ops(agent_harness, await agent_harness.client("alloc:write", "quota:read"))


@pytest.fixture
async def east(agent_harness: AgentHarness) -> Agent:
    """A region that holds half of the limit, and has spent 50."""
    east = await agent_harness.agent("us-east")
    await east.say(1, demands=[want(waiting=500)])
    await east.say(2, lease(granted=500, consumed=50))
    return east


@pytest.fixture
async def south(agent_harness: AgentHarness) -> Agent:
    south = await agent_harness.agent("ap-south")
    await south.say(1, demands=[want(waiting=10)])
    return south


def progress(found: dict[str, Any]) -> tuple[str, int, int, int]:
    return (found["state"], *(found["progress"][name] for name in ("recalled", "returned", "regranted")))


def spread(spreads: list[dict[str, Any]]) -> dict[str, int]:
    [found] = spreads
    return {held["region"]: held["outstanding"] for held in found["regions"]}


async def test_a_plan_shows_before_and_after_and_changes_nothing(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    planned = await ops.plans(EAST_TO_SOUTH)
    assert spread(planned["plan"]["before"]) == {"us-east": 450, "ap-south": 10}
    assert spread(planned["plan"]["after"]) == {"us-east": 150, "ap-south": 310}
    assert planned["plan"]["cannot"] == []
    assert (await ops.client.get("/v1/rebalances")).json()["data"] == []
    assert (await agent_harness.pool())["open_moves"] == 0


async def test_units_go_from_one_region_to_another_and_to_no_other(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    west = await agent_harness.agent("eu-west")
    with agent_harness.hub.subscribe("us-east") as east_hears, agent_harness.hub.subscribe("ap-south") as south_hears:
        begun = await ops.begins(EAST_TO_SOUTH)
        assert progress(begun) == ("running", 300, 0, 0)
        assert [(each["region"], each["what"], each["units"]) for each in begun["waits_for"]] == [
            ("us-east", "return", 300)
        ]
        assert await east_hears.take(10) == [Signal(kind="recall", quota=EXPORTS, keep=150)]
        await east.say(3, lease(granted=500, consumed=60, returned=290, units=10))
        assert Signal(kind="fetch", quota=EXPORTS) in (await south_hears.take(10) or ())
    assert progress(await ops.sees(begun["id"])) == ("running", 300, 290, 0)
    await west.say(1, demands=[want(waiting=1000)])
    assert (await agent_harness.lease(west))["granted"] == 490  # all but the units in transit
    refused = leased(await west.say(2, lease(granted=490, consumed=490), demands=[want(waiting=5)]))
    assert (refused.granted, refused.refusal) == (490, None)  # other regions hold idle units, which are recalled
    assert (await ops.allocation())["in_transit"] == 290
    assert leased(await south.say(2, demands=[want()])).granted == 300
    found = await ops.follows(begun["id"])
    assert progress(found) == ("running", 300, 290, 290)
    await east.say(4, lease(granted=500, consumed=60, returned=300, units=0))
    await south.say(3, lease(granted=300), demands=[want()])
    found = await ops.follows(begun["id"])
    assert progress(found) == ("done", 300, 300, 300)
    assert (found["reason"], found["waits_for"]) == (None, [])
    assert (await agent_harness.pool())["open_moves"] == 0


async def test_a_plan_that_cannot_be_met_is_done_in_part(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    planned = await ops.plans(EAST_TO_SOUTH | {"units": 800})
    cannot = [(each["what"], each["region"], each["units"]) for each in planned["plan"]["cannot"]]
    assert cannot == [("spent", "us-east", 350)]
    assert [move["units"] for move in planned["plan"]["moves"]] == [450]
    await east.say(3, lease(granted=500, consumed=500, units=450))
    answer = await ops.asks(EAST_TO_SOUTH)
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/rebalance-impossible")
    assert [(each["what"], each["units"]) for each in answer.json()["cannot"]] == [("spent", 300)]
    assert (await ops.client.get("/v1/rebalances")).json()["data"] == []


@pytest.mark.extended
async def test_a_move_whose_source_spends_meanwhile_ends_with_the_reason(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    begun = await ops.begins(EAST_TO_SOUTH)
    agent_harness.clock.move(seconds=1)
    await east.say(3, lease(granted=500, consumed=400, returned=100, units=350))
    assert leased(await south.say(2, demands=[want()])).granted == 110
    found = await ops.follows(begun["id"])
    assert (*progress(found), found["reason"]) == ("partial", 300, 100, 100, "spent")
    assert found["moves"][0]["reason"] == "spent"


@pytest.mark.parametrize("returned", [0, 120, 300])
async def test_cancelled_at_any_step_nothing_is_lost(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent, returned: int
) -> None:
    begun = await ops.begins(EAST_TO_SOUTH)
    if returned:
        await east.say(3, lease(granted=500, consumed=50, returned=returned, units=0))
    found = await ops.cancels(begun["id"])
    assert progress(found) == ("cancelled", 300, returned, 0)
    assert progress(await ops.cancels(begun["id"])) == progress(found)
    west = await agent_harness.agent("eu-west")
    assert leased(await west.say(1, demands=[want(waiting=1000)])).granted == 490 + returned
    assert (await agent_harness.pool())["open_moves"] == 0


async def test_a_rebalance_with_the_same_key_begins_once(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    headers = {"Idempotency-Key": "at three"}
    first, again = [await ops.asks(EAST_TO_SOUTH, **headers) for _ in range(2)]
    assert (first.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert await agent_harness.one("SELECT count(*) FROM rebalance_move") == 1
    other = await ops.asks(EAST_TO_SOUTH | {"units": 1}, **headers)
    assert other.status_code == 422


async def test_a_repeated_attempt_without_a_stored_response_begins_nothing(
    agent_harness: AgentHarness, east: Agent, south: Agent
) -> None:
    asked = MoveUnits.model_validate(MOVE)
    wish = RebalanceRequest(UUID(int=5), asked, Actor("somebody"), lambda _: True)
    first, again = [
        await committed(agent_harness, lambda c: begin_rebalance(c, Documents(), wish, agent_harness.clock.now()))
        for _ in range(2)
    ]
    assert isinstance(first, Rebalance)
    assert first == again
    assert await agent_harness.one("SELECT count(*) FROM rebalance_move") == 1


async def test_the_second_of_two_operators_gets_the_changes(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    answer = await ops.asks(EAST_TO_SOUTH | {"dry_run": True})
    seen = answer.headers["ETag"]
    begun = await ops.begins(EAST_TO_SOUTH | {"units": 40})
    late = await ops.asks(EAST_TO_SOUTH, **{"If-Match": seen})
    assert (late.status_code, late.json()["type"]) == (412, "/problems/precondition-failed")
    [changed] = late.json()["changed"]
    assert (changed["id"], changed["mode"], changed["request"]["units"]) == (begun["id"], "move", 40)
    busy = await ops.asks(EAST_TO_SOUTH)
    assert (busy.status_code, busy.json()["rebalance"]) == (409, begun["id"])
    again = await ops.asks(EAST_TO_SOUTH, **{"If-Match": f'"rebalance-{begun["version"]}"'})
    assert again.status_code == 409  # its plan includes the other, which still runs


async def test_two_operators_at_once_never_begin_both(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    answers = await asyncio.gather(*(ops.asks(EAST_TO_SOUTH) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
    assert await agent_harness.one("SELECT sum(units) FROM rebalance_move") == 300


async def test_the_basis_of_a_plan_is_compared_under_the_lock(
    agent_harness: AgentHarness, east: Agent, south: Agent
) -> None:
    """Both operators have seen that no rebalance was running."""

    def begins(number: int, region: str) -> Step[Any]:
        asked = Weigh(mode="weigh", quota=EXPORTS, settings={region: RegionSettingPatch(weight=2)})
        wish = RebalanceRequest(UUID(int=number), asked, Actor("somebody"), lambda version: version == 0)
        return lambda connection: begin_rebalance(connection, Documents(), wish, agent_harness.clock.now())

    first, second = await one_after_the_other(agent_harness, begins(1, "us-east"), begins(2, "ap-south"))
    assert isinstance(first, Rebalance)
    assert isinstance(second, NewerRebalances)
    assert [each.id for each in second.since] == [first.id]
    assert await agent_harness.one("SELECT count(*) FROM region_setting") == 1


async def test_everything_is_in_the_audit(agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent) -> None:
    begun = await ops.begins(EAST_TO_SOUTH | {"reason": "their launch"})
    await ops.cancels(begun["id"])
    deeds = await agent_harness.owner.fetch(
        "SELECT action, details::text FROM audit WHERE object = $1 ORDER BY id", begun["id"]
    )
    assert [deed["action"] for deed in deeds] == ["rebalance.begun", "rebalance.cancelled"]
    assert '"their launch"' in deeds[0]["details"]


@pytest.mark.parametrize(
    ("wish", "fault"),
    [
        ({"quota": "faxes:tenant=acme"}, ("quota", "known")),
        ({"quota": "api:tenant=acme"}, ("quota", "allowance")),
        ({"quota": "exports:tenant"}, ("quota", "format")),
        ({"from": "mars"}, ("from", "known")),
        ({"to": "mars"}, ("to", "known")),
        ({"to": "us-east"}, ("to", "elsewhere")),
        ({"units": 0}, ("units", "minimum")),
        ({"mode": "teleport"}, ("mode", "enum")),
        ({"region": "us-east"}, ("region", "unknown")),
    ],
)
async def test_invalid_rebalances_are_refused_by_name(
    ops: Ops, east: Agent, south: Agent, wish: dict[str, Any], fault: tuple[str, str]
) -> None:
    answer = await ops.asks(EAST_TO_SOUTH | wish)
    assert answer.status_code == 422, answer.text
    [found] = answer.json()["invalid_parameters"]
    assert (found["field"], found["rule"]) == fault


async def test_an_unknown_allowance_is_not_found(ops: Ops, east: Agent, south: Agent) -> None:
    assert (await ops.asks(EAST_TO_SOUTH | {"quota": "exports:tenant=nobody"})).status_code == 404
    assert (await ops.client.get("/v1/rebalances/nonsense")).status_code == 404
    assert (await ops.client.post(f"/v1/rebalances/{UUID(int=7)}:cancel", json={})).status_code == 404


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.extended
async def test_a_silent_region_is_waited_for_and_shown(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    begun = await ops.begins(EAST_TO_SOUTH)
    await east.say(3, lease(granted=500, consumed=50, returned=100, units=0))
    agent_harness.clock.move(seconds=40)
    found = await ops.follows(begun["id"])
    waits = [(each["region"], each["what"], each["units"]) for each in found["waits_for"]]
    assert (progress(found), waits) == (
        ("running", 300, 100, 0),
        [("us-east", "return", 200), ("ap-south", "fetch", 100)],
    )
    assert {each["last_seen_at"] for each in found["waits_for"]} == {"2026-11-18T12:00:00Z"}


@pytest.mark.extended
async def test_a_target_that_is_drained_gets_nothing_and_the_units_are_free(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    begun = await ops.begins(EAST_TO_SOUTH)
    await east.say(3, lease(granted=500, consumed=50, returned=100, units=0))
    await agent_harness.drain("ap-south")
    found = await ops.follows(begun["id"])
    assert (*progress(found), found["reason"]) == ("partial", 300, 100, 0, "not_active")
    west = await agent_harness.agent("eu-west")
    assert leased(await west.say(1, demands=[want(waiting=1000)])).granted == 590


@pytest.mark.extended
async def test_a_rebalance_ends_with_its_period(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    begun = await ops.begins(EAST_TO_SOUTH)
    agent_harness.clock.time = agent_harness.clock.time.replace(month=12, day=1)
    found = await ops.follows(begun["id"])
    assert (*progress(found), found["reason"]) == ("partial", 300, 0, 0, "period_over")


@pytest.mark.extended
async def test_a_close_and_a_rebalance_at_the_same_moment(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    """The close comes first, and the rebalance finds the period closed; its row is not changed any more."""
    begun = await ops.begins(EAST_TO_SOUTH)
    for agent, used in ((east, 450), (south, 10)):
        total = 500 if agent is east else 10
        await agent.say(3 if agent is east else 2, lease(granted=total, consumed=total, units=used))
    agent_harness.clock.time = agent_harness.clock.time.replace(month=12, day=1)

    async def follows(connection: Connection) -> None:
        await follow(connection, Documents(), UUID(begun["id"]), agent_harness.clock.now())

    await one_after_the_other(agent_harness, closes(agent_harness), follows)
    assert await agent_harness.one("SELECT state FROM period WHERE id = $1", PERIOD) == "closed"
    assert (await ops.sees(begun["id"]))["reason"] == "period_over"


@pytest.mark.extended
async def test_a_rebalance_that_begins_during_an_exchange_waits_for_it(
    agent_harness: AgentHarness, east: Agent, south: Agent
) -> None:
    asked = MoveUnits.model_validate(MOVE)
    wish = RebalanceRequest(UUID(int=5), asked, Actor("somebody"), lambda _: True)
    spends = says(agent_harness, east, 3, lease(granted=500, consumed=500, units=450))
    _, refused = await one_after_the_other(
        agent_harness, spends, lambda c: begin_rebalance(c, Documents(), wish, agent_harness.clock.now())
    )
    assert isinstance(refused, NothingToMove)


@pytest.mark.extended
async def test_an_exchange_during_the_beginning_of_a_rebalance_waits_and_counts(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    """The exchange is decided on the new state of the pool, so the units that it returns are the target's."""
    asked = MoveUnits.model_validate(MOVE)
    wish = RebalanceRequest(UUID(int=5), asked, Actor("somebody"), lambda _: True)

    async def begins(connection: Connection) -> Any:
        return await begin_rebalance(connection, Documents(), wish, agent_harness.clock.now())

    returns = says(agent_harness, east, 3, lease(granted=500, consumed=50, returned=300, units=0))
    await one_after_the_other(agent_harness, begins, returns)
    assert progress(await ops.sees(str(UUID(int=5)))) == ("running", 300, 300, 0)


# --- weights, floors, ceilings, pins ----------------------------------------------------------------------------------


def weighing(**settings: Any) -> dict[str, Any]:
    return {
        "mode": "weigh",
        "quota": EXPORTS,
        "settings": {name.replace("_", "-"): each for name, each in settings.items()},
    }


async def test_a_setting_is_shown_applies_at_once_and_can_be_removed(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    wish = weighing(ap_south={"pin": 200}, us_east={"weight": 3, "ceiling": 600})
    planned = await ops.plans(wish)
    assert planned["plan"]["settings_before"]["ap-south"] == {"weight": None, "floor": None, "ceiling": None}
    assert planned["plan"]["settings_after"]["ap-south"] == {"weight": None, "floor": 200, "ceiling": 200}
    begun = await ops.begins(wish)
    assert begun["state"] == "done"
    given = leased(await east.say(3, lease(granted=500, consumed=450, units=400), demands=[want(waiting=400)]))
    assert (given.granted, given.refusal) == (600, GrantRefusal.EXHAUSTED)
    assert leased(await south.say(2, demands=[want(waiting=400)])).granted == 200
    shown = (await ops.allocation())["regions"]
    assert {name: (each["weight"], each["floor"], each["ceiling"]) for name, each in shown.items()} == {
        "us-east": (3, None, 600),
        "ap-south": (1, 200, 200),
    }
    await ops.begins(weighing(us_east={"ceiling": None, "weight": None}))
    assert (
        leased(await east.say(4, lease(granted=600, consumed=450, units=0), demands=[want(waiting=400)])).granted == 800
    )
    assert await agent_harness.one("SELECT count(*) FROM region_setting") == 1


async def test_units_above_a_new_ceiling_are_returned(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    with agent_harness.hub.subscribe("us-east") as hears:
        begun = await ops.begins(weighing(us_east={"ceiling": 100}))
        assert progress(begun) == ("running", 400, 0, 0)
        assert Signal(kind="recall", quota=EXPORTS, keep=50) in (await hears.take(10) or ())
    await east.say(3, lease(granted=500, consumed=50, returned=400, units=0))
    assert progress(await ops.follows(begun["id"])) == ("done", 400, 400, 0)
    assert (await agent_harness.pool())["unallocated"] == 890


async def test_a_floor_is_filled_from_idle_units_of_other_regions(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    west = await agent_harness.agent("eu-west")
    await west.say(1, demands=[want(waiting=490)])
    begun = await ops.begins(weighing(ap_south={"floor": 160}))
    moves = [(each["from"], each["to"], each["units"]) for each in begun["moves"]]
    assert moves == [("eu-west", "ap-south", 150)]
    planned = await ops.plans(weighing(ap_south={"floor": 1000}))
    assert [(each["what"], each["region"]) for each in planned["plan"]["cannot"]] == [("spent", "ap-south")]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"mars": {"weight": 1}}, ("settings.mars", "known")),
        ({"us_east": {"floor": 600}, "ap_south": {"floor": 401}}, ("settings", "floors")),
        ({"us_east": {"floor": 6, "ceiling": 5}}, ("settings.us-east.floor", "ceiling")),
        ({"us_east": {"floor": 6, "pin": 5}}, ("settings.us-east.pin", "alone")),
        ({"us_east": {"floor": "5/second"}}, ("settings.us-east.floor", "units")),
        ({"us_east": {"weight": -1}}, ("settings.us-east.weight", "minimum")),
        ({"us_east": {"wieght": 1}}, ("settings.us-east.wieght", "unknown")),
    ],
)
async def test_an_invalid_setting_is_refused_by_name(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent, settings: dict[str, Any], fault: tuple[str, str]
) -> None:
    answer = await ops.asks(weighing(**settings))
    assert answer.status_code == 422, answer.text
    [found] = answer.json()["invalid_parameters"]
    assert (found["field"], found["rule"]) == fault
    assert await agent_harness.one("SELECT count(*) FROM region_setting") == 0


@pytest.mark.extended
async def test_a_rate_has_weights_floors_and_ceilings_too(agent_harness: AgentHarness, ops: Ops, east: Agent) -> None:
    wish = {"mode": "weigh", "quota": "api", "settings": {"us-east": {"weight": 2, "floor": "600/minute"}}}
    assert (await ops.begins(wish))["state"] == "done"
    assert await agent_harness.one("SELECT floor #>> '{}' FROM region_setting WHERE key = 'api:'") == "600/minute"


# --- evening out, draining, restoring ---------------------------------------------------------------------------------


async def test_idle_units_go_to_the_region_with_demand(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    await south.say(2, lease(granted=10), demands=[want(demand_milli=20_000)])
    begun = await ops.begins({"mode": "even_out", "quota": EXPORTS})
    assert [(each["from"], each["to"]) for each in begun["moves"]] == [("us-east", "ap-south")]
    assert spread(begun["plan"]["after"])["us-east"] == 0


async def test_a_region_is_drained_and_restored(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    with agent_harness.hub.subscribe("us-east") as hears:
        begun = await ops.begins({"mode": "drain", "region": "us-east"})
        assert progress(begun) == ("running", 450, 0, 0)
        found = await ops.follows(begun["id"])
        assert found["waits_for"][0]["units"] == 450
        heard = [signal for _ in range(3) for signal in await hears.take(1) or ()]
        assert Signal(kind="recall", quota=EXPORTS, keep=0) in heard
    refused = await east.say(3, lease(granted=500, consumed=60, returned=400, units=10), demands=[want(waiting=5)])
    assert [each.refusal for each in refused.refused] == [GrantRefusal.REGION_NOT_ACTIVE]
    assert progress(await ops.follows(begun["id"])) == ("running", 450, 410, 0)
    await east.say(4, lease(granted=500, consumed=100, returned=400, units=40))
    assert progress(await ops.follows(begun["id"])) == ("done", 450, 450, 0)
    assert (await ops.client.get("/v1/regions/us-east")).json()["status"] == "draining"
    again = await ops.asks({"mode": "drain", "region": "us-east"})
    assert (again.status_code, again.json()["invalid_parameters"][0]["rule"]) == (422, "active")
    assert (await ops.begins({"mode": "restore", "region": "us-east"}))["state"] == "done"
    assert (
        leased(
            await east.say(5, lease(granted=500, consumed=100, returned=400, units=0), demands=[want(waiting=5)])
        ).granted
        == 505
    )


@pytest.mark.extended
async def test_a_drain_of_a_silent_region_ends_when_its_lease_has_expired(
    agent_harness: AgentHarness, ops: Ops, east: Agent
) -> None:
    begun = await ops.begins({"mode": "drain", "region": "us-east"})
    agent_harness.clock.move(seconds=70)
    async with agent_harness.owner.transaction():
        await expire_leases(agent_harness.owner, agent_harness.clock.now())
    found = await ops.follows(begun["id"])
    assert (*progress(found), found["reason"]) == ("partial", 450, 450, 0, "suspense")


@pytest.mark.parametrize("mode", ["cancel", "restore"])
async def test_after_a_stopped_drain_the_region_is_granted_to(
    agent_harness: AgentHarness, ops: Ops, east: Agent, mode: str
) -> None:
    begun = await ops.begins({"mode": "drain", "region": "us-east"})
    if mode == "cancel":
        await ops.cancels(begun["id"])
    else:
        await ops.begins({"mode": "restore", "region": "us-east"})
    assert (await ops.sees(begun["id"]))["state"] == "cancelled"
    assert (await ops.client.get("/v1/regions/us-east")).json()["status"] == "active"


# --- allocations ------------------------------------------------------------------------------------------------------


async def test_allocations_show_what_each_region_holds(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    for misspelt in ({"quota": "exprots"}, {"quota": "exprots:tenant=acme"}, {"region": "us_east"}, {"period": "now"}):
        assert (await ops.client.get("/v1/allocations", params=misspelt)).status_code == 422
    assert (await ops.client.get("/v1/rates", params={"region": "us_east"})).status_code == 422
    assert (await ops.client.get("/v1/allocations", params={"quota": "mails"})).json()["data"] == []
    await east.say(3, lease(granted=500, consumed=60, units=10), demands=[want(demand_milli=10_000)])
    found = await ops.allocation()
    totals = ("quota", "period", "state", "funded", "unallocated", "outstanding", "consumed", "suspense", "overage")
    assert [found[name] for name in totals] == [EXPORTS, PERIOD, "open", 1000, 490, 450, 60, 0, 0]
    there = found["regions"]["us-east"]
    assert [there[name] for name in ("granted", "consumed", "outstanding", "idle", "suspense")] == [
        500,
        60,
        440,
        440,
        0,
    ]
    assert (there["state"], there["demand_milli"], there["dry_at"]) == ("active", 10_000, "2026-11-18T12:00:44Z")
    assert found["regions"]["ap-south"]["dry_at"] is None
    only = await ops.allocation(region="ap-south", tenant="acme", quota="exports", period=PERIOD)
    assert list(only["regions"]) == ["ap-south"]


async def test_unchanged_allocations_are_not_sent_again(ops: Ops, east: Agent) -> None:
    first = await ops.client.get("/v1/allocations")
    again = await ops.client.get("/v1/allocations", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    await east.say(3, lease(granted=500, consumed=51, units=1))
    changed = await ops.client.get("/v1/allocations", headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status_code == 200


async def test_allocations_are_paged_and_ended_periods_shown_on_request(
    agent_harness: AgentHarness, ops: Ops, east: Agent
) -> None:
    for seq, tenant in enumerate("abc", 1):
        quota = f"exports:tenant={tenant}"
        agent = await agent_harness.agent(f"r-{tenant}")
        await agent.say(1, demands=[want(quota, waiting=seq)], quota=quota)
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page = (await ops.client.get(f"/v1/allocations?page_size=2{after and f'&page_after={after}'}")).json()
        seen += [row["quota"].partition("=")[2] for row in page["data"]]
        after = page["page"]["next"]
    assert seen == ["a", "acme", "b", "c"]
    await east.say(3, lease(granted=500, consumed=50, returned=450, units=0))
    agent_harness.clock.time = agent_harness.clock.time.replace(month=12, day=1)
    there = (await ops.client.get("/v1/allocations")).json()["data"]
    assert [row["quota"].partition("=")[2] for row in there] == ["a", "b", "c"]  # these are outstanding
    over = (await ops.client.get("/v1/allocations", params={"period": PERIOD, "quota": EXPORTS})).json()["data"]
    assert [row["consumed"] for row in over] == [50]


@pytest.mark.parametrize(("scopes", "status"), [(("quota:read",), 403), (("alloc:write",), 422), ((), 401)])
async def test_scopes_of_rebalances(agent_harness: AgentHarness, scopes: tuple[str, ...], status: int) -> None:
    client = await agent_harness.client(*scopes)
    assert (await client.post("/v1/rebalances", json={})).status_code == status
    assert (await client.get("/v1/allocations")).status_code == (
        200 if "quota:read" in scopes else status if not scopes else 403
    )


# --- holds ------------------------------------------------------------------------------------------------------------

HELD = EAST_TO_SOUTH | {"hold": "1h"}


async def ended_holds(agent_harness: AgentHarness) -> None:
    """Run the job that ends holds."""
    async with connected(restricted(agent_harness.url)) as connection, connection.transaction():
        await end_holds(connection, agent_harness.clock.now())


async def recalls(hears: SignalSubscription) -> set[str]:
    """Return the quotas of the first recalls that a region hears; two leases of one quota are two signals."""
    async with asyncio.timeout(60):
        while True:
            heard = await hears.take(60) or ()
            if found := {each.quota for each in heard if each.kind == "recall" and each.quota}:
                return found


async def test_a_hold_keeps_moved_units_for_its_time_and_ends_by_itself(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    await put_off(agent_harness.owner, "end_holds")
    shortly = EAST_TO_SOUTH | {"hold": "10s"}  # so that no lease expires meanwhile
    planned = await ops.plans(shortly)
    [hold] = planned["plan"]["holds"]
    assert (hold["quota"], hold["region"], hold["units"]) == (EXPORTS, "ap-south", 310)
    assert await agent_harness.one("SELECT count(*) FROM floor_hold") == 0
    begun = await ops.begins(shortly)
    assert [each["units"] for each in begun["holds"]] == [310]
    shown = (await ops.allocation())["regions"]["ap-south"]
    assert (shown["hold"], shown["hold_until"], shown["floor"]) == (310, hold["until"], None)
    await east.say(3, lease(granted=500, consumed=50, returned=300, units=0))
    await south.say(2, demands=[want()])
    await south.say(3, lease(granted=310))
    west = await agent_harness.agent("eu-west")
    await west.say(1, demands=[want(waiting=1000)])  # takes all that no region holds
    with agent_harness.hub.subscribe("us-east") as east_hears, agent_harness.hub.subscribe("ap-south") as south_hears:
        await west.say(2, lease(granted=490, consumed=490), demands=[want(waiting=5)])
        assert await recalls(east_hears) == {EXPORTS}
        agent_harness.clock.move(seconds=10)
        await ended_holds(agent_harness)
        assert (await ops.allocation())["regions"]["ap-south"]["hold"] is None
        await west.say(3, lease(granted=490, consumed=490, units=0), demands=[want(waiting=5)])
        assert await recalls(south_hears) == {EXPORTS}  # and none while they were held
    actions = await agent_harness.owner.fetch("SELECT action FROM audit WHERE object = $1 ORDER BY id", begun["id"])
    assert [each["action"] for each in actions] == ["rebalance.begun", "rebalance.hold_ended"]


async def test_cancelling_ends_the_hold_of_a_rebalance_that_is_done(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    begun = await ops.begins(HELD)
    await east.say(3, lease(granted=500, consumed=50, returned=300, units=0))
    await south.say(2, demands=[want()])
    await south.say(3, lease(granted=310))
    assert (await ops.follows(begun["id"]))["state"] == "done"
    cancelled = await ops.cancels(begun["id"])
    assert (cancelled["state"], cancelled["holds"]) == ("done", [])
    assert (await ops.allocation())["regions"]["ap-south"]["hold"] is None


async def test_a_hold_that_floors_leave_no_room_for_is_refused_and_changes_nothing(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    await agent_harness.agent("eu-west")
    floors = {"mode": "weigh", "quota": EXPORTS, "settings": {"eu-west": {"floor": 800}}}
    await ops.begins(floors)
    answer = await ops.asks(HELD)
    assert answer.status_code == 422
    assert [(each["field"], each["rule"]) for each in answer.json()["invalid_parameters"]] == [("hold", "floors")]
    for text in ("an hour", "0s", "40d"):
        answer = await ops.asks(EAST_TO_SOUTH | {"hold": text})
        assert answer.status_code == 422
        assert [each["field"] for each in answer.json()["invalid_parameters"]] == ["hold"]
    assert await agent_harness.one("SELECT count(*) FROM floor_hold") == 0


async def test_a_plan_says_when_demand_would_take_the_units_back(
    agent_harness: AgentHarness, ops: Ops, east: Agent, south: Agent
) -> None:
    assert (await ops.plans(EAST_TO_SOUTH))["plan"]["taken_back"] == []  # nothing demands any
    west = await agent_harness.agent("eu-west")
    await west.say(1, demands=[want(demand_milli=10_000)])
    left = (await agent_harness.pool())["unallocated"]
    [back] = (await ops.plans(EAST_TO_SOUTH))["plan"]["taken_back"]
    assert (back["region"], back["units"], back["after_ms"]) == ("ap-south", 310, (left - 250) * 100)
    [held] = (await ops.plans(HELD))["plan"]["taken_back"]
    assert held["after_ms"] == 3_600_000
