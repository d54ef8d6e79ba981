"""The health service of gRPC (`grpc.health.v1.Health`), which answers as `/readyz` does.

Its messages have one field each, so they are read and written here without a library.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from regional_agent.envoy.door.methods import GrpcError, MessageStream, Status

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
LOOK_S = 0.5  # between two looks at the health, for those who watch
_NAME = 0x0A  # the tag of the only field of a request


class HealthService:
    def __init__(self, services: Collection[str], is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._services = {"", *services}
        self._is_ready = is_ready

    async def check(self, stream: MessageStream) -> None:
        """Answer one request. It is no unary method: the health of several workers is asked over sockets."""
        async for request in stream:
            if _service_in(request) not in self._services:
                raise GrpcError(Status.NOT_FOUND, "unknown service")
            await stream.send(await self._state())
            return
        raise GrpcError(Status.INTERNAL, "the request has no message")

    async def watch(self, stream: MessageStream) -> None:
        """Send the state at once, and whenever it changes."""
        async for request in stream:
            is_known, sent = _service_in(request) in self._services, b""
            while True:
                state = await self._state() if is_known else SERVICE_UNKNOWN
                if state != sent:
                    await stream.send(state)
                    sent = state
                await asyncio.sleep(LOOK_S)

    async def _state(self) -> bytes:
        return SERVING if await self._is_ready() else NOT_SERVING


def _service_in(request: bytes) -> str | None:
    """Return the name in a request, or None for what is no name."""
    if not request:
        return ""
    is_name = request[0] == _NAME and len(request) > 1 and request[1] == len(request) - 2
    return request[2:].decode(errors="replace") if is_name else None
