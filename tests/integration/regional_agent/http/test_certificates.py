"""A client certificate stands for a token at an agent, on both HTTP paths, if its settings have a name of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.integration.regional_agent.http.test_tls import HEAD, Door, a_door
from tests.integration.regional_agent.world import EXPORT, World
from tests.integration.web.conftest import Raw
from tests.waiting import attempts
from web.tls import peers
from web.tls.context import TlsFiles

pytestmark = pytest.mark.anyio

WEB, BILLING = "spiffe://example.org/web", "spiffe://example.org/billing"
TOKEN = "a-token-of-the-services"
PEEK = {"subject": EXPORT, "mode": "peek"}
ADJUST = {"subject": EXPORT, "mode": "adjust"}
LIFE = timedelta(seconds=6)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def an_agent(world: World, directory: Path, **settings: str) -> AsyncIterator[Door]:
    async with a_door(world, directory, **{"service_identities": f"{WEB} web.internal", **settings}) as door:
        yield door


def shown(door: Door, *uris: str, hosts: tuple[str, ...] = (), ends_in: timedelta = timedelta(days=1)) -> TlsFiles:
    return door.authority.files("caller", uris=uris, hosts=hosts, ends_in=ends_in)


async def status(raw: Raw, body: dict[str, Any] = PEEK, headers: bytes = b"") -> int:
    """Return the answer of the fast path, or of the route that it hands the request on to."""
    content = json.dumps(body).encode()
    await raw.send(HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return (await raw.answer()).status


async def read_status(raw: Raw) -> int:
    """Return the status of an answer that the fast path never gives."""
    await raw.send(b"GET /openapi.json HTTP/1.1\r\nHost: agent.internal\r\n\r\n")
    return (await raw.answer()).status


async def test_a_certificate_with_an_identity_needs_no_token(world: World, tmp_path: Path) -> None:
    async with an_agent(world, tmp_path, host="0.0.0.0") as door:
        for files in (shown(door, WEB), shown(door, hosts=("WEB.internal",))):
            async with door.connected(files) as raw:
                assert (await status(raw), await read_status(raw)) == (200, 200)
        assert door.fast_path.heads, "FastAPI answered"
        for files in (shown(door, BILLING), shown(door, f"{WEB}/", hosts=("internal", "a.web.internal")), door.files):
            async with door.connected(files) as raw:
                assert (await status(raw), await read_status(raw)) == (401, 401)


async def test_a_head_that_is_known_permits_nothing_on_another_connection(world: World, tmp_path: Path) -> None:
    async with an_agent(world, tmp_path) as door:
        known, unknown = shown(door, WEB), door.files
        async with door.connected(known) as service, door.connected(unknown) as other:
            assert [await status(each) for each in (service, other, service, other)] == [200, 401, 200, 401]


async def test_a_token_takes_precedence_and_web_pages_are_refused(world: World, tmp_path: Path) -> None:
    async with an_agent(world, tmp_path, service_token=TOKEN) as door, door.connected(shown(door, WEB)) as raw:
        assert await status(raw) == 200
        assert await status(raw, headers=b"Authorization: Bearer %s\r\n" % TOKEN.encode()) == 200
        assert await status(raw, headers=b"Authorization: Bearer a-removed-token-of-services\r\n") == 401
        assert await status(raw, headers=b"Origin: https://agent.internal\r\n") == 403


@pytest.mark.parametrize(("adjusters", "expected"), [("", 200), (BILLING, 403)])
async def test_only_identities_of_the_setting_adjust(
    world: World, tmp_path: Path, adjusters: str, expected: int
) -> None:
    async with an_agent(world, tmp_path, adjust_identities=adjusters, service_token=TOKEN) as door:
        async with door.connected(shown(door, WEB)) as raw:
            assert await status(raw, ADJUST) == expected
            assert await status(raw, ADJUST, b"Authorization: Bearer %s\r\n" % TOKEN.encode()) == expected
        async with door.connected(shown(door, BILLING)) as raw:
            assert await status(raw, ADJUST) == (200 if adjusters else 401)


async def test_a_connection_is_ended_before_its_certificate_ends(world: World, tmp_path: Path) -> None:
    """The next connection shows the certificate that has replaced it, so no request is refused."""
    async with an_agent(world, tmp_path) as door, door.connected(shown(door, WEB, ends_in=LIFE)) as raw:
        seen: list[int] = []
        async for _ in attempts():
            try:
                seen.append(await status(raw))
            except (ConnectionError, asyncio.IncompleteReadError):
                break
        assert seen
        assert set(seen) == {200}


async def test_a_certificate_that_has_ended_permits_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "END_BEFORE_S", -3600)
    async with an_agent(world, tmp_path) as door:
        files = shown(door, WEB, ends_in=LIFE)
        async with door.connected(files) as raw, door.connected(files) as other:
            seen: list[int] = []
            async for _ in attempts():
                seen.append(await status(raw))
                if seen[-1] != 200:
                    break
            assert seen[-1] == 401
            assert set(seen[:-1]) <= {200}
            assert await read_status(other) == 401
