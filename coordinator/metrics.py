"""The coordinator's metrics, with a registry for each app."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Gauge

from coordinator.exchange.rules.balances import Cause
from coordinator.exchange.rules.budget import Budget
from coordinator.exchange.rules.posting import Report
from coordinator.health.readiness import Measured
from coordinator.notice import Notice
from protocol.messages import ExchangeResponse
from web.declared_metrics import DeclaredMetrics, counter, gauge, histogram

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
    job_runs = counter(f"{_PREFIX}job_runs", "Runs of a background job on this coordinator.", "job")
    job_failures = counter(f"{_PREFIX}job_failures", "Failed runs of a background job on this coordinator.", "job")
    job_seconds = histogram(
        f"{_PREFIX}job_duration_seconds", "Duration of a background job.", "job", buckets=_BUCKETS_S
    )
    job_last_success = gauge(
        f"{_PREFIX}job_last_success_timestamp_seconds", "Last successful run of a job on this coordinator.", "job"
    )
    regressed_lanes = gauge(f"{_PREFIX}regressed_lanes", "Lanes that show that the ledger has lost data.", "region")
    split_brain = gauge(f"{_PREFIX}region_split_brain", "1: two stores report under the region's name.", "region")
    overshoot = gauge(f"{_PREFIX}rate_overshoot_units", f"{_OVERSHOOT}, as measured.", "quota")
    overshoot_bound = gauge(f"{_PREFIX}rate_overshoot_bound_units", f"{_OVERSHOOT}, in the worst case.", "quota")
    units = gauge(f"{_PREFIX}units", "Units of open periods, by quota and account.", "quota", "account")
    growing = gauge(f"{_PREFIX}growing_tenants", "Tenants whose usage has suddenly grown, by quota.", "quota")
    used_up = gauge(f"{_PREFIX}used_up_keys", "Keys that have had nothing left for a while, by quota.", "quota")
    measured_at = gauge(
        f"{_PREFIX}ledger_figures_timestamp_seconds",
        "When one coordinator last measured units, regressed lanes and split brain for all.",
    )
    ready = gauge(f"{_PREFIX}ready", "1: ready by /readyz, also while degraded.")
    health_reasons = gauge(
        f"{_PREFIX}health_reason", "1: a reason why the coordinator is degraded or not ready.", "code", "severity"
    )
    clock_difference = gauge(
        f"{_PREFIX}clock_offset_seconds", "How far this clock is ahead of the database's, less the round trip."
    )
    last_seen_at = gauge(
        f"{_PREFIX}region_last_seen_timestamp_seconds", "Last exchange of a region with any coordinator.", "region"
    )
    silent = gauge(f"{_PREFIX}region_silent", "1: no exchange of the region for a minute.", "region")

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        super().__init__(self.registry)
        self._worst: defaultdict[tuple[Gauge, str], int] = defaultdict(int)

    def show_measured(self, measured: Measured) -> None:
        """Show the last measurement, and drop the series of quotas and regions that no longer exist."""
        if measured.figures is None or measured.measured_at is None:
            return
        for each in (self.units, self.regressed_lanes, self.split_brain, self.growing, self.used_up):
            each.clear()
        for metric, counts in ((self.growing, measured.figures.growing), (self.used_up, measured.figures.used_up)):
            for quota, count in counts.items():
                metric.labels(quota).set(count)
        for quota, account, units in measured.figures.units:
            self.units.labels(quota, account).set(units)
        for name, region in measured.figures.regions.items():
            self.regressed_lanes.labels(name).set(region.regressed_lanes)
            self.split_brain.labels(name).set(region.split_brain)
        self.measured_at.set(measured.measured_at.timestamp())

    def show_silent_regions(self, last_seen_at: Mapping[str, datetime], silent: Collection[str]) -> None:
        self.last_seen_at.clear()
        self.silent.clear()
        for name, moment in last_seen_at.items():
            self.last_seen_at.labels(name).set(moment.timestamp())
            self.silent.labels(name).set(name in silent)

    def show_health(self, is_ready: bool, severities: Mapping[str, str]) -> None:
        """Show the reasons of the health status. `severities`: by code."""
        self.ready.set(is_ready)
        self.health_reasons.clear()
        for code, severity in severities.items():
            self.health_reasons.labels(code, severity).set(1)

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
        self.lines.inc(len(units[Cause.USAGE]))
        self.consumed.inc(sum(units[Cause.USAGE]))
        self.grants.inc(len(units[Cause.GRANT]))
        self.granted.inc(sum(units[Cause.GRANT]))
        self.overage.inc(sum(units[Cause.OVERAGE]))
