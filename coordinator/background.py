"""The background jobs of a coordinator: what runs, how often, and for how long at most."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from coordinator.access.idempotency_records import RECORDS_EXPIRED, delete_expired
from coordinator.archives.job import ARCHIVES_WAITING, archive_periods
from coordinator.archives.store import open_store
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.decision_log.retention import DECISIONS_KEPT, keep_decisions
from coordinator.exchange.expire_leases import LEASES_EXPIRED, expire_leases
from coordinator.exchange.recall import SUSPENSE_WAITING, recall_suspense
from coordinator.exports.job import EXPORTS_WAITING, delete_expired_exports, make_exports
from coordinator.health.figures import measure, measure_deliveries
from coordinator.installation.rules import addresses_of
from coordinator.jobs import Job
from coordinator.limits.in_force import Documents
from coordinator.metrics import CoordinatorMetrics
from coordinator.periods.close import PERIODS_CLOSING, continue_closing
from coordinator.proof.seal import seal_and_announce
from coordinator.proof.verifications import VERIFICATIONS_WAITING, run_verifications
from coordinator.rebalancing.follow import REBALANCES_RUNNING, follow_rebalances
from coordinator.rebalancing.holds import HOLDS_OVER, end_holds
from coordinator.settings import CoordinatorSettings
from coordinator.shared_limits.share_rates import delete_idle_shares
from coordinator.usage.find_drift import find_drift
from coordinator.usage.find_signals import SignalTerms, find_signals
from coordinator.webhooks.deliveries import DELIVERIES_DUE, delete_old_events
from coordinator.webhooks.delivery import deliver_webhooks
from protocol.clock import Clock
from web.traces.tracing import Tracing

HOUR_S = 3600
ARCHIVE_AT_MOST_S = 12 * HOUR_S  # an attempt that is cancelled begins again


def background_jobs(
    settings: CoordinatorSettings,
    clock: Clock,
    metrics: CoordinatorMetrics | None = None,
    tracing: Tracing | None = None,
) -> list[Job]:
    """`metrics` and `tracing`: of the coordinator that runs them."""
    metrics = metrics or CoordinatorMetrics()
    grace, hold_wait = (timedelta(milliseconds=ms) for ms in (settings.close_grace_ms, settings.close_hold_wait_ms))
    addresses = addresses_of(settings.database_url.get_secret_value(), settings.installation)
    documents, archives = Documents(), open_store(settings.archive)
    used_up_after = timedelta(milliseconds=settings.used_up_after_ms)
    signals = SignalTerms(settings.growth_factor, settings.growth_floor_units, used_up_after)

    def once(operation: Callable[[Connection, datetime], Awaitable[object]]) -> Callable[[Database], Awaitable[object]]:
        """Run the operation in one transaction."""
        return lambda database: database.run(lambda connection: operation(connection, clock.now()))

    def close_periods(database: Database) -> Awaitable[None]:
        return continue_closing(database, clock, grace, hold_wait)

    def follow(database: Database) -> Awaitable[None]:
        return follow_rebalances(database, documents, clock)

    def deliver(database: Database) -> Awaitable[int]:
        return deliver_webhooks(database, clock, addresses, on_attempt=metrics.note_webhook_attempt, tracing=tracing)

    def archive(database: Database) -> Awaitable[None]:
        assert archives is not None
        return archive_periods(database, archives, clock)

    days = settings.decision_retention_days
    archiving = [Job("archive_periods", 5, archive, ARCHIVE_AT_MOST_S, ARCHIVES_WAITING)] if archives else []
    return [
        *archiving,
        Job("expire_leases", settings.expire_every_ms / 1000, once(expire_leases), has_work=LEASES_EXPIRED),
        Job("recall_suspense", 30, once(recall_suspense), has_work=SUSPENSE_WAITING),
        Job("close_periods", 5, close_periods, at_most_s=600, has_work=PERIODS_CLOSING),
        Job("end_holds", 1, once(end_holds), has_work=HOLDS_OVER),
        Job("follow_rebalances", 1, follow, has_work=REBALANCES_RUNNING),
        Job("deliver_webhooks", 1, deliver, at_most_s=120, has_work=DELIVERIES_DUE),
        Job("make_exports", 1, lambda db: make_exports(db, clock), at_most_s=HOUR_S, has_work=EXPORTS_WAITING),
        Job("run_verifications", 1, lambda db: run_verifications(db, clock), HOUR_S, VERIFICATIONS_WAITING),
        Job("seal", 60, once(seal_and_announce), at_most_s=600),
        Job("find_drift", 300, once(find_drift)),
        Job("find_signals", 60, once(lambda connection, now: find_signals(connection, signals, now))),
        Job("measure", 30, once(measure)),
        Job("measure_deliveries", 60, once(lambda connection, _: measure_deliveries(connection))),
        Job("delete_idle_shares", 60, once(delete_idle_shares)),
        Job("delete_idempotency_records", 60, once(delete_expired), has_work=RECORDS_EXPIRED),
        Job("delete_expired_exports", 600, once(delete_expired_exports)),
        Job("keep_decisions", 600, keep_decisions(clock, days), has_work=DECISIONS_KEPT),
        Job("delete_old_events", 600, once(delete_old_events)),
    ]
