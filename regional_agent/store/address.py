"""The address of a region's store, in each form that operators may write it.

redis-py parses the URL of a server. Addresses of several servers are split here, and what redis-py would ignore is
refused: an address never means less security than it says. Errors never repeat the address, which may hold a password.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from redis.asyncio.connection import parse_url

EXAMPLES = (
    "redis://:password@host:port/0, rediss://… with TLS, unix:///path,"
    " redis+sentinel://:password@host:port,host:port/service or redis+cluster://:password@host:port,host:port"
)
_DATABASE = re.compile(r"/?[0-9]{0,5}")
_TLS_PARAMETER = re.compile(r"(ssl|tls)[a-z_]{0,30}")
_SENTINEL_PARAMETERS = ("sentinel_username", "sentinel_password")


class StoreSetup(Enum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES = {
    "redis": (StoreSetup.SINGLE, "redis"),
    "rediss": (StoreSetup.SINGLE, "rediss"),
    "unix": (StoreSetup.SINGLE, "unix"),
    "redis+sentinel": (StoreSetup.SENTINEL, "redis"),
    "rediss+sentinel": (StoreSetup.SENTINEL, "rediss"),
    "redis+cluster": (StoreSetup.CLUSTER, "redis"),
    "rediss+cluster": (StoreSetup.CLUSTER, "rediss"),
}


@dataclass(frozen=True)
class StoreAddress:
    """`seeds`: the single server, the sentinels, or some nodes of the Cluster. User and password are the store's."""

    setup: StoreSetup
    has_tls: bool
    seeds: tuple[tuple[str, int], ...] = ()
    path: str | None = None  # of a unix socket
    service: str = ""  # the name that the sentinels know the store by
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str) -> "StoreAddress":
        """Raise a ValueError that says what is wrong."""
        scheme, separator, _ = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise ValueError(f"it must look like {EXAMPLES}")
        setup, server_scheme = _SCHEMES[scheme]
        parts = _split(url)
        parameters = dict(_parameters(parts, setup))
        if server_scheme == "unix":
            return cls._of_socket(url)
        user, at, hosts = parts.netloc.rpartition("@")
        servers = [_parse_server(f"{server_scheme}://{user}{at}{host}") for host in hosts.split(",")]
        if setup is StoreSetup.SINGLE and len(servers) > 1:
            raise ValueError("several hosts are an address of sentinels (redis+sentinel://) or a Cluster's")
        service, database = _path(setup, parts.path)
        return cls(
            setup=setup,
            has_tls=server_scheme == "rediss",
            seeds=tuple((server["host"], server.get("port", _PORTS[setup])) for server in servers),
            service=service,
            database=database,
            username=servers[0].get("username"),
            password=servers[0].get("password"),
            sentinel_options={name.removeprefix("sentinel_"): value for name, value in parameters.items()},
        )

    @classmethod
    def _of_socket(cls, url: str) -> "StoreAddress":
        parsed = _parse_server(url)
        if not parsed.get("path"):
            raise ValueError("it must look like unix:///path")
        return cls(
            setup=StoreSetup.SINGLE,
            has_tls=False,
            path=parsed["path"],
            database=parsed.get("db", 0),
            username=parsed.get("username"),
            password=parsed.get("password"),
        )

    def __str__(self) -> str:
        if self.path:
            return self.path
        hosts = ",".join(server_name(*seed) for seed in self.seeds)
        if self.setup is StoreSetup.SINGLE:
            return f"{hosts}/{self.database}"
        return hosts if self.setup is StoreSetup.CLUSTER else f"{self.service} of the sentinels {hosts}"


_PORTS = {StoreSetup.SINGLE: 6379, StoreSetup.SENTINEL: 26379, StoreSetup.CLUSTER: 6379}


def server_name(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("its host cannot be read") from None
    if parts.fragment or "#" in url:
        raise ValueError("it contains a #; within a password it is written %23")
    return parts


def _parameters(parts: SplitResult, setup: StoreSetup) -> Iterator[tuple[str, str]]:
    """Yield the parameters after the question mark, and refuse those that would have no effect."""
    known = {StoreSetup.SENTINEL: _SENTINEL_PARAMETERS}.get(setup, ("db",) if parts.scheme == "unix" else ())
    for name, values in parse_qs(parts.query, keep_blank_values=True).items():
        if _TLS_PARAMETER.fullmatch(name):
            raise ValueError(
                f"the parameter {name} is not supported: for TLS it begins with rediss://, and certificates are"
                " settings of their own"
            )
        if name not in known:
            raise ValueError("it has an unknown parameter; within a password ? is written %3F")
        yield name, values[0]


def _parse_server(url: str) -> Mapping[str, Any]:
    try:
        parsed = parse_url(url)
    except ValueError:
        raise ValueError(
            "its host, port or database cannot be read; special characters of a password are written %xx"
        ) from None
    if not parsed.get("host") and not parsed.get("path"):
        raise ValueError("it has no host")
    return parsed


def _path(setup: StoreSetup, path: str) -> tuple[str, int]:
    """Return the name of a service, and the database."""
    service = ""
    if setup is StoreSetup.SENTINEL:
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise ValueError("it has no service: redis+sentinel://host:port,host:port/service")
    if not _DATABASE.fullmatch(path):
        raise ValueError("its database is a number, such as redis://127.0.0.1:6379/0")
    if setup is StoreSetup.CLUSTER and path.strip("/"):
        raise ValueError("a Cluster has no databases")
    return service, int(path.strip("/") or 0)
