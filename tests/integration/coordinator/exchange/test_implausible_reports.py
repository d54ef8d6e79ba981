"""Reports that contradict their quota, its calendar or its limit wait for people and move no units."""

import pytest

from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.units import MAX_UNITS
from tests.integration.coordinator.agent_harness import EXPORTS, Agent, AgentHarness, exchange, lease, leased, want
from tests.integration.coordinator.periods.test_close import close_at_last, in_december, word
from tests.integration.coordinator.suspense.test_suspense import proposal, resolved

pytestmark = pytest.mark.anyio
HOURLY = {"name": "hourly", "kind": "allowance", "limit": 1000, "period": "hour"}
CEILING = 10 * 1000 + 1_000_000


async def kept(agent_harness: AgentHarness) -> list[tuple[str, str, str]]:
    rows = await agent_harness.owner.fetch(
        "SELECT quota, period, reason FROM quarantine ORDER BY epoch, lane, seq, period"
    )
    return [(row["quota"], row["period"], row["reason"]) for row in rows]


async def tables(agent_harness: AgentHarness) -> int:
    count: int = await agent_harness.one("SELECT count(*) FROM pg_class WHERE relkind = 'r'")
    return count


async def rows_of(agent_harness: AgentHarness, table: str) -> int:
    count: int = await agent_harness.one(f"SELECT count(*) FROM {table}")
    return count


def hours(year: int, count: int) -> list[str]:
    return [f"{year}-01-{1 + number // 24:02}T{number % 24:02}" for number in range(count)]


# --- periods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quota", ["invented:tenant=acme", EXPORTS, "hourly:tenant=acme"])
async def test_invented_periods_make_no_tables(agent_harness: AgentHarness, agent: Agent, quota: str) -> None:
    await agent_harness.limit([{"name": "exports", "kind": "allowance", "limit": 1000, "period": "month"}, HOURLY])
    before = await tables(agent_harness), await rows_of(agent_harness, "period"), await rows_of(agent_harness, "pool")
    reply = await agent.say(1, *(lease(quota, period=hour, consumed=3) for hour in hours(2031, 500)), quota=quota)
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert (
        await tables(agent_harness),
        await rows_of(agent_harness, "period"),
        await rows_of(agent_harness, "pool"),
    ) == before
    assert await rows_of(agent_harness, "lease") == 0
    reason = "unknown_quota" if quota.startswith("invented") else "implausible_period"
    assert await kept(agent_harness) == [(quota, hour, reason) for hour in hours(2031, 500)]


@pytest.mark.extended
async def test_two_thousand_invented_periods_in_one_call_leave_postgres_alone(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    quotas = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]
    by_lane = {lane_of(f"{name}:tenant=x", agent.lanes): f"{name}:tenant=x" for name in quotas}
    before = await tables(agent_harness)
    replies = await agent.call(
        *(
            exchange(
                agent.frozen(1, *(lease(quota, period=hour, consumed=1) for hour in hours(1990, 500)), quota=quota)
            )
            for quota in by_lane.values()
        )
    )
    assert {reply.outcome for reply in replies.replies} == {ExchangeOutcome.APPLIED}
    assert await tables(agent_harness) == before
    assert await rows_of(agent_harness, "quarantine") == 500 * len(by_lane)


async def test_a_total_of_an_invented_period_makes_no_table_either(agent_harness: AgentHarness, agent: Agent) -> None:
    before = await tables(agent_harness)
    leases = [lease(period=hour, granted=5, consumed=3) for hour in hours(2031, 100)]
    assert (await agent.say(1, *leases)).outcome is ExchangeOutcome.LEDGER_REGRESSED
    assert await tables(agent_harness) == before
    assert await rows_of(agent_harness, "pool") == 0


@pytest.mark.parametrize(
    ("period", "is_booked"),
    [
        ("2026-10", True),  # ended less than 35 days ago
        ("2026-11", True),
        ("2026-12", True),
        ("2027-01", True),
        ("2027-02", False),  # later than the period after the next
        ("2026-09", False),  # ended 49 days ago
        ("2026-11-18", False),  # no month
        ("2026-11_Europe:Berlin_60", False),  # another calendar
    ],
)
async def test_a_period_of_the_calendar_near_now_is_booked_without_a_grant(
    agent_harness: AgentHarness, agent: Agent, period: str, is_booked: bool
) -> None:
    await agent.say(1, lease(period=period, consumed=3))
    booked = await agent_harness.one("SELECT coalesce(sum(consumed), 0) FROM pool WHERE period = $1", period)
    assert booked == (3 if is_booked else 0)
    assert await kept(agent_harness) == ([] if is_booked else [(EXPORTS, period, "implausible_period")])


async def test_an_hour_of_a_zone_is_no_way_to_many_tables(agent_harness: AgentHarness, agent: Agent) -> None:
    """An id may have any offset, but only those of the zone's rules name periods of the quota."""
    await agent_harness.limit([HOURLY])
    before = await tables(agent_harness)
    quota = "hourly:tenant=acme"
    periods = [f"2026-11-18T11_Europe:Berlin_{offset}" for offset in range(200)]
    await agent.say(1, *(lease(quota, period=period, consumed=1) for period in periods), quota=quota)
    assert await tables(agent_harness) == before


