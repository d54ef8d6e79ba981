"""A numbered exchange is applied once, with every outcome and its effect on the ledger."""

import asyncio
import json
from collections import Counter

import pytest

from coordinator.exchange.rules.balances import Account, Cause, Key
from coordinator.exchange.rules.posting import Report, Transfer
from coordinator.exchange.statements.balances import FEW_TRANSFERS
from coordinator.proof.rules import genesis_head, next_head
from protocol.identifiers import lane_of
from protocol.messages import body_hash
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.periods import minute_of
from tests.integration.coordinator.agent_harness import (
    EXPORTS,
    MAILS,
    PERIOD,
    Agent,
    AgentHarness,
    exchange,
    lease,
    leased,
    receipt,
    want,
)
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio


async def granted(agent: Agent, units: int) -> None:
    """Make the first exchange, of so many units, which fit into one grant because requests wait."""
    assert leased(await agent.say(1, demands=[want(waiting=units)])).granted == units


async def test_usage_is_booked_with_its_message(agent_harness: AgentHarness, agent: Agent) -> None:
    await granted(agent, 10)
    reply = await agent.say(2, lease(granted=10, consumed=7))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await agent_harness.transfers() == [("funded", 1000), ("grant", 10), ("usage", 7)]
    pool = await agent_harness.pool()
    assert (pool["consumed"], pool["outstanding"], pool["unallocated"]) == (7, 3, 990)
    assert (await agent_harness.lease(agent))["region_consumed"] == 7
    usage = await agent_harness.owner.fetchrow("SELECT * FROM transfer WHERE cause = 'usage'")
    assert usage is not None
    assert (usage["region"], usage["epoch"], usage["seq"], usage["charge_period"]) == (
        "us-east",
        agent.epoch,
        2,
        PERIOD,
    )


@pytest.mark.parametrize("others", [0, FEW_TRANSFERS])
async def test_usage_is_kept_letter_by_letter(agent_harness: AgentHarness, agent: Agent, others: int) -> None:
    """The separators of columns and rows survive on their way in; they differ between formats."""
    dimensions = {"tenant": "acme", "policy": 'a\tb\nc\rd\\e\\.f\\N"g/ü\x7f', "path": "\\", "none": "\\N"}
    line = {"minute": minute_of(NOON), "dimensions": dimensions, "units": 3}
    plain = [line | {"dimensions": {"policy": "a"}, "units": 1}] * others
    await agent.say(1, lease(consumed=3 + others) | {"lines": [*plain, line]})
    booked = await agent_harness.one("SELECT dimensions FROM transfer WHERE cause = 'usage' AND units = 3")
    assert json.loads(booked) == dimensions
    assert await agent_harness.one("SELECT policy FROM usage_hour WHERE units = 3") == dimensions["policy"]


