"""The steps that all drills have: a world on a server, units that are spent, and a proof."""

import asyncio

import asyncpg
from typer.testing import CliRunner

from coordinator.access.issue_token import issue_token
from leasehold.cli.app import app
from migrations.run import upgrade
from protocol.clock import SystemClock
from tests.conftest import restricted
from tests.integration.coordinator.fixtures import connected
from tests.integration.recovery.postgres import PostgresOnPort
from tests.integration.regional_agent.world import World, prepare_world
from tests.waiting import attempts


async def prepare(server: PostgresOnPort) -> dict[str, str]:
    connection = await asyncpg.connect(server.url("postgres"))
    await connection.execute("CREATE DATABASE leasehold")
    await connection.close()
    await asyncio.to_thread(upgrade, server.url(), restricted(server.url()))
    tokens, now = await prepare_world(server.url()), SystemClock().now()
    async with connected(server.url()) as owner:
        second = await issue_token(owner, ["adjust:approve"], "another person", now)
    return tokens | {"second": second.token}


async def spend(world: World, units: int) -> None:
    """Let a region consume units, and wait until they are booked."""
    before, agent = await world.usage(), await world.agent()
    for _ in range(units):
        assert (await agent.check()).status_code == 200
    await booked(world, before + units)


async def booked(world: World, units: int) -> None:
    found = -1
    async for _ in attempts():
        if (found := await world.usage()) == units:
            return
    raise AssertionError(found)


async def verify(server: PostgresOnPort) -> None:
    environ = {"LEASEHOLD_MIGRATE_DATABASE_URL": server.url()}
    done = await asyncio.to_thread(CliRunner().invoke, app, ["verify", "--database"], env=environ)
    assert done.exit_code == 0, done.output


async def promoted(server: PostgresOnPort) -> None:
    async with connected(server.url()) as owner:
        async for _ in attempts():
            if not await owner.fetchval("SELECT pg_is_in_recovery()"):
                return
    raise AssertionError("the restored server does not leave recovery")
