"""An agent with its gRPC door, and a client made of the library that everybody uses."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from google.protobuf.json_format import MessageToDict

from regional_agent.envoy.rls.responses import SHOULD_RATE_LIMIT
from regional_agent.main import create_app
from tests.integration.regional_agent.world import DOCUMENT, Agent, World
from web.serving import listening

OK, OVER_LIMIT = RateLimitResponse.OK, RateLimitResponse.OVER_LIMIT

# Rates that do not refill during a test. A region has a third of each.
ENVOY_DOCUMENT: dict[str, Any] = {
    "plans": {},
    "quotas": [
        {"name": "edge", "kind": "rate", "limit": "3/hour, burst 30", "sharing": "regional"},
        {"name": "paths", "kind": "rate", "limit": "9/hour", "algorithm": "fixed_window"},
        {"name": "trial", "kind": "rate", "limit": "3/hour, burst 3", "sharing": "regional"},
        {"name": "open", "kind": "rate", "limit": "3/hour, burst 30", "sharing": "regional"},
        {"name": "units", "kind": "allowance", "limit": 100, "period": "month"},
        {"name": "slots", "kind": "concurrency", "limit": 6},
    ],
    "policies": [
        {"name": "edge", "quota": "edge", "by": ["tenant"], "match": {"labels": {"descriptor": "tenant"}}},
        {"name": "path", "quota": "paths", "by": ["route"], "match": {"labels": {"descriptor": "path"}}},
        {"name": "model", "quota": "edge", "by": ["labels.model"], "match": {"labels": {"descriptor": "x-model"}}},
        {"name": "trial", "quota": "trial", "by": ["ip"], "shadow": True},
        {"name": "open", "quota": "open", "by": ["user"], "on_store_failure": "open"},
        {"name": "units", "quota": "units", "by": ["tenant"], "match": {"labels": {"descriptor": "billed.tenant"}}},
        {"name": "slots", "quota": "slots", "by": [], "match": {"labels": {"descriptor": "slots"}}},
    ],
    "envoy": {
        "domains": {
            "edge": {"entries": {"x-model": "labels.model"}, "response_body": True},
            "quiet": {"response_headers": False, "limit_overrides": "honour"},
        }
    },
}

Entries = Mapping[str, str]


def descriptor(entries: Entries | Sequence[tuple[str, str]], **fields: Any) -> RateLimitDescriptor:
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    hits = {"hits_addend": {"value": fields.pop("hits")}} if "hits" in fields else {}
    return RateLimitDescriptor(entries=[{"key": key, "value": value} for key, value in pairs], **hits, **fields)


@dataclass
class GrpcAgent:
    agent: Agent
    channel: grpc.aio.Channel
    address: str

    async def ask(
        self, *descriptors: Entries | RateLimitDescriptor, domain: str = "edge", hits: int = 0
    ) -> RateLimitResponse:
        found = [each if isinstance(each, RateLimitDescriptor) else descriptor(each) for each in descriptors]
        return await self.send(RateLimitRequest(domain=domain, descriptors=found, hits_addend=hits).SerializeToString())

    async def send(self, message: bytes, path: str = SHOULD_RATE_LIMIT, **options: Any) -> RateLimitResponse:
        call = self.channel.unary_unary(path, response_deserializer=RateLimitResponse.FromString)
        return await call(message, timeout=30, **options)


def channel_to(address: str) -> grpc.aio.Channel:
    """Return a channel with a connection of its own: channels to one address share theirs otherwise."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def headers_of(response: RateLimitResponse) -> dict[str, str]:
    return {each.key: each.value for each in response.response_headers_to_add}


def metadata_of(response: RateLimitResponse) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(response.dynamic_metadata)
    return found


@asynccontextmanager
async def grpc_agent(
    world: World, document: dict[str, Any] = ENVOY_DOCUMENT, credentials: Any = None, **settings: Any
) -> AsyncIterator[GrpcAgent]:
    if document is not DOCUMENT:
        (await world.admin.put("/v1/limits", json=document)).raise_for_status()
    with listening("127.0.0.1", 0) as listener:
        app = create_app(world.settings("us-east", grpc_port=0, **settings), grpc=listener)
        async with app.router.lifespan_context(app):
            agent = Agent(
                app.state.region, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
            )
            await agent.ready()
            address = listener.address.rpartition("//")[2]
            channel = (
                grpc.aio.insecure_channel(address)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials)
            )
            async with agent.http, channel:
                yield GrpcAgent(agent, channel, address)
