"""A primary, two replicas and three sentinels on this machine, of any Redis or Valkey."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import spawn, stop, wait_until
from tests.conftest import free_port
from tests.integration.regional_agent.store.test_topology import PASSWORD

SERVICE = "main"
REPLICATION = "masterauth {password}\nrepl-diskless-sync-delay 0\nrepl-timeout 5\n"
SENTINEL = """\
bind 127.0.0.1
port {port}
dir "{directory}"
sentinel monitor {service} 127.0.0.1 {primary} 2
sentinel auth-pass {service} {password}
sentinel down-after-milliseconds {service} {down_after_ms}
sentinel failover-timeout {service} 5000
sentinel parallel-syncs {service} 2
"""


@dataclass
class Watched:
    """`ports`: of the three servers. `sentinels`: of the sentinels."""

    ports: list[int]
    sentinels: list[int]
    processes: dict[int, subprocess.Popen[bytes]]
    start: Callable[[int, int], subprocess.Popen[bytes]]  # a server that replicates from a port

    def restart(self, port: int) -> None:
        """Kill a server and start it again with its data, as a replica of the primary."""
        self.signal(port, signal.SIGKILL)
        self.processes[port].wait()
        self.processes[port] = self.start(port, self.primary())

    @property
    def url(self) -> str:
        hosts = ",".join(f"{embedded.LOOPBACK}:{port}" for port in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}"

    def primary(self, sentinel: int = 0) -> int:
        """Return the port that a sentinel names."""
        command = f"SENTINEL GET-MASTER-ADDR-BY-NAME {SERVICE}"
        return int(embedded.lines_of_store(self.sentinels[sentinel], None, command, 5)[4])

    def signal(self, port: int, number: signal.Signals) -> None:
        self.processes[port].send_signal(number)

    def fail_over(self) -> None:
        """Let a replica be promoted while everything is up."""
        assert embedded.lines_of_store(self.sentinels[0], None, f"SENTINEL FAILOVER {SERVICE}", 1) == ["+OK"]

    def has_replicas(self, port: int, count: int) -> bool:
        lines = embedded.lines_of_store(port, PASSWORD, "INFO replication", 4)
        return f"connected_slaves:{count}" in lines


@contextmanager
def watched(directory: Path, binary: Path | None = None, down_after_ms: int = 1_000) -> Iterator[Watched]:
    ports, sentinels = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        start = partial(_start_server, directory, binary)
        for port in ports:
            processes[port] = start(port, ports[0])
        assert all(wait_until(lambda p=port: embedded.store_is_ready(p, PASSWORD), 60) for port in ports)  # type: ignore[misc]
        found = Watched(ports, sentinels, processes, start)
        assert wait_until(lambda: found.has_replicas(ports[0], 2), 60)
        for port in sentinels:
            processes[port] = _start_sentinel(directory / str(port), port, ports[0], down_after_ms, binary)
        assert wait_until(lambda: all(_is_whole(port) for port in sentinels), 60)
        yield found
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGCONT)
            stop(process)


def _start_server(directory: Path, binary: Path | None, port: int, primary: int) -> subprocess.Popen[bytes]:
    more = REPLICATION.format(password=PASSWORD)
    more += "" if port == primary else f"replicaof 127.0.0.1 {primary}\n"
    log = directory / f"{port}.log"
    return embedded.start_store(directory / str(port), port, PASSWORD, more=more, log=log, binary=binary)


def _start_sentinel(
    directory: Path, port: int, primary: int, down_after_ms: int, binary: Path | None
) -> subprocess.Popen[bytes]:
    directory.mkdir()
    configuration = directory / "sentinel.conf"
    configuration.write_text(
        SENTINEL.format(
            port=port,
            directory=directory,
            service=SERVICE,
            primary=primary,
            password=PASSWORD,
            down_after_ms=down_after_ms,
        )
    )
    return spawn([binary or embedded.store_binary(), configuration, "--sentinel"], log=directory.with_suffix(".log"))


def _is_whole(port: int) -> bool:
    """Return whether a sentinel knows both others and both replicas."""
    try:
        lines = embedded.lines_of_store(port, None, f"SENTINEL CKQUORUM {SERVICE}", 1)
        known = embedded.lines_of_store(port, None, f"SENTINEL REPLICAS {SERVICE}", 1)
    except OSError:
        return False
    return lines[0].startswith("+OK 3 usable") and known == ["*2"]
