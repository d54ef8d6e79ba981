"""Notice silent links: packets are lost, and nothing says that a client is gone.

TCP repeats what is not acknowledged for a quarter of an hour, and an idle connection sends nothing at all.
"""

import asyncio
import socket
import struct

IDLE_S, PROBE_S, PROBES = 10, 1, 3  # the system probes a connection without traffic
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


def watch_links(listener: socket.socket, unacknowledged_ms: int) -> None:
    """Let the system end connections whose client acknowledges nothing for so long.

    Connections inherit the options of their listener. A system that lacks some of them ends silent links later.
    """
    if listener.family not in _INTERNET:
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_USER_TIMEOUT": unacknowledged_ms,
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": PROBES,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reset_link(transport: asyncio.Transport) -> None:
    """End a connection so that what is on its way to the client is never delivered: a plain close repeats that."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in _INTERNET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
    transport.abort()
