"""What is tried with each pair of processes of which one is of the release before.

`tests/upgrades/rolling.py` tries them while a stack is rolled forward and back. docs/guides/upgrading.md has the table.
"""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from leasehold.local_stack.calls import HttpReply, is_ready
from leasehold.local_stack.processes import wait_until
from tests.chaos.pieces import AGENTS, PATIENCE_S
from tests.upgrades.mixed_stack import LIMITS, MixedStack, run_program

OLD, NEW = "agent-us-east", "agent-us-east-2"  # the two agents of one store, while they are of different releases
CLIENT = Path(__file__).with_name("client_program.py").read_text(encoding="utf-8")
_numbers = itertools.count()


class Pair(NamedTuple):
    before: str  # is of the release before
    this: str  # is of this release
    tried: str

    @property
    def name(self) -> str:
        return f"{self.before} + {self.this}"


SCHEMA = Pair("coordinator", "schema", "a lease is granted, used and booked; limits, plans and blocks change")
COORDINATORS = Pair("coordinator", "coordinator", "both ready on one database; what one changes the other returns")
NEW_COORDINATOR = Pair("agent", "coordinator", "a lease is granted, used and booked; plans and blocks take effect")
NEW_AGENT = Pair("coordinator", "agent", "the same, and a shared rate is reported")
STORE = Pair("agent", "agent on the same store", "an operation is charged once; each ends holds and slots of the other")
OLD_COMMAND = Pair("command line", "coordinator, agent", "commands that read, and commands that change")
NEW_COMMAND = Pair("coordinator, agent", "command line", "the same")
OLD_CLIENT = Pair("Python client", "agent", "checks, batches, explanations, holds and slots; threads and asyncio")
NEW_CLIENT = Pair("agent", "Python client", "the same")
PAIRS = (
    SCHEMA, COORDINATORS, NEW_COORDINATOR, NEW_AGENT, STORE, OLD_COMMAND, NEW_COMMAND, OLD_CLIENT, NEW_CLIENT,
)  # fmt: skip
HEAD = ("of the release before", "of this release", "what is tried")


