"""A store that sentinels watch: which server is its primary now.

All sentinels are asked, and the one with the highest configuration epoch is believed: each failover that most sentinels
agreed on raises it, so a sentinel that is cut off cannot lead to a former primary. While connected, the sentinels are
asked every second. If they name another primary, or the same one in a later epoch (it failed over and back), the
connection is closed, and the next one reads the fingerprint again.
"""

import asyncio
from typing import NamedTuple

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from regional_agent.store.address import StoreAddress, server_name
from regional_agent.store.opening import BASIC_OPTIONS, StoreAccess, connection_class, connection_options, tls_options

WATCH_INTERVAL_S = 1.0


class Primary(NamedTuple):
    config_epoch: int
    host: str
    port: int


class Sentinels:
    """The endpoint of a store that sentinels watch."""

    watch_interval_s: float | None = WATCH_INTERVAL_S

    def __init__(self, address: StoreAddress, access: StoreAccess) -> None:
        self._address = address
        self._options = connection_options(address, access)
        options = {**BASIC_OPTIONS, **tls_options(address, access), **address.sentinel_options, "ssl": address.has_tls}
        self._clients = [
            Redis(host=host, port=port, retry=Retry(NoBackoff(), 0), **options) for host, port in address.seeds
        ]
        self._primary: Primary | None = None  # that the last connection went to

    async def locate(self) -> AbstractConnection:
        self._primary = await self._find_primary()
        return self.connection_to(self._primary.host, self._primary.port)

    @property
    def place(self) -> tuple[str, int] | None:
        return None if self._primary is None else (self._primary.host, self._primary.port)

    def connection_to(self, host: str, port: int) -> AbstractConnection:
        return connection_class(self._address)(host=host, port=port, **self._options)

    async def has_moved(self) -> bool:
        """Return whether the sentinels name another primary. While none of them answers, the present one is kept."""
        try:
            return await self._find_primary() != self._primary
        except RedisError:
            return False

    async def close(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self._clients))

    async def _find_primary(self) -> Primary:
        answers = await asyncio.gather(*map(self._ask, self._clients))
        known = [answer for answer in answers if isinstance(answer, Primary)]
        if not known:
            reasons = ", ".join(sorted({str(answer) for answer in answers}))
            raise RedisConnectionError(f"no sentinel knows the primary of {self._address.service}: {reasons}")
        return max(known)

    async def _ask(self, client: Redis) -> Primary | Exception:
        try:
            states = await client.sentinel_masters()
        except (RedisError, OSError) as error:
            return error
        assert isinstance(states, dict)
        state = states.get(self._address.service)
        if state is None:
            return RedisConnectionError(f"they know {', '.join(sorted(states)) or 'no store'}")
        return Primary(int(state["config-epoch"]), str(state["ip"]), int(state["port"]))

    def __str__(self) -> str:
        if self._primary is None:
            return str(self._address)
        return f"{server_name(self._primary.host, self._primary.port)}/{self._address.database} ({self._address})"
