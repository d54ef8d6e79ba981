"""What the coordinator tells every agent whenever it changes: policies, and who is blocked.

A feed asks for the next version and waits for it. The last one is kept on disk, so an agent starts without the
coordinator. Some of what is told begins or ends by itself (an override, a block): it is told ahead as a duration, which
counts from the moment at which it was heard; where that changes what was compiled, the content is put in force again on
time. So a region that is cut off begins and ends things like the others.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import structlog

from protocol.backoff import Backoff
from protocol.clock import Clock
from regional_agent.leasing.coordinator_client import CoordinatorRefused, CoordinatorUnavailable

log = structlog.get_logger()

PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


T = TypeVar("T", bound=Versioned)


class Kept(msgspec.Struct, Generic[T], frozen=True):
    """As it stands on disk. This machine's own clock says how long ago it was heard: another's is never compared."""

    heard_at_ms: int
    content: T


class Feed(Generic[T]):
    def __init__(
        self,
        name: str,
        shape: type[T],
        *,
        ask: Callable[[int | None], Awaitable[T | None]],
        put_in_force: Callable[[T, int], None],
        edges_ms: Callable[[T], Iterable[int]],
        clock: Clock,
        state_dir: Path | None,
    ) -> None:
        """`put_in_force` takes the content and its age in ms; `edges_ms` says at which ages something changes."""
        self._name = name
        self._shape = shape
        self._ask = ask
        self._put_in_force = put_in_force
        self._edges_ms = edges_ms
        self._clock = clock
        self._file = None if state_dir is None else state_dir / f"{name}.json"
        self._content: T | None = None
        self._heard_at_ms = 0
        self._aged_ms = 0  # how old the content was when it was last looked at
        self._version: int | None = None  # of what the coordinator itself has told
        self._nudged = 0
        self._waiting: asyncio.Timeout | None = None

    async def run(self) -> None:
        self._load()
        backoff_s = Backoff(PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self._turn()
                backoff_s.succeeded()
            except (CoordinatorUnavailable, CoordinatorRefused) as error:
                log.warning("no news", of=self._name, reason=str(error))
                pause_s = backoff_s.failed(0)
                await asyncio.sleep(min(pause_s, self._edge_in_s() or pause_s))
                self._come_of_age()

    def heard_of(self, version: int) -> None:
        """An exchange's reply names a version. If it is news, the poll that should have told it is made anew, once."""
        if version > max(self._version or 0, self._nudged) and self._waiting is not None:
            self._nudged = version
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def _turn(self) -> None:
        """Wait for news, until something begins or ends by itself."""
        news = await self._wait_for_news()
        if news is None:
            self._come_of_age()
        else:
            self._hear(news, age_ms=0)
            if news.version < (self._version or 0):  # the ledger lost data: numbers that were heard of come again
                self._nudged = 0
            self._version = news.version
            self._save(news)

    async def _wait_for_news(self) -> T | None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._edge_in_s()) as self._waiting:
                    return await self._ask(self._version)
            return None
        finally:
            self._waiting = None

    def _hear(self, content: T, age_ms: int) -> None:
        self._content, self._heard_at_ms, self._aged_ms = content, self._clock.monotonic_ms() - age_ms, age_ms
        self._put_in_force(content, age_ms)
        log.info("in force", what=self._name, version=content.version)

    def _come_of_age(self) -> None:
        """Put in force again what has begun or ended something since."""
        if self._content is None:
            return
        age_ms = self._clock.monotonic_ms() - self._heard_at_ms
        if any(self._aged_ms < edge <= age_ms for edge in self._edges_ms(self._content)):
            self._put_in_force(self._content, age_ms)
        self._aged_ms = age_ms

    def _edge_in_s(self) -> float | None:
        if self._content is None:
            return None
        age_ms = self._clock.monotonic_ms() - self._heard_at_ms
        edge_ms = min((edge for edge in self._edges_ms(self._content) if edge > self._aged_ms), default=None)
        return None if edge_ms is None else max(0, edge_ms - age_ms) / 1000

    # --- on disk ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._file is None or not self._file.exists():
            return
        shape: Any = Kept[self._shape]  # type: ignore[name-defined]  # a class that is only known here
        try:
            kept: Kept[T] = msgspec.json.decode(self._file.read_bytes(), type=shape)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("what was last known cannot be read", of=self._name, reason=str(error))
            return
        # It may be old: the coordinator's first answer replaces it, for its version is not taken as heard.
        self._hear(kept.content, age_ms=max(0, self._now_ms() - kept.heard_at_ms))

    def _save(self, content: T) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}.new")  # other workers write theirs
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(Kept(self._now_ms(), content)))
            os.replace(draft, self._file)
        except OSError as error:
            log.warning("what is new cannot be kept on disk", of=self._name, reason=str(error))

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)
