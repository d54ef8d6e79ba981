"""One run: a seed, a list of events and steps; then healing, a quiet time and the final checks.

A run is a function of its seed and its events. Its history is hashed, so that two runs can be compared.
"""

import asyncio
import hashlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from protocol import lease as lease_module
from tests.simulation.checks.coverage import wrongly_impossible
from tests.simulation.checks.invariants import ALWAYS, AT_THE_END, Invariant, Watch
from tests.simulation.faults import DEPTHS, REGIONS, Event, draw
from tests.simulation.simulated import operators
from tests.simulation.simulated.virtual_time import VirtualLoop
from tests.simulation.world import ALL_LEASED, World, happen

HEALED_S = 75  # longer than the longest time-out, back-off, long poll and pause of a refused lane together
QUIET_S = 16  # longer than a message may be late and a lease lasts: what is in order by then stays so


@dataclass(frozen=True)
class Violation:
    seed: int
    step: int
    invariant: str
    what: str


@dataclass
class Result:
    violation: Violation | None
    digest: str
    steps: int
    reached: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    admitted: int = 0
    booked: int = 0
    suspense: int = 0


class Violated(Exception):
    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.what)
        self.violation = violation


def run(seed: int, steps: int, events: Sequence[Event] | None = None, mutant: Any = None) -> Result:
    """Run a seed. `mutant` is a context manager that takes the world and removes a guard."""
    chosen = draw(seed, steps) if events is None else list(events)
    loop = VirtualLoop()
    asyncio.set_event_loop(None)
    try:
        world = World(seed, loop)
        loop.set_exception_handler(lambda _, about: world.note_unhandled(about))
        with world.composed(), reached(world) as cells, mutant(world) if mutant else nullcontext():
            try:
                return loop.run_until_complete(_Run(world, steps, chosen, mutant is None).result(cells))
            finally:
                _end(world)
    finally:
        loop.close()


def _end(world: World) -> None:
    """Stop every task, and leave nothing behind."""
    for agent in world.agents:
        world.kill(agent)
    loop = world.loop
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.01))
    loop.run_until_complete(loop.shutdown_asyncgens())


