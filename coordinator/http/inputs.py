"""What people say in more than one body, and how it is refused."""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

from msgspec import Meta

from web.problems import InvalidParameter

Reason = Annotated[str, Meta(min_length=1, max_length=1000)]
Moment = Annotated[datetime, Meta(tz=True, description="RFC 3339")]


def faults_of_reason(reason: str) -> Iterator[InvalidParameter]:
    if not reason.isprintable():
        yield InvalidParameter("reason", "text", "it holds a character that cannot be printed")


def faults_of_end(starts: datetime, ends: datetime | None, now: datetime) -> Iterator[InvalidParameter]:
    if ends is not None and ends <= max(starts, now):
        yield InvalidParameter("valid_until", "future", "it is over before it begins, or before now")
