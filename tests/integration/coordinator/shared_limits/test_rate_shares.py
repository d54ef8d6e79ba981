"""Agents get shares of a rate by demand; the replies, refusals and stored rows are right."""

import asyncio
from typing import Any

import msgspec
import pytest

from coordinator.limits.in_force import Documents
from coordinator.shared_limits.rules import KEPT_MS, REFRESHES
from coordinator.shared_limits.share_rates import SharedOut, delete_idle_shares, share_rates
from protocol.messages import RateReport, RateShare, SharesRequest, SharesResponse, SlotShare
from protocol.outcomes import GrantRefusal
from tests.integration.coordinator.agent_harness import API, EXPORTS, Agent, AgentHarness
from tests.integration.coordinator.interleaving import Step, one_after_the_other

pytestmark = pytest.mark.anyio
SAFE = 33_333_333


async def shares(agent: Agent, *rates: Any) -> SharesResponse:
    answer = await agent.client.post(f"/v1/regions/{agent.region}/shares", json={"rates": list(rates)})
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=SharesResponse)


async def say(agent: Agent, demand: int, told: RateShare | None = None, quota: str = API, **other: int) -> RateShare:
    """Report a demand of so many a second, with the share of the last reply."""
    report = {"quota": quota, "demand_micro": demand * 1_000_000, "number": 0, "rate_micro": SAFE}
    if told is not None:
        report |= {"number": told.number, "rate_micro": told.rate_micro}
    (share,) = (await shares(agent, report | other)).rates
    return share


async def limit(agent_harness: AgentHarness, **api: Any) -> None:
    quotas = [{"name": "exports", "kind": "allowance", "limit": 1000, "period": "month"}]
    await agent_harness.limit([*quotas, {"name": "api", "kind": "rate", "limit": "100/second, burst 200"} | api])


@pytest.fixture
async def agents(agent_harness: AgentHarness) -> list[Agent]:
    return [await agent_harness.agent(name) for name in ("us-east", "eu-west", "ap-south")]


