"""Callers of an agent need its service token, or its loopback names if it has none, on both HTTP paths."""

import httpx
import pytest

from regional_agent.main import create_app
from tests.integration.regional_agent.http.test_fast_path import Doors, opened, request
from tests.integration.regional_agent.world import World
from tests.integration.web.conftest import connected, serving

pytestmark = pytest.mark.anyio

CHECK = {"subject": {"route": "/v1/nowhere"}}
OWN = ("localhost:8411", "LOCALHOST", "127.0.0.1:8411", "127.8.8.8", "[::1]:8411")
FOREIGN = ("evil.example:8411", "evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", "[", "")
TOKEN = "a-token-of-the-services"


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


async def statuses(doors: Doors, path: str = "/v1/check", **headers: str) -> set[int]:
    """Return the answers of both HTTP paths."""
    fast = await doors.post(doors.fast, CHECK, path, **headers)
    slow = await doors.post(doors.slow, CHECK, path, **headers)
    return {fast.status_code, slow.status_code}


async def test_without_a_token_only_loopback_names_are_served(world: World) -> None:
    async with opened(world) as doors:
        for host in OWN:
            assert await statuses(doors, Host=host) == {200}, host
            assert await statuses(doors, Origin=f"http://{host}") == {200}, host
        for host in FOREIGN:
            assert await statuses(doors, Host=host) == {421}, host
        for origin in ("http://evil.example", "https://evil.example:8411", "null"):
            assert await statuses(doors, Origin=origin) == {403}, origin


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/openapi.json"])
async def test_reads_are_protected_from_web_pages_too(world: World, path: str) -> None:
    async with opened(world) as doors:
        assert (await doors.fast.get(path)).status_code == 200
        assert (await doors.fast.get(path, headers={"Host": "evil.example"})).status_code == 421


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/openapi.json"])
async def test_a_service_token_is_required(world: World, path: str) -> None:
    async with opened(world, service_token=TOKEN) as doors:
        assert (await doors.fast.get(path)).status_code == 401
        known = {"Authorization": f"Bearer {TOKEN}", "Host": "agent.internal:8411"}
        assert (await doors.fast.get(path, headers=known)).status_code == 200
        assert (await doors.fast.get("/healthz")).status_code == 200


async def test_with_a_token_any_name_of_the_agent_is_accepted(world: World) -> None:
    async with opened(world, service_token=TOKEN) as doors:
        known = {"Authorization": f"Bearer {TOKEN}", "Host": "agent.internal:8411"}
        assert await statuses(doors, **known) == {200}
        assert await statuses(doors, Host="agent.internal:8411") == {401}


async def test_a_cached_head_is_not_used_for_another_caller(world: World) -> None:
    async with opened(world) as doors, connected(doors.address) as raw:
        for host, status in ((b"localhost", 200), (b"evil.example", 421), (b"localhost", 200)):
            await raw.send(request(CHECK).replace(b"Host: localhost", b"Host: " + host))
            assert (await raw.answer()).status == status


async def test_a_unix_socket_is_out_of_a_browsers_reach(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("uds") / "agent.sock")
    app = create_app(world.settings("us-east", uds=path))
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with serving(app, uds=path), httpx.AsyncClient(transport=transport, base_url="http://any.name") as client:
        assert (await client.get("/v1/status")).status_code in (200, 503)
