"""Tokens in files are rotated while requests run, and none of these is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.access.issue_token import issue_token
from coordinator.access.revoke_token import revoke_token
from regional_agent.settings import AgentSettings
from tests.integration.coordinator.fixtures import connected
from tests.integration.regional_agent.http.test_fast_path import Doors, opened
from tests.integration.regional_agent.http.test_workers import environ
from tests.integration.regional_agent.world import World, running
from tests.waiting import attempts, until
from web.settings import load_settings

pytestmark = pytest.mark.anyio

OLD, NEW = "the-token-until-today", "the-token-from-tomorrow"
CHECK = {"subject": {"route": "/v1/nowhere"}}


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def settings_with(world: World, **files: Path) -> AgentSettings:
    """Return the settings of an agent that reads these secrets from files, as the environment says."""
    given = environ(world.settings("us-east"))
    for name, file in files.items():
        given.pop(f"LEASEHOLD_AGENT_{name.upper()}", None)
        given[f"LEASEHOLD_AGENT_{name.upper()}_FILE"] = str(file)
    return load_settings(AgentSettings, given)


class Services:
    """Clients that send checks all the time, on both HTTP paths."""

    def __init__(self, doors: Doors) -> None:
        self.token = OLD
        self.statuses: list[int] = []
        self._doors = doors

    async def status_with(self, token: str, client: httpx.AsyncClient) -> int:
        return (await self._doors.post(client, CHECK, Authorization=f"Bearer {token}")).status_code

    async def is_known(self, token: str) -> list[bool]:
        return [await self.status_with(token, each) == 200 for each in (self._doors.fast, self._doors.slow)]

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._send(each)) for each in (self._doors.fast, self._doors.slow)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, client: httpx.AsyncClient) -> None:
        while True:
            self.statuses.append(await self.status_with(self.token, client))
            await asyncio.sleep(0.002)


@pytest.mark.extended
async def test_service_tokens_change_without_a_refused_request(world: World, tmp_path: Path) -> None:
    file = tmp_path / "service-tokens"
    file.write_text(f"{OLD}\n")
    async with opened(settings_with(world, service_token=file)) as doors:
        services = Services(doors)
        async with services.sending():
            assert await services.is_known(NEW) == [False, False]
            file.write_text(f"{NEW}\n{OLD}\n")
            async for _ in attempts():
                if all(await services.is_known(NEW)):
                    break
            services.token = NEW
            sent = len(services.statuses)
            await until(lambda: len(services.statuses) > sent + 10)
            file.write_text(f"{NEW}\n")
            async for _ in attempts():
                if not any(await services.is_known(OLD)):
                    break
            assert await services.is_known(OLD) == [False, False]
            assert await services.is_known(NEW) == [True, True]
        assert len(services.statuses) > 20
        assert set(services.statuses) == {200}


@pytest.mark.extended
async def test_a_tokens_file_that_becomes_empty_locks_nobody_out_and_lets_nobody_in(
    world: World, tmp_path: Path
) -> None:
    file, other = tmp_path / "service-tokens", tmp_path / "adjust-token"
    file.write_text(OLD)
    other.write_text(OLD + "-to-adjust")
    async with opened(settings_with(world, service_token=file, adjust_token=other)) as doors:
        services = Services(doors)
        file.write_text("\n")
        other.write_text(NEW)
        async for _ in attempts():
            if all(await services.is_known(NEW)):  # both files have been read
                break
        assert await services.is_known(NEW) == [True, True]
        assert await services.is_known(OLD) == [True, True]
        assert {(await doors.post(each, CHECK)).status_code for each in (doors.fast, doors.slow)} == {401}


@pytest.mark.extended
async def test_a_regions_token_changes_without_a_refused_exchange(world: World, tmp_path: Path) -> None:
    file = tmp_path / "region-token"
    file.write_text(world.tokens["us-east"])
    async with running(settings_with(world, coordinator_token=file)) as agent:
        await agent.ready()
        assert (await agent.check()).status_code == 200
        async with connected(world.database) as owner:
            issued = await issue_token(owner, ["region:us-east"], "the next", datetime.now(UTC))
            file.write_text(issued.token)
            token = agent.whole.settings.coordinator_token
            assert token is not None
            await until(lambda: token.get_secret_value() == issued.token)
            old = await owner.fetchval("SELECT id FROM token WHERE scopes = '{region:us-east}' AND id <> $1", issued.id)
            assert await revoke_token(owner, old, datetime.now(UTC))
        for _ in range(5):
            assert (await agent.check()).status_code == 200
        async for _ in attempts():
            if await world.usage() == 6:
                break
        assert await world.usage() == 6
    assert 'status="401"' not in await metrics_of(world)


async def metrics_of(world: World) -> Any:
    return (await world.admin.get("/metrics")).text