async def test_unused_shares_are_lent_once_their_regions_gave_them_up(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    await limit(agent_harness, sharing="strict")
    busy, *idle = agents
    first = await say(busy, 90)
    assert (first.rate_micro, first.contended, first.refresh_in_ms) == (SAFE, True, 250)
    for agent in idle:
        lent = await say(agent, 1)
        await say(agent, 1, lent)
    agent_harness.clock.move(seconds=1)
    more = await say(busy, 90, first)
    assert more.rate_micro == 90_000_000
    assert (more.after_micro, more.expires_in_ms) == (SAFE, REFRESHES * 2_000)


async def test_adaptive_grants_at_once_and_signals_the_others(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    with agent_harness.hub.subscribe("eu-west") as heard:
        given = await say(agents[0], 90)
        # A silent region wants less than half of its base share, or it would have reported.
        assert (given.rate_micro, given.expires_in_ms) == (66_666_668, 1_000)
        while not (signals := await heard.take(10)):
            pass
    assert [(signal.kind, signal.quota) for signal in signals] == [("rate", API)]


async def test_below_the_safe_share_no_region_is_signalled(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    given = await say(agents[0], 20)
    assert (given.rate_micro, given.contended, given.refresh_in_ms) == (
        SAFE + 1,
        False,
        5_000,
    ) or given.rate_micro >= SAFE
    assert not given.contended


async def test_two_parallel_reports_never_get_more_than_the_limit(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    """The row is locked, so the second report sees the first one's share, at any coordinator."""
    await limit(agent_harness, sharing="strict")
    told: list[RateShare | None] = [None] * len(agents)
    for demands in ([90, 0, 0], [90, 0, 0], [90, 90, 0], [0, 90, 90], [50, 50, 50], [90, 0, 90]) * 3:
        told = list(await asyncio.gather(*map(say, agents, demands, told)))
        held = await agent_harness.one("SELECT count(*) FROM shared_limit")
        assert held == 1
        agent_harness.clock.move(seconds=1)
    # The last and the previous share of each region, the greater of which may be in force.
    assert sum(share.rate_micro for share in told if share) <= 100_000_000


async def test_a_report_sees_the_share_of_a_concurrent_reply(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    await limit(agent_harness, sharing="strict")
    told = [await say(agent, demand) for agent, demand in zip(agents, (90, 1, 1), strict=True)]
    told = [told[0], *[await say(agent, 1, lent) for agent, lent in zip(agents[1:], told[1:], strict=True)]]
    agent_harness.clock.move(seconds=1)

    def asks(nth: int) -> Step[SharedOut]:
        report = RateReport(API, 90_000_000, told[nth].number, told[nth].rate_micro)
        return lambda c: share_rates(
            c, Documents(), agents[nth].region, SharesRequest(rates=[report]), agent_harness.clock.now()
        )

    first, second = await one_after_the_other(agent_harness, asks(0), asks(1))
    given = [answer.response.rates[0].rate_micro for answer in (first, second)]
    assert SAFE < given[0] <= sum(given) <= 100_000_000, given


async def test_after_data_loss_no_share_grows_until_all_regions_have_reported(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    await limit(agent_harness, sharing="strict")
    for agent in agents:
        await say(agent, 1)
    await agent_harness.owner.execute("TRUNCATE shared_limit")
    agent_harness.clock.move(seconds=1)
    assert (await say(agents[0], 90, number=5, rate_micro=10_000_000)).rate_micro == 10_000_000
    agent_harness.clock.move(seconds=21)
    assert (await say(agents[0], 90, number=5, rate_micro=10_000_000)).rate_micro == SAFE


async def test_rates_without_reports_are_forgotten(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    await say(agents[0], 90)
    assert await delete_idle_shares(agent_harness.owner, agent_harness.clock.now()) == 0
    agent_harness.clock.move(seconds=3 * KEPT_MS // 1000 + 1)
    assert await delete_idle_shares(agent_harness.owner, agent_harness.clock.now()) == 1


async def test_an_inactive_region_has_no_share(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    await agent_harness.drain("us-east")
    assert (await say(agents[0], 90)).rate_micro == 0
    assert (await say(agents[1], 20)).rate_micro >= 33_333_333


@pytest.mark.parametrize(
    ("quota", "refusal"),
    [
        (EXPORTS, GrantRefusal.NOT_LEASED),
        ("faxes:tenant=acme", GrantRefusal.UNKNOWN_QUOTA),
        ("windows:tenant=acme", GrantRefusal.NOT_LEASED),
    ],
)
async def test_a_quota_that_is_not_shared_is_refused_by_name(
    agent_harness: AgentHarness, agents: list[Agent], quota: str, refusal: GrantRefusal
) -> None:
    await agent_harness.limit(
        [
            {"name": "exports", "kind": "allowance", "limit": 1000, "period": "month"},
            {"name": "windows", "kind": "rate", "limit": "10/minute", "algorithm": "fixed_window"},
        ]
    )
    response = await shares(agents[0], {"quota": quota, "demand_micro": 1, "number": 0, "rate_micro": 1})
    assert (response.rates, [each.refusal for each in response.refused]) == ([], [refusal])


async def test_a_message_without_quotas_is_refused(agents: list[Agent]) -> None:
    answer = await agents[0].client.post("/v1/regions/us-east/shares", json={})
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["invalid_parameters"]] == ["rates"]


RATE = {"quota": API, "demand_micro": 1, "number": 0, "rate_micro": 1}
LONG = "api:tenant=" + "%2F" * 170


@pytest.mark.parametrize(
    ("bad", "quota", "rule", "reason"),
    [
        (RATE | {"quota": "Api:"}, "Api:", "quota_key", "rates[1].quota"),
        (RATE | {"quota": LONG}, LONG, "max_length", "rates[1].quota"),
        (RATE | {"quota": "api:tenant=b", "demand_micro": -1}, "api:tenant=b", "minimum", "rates[1].demand_micro"),
        (RATE | {"quota": "api:tenant=b", "spent": 2**53}, "api:tenant=b", "maximum", "rates[1].spent"),
        (RATE, API, "unique", "rates[1].quota"),
        ("api", "", "type", "rates[1]"),
    ],
)
async def test_a_malformed_rate_is_refused_alone(
    agent_harness: AgentHarness, agents: list[Agent], bad: Any, quota: str, rule: str, reason: str
) -> None:
    response = await shares(agents[0], RATE, bad, RATE | {"quota": "api:tenant=c"})
    assert [each.quota for each in response.rates] == [API, "api:tenant=c"]
    (refused,) = response.refused
    assert (refused.quota, refused.refusal, refused.rule) == (quota, GrantRefusal.INVALID, rule)
    assert (refused.reason or "").startswith(reason)
    counted = f'exchange_items_refused_total{{kind="rate",reason="{rule}",region="us-east"}} 1.0'
    assert counted in await metrics(agents[0])


async def metrics(agent: Agent) -> str:
    return (await agent.client.get("/metrics")).text


async def test_a_token_cannot_report_for_another_region(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    answer = await agents[0].client.post("/v1/regions/eu-west/shares", json={"rates": []})
    assert answer.status_code == 403


async def test_the_metrics_show_the_worst_case_and_measurements(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    told = await say(agents[0], 90)
    agent_harness.clock.move(seconds=1)
    await say(agents[0], 90, told, spent=100)
    page = (await (await agent_harness.client()).get("/metrics")).text
    assert 'leasehold_coordinator_rate_overshoot_bound_units{quota="api"} 100.0' in page
    (measured,) = [line for line in page.splitlines() if line.startswith("leasehold_coordinator_rate_overshoot_units{")]
    assert 0 < float(measured.split()[1]) <= 100


# --- for operators ----------------------------------------------------------------------------------------------------


async def rates(agent_harness: AgentHarness, kind: str = "rates", **query: Any) -> Any:
    answer = await (await agent_harness.client("quota:read")).get(f"/v1/{kind}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_operators_see_shares_overshoot_and_the_worst_case(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    await say(agents[0], 90)
    agent_harness.clock.move(seconds=0.5)
    [shown] = (await rates(agent_harness))["data"]
    in_force = {each["region"]: (each["most_micro"], each["demand_micro"]) for each in shown["regions"]}
    assert in_force == {"us-east": (66_666_668, 90_000_000), "eu-west": (SAFE, None), "ap-south": (SAFE, None)}
    assert (shown["quota"], shown["sharing"], shown["limit_micro"]) == (API, "adaptive", 100_000_000)
    over = sum(micro for micro, _ in in_force.values()) - 100_000_000
    assert (shown["bound_milli"], shown["overshoot_milli"]) == (100_000, -(-over // 2000))
    agent_harness.clock.move(seconds=3600)
    assert (await rates(agent_harness))["data"][0]["overshoot_milli"] <= 100_000, "whoever falls silent"


async def test_strict_shares_never_exceed_the_limit(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    await limit(agent_harness, sharing="strict")
    for agent in agents:
        await say(agent, 90)
    agent_harness.clock.move(seconds=3600)
    [shown] = (await rates(agent_harness, quota="api"))["data"]
    assert (shown["bound_milli"], shown["overshoot_milli"]) == (0, 0)


async def test_rates_are_listed_by_key_and_in_pages(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    keys = [f"api:tenant={name}" for name in ("acme", "globex", "initech")]
    for key in keys:
        await say(agents[0], 90, quota=key)
    first = await rates(agent_harness, quota=["api", "exports"], page_size=2)
    rest = await rates(agent_harness, quota=["api", "exports"], page_size=2, page_after=first["page"]["next"])
    assert [[each["quota"] for each in page["data"]] for page in (first, rest)] == [keys[:2], keys[2:]]
    assert rest["page"]["next"] is None
    assert (await rates(agent_harness, quota="exports"))["data"] == []
    await limit(agent_harness, sharing="regional")
    assert (await rates(agent_harness))["data"] == [], "they are not shared any more"


async def test_rates_are_found_by_tenant_and_shown_of_one_region(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    keys = ["api:tenant=acme", "api:tenant=acme%2C", "api:user=ann,tenant=acme", "api:tenant=acm"]
    for key in keys:
        await say(agents[0], 90, quota=key)
    found = (await rates(agent_harness, tenant="acme", region="eu-west"))["data"]
    assert [each["quota"] for each in found] == [keys[0], keys[2]]
    assert [[region["region"] for region in each["regions"]] for each in found] == [["eu-west"]] * 2
    assert [each["quota"] for each in (await rates(agent_harness, tenant="acme,"))["data"]] == [keys[1]]


async def test_a_reply_has_the_worst_case_and_measurements(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    told = await say(agents[0], 90)
    assert (told.bound_milli, told.overshoot_milli) == (100_000, 0)
    agent_harness.clock.move(seconds=0.5)
    told = await say(agents[0], 90, told, spent=100)
    [shown] = (await rates(agent_harness))["data"]
    assert 0 < told.overshoot_milli == shown["overshoot_milli"] <= told.bound_milli
    await limit(agent_harness, sharing="strict")
    assert (await say(agents[0], 90, quota="api:tenant=globex")).bound_milli == 0


# --- slots ------------------------------------------------------------------------------------------------------------

REPORTS = "reports:tenant=acme"


async def limit_slots(agent_harness: AgentHarness, **reports: Any) -> None:
    quotas: list[Any] = [{"name": "exports", "kind": "allowance", "limit": 1000, "period": "month"}]
    slots = {"name": "reports", "kind": "concurrency", "limit": 30, "slot_ttl": "1m", "sharing": "strict"}
    await agent_harness.limit([*quotas, slots | reports])


async def say_slots(agent: Agent, wanted: int, told: SlotShare | None = None, **other: int) -> SlotShare:
    """Report a demand of so many slots, with the slots of the last reply in use."""
    report = {"quota": REPORTS, "epoch": agent.epoch, "wanted": wanted, "number": 0, "held": 10}
    if told is not None:
        report |= {"number": told.number, "held": told.units}
    answer = await agent.client.post(f"/v1/regions/{agent.region}/shares", json={"slots": [report | other]})
    assert answer.status_code == 200, answer.text
    (share,) = msgspec.json.decode(answer.content, type=SharesResponse).slots
    return share


async def test_slots_are_granted_once_others_have_confirmed_them_free(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    await limit_slots(agent_harness)
    busy, *idle = agents
    first = await say_slots(busy, 30)
    assert (first.units, first.after_units, first.slot_ttl_ms, first.contended) == (10, 10, 60_000, True)
    lent = [await say_slots(agent, 0) for agent in idle]
    assert [share.units for share in lent] == [0, 0]
    await say_slots(idle[0], 0, lent[0])
    await say_slots(idle[1], 4, lent[1], held=4)
    agent_harness.clock.move(seconds=1)
    assert (await say_slots(busy, 30, first)).units == 26, "four are in use elsewhere"


async def test_slots_of_a_store_that_lost_data_are_reserved_until_they_expire(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    await limit_slots(agent_harness)
    lost, *others = agents
    told = {agent.region: await say_slots(agent, 10) for agent in agents}
    lost.epoch += 100
    assert (await say_slots(lost, 10, held=0, lost_ms=60_000)).units == 0
    assert (await say_slots(others[0], 20, told[others[0].region])).units == 10
    agent_harness.clock.move(seconds=62)
    assert (await say_slots(lost, 10, held=0)).units == 10


async def test_operators_see_how_many_slots_each_region_may_use(
    agent_harness: AgentHarness, agents: list[Agent]
) -> None:
    await limit_slots(agent_harness)
    busy, idle, _ = agents
    await say_slots(idle, 0)
    await say_slots(busy, 30)
    [shown] = (await rates(agent_harness, "slots"))["data"]
    assert (shown["quota"], shown["limit"], shown["slot_ttl_ms"]) == (REPORTS, 30, 60_000)
    in_use = {each["region"]: (each["most"], each["base_share"], each["wanted"]) for each in shown["regions"]}
    assert in_use == {"us-east": (10, 10, 30), "eu-west": (10, 10, 0), "ap-south": (10, 10, None)}
    assert [each["region"] for each in shown["regions"] if each["last_seen_at"] is None] == ["ap-south"]
    assert (await rates(agent_harness))["data"] == [], "they are no rate"


async def test_slots_that_are_not_shared_are_refused_by_name(agent_harness: AgentHarness, agents: list[Agent]) -> None:
    await limit_slots(agent_harness, sharing="regional")
    report = {"epoch": agents[0].epoch, "wanted": 1, "number": 0, "held": 1}
    slots = [report | {"quota": quota} for quota in (REPORTS, EXPORTS, "faxes:tenant=acme")]
    answer = await agents[0].client.post("/v1/regions/us-east/shares", json={"slots": slots})
    refused = msgspec.json.decode(answer.content, type=SharesResponse).refused
    assert [each.refusal for each in refused] == [
        GrantRefusal.NOT_LEASED,
        GrantRefusal.NOT_LEASED,
        GrantRefusal.UNKNOWN_QUOTA,
    ]


SLOT = {"quota": REPORTS, "epoch": 1, "wanted": 1, "number": 0, "held": 1}


@pytest.mark.parametrize(
    ("slots", "rates", "quota", "reason"),
    [
        ([SLOT, SLOT | {"quota": "x:", "held": -1}], [], "x:", "slots[1].held"),
        ([SLOT, SLOT], [], REPORTS, "slots[1].quota"),
        ([SLOT | {"quota": API}], [RATE], API, "slots[0].quota"),
    ],
)
async def test_a_malformed_slot_is_refused_alone(
    agent_harness: AgentHarness, agents: list[Agent], slots: list[Any], rates: list[Any], quota: str, reason: str
) -> None:
    await limit_slots(agent_harness)
    body = {"rates": rates, "slots": slots}
    answer = await agents[0].client.post("/v1/regions/us-east/shares", json=body)
    response = msgspec.json.decode(answer.content, type=SharesResponse)
    refused = [each for each in response.refused if each.refusal is GrantRefusal.INVALID]
    assert [each.quota for each in refused] == [quota]
    assert (refused[0].reason or "").startswith(reason)
    assert len(response.slots) == len(slots) - 1
