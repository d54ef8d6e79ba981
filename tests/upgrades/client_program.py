"""What a service does with the Python client of any release: `python -c … AGENT TENANT`."""

import asyncio
import sys

from leasehold import AsyncClient, Client

url, tenant = sys.argv[1:]
EXPORT = {"tenant": tenant, "route": "/v1/exports"}

with Client(url, on_failure="raise", timeout_ms=30_000) as client:
    decision = client.check(EXPORT, cost=2, operation_id=f"{tenant}-1")
    assert decision.allowed, decision
    assert decision.headers, decision
    assert client.check(EXPORT, mode="peek").allowed
    assert client.check(EXPORT, cost=20_000_000).reason == "never"
    assert len(client.check_batch([{"subject": EXPORT}, {"subject": EXPORT, "mode": "peek"}])) == 2
    assert any(policy.matches for policy in client.explain(EXPORT).policies)
    held = client.hold(EXPORT, units=5, operation_id=f"{tenant}-2")
    client.extend(held, 60_000)
    client.commit(held, 3)
    client.release(client.hold(EXPORT, units=2, operation_id=f"{tenant}-3"))
    with client.slot({"tenant": tenant, "route": "/v1/jobs"}):
        assert not client.check({"tenant": tenant, "route": "/v1/jobs"}, mode="peek").allowed


async def use_async_client() -> None:
    async with AsyncClient(url, on_failure="raise", timeout_ms=30_000) as client:
        assert (await client.check(EXPORT)).allowed
        async with client.holding(EXPORT, units=2) as hold:
            await hold.commit(1)


asyncio.run(use_async_client())
