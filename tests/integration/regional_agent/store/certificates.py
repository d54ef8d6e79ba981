"""A listener that encrypts what goes to a store without TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from leasehold.local_stack import embedded
from tests.certificates import Authority
from tests.integration.regional_agent.store.test_topology import Switch


@asynccontextmanager
async def encrypted(
    target: int, authority: Authority, *, hosts: tuple[str, ...] = (embedded.LOOPBACK,), asks_for_one: bool = False
) -> AsyncIterator[int]:
    """Yield a port where the store at `target` is reached with TLS. `asks_for_one`: clients need a certificate too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("store", hosts))
    if asks_for_one:
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
    switch = Switch()
    switch.target = target
    server = await asyncio.start_server(switch.accept, embedded.LOOPBACK, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        switch.turn(0)
