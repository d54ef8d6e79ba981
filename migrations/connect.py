"""Connect to PostgreSQL at the first of several hosts that can be used.

A URL may name several hosts: `postgresql://user@h1:5432,h2:5432/db`. The driver tries them in their order as well, with
one time-out for all, which a host that does not answer uses up. Here each host has an equal part of it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection: TypeAlias = asyncpg.Connection

TIMEOUT_S = 10.0  # where a caller has none
SESSION_ATTRIBUTES = "target_session_attrs"
OF_PRIMARIES = ("read-write", "primary")
# The next host may be another server, which has none of these troubles.
TRY_NEXT = (
    OSError,
    TimeoutError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.TargetServerAttributeNotMatched,
    asyncpg.ConnectionDoesNotExistError,
)


class NoUsableHost(OSError):
    """No host of the URL could be used. The message has the reason for each."""


async def connect(url: str, *, timeout_s: float = TIMEOUT_S, **options: Any) -> Connection:
    """Connect to the only host of a URL, or to the first of several that is a primary and answers in time."""
    hosts = dict(urls_of_hosts(url))
    if len(hosts) == 1:
        return await asyncpg.connect(url, timeout=timeout_s, **options)
    reasons: list[str] = []
    for host, its_url in hosts.items():
        try:
            return await asyncpg.connect(its_url, timeout=timeout_s / len(hosts), **options)
        except TRY_NEXT as error:
            reasons.append(f"{host}: {_reason(error)}")
    raise NoUsableHost(f"no host of the database can be used: {'; '.join(reasons)}")


def urls_of_hosts(url: str) -> Iterator[tuple[str, str]]:
    """Yield each host of a URL, and a URL of it alone. Of several hosts only a primary is accepted.

    Raise ValueError if the URL asks for something else than a primary.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    attribute = query.get(SESSION_ATTRIBUTES)
    user, at, named = parts.netloc.rpartition("@")
    hosts = (query.get("host") or named).split(",")
    if attribute not in (None, *OF_PRIMARIES, *(["any"] if len(hosts) == 1 else [])):
        raise ValueError(f"{SESSION_ATTRIBUTES} must be {' or '.join(OF_PRIMARIES)}, not {attribute}: Leasehold writes")
    if len(hosts) == 1:
        yield hosts[0], url
        return
    query.setdefault(SESSION_ATTRIBUTES, OF_PRIMARIES[0])
    ports = query.pop("port", "").split(",")
    is_in_query = query.pop("host", None) is not None
    for number, host in enumerate(hosts):
        own = {"host": host, "port": ports[min(number, len(ports) - 1)]} if is_in_query else {}
        options = urlencode({**query, **{name: value for name, value in own.items() if value}})
        yield host, urlunsplit(parts._replace(netloc=user + at + ("" if is_in_query else host), query=options))


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "it is a standby"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