@contextmanager
def reached(world: World) -> Iterator[Counter[str]]:
    """Return the cells of the transition table that were reached."""
    cells: Counter[str] = Counter()

    class Table(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            cells[f"{key[0].name} / {key[1].name}"] += 1
            return super().get(key, default)

    with patch.object(lease_module, "TRANSITIONS", Table(lease_module.TRANSITIONS)):
        yield cells


class _Run:
    def __init__(self, world: World, steps: int, events: list[Event], is_as_it_should_be: bool) -> None:
        self.world, self.steps, self.events = world, steps, events
        self.is_as_it_should_be = is_as_it_should_be  # not for mutants, which may do impossible things
        self.watch = Watch()
        self.hash = hashlib.sha256()
        self.pace = world.chance("pace")
        self.by_step: dict[int, list[Event]] = {}
        for event in events:
            self.by_step.setdefault(event.step, []).append(event)
        self.to_keep = {(event.region, event.step - event.number) for event in events if event.kind in DEPTHS}

        self.to_hang: dict[int, list[str]] = {}  # the replicas that lag when they are promoted
        for event in events:
            if event.kind == "store_fails_over" and event.number % 2:
                self.to_hang.setdefault(event.step - event.number, []).append(event.region)

    async def result(self, cells: Counter[str]) -> Result:
        violation, world = None, self.world
        denials = (machine.denials for machine in world.machines.values())
        try:
            await self._live()
        except Violated as violated:
            violation = violated.violation
        except Exception as error:  # the other seeds run in any case
            violation = Violation(world.seed, world.step, type(error).__name__, traceback.format_exc())
        if violation is None and self.is_as_it_should_be:
            wrong = "; ".join(wrongly_impossible(cells))
            violation = Violation(world.seed, world.step, "impossible_cells", wrong) if wrong else None
        return Result(
            violation,
            self.hash.hexdigest(),
            world.step,
            reached=sum(denials, cells + world.coordinators.outcomes),
            faults=Counter(event.kind for event in self.events if event.step <= world.step),
            admitted=sum(world.truth.admitted.values()) + world.in_journals(),
            booked=sum(pool.consumed for pool in world.ledger.pools.values()),
            suspense=sum(pool.suspense for pool in world.ledger.pools.values()),
        )

    async def _live(self) -> None:
        world = self.world
        world.put_limits(world.random.randint(40, 300), ALL_LEASED)
        for region in REGIONS:
            world.commit(world.ledger.put_region(region, "active"))
            world.start_agent(region)
        world.start_agent(REGIONS[0])
        world.ledger.everything_is_replicated()
        services = world.loop.create_task(world.serve())
        books = world.loop.create_task(world.keep_books())
        for step in range(self.steps):
            await self._step(step)
        services.cancel()
        await self._heal()
        self._look(AT_THE_END)
        books.cancel()

    async def _step(self, step: int) -> None:
        world = self.world
        world.step = step
        for region, kept in self.to_keep:
            if kept == step:
                world.snapshots[region, step] = world.machines[region].snapshot()
        for region in self.to_hang.get(step, ()):
            world.machines[region].hang_replica()
        for end in world.until.pop(step, []):
            end()
        for event in self.by_step.get(step, []):
            happen(world, event)
            if event.kind == "later":
                await asyncio.sleep(event.number)
        await asyncio.sleep(self.pace.choice([0.001, 0.01, 0.05, 0.1, 0.2]))
        self._look(ALWAYS)

    def _look(self, invariants: Sequence[Invariant]) -> None:
        world = self.world
        self.hash.update(repr((world.loop.time(), sorted(world.truth.admitted.items()))).encode())
        self.hash.update(repr([world.ledger.leases.get(name) for name in world.ledger.touched]).encode())
        for invariant in invariants:
            for what in invariant(world, self.watch):
                raise Violated(Violation(world.seed, world.step, invariant.__name__, what))
        world.ledger.touched.clear()
        world.ledger.proved.clear()

    async def _heal(self) -> None:
        """Repair everything, stop all requests, and give time for what is under way."""
        world = self.world
        world.demand = dict.fromkeys(REGIONS, 0)
        for ends in world.until.values():
            for end in ends:
                end()
        for agent in world.agents:
            agent.calls_left = None
        world.coordinators.dies_before_commit = world.coordinators.dies_after_commit = 0
        for region in REGIONS:
            weather = world.weather[region]
            world.commit(world.ledger.put_region(region, "active"))
            weather.loss = weather.doubling = weather.lateness = 0.0
            if region not in world.lost_regions and not any(not a.stopping.is_set() for a in world.alive(region)):
                world.start_agent(region)
        for second in range(HEALED_S):
            world.step += 1
            stopped = {world.ledger.epochs[epoch].region for epoch, _, _ in world.ledger.regressed()}
            for region in sorted((world.told_and_lost.keys() - world.coordinators.alarmed) | stopped):
                world.ask(region, world.random, "adjust", 1)  # only who says something shows what the ledger lost
            await asyncio.sleep(1)
            operators.close_at_last(world)
            self._look(ALWAYS)
            if second >= QUIET_S and self._is_in_order():
                return

    def _is_in_order(self) -> bool:
        """Return whether nothing is left to wait for."""
        return not any(what for invariant in AT_THE_END for what in invariant(self.world, self.watch))


def shrink(seed: int, steps: int, violation: Violation, mutant: Any = None, tries: int = 400) -> list[Event]:
    """Return the events that are needed: leave out larger and then smaller parts while the same invariant fails."""
    events = [event for event in draw(seed, steps) if event.step <= violation.step]
    size = max(1, len(events) // 2)
    while size:
        at = 0
        while at < len(events) and tries:
            tries -= 1
            fewer = events[:at] + events[at + size :]
            found = run(seed, steps, fewer, mutant).violation
            if found is not None and found.invariant == violation.invariant:
                events = fewer
            else:
                at += size
        size //= 2
    return events


Mutation = Callable[[World], AbstractContextManager[None]]
