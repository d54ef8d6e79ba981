"""Long polls: a client that has the newest version waits for the next one."""

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import Request
from pydantic import Field

from coordinator.http.conditions import names_tag
from coordinator.http.parameters import WholeNumber
from coordinator.signals import SignalSubscription
from web.metrics import hold_open
from web.strict_routes import QueryModel

MAX_POLL_S = 20.0


class PollQuery(QueryModel):
    since: Annotated[
        WholeNumber | None,
        Field(
            description=f"A version. Wait up to {MAX_POLL_S:.0f} seconds for a newer one, then answer 304.",
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
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_POLL_S):
            while (taken := await subscription.take(MAX_POLL_S)) is not None:
                if any(signal.kind == kind for signal in taken):
                    return True
    return False
