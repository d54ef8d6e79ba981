"""An agent's metrics follow Prometheus's conventions, and say how old its configuration is and how long leases last."""

import pytest

from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.promtool import check_metrics, touch
from tests.waiting import attempts

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search", "method": "GET"}


async def scrape(agent: Agent) -> str:
    return (await agent.http.get("/metrics")).text


@pytest.mark.extended
async def test_promtool_finds_no_fault(world: World) -> None:
    agent = await world.agent()
    for subject in (EXPORT, SEARCH):
        assert (await agent.check(subject)).status_code == 200
    touch(agent.whole.metrics)
    check_metrics(await scrape(agent))


@pytest.mark.extended
async def test_promtool_finds_a_fault() -> None:
    with pytest.raises(AssertionError, match="counter metrics should"):
        check_metrics("# HELP checks Checks.\n# TYPE checks counter\nchecks 1\n")


async def test_the_age_of_the_configuration_and_the_headroom_of_leases_are_shown(world: World) -> None:
    agent = await world.agent()
    assert (await agent.check()).status_code == 200
    text = await scrape(agent)
    for feed in ("policies", "blocks"):
        assert f'leasehold_feed_age_seconds{{feed="{feed}"}}' in text
    assert "leasehold_policies 7.0" in text
    assert "leasehold_allowances_followed 1.0" in text
    async for _ in attempts():
        if 'leasehold_lease_dry_in_seconds{quota="exports"}' in await scrape(agent):
            return
    raise AssertionError("the headroom of no lease is shown")
