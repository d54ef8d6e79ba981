"""An agent and a coordinator over TLS: both certificates are verified, and a fault is a sentence in `/readyz`."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.certificates import DAY, Authority
from tests.integration.regional_agent.world import World, another_coordinator, running
from tests.waiting import attempts, until
from web.tls import context as context_module
from web.tls.context import TlsFiles

pytestmark = pytest.mark.anyio


def as_server(files: TlsFiles) -> dict[str, Any]:
    return {"tls_client_ca_file": files.ca_file, "tls_cert_file": files.cert_file, "tls_key_file": files.key_file}


def as_client(files: TlsFiles) -> dict[str, Any]:
    names = ("coordinator_ca_file", "coordinator_cert_file", "coordinator_key_file")
    return dict(zip(names, files, strict=True))


async def test_an_agent_works_over_tls_and_shows_when_its_certificate_ends(world: World, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with another_coordinator(world.database, **as_server(authority.files("coordinator"))) as url:
        assert url.startswith("https://")
        agent = await world.agent(coordinator_url=url, **as_client(authority.files("agent", hosts=())))
        await agent.lease(10)
        assert (await agent.check(cost=10)).status_code == 200
        status = (await agent.http.get("/v1/status")).json()
        [certificate] = status["certificates"]
        assert (certificate["use"], certificate["fault"]) == ("coordinator", None)
        assert (status["coordinators"], status["status"]) == ([{"url": url, "in_use": True, "fault": None}], "ready")
        await world.agents.aclose()


async def test_an_agent_needs_no_token_if_its_certificate_is_an_identity_of_its_region(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate expires on open connections, and its next calls show the one that has replaced it."""
    monkeypatch.setattr(context_module, "REREAD_S", 0)
    authority, identity = Authority(tmp_path), "spiffe://example.org/us-east"
    async with another_coordinator(world.database, clock_limit_ms=0, **as_server(authority.files("server"))) as url:
        body = {"identities": [identity]}
        assert (await world.admin.put("/v1/regions/us-east/identities", json=body)).is_success
        files = as_client(authority.files("agent", hosts=(), uris=(identity,), ends_in=10 * DAY))
        agent = await world.agent(coordinator_url=url, coordinator_token=None, **files)
        await agent.lease(10)
        authority.issue("agent", hosts=(), uris=(identity,))
        now_s = time()
        monkeypatch.setattr("web.tls.peers.time", lambda: now_s + 20 * DAY.total_seconds())
        with capture_logs() as logged:
            await asyncio.gather(*(agent.whole.coordinator.blocks(None, len) for _ in range(4)))
            await agent.lease(30)
        assert not [line for line in logged if "401" in str(line.get("reason"))]
        assert (await agent.http.get("/readyz")).json()["status"] == "ready"
        await world.agents.aclose()


async def test_an_agent_without_a_token_and_without_a_certificate_does_not_start(world: World) -> None:
    with pytest.raises(ValueError, match="LEASEHOLD_AGENT_COORDINATOR_TOKEN is not set"):
        world.settings("us-east", coordinator_token=None)


def without_certificate(good: Authority, _: Authority) -> TlsFiles:
    return TlsFiles(good.file)


def of_another_authority(good: Authority, other: Authority) -> TlsFiles:
    return other.files("agent", good)


def that_has_expired(good: Authority, _: Authority) -> TlsFiles:
    return good.files("agent", ends_in=-DAY)


def that_trusts_another_authority(good: Authority, other: Authority) -> TlsFiles:
    return good.files("agent", other)


@pytest.mark.parametrize(
    ("files_of", "reason"),
    [
        (without_certificate, "the server requires a client certificate"),
        (of_another_authority, "the other side does not trust our certificate's authority"),
        (that_has_expired, "the other side says that our certificate has expired"),
        (that_trusts_another_authority, "its certificate is not signed by a trusted authority"),
    ],
)
async def test_a_refused_certificate_is_a_reason_in_readyz(
    world: World, tmp_path: Path, files_of: Callable[[Authority, Authority], TlsFiles], reason: str
) -> None:
    good, other = Authority(tmp_path), Authority(tmp_path, "other")
    async with another_coordinator(world.database, **as_server(good.files("coordinator"))) as url:
        settings = world.settings("us-east", coordinator_url=url, **as_client(files_of(good, other)))
        await shows(settings, f"TLS with {url} fails: {reason}")


@pytest.mark.parametrize(
    ("issued", "reason"),
    [
        ({"hosts": ("elsewhere.example",)}, "its certificate is for another name"),
        ({"ends_in": -timedelta(hours=1)}, "its certificate has expired"),
    ],
)
async def test_a_bad_certificate_of_the_coordinator_is_a_reason_in_readyz(
    world: World, tmp_path: Path, issued: dict[str, Any], reason: str
) -> None:
    authority = Authority(tmp_path)
    async with another_coordinator(world.database, **as_server(authority.files("coordinator", **issued))) as url:
        settings = world.settings("us-east", coordinator_url=url, **as_client(authority.files("agent")))
        await shows(settings, f"TLS with {url} fails: {reason}")


async def shows(settings: Any, text: str) -> None:
    """Wait until an agent with these settings says this in `/readyz`, among its reasons of TLS."""
    async with running(settings) as agent:
        found: list[Any] = []
        async for _ in attempts():
            ready = await agent.http.get("/readyz")
            assert ready.status_code == 503
            found = [each["text"] for each in ready.json()["reasons"] if each["code"] == "coordinator_tls_failed"]
            if any(each.startswith(text) for each in found):
                return
        raise AssertionError(found)


async def test_a_fault_ends_when_the_file_is_replaced(world: World, tmp_path: Path) -> None:
    """Neither side is restarted: the agent begins with an expired certificate and gets a new one."""
    authority = Authority(tmp_path)
    async with another_coordinator(world.database, **as_server(authority.files("coordinator"))) as url:
        files = as_client(authority.files("agent", ends_in=-DAY))
        async with running(world.settings("us-east", coordinator_url=url, **files)) as agent:
            await until(lambda: agent.whole.coordinator.addresses.in_use.is_tls_fault)
            authority.issue("agent")
            await agent.ready()
            await until(lambda: not agent.whole.coordinator.addresses.in_use.fault)
            codes = [each["code"] for each in (await agent.http.get("/readyz")).json()["reasons"]]
            assert not [each for each in codes if "tls" in each or "certificate" in each]
