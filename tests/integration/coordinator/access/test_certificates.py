"""A region is known by a name in its client certificate, over real TLS; the certificate permits exactly this region."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import time

import httpx
import pytest

from tests.certificates import Authority
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, exchange, want
from tests.integration.regional_agent.world import another_coordinator
from web.tls.context import TlsFiles, client_context

pytestmark = pytest.mark.anyio

US_1, US_2 = "spiffe://example.org/us-east/1", "agent.us-east.example.org"
EU = "spiffe://example.org/eu-west"


@dataclass
class Regions:
    """A coordinator over TLS, with two regions whose identities a test sets."""

    harness: AgentHarness
    url: str
    authority: Authority
    admin: httpx.AsyncClient
    clients: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def put(self, region: str, *identities: str) -> httpx.Response:
        return await self.admin.put(f"/v1/regions/{region}/identities", json={"identities": identities})

    async def agent(self, *names: str, region: str = "us-east", token: str | None = None) -> Agent:
        """Return an agent whose client certificate has these names, with the token of another region or without one."""
        uris = [name for name in names if "://" in name]
        hosts = [name for name in names if "://" not in name]
        files = self.authority.files("agent", hosts=hosts, uris=uris) if names else TlsFiles(self.authority.file)
        headers = (await self.harness.client(f"region:{token}")).headers if token else {}
        client = httpx.AsyncClient(
            base_url=self.url, headers=headers, verify=client_context(files), trust_env=False, timeout=30
        )
        return Agent(await self.clients.enter_async_context(client), region)


@asynccontextmanager
async def two_regions(harness: AgentHarness, directory: Path) -> AsyncIterator[Regions]:
    authority = Authority(directory)
    server = authority.files("server")
    tls = {"tls_client_ca_file": server.ca_file, "tls_cert_file": server.cert_file, "tls_key_file": server.key_file}
    for region in ("us-east", "eu-west"):
        await harness.add_region(region)
    async with another_coordinator(harness.url, tls_require_client_cert=False, **tls) as url:
        admin = await harness.client("admin")
        async with AsyncExitStack() as clients:
            yield Regions(harness, url, authority, admin, clients)


@pytest.fixture
async def regions(agent_harness: AgentHarness, tmp_path: Path) -> AsyncIterator[Regions]:
    async with two_regions(agent_harness, tmp_path) as found:
        yield found


async def refusal(agent: Agent, path: str = "/v1/policies") -> tuple[int, str]:
    answer = await agent.client.get(path)
    return answer.status_code, answer.json()["detail"]


async def booked(agent: Agent, seq: int) -> tuple[int, str]:
    """Send an exchange, and return how it was answered."""
    answer = await agent.post(exchange(agent.frozen(seq), [want(waiting=1)]))
    return answer.status_code, answer.json().get("detail", "")


async def test_a_certificate_is_exactly_its_region(regions: Regions) -> None:
    agent = await regions.agent(US_1)
    unknown = "No region has a name of this client certificate among its identities."
    assert await refusal(agent) == (401, unknown)
    answer = await agent.client.get("/v1/policies")
    assert answer.json()["type"].endswith("/unauthenticated")
    assert (await regions.put("us-east", US_1)).status_code == 200
    assert (await agent.open()).status_code == 200
    assert await booked(agent, 1) == (200, "")
    assert await refusal(agent, "/v1/limits") == (403, "The token lacks the scope `quota:read`.")
    elsewhere = Agent(agent.client, "eu-west", epoch=agent.epoch)
    of_another = "The token or client certificate is not one of the region in the path."
    assert await booked(elsewhere, 2) == (403, of_another)
    assert (await elsewhere.open()).status_code == 403
    none = await regions.agent()
    assert await refusal(none) == (401, "Send a token: `Authorization: Bearer <token>`.")


async def test_two_identities_are_valid_while_agents_change_and_a_removed_one_is_refused_at_once(
    regions: Regions,
) -> None:
    before, after = await regions.agent(US_1), await regions.agent(US_2)
    await regions.put("us-east", US_1, US_2)
    assert (await before.open()).status_code == 200
    after.epoch = before.epoch
    assert [await booked(before, 1), await booked(after, 2)] == [(200, "")] * 2
    await regions.put("us-east", US_2)
    assert (await booked(before, 3))[0] == 401
    assert await booked(after, 3) == (200, "")
    await regions.put("us-east")
    await regions.put("eu-west", US_2)  # it moves to another region: the coordinator remembers it as this one's
    assert (await booked(after, 4))[0] == 403


async def test_a_token_and_a_certificate_of_different_regions_are_refused(regions: Regions) -> None:
    await regions.put("us-east", US_1)
    await regions.put("eu-west", EU)
    different = "The token and the client certificate are of different regions."
    both = await regions.agent(US_1, token="us-east")
    assert (await both.open()).status_code == 200
    assert await booked(both, 1) == (200, "")
    await regions.put("us-east", US_2)  # a certificate of no region: the token alone counts, as before
    assert await booked(both, 2) == (200, "")
    await regions.put("eu-west", EU, US_1)
    assert [await booked(both, 3), await refusal(both)] == [(403, different)] * 2
    assert [await booked(both, 3), await refusal(both)] == [(403, different)] * 2


async def test_a_certificate_of_two_regions_is_refused(regions: Regions) -> None:
    await regions.put("us-east", US_1)
    await regions.put("eu-west", EU)
    agent = await regions.agent(US_1, EU)
    several = (403, "The client certificate has identities of several regions.")
    assert [await refusal(agent), await booked(agent, 1)] == [several] * 2


async def test_a_certificate_that_expires_on_an_open_connection_is_refused(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await regions.put("us-east", US_1)
    agent = await regions.agent(US_1)
    assert (await agent.open()).status_code == 200
    now_s = time()
    monkeypatch.setattr("web.tls.peers.time", lambda: now_s + timedelta(days=31).total_seconds())
    answer = await agent.client.get("/v1/policies")
    assert (answer.status_code, answer.json()["detail"]) == (401, "The client certificate has expired.")
    assert answer.headers["Connection"] == "close"


async def test_identities_are_shown_and_recorded_and_belong_to_one_region(regions: Regions) -> None:
    put = await regions.put("us-east", US_2, US_1)
    assert put.json()["identities"] == sorted([US_1, US_2])
    assert (await regions.put("eu-west", US_1)).json()["type"].endswith("/identity-taken")
    assert (await regions.put("eu-north", EU)).status_code == 404
    for malformed in ("localhost", "*.example.org", "spiffe:/example.org", "Agent.example.org", ""):
        assert (await regions.put("eu-west", malformed)).status_code == 422
    shown = {each["name"]: each["identities"] for each in (await regions.admin.get("/v1/regions")).json()["data"]}
    assert shown == {"eu-west": [], "us-east": sorted([US_1, US_2])}
    [entry] = (await regions.admin.get("/v1/audit", params={"action": "region.identities_put"})).json()["data"]
    assert (entry["object"], sorted(entry["details"]["identities"])) == ("us-east", sorted([US_1, US_2]))
    operator = await regions.harness.client("alloc:write")
    body = {"identities": [EU]}
    assert (await operator.put("/v1/regions/eu-west/identities", json=body)).status_code == 403
