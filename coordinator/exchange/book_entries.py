"""Write the transfers of entries, and enqueue the webhook events that follow from them."""

from collections.abc import Sequence
from datetime import datetime

from coordinator.database.connection import Connection
from coordinator.exchange.rules.posting import Entry
from coordinator.exchange.statements.transfers import copy_transfers
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import suspense_events


async def book_entries(connection: Connection, entries: Sequence[Entry], now: datetime) -> None:
    """Write transfers, and enqueue an event for each lease of which units entered suspense."""
    await copy_transfers(connection, entries, now)
    await enqueue(connection, suspense_events(entries), now)
