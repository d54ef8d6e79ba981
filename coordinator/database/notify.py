"""Notifications through Postgres: sent within a transaction, so that only committed changes are signalled."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import structlog

from coordinator.database.connection import Connection
from coordinator.database.engine import CONNECT_TIMEOUT_S, OUTAGE, Url, connect
from coordinator.notice import Notice
from protocol.messages import Signal

CHANNEL = "leasehold_signals"
RECONNECT_AFTER_S = 1.0

# Notifications that were sent without a listener are lost, so waiting requests look again after a reconnect.
PERHAPS_MISSED = [msgspec.json.encode(Notice(Signal(kind=kind))).decode() for kind in ("policies", "blocks", "resets")]

_log = structlog.get_logger(__name__)


async def notify(connection: Connection, notices: Sequence[Notice]) -> None:
    if notices:
        payloads = [msgspec.json.encode(notice).decode() for notice in notices]
        await connection.execute("SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload", CHANNEL, payloads)


async def listen(url: Url, deliver: Callable[[str], None]) -> None:
    """Deliver every notification, forever, and reconnect when the connection is lost. An outage is logged once."""
    failures = 0

    def connected() -> None:
        nonlocal failures
        if failures:
            _log.info("signals received again", failures=failures)
        failures = 0

    while True:
        try:
            await _listen_once(url, deliver, connected)
        except OUTAGE as error:
            failures += 1
            if failures == 1:
                _log.warning("signals interrupted", error=type(error).__name__)
        await asyncio.sleep(RECONNECT_AFTER_S)


async def _listen_once(url: Url, deliver: Callable[[str], None], connected: Callable[[], None]) -> None:
    connection = await connect(
        url, timeout_s=CONNECT_TIMEOUT_S, server_settings={"application_name": "leasehold-coordinator-signals"}
    )
    ended = asyncio.Event()
    connection.add_termination_listener(lambda _: ended.set())
    try:
        await connection.add_listener(CHANNEL, lambda *notice: deliver(str(notice[-1])))
        connected()
        for notice in PERHAPS_MISSED:
            deliver(notice)
        await ended.wait()
    finally:
        with suppress(*OUTAGE):
            await connection.close(timeout=1)
