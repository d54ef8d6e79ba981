"""Look up the tokens of concurrent requests together, and remember which tokens were found.

`find` uses no memory: a look-up begins after the requests that it is for have arrived, so a revoked token is refused at
once. Requests that arrive during a look-up wait for the next one.

`presume` uses nothing else. It is for a request whose own transaction confirms the token, in a statement that it runs
anyway. A revoked token is refused there at once, whatever a coordinator remembers. Scopes never change, so a token that
is confirmed has those that are remembered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from coordinator.access.authenticate import Caller

LookUp = Callable[[Collection[bytes]], Awaitable[Mapping[bytes, Caller]]]
REMEMBERED = 4_096  # tokens

Waiting = list[tuple[bytes, "asyncio.Future[Caller | None]"]]


class Callers:
    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._waiting: Waiting = []
        self._running: asyncio.Task[None] | None = None
        self._known: dict[bytes, Caller] = {}  # the token that was found longest ago is the first

    def presume(self, token_hash: bytes) -> Caller | None:
        """Return the caller that was found with a token, for a transaction that confirms the token."""
        return self._known.get(token_hash)

    def forget(self, token_hash: bytes) -> None:
        """Look the token up before the next request with it: a transaction has not confirmed it."""
        self._known.pop(token_hash, None)

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
            self._remember(found)
            for token_hash, waiting in requests:
                if not waiting.done():
                    waiting.set_result(found.get(token_hash))

    def _remember(self, found: Mapping[bytes, Caller]) -> None:
        for token_hash, caller in found.items():
            self._known.pop(token_hash, None)
            self._known[token_hash] = caller
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
