"""Make partitions of the decision log ahead, and drop those whose time is over."""

from collections.abc import Awaitable, Callable

from coordinator.database.engine import Database
from coordinator.decision_log.store import keep_days
from protocol.clock import Clock


def keep_decisions(clock: Clock, retention_days: int) -> Callable[[Database], Awaitable[None]]:
    """Return the job of a coordinator that keeps decisions for so many days."""

    async def keep(database: Database) -> None:
        now = clock.now()
        await database.attempt(lambda connection: keep_days(connection, now, now, retention_days))

    return keep


# The first rows make their own partitions, so an installation without a log has none.
DECISIONS_KEPT = "EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'decision'::regclass)"
