"""Long polls: a client that has the newest version waits for the next one.

A poll costs two transactions when it begins, so a poll that lasts longer costs less. Its client says how long it may
last (RFC 7240: `Prefer: wait=50`), as its own time-out and that of proxies has to be longer. All polls end at the same
moments of this coordinator's clock, so that the next ones begin together, and their tokens are looked up together.
"""

import asyncio
import re
from contextlib import suppress
from typing import Annotated

from fastapi import Header, Request
from pydantic import Field

from coordinator.http.conditions import names_tag
from coordinator.http.parameters import WholeNumber
from coordinator.signals import SignalSubscription
from web.metrics import hold_open
from web.strict_routes import QueryModel

DEFAULT_POLL_S = 20
MAX_POLL_S = 50  # many proxies end a connection after a minute without traffic
_WAIT = re.compile(r"(?:^|[,;])\s*wait=(\d{1,6})\s*(?=$|[,;])", re.IGNORECASE)

Prefer = Annotated[
    str | None,
    Header(
        alias="Prefer",
        description=f"`wait=SECONDS`: how long to wait for a newer version, up to {MAX_POLL_S}; else {DEFAULT_POLL_S}.",
        examples=["wait=50"],
    ),
]


class PollQuery(QueryModel):
    since: Annotated[
        WholeNumber | None,
        Field(
            description="A version. Wait for a newer one, and answer 304 if none comes in time.",
            examples=[7],
        ),
    ] = None


def is_up_to_date(request: Request, since: int | None, version: int, tag: str) -> bool:
    """Return whether the client has this version. If it sends an ETag as well, that must be the version's, too.

    After a restore of the database a version number may come again with other content, and then the ETag differs.
    """
    known = request.headers.get("If-None-Match")
    return version == since and (known is None or names_tag(known, tag))


async def wait_for_signal(request: Request, subscription: SignalSubscription, kind: str) -> bool:
    """Wait for a signal of this kind, until the poll has lasted long enough, or until the coordinator stops.

    Return whether it came. Otherwise there is nothing to read again: the next poll begins by reading.
    """
    hold_open(request.scope)
    poll_s = preferred_s(request.headers.get("Prefer", ""))
    with suppress(TimeoutError):
        async with asyncio.timeout(rest_of_poll_s(asyncio.get_running_loop().time(), poll_s)):
            while (taken := await subscription.take(poll_s)) is not None:
                if any(signal.kind == kind for signal in taken):
                    return True
    return False


def preferred_s(prefer: str) -> int:
    """Return how long a poll may last, given the header Prefer."""
    found = _WAIT.search(prefer)
    return DEFAULT_POLL_S if found is None else max(1, min(int(found[1]), MAX_POLL_S))


def rest_of_poll_s(now_s: float, poll_s: int) -> float:
    """Return how long a poll that begins now lasts: at least half of its time, up to the next common moment."""
    return poll_s - now_s % (poll_s / 2)