async def test_the_other_reports_of_the_batch_are_booked(agent_harness: AgentHarness, agent: Agent) -> None:
    granted = leased(await agent.say(1, demands=[want(waiting=10)])).granted
    reply = await agent.say(2, lease(granted=granted, consumed=7), lease(period="2031-01", consumed=9))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.pool())["consumed"] == 7
    assert await kept(agent_harness) == [(EXPORTS, "2031-01", "implausible_period")]


async def test_usage_of_a_quota_that_was_removed_is_booked_where_it_was_granted(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    granted = leased(await agent.say(1, demands=[want(waiting=10)])).granted
    await agent_harness.limit([HOURLY])
    await agent.say(2, lease(granted=granted, consumed=7))
    assert (await agent_harness.pool())["consumed"] == 7
    assert await kept(agent_harness) == []


# --- amounts ----------------------------------------------------------------------------------------------------------


async def ask(agent: Agent, seq: int, units: int = 10) -> ExchangeReply:
    return await agent.say(seq, demands=[want(waiting=units)])


async def test_an_implausible_amount_leaves_units_for_other_regions(agent_harness: AgentHarness, agent: Agent) -> None:
    reply = await agent.say(1, lease(consumed=MAX_UNITS))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await kept(agent_harness) == [(EXPORTS, "2026-11", "implausible")]
    assert (await agent_harness.pool())["consumed"] == 0
    other = leased(await ask(await agent_harness.agent("eu-west"), 1))
    assert (other.granted, other.refusal) == (10, None)
    assert leased(await ask(agent, 2)).refusal is GrantRefusal.QUARANTINED


@pytest.mark.parametrize(("units", "is_booked"), [(CEILING + 1000, True), (CEILING + 1001, False)])
async def test_usage_above_the_grants_is_booked_up_to_the_ceiling(
    agent_harness: AgentHarness, agent: Agent, units: int, is_booked: bool
) -> None:
    """The limit of 1,000 covers the first thousand; ten times the limit and a million may be overage."""
    await ask(agent, 1, 1000)
    await agent.say(2, lease(granted=1000, consumed=units))
    assert (await agent_harness.pool())["consumed"] == (units if is_booked else 0)
    assert await kept(agent_harness) == ([] if is_booked else [(EXPORTS, "2026-11", "implausible")])


async def test_the_ceiling_is_one_for_all_epochs_of_a_region(agent_harness: AgentHarness, agent: Agent) -> None:
    for _ in range(4):
        await agent.open(journal=True)
        await agent.say(1, lease(consumed=400_000))
    assert (await agent_harness.pool())["consumed"] == 800_000
    assert [reason for *_, reason in await kept(agent_harness)] == ["implausible"] * 2
    other = await agent_harness.agent("eu-west")
    await other.say(1, lease(consumed=400_000))
    assert (await agent_harness.pool())["consumed"] == 1_200_000


async def test_two_epochs_of_a_region_in_one_call_share_the_ceiling(agent_harness: AgentHarness, agent: Agent) -> None:
    batches = []
    for _ in range(3):
        await agent.open(journal=True)
        batches.append(exchange(agent.frozen(1, lease(consumed=400_000))))
    await agent.call(*batches)
    assert (await agent_harness.pool())["consumed"] == 800_000


@pytest.mark.extended
async def test_a_thousand_journals_of_absurd_totals_stop_no_region(agent_harness: AgentHarness, agent: Agent) -> None:
    """More than 2^63 units in all overflow nothing, and an honest region's report is booked."""
    for _ in range(40):
        agent_harness.clock.move(seconds=10)
        batches = []
        for _ in range(26):
            await agent.open(journal=True)
            batches.append(exchange(agent.frozen(1, lease(consumed=MAX_UNITS))))
        await agent.call(*batches)
    other = await agent_harness.agent("eu-west")
    granted = leased(await ask(other, 1)).granted
    await other.say(2, lease(granted=granted, consumed=2000))
    assert (await agent_harness.pool())["consumed"] == 2000
    assert await rows_of(agent_harness, "quarantine") == 1040


async def test_a_late_report_has_the_same_ceiling(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7, returned=3))
    await in_december(agent_harness, in_suspense=False)
    await close_at_last(agent_harness)
    for _ in range(2):
        await agent.open(journal=True)
        await agent.say(1, lease(consumed=600_000))
    assert await agent_harness.one("SELECT consumed FROM pool WHERE period = '2026-12'") == 600_000
    assert [reason for *_, reason in await kept(agent_harness)] == ["implausible"]


# --- resolutions ------------------------------------------------------------------------------------------------------


async def open_rows(agent_harness: AgentHarness) -> list[bool]:
    client = await agent_harness.client("usage:read")
    answer = await client.get("/v1/quarantine")
    assert answer.status_code == 200, answer.text
    return [row["is_open"] for row in answer.json()["data"]]


