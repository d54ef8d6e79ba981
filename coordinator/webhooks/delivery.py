"""Events on their way to whoever registered for them, over HTTP.

Each attempt has a bounded time, follows no redirect, uses no proxy of the environment and reads of the answer only its
status. A slow receiver holds up no other for longer than that.
"""

import asyncio
import functools
import random
import ssl

import httpx

from coordinator.database.engine import Database
from coordinator.installation.operations import look_at_installation
from coordinator.webhooks.deliveries import Answer, Due, note_answer, take_due
from coordinator.webhooks.rules import SIGNATURE, signature
from protocol.clock import Clock

AT_ONCE = 20
TIMEOUT_S = 10.0


async def deliver_webhooks(
    database: Database, clock: Clock, addresses: frozenset[str], timeout_s: float = TIMEOUT_S
) -> int:
    """Send all events that are due, some at a time, and return how many attempts were made.

    On a copy of an installation's database nothing is sent: production's receivers would take it for theirs.
    """
    installation = await database.run(lambda c: look_at_installation(c, addresses, clock.now()))
    if not installation.is_confirmed:
        return 0
    attempts = 0
    while due := await database.run(lambda c: take_due(c, clock.now(), AT_ONCE)):
        async with httpx.AsyncClient(
            verify=_trusted(), timeout=timeout_s, trust_env=False, follow_redirects=False
        ) as client:
            await asyncio.gather(*(_attempt(database, clock, client, each, timeout_s) for each in due))
        attempts += len(due)
    return attempts


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Reading all the authorities takes tens of milliseconds, in which nobody is answered: once for a process."""
    return httpx.create_ssl_context(trust_env=False)


async def _attempt(database: Database, clock: Clock, client: httpx.AsyncClient, due: Due, timeout_s: float) -> None:
    answer = await _post(client, due, signature(due.secrets, clock.now(), due.body), timeout_s)
    jitter = random.random()  # noqa: S311 - no secret
    await database.run(lambda c: note_answer(c, due, answer, jitter, clock.now()))


async def _post(client: httpx.AsyncClient, due: Due, signed: str, timeout_s: float) -> Answer:
    headers = {"Content-Type": "application/json", "Leasehold-Event-Id": str(due.event), SIGNATURE: signed}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", due.url, content=due.body, headers=headers) as response,
        ):
            return Answer(response.status_code)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
        return Answer(None, type(error).__name__)
