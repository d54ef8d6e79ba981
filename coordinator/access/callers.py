"""Look up the tokens and certificates of concurrent requests together, and remember which were found.

`find` uses no memory: a look-up begins after the requests that it is for have arrived, so a revoked token is refused at
once. Requests that arrive during a look-up wait for the next one.

`presume` uses nothing else. It is for a request whose own transaction confirms the credential, in a statement that it
runs anyway. A revoked token is refused there at once, whatever a coordinator remembers. Scopes never change, so a token
that is confirmed has those that are remembered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from coordinator.access.authenticate import Caller, Credential

LookUp = Callable[[Collection[Credential]], Awaitable[Mapping[Credential, Caller]]]
REMEMBERED = 4_096  # credentials

Waiting = list[tuple[Credential, "asyncio.Future[Caller | None]"]]


class Callers:
    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._waiting: Waiting = []
        self._running: asyncio.Task[None] | None = None
        self._known: dict[Credential, Caller] = {}  # the one that was found longest ago is the first

    def presume(self, credential: Credential) -> Caller | None:
        """Return the caller that was found with a credential, for a transaction that confirms it."""
        return self._known.get(credential)

    def forget(self, credential: Credential) -> None:
        """Look the credential up before the next request with it: a transaction has not confirmed it."""
        self._known.pop(credential, None)

    async def find(self, credential: Credential) -> Caller | None:
        """Return the caller with a credential, or None if it is unknown."""
        waiting: asyncio.Future[Caller | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((credential, waiting))
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
            found = await self._look_up(list({credential for credential, _ in requests}))
        except Exception as error:  # every waiting request fails, and the next look-up is independent
            for _, waiting in requests:
                if not waiting.done():
                    waiting.set_exception(error)
        else:
            self._remember(found)
            for credential, waiting in requests:
                if not waiting.done():
                    waiting.set_result(found.get(credential))

    def _remember(self, found: Mapping[Credential, Caller]) -> None:
        for credential, caller in found.items():
            self._known.pop(credential, None)
            self._known[credential] = caller
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
