"""How a connection to a store is opened: redis-py connects, encrypts, authenticates and selects; then we take over.

A call of redis-py costs twenty times one of ours, because it writes and reads for each call by itself. So once its
connection is ready, its transport gets our protocol, and redis-py takes no part in any command. That uses two of its
attributes which are not documented (`_reader`, `_writer`), so `pyproject.toml` bounds its version, and
`tests/integration/regional_agent/store/test_opening.py` tests what this relies on.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import SecretStr
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

from regional_agent.store.address import StoreAddress, server_name

CONNECT_S = 2.0


@dataclass(frozen=True)
class StoreAccess:
    """The settings of a store beside its address: its password and TLS."""

    password: SecretStr | None = None  # in place of one in the address
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    checks_hostname: bool = True


class CurrentPassword(CredentialProvider):
    """Gives each connection the password as it is now: one in a file may be changed while the agent runs."""

    def __init__(self, password: SecretStr, username: str | None) -> None:
        self._password = password
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.get_secret_value()
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()  # it is a line on a local disk


class Endpoint(Protocol):
    """The destination of a connection. Its text is the address without the password."""

    async def locate(self) -> AbstractConnection:
        """Return a connection to the server that has the store now; it is not connected yet."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Return the server that was located last, or None if it is not reached by TCP."""

    def connection_to(self, host: str, port: int) -> AbstractConnection:
        """Return a connection to a server of the same store, with the same credentials; it is not connected yet."""

    @property
    def watch_interval_s(self) -> float | None:
        """Return how often to ask `has_moved`, or None if the address always leads to the same server."""

    async def has_moved(self) -> bool:
        """Return whether the store is at another server than the one located last."""

    async def close(self) -> None:
        """Close what was opened to locate the store."""


class Server:
    """A server at a known address."""

    watch_interval_s: float | None = None

    def __init__(self, address: StoreAddress, access: StoreAccess, seed: tuple[str, int] | None = None) -> None:
        """`seed`: a node of the Cluster; by default the only server of the address."""
        self._address = address
        self.host, self.port = seed or (address.seeds[0] if address.seeds else ("", 0))
        self._options = connection_options(address, access)

    @classmethod
    def at(cls, url: str) -> "Server":
        """Return the server at a URL, such as `redis://:password@127.0.0.1:6379/0`."""
        return cls(StoreAddress.parse(url), StoreAccess())

    async def locate(self) -> AbstractConnection:
        if self._address.path:
            return UnixDomainSocketConnection(path=self._address.path, **self._options)
        return self.connection_to(self.host, self.port)

    @property
    def place(self) -> tuple[str, int] | None:
        return None if self._address.path else (self.host, self.port)

    def connection_to(self, host: str, port: int) -> AbstractConnection:
        return connection_class(self._address)(host=host, port=port, **self._options)

    async def has_moved(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing: it opens its own connection only."""

    def __str__(self) -> str:
        return self._address.path or f"{server_name(self.host, self.port)}/{self._address.database}"


def connection_class(address: StoreAddress) -> type[Connection]:
    return SSLConnection if address.has_tls else Connection


def connection_options(address: StoreAddress, access: StoreAccess) -> dict[str, Any]:
    """Return the arguments of redis-py's connections to a store. It retries nothing, and names no library."""
    options = {"db": address.database, **BASIC_OPTIONS, **tls_options(address, access)}
    if access.password is not None:
        return options | {"credential_provider": CurrentPassword(access.password, address.username)}
    return options | {"username": address.username, "password": address.password}


# With RESP2 the handshake is AUTH and SELECT alone, which every user of an ACL may send.
BASIC_OPTIONS: Mapping[str, Any] = {
    "protocol": 2,
    "driver_info": None,
    "socket_timeout": CONNECT_S,
    "socket_connect_timeout": CONNECT_S,
}


def tls_options(address: StoreAddress, access: StoreAccess) -> dict[str, Any]:
    if not address.has_tls:
        return {}
    files = {"ssl_ca_certs": access.ca_file, "ssl_certfile": access.cert_file, "ssl_keyfile": access.key_file}
    return {
        **{name: str(path) for name, path in files.items() if path is not None},
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": access.checks_hostname,
    }


async def connect_with(connection: AbstractConnection, protocol: asyncio.Protocol) -> asyncio.StreamWriter:
    """Connect, and give the transport to a protocol of ours. Raise redis-py's RedisError, or an OSError.

    The writer closes the transport when it is deleted, so the protocol's owner keeps it.
    """
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        _raise_if_cancelled()
        return _take_over(connection, protocol)
    finally:
        await connection.disconnect(nowait=True)  # if it is still redis-py's


def _raise_if_cancelled() -> None:
    """Raise the cancellation that redis-py lost: before Python 3.12, `asyncio.wait_for` ignores one now and then."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _take_over(connection: AbstractConnection, protocol: asyncio.Protocol) -> asyncio.StreamWriter:
    reader, writer = connection._reader, connection._writer  # see the top of this file
    assert reader is not None
    assert writer is not None
    if reader.at_eof() or writer.transport.is_closing():  # our protocol would not learn that it is closed
        raise RedisConnectionError("the store closed the connection")
    connection._reader = connection._writer = None
    writer.transport.set_protocol(protocol)
    protocol.connection_made(writer.transport)
    return writer
