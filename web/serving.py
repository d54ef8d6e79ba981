"""Serve an app in one process: bind the socket first, and shut down in order.

The socket is bound before the app starts, so that a port in use is one sentence and not a half-started service. On
SIGTERM a server with a lame duck period first reports that it is not ready, and serves for that time, so that load
balancers send requests elsewhere. SIGINT or a second signal skips that. Then the server refuses new connections, calls
`before_shutdown` (which ends event streams and long polls), completes the open requests, and ends the app's lifespan. A
cancelled `serve` shuts down in the same order.

Run it on uvloop: `uvloop.run(serve(app, ...))`.
"""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import structlog
from starlette.types import ASGIApp
from uvicorn import Config, Server

from web.connections import ConnectionLimits, within_descriptors
from web.http_protocol import BoundedProtocol, bounded_protocol

GRACE_S = 5
TLS_SHUTDOWN_S = 5.0  # how long to wait for the client's half of the end of a TLS connection
STARTUP_FAILURE = 3  # the exit status of uvicorn where the app does not start
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they do not send into a closed one

GARBAGE_AFTER = 50_000  # new objects between collections; Python's default is 700

_log = structlog.get_logger("web.serving")


class CannotListen(Exception):
    """The socket cannot be opened. The message is a sentence for people."""


class PortInUse(CannotListen):
    """The socket cannot be opened. The message is a sentence for people."""


class LameDuck(NamedTuple):
    """The time to serve after SIGTERM, and the callback for its begin."""

    seconds: float
    on_begin: Callable[[], None]


class Listener(NamedTuple):
    socket: socket.socket
    address: str


@contextlib.contextmanager
def listening(host: str, port: int, uds: str | None = None) -> Iterator[Listener]:
    """Bind a host and port, or the unix socket `uds`."""
    listener = _listen_on_unix(uds) if uds else _listen_on_port(host, port)
    try:
        yield Listener(listener, f"unix:{uds}" if uds else _url_of(listener))
    finally:
        listener.close()
        if uds:
            _remove(uds)


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    uds: str | None = None,
    max_header_bytes: int = 16_384,
    limits: ConnectionLimits | None = None,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    before_shutdown: Callable[[], Awaitable[None]] | None = None,
    on_listening: Callable[[str], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve an app until a signal arrives."""
    with listening(host, port, uds) as listener:
        await serve_on(
            listener,
            app,
            max_header_bytes=max_header_bytes,
            limits=limits,
            protocol=protocol,
            before_shutdown=before_shutdown,
            on_listening=on_listening,
            tls=tls,
        )


async def serve_on(
    listener: Listener,
    app: ASGIApp,
    *,
    max_header_bytes: int = 16_384,
    limits: ConnectionLimits | None = None,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    before_shutdown: Callable[[], Awaitable[None]] | None = None,
    on_listening: Callable[[str], None] | None = None,
    lame_duck: LameDuck | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve an app on a socket that is open already, and that other processes may share.

    `on_listening` is called with the address once the app has started, which is the only way to know it with port 0.
    """
    collect_garbage_rarely()
    limits = limits or ConnectionLimits()
    limits.max_connections = within_descriptors(limits.max_connections)
    config = _config(app, bounded_protocol(max_header_bytes, limits, protocol), tls)
    address = listener.address if tls is None else listener.address.replace("http://", "https://", 1)
    server = _Server(config, before_shutdown, _announcer(address, on_listening), lame_duck, limits.request_timeout_s)
    await server.serve([listener.socket])


def collect_garbage_rarely() -> None:
    """Collect garbage rarely: objects of the start stay for ever, and those of a request have few cycles.

    As it comes, Python looks through everything so often that it takes a fifth of the time of a large request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)


def log_listening(address: str) -> None:
    _log.info("listening", address=address, pid=os.getpid())


def _announcer(address: str, on_listening: Callable[[str], None] | None) -> Callable[[], None]:
    def announce() -> None:
        log_listening(address)
        if on_listening is not None:
            on_listening(address)

    return announce


class _Server(Server):
    def __init__(
        self,
        config: Config,
        before_shutdown: Callable[[], Awaitable[None]] | None,
        announce: Callable[[], None],
        lame_duck: LameDuck | None,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s
        self._lame_duck = lame_duck
        self._is_lame_duck = False
        self._before_shutdown = before_shutdown
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does on open sockets, and bound TLS handshakes: a silent client holds a descriptor."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        self.servers = [
            await loop.create_server(
                self._new_connection,
                sock=each,
                ssl=tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=None if tls is None else self._handshake_timeout_s,
                ssl_shutdown_timeout=None if tls is None else TLS_SHUTDOWN_S,
            )
            for each in sockets or ()
        ]
        self.started = True
        self._announce()

    def _new_connection(self) -> asyncio.Protocol:
        make: type[BoundedProtocol] = self.config.http_protocol_class  # type: ignore[assignment]
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def main_loop(self) -> None:
        try:
            await super().main_loop()
        except asyncio.CancelledError:
            await self.shutdown()
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._end_streams()
        await super().shutdown(sockets)

    async def _end_streams(self) -> None:
        if self._before_shutdown is None:
            return
        try:
            await asyncio.wait_for(self._before_shutdown(), GRACE_S)
        except Exception:  # the server must shut down in order whatever happens here
            _log.exception("before_shutdown failed")

    def _on_signal(self, number: signal.Signals) -> None:
        """Begin the lame duck period on SIGTERM. SIGINT and any second signal shut down at once."""
        lame_duck = self._lame_duck
        if lame_duck is None or self._is_lame_duck or number != signal.SIGTERM or not self.started:
            self.handle_exit(number, None)
            return
        self._is_lame_duck = True
        lame_duck.on_begin()
        if lame_duck.seconds:
            _log.info("shutting down, reporting not ready", closes_in_ms=int(lame_duck.seconds * 1000))
        asyncio.get_running_loop().call_later(lame_duck.seconds, self.handle_exit, number, None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals ourselves: uvicorn raises a signal again when it is done, which would kill the caller."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _config(app: ASGIApp, protocol: type[BoundedProtocol], tls: ssl.SSLContext | None) -> Config:
    return Config(
        app,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


# --- sockets ---------------------------------------------------------------------------------------------------------


def _listen_on_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _listen(socket.socket(family, kind, protocol), address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} of {host} is in use by another program: stop it, or choose another."
            ) from None
        raise CannotListen(f"Cannot listen on port {port} of {host}: {error.strerror}.") from None


def _listen_on_unix(path: str) -> socket.socket:
    try:
        _remove_if_stale(path)
        earlier = os.umask(0o117)  # so that other users can never connect, not even between bind and chmod
        try:
            return _listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)
        finally:
            os.umask(earlier)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"The socket {path} is in use by another program: stop it, or choose another.") from None
        raise CannotListen(f"Cannot listen on the socket {path}: {error.strerror or error}.") from None


def _listen(listener: socket.socket, address: object) -> socket.socket:
    """Bind and listen. With REUSEADDR two programs may bind one port, but only one of them may listen."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_if_stale(path: str) -> None:
    """Remove the socket of a process that was killed: the file exists, and connections are refused."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
