"""The transport of HTTPS clients on asyncio.

httpcore closes a connection whose handshake fails, but not one whose handshake is cancelled, as happens with each call
that has waited long enough for a server that hangs. Such connections would stay open for as long as it hangs.
"""

import ssl
from typing import Any

import httpcore
import httpx


class _ClosedIfCancelled(httpcore.AsyncNetworkStream):
    """A connection before its handshake."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def start_tls(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        try:
            return await self._stream.start_tls(*args, **kwargs)
        except BaseException:
            await self._stream.aclose()
            raise

    async def read(self, *args: Any, **kwargs: Any) -> bytes:
        return await self._stream.read(*args, **kwargs)

    async def write(self, *args: Any, **kwargs: Any) -> None:
        await self._stream.write(*args, **kwargs)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.AnyIOBackend):
    async def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        return _ClosedIfCancelled(await super().connect_tcp(*args, **kwargs))


class HttpsTransport(httpx.AsyncHTTPTransport):
    """httpx's transport, with a pool of its own making."""

    def __init__(self, tls: ssl.SSLContext, limits: httpx.Limits) -> None:
        super().__init__(verify=tls, limits=limits)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Backend(),
        )
