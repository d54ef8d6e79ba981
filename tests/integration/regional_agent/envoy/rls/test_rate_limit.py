"""RLS: a request of Envoy is decided as checks are, and answered as Envoy reads it."""

import json
from collections.abc import AsyncIterator

import grpc
import pytest
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from structlog.testing import capture_logs

from leasehold.cli.operations.envoy import print_connections
from protocol.protobuf.writing import bytes_field
from regional_agent.envoy.rls.responses import SHOULD_RATE_LIMIT
from tests.integration.regional_agent.decision_log.test_decisions import logged
from tests.integration.regional_agent.envoy.grpc_harness import (
    OK,
    OVER_LIMIT,
    GrpcAgent,
    descriptor,
    grpc_agent,
    headers_of,
    metadata_of,
)
from tests.integration.regional_agent.world import World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

ACME, BIG = {"tenant": "acme"}, {"tenant": "big"}


@pytest.fixture
async def door(world: World) -> AsyncIterator[GrpcAgent]:
    async with grpc_agent(world) as door:
        yield door


def remaining_of(response: RateLimitResponse) -> list[int]:
    return [each.limit_remaining for each in response.statuses]


def codes_of(response: RateLimitResponse) -> list[int]:
    return [each.code for each in response.statuses]


async def test_a_limit_is_held_and_shown(door: GrpcAgent) -> None:
    first = await door.ask(ACME)
    assert (first.overall_code, codes_of(first), remaining_of(first)) == (OK, [OK], [9])
    [status] = first.statuses
    assert (status.current_limit.name, status.current_limit.requests_per_unit) == ("edge", 30)
    assert status.duration_until_reset.ToSeconds() > 0
    assert headers_of(first)["X-RateLimit-Remaining"] == "9"
    assert headers_of(first)["RateLimit"].startswith('"edge";r=9')
    assert not first.HasField("dynamic_metadata")
    for _ in range(9):
        assert (await door.ask(ACME)).overall_code == OK
    denied = await door.ask(ACME)
    assert (denied.overall_code, codes_of(denied), remaining_of(denied)) == (OVER_LIMIT, [OVER_LIMIT], [0])
    assert int(headers_of(denied)["Retry-After"]) > 0
    found = metadata_of(denied)
    assert (found["policy"], found["quota"], found["reason"], found["allowed"]) == ("edge", "edge", "limit", False)
    assert json.loads(denied.raw_body)["denied_by"] == "edge"
    assert headers_of(denied)["Content-Type"] == "application/problem+json"
    assert (await door.ask(BIG)).overall_code == OK


async def test_descriptors_are_admitted_together_or_not_at_all(door: GrpcAgent) -> None:
    path = {"path": "/v1/search?q=1"}
    both = await door.ask(ACME, path, hits=2)
    assert (codes_of(both), remaining_of(both)) == ([OK, OK], [8, 1])
    assert both.statuses[1].current_limit.unit == RateLimitResponse.RateLimit.HOUR
    denied = await door.ask(ACME, path, hits=2)
    assert (denied.overall_code, codes_of(denied)) == (OVER_LIMIT, [OK, OVER_LIMIT])
    own = await door.ask(descriptor(ACME, hits=3), descriptor(path, hits=1))
    assert remaining_of(own) == [5, 0], "a denied request has taken nothing"
    assert remaining_of(await door.ask(descriptor(ACME, hits=0), descriptor(path, hits=0))) == [5, 0]


async def test_negative_hits_are_refunded(door: GrpcAgent) -> None:
    def refund(entries: dict[str, str], hits: int) -> RateLimitDescriptor:
        """Return a descriptor with the field `is_negative_hits`, which the generated classes do not have yet."""
        return RateLimitDescriptor.FromString(descriptor(entries, hits=hits).SerializeToString() + b"\x20\x01")

    assert remaining_of(await door.ask(ACME, hits=6)) == [4]
    assert remaining_of(await door.ask(refund(ACME, 5))) == [9]
    assert remaining_of(await door.ask(BIG, refund(ACME, 5))) == [9, 10], "a refund never exceeds the burst"
    with pytest.raises(grpc.aio.AioRpcError, match="billed") as refused:
        await door.ask(refund({"billed": "yes", "tenant": "acme"}, 1))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_allowance_is_leased_and_booked(door: GrpcAgent, world: World) -> None:
    answer = await door.ask({"billed": "yes", "tenant": "acme"}, hits=7)
    assert (answer.overall_code, answer.statuses[0].current_limit.requests_per_unit) == (OK, 100)
    assert remaining_of(answer) == [93]
    async for _ in attempts():
        if await world.usage(quota="units") == 7:
            return
    pytest.fail("the units were not booked")


