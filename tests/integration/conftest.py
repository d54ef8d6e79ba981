"""Fixtures shared by the tests of agents, of the clients and of the command line."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest

from tests.conftest import PostgresServer, copied
from tests.integration.regional_agent.world import Template, World, prepare_world, world_on


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
