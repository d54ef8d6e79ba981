"""One agent of a region tries the next version of the scripts, and goes back, while another one keeps its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from regional_agent.store.sources import LUA, library_in, shipped_library
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.world import Agent, World, running
from tests.waiting import until

pytestmark = pytest.mark.anyio


def next_version(directory: Path) -> Path:
    shutil.copytree(LUA, directory)
    check = directory / "check.lua"
    check.write_text(check.read_text().replace("local POLICY,", "local _ -- the next version\nlocal POLICY,"))
    return directory


async def status(agent: Agent) -> dict[str, Any]:
    found: dict[str, Any] = (await agent.http.get("/v1/status")).json()
    return found


async def test_an_agent_tries_the_next_version_and_goes_back(world: World, tmp_path: Path) -> None:
    directory = next_version(tmp_path / "next")
    ours, theirs = shipped_library().name, library_in(directory).name
    steady = await world.agent(name="steady")
    await steady.lease(50)
    async with running(world.settings("us-east", name="canary", store_library=directory)) as canary:
        await canary.ready()
        for agent in (steady, canary, steady, canary):
            assert (await agent.check(cost=2)).status_code == 200
        assert (await status(steady))["store_library"] == ours
        assert (await status(canary))["store_library"] == theirs
        await until(lambda: {ours, theirs} <= set(canary.region.scripts.library.idle_s))
        metrics = (await canary.http.get("/metrics")).text
        assert f'leasehold_store_library_idle_seconds{{library="{theirs}",own="true"}} 0.0' in metrics
    async with running(world.settings("us-east", name="canary")) as went_back:
        await went_back.ready()
        assert (await went_back.check(cost=2)).status_code == 200
        assert (await status(went_back))["store_library"] == ours
    assert (await steady.check(cost=2)).status_code == 200
    steady.region.exchange_loop.report_now()

    async def is_booked() -> bool:
        return await world.usage() == 12

    await eventually(is_booked, True)


async def test_a_directory_that_is_no_library_is_refused_by_name(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"(?s)store_library.*has no .*check\.lua"):
        world.settings("us-east", store_library=tmp_path)
