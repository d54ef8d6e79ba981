"""The metrics that all coordinators show alike: what one of them measured of the ledger, and when regions were seen.

A time that does not exist, such as that of the last seal before there is any, is NaN, which no alert compares.
"""

from collections.abc import Collection, Mapping
from datetime import datetime

from prometheus_client import CollectorRegistry, Gauge

from coordinator.health.figures import DeliveryFigures, Figures, LedgerFigures, Measured, RegionFigures
from web.declared_metrics import DeclaredMetrics, gauge

_PREFIX = "leasehold_coordinator_"


class LedgerMetrics(DeclaredMetrics):
    measured_at = gauge(
        f"{_PREFIX}ledger_figures_timestamp_seconds",
        "When one coordinator last measured the figures of the ledger and of the regions for all.",
    )
    units = gauge(f"{_PREFIX}units", "Units of open periods, by quota and account.", "quota", "account")
    keys = gauge(f"{_PREFIX}quota_keys", "Keys of allowances with units in an open period, by quota.", "quota")
    growing = gauge(f"{_PREFIX}growing_tenants", "Tenants whose usage has suddenly grown, by quota.", "quota")
    used_up = gauge(f"{_PREFIX}used_up_keys", "Keys that have had nothing left for a while, by quota.", "quota")
    regressed_lanes = gauge(f"{_PREFIX}regressed_lanes", "Lanes that show that the ledger has lost data.", "region")
    split_brain = gauge(f"{_PREFIX}region_split_brain", "1: two stores report under the region's name.", "region")
    suspense = gauge(f"{_PREFIX}suspense_units", "Units in suspense, by the region that had them.", "region")
    suspense_since = gauge(
        f"{_PREFIX}suspense_oldest_timestamp_seconds",
        "Last report of the lease that has been in suspense for longest.",
        "region",
    )
    quarantined = gauge(f"{_PREFIX}quarantined_leases", "Leases in quarantine, by region.", "region")
    last_seen_at = gauge(
        f"{_PREFIX}region_last_seen_timestamp_seconds", "Last exchange of a region with any coordinator.", "region"
    )
    silent = gauge(f"{_PREFIX}region_silent", "1: no exchange of the region for a minute.", "region")
    sealed_at = gauge(f"{_PREFIX}last_seal_timestamp_seconds", "When the ledger was last sealed.")
    drifting = gauge(f"{_PREFIX}drifting_leases", "Leases whose region reports another total than what is booked.")
    closing = gauge(f"{_PREFIX}closing_periods", "Periods that are being closed.")
    closing_since = gauge(
        f"{_PREFIX}close_requested_timestamp_seconds", "The first request of a close that is not finished."
    )
    verified_at = gauge(f"{_PREFIX}last_verification_timestamp_seconds", "End of the last requested verification.")
    intact = gauge(
        f"{_PREFIX}last_verification_intact", "0: the last requested verification found a fault in the ledger."
    )
    waiting_deliveries = gauge(f"{_PREFIX}webhook_deliveries_waiting", "Events that wait to be delivered to a webhook.")
    waiting_since = gauge(
        f"{_PREFIX}webhook_oldest_event_timestamp_seconds", "The oldest event that waits for its delivery."
    )
    dead_deliveries = gauge(f"{_PREFIX}webhook_dead_letters", "Deliveries that were given up until people replay them.")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._show_ledger(LedgerFigures())
        self._show_deliveries(DeliveryFigures())

    def show(self, measured: Measured) -> None:
        """Show the last measurement, and drop the series of quotas and regions that no longer exist."""
        if measured.figures is None or measured.measured_at is None:
            return
        self._show_quotas(measured.figures)
        self._show_regions(measured.figures.regions)
        self._show_ledger(measured.figures.ledger)
        self._show_deliveries(measured.figures.deliveries)
        self.measured_at.set(measured.measured_at.timestamp())

    def show_silent_regions(self, last_seen_at: Mapping[str, datetime], silent: Collection[str]) -> None:
        self.last_seen_at.clear()
        self.silent.clear()
        for name, moment in last_seen_at.items():
            self.last_seen_at.labels(name).set(moment.timestamp())
            self.silent.labels(name).set(name in silent)

    def _show_quotas(self, figures: Figures) -> None:
        self.units.clear()
        for quota, account, units in figures.units:
            self.units.labels(quota, account).set(units)
        for metric, counts in (
            (self.keys, figures.keys),
            (self.growing, figures.growing),
            (self.used_up, figures.used_up),
        ):
            metric.clear()
            for quota, count in counts.items():
                metric.labels(quota).set(count)

    def _show_regions(self, regions: Mapping[str, RegionFigures]) -> None:
        for each in (self.regressed_lanes, self.split_brain, self.suspense, self.suspense_since, self.quarantined):
            each.clear()
        for name, region in regions.items():
            self.regressed_lanes.labels(name).set(region.regressed_lanes)
            self.split_brain.labels(name).set(region.split_brain)
            self.suspense.labels(name).set(region.suspense_units)
            self.quarantined.labels(name).set(region.quarantined_leases)
            if region.suspense_since is not None:
                self.suspense_since.labels(name).set(region.suspense_since.timestamp())

    def _show_ledger(self, ledger: LedgerFigures) -> None:
        _show_time(self.sealed_at, ledger.sealed_at)
        self.drifting.set(ledger.drifting_leases)
        self.closing.set(ledger.closing_periods)
        _show_time(self.closing_since, ledger.closing_since)
        _show_time(self.verified_at, ledger.verified_at)
        self.intact.set(ledger.is_intact)

    def _show_deliveries(self, deliveries: DeliveryFigures) -> None:
        self.waiting_deliveries.set(deliveries.waiting)
        _show_time(self.waiting_since, deliveries.waiting_since)
        self.dead_deliveries.set(deliveries.dead)


def _show_time(metric: Gauge, moment: datetime | None) -> None:
    metric.set(float("nan") if moment is None else moment.timestamp())
