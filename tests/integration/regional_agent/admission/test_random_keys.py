"""Keys of callers that never return expire, except those of accounting.

LEASEHOLD_TEST_KEYS is their number; `./dev bench keys --seconds 600` shows the same for a million, in real time.
"""

import os
from typing import Any

import httpx
import pytest

from benchmarks.keys import BATCH, LIMITS, LONGEST_MS, Survey, age, ask, survey
from regional_agent.store.connection import StoreConnection
from tests.integration.regional_agent.world import DOCUMENT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

KEYS = int(os.environ.get("LEASEHOLD_TEST_KEYS", "10000"))
SPARE_BYTES = 200_000  # tolerance for buffers and tables of the store itself


@pytest.fixture
async def agent(world: World) -> Agent:
    document = {**DOCUMENT, **{part: [*DOCUMENT[part], *LIMITS[part]] for part in ("quotas", "policies")}}
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    return await world.agent()


async def forgotten(connection: StoreConnection, agent: Agent, ms: int) -> Survey:
    """Return the keys that are left after so much time.

    A rate with an empty bucket is shared with other regions while its demand is high: each report writes its demands
    and its share again, and they live from then on.
    """
    await until(lambda: not any(cell.share_loop.reported_limits() for cell in agent.whole.cells))
    await age(connection, ms)
    return await survey(connection)


@pytest.mark.extended
async def test_the_store_forgets_callers_that_do_not_return(world: World, agent: Agent) -> None:
    async def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return await agent.http.post(path, json=body)

    connection = agent.region.store
    assert isinstance(connection, StoreConnection)
    assert (await agent.check(operation_id="o-1")).status_code == 200
    await ask(post, BATCH, 0)  # so that everything created once exists
    before = await forgotten(connection, agent, 24 * 3_600_000)
    await ask(post, KEYS, 0)
    full = await survey(connection)
    assert full.keys > KEYS // 2, "windows are a minute long"
    assert full.for_ever == [], "neither accounting nor configuration"
    after = await forgotten(connection, agent, LONGEST_MS)
    assert after.keys == before.keys
    assert after.used_bytes - before.used_bytes < SPARE_BYTES < (full.used_bytes - before.used_bytes) / 5
