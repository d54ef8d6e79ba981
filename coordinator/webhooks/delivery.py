"""Deliver events to webhooks over HTTP.

Each attempt has a bounded time, follows no redirect, uses no proxy of the environment, and reads only the status of the
response. A slow receiver delays the others by no more than one attempt.
"""

import asyncio
import functools
import random
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import httpx

from coordinator.database.engine import Database
from coordinator.installation.operations import look_at_installation
from coordinator.webhooks.deliveries import (
    AttemptResult,
    DeliveryResult,
    DueDelivery,
    record_result,
    take_due_deliveries,
)
from coordinator.webhooks.rules import signature_headers
from protocol.clock import Clock
from web.traces.context import Kind, trace_headers
from web.traces.tracing import Tracing

AT_ONCE = 20
TIMEOUT_S = 10.0
USER_AGENT = "Leasehold-Webhooks"
OnAttempt = Callable[[AttemptResult], None]


async def deliver_webhooks(
    database: Database,
    clock: Clock,
    addresses: frozenset[str],
    timeout_s: float = TIMEOUT_S,
    on_attempt: OnAttempt = lambda _: None,
    tracing: Tracing | None = None,
) -> int:
    """Deliver all events that are due, and return the number of attempts.

    On a copy of an installation's database nothing is sent: receivers would take it for the installation.
    """
    installation = await database.run(lambda c: look_at_installation(c, addresses, clock.now()))
    if not installation.is_confirmed:
        return 0
    attempts = 0
    while due := await database.run(lambda c: take_due_deliveries(c, clock.now(), AT_ONCE)):
        async with httpx.AsyncClient(
            verify=_trusted(), timeout=timeout_s, trust_env=False, follow_redirects=False
        ) as client:
            results = await asyncio.gather(
                *(_attempt(database, clock, client, each, timeout_s, tracing) for each in due)
            )
        for result in results:
            on_attempt(result)
        attempts += len(due)
    return attempts


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Read the certificate authorities once for each process: it blocks the loop for tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


async def _attempt(
    database: Database,
    clock: Clock,
    client: httpx.AsyncClient,
    due: DueDelivery,
    timeout_s: float,
    tracing: Tracing | None,
) -> AttemptResult:
    headers = signature_headers(due.event, due.secrets, clock.now(), due.body)
    with _span(tracing, due):
        result = await _post(client, due, headers, timeout_s)
    jitter = random.random()  # noqa: S311 - not for cryptography
    return await database.run(lambda c: record_result(c, due, result, jitter, clock.now()))


def _span(tracing: Tracing | None, due: DueDelivery) -> AbstractContextManager[object]:
    """Make a span of an attempt, in the trace of the request that the event is about."""
    if tracing is None or due.cause is None:
        return nullcontext()
    attributes: Mapping[str, str | int] = {
        "leasehold.event": due.kind,
        "leasehold.webhook": str(due.webhook),
        "leasehold.attempt": due.attempts,
    }
    return tracing.around("webhook delivery", [due.cause], Kind.CLIENT, attributes)


async def _post(
    client: httpx.AsyncClient, due: DueDelivery, headers: dict[str, str], timeout_s: float
) -> DeliveryResult:
    headers = {"Content-Type": "application/json", "User-Agent": USER_AGENT, **trace_headers(), **headers}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", due.url, content=due.body, headers=headers) as response,
        ):
            return DeliveryResult(response.status_code)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
        return DeliveryResult(None, type(error).__name__)
