"""What the client needs of threads and blocking sockets. `asyncio_io` has the same names for an event loop."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from leasehold.client.http1 import ServerAddress

CHUNK_BYTES = 65_536
sleep = time.sleep


class Stream:
    """One connection to the agent. Each operation raises OSError, and TimeoutError after its time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, address: ServerAddress, timeout_s: float) -> Self:
        """Open a connection; over TLS, the agent's certificate has been verified then."""
        if address.uds is not None:
            return cls(_connect_to_socket(address.uds, timeout_s))
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls is None:
            return cls(connection)
        return cls(address.tls.wrap_socket(connection, server_hostname=address.host))

    @property
    def is_ended(self) -> bool:
        """Return whether the connection was closed: only its end arrives on an idle one."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def write(self, data: bytes, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(data)

    def read(self, timeout_s: float) -> bytes:
        self._connection.settimeout(timeout_s)
        return self._connection.recv(CHUNK_BYTES)

    def close(self) -> None:
        self._connection.close()

    def wait_closed(self) -> None:
        """A closed socket needs no waiting."""


def _connect_to_socket(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class Semaphore:
    def __init__(self, size: int) -> None:
        self._semaphore = threading.BoundedSemaphore(size)

    def acquire(self, timeout_s: float) -> bool:
        """Return whether a place came free in time."""
        return self._semaphore.acquire(timeout=timeout_s)

    def release(self) -> None:
        self._semaphore.release()


@contextlib.contextmanager
def repeating(action: Callable[[], bool], pause_s: Callable[[], float]) -> Iterator[None]:
    """Run an action after each pause while the block runs, until the action returns False."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(pause_s()):
            if not action():
                return

    thread = threading.Thread(target=repeat, name="leasehold-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
