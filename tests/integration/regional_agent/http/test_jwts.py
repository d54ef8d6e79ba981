"""Services call an agent with JWTs of their company's issuer, on both HTTP paths."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.integration.regional_agent.http.test_fast_path import Doors, opened
from tests.integration.regional_agent.world import World
from tests.issuer import AUDIENCE, Issuer
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

SERVICE, ADJUST = "a-token-of-the-services", "a-token-for-adjustments"
CHECK = {"subject": {"route": "/v1/nowhere"}}
BEYOND = {"subject": {"tenant": "acme", "route": "/v1/search"}, "mode": "adjust"}


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def an_agent(world: World, issuer: Issuer, **settings: Any) -> AsyncIterator[Doors]:
    async with opened(world, jwt_issuer=issuer.url, jwt_audience=AUDIENCE, **settings) as doors:
        keys = doors.agent.whole.jwt_verifier
        assert keys is not None
        await until(lambda: not keys.keys.finding and issuer.fetches)
        yield doors


async def statuses(doors: Doors, token: str, body: Any = CHECK) -> list[int]:
    """Return the answers of both HTTP paths, twice: the second time the JWT is known."""
    both: list[httpx.AsyncClient] = [doors.fast, doors.slow] * 2
    return [(await doors.post(each, body, Authorization=f"Bearer {token}")).status_code for each in both]


async def test_a_jwt_with_the_scope_may_check_and_costs_one_signature(world: World, issuer: Issuer) -> None:
    async with an_agent(world, issuer, host="0.0.0.0") as doors:
        token = issuer.token(scope="service:check")
        assert set(await statuses(doors, token)) == {200}
        assert (await doors.fast.get("/metrics", headers={"Authorization": f"Bearer {token}"})).status_code == 200
        registry = doors.agent.whole.metrics.registry
        assert registry.get_sample_value("leasehold_jwt_verified_total") == 1
        assert set(await statuses(doors, issuer.token(scope="usage:read admin"))) == {403}
        for bad in (issuer.token(aud="x"), issuer.token(exp=1_700_000_000), f"{token[:-4]}AAAA", "x.y.z", SERVICE):
            assert set(await statuses(doors, bad)) == {401}
        assert {(await doors.post(each, CHECK)).status_code for each in (doors.fast, doors.slow)} == {401}


async def test_a_known_jwt_takes_the_fast_path(world: World, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_agent(world, issuer) as doors:
        token = issuer.token(scope="service:check")
        headers = {"Authorization": f"Bearer {token}"}
        assert (await doors.post(doors.fast, CHECK, **headers)).status_code == 200
        assert not doors.door.heads
        assert (await doors.post(doors.fast, CHECK, **headers)).status_code == 200
        [head] = doors.door.heads.values()
        assert head.expires_at_s < time.time() + 3600


async def test_tokens_of_ours_are_valid_beside_jwts(world: World, issuer: Issuer) -> None:
    async with an_agent(world, issuer, service_token=SERVICE) as doors:
        assert set(await statuses(doors, SERVICE)) == {200}
        assert set(await statuses(doors, issuer.token(scope="service:check"))) == {200}


@pytest.mark.parametrize("has_adjust_token", [False, True])
async def test_only_a_jwt_with_the_scope_adjusts(world: World, issuer: Issuer, has_adjust_token: bool) -> None:
    settings = {"service_token": SERVICE} | ({"adjust_token": ADJUST} if has_adjust_token else {})
    async with an_agent(world, issuer, **settings) as doors:
        assert set(await statuses(doors, issuer.token(scope="service:check"), BEYOND)) == {403}
        assert set(await statuses(doors, issuer.token(scope="service:adjust"), BEYOND)) == {200}
        assert set(await statuses(doors, SERVICE, BEYOND)) == {403 if has_adjust_token else 200}


async def test_a_jwt_that_expires_is_refused_on_connections_that_used_it(world: World, issuer: Issuer) -> None:
    async with an_agent(world, issuer, jwt_clock_skew_ms=0) as doors:
        token = issuer.token(scope="service:check", exp=int(time.time()) + 3)
        seen: list[int] = []
        async for _ in attempts():
            seen += await statuses(doors, token)
            if seen[-4:] == [401] * 4:
                break
        assert set(seen) <= {200, 401}
        assert seen == sorted(seen)
        assert seen[-4:] == [401] * 4


async def test_rotated_keys_refuse_no_service_and_a_withdrawn_key_refuses_its_jwts(
    world: World, issuer: Issuer
) -> None:
    async with an_agent(world, issuer) as doors:
        old = issuer.token("rsa", scope="service:check")
        assert set(await statuses(doors, old)) == {200}
        issuer.publish("rsa", "next")  # the agent learns of it by the first JWT of the new key
        new = issuer.token("next", scope="service:check")
        assert set(await statuses(doors, new)) == {200}
        assert set(await statuses(doors, old)) == {200}
        issuer.publish("next")
        verifier = doors.agent.whole.jwt_verifier
        assert verifier is not None
        await verifier.keys.refresh()
        assert set(await statuses(doors, old)) == {401}
        assert set(await statuses(doors, new)) == {200}


async def test_without_keys_jwts_are_answered_503_and_health_says_why(world: World, issuer: Issuer) -> None:
    issuer.stop()
    async with opened(world, jwt_issuer=issuer.url, jwt_audience=AUDIENCE, service_token=SERVICE) as doors:
        verifier = doors.agent.whole.jwt_verifier
        assert verifier is not None
        await until(lambda: verifier.keys.finding)
        assert set(await statuses(doors, issuer.token(scope="service:check"))) == {503}
        assert set(await statuses(doors, SERVICE)) == {200}
        health = (await doors.fast.get("/readyz")).json()
        assert [each["code"] for each in health["reasons"]] == ["jwt_keys_stale"]
        issuer.start()
        await verifier.keys.refresh()
        assert set(await statuses(doors, issuer.token(scope="service:check"))) == {200}
