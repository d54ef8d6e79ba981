"""Tokens that arrive together are looked up together, and never with rows that were read before they arrived."""

import asyncio
from collections.abc import Collection, Mapping
from uuid import UUID

import pytest

from coordinator.access import callers as module
from coordinator.access.authenticate import Caller, Credential
from coordinator.access.callers import Callers
from coordinator.outages import DatabaseUnavailable

pytestmark = pytest.mark.anyio
KNOWN = Caller(UUID(int=1), frozenset({"admin"}))


class Tokens:
    """A look-up that starts at once and returns when the test releases it."""

    def __init__(self) -> None:
        self.known: dict[Credential, Caller] = {b"a": KNOWN, b"b": KNOWN}
        self.look_ups: list[list[Credential]] = []
        self.gate = asyncio.Event()
        self.fails = False

    async def look_up(self, credentials: Collection[Credential]) -> Mapping[Credential, Caller]:
        self.look_ups.append(sorted(credentials, key=str))
        found = {each: self.known[each] for each in credentials if each in self.known}
        await self.gate.wait()
        if self.fails:
            raise DatabaseUnavailable
        return found


async def asking(callers: Callers, *token_hashes: bytes) -> "list[asyncio.Task[Caller | None]]":
    tasks = [asyncio.create_task(callers.find(each)) for each in token_hashes]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


async def test_tokens_that_arrive_together_are_looked_up_together() -> None:
    tokens = Tokens()
    tasks = await asking(Callers(tokens.look_up), b"a", b"b", b"a", b"never issued")
    tokens.gate.set()
    assert await asyncio.gather(*tasks) == [KNOWN, KNOWN, KNOWN, None]
    assert tokens.look_ups == [[b"a", b"b", b"never issued"]]


async def test_a_token_revoked_after_an_earlier_look_up_began_is_unknown() -> None:
    tokens = Tokens()
    callers = Callers(tokens.look_up)
    before = await asking(callers, b"a")
    del tokens.known[b"a"]
    after = await asking(callers, b"a")
    tokens.gate.set()
    assert await asyncio.gather(*before, *after) == [KNOWN, None]


async def test_an_outage_fails_all_waiting_callers_and_no_later_one() -> None:
    tokens = Tokens()
    tokens.fails = True
    tokens.gate.set()
    callers = Callers(tokens.look_up)
    told = await asyncio.gather(*await asking(callers, b"a", b"b"), return_exceptions=True)
    assert [type(each) for each in told] == [DatabaseUnavailable] * 2
    tokens.fails = False
    assert await callers.find(b"a") == KNOWN


async def test_a_cancelled_caller_does_not_keep_others_from_an_answer() -> None:
    tokens = Tokens()
    gave_up, stayed = await asking(Callers(tokens.look_up), b"a", b"a")
    gave_up.cancel()
    tokens.gate.set()
    assert await stayed == KNOWN


async def test_a_token_is_presumed_after_it_was_found_and_until_it_is_forgotten() -> None:
    tokens = Tokens()
    tokens.gate.set()
    callers = Callers(tokens.look_up)
    assert callers.presume(b"a") is None
    await asyncio.gather(*await asking(callers, b"a", b"never issued"))
    assert (callers.presume(b"a"), callers.presume(b"never issued")) == (KNOWN, None)
    callers.forget(b"a")
    assert callers.presume(b"a") is None
    assert len(tokens.look_ups) == 1


async def test_only_so_many_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 1)
    tokens = Tokens()
    tokens.gate.set()
    callers = Callers(tokens.look_up)
    for token_hash in (b"a", b"b"):
        await callers.find(token_hash)
    assert (callers.presume(b"a"), callers.presume(b"b")) == (None, KNOWN)
