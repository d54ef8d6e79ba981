"""A real store without an event loop, whose scripts use the time that a test sets.

`redis.call('TIME')` reads a key that the test writes. Keys expire centuries later, so that no real clock affects them,
and the test reads when they should expire.
"""

import re
import socket
import struct
from collections.abc import Coroutine, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import hiredis

from leasehold.local_stack import embedded
from regional_agent.store.connection import Argument, StoreError
from regional_agent.store.sources import shipped_library
from tests.conftest import Server

T = TypeVar("T")

NOW, READ_NOW = "redis.call('TIME')", "redis.call('HMGET', 'clock', 's', 'us')"
FAR_MS = 10**13
# Commands by which the scripts set and read the expiry of a key.
FORGETTING = (
    (r"'PX', (.*)\)$", rf"'PXAT', string.format('%.0f', (\1) + {FAR_MS}))"),
    (
        r"redis\.call\('PEXPIRE', ([\w.]+), (.*)\)$",
        rf"redis.call('PEXPIREAT', \1, string.format('%.0f', (\2) + {FAR_MS}))",
    ),
    (r"redis\.call\('PTTL', (\w+)\)", rf"(redis.call('PEXPIRETIME', \1) - {FAR_MS})"),
)


def on_the_tests_time(source: str) -> str:
    """Rewrite a library so that its clock, for decisions and expiry, is the test's."""
    source = source.replace(NOW, READ_NOW)
    for said, meant in FORGETTING:
        source = re.sub(said, meant, source, flags=re.MULTILINE)
    return source


class Wire:
    """One connection to an empty store, with all scripts loaded, on the test's time."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection((embedded.LOOPBACK, server.port), timeout=10)
        self._reader = hiredis.Reader(replyError=StoreError)
        self.ask("AUTH", server.password)
        self.ask("FLUSHALL")
        shipped = shipped_library()
        library = shipped.with_text(on_the_tests_time)
        self.ask("FUNCTION", "LOAD", "REPLACE", library.source)
        self._functions = {shipped.functions[name]: function for name, function in library.functions.items()}

    def ask_on_the_tests_time(self, *arguments: Argument) -> Any:
        """Send a command; a call of a function is a call of the one on the test's time."""
        if arguments[0] == "FCALL":
            arguments = ("FCALL", self._functions[str(arguments[1])], *arguments[2:])
        return self.ask(*arguments)

    def ask(self, *arguments: Argument) -> Any:
        self._socket.sendall(hiredis.pack_command(arguments))  # type: ignore[arg-type]
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        if isinstance(reply, StoreError):
            raise reply
        return reply

    def close(self) -> None:
        self._socket.close()

    def set_time(self, now_us: int) -> None:
        self.ask("HSET", "clock", "s", now_us // 1_000_000, "us", now_us % 1_000_000)

    def forgets_in_ms(self, key: bytes) -> int:
        """Return a key's time to live as it was last written; below zero for a key that is kept."""
        at_ms: int = self.ask("PEXPIRETIME", key)
        return at_ms - FAR_MS

    def names(self) -> set[bytes]:
        return {name for name in self.ask("KEYS", "*") if name != b"clock"}

    def state(self, key: bytes) -> Any:
        """Read a key's whole value, of whatever type it is."""
        kind = self.ask("TYPE", key)
        if kind == b"hash":
            return as_pairs(self.ask("HGETALL", key))
        if kind == b"set":
            return set(self.ask("SMEMBERS", key))
        if kind == b"zset":
            return as_pairs(self.ask("ZRANGE", key, 0, -1, "WITHSCORES"))
        if kind == b"list":
            return self.ask("LRANGE", key, 0, -1)
        return self.ask("GET", key)


def as_pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def by_moment(log: Iterable[bytes]) -> list[tuple[float, float]]:
    """Read a sliding log's entries, those of one moment as one."""
    entries = (struct.unpack("<dd", entry) for entry in log)
    return [(at, sum(units for _, units in same)) for at, same in groupby(entries, itemgetter(0))]


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it waited")
