"""Roll a stack from the release before to this one and back, under load, and try each pair of releases meanwhile."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from leasehold.local_stack.processes import wait_until
from migrations.revisions import NEEDS, known_revisions
from protocol.compatibility.releases import RELEASE
from tests.chaos.balance import Line, settled_balance
from tests.chaos.load import Journal, Load, reason_of
from tests.chaos.pieces import PATIENCE_S, TENANTS, THIS_RELEASE
from tests.upgrades import pairs
from tests.upgrades.mixed_stack import MixedStack
from tests.upgrades.pairs import NEW, OLD, Pair

AGENT = "agent-eu-west"  # the only one of its region
FORWARD, BACK = "forward", "back"
PAUSE_S = 0.25
STEADY_ANSWERS = 50
BELONGS_TO_A_LIMIT = (429, "limit")
NEEDS_THIS_RELEASE = f"COMMENT ON TABLE alembic_version IS '{NEEDS}{RELEASE}'"
NEEDS_NOTHING = "COMMENT ON TABLE alembic_version IS NULL"
REVISION = "SELECT version_num FROM alembic_version"


@dataclass
class Answers:
    """The answers that services got and that were not expected."""

    failed: Counter[tuple[int, str]] = field(default_factory=Counter)  # by status and reason
    as_expected: int = 0

    def note(self, status: int, body: bytes) -> None:
        answer = status, reason_of(status, body)
        if status == 200 or answer == BELONGS_TO_A_LIMIT:
            self.as_expected += 1
        else:
            self.failed[answer] += 1


@dataclass
class Rolled:
    """The steps of an upgrade, the answers to services meanwhile, and the units in the ledger."""

    answers: Answers = field(default_factory=Answers)
    done: list[str] = field(default_factory=list)
    tried: dict[str, dict[str, str]] = field(default_factory=dict)  # of each pair, by direction: what went wrong
    refused: dict[str, str] = field(default_factory=dict)  # wrong orders, and the sentences that refused them
    has_new_schema: bool = False  # this release has steps that the one before lacks
    lines: list[Line] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)

    def try_out(self, pair: Pair, direction: str, probe: Callable[[], object]) -> None:
        faults = self.tried.setdefault(pair.name, {})
        try:
            probe()
        except Exception as error:  # each pair is a test of its own
            faults[direction] = f"{type(error).__name__}: {error}"
        else:
            faults.setdefault(direction, "")

    def faults(self) -> list[str]:
        admitted = self.journal.admitted
        return [
            *(fault for line in self.lines for fault in line.faults()),
            *(f"{times} answers {status} {reason}" for (status, reason), times in self.answers.failed.items()),
            *(
                f"{line.tenant}: {line.consumed} booked of {admitted[line.tenant]} admitted"
                for line in self.lines
                if line.consumed != admitted[line.tenant]
            ),
            *(
                f"{pair}, {direction}: {fault}"
                for pair, found in self.tried.items()
                for direction, fault in found.items()
                if fault
            ),
        ]


def forward(stack: MixedStack, rolled: Rolled) -> Iterator[str]:
    """Upgrade in the order of the guide. Yield what was done."""
    if stack.execute(REVISION) != known_revisions()[-1]:
        rolled.refused |= stack.refusal_of(THIS_RELEASE)
        yield "a coordinator that is newer than the schema is refused"
    done = stack.migrate_with(THIS_RELEASE)
    assert done.exit_code == 0, done.stderr
    rolled.try_out(pairs.SCHEMA, FORWARD, lambda: pairs.try_coordinator(stack, OLD))
    yield "the schema is newer than all processes"
    spare = stack.start_coordinator(THIS_RELEASE)
    spare.wait()
    rolled.try_out(pairs.COORDINATORS, FORWARD, lambda: pairs.try_two_coordinators(stack, stack.url_of_spare))
    stack.keep_new_coordinator()
    rolled.try_out(pairs.NEW_COORDINATOR, FORWARD, lambda: pairs.try_coordinator(stack, OLD))
    rolled.try_out(pairs.OLD_COMMAND, FORWARD, lambda: pairs.try_commands(stack, stack.before, OLD))
    yield "a newer coordinator serves older agents and an older command line"
    stack.replace_agent(NEW, THIS_RELEASE)
    rolled.try_out(pairs.STORE, FORWARD, lambda: pairs.try_one_store(stack))
    rolled.try_out(pairs.OLD_CLIENT, FORWARD, lambda: pairs.try_client(stack, stack.before, NEW))
    rolled.try_out(pairs.NEW_CLIENT, FORWARD, lambda: pairs.try_client(stack, THIS_RELEASE, OLD))
    yield "agents of both releases share a store, and clients of both use both"
    stack.replace_agent(OLD, THIS_RELEASE)
    stack.replace_agent(AGENT, THIS_RELEASE)
    yield "all is new"


def back(stack: MixedStack, rolled: Rolled) -> Iterator[str]:
    """Go back, with the coordinator in the middle, so that it is older than some agents and newer than others."""
    stack.replace_agent(AGENT, stack.before)
    rolled.try_out(pairs.NEW_COORDINATOR, BACK, lambda: pairs.try_exchanges(stack, AGENT))
    yield "an agent went back, and a newer coordinator serves it"
    stack.start_coordinator(stack.before).wait()
    rolled.try_out(pairs.COORDINATORS, BACK, lambda: pairs.try_two_coordinators(stack, stack.url_of_spare))
    stack.keep_new_coordinator()
    rolled.try_out(pairs.NEW_AGENT, BACK, lambda: pairs.try_coordinator(stack, OLD))
    rolled.try_out(pairs.NEW_AGENT, BACK, lambda: pairs.try_shared_limits(stack, NEW))
    rolled.try_out(pairs.NEW_COMMAND, BACK, lambda: pairs.try_commands(stack, THIS_RELEASE, AGENT))
    yield "an older coordinator serves newer agents and a newer command line"
    stack.replace_agent(OLD, stack.before)
    rolled.try_out(pairs.STORE, BACK, lambda: pairs.try_one_store(stack))
    rolled.try_out(pairs.OLD_CLIENT, BACK, lambda: pairs.try_client(stack, stack.before, NEW))
    rolled.try_out(pairs.NEW_CLIENT, BACK, lambda: pairs.try_client(stack, THIS_RELEASE, OLD))
    stack.replace_agent(NEW, stack.before)
    rolled.try_out(pairs.SCHEMA, BACK, lambda: pairs.try_coordinator(stack, NEW))
    yield "all but the schema is old again"


def refuse_old_releases(stack: MixedStack, rolled: Rolled) -> None:
    """Start a coordinator that is older than what the schema needs, and migrate with the release before."""
    stack.execute(NEEDS_THIS_RELEASE)
    rolled.refused |= stack.refusal_of(stack.before)
    stack.execute(NEEDS_NOTHING)
    if rolled.has_new_schema:
        done = stack.migrate_with(stack.before)
        assert done.exit_code, done
        rolled.refused["migrate"] = done.stderr


def roll(stack: MixedStack, rounds: int = 1) -> Rolled:
    """Begin with the release before, and roll forward and back under load."""
    rolled = Rolled(has_new_schema=stack.execute(REVISION) != known_revisions()[-1])
    with _under_load(stack, rolled):
        for _ in range(rounds):
            rolled.done += [*forward(stack, rolled), *back(stack, rolled)]
    stack.stop_agents()
    rolled.lines = settled_balance(stack, rolled.journal, TENANTS)
    refuse_old_releases(stack, rolled)
    return rolled


@contextmanager
def _under_load(stack: MixedStack, rolled: Rolled) -> Iterator[None]:
    load = Load(stack.agents_of, seed=1, pause_s=PAUSE_S, note=rolled.answers.note)
    thread = threading.Thread(target=lambda: asyncio.run(load.run()), name="load")
    thread.start()
    try:
        _wait_until_steady(rolled)
        yield
    finally:
        load.stop()
        thread.join()
        rolled.journal = load.journal


def _wait_until_steady(rolled: Rolled) -> None:
    """Wait until agents have leases: a request before that is denied, whatever the release."""
    assert wait_until(lambda: rolled.answers.as_expected >= STEADY_ANSWERS, PATIENCE_S), rolled.answers
    rolled.answers.failed.clear()
