"""Imported configurations answer Envoy at a real agent as the originals do."""

from typing import Any

import pytest
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor

from leasehold.importers.envoy_ratelimit import import_configurations
from leasehold.importers.limitador import import_limits
from tests.integration.regional_agent.envoy.grpc_harness import OVER_LIMIT, GrpcAgent, descriptor, grpc_agent
from tests.integration.regional_agent.world import REGIONS, World
from tests.unit.importers.cases import ENVOY_RATELIMIT, LIMITADOR, MANY, Asked

pytestmark = pytest.mark.anyio

OF_RATELIMIT = {case.name: case.config for case in ENVOY_RATELIMIT}
OF_LIMITADOR = [each for case in LIMITADOR for each in case.config]


async def whole_limits(world: World) -> None:
    """Give one region all of each window."""
    for region in REGIONS[1:]:
        (await world.admin.put(f"/v1/regions/{region}", json={"weight": 0})).raise_for_status()


async def check(at: GrpcAgent, domain: str, asked: Asked) -> str:
    """Return how the answers differ; nothing if they are as expected. A window may end meanwhile, but only one."""
    most = MANY if asked.admitted is None else 2 * asked.admitted + 1
    entries: RateLimitDescriptor = descriptor(asked.entries)
    passed = 0
    for _ in range(most):
        if (await at.ask(entries, domain=domain)).overall_code == OVER_LIMIT:
            break
        passed += 1
    is_right = passed == most if asked.admitted is None else asked.admitted <= passed < most
    return "" if is_right else f"{domain} {asked.entries}: {passed} passed of {asked.admitted}"


@pytest.mark.parametrize("origin", ["envoyproxy/ratelimit", "Limitador"])
async def test_imported_limits_answer_as_the_originals(origin: str, world: World) -> None:
    await whole_limits(world)
    document: dict[str, Any]
    if origin == "Limitador":
        document = import_limits("limits.yaml", OF_LIMITADOR).document
        asked = [(case.config[0]["namespace"], each) for case in LIMITADOR for each in case.asked]
    else:
        document = import_configurations(OF_RATELIMIT).document
        asked = [(case.config["domain"], each) for case in ENVOY_RATELIMIT for each in case.asked]
    async with grpc_agent(world, document) as at:
        found = [await check(at, *each) for each in asked]
    assert not [each for each in found if each]
