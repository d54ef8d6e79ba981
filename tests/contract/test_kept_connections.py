"""Idle connections are kept for times that fit agents, the coordinator and leases."""

import httpx
import pytest
from pydantic import SecretStr

from coordinator.settings import CoordinatorSettings
from regional_agent.leasing.coordinator_client import KEPT_S, CoordinatorClient
from regional_agent.leasing.settlement import RENEWED_WITHIN_MS
from web.serving import KEEP_ALIVE_S

pytestmark = pytest.mark.anyio


def test_an_agent_closes_an_idle_connection_before_the_coordinator_does() -> None:
    assert KEPT_S < KEEP_ALIVE_S, "it would say something over a connection that is being closed"


def test_a_lease_is_renewed_over_an_open_connection() -> None:
    assert RENEWED_WITHIN_MS < KEPT_S * 1000


def test_a_lease_renewed_late_outlasts_a_minute_without_the_coordinator() -> None:
    lease_ms = CoordinatorSettings.model_fields["lease_ms"].default
    assert lease_ms - RENEWED_WITHIN_MS > 60_000


async def test_the_agents_client_keeps_idle_connections_for_that_time() -> None:
    client = CoordinatorClient(["http://127.0.0.1:1"], SecretStr("lh_token"), "us-east")
    transport = client._http._transport
    assert isinstance(transport, httpx.AsyncHTTPTransport)
    assert transport._pool._keepalive_expiry == KEPT_S
    await client.close()
