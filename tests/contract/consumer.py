"""A program that uses the public names of the client as its users do: read by mypy and pyright, and never run."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from leasehold import AgentUnavailable, AsyncClient, CircuitBreaker, Client, Decision, Denied, RequestRejected, Subject
from leasehold.middleware import LimitMiddleware, by_route_and_address
from leasehold.middleware.wsgi import WsgiLimitMiddleware
from leasehold.testing import AsyncFakeClient, FakeClient

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]


def subject_of(tenant: str) -> Subject:
    return {"tenant": tenant, "route": "/v1/exports", "method": "POST"}


client = Client(
    "https://agent:8411", token="t", ca_file="ca.pem", certificate=("own.pem", "own.key"), on_failure="open"
)
loop_client = AsyncClient("unix:///run/agent.sock", breaker=CircuitBreaker(failures=3))


@client.limited(subject_of, cost=2)
def make_export(tenant: str) -> int:
    return len(tenant)


@loop_client.in_slot(subject_of)
async def make_report(tenant: str) -> int:
    return len(tenant)


def block() -> list[str]:
    decision: Decision = client.check(subject_of("acme"), cost=1, operation_id="a", mode="peek")
    retry_ms: int | None = client.wait(subject_of("acme"), timeout_s=1).retry_after_ms
    rejected: list[RequestRejected] = []
    for result in client.check_batch([{"subject": subject_of("acme")}]):
        if isinstance(result, RequestRejected):
            rejected.append(result)
    explained = client.explain(subject_of("acme"), costs={"exports": 9})
    matching: list[str] = [each.policy for each in explained.policies if each.matches]
    held = client.hold(subject_of("acme"), units=4, operation_id="b")
    client.extend(held, 1000)
    with client.holding(subject_of("acme"), units=4) as hold:
        hold.commit(make_export("acme"))
    headers: Mapping[str, str] = decision.headers
    return [
        f"{retry_ms}",
        *headers,
        *matching,
        *(f"{each.status}" for each in rejected),
        *(each.policy for each in decision.policies),
    ]


async def await_all() -> int:
    try:
        async with loop_client.slot(subject_of("acme")) as slot, slot.renewed():
            return await make_report("acme")
    except Denied as denied:
        return denied.decision.retry_after_ms or 0
    except AgentUnavailable as error:
        return len(str(error))


def fake() -> list[int]:
    client = FakeClient(on_failure="raise")
    client.agent.deny(tenant="acme", reason="cut_off", times=1)
    client.agent.limit(3)
    other = AsyncFakeClient(agent=client.agent)
    return [hold.committed for hold in other.agent.holds]


async def asgi(
    scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    await send({"type": "http.response.start", "status": 200})


def wsgi(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    return [b""]


asgi_app = LimitMiddleware(asgi, check=loop_client.check, subject=by_route_and_address, show_policies=True)
wsgi_app = WsgiLimitMiddleware(wsgi, check=client.check)
