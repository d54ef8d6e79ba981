"""A second coordinator finishes a rebalance, as planned, whose coordinator was killed midway."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack.calls import call
from leasehold.local_stack.processes import wait_until
from tests.chaos.pieces import AGENTS, PATIENCE_S, Stack

EXPORTS = "exports:tenant=large"
PEEK = {"subject": {"tenant": "large", "route": "/v1/exports"}, "cost": 500, "mode": "peek"}


@contextmanager
def held_up(stack: Stack, region: str) -> Iterator[None]:
    """Suspend the agents of a region in the middle of their work."""
    processes = [stack.pieces[name].process for name, where in AGENTS.items() if where == region]
    pids = [process.pid for process in processes if process is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def begun_and_killed(stack: Stack, number: int, wish: dict[str, Any], how_far: Callable[[Any], bool]) -> dict[str, Any]:
    """Let a coordinator start the rebalance, kill it at the given stage, and return the plan that it answered."""
    url, coordinator = stack.another_coordinator(f"coordinator-{number}")
    coordinator.begin()
    coordinator.wait()
    begun: dict[str, Any] = stack.ask("POST", f"{url}/v1/rebalances", wish)
    path = f"/v1/rebalances/{begun['id']}"
    assert wait_until(lambda: how_far(stack.ask("GET", f"{url}{path}")), PATIENCE_S), stack.ask("GET", f"{url}{path}")
    coordinator.kill()
    found: dict[str, Any] = stack.read(path)
    assert found["state"] == "running"
    return found


def ended(stack: Stack, id_: str) -> Any:
    assert wait_until(lambda: stack.read(f"/v1/rebalances/{id_}")["state"] != "running", PATIENCE_S)
    return stack.read(f"/v1/rebalances/{id_}")


def held(stack: Stack) -> dict[str, int]:
    [found] = stack.read(f"/v1/allocations?quota={EXPORTS}")["data"]
    return {each["region"]: each["outstanding"] for each in found["regions"]}


def move(units: int) -> dict[str, Any]:
    return {"mode": "move", "quota": EXPORTS, "from": "us-east", "to": "eu-west", "units": units}


@pytest.mark.extended
def test_another_coordinator_goes_on_with_a_rebalance_whose_own_was_killed(tmp_path: Path) -> None:
    """Kill it once before the source returned units, and once while the returned units are in transit."""
    stack = Stack(tmp_path)
    try:
        stack.begin()
        assert call("POST", f"{stack.agents['agent-us-east']}/v1/check", body=PEEK).status == 200
        assert wait_until(lambda: held(stack).get("us-east", 0) >= 500, PATIENCE_S)
        whole = held(stack)["us-east"]
        with held_up(stack, "us-east"):
            first = begun_and_killed(stack, 1, move(300), lambda found: bool(found["waits_for"]))
        done = [ended(stack, first["id"])]
        assert first["progress"] == {"recalled": 300, "returned": 0, "regranted": 0}
        with held_up(stack, "eu-west"):
            second = begun_and_killed(stack, 2, move(100), lambda found: bool(found["progress"]["returned"] == 100))
        done.append(ended(stack, second["id"]))
        assert second["progress"]["regranted"] == 0

        for found, units in zip(done, (300, 100), strict=True):
            assert (found["state"], found["plan"]["cannot"]) == ("done", [])
            assert found["progress"] == {"recalled": units, "returned": units, "regranted": units}
            assert [each["units"] for each in found["plan"]["moves"]] == [units]
        assert held(stack)["us-east"] == whole - 400
        assert held(stack)["eu-west"] >= 400, "and what its own demand asks for"
        [period] = stack.read("/v1/periods")["data"]
        found = stack.read(f"/v1/periods/{period['id']}/reconciliation")
        assert (found["status"], found["drift"]) == ("balanced", 0)
    finally:
        stack.end()