def table() -> str:
    """Return the table of the guide."""
    rows = [HEAD, ("---",) * len(HEAD), *PAIRS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# --- agents, coordinators and the schema ------------------------------------------------------------------------------


def new_tenant() -> str:
    return f"pair-{next(_numbers)}"


def subject(tenant: str, route: str = "/v1/exports") -> dict[str, Any]:
    return {"subject": {"tenant": tenant, "route": route}}


def try_exchanges(stack: MixedStack, agent: str) -> None:
    """Let an agent be granted a lease, and compare what it admits with what is booked and with what people change."""
    tenant = new_tenant()
    url = stack.coordinator
    _expect(stack.check(agent, {**subject(tenant), "cost": 3}), 200)
    assert wait_until(lambda: booked(stack, tenant) == 3, PATIENCE_S), booked(stack, tenant)
    stack.ask("PUT", f"{url}/v1/subscriptions/{tenant}", {"plan": "small"})
    beyond = {**subject(tenant), "cost": 301, "mode": "peek"}
    assert wait_until(lambda: _reason(stack.check(agent, beyond)) == "never", PATIENCE_S), stack.check(agent, beyond)
    stack.ask("POST", f"{url}/v1/blocks", {"field": "tenant", "value": tenant, "reason": "a test"})
    blocked = {**subject(tenant), "mode": "peek"}
    assert wait_until(lambda: stack.check(agent, blocked).body.get("blocked_by") == "tenant", PATIENCE_S)
    assert is_ready(stack.agents[agent])


def try_shared_limits(stack: MixedStack, agent: str) -> None:
    """Let an agent report the demand of a rate, and use the share that it is sent."""
    tenant, region = new_tenant(), AGENTS[agent]

    def is_reported() -> bool:
        for _ in range(5):  # more than the region's part
            assert stack.check(agent, subject(tenant, "/v1/mail")).status in (200, 429)
        rows = stack.read("/v1/rates?quota=mail")["data"]
        return any(tenant in json.dumps(row) and region in json.dumps(row) for row in rows)

    assert wait_until(is_reported, PATIENCE_S), stack.read("/v1/rates?quota=mail")


def try_coordinator(stack: MixedStack, agent: str) -> None:
    """Let people change the limits, and an agent work with this coordinator."""
    found = stack.ask("PUT", f"{stack.coordinator}/v1/limits", LIMITS)
    assert stack.read("/v1/limits")["version"] == found["version"]
    assert is_ready(stack.coordinator)
    try_exchanges(stack, agent)


def try_two_coordinators(stack: MixedStack, url: str) -> None:
    """Compare what two coordinators return, of which one is at `url`."""
    tenant, first = new_tenant(), stack.coordinator
    for one, other, plan in ((first, url, "small"), (url, first, "large")):
        stack.ask("PUT", f"{one}/v1/subscriptions/{tenant}", {"plan": plan})
        assert stack.ask("GET", f"{other}/v1/subscriptions/{tenant}")["plan"] == plan
    assert is_ready(first)
    assert is_ready(url)


def booked(stack: MixedStack, tenant: str) -> int:
    [period] = stack.read("/v1/periods")["data"]
    found = stack.read(f"/v1/periods/{period['id']}/reconciliation")
    assert (found["status"], found["drift"]) == ("balanced", 0), found
    return sum(quota["consumed"] for quota in found["quotas"] if quota["tenant"] == tenant)


# --- two agents on one store ------------------------------------------------------------------------------------------


def try_one_store(stack: MixedStack, one: str = OLD, other: str = NEW) -> None:
    """Let two agents with different function libraries work on the same keys."""
    tenant = new_tenant()
    statuses = [stack.ask("GET", f"{stack.agents[name]}/v1/status") for name in (one, other)]
    libraries = {status["store_library"] for status in statuses}
    assert len(libraries) == 2, libraries
    assert wait_until(lambda: libraries <= _libraries(stack, other).keys(), PATIENCE_S), _libraries(stack, other)
    for name in (one, other, one):
        _expect(stack.check(name, {**subject(tenant), "cost": 2, "operation_id": tenant}), 200)
    _try_holds(stack, tenant, one, other)
    _try_holds(stack, tenant, other, one)
    for name, status in ((one, 200), (other, 200), (one, 429), (other, 429)):
        _expect(stack.check(name, subject(tenant, "/v1/search")), status)
    assert wait_until(lambda: booked(stack, tenant) == 2 + 2 * 3, PATIENCE_S), booked(stack, tenant)


def _try_holds(stack: MixedStack, tenant: str, one: str, other: str) -> None:
    """Make holds and take a slot at one agent, and end them at the other."""
    held = [_hold(stack, one, tenant, "/v1/exports", 5) for _ in range(2)]
    _expect(stack.check(other, {"units": 3}, f"/v1/holds/{held[0]}:commit"), 200)
    _expect(stack.check(other, {}, f"/v1/holds/{held[1]}:release"), 200)
    slot = _hold(stack, one, tenant, "/v1/jobs", 1)
    _expect(_ask_for_hold(stack, other, tenant, "/v1/jobs", 1), 429)
    _expect(stack.check(other, {}, f"/v1/holds/{slot}:release"), 200)


def _hold(stack: MixedStack, agent: str, tenant: str, route: str, units: int) -> str:
    return str(_expect(_ask_for_hold(stack, agent, tenant, route, units), 201)["hold_id"])


def _ask_for_hold(stack: MixedStack, agent: str, tenant: str, route: str, units: int) -> HttpReply:
    body = {**subject(tenant, route), "units": units, "ttl_ms": 60_000, "operation_id": new_tenant()}
    return stack.check(agent, body, "/v1/holds")


def _libraries(stack: MixedStack, agent: str) -> dict[str, int]:
    found: dict[str, int] = stack.ask("GET", f"{stack.agents[agent]}/v1/status")["store_libraries"]
    return found


# --- commands and clients ---------------------------------------------------------------------------------------------


def try_commands(stack: MixedStack, python: Path, agent: str) -> None:
    """Run commands of each kind, as a person would who upgrades the command line later, or first."""
    tenant = new_tenant()
    commands = [
        ["region", "list", "--json"],
        ["quota", "list", "--json"],
        ["quota", "export"],
        ["allocations", "--json"],
        ["rates", "--json"],
        ["slots", "--json"],
        ["usage", "--json"],
        ["period", "list", "--json"],
        ["tenant", "list", "--json"],
        ["suspense", "list", "--json"],
        ["lane", "list", "--json"],
        ["decisions", "--json"],
        ["doctor", "--json"],
        ["subscription", "set", tenant, "small", "--json"],
        ["override", "create", "exports", "50", "--for", f"tenant={tenant}", "--reason", "a test", "--json"],
        ["block", "add", f"tenant={tenant}", "--reason", "a test", "--json"],
        ["check", f"tenant={new_tenant()}", "route=/v1/exports", "--json"],
    ]
    for command, done in zip(commands, stack.run(python, commands, agent), strict=True):
        assert done.exit_code == 0 or command[0] == "doctor", (command, done)  # it may have found something
        assert done.stdout if command == ["quota", "export"] else json.loads(done.stdout) is not None, command


def try_client(stack: MixedStack, python: Path, agent: str) -> None:
    run_program(python, CLIENT, {}, "", stack.agents[agent], new_tenant())


def _expect(answer: HttpReply, status: int) -> Any:
    assert answer.status == status, answer
    return answer.body


def _reason(answer: HttpReply) -> str | None:
    found = [policy.get("reason") for policy in answer.body.get("policies", ())]
    return next(filter(None, found), None)
