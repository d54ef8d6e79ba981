"""The coordinator's metrics, with a registry for each app."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from coordinator.database.pool_use import PoolMetrics
from coordinator.decision_log.metrics import PublishedDecisionMetrics, StoredDecisionMetrics
from coordinator.exchange.rules.balances import Cause
from coordinator.exchange.rules.budget import Budget
from coordinator.exchange.rules.posting import Report
from coordinator.health.metrics import LedgerMetrics
from coordinator.notice import Notice
from coordinator.webhooks.deliveries import AttemptResult
from migrations.revisions import known_revisions
from protocol.compatibility.releases import RELEASE
from protocol.limits.usage_labels import LABELS, OTHER_LABELS
from protocol.messages import ExchangeResponse
from web.declared_metrics import DeclaredMetrics, counter, gauge, histogram
from web.metrics import describe_process
from web.traces.context import TraceMetrics

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_PREFIX = "leasehold_coordinator_"
_OVERSHOOT = "Units of a rate shared by demand that a key may have had beyond its limit and burst"


class CoordinatorMetrics(DeclaredMetrics):
    exchanges = counter(f"{_PREFIX}exchanges", "Exchanges by outcome.", "outcome")
    exchange_seconds = histogram(
        f"{_PREFIX}exchange_duration_seconds",
        "Duration of an exchange's transaction with its retries.",
        buckets=_BUCKETS_S,
    )
    lines = counter(f"{_PREFIX}usage_lines_booked", "Usage lines booked.")
    other_labels = counter(
        f"{_PREFIX}usage_lines_with_other_labels",
        "Usage lines whose labels were replaced by *, because they are too long or the quota key has too many of them.",
    )
    consumed = counter(f"{_PREFIX}consumed_units", "Units booked as consumed.")
    grants = counter(f"{_PREFIX}grants", "Grants to leases.")
    granted = counter(f"{_PREFIX}granted_units", "Units granted to leases.")
    overage = counter(f"{_PREFIX}overage_units", "Units consumed beyond what was funded.")
    quarantined = counter(f"{_PREFIX}leases_quarantined", "Leases whose total and usage lines disagreed.")
    refused_wants = counter(f"{_PREFIX}lease_requests_refused", "Lease requests that were not met.", "reason")
    refused_items = counter(
        f"{_PREFIX}exchange_items_refused",
        "Batches, lease requests, rates and slots refused one by one, because they are malformed or invalid.",
        "region",
        "kind",
        "reason",
    )
    over_budget = counter(
        f"{_PREFIX}region_budget_exceeded",
        "Items refused or dropped because a region exceeded its budget per minute.",
        "region",
        "budget",
    )
    signals = counter(f"{_PREFIX}signals", "Signals sent to regions.", "kind")
    streams = gauge(f"{_PREFIX}signal_streams", "Open event streams and long polls.")
    job_runs = counter(f"{_PREFIX}job_runs", "Runs of a background job on this coordinator.", "job_name")
    job_failures = counter(f"{_PREFIX}job_failures", "Failed runs of a background job on this coordinator.", "job_name")
    job_seconds = histogram(
        f"{_PREFIX}job_duration_seconds", "Duration of a background job.", "job_name", buckets=_BUCKETS_S
    )
    job_failures_in_a_row = gauge(
        f"{_PREFIX}job_failures_in_a_row", "Failed runs of a job on this coordinator since any worked.", "job_name"
    )
    job_last_success = gauge(
        f"{_PREFIX}job_last_success_timestamp_seconds", "Last successful run of a job on this coordinator.", "job_name"
    )
    overshoot = gauge(f"{_PREFIX}rate_overshoot_units", f"{_OVERSHOOT}, as measured.", "quota")
    overshoot_bound = gauge(f"{_PREFIX}rate_overshoot_bound_units", f"{_OVERSHOOT}, in the worst case.", "quota")
    webhook_attempts = counter(
        f"{_PREFIX}webhook_attempts", "Attempts of this coordinator to deliver an event to a webhook.", "result"
    )
    ready = gauge(f"{_PREFIX}ready", "1: ready by /readyz, also while degraded.")
    health_reasons = gauge(
        f"{_PREFIX}health_reason", "1: a reason why the coordinator is degraded or not ready.", "code", "severity"
    )
    clock_difference = gauge(
        f"{_PREFIX}clock_offset_seconds", "How far this clock is ahead of the database's, less the round trip."
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        super().__init__(self.registry)
        self.ledger = LedgerMetrics(self.registry)
        self.traces = TraceMetrics(self.registry)
        self.pools = PoolMetrics(self.registry)
        describe_process(self.registry, version=RELEASE, schema=known_revisions()[-1])
        self.decisions = StoredDecisionMetrics(self.registry)
        self.published_decisions = PublishedDecisionMetrics(self.registry)
        self._worst: defaultdict[tuple[Gauge, str], int] = defaultdict(int)

    def show_health(self, is_ready: bool, severities: Mapping[str, str]) -> None:
        """Show the reasons of the health status. `severities`: by code."""
        self.ready.set(is_ready)
        self.health_reasons.clear()
        for code, severity in severities.items():
            self.health_reasons.labels(code, severity).set(1)

    def note_webhook_attempt(self, result: AttemptResult) -> None:
        self.webhook_attempts.labels(result.value).inc()

    def note_over_budget(self, region: str, budget: Budget, refused: int) -> None:
        self.over_budget.labels(region, budget.value).inc(refused)

    def note_overshoots(self, overshoots: Iterable[tuple[str, int, int]]) -> None:
        """Show for each quota its worst key so far: a quota may have very many keys."""
        for key, most, bound in overshoots:
            quota = key.partition(":")[0]
            for metric, nano_units in ((self.overshoot, most), (self.overshoot_bound, bound)):
                self._worst[metric, quota] = max(self._worst[metric, quota], nano_units)
                metric.labels(quota).set(self._worst[metric, quota] / 1_000_000_000)

    def note_exchanges(
        self, response: ExchangeResponse, reports: Iterable[Report], quarantined: int, notices: Sequence[Notice]
    ) -> None:
        for reply in response.replies:
            self.exchanges.labels(reply.outcome.value).inc()
            refusals = [*(lease.refusal for lease in reply.leases), *(each.refusal for each in reply.refused)]
            for refusal in filter(None, refusals):
                self.refused_wants.labels(refusal.value).inc()
        for notice in notices:
            self.signals.labels(notice.signal.kind).inc()
        for report in reports:
            self._note_report(report)
        self.quarantined.inc(quarantined)

    def _note_report(self, report: Report) -> None:
        """Count the transfers and units of a report, by cause."""
        units: dict[Cause, list[int]] = defaultdict(list)
        for transfer in report.transfers:
            units[transfer.cause].append(transfer.units)
            if transfer.dimensions and transfer.dimensions.get(LABELS) == OTHER_LABELS:
                self.other_labels.inc()
        self.lines.inc(len(units[Cause.USAGE]))
        self.consumed.inc(sum(units[Cause.USAGE]))
        self.grants.inc(len(units[Cause.GRANT]))
        self.granted.inc(sum(units[Cause.GRANT]))
        self.overage.inc(sum(units[Cause.OVERAGE]))
