"""Fixtures shared by the tests of agents, of the clients and of the command line."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest

from tests.conftest import PostgresServer, copied, free_port
from tests.integration.regional_agent.world import Template, World, prepare_world, world_on
from tests.issuer import Issuer


@pytest.fixture(scope="session")
def issuer_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issuer]:
    issuer = Issuer(tmp_path_factory.mktemp("issuer") / "public", free_port())
    yield issuer
    issuer.stop()


@pytest.fixture
def issuer(issuer_process: Issuer) -> Issuer:
    """Yield an issuer of JWTs that runs and publishes its usual keys."""
    issuer_process.reset()
    return issuer_process


@pytest.fixture(scope="session")
def world_template(postgres_server: PostgresServer) -> Iterator[Template]:
    with copied(postgres_server) as url:
        yield Template(urlsplit(url).path.strip("/"), asyncio.run(prepare_world(url)))


@pytest.fixture
def world_database(postgres_server: PostgresServer, world_template: Template) -> Iterator[str]:
    with copied(postgres_server, world_template.name) as url:
        yield url


@pytest.fixture
async def world(world_database: str, world_template: Template, store: str) -> AsyncIterator[World]:
    async with world_on(world_database, world_template.tokens, store) as world:
        yield world
