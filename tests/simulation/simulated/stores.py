"""The machine of a region's store: the store itself, an unreliable clock and a network.

Connections are the real `StoreConnection` above a virtual wire. It also records the ground truth: each admission is
noted outside of the store when the script admits it, so that no loss of the store's data loses it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from protocol.outcomes import DenialReason
from regional_agent.store.connection import (
    Argument,
    NoAnswer,
    OnReply,
    StoreConnection,
    StoreError,
    StoreUnavailable,
    _Call,
)
from regional_agent.store.opening import Server
from tests.simulation.simulated.scripted_store import ScriptedStore
from tests.simulation.simulated.virtual_time import VirtualClock


class Admission(NamedTuple):
    """Units of a lease that a script admitted."""

    region: str
    epoch: int
    quota: str
    period: str
    units: int
    enforced: bool  # False for an adjustment, which is not limited


class Left(NamedTuple):
    """A machine that the address does not point to any more."""

    data: dict[str, Any]
    forgets_at_us: dict[str, int]
    run_id: str
    replid: str


@dataclass
class Machine:
    """One region's store."""

    region: str
    clock: VirtualClock
    random: random.Random
    note: Callable[[Admission], None]
    drift_ppm: int = 0
    offset_us: int = 0
    is_up: bool = True
    is_slow: bool = False
    lives: int = 1
    restarts: int = 0
    hang_ups: int = 0
    store: ScriptedStore = field(init=False)
    wires: list["Wire"] = field(default_factory=list)
    admitting_epoch: int = 0
    jumped_back: bool = False
    left: Left | None = None
    note_work: Callable[[Admission], None] = lambda _: None
    works: dict[tuple[str, str, str], int] = field(default_factory=dict)  # of ended holds, by lease, period and part
    denials: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.store = ScriptedStore(f"{self.region}-1", f"{self.region}-replid-1")
        self.store.note, self.store.note_denial = self._admitted, self._denied
        self.store.note_work = self._worked
        self.tick()

    def tick(self) -> None:
        drift_us = self.clock.run_us() * self.drift_ppm // 1_000_000
        self.store.now_us = self.clock.us() + drift_us + self.offset_us

    def execute(self, arguments: tuple[Argument, ...]) -> Any:
        self.tick()
        return self.store.execute(*arguments)

    def _admitted(self, lease: str, period: str, units: int, is_enforced: bool) -> None:
        """Note an admission as the script makes it."""
        self.note(self._admission(lease, period, units, is_enforced))

    def _worked(self, lease: str, period: str, part: str, units: int, covered: int) -> None:
        """Note the outcome of a hold: committed, charged or released. Its reserved units are free by then.

        A store that forgot the hold may end it again: it is the same work, and nothing covers what exceeds it.
        """
        before = self.works.get((lease, period, part))
        covered = covered if before is None else 0
        more = max(0, units - (before or 0))
        self.works[lease, period, part] = (before or 0) + more
        for units_more, is_covered in ((covered, True), (more - covered, False)):
            if units_more:
                self.note_work(self._admission(lease, period, units_more, is_covered))

    def _admission(self, lease: str, period: str, units: int, is_enforced: bool) -> Admission:
        _, _, _, epoch, quota = lease.split(":", 4)
        return Admission(self.region, int(epoch), quota, period, units, is_enforced)

    def _denied(self, reason: str) -> None:
        self.denials[f"DenialReason.{DenialReason(reason).name}"] += 1

    # --- what may happen to it ----------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        return self.store.snapshot()

    def restart(self, snapshot: Any | None, *, is_another_incarnation: bool) -> None:
        """Restart with all data or with a snapshot. A restart is another incarnation, unless it is invisible."""
        self.restarts += 1
        if snapshot is not None:
            self.store.restore(snapshot)
        if is_another_incarnation:
            self.lives += 1
            self.store.restart(f"{self.region}-{self.lives}", f"{self.region}-replid-{self.lives}")
        self.hang_up()

    def fail_over(self, snapshot: Any) -> None:
        """Point the address to a replica, which may lag. The former machine stays as it was."""
        data, forgets_at_us = self.snapshot()
        self.left = Left(data, forgets_at_us, self.store.run_id, self.store.replid)
        self.restart(snapshot, is_another_incarnation=True)

    def fail_back(self) -> None:
        """Point the address back to the former machine, in the incarnation that it was in."""
        if self.left is not None:
            self.restart((self.left.data, self.left.forgets_at_us), is_another_incarnation=False)
            self.store.restart(self.left.run_id, self.left.replid)
            self.left = None

    def hang_up(self) -> None:
        self.hang_ups += 1
        for wire in list(self.wires):
            wire.lost()

    def stop(self) -> None:
        self.is_up = False
        self.hang_up()

    def start(self) -> None:
        self.is_up = True