async def test_the_same_bytes_again_are_booked_once_and_get_the_same_receipt(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await granted(agent, 10)
    first = await agent.say(2, lease(granted=10, consumed=7), demands=[want(waiting=5)])
    again = await agent.say(2, lease(granted=10, consumed=7), demands=[want(waiting=5)])
    assert (first.outcome, again.outcome) == (ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED)
    assert again.receipt == first.receipt
    assert leased(again).granted == leased(first).granted == 15
    assert (await agent_harness.pool())["consumed"] == 7


async def test_twenty_at_once_are_booked_once(agent_harness: AgentHarness, agent: Agent) -> None:
    await granted(agent, 10)
    replies = await asyncio.gather(
        *(agent.say(2, lease(granted=10, consumed=7), demands=[want(waiting=5)]) for _ in range(20))
    )
    outcomes = Counter(reply.outcome for reply in replies)
    assert outcomes == {ExchangeOutcome.APPLIED: 1, ExchangeOutcome.REPLAYED: 19}
    assert len({receipt(reply).head for reply in replies}) == 1
    assert (await agent_harness.pool())["consumed"] == 7
    assert await agent_harness.one("SELECT count(*) FROM report WHERE seq = 2") == 1


async def test_numbers_out_of_order(agent_harness: AgentHarness, agent: Agent) -> None:
    await granted(agent, 10)
    await agent.say(2, lease(granted=10, consumed=7))
    stale = await agent.say(1, lease(granted=10, consumed=9), demands=[want(waiting=5)])
    assert (stale.outcome, stale.leases, stale.receipt) == (ExchangeOutcome.STALE, [], None)
    gap = await agent.say(4, lease(granted=10, consumed=9), demands=[want(waiting=5)])
    assert (gap.outcome, gap.expected_seq, gap.leases) == (ExchangeOutcome.GAP, 3, [])
    conflict = await agent.say(2, lease(granted=10, consumed=8), demands=[want(waiting=5)])
    assert (conflict.outcome, conflict.leases) == (ExchangeOutcome.CONFLICT, [])
    assert await agent_harness.transfers() == [("funded", 1000), ("grant", 10), ("usage", 7)]


@pytest.mark.parametrize(
    ("frozen", "outcome"),
    [
        (lease(granted=10, consumed=6, units=0), ExchangeOutcome.STORE_REGRESSED),
        (lease(granted=10, consumed=7, returned=0, units=0), ExchangeOutcome.STORE_REGRESSED),
        (lease(granted=11, consumed=7, returned=1, units=0), ExchangeOutcome.LEDGER_REGRESSED),
        (lease(granted=10, overage=1, consumed=7, returned=1, units=0), ExchangeOutcome.LEDGER_REGRESSED),
        (lease("exports:tenant=globex", granted=5), ExchangeOutcome.LEDGER_REGRESSED),
    ],
)
async def test_lost_data_stops_a_lane(
    agent_harness: AgentHarness, agent: Agent, frozen: dict[str, object], outcome: ExchangeOutcome
) -> None:
    """A total below the ledger's means that the store lost data, and an unknown grant that the ledger did."""
    agent.lanes = 1  # one lane for all quotas
    await agent_harness.owner.execute("UPDATE region_epoch SET lanes = 1")
    await granted(agent, 10)
    await agent.say(2, lease(granted=10, consumed=7, returned=1))
    before = await agent_harness.pool()
    reply = await agent.say(3, frozen, demands=[want(waiting=5)])
    assert (reply.outcome, reply.leases, reply.receipt) == (outcome, [], None)
    assert await agent_harness.pool() == before
    assert await agent_harness.one("SELECT last_seq FROM lane WHERE epoch = $1 AND lane = 0", agent.epoch) == 2


async def test_an_epoch_that_was_never_issued_to_the_region_is_refused(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    other = await agent_harness.agent("eu-west")
    agent.epoch, own = other.epoch, agent.epoch
    assert (await agent.say(1, demands=[want(waiting=5)])).outcome is ExchangeOutcome.UNKNOWN_EPOCH
    agent.epoch = 10**9
    assert (await agent.say(1)).outcome is ExchangeOutcome.UNKNOWN_EPOCH
    agent.epoch, agent.fingerprint = own, "another incarnation"
    assert (await agent.say(1)).outcome is ExchangeOutcome.WRONG_FINGERPRINT
    assert await agent_harness.one("SELECT count(*) FROM report") == 0


async def test_exchanges_of_a_retired_epoch_are_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.owner.execute(
        "UPDATE region_epoch SET state = 'retired', retired_at = now(), retired_by = gen_random_uuid(),"
        " retired_because = 'a test'"
    )
    assert (await agent.say(1)).outcome is ExchangeOutcome.RETIRED


async def test_one_bad_lease_delays_nothing_else(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.owner.execute("UPDATE region_epoch SET lanes = 1")
    agent.lanes = 1
    globex = "exports:tenant=globex"
    await agent.say(1, demands=[want(waiting=10), want(globex, waiting=10)])
    reply = await agent.say(
        2,
        lease(granted=10, consumed=7, units=6),
        lease(globex, granted=10, consumed=4),
        demands=[want(waiting=5), want(globex, waiting=3)],
    )
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert (leased(reply).granted, leased(reply).refusal, leased(reply).final) == (10, GrantRefusal.QUARANTINED, True)
    assert (leased(reply, globex).granted, leased(reply, globex).refusal) == (13, None)
    bad = await agent_harness.lease(agent)
    assert (bad["state"], bad["suspense"], bad["outstanding"], bad["consumed"]) == ("quarantined", 10, 0, 0)
    assert (await agent_harness.lease(agent, globex))["consumed"] == 4
    kept = await agent_harness.owner.fetchrow("SELECT reason, evidence->>'consumed' AS consumed FROM quarantine")
    assert tuple(kept or ()) == ("lines_disagree", "7")


async def test_a_bad_report_without_a_lease_is_quarantined_too(agent_harness: AgentHarness, agent: Agent) -> None:
    assert (await agent.say(1, lease(consumed=7, units=6))).outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.lease(agent))["state"] == "quarantined"
    assert (await agent.say(2)).outcome is ExchangeOutcome.APPLIED


async def test_usage_beyond_the_lease_is_covered_and_then_overage(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([{"name": "exports", "kind": "allowance", "limit": 12, "period": "month"}])
    await granted(agent, 10)
    reply = await agent.say(2, lease(granted=10, consumed=15))
    assert (leased(reply).granted, leased(reply).overage) == (12, 3)
    moved = [("funded", 12), ("grant", 10), ("covering", 2), ("overage", 3)]
    # Usage beyond the limit is a line of its own.
    assert await agent_harness.transfers() == [*moved, ("usage", 12), ("usage", 3)]


async def test_returned_units_may_go_to_others_at_once(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([{"name": "exports", "kind": "allowance", "limit": 10, "period": "month"}])
    other = await agent_harness.agent("eu-west")
    await granted(agent, 10)
    waits = await other.say(1, demands=[want(waiting=4)])
    assert (leased(waits).granted, leased(waits).refusal) == (0, None)  # other regions hold units that may be returned
    await agent.say(2, lease(granted=10, consumed=3, returned=7))
    served = await other.say(2, lease(), demands=[want(waiting=4)])
    assert (leased(served).granted, leased(served).unallocated) == (4, 3)


async def test_lanes_of_a_call_are_judged_one_by_one(agent_harness: AgentHarness, agent: Agent) -> None:
    """One lane is refused and the other booked, in one transaction."""
    good, gap = agent.frozen(1), agent.frozen(7, quota=MAILS)
    response = await agent.call(exchange(good, [want(waiting=5)]), exchange(gap))
    assert [reply.outcome for reply in response.replies] == [ExchangeOutcome.APPLIED, ExchangeOutcome.GAP]
    assert leased(response.replies[0]).granted == 5
    assert await agent_harness.one("SELECT count(DISTINCT xmin::text) FROM report") == 1


async def test_a_lanes_chain_can_be_computed_again_from_what_is_booked(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await granted(agent, 10)
    await agent.say(2, lease(granted=10, consumed=7))
    reply = await agent.say(3, lease(granted=10, consumed=7, returned=3, units=0))
    lane = lane_of(EXPORTS, agent.lanes)
    head = genesis_head(agent.epoch, lane)
    reports = await agent_harness.owner.fetch("SELECT * FROM report ORDER BY seq")
    for row in reports:
        head = next_head(
            head, await booked_report(agent_harness, agent, lane, row["seq"]), row["body_hash"], row["recorded_at"]
        )
        assert head == row["head"]
    assert receipt(reply).head == head.hex()
    assert await agent_harness.one("SELECT head FROM lane WHERE epoch = $1 AND last_seq = 3", agent.epoch) == head
    assert [row["position"] for row in reports] == [1, 2, 3]
    assert [row["lines"] for row in reports] == [2, 1, 1]
    assert reports[1]["body_hash"] == body_hash(agent.frozen(2, lease(granted=10, consumed=7)))


async def booked_report(agent_harness: AgentHarness, agent: Agent, lane: int, seq: int) -> Report:
    rows = await agent_harness.owner.fetch("SELECT * FROM transfer WHERE seq = $1 ORDER BY line, part", seq)
    transfers = [
        Transfer(
            row["line"],
            Key(row["quota"], row["period"]),
            Account(row["src"]),
            Account(row["dst"]),
            row["units"],
            Cause(row["cause"]),
            row["window_at"] and minute_of(row["window_at"]),
            row["dimensions"] and json.loads(row["dimensions"]),
            row["part"],
        )
        for row in rows
    ]
    return Report(agent.region, agent.epoch, lane, seq, transfers)


async def test_evidence_of_a_fenced_epoch_is_booked_and_grants_nothing(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await granted(agent, 10)
    old = agent.epoch
    agent.fingerprint = "another incarnation"
    await agent.open()
    new, agent.epoch = agent.epoch, old
    reply = await agent.say(2, lease(granted=10, consumed=4, returned=6), demands=[want(waiting=5)])
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert [(each.quota, each.refusal) for each in reply.refused] == [(EXPORTS, GrantRefusal.EPOCH_FENCED)]
    assert (leased(reply).expires_in_ms, leased(reply).final) == (0, True)
    kept = await agent_harness.lease(agent)
    # The returned units may have been spent in the lost incarnation, so they stay where they are.
    assert (kept["consumed"], kept["returned"], kept["outstanding"]) == (4, 0, 6)
    agent.epoch = new
    assert leased(await agent.say(1, demands=[want(waiting=5)])).granted == 5


async def test_usage_of_a_lease_that_was_never_granted_is_booked(agent_harness: AgentHarness, agent: Agent) -> None:
    reply = await agent.say(1, lease(consumed=3))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await agent_harness.transfers() == [("overage", 3), ("usage", 3)]
    assert leased(await agent.say(2, lease(overage=3, consumed=3, units=0), demands=[want(waiting=1)])).granted == 1


async def test_an_unused_lease_books_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    reply = await agent.say(1, lease())
    assert (reply.outcome, reply.leases) == (ExchangeOutcome.APPLIED, [])
    assert await agent_harness.one("SELECT count(*) FROM lease") == 0
