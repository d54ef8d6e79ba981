"""The TypeScript client compiles, passes its linter, and works with a real agent."""

import shutil
from pathlib import Path

import anyio.to_thread
import pytest

from tests.integration.client.test_clients import served_agent
from tests.integration.regional_agent.world import World
from tests.parts import part, toolchain
from tools.clients import TYPESCRIPT, run

pytestmark = pytest.mark.anyio


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a compiled copy of the client, with the packages of its lock file."""
    toolchain("node")
    packages = part("typescript") / "node_modules"
    directory = tmp_path / "typescript"
    shutil.copytree(TYPESCRIPT, directory, ignore=shutil.ignore_patterns("node_modules", "dist"))
    (directory / "node_modules").symlink_to(packages)
    assert run(["node", "node_modules/typescript/bin/tsc"], directory) == ""
    return directory


@pytest.mark.extended
async def test_the_typescript_client_passes_its_linter(project: Path) -> None:
    assert run(["node", "node_modules/eslint/bin/eslint.js", "--max-warnings", "0", "src", "test"], project) == ""


@pytest.mark.extended
async def test_the_typescript_client_works_with_an_agent(world: World, project: Path) -> None:
    async with served_agent(world) as url:
        printed = await anyio.to_thread.run_sync(
            lambda: run(["node", "--test", "--test-reporter=tap", "dist/test/"], project, LEASEHOLD_AGENT_URL=url)
        )
    assert "SKIP" not in printed
    assert printed.count("\nok ") >= 15
