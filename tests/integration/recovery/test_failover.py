"""The failover of docs/guides/backups.md: with a synchronous standby nothing that a region was told is lost."""

import asyncio

import asyncpg
import pytest

from coordinator.diagnosis.examine import read_and_examine_database
from migrations.connect import NoUsableHost, connect
from migrations.run import upgrade
from protocol.clock import SystemClock
from protocol.diagnosis.checks import CheckState
from tests.conftest import free_port
from tests.integration.coordinator.fixtures import connected
from tests.integration.recovery.drills import booked, prepare, promoted, spend, verify
from tests.integration.recovery.postgres import Installation, PostgresOnPort
from tests.integration.regional_agent.world import World, world_on
from tests.waiting import BOUND_S, attempts

pytestmark = pytest.mark.anyio


async def test_a_synchronous_standby_takes_over_without_losing_a_unit(installation: Installation, store: str) -> None:
    primary, standby = installation.directory / "primary", installation.directory / "standby"
    installation.initialise(primary)
    with installation.started(primary) as first:
        tokens = await prepare(first)
        installation.base_backup(first, standby, "-R")
        with installation.started(standby) as second:
            await replicates_synchronously(first)
            hosts = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
            url = first.url().replace(f"127.0.0.1:{first.port}", hosts)
            async with world_on(url, tokens, store) as world:
                agent = await world.agent()
                await agent.lease(10)
                with pytest.raises(NoUsableHost, match="it is a standby"):
                    await connect(second.url().replace("@", f"@127.0.0.1:{free_port()},"))
                first.process.kill()
                first.process.wait()
                assert [(await agent.check()).status_code for _ in range(3)] == [200] * 3  # from its lease
                async with connected(second.url()) as owner:
                    await owner.execute("SELECT pg_promote()")
                await promoted(second)
                await answers(world)
                assert await asyncio.to_thread(upgrade, url)
                examined = await read_and_examine_database(url, SystemClock(), timeout_s=BOUND_S)
                assert CheckState.OK in {each.state for each in examined}
                await booked(world, 3)
                await spend(world, 4)
                regions = (await world.admin.get("/v1/regions")).json()["data"]
                assert {region["regressed_lanes"] for region in regions} == {0}
                assert (await world.quota())["consumed"] == 7
            await verify(second)


async def replicates_synchronously(server: PostgresOnPort) -> None:
    """Set the primary up as the guide says, and wait until commits wait for the standby."""
    connection = await asyncpg.connect(server.url("postgres"))
    await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'")
    await connection.execute("SELECT pg_reload_conf()")
    states: list[str] = []
    async for _ in attempts():
        states = [row["sync_state"] for row in await connection.fetch("SELECT sync_state FROM pg_stat_replication")]
        if states == ["quorum"]:
            break
    await connection.close()
    assert states == ["quorum"]


async def answers(world: World) -> None:
    async for _ in attempts():
        if (await world.admin.get("/readyz")).status_code == 200:
            return
    raise AssertionError("no coordinator is ready")