async def test_bad_requests_name_their_field_and_change_nothing(door: GrpcAgent) -> None:
    limited = RateLimitDescriptor(entries=[{"key": "tenant", "value": "acme"}])
    limited.limit.requests_per_unit, limited.limit.unit = 5, 1
    cases = [
        (RateLimitRequest(descriptors=[descriptor(ACME)]), "domain: it is required"),
        (RateLimitRequest(domain="edge"), "descriptors: a request has 1 to 64"),
        (
            RateLimitRequest(domain="edge", descriptors=[descriptor(ACME), RateLimitDescriptor()]),
            r"descriptors\[1\].entries",
        ),
        (
            RateLimitRequest(domain="edge", descriptors=[limited]),
            r"descriptors\[0\].limit: limit overrides are refused",
        ),
        (RateLimitRequest(domain="edge", descriptors=[descriptor(ACME, hits=2**63)]), r"descriptors\[0\].hits_addend"),
    ]
    for request, text in cases:
        with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
            await door.send(request.SerializeToString())
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="no RateLimitRequest") as malformed:
        await door.send(b"\xff\xff")
    assert malformed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="limits concurrency") as slots:
        await door.ask({"slots": "x"})
    assert slots.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert remaining_of(await door.ask(ACME)) == [9]


async def test_no_client_makes_its_requests_unreadable(door: GrpcAgent) -> None:
    """A proxy admits what is answered with an error, and headers that clients choose become descriptors."""
    hostile = [b"\xff\xfe", b"a\r\nb", b"\xf0\x9f\xa6\x84" * 64, b"x" * 5000, b""]
    for value in hostile:
        entry = bytes_field(1, b"tenant") + bytes_field(2, value)
        message = bytes_field(1, b"edge") + bytes_field(2, bytes_field(1, entry))
        answers = [await door.send(message) for _ in range(11)]
        assert [each.overall_code for each in answers] == [OK] * 10 + [OVER_LIMIT], value


async def test_shadow_policies_and_unmatched_requests_are_admitted_and_said(door: GrpcAgent, world: World) -> None:
    client = {"remote_address": "10.0.0.1"}
    first = await door.ask(client)
    assert (first.overall_code, len(first.statuses), first.statuses[0].HasField("current_limit")) == (OK, 1, False)
    second = await door.ask(client)
    assert second.overall_code == OK
    assert metadata_of(second)["shadow_denied_by"] == "trial"
    metrics = (await door.agent.http.get("/metrics")).text
    assert 'leasehold_checks_total{answer="shadow_denied",policy="trial",reason="limit"} 1.0' in metrics
    assert 'leasehold_unmatched_checks_total{route_class="*"} 2.0' in metrics


async def test_a_domain_may_honour_overrides_and_send_no_headers(door: GrpcAgent) -> None:
    limited = descriptor({"tenant": "vip"})
    limited.limit.requests_per_unit, limited.limit.unit = 9, RateLimitResponse.RateLimit.DAY
    answers = [await door.ask(limited, domain="quiet") for _ in range(2)]
    assert [each.overall_code for each in answers] == [OK, OVER_LIMIT], "a third of a burst of one, at least one"
    assert not headers_of(answers[0])
    limited.limit.unit = RateLimitResponse.RateLimit.MONTH
    with pytest.raises(grpc.aio.AioRpcError, match=r"descriptors\[0\].limit"):
        await door.ask(limited, domain="quiet")


async def test_blocks_and_logs_are_those_of_http(door: GrpcAgent, world: World) -> None:
    people = {"user": "ada"}, {"user": "mallory"}
    assert codes_of(await door.ask(*people)) == [OK, OK], "its plan is cached now"
    block = {"field": "user", "value": "mallory", "reason": "abuse"}
    (await world.admin.post("/v1/blocks", json=block)).raise_for_status()
    await until(lambda: bool(door.agent.region.admission.blocks))
    with capture_logs() as logs:
        denied = await door.ask(*people)
    assert (denied.overall_code, codes_of(denied)) == (OVER_LIMIT, [OVER_LIMIT] * 2)
    assert metadata_of(denied)["reason"] == "blocked"
    assert [each["event"] for each in logs] == ["request denied"]
    assert remaining_of(await door.ask(ACME)) == [9]
    [row] = (await logged(world, outcome="denied"))["data"]
    assert (row["outcome"], row["reason"]) == ("denied", "blocked")


async def test_connections_are_shown(door: GrpcAgent, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(await door.ask(ACME)).overall_code for _ in range(3)] == [OK] * 3
    status = (await door.agent.http.get("/v1/status")).json()
    [client] = status["grpc_clients"]
    assert (client["calls"], client["streams"], status["more_grpc_clients"]) == (3, 0, 0)
    print_connections(status)
    assert client["address"] in capsys.readouterr().out
    metrics = (await door.agent.http.get("/metrics")).text
    assert f'leasehold_grpc_calls_total{{method="{SHOULD_RATE_LIMIT}",status="OK"}} 3.0' in metrics
    assert "leasehold_grpc_connections 1.0" in metrics


async def test_the_store_away_is_answered_as_policies_say(door: GrpcAgent) -> None:
    assert (await door.ask({"user": "ada"})).overall_code == OK
    for cell in door.agent.whole.cells:
        cell.epochs.current = None  # as after a failover: no incarnation may decide
    opened = await door.ask({"user": "ada"})
    assert (opened.overall_code, metadata_of(opened)["degraded"]) == (OK, "open")
    assert not opened.statuses[0].HasField("current_limit")
    closed = await door.ask({"tenant": "fresh"})
    assert (closed.overall_code, metadata_of(closed)["reason"]) == (OVER_LIMIT, "store")
