"""The machine of a region's store: the store itself, an unreliable clock and a network.

Connections are the real `StoreConnection` above a virtual wire. It also records the ground truth: each admission is
noted outside of the store when the script admits it, so that no loss of the store's data loses it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from regional_agent.store.durability import READS_LINKS
from regional_agent.store.opening import Server
from tests.simulation.checks.rates import RateBounds
from tests.simulation.simulated.scripted_store import Replica, ScriptedStore, Work
from tests.simulation.simulated.virtual_time import VirtualClock


class Admission(NamedTuple):
    """Units of a lease that a script admitted."""

    region: str
    epoch: int
    quota: str
    period: str
    units: int
    enforced: bool  # False for an adjustment, which is not limited
    labels: str  # of its usage line


class Left(NamedTuple):
    """A machine that the address does not point to any more."""

    data: dict[str, Any]
    forgets_at_us: dict[str, int]
    run_id: str
    replid: str
    replica: Replica | None
    links_made: int
    redo: list[Callable[[], None]]  # what was admitted only here


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
    works: dict[Work, int] = field(default_factory=dict)  # of ended holds
    rates: RateBounds = field(default_factory=RateBounds)
    denials: Counter[str] = field(default_factory=Counter)
    stale: Replica | None = None  # a replica at whose address another one listens by now
    # What would undo the notes of what was admitted since the replica hangs, in an epoch whose replies it confirms; and
    # what would make them again.
    unconfirmed: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = ScriptedStore(f"{self.region}-1", f"{self.region}-replid-1")
        self.store.note, self.store.note_denial = self._admitted, self._denied
        self.store.note_work = self._worked
        self.store.note_rate, self.store.note_resets = self.rates.take, self.rates.reset
        self.tick()

    def tick(self) -> None:
        drift_us = self.clock.run_us() * self.drift_ppm // 1_000_000
        self.store.now_us = self.clock.us() + drift_us + self.offset_us

    # --- its replica --------------------------------------------------------------------------------------------------

    def link_replica(self, run_id: str = "") -> None:
        """Let a replica copy the store, and follow it from now on."""
        self.store.replica = Replica(run_id or f"{self.region}-{self.lives}-replica-{self.store.links_made}")
        self.store.links_made += 1
        self.stale = None
        self.unconfirmed.clear()

    def hang_replica(self) -> None:
        if self.store.replica is not None and self.store.replica.frozen is None:
            self.store.replica.frozen = self.snapshot()
            self.unconfirmed.clear()

    def replace_replica(self) -> None:
        """Cut off the replica, which stays as it is, and let another one listen at its address."""
        self.hang_replica()
        stale, unconfirmed = self.store.replica, list(self.unconfirmed)
        self.link_replica()
        self.stale, self.unconfirmed = stale, unconfirmed

    def promote(self, replica: Replica) -> bool:
        """Point the address to a replica. Return whether it has all that was answered, and was to prove it.

        What it does not have was never answered if it had to confirm it: then it was not admitted after all.
        """
        data, forgets_at_us = replica.frozen or self.snapshot()
        fence = self.store.hash("lh:fence")
        is_named = replica.run_id in fence.get("fingerprint", "").split("+")
        has_all = is_named and data.get("lh:fence", {}).get("nonce") == fence["nonce"] and "epoch" in fence
        only_here = self.unconfirmed if has_all and replica.frozen is not None else []
        for undo, _ in reversed(only_here):
            undo()
        self._leave([redo for _, redo in only_here])
        self.unconfirmed.clear()
        former, offset = self.store.replid, replica.offset
        self.lives += 1
        self.restarts += 1
        self.store.replica = self.stale = None
        self.store.restore((data, forgets_at_us))
        self.rates.forget()
        self.store.restart(replica.run_id, f"{self.region}-replid-{self.lives}")
        self.store.former_replid, self.store.shared_offset, self.store.offset = former, offset, offset
        self.link_replica()
        self.hang_up()
        return has_all

    def _is_unconfirmed(self) -> bool:
        replica = self.stale or self.store.replica
        is_hung = replica is not None and replica.frozen is not None
        return is_hung and "+" in self.store.hash("lh:fence").get("fingerprint", "")

    def execute(self, arguments: tuple[Argument, ...]) -> Any:
        self.tick()
        return self.store.execute(*arguments)

    def _admitted(self, lease: str, period: str, units: int, is_enforced: bool, labels: str) -> None:
        """Note an admission as the script makes it."""
        admission = self._admission(lease, period, units, is_enforced, labels)
        self.note(admission)
        if self._is_unconfirmed():
            self.unconfirmed.append((partial(self.note, admission._replace(units=-units)), self._again(admission)))

    def _worked(self, work: Work, units: int, covered: int) -> None:
        """Note the outcome of a hold: committed, charged or released. Its reserved units are free by then.

        A store that forgot the hold may end it again: it is the same work, and nothing covers what exceeds it.
        """
        before = self.works.get(work)
        covered = covered if before is None else 0
        more = max(0, units - (before or 0))
        self.works[work] = (before or 0) + more
        if self._is_unconfirmed():
            set_work = partial(self.works.__setitem__, work, self.works[work])
            self.unconfirmed.append((lambda: self._forget_work(work, before), set_work))
        for units_more, is_covered in ((covered, True), (more - covered, False)):
            if units_more:
                admission = self._admission(work.lease, work.period, units_more, is_covered, work.labels)
                self.note_work(admission)
                if self._is_unconfirmed():
                    undo = partial(self.note_work, admission._replace(units=-units_more))
                    self.unconfirmed.append((undo, self._again(admission)))

    def _again(self, admission: Admission) -> Callable[[], None]:
        """Return a note of what the former machine may report when it comes back. No service was told of it."""
        return partial(self.note_work, admission._replace(enforced=False))

    def _forget_work(self, work: Work, before: int | None) -> None:
        if before is None:
            del self.works[work]
        else:
            self.works[work] = before

    def _admission(self, lease: str, period: str, units: int, is_enforced: bool, labels: str) -> Admission:
        _, _, _, epoch, quota = lease.split(":", 4)
        return Admission(self.region, int(epoch), quota, period, units, is_enforced, labels)

    def _denied(self, reason: str) -> None:
        self.denials[f"DenialReason.{DenialReason(reason).name}"] += 1

    # --- what may happen to it ----------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        return self.store.snapshot()

    def restart(self, snapshot: Any | None, *, is_another_incarnation: bool) -> None:
        """Restart with all data or with a snapshot. A restart is another incarnation, unless it is invisible."""
        self.restarts += 1
        self.unconfirmed.clear()
        self.stale = None
        if self.store.replica is not None:
            self.store.replica.frozen = None
        if snapshot is not None:
            self.store.restore(snapshot)
            self.rates.forget()
        if is_another_incarnation:
            self.lives += 1
            self.store.restart(f"{self.region}-{self.lives}", f"{self.region}-replid-{self.lives}")
        self.hang_up()

    def fail_over(self, snapshot: Any) -> None:
        """Point the address to a replica, which may lag. The former machine stays as it was."""
        self._leave()
        self.restart(snapshot, is_another_incarnation=True)

    def fail_back(self) -> None:
        """Point the address back to the former machine, in the incarnation that it was in."""
        if self.left is not None:
            self.restart((self.left.data, self.left.forgets_at_us), is_another_incarnation=False)
            self.store.restart(self.left.run_id, self.left.replid)
            self.store.replica = None
            if self.left.replica is not None:  # it copies what is here, and follows again
                self.store.links_made = self.left.links_made
                self.link_replica(self.left.replica.run_id)
            for redo in self.left.redo:
                redo()
            self.left = None

    def _leave(self, redo: Sequence[Callable[[], None]] = ()) -> None:
        data, forgets_at_us = self.snapshot()
        store = self.store
        self.left = Left(data, forgets_at_us, store.run_id, store.replid, store.replica, store.links_made, list(redo))

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

    def send(
        self,
        arguments: Sequence[Argument],
        on_reply: OnReply,
        patience_s: float,
        *,
        at_once: bool = False,
        is_decision: bool = False,
    ) -> None:
        if not self._is_alive():
            return  # a killed agent sends nothing and waits forever
        if not self._is_open:
            on_reply(StoreUnavailable("the store's connection is closed"))
            return
        call = _Call(self._loop.time(), patience_s, on_reply, is_decision)
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

    async def _read_server(self, host: str, port: int) -> bytes:
        await asyncio.sleep(0.0004)
        if not self._machine.is_up:
            raise StoreUnavailable("the store is down")
        store = self._machine.store
        info: bytes = store.describe_replica() if host == "replica" else store.execute(*READS_LINKS, "server")
        return info

    async def connect(self) -> None:
        self._lost.clear()
        await asyncio.sleep(0.001)
        if not self._machine.is_up:
            raise ConnectionRefusedError
        self._protocol = Wire(self._machine, self._is_alive, self._on_lost)  # type: ignore[assignment]
        await self._greet()
