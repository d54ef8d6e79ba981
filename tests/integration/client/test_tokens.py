"""A token that changes: clients of threads and of event loops take it from a file or a function."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from leasehold import AgentUnavailable, AsyncClient, Client, Decision, RequestRejected
from leasehold.client import tokens
from leasehold.client.tokens import Token, token_source
from tests.integration.regional_agent.http.test_fast_path import opened
from tests.integration.regional_agent.world import World

pytestmark = pytest.mark.anyio

VALID, EXPIRED = "the-token-of-today", "the-token-of-yesterday"
NOWHERE = {"tenant": "acme", "route": "/v1/nowhere"}


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Holder:
    """A token that a test changes, as a file and as a function."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.hold(EXPIRED)

    def hold(self, token: str) -> None:
        self.token = token
        self.file.write_text(f"{token}\n")

    def get(self) -> str:
        if not self.token:
            raise LookupError("the issuer is away")
        return self.token


async def decide_async(url: str, token: Token, before_each: Callable[[int], None]) -> list[Decision | RequestRejected]:
    results: list[Decision | RequestRejected] = []
    async with AsyncClient(url, token=token) as client:
        for turn in range(3):
            before_each(turn)
            results.append(await attempt(client))
    return results


async def attempt(client: AsyncClient) -> Decision | RequestRejected:
    try:
        return await client.check(NOWHERE)
    except RequestRejected as rejected:
        return rejected


def decide(url: str, token: Token, before_each: Callable[[int], None]) -> list[Decision | RequestRejected]:
    results: list[Decision | RequestRejected] = []
    with Client(url, token=token) as client:
        for turn in range(3):
            before_each(turn)
            try:
                results.append(client.check(NOWHERE))
            except RequestRejected as rejected:
                results.append(rejected)
    return results


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "function"])
async def test_a_changed_token_is_sent_by_a_client_that_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    """It is refused with the old one, let in with the new one, and keeps that or fails when there is none any more."""
    monkeypatch.setattr(tokens, "READ_EVERY_S", 0.0)
    holder = Holder(tmp_path / "token")
    token: Token = holder.file if is_file else holder.get

    def change(turn: int) -> None:
        holder.hold((EXPIRED, VALID, "")[turn])

    async with opened(world, service_token=VALID) as doors:
        asynchronous = await decide_async(doors.address, token, change)
        change(0)
        for results in (asynchronous, await asyncio.to_thread(decide, doors.address, token, change)):
            assert isinstance(results[0], RequestRejected)
            assert results[0].status == 401
            assert [each.allowed for each in results[1:]] == [True, is_file]
            assert isinstance(results[2], Decision)
            assert results[2].degraded == (None if is_file else "closed")


@pytest.mark.parametrize("token", ["two\nlines", "", "schl\u00fcssel"])
def test_a_token_that_no_header_can_have_is_not_sent(token: str) -> None:
    with pytest.raises(AgentUnavailable, match="there is no token: the token is empty, or has characters"):
        token_source(lambda: token)()


def test_a_file_without_a_token_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Client(token=tmp_path / "token")
