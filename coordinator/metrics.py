"""What a coordinator counts. One registry for each app, so that two in one process do not add up."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.exchange.rules.balances import Cause, Report
from coordinator.exchange.rules.budget import Budget
from coordinator.health.readiness import Measured
from coordinator.notice import Notice
from protocol.messages import ExchangeResponse

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        name = "leasehold_coordinator_"
        self.exchanges = Counter(f"{name}exchanges", "Exchanges by what became of them", ["outcome"], registry=registry)
        self.lines = Counter(f"{name}lines_booked", "Usage lines booked", registry=registry)
        self.consumed = Counter(f"{name}units_consumed", "Units booked as used", registry=registry)
        self.grants = Counter(f"{name}grants", "Grants to leases", registry=registry)
        self.granted = Counter(f"{name}units_granted", "Units granted to leases", registry=registry)
        self.overage = Counter(f"{name}units_overage", "Units used beyond what was funded", registry=registry)
        self.quarantined = Counter(f"{name}leases_quarantined", "Leases whose two counts disagreed", registry=registry)
        self.refused_wants = Counter(f"{name}wants_refused", "Wants not met, by reason", ["refusal"], registry=registry)
        self.refused_items = Counter(
            f"{name}refused_items",
            "Exchanges, wants, rates and slots refused by themselves, as malformed or for a fault of their own",
            ["region", "kind", "reason"],
            registry=registry,
        )
        self.over_budget = Counter(
            f"{name}over_budget",
            "What was refused, or not kept, because a region used up its budget of a minute",
            ["region", "budget"],
            registry=registry,
        )
        self.exchange_seconds = Histogram(
            f"{name}exchange_seconds", "One call's transaction, with its retries", buckets=_BUCKETS, registry=registry
        )
        self.signals = Counter(f"{name}signals", "Signals to regions", ["kind"], registry=registry)
        self.streams = Gauge(f"{name}signal_streams", "Streams and long polls that are open", registry=registry)
        self.job_runs = Counter(f"{name}job_runs", "Times that a job was done here", ["job"], registry=registry)
        self.job_failures = Counter(f"{name}job_failures", "Times that a job failed here", ["job"], registry=registry)
        self.job_seconds = Histogram(
            f"{name}job_seconds", "What a job took", ["job"], buckets=_BUCKETS, registry=registry
        )
        self.job_last_success = Gauge(
            f"{name}job_last_success_timestamp_seconds", "When a job was last done here", ["job"], registry=registry
        )
        self.regressed_lanes = Gauge(
            f"{name}regressed_lanes", "Lanes that show the ledger to have lost data", ["region"], registry=registry
        )
        self.contested_regions = Gauge(
            f"{name}contested_regions", "1: two stores answer under this name", ["region"], registry=registry
        )
        about = "Units of a rate shared by demand that a key may have had beyond its limit and burst"
        self._worst: defaultdict[tuple[Gauge, str], int] = defaultdict(int)
        self.overshoot = Gauge(f"{name}rate_overshoot_units", f"{about}, at most", ["quota"], registry=registry)
        self.overshoot_bound = Gauge(
            f"{name}rate_overshoot_bound_units", f"{about}, in the worst case", ["quota"], registry=registry
        )
        self.units = Gauge(
            f"{name}units", "Units of the periods that have not ended", ["quota", "account"], registry=registry
        )
        self._add_health(registry, name)

    def _add_health(self, registry: CollectorRegistry, name: str) -> None:
        about = "When the units and the lanes and stores of regions were measured, by one coordinator for all"
        self.measured_at = Gauge(f"{name}figures_timestamp_seconds", about, registry=registry)
        self.ready = Gauge(
            f"{name}ready", "1: it can do its work, as /readyz says; also while degraded", registry=registry
        )
        about = "1: why the coordinator is degraded or not ready"
        self.health_reasons = Gauge(f"{name}health_reason", about, ["code", "severity"], registry=registry)
        about = "How far the clock is ahead of the database's, as far as a round trip does not explain it"
        self.clock_difference = Gauge(f"{name}clock_difference_seconds", about, registry=registry)
        about = "When a region was last heard, by any coordinator"
        self.last_seen_at = Gauge(f"{name}region_last_seen_timestamp_seconds", about, ["region"], registry=registry)
        about = "1: the region was not heard for a minute"
        self.silent = Gauge(f"{name}region_silent", about, ["region"], registry=registry)

    def show_measured(self, measured: Measured) -> None:
        """Replace what was measured before; the quotas and regions of then may be gone."""
        if measured.figures is None or measured.measured_at is None:
            return
        for gauge in (self.units, self.regressed_lanes, self.contested_regions):
            gauge.clear()
        for quota, account, units in measured.figures.units:
            self.units.labels(quota, account).set(units)
        for name, region in measured.figures.regions.items():
            self.regressed_lanes.labels(name).set(region.regressed_lanes)
            self.contested_regions.labels(name).set(region.contested)
        self.measured_at.set(measured.measured_at.timestamp())

    def show_silent_regions(self, last_seen_at: Mapping[str, datetime], silent: Collection[str]) -> None:
        self.last_seen_at.clear()
        self.silent.clear()
        for name, moment in last_seen_at.items():
            self.last_seen_at.labels(name).set(moment.timestamp())
            self.silent.labels(name).set(name in silent)

    def show_health(self, is_ready: bool, severities: Mapping[str, str]) -> None:
        """`severities`: by the code of a reason."""
        self.ready.set(is_ready)
        self.health_reasons.clear()
        for code, severity in severities.items():
            self.health_reasons.labels(code, severity).set(1)

    def note_over_budget(self, region: str, budget: Budget, refused: int) -> None:
        self.over_budget.labels(region, budget.value).inc(refused)

    def note_overshoots(self, overshoots: Iterable[tuple[str, int, int]]) -> None:
        """Of a quota's keys the one that was worst: there may be very many."""
        for key, most, bound in overshoots:
            quota = key.partition(":")[0]
            for gauge, parts in ((self.overshoot, most), (self.overshoot_bound, bound)):
                self._worst[gauge, quota] = max(self._worst[gauge, quota], parts)
                gauge.labels(quota).set(self._worst[gauge, quota] / 1_000_000_000)

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
        """By cause: how many movements, and of how many units."""
        units: dict[Cause, list[int]] = defaultdict(list)
        for transfer in report.transfers:
            units[transfer.cause].append(transfer.units)
        self.lines.inc(len(units[Cause.USAGE]))
        self.consumed.inc(sum(units[Cause.USAGE]))
        self.grants.inc(len(units[Cause.GRANT]))
        self.granted.inc(sum(units[Cause.GRANT]))
        self.overage.inc(sum(units[Cause.OVERAGE]))