_NO_ANSWER: Any = object()


class Wire:
    """The network below a StoreConnection: commands and replies arrive in order, with a delay."""

    def __init__(self, machine: Machine, is_alive: Callable[[], bool], on_lost: Callable[[], None]) -> None:
        self._machine = machine
        self._is_alive = is_alive
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[_Call, None] = {}  # in the order in which they were sent
        self._is_open = True
        self._arrives_at = 0.0
        machine.wires.append(self)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply, patience_s: float, *, at_once: bool) -> None:
        if not self._is_alive():
            return  # a killed agent sends nothing and waits forever
        if not self._is_open:
            on_reply(StoreUnavailable("the store's connection is closed"))
            return
        call = _Call(self._loop.time(), patience_s, on_reply, is_decision=at_once)
        self._waiting[call] = None
        deadline = self._loop.time() + patience_s
        self._arrives_at = max(self._arrives_at, self._loop.time() + self._latency_s())
        self._loop.call_at(self._arrives_at, self._arrive, call, tuple(arguments), deadline)
        if self._arrives_at > deadline:
            self._loop.call_at(deadline, self._settle, call, _NO_ANSWER)

    def _latency_s(self) -> float:
        return self._machine.random.uniform(0.05, 0.6) if self._machine.is_slow else 0.0002

    def _arrive(self, call: _Call, arguments: tuple[Argument, ...], deadline: float) -> None:
        """Deliver with one timer: what arrives late is known by now, so no timer per time-out is needed."""
        if not self._is_open:
            return
        replies_at, reply = deadline, _NO_ANSWER
        if self._machine.is_up:
            replies_at = self._loop.time() + self._latency_s()
            reply = self._execute(arguments)
        if replies_at > deadline:
            replies_at, reply = deadline, _NO_ANSWER
        self._loop.call_at(replies_at, self._settle, call, reply)

    def _execute(self, arguments: tuple[Argument, ...]) -> Any:
        try:
            return self._machine.execute(arguments)
        except StoreError as error:
            return error

    def _settle(self, call: _Call, reply: Any) -> None:
        self._waiting.pop(call, None)
        if self._is_alive():
            call.complete(NoAnswer("no answer in time") if reply is _NO_ANSWER else reply)

    def lost(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._machine.wires.remove(self)
        for call in list(self._waiting):
            self._settle(call, NoAnswer("the store's connection was lost"))
        if self._is_alive():
            self._on_lost()

    def close(self) -> None:
        self.lost()


class VirtualConnection(StoreConnection):
    """The real connection with another wire."""

    def __init__(
        self,
        machine: Machine,
        is_alive: Callable[[], bool],
        **options: Any,
    ) -> None:
        super().__init__(Server.at("redis://store"), **options)
        self._machine = machine
        self._is_alive = is_alive

    async def connect(self) -> None:
        self._lost.clear()
        await asyncio.sleep(0.001)
        if not self._machine.is_up:
            raise ConnectionRefusedError
        self._protocol = Wire(self._machine, self._is_alive, self._on_lost)  # type: ignore[assignment]
        await self._greet()
