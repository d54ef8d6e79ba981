"""A network namespace for each place, and a router in user space that loses and delays real IP packets.

A kernel without `netem` can neither lose nor delay packets itself. Each namespace therefore has a TUN device, and a
thread of this process carries the packets between them. A namespace lives as long as this process or a process in it,
so nothing is left behind when the run is killed. It takes the rights of root (CAP_SYS_ADMIN and CAP_NET_ADMIN).
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from tests.chaos.network.wan import CORE, Wan

CURRENT = "/proc/thread-self/ns/net"
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE = "wan"
MTU = 1400
LARGEST_PACKET = 65_535
DESTINATION = slice(16, 20)  # of an IPv4 header
LONGEST_WAIT_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceWan(Wan):
    kind = "network namespaces joined by a router that drops and delays IP packets"

    def __init__(self, regions: Iterable[str], seed: int = 0) -> None:
        places = [CORE, *regions]
        super().__init__(places[1:])
        self._namespaces = {place: _new_namespace() for place in places}
        self._hosts = {place: f"10.77.0.{number}" for number, place in enumerate(places, start=1)}
        self._tuns = {place: self._open_tun(place) for place in places}
        self._places = {bytes(map(int, host.split("."))): place for place, host in self._hosts.items()}
        self._random = random.Random(seed)
        self._late: list[tuple[float, int, str, bytes]] = []  # when, in which order, to where
        self._numbers = itertools.count()
        self._is_over = threading.Event()
        self._router = threading.Thread(target=self._route, name="router", daemon=True)
        self._router.start()

    def address_of_core(self, region: str, port: int) -> str:
        return f"{self._hosts[CORE]}:{port}"

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        with _returning():
            _enter(self._namespaces[place])
            yield

    def close(self) -> None:
        self._is_over.set()
        self._router.join()
        for descriptor in (*self._tuns.values(), *self._namespaces.values()):
            os.close(descriptor)

    def _open_tun(self, place: str) -> int:
        with self.inside(place):
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{self._hosts[place]}/24", "dev", DEVICE)
            _ip("link", "set", DEVICE, "mtu", str(MTU), "up")
        return tun

    # --- the router's thread -----------------------------------------------------------------------------------------

    def _route(self) -> None:
        with selectors.DefaultSelector() as selector:
            for place, tun in self._tuns.items():
                selector.register(tun, selectors.EVENT_READ, place)
            while not self._is_over.is_set():
                for key, _ in selector.select(self._wait_s()):
                    self._receive(key.data)
                self._deliver()

    def _wait_s(self) -> float:
        return min(LONGEST_WAIT_S, max(0.0, self._late[0][0] - time.monotonic())) if self._late else LONGEST_WAIT_S

    def _receive(self, source: str) -> None:
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self._tuns[source], LARGEST_PACKET)
                target = self._places.get(packet[DESTINATION])
                way = self._ways.get((source, target or ""))
                if target is None or way is None or way.is_cut or self._random.random() < way.loss:
                    continue
                heapq.heappush(self._late, (time.monotonic() + way.delay_s, next(self._numbers), target, packet))

    def _deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._late)
            with suppress(BlockingIOError):  # a full device loses it, as a full router does
                os.write(self._tuns[target], packet)


def _new_namespace() -> int:
    with _returning():
        _check(_libc.unshare(CLONE_NEWNET))
        return os.open(CURRENT, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def _returning() -> Iterator[None]:
    """Bring this thread back to the namespace in which it is now."""
    before = os.open(CURRENT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _enter(before)
        os.close(before)


def _enter(namespace: int) -> None:
    _check(_libc.setns(namespace, CLONE_NEWNET))


def _check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
