"""Look up the tokens of concurrent requests together.

Nothing is cached: a look-up begins after the requests that it is for have arrived, so a revoked token is refused at
once. Requests that arrive during a look-up wait for the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from coordinator.access.authenticate import Caller

LookUp = Callable[[Collection[bytes]], Awaitable[Mapping[bytes, Caller]]]
Waiting = list[tuple[bytes, "asyncio.Future[Caller | None]"]]


class Callers:
    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._waiting: Waiting = []
        self._running: asyncio.Task[None] | None = None

    async def find(self, token_hash: bytes) -> Caller | None:
        """Return the caller with a token, or None if the token is unknown."""
        waiting: asyncio.Future[Caller | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_hash, waiting))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await waiting

    async def _run(self) -> None:
        try:
            while self._waiting:
                requests, self._waiting = self._waiting, []
                await self._answer(requests)
        finally:
            self._running = None

    async def _answer(self, requests: Waiting) -> None:
        try:
            found = await self._look_up(list({token_hash for token_hash, _ in requests}))
        except Exception as error:  # every waiting request fails, and the next look-up is independent
            for _, waiting in requests:
                if not waiting.done():
                    waiting.set_exception(error)
        else:
            for token_hash, waiting in requests:
                if not waiting.done():
                    waiting.set_result(found.get(token_hash))
