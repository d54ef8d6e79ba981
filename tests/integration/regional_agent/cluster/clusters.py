"""A real Cluster on this machine: three primaries, with replicas on request."""

import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hiredis

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from regional_agent.cluster.rules.slot_map import SLOTS, slot_of
from tests.conftest import free_port

PASSWORD = "secret"
PRIMARIES = 3
LARGEST_PORT = 55_535
# No node takes another for failed by time: tests trigger failovers.
SETTINGS = """\
cluster-enabled yes
cluster-port {bus}
cluster-node-timeout 60000
cluster-require-full-coverage no
cluster-replica-no-failover yes
masterauth {password}
repl-diskless-sync-delay 0
"""


def _port() -> int:
    port = next(port for port in iter(free_port, 0) if port <= LARGEST_PORT and port not in _given)
    _given.add(port)
    return port


_given: set[int] = set()  # a node that is not started yet has none open


@dataclass
class Node:
    directory: Path
    port: int = field(default_factory=_port)
    bus: int = field(default_factory=_port)
    appendfsync: str = "everysec"
    binary: Path | None = None  # another server than the wheel's
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        more = SETTINGS.format(bus=self.bus, password=PASSWORD)
        log = self.directory.with_suffix(".log")
        self.process = embedded.start_store(
            self.directory, self.port, PASSWORD, appendfsync=self.appendfsync, more=more, log=log, binary=self.binary
        )
        assert wait_until(lambda: embedded.store_is_ready(self.port, PASSWORD), 30), log.read_text()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ask(self, *command: str | int) -> Any:
        with socket.create_connection((embedded.LOOPBACK, self.port), timeout=10) as connection:
            reader = hiredis.Reader(encoding="utf-8")
            connection.sendall(b"".join(map(_packed, (("AUTH", PASSWORD), command))))
            replies: list[Any] = []
            while len(replies) < 2:
                reader.feed(connection.recv(65536))
                while (reply := reader.gets()) is not False:
                    replies.append(reply)
        if isinstance(replies[1], Exception):
            raise replies[1]
        return replies[1]

    def take_over(self) -> None:
        """Promote a replica once it has all data of the primary; the former primary follows it."""
        self.until_it_is("master_link_status:up")
        assert self.ask("CLUSTER", "FAILOVER") == "OK"
        self.until_it_is("role:master")

    def until_it_is(self, what: str) -> None:
        """Return its role as it reports it."""
        assert wait_until(lambda: what in self.ask("INFO", "replication"), 60), what

    @property
    def id(self) -> str:
        return str(self.ask("CLUSTER", "MYID"))


@dataclass
class Nodes:
    primaries: list[Node]
    replicas: list[Node]

    @property
    def url(self) -> str:
        return f"redis+cluster://:{PASSWORD}@{embedded.LOOPBACK}:{self.primaries[0].port}"

    def of_cell(self, cell: int) -> Node:
        """Return the node that had the slot at first."""
        return self.primaries[slot_of(b"%d" % cell) * PRIMARIES // SLOTS]

    def move(self, cell: int, source: Node, target: Node) -> None:
        """Move its slot key by key, as it is done by hand."""
        slot = self.begin_to_move(cell, source, target)
        while self._carry(slot, source, target, 100):
            pass
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        assert wait_until(lambda: all(self._has(node, slot, target.id) for node in self.primaries), 60)

    def begin_to_move(self, cell: int, source: Node, target: Node) -> int:
        """Move only its first two keys."""
        slot = slot_of(b"%d" % cell)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        self._carry(slot, source, target, 2)
        return slot

    @staticmethod
    def _carry(slot: int, source: Node, target: Node, most: int) -> bool:
        names = source.ask("CLUSTER", "GETKEYSINSLOT", slot, most)
        if names:
            source.ask("MIGRATE", embedded.LOOPBACK, target.port, "", 0, 5_000, "AUTH", PASSWORD, "KEYS", *names)
        return bool(names)

    @staticmethod
    def _has(node: Node, slot: int, owner: str) -> bool:
        """Wait until that node knows it."""
        ranges = [(first, last, primary[2]) for first, last, primary, *_ in node.ask("CLUSTER", "SLOTS")]
        return any(first <= slot <= last and id_ == owner for first, last, id_ in ranges)

    def promote_by_themselves(self, after_ms: int) -> None:
        """Enable automatic failover, when most primaries have missed a primary for so long."""
        for node in (*self.primaries, *self.replicas):
            node.ask("CONFIG", "SET", "cluster-node-timeout", after_ms, "cluster-replica-no-failover", "no")

    def forget_everything(self) -> None:
        for node in self.primaries:
            node.ask("FLUSHALL")
            node.ask("FUNCTION", "FLUSH")


@contextmanager
def a_cluster(
    directory: Path, *, replicas: int = 0, appendfsync: str = "everysec", binary: Path | None = None
) -> Iterator[Nodes]:
    names = [f"primary-{number}" for number in range(PRIMARIES)]
    primaries = [Node(directory / name, appendfsync=appendfsync, binary=binary) for name in names]
    others = [Node(directory / f"replica-{number}", binary=binary) for number in range(replicas)]
    try:
        for node in (*primaries, *others):
            node.start()
        _join(primaries, others)
        yield Nodes(primaries, others)
    finally:
        for node in (*primaries, *others):
            if node.process is not None:
                stop(node.process)


def _join(primaries: Sequence[Node], replicas: Sequence[Node]) -> None:
    every = [*primaries, *replicas]
    for number, node in enumerate(primaries):
        slots = [slot for slot in range(SLOTS) if slot * PRIMARIES // SLOTS == number]
        node.ask("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
    for number, node in enumerate(every, start=1):
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", number)
        every[0].ask("CLUSTER", "MEET", embedded.LOOPBACK, node.port, node.bus)
    assert wait_until(lambda: all(_knows(node, len(every)) for node in every), 60)
    for number, node in enumerate(replicas):
        node.ask("CLUSTER", "REPLICATE", primaries[number].id)
    assert wait_until(lambda: all("master_link_status:up" in node.ask("INFO", "replication") for node in replicas), 60)
    assert wait_until(lambda: all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in every), 60)


def _packed(command: Sequence[str | int]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub knows one-tuples only
    return packed


def _knows(node: Node, count: int) -> bool:
    lines = node.ask("CLUSTER", "NODES").splitlines()
    return len(lines) == count and all("handshake" not in line and "noaddr" not in line for line in lines)
