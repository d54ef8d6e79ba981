"""The Go client is tidy, and works with a real agent."""

import anyio.to_thread
import pytest

from tests.integration.client.test_clients import served_agent
from tests.integration.regional_agent.world import World
from tests.parts import toolchain
from tools.clients import GO, run

pytestmark = pytest.mark.anyio


@pytest.mark.extended
async def test_the_go_client_is_vetted_and_formatted() -> None:
    toolchain("go")
    assert run(["go", "vet", "./..."], GO) == ""
    assert run(["gofmt", "-l", "."], GO) == ""


@pytest.mark.extended
async def test_the_go_client_works_with_an_agent(world: World) -> None:
    toolchain("go")
    async with served_agent(world) as url:
        printed = await anyio.to_thread.run_sync(
            lambda: run(["go", "test", "-v", "-count=1", "./..."], GO, LEASEHOLD_AGENT_URL=url)
        )
    assert "SKIP" not in printed
    assert printed.count("--- PASS") >= 15
