"""The connections between two programs, which a test can break."""

import asyncio

PART = 65_536


class Link:
    """A relay of TCP connections to a port. Silent, it passes nothing on and ends nothing, as a network that drops."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._is_silent = False
        self._is_mended = asyncio.Event()
        self.port = 0

    async def serve(self) -> "Link":
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def reset(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def refuse(self) -> None:
        """Refuse connections from now on, as a machine whose program is gone."""
        assert self._server is not None
        self._server.close()
        self.reset()

    def silence(self) -> None:
        self._is_silent = True
        self._is_mended.clear()

    async def mend(self) -> None:
        """Serve again. Connections that were silent are lost, with what they held."""
        if self._is_silent:
            self.reset()
        self._is_silent = False
        self._is_mended.set()
        assert self._server is not None
        if not self._server.is_serving():
            await self.serve()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, there}
        self._open |= ends
        await asyncio.gather(self._copy(reader, there), self._copy(there_reader, writer), return_exceptions=True)
        self._open -= ends

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(PART):
                if self._is_silent:
                    await self._is_mended.wait()
                    return
                writer.write(data)
        finally:
            writer.transport.abort()
