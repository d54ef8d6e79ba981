"""Long polls: whoever has the newest version waits until there may be another one."""

import asyncio

from fastapi import Request

from coordinator.http.conditions import names_tag
from coordinator.signals import Subscription

LONGEST_POLL_S = 20.0


def a_version(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError("it is a version: a whole number")
    return int(text)


def has_it(request: Request, since: int | None, version: int, tag: str) -> bool:
    """Whether the client has this version already. A client that sends the ETag as well must have that, too.

    After a restore of the database a version number comes again with another content, and the ETag differs.
    """
    known = request.headers.get("If-None-Match")
    return version == since and (known is None or names_tag(known, tag))


async def news(subscription: Subscription, kind: str) -> None:
    """Until there may be some, the poll has lasted long enough, or the coordinator stops."""
    try:
        async with asyncio.timeout(LONGEST_POLL_S):
            while (taken := await subscription.take(LONGEST_POLL_S)) is not None:
                if any(signal.kind == kind for signal in taken):
                    return
    except TimeoutError:
        return
