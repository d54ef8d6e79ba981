"""The drill of docs/guides/backups.md: restore the ledger to a moment, and book what happened after it."""

from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.integration.coordinator.fixtures import connected
from tests.integration.recovery.drills import booked, prepare, promoted, spend, verify
from tests.integration.recovery.postgres import Installation, PostgresOnPort, archive_settings
from tests.integration.regional_agent.world import World, world_on
from tests.waiting import attempts

pytestmark = pytest.mark.anyio


async def moment_after_archiving(server: PostgresOnPort) -> datetime:
    """Return the database's time, and complete the segment of the log that contains it."""
    async with connected(server.url()) as owner:
        now: datetime = await owner.fetchval("SELECT clock_timestamp()")
        await owner.execute("SELECT pg_logical_emit_message(true, 'drill', 'after')")
        segment = await owner.fetchval("SELECT pg_walfile_name(pg_switch_wal())")
        async for _ in attempts():
            if (await owner.fetchval("SELECT last_archived_wal FROM pg_stat_archiver") or "") >= segment:
                return now
    raise AssertionError("the log was not archived")


@pytest.mark.extended
async def test_a_restore_to_a_moment_keeps_the_proof_and_books_what_came_after(
    installation: Installation, store: str
) -> None:
    archive, restored = installation.directory / "archive", installation.directory / "restored"
    primary = installation.directory / "primary"
    installation.initialise(primary)
    with installation.started(primary, **archive_settings(archive)) as server:
        tokens = await prepare(server)
        async with world_on(server.url(), tokens, store) as world:
            await spend(world, 3)
            installation.base_backup(server, restored)
            await spend(world, 4)
            moment = await moment_after_archiving(server)
            await spend(world, 5)  # after the moment: the restored ledger has never heard of it
    (restored / "recovery.signal").touch()
    recovery = {
        "restore_command": f"cp {archive}/%f %p",
        "recovery_target_time": moment.isoformat(),
        "recovery_target_action": "promote",
    }
    with installation.started(restored, **recovery) as server:
        await promoted(server)
        await verify(server)
        async with connected(server.url()) as owner:
            newest = await owner.fetchval("SELECT max(epoch) FROM region_epoch")
            await owner.execute(f"ALTER TABLE region_epoch ALTER COLUMN epoch RESTART WITH {newest + 1_000}")
        async with world_on(server.url(), tokens, store) as world:
            assert await world.usage() == 7
            await sends_no_webhooks(world)
            await book_what_was_lost(world)
            await booked(world, 12)
            assert (await world.quota())["consumed"] == 12
            await spend(world, 1)
        await verify(server)


async def sends_no_webhooks(world: World) -> None:
    """A restored copy under another address sends nothing until a person confirms it."""
    async for _ in attempts():
        reasons = (await world.admin.get("/readyz")).json()["reasons"]
        if [each["code"] for each in reasons] == ["installation_unconfirmed"]:
            return
    raise AssertionError(reasons)


async def book_what_was_lost(world: World) -> None:
    """Start the region's agent, whose lane is ahead of the ledger, and let two people rebase it."""
    await world.agent()
    lane: dict[str, Any] = {}
    async for _ in attempts():
        found = (await world.admin.get("/v1/quarantine")).json()["data"]
        if found:
            lane = found[0]
            break
    assert lane["reason"] == "ledger_regressed", lane
    proposal = {"epoch": lane["epoch"], "lane": lane["lane"], "kind": "rebase", "reason": "a drill"}
    proposed = await world.admin.post("/v1/suspense:propose", json=proposal)
    assert proposed.is_success, proposed.text
    async with another_admin(world) as second:
        approved = await second.post(f"/v1/suspense/{proposed.json()['id']}:approve")
    assert approved.is_success, approved.text


def another_admin(world: World) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {world.tokens['second']}"}
    return httpx.AsyncClient(base_url=world.url, headers=headers)
