"""Every statement that changes the state of leases by SQL changes it as the transition table of the protocol says."""

import re
from pathlib import Path
from typing import Any

import pytest

import coordinator
from coordinator.epochs import fence, retire
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.statements.pools import lock_pools
from coordinator.periods import close
from protocol.lease import LeaseEvent, LeaseState, after
from tests.integration.coordinator.agent_harness import PERIOD, Agent, AgentHarness
from tests.integration.coordinator.fixtures import NOON

# The arguments are those for epoch 1, which holds one lease in each state.
TRANSITIONS_IN_SQL: list[tuple[LeaseEvent, str, tuple[Any, ...]]] = [
    (LeaseEvent.FENCE, fence.FENCE_LEASES, ([1],)),
    (LeaseEvent.LOSE, fence.LOSE_LEASES, ([1], None)),
    (LeaseEvent.LOSE, fence.LOSE_LEASES, ([1], NOON)),
    (LeaseEvent.PROVE, fence.PROVE_LEASES, ([1],)),
    (LeaseEvent.RETIRE, retire.RETIRE_LEASES, (1, NOON)),
    (LeaseEvent.CLOSE, close.CLOSE_LEASES, (PERIOD,)),
]
INSERT = """
INSERT INTO lease (epoch, quota, period, region, state, reported_at, expires_at) VALUES ($1, $2, $3, $4, $5, $6, $6)
"""
CHANGES_STATE = re.compile(r"UPDATE lease SET\s+state = (\S+?),?\s")


@pytest.mark.anyio
@pytest.mark.parametrize(("event", "statement", "arguments"), TRANSITIONS_IN_SQL)
async def test_a_statement_makes_the_transitions_of_the_table(
    agent_harness: AgentHarness, agent: Agent, event: LeaseEvent, statement: str, arguments: tuple[Any, ...]
) -> None:
    assert agent.epoch == 1
    keys = {state: Key(f"exports:tenant={state}", PERIOD) for state in LeaseState}
    await lock_pools(agent_harness.owner, keys.values(), keys.values())
    for state, key in keys.items():
        await agent_harness.owner.execute(INSERT, agent.epoch, *key, agent.region, state.value, NOON)
    await agent_harness.owner.execute(statement, *arguments)
    found = {row["quota"]: row["state"] for row in await agent_harness.owner.fetch("SELECT quota, state FROM lease")}
    changed = {state: found[key.quota] for state, key in keys.items()}
    assert changed == {state: after(state, event) or state for state in LeaseState}


def test_there_is_no_other_such_statement() -> None:
    """All other statements write the state that the rules decided on by the table."""
    compared = {statement for _, statement, _ in TRANSITIONS_IN_SQL}
    source = "".join(path.read_text() for path in Path(coordinator.__file__).parent.rglob("*.py"))
    expected = ["new.state", *(CHANGES_STATE.findall(statement)[0] for statement in compared)]
    assert sorted(CHANGES_STATE.findall(source)) == sorted(expected)
