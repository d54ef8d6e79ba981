"""Fixtures of a coordinator on a real Postgres, called as agents do, and as admins and finance do."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.integration.coordinator.admin_harness import AdminHarness, admin_harness_on
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, agent_harness_on
from tests.parts import part


@pytest.fixture
async def agent_harness(database: str) -> AsyncIterator[AgentHarness]:
    async with agent_harness_on(database) as harness:
        yield harness


@pytest.fixture
async def agent(agent_harness: AgentHarness) -> Agent:
    return await agent_harness.agent()


@pytest.fixture
async def admin_harness(database: str) -> AsyncIterator[AdminHarness]:
    async with admin_harness_on(database) as harness:
        yield harness


@pytest.fixture
async def admin(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("admin")


@pytest.fixture
async def finance(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("usage:read")


@pytest.fixture
def pango() -> Path:
    return part("pango")
