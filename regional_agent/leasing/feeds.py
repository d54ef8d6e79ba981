"""Feeds: what the coordinator sends to every agent when it changes (policies, and the list of blocks).

A feed requests the next version and waits for it. It keeps the latest one on disk, so that an agent starts without the
coordinator. Content that a newer release wrote is read as far as this one knows it (`rules/reading.py`).

Some content begins or ends by itself (an override, a block): it is sent ahead, with a duration that counts from its
arrival. When such an edge is passed, the content is put in force again, also in a region that is cut off.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from protocol.backoff import Backoff
from protocol.clock import Clock
from regional_agent.leasing.coordinator_client import CoordinatorRefused, CoordinatorUnavailable
from regional_agent.leasing.rules.reading import Reading, SetAside

log = structlog.get_logger()

PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


T = TypeVar("T", bound=Versioned)


Read = Callable[[bytes, T | None], Reading[T]]  # reads content as it arrives; the second is what is in force


class CachedFeed(msgspec.Struct, frozen=True):
    """The content on disk. Its age is by this machine's clock, which is never compared with another's."""

    received_at_ms: int
    content: msgspec.Raw


class Feed(Generic[T]):
    def __init__(
        self,
        name: str,
        read: Read[T],
        *,
        poll: Callable[[int | None, Callable[[bytes], Reading[T]]], Awaitable[Reading[T] | None]],
        put_in_force: Callable[[T, int], None],
        edges_ms: Callable[[T], Iterable[int]],
        clock: Clock,
        state_dir: Path | None,
    ) -> None:
        """`put_in_force` takes the content and its age in ms; `edges_ms` says at which ages something changes."""
        self.name = name
        self._read = read
        self._poll = poll
        self._put_in_force = put_in_force
        self._edges_ms = edges_ms
        self._clock = clock
        self._file = None if state_dir is None else state_dir / f"{name}.json"
        self._content: T | None = None
        self.set_aside: Sequence[SetAside] = ()  # items of it that this release cannot read
        self._received_at_ms = 0
        self._confirmed_at_ms: int | None = None  # when the coordinator last said that there is nothing newer
        self._aged_ms = 0  # the content's age when its edges were last compared
        self._version: int | None = None  # of the latest content that came from the coordinator itself
        self._nudged = 0
        self._waiting: asyncio.Timeout | None = None

    @property
    def age_ms(self) -> int | None:
        """Return how long ago the content in force was known to be the newest; None before there is any."""
        return None if self._confirmed_at_ms is None else self._clock.monotonic_ms() - self._confirmed_at_ms

    async def run(self) -> None:
        self._load()
        backoff_s = Backoff(PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self._turn()
                backoff_s.succeeded()
            except (CoordinatorUnavailable, CoordinatorRefused) as error:
                log.warning("feed poll failed", feed=self.name, reason=str(error))
                pause_s = backoff_s.failed(0)
                await asyncio.sleep(min(pause_s, self._edge_in_s() or pause_s))
                self._pass_edges()

    def on_version(self, version: int) -> None:
        """Poll again, once, if an exchange's reply names a version that the current poll should have returned."""
        if version > max(self._version or 0, self._nudged) and self._waiting is not None:
            self._nudged = version
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def _turn(self) -> None:
        """Wait for the next version, or until something begins or ends by itself."""
        reading = await self._next_version()
        if reading is None:
            self._pass_edges()
        else:
            content = self._receive(reading, age_ms=0)
            if content.version < (self._version or 0):  # the ledger lost data: known numbers come again
                self._nudged = 0
            self._version = content.version
            self._save(content)

    async def _next_version(self) -> Reading[T] | None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._edge_in_s()) as self._waiting:
                    reading = await self._poll(self._version, self._read_next)
                    self._confirmed_at_ms = self._clock.monotonic_ms()
                    return reading
            return None
        finally:
            self._waiting = None

    def _read_next(self, body: bytes) -> Reading[T]:
        return self._read(body, self._content)

    def _receive(self, reading: Reading[T], age_ms: int) -> T:
        content, self.set_aside = reading
        self._content, self._received_at_ms, self._aged_ms = content, self._clock.monotonic_ms() - age_ms, age_ms
        self._put_in_force(content, age_ms)
        log.info("feed content in force", feed=self.name, version=content.version)
        for each in self.set_aside:
            log.warning("item of another release set aside", feed=self.name, **each._asdict())
        return content

    def _pass_edges(self) -> None:
        """Put the content in force again if something began or ended since."""
        if self._content is None:
            return
        age_ms = self._clock.monotonic_ms() - self._received_at_ms
        if any(self._aged_ms < edge <= age_ms for edge in self._edges_ms(self._content)):
            self._put_in_force(self._content, age_ms)
        self._aged_ms = age_ms

    def _edge_in_s(self) -> float | None:
        if self._content is None:
            return None
        age_ms = self._clock.monotonic_ms() - self._received_at_ms
        edge_ms = min((edge for edge in self._edges_ms(self._content) if edge > self._aged_ms), default=None)
        return None if edge_ms is None else max(0, edge_ms - age_ms) / 1000

    # --- on disk ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._file is None or not self._file.exists():
            return
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=CachedFeed)
            reading = self._read(bytes(kept.content), None)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("feed content on disk unreadable", feed=self.name, reason=str(error))
            return
        # It may be old: the coordinator's first answer replaces it, for its version is not counted as received.
        age_ms = max(0, self._now_ms() - kept.received_at_ms)
        self._confirmed_at_ms = self._clock.monotonic_ms() - age_ms
        self._receive(reading, age_ms)

    def _save(self, content: T) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}.new")  # other workers write theirs
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(CachedFeed(self._now_ms(), msgspec.Raw(msgspec.json.encode(content)))))
            os.replace(draft, self._file)
        except OSError as error:
            log.warning("feed content cannot be written to disk", feed=self.name, reason=str(error))

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)