async def test_people_dismiss_an_implausible_amount(agent_harness: AgentHarness, agent: Agent) -> None:
    await ask(agent, 1)
    await agent.say(2, lease(granted=10, consumed=MAX_UNITS))
    assert await open_rows(agent_harness) == [True]
    await resolved(agent_harness, agent, "write_off")
    assert await open_rows(agent_harness) == [False]
    pool = await agent_harness.pool()
    assert (pool["consumed"], pool["overage"], pool["suspense"], pool["written_off"]) == (0, 0, 0, 10)
    assert await word(agent_harness, "2026-11") == ("balanced", [])
    reply = await agent.say(3, lease(granted=10, consumed=MAX_UNITS, returned=0, units=0))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.pool())["consumed"] == 0


async def test_people_may_accept_an_implausible_amount(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, lease(consumed=CEILING + 5000))
    await resolved(agent_harness, agent, "unattributed")
    assert (await agent_harness.pool())["consumed"] == CEILING + 5000
    assert await open_rows(agent_harness) == [False]
    assert await word(agent_harness, "2026-11") == ("balanced", [])


@pytest.mark.parametrize(("kind", "booked"), [("write_off", None), ("unattributed", 9)])
@pytest.mark.parametrize(("quota", "period"), [(EXPORTS, "2031-01"), ("gone:tenant=acme", "2026-11")])
async def test_people_end_a_report_that_has_no_lease(
    agent_harness: AgentHarness, agent: Agent, kind: str, booked: int | None, quota: str, period: str
) -> None:
    await agent.say(1, lease(quota, period=period, consumed=9), quota=quota)
    assert await open_rows(agent_harness) == [True]
    await resolved(agent_harness, agent, kind, quota=quota, period=period)
    assert await open_rows(agent_harness) == [False]
    assert (
        await agent_harness.one("SELECT consumed FROM pool WHERE (quota, period) = ($1, $2)", quota, period) == booked
    )
    await agent.say(2, lease(quota, period=period, consumed=12, units=3), quota=quota)
    assert await agent_harness.one("SELECT consumed FROM pool WHERE (quota, period) = ($1, $2)", quota, period) == (
        None if booked is None else 12
    )


async def test_other_quarantines_are_not_dismissed(agent_harness: AgentHarness, agent: Agent) -> None:
    await ask(agent, 1)
    await agent.say(2, lease(granted=10, consumed=7, units=3))
    client = await agent_harness.client("adjust:propose")
    answer = await client.post("/v1/suspense:propose", json=proposal(agent, "write_off"))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "quarantined")


# --- reconciliation ---------------------------------------------------------------------------------------------------


async def anomalies(agent_harness: AgentHarness, period: str = "2026-11") -> list[tuple[str, str, str | None, int]]:
    client = await agent_harness.client("usage:read")
    answer = await client.get(f"/v1/periods/{period}/reconciliation")
    assert answer.status_code == 200, answer.text
    return [(each["kind"], each["quota_key"], each["region"], each["units"]) for each in answer.json()["anomalies"]]


async def test_ordinary_usage_is_no_anomaly(agent_harness: AgentHarness, agent: Agent) -> None:
    await ask(agent, 1)
    await agent.say(2, lease(granted=10, consumed=7))
    assert await anomalies(agent_harness) == []


async def test_usage_without_a_grant_is_an_anomaly_of_a_balanced_period(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, lease(consumed=7))
    assert await anomalies(agent_harness) == [("without_grant", EXPORTS, "us-east", 7)]
    assert await word(agent_harness, "2026-11") == ("balanced", [])


async def test_usage_above_twice_the_limit_is_an_anomaly(agent_harness: AgentHarness, agent: Agent) -> None:
    await ask(agent, 1)
    await agent.say(2, lease(granted=10, consumed=2000))
    assert await anomalies(agent_harness) == []
    await agent.say(3, lease(granted=1000, overage=1000, consumed=2001, units=1))
    assert await anomalies(agent_harness) == [("above_limit", EXPORTS, None, 2001)]


async def test_usage_of_a_quota_that_is_not_in_the_document_is_an_anomaly(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await ask(agent, 1)
    await agent.say(2, lease(granted=10, consumed=7))
    await agent.say(1, lease("gone:tenant=acme", consumed=3), quota="gone:tenant=acme")
    await agent_harness.limit([HOURLY])
    assert await anomalies(agent_harness) == [
        ("unknown_quota", EXPORTS, None, 7),
        ("unknown_quota", "gone:tenant=acme", "us-east", 3),
    ]


async def test_an_implausible_report_is_an_anomaly_until_people_end_it(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, lease(consumed=MAX_UNITS))
    assert await anomalies(agent_harness) == [("implausible", EXPORTS, "us-east", MAX_UNITS)]
    await resolved(agent_harness, agent, "write_off")
    assert await anomalies(agent_harness) == []
