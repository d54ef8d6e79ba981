"""Tokens that are shown at the same time are looked up together.

Nothing is remembered: each look-up begins after whoever it answers has asked, so a revoked token is refused at once.
While one is under way, those who come wait for the next.
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
        """None for a token that is not known."""
        answer: asyncio.Future[Caller | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_hash, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                await self._answer(asked)
        finally:
            self._running = None

    async def _answer(self, asked: Waiting) -> None:
        try:
            found = await self._look_up(list({token_hash for token_hash, _ in asked}))
        except Exception as error:  # each of them is told, and the next look-up is another
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for token_hash, answer in asked:
                if not answer.done():
                    answer.set_result(found.get(token_hash))
