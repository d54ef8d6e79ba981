"""Leases follow periods in time zones and anniversaries, even if a zone's rules change during a period."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from protocol.limits.document import PeriodKind
from protocol.periods import Calendar, Period, period_at, period_of
from tests.integration.coordinator.agent_harness import EXPORTS, Agent, AgentHarness, lease, leased, want

pytestmark = pytest.mark.anyio

BERLIN = Calendar(PeriodKind.MONTH, "Europe/Berlin")
NOVEMBER, DECEMBER = "2026-11_Europe:Berlin_60", "2026-12_Europe:Berlin_60"
MIDNIGHT = datetime(2026, 11, 30, 23, tzinfo=UTC)  # in Berlin


def exports(limit: int = 1000, **more: str) -> dict[str, Any]:
    return {"name": "exports", "kind": "allowance", "limit": limit, "horizon": "10s"} | more


def of(period: str, **totals: Any) -> dict[str, Any]:
    return lease(**totals) | {"period": period}


async def written(agent_harness: AgentHarness, *periods: Period) -> None:
    for each in periods:
        await agent_harness.owner.execute(
            "INSERT INTO period (id, kind, starts_at, ends_at, calendar) VALUES ($1, 'month', $2, $3, $4)",
            each.id,
            each.starts_at,
            each.ends_at,
            str(each.calendar),
        )


async def consumed(agent_harness: AgentHarness) -> dict[str, int]:
    rows = await agent_harness.owner.fetch("SELECT period, consumed FROM pool ORDER BY period")
    return {row["period"]: row["consumed"] for row in rows}


async def test_a_month_ends_at_midnight_of_its_zone(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([exports(period="month", time_zone="Europe/Berlin")])
    agent_harness.clock.time = MIDNIGHT - timedelta(seconds=20)
    both = (await agent.say(1, demands=[want(waiting=10, demand_milli=20_000)])).leases
    found = {each.period: (each.starts_in_ms, each.ends_in_ms, each.granted) for each in both}
    assert found == {NOVEMBER: (0, 20_000, 20), DECEMBER: (20_000, 20_000 + 31 * 86_400_000, 20)}
    agent_harness.clock.time = MIDNIGHT
    frozen = of(NOVEMBER, granted=20, consumed=7), of(DECEMBER, granted=20, consumed=5)
    given = {each.period: each.final for each in (await agent.say(2, *frozen, demands=[want()])).leases}
    assert given == {NOVEMBER: True, DECEMBER: False}
    assert await consumed(agent_harness) == {NOVEMBER: 7, DECEMBER: 5}
    lines = "SELECT max(window_at) FROM transfer WHERE cause = 'usage' AND period = $1"
    assert await agent_harness.one(lines, NOVEMBER) < MIDNIGHT <= await agent_harness.one(lines, DECEMBER)
    row = await agent_harness.owner.fetchrow("SELECT * FROM period WHERE id = $1", DECEMBER)
    assert row is not None
    assert (row["calendar"], row["starts_at"]) == ("month_Europe/Berlin", MIDNIGHT)


async def test_an_anniversary_is_the_tenants_own(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([exports(period="anniversary", time_zone="Europe/Berlin")])
    # Half an hour later, in Berlin it was the 31st.
    began_at = datetime(2026, 1, 30, 23, 30, tzinfo=UTC)
    await agent_harness.owner.execute("INSERT INTO subscription VALUES ('acme', 'pro', $1, $1)", began_at)
    agent_harness.clock.time = datetime(2027, 2, 27, 22, 59, 50, tzinfo=UTC)
    now, following = sorted((await agent.say(1, demands=[want(waiting=1)])).leases, key=lambda each: each.starts_in_ms)
    assert (now.period, following.period) == ("2027-01-31a31_Europe:Berlin_60", "2027-02-28a31_Europe:Berlin_60_120")
    assert (now.ends_in_ms, following.starts_in_ms) == (10_000, 10_000)
    assert period_of(following.period).ends_at == datetime(2027, 3, 30, 22, tzinfo=UTC)


async def test_without_a_subscription_there_are_months(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([exports(period="anniversary", time_zone="Europe/Berlin")])
    assert leased(await agent.say(1, demands=[want(waiting=1)])).period == NOVEMBER


@pytest.mark.parametrize("shift", [timedelta(hours=1), timedelta(hours=-1)])
async def test_an_open_period_keeps_its_bounds_when_the_rules_change(
    agent_harness: AgentHarness, agent: Agent, shift: timedelta
) -> None:
    """The period was written when Berlin's November ended earlier, or later, than by today's rules."""
    await agent_harness.limit([exports(period="month", time_zone="Europe/Berlin")])
    regular = period_at(BERLIN, MIDNIGHT - timedelta(days=1))
    label = f"2026-11_Europe:Berlin_60_{60 - shift // timedelta(minutes=1)}"
    old = period_of(label)
    assert (old.starts_at, old.ends_at) == (regular.starts_at, MIDNIGHT + shift)
    await written(agent_harness, old)
    agent_harness.clock.time = min(MIDNIGHT, old.ends_at) + abs(shift) / 2
    within = leased(await agent.say(1, demands=[want(waiting=3)]))
    expected = (
        old if shift > timedelta() else period_of(f"2026-12_Europe:Berlin_{60 - shift // timedelta(minutes=1)}_60")
    )
    assert within.period == expected.id
    agent_harness.clock.time = max(MIDNIGHT, old.ends_at)
    after = (await agent.say(2, of(within.period, granted=3, consumed=3), demands=[want(waiting=3)])).leases
    (current,) = [each for each in after if each.ends_in_ms]
    begun = period_of(current.period)
    assert (begun.starts_at, begun.ends_at) == (old.ends_at, datetime(2026, 12, 31, 23, tzinfo=UTC))
    rows = await agent_harness.owner.fetch("SELECT starts_at, ends_at FROM period ORDER BY starts_at")
    assert all(one["ends_at"] == other["starts_at"] for one, other in itertools.pairwise(rows))
    assert await agent_harness.one("SELECT sum(consumed) FROM pool WHERE quota = $1", EXPORTS) == 3
