"""Reconcile a period: compare three accounts of the same units.

    the transfers     every movement, from which everything else can be computed again
    the projections   pools and leases, which the coordinator decides by
    the regions       the totals that each region's store has counted itself

The chain is checked as well: each lane's reports are numbered without a gap and lead to the lane's head. The result has
one status for finance, and a finding for everything that does not balance.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple, TypeVar

from msgspec import UNSET, Struct, UnsetType

from coordinator.proof.rules import genesis_head
from protocol.counting import counted
from protocol.identifiers import lane_of
from protocol.lease import RETURNS_COUNT, LeaseState


class BalanceStatus(StrEnum):
    """The status of a period's balance. If several kinds of findings exist, it is the first of these."""

    DRIFT = "drift"  # a region consumed more or less than the ledger has booked
    RETURNS = "returns"  # a region returned more or less than the ledger has booked
    PROJECTION = "projection"  # a pool or a lease is not the sum of its transfers
    ROLLUP = "rollup"  # what usage is answered from is not the sum of its transfers
    GAPS = "gaps"  # a report is missing
    CHAIN = "chain"  # the last report does not lead to the lane's head
    BALANCED = "balanced"


class ChainStatus(StrEnum):
    INTACT = "intact"
    BROKEN = "broken"


# --- what the ledger has ----------------------------------------------------------------------------------------------

# The accounts of leases. A pool's account is the sum of its leases'.
SHARED = ("overage", "outstanding", "suspense", "suspense_carried_out", "estimated", "consumed", "written_off")
LEASE = ("granted", "returned", *SHARED)
CORRECTION = (
    "suspense_carried_in",
    "correction",
    "suspense_carried",
    "suspense_carried_out",
    "estimated",
    "consumed",
    "written_off",
)
POOL = (
    *(
        "funded",
        "soft_cap_extension",
        "carried_over_in",
        "adjustment",
        "suspense_carried_in",
        "correction",
        "unallocated",
        "carried_over_out",
        "suspense_carried",
    ),
    *SHARED,
)


class PoolRow(NamedTuple):
    quota: str
    name: str
    tenant: str | None
    accounts: Mapping[str, int]  # of POOL
    credited: int = 0  # the part of `adjustment` that can be spent
    overage_used: int = 0  # the overage among the units consumed in the period


class LeaseRow(NamedTuple):
    quota: str
    epoch: int
    region: str
    state: LeaseState
    lanes: int  # of its epoch
    accounts: Mapping[str, int]  # of LEASE
    region_consumed: int
    region_returned: int
    reported_at: datetime
    overdrawn: int = 0  # units beyond the lease while its region was disconnected


class CorrectionRow(NamedTuple):
    """The correction, in this period, of a lease of a closed period."""

    quota: str
    epoch: int
    charge_period: str
    region: str
    accounts: Mapping[str, int]  # of CORRECTION
    drift: int  # the region's total, less what all periods have booked
    overage_used: int = 0
    replaced: int = 0
    recovered: int = 0


class Adjusted(NamedTuple):
    """The sum of approved adjustments, in terms of a pool's accounts."""

    adjustment: int = 0
    credited: int = 0
    written_off: int = 0


class AdjustmentRow(NamedTuple):
    """The approved adjustments of a pool."""

    quota: str
    adjusted: Adjusted


class Overage(NamedTuple):
    """The overage among the usage of a pool, by the period in which it was used."""

    quota: str
    charge_period: str
    units: int


class Moved(NamedTuple):
    """The units that went from one account to another."""

    quota: str
    epoch: int | None
    charge_period: str
    src: str
    dst: str
    cause: str
    units: int


class LaneSummary(NamedTuple):
    epoch: int
    lane: int
    last_seq: int
    head: bytes
    reports: int
    last_head: bytes | None  # of the last report

    @property
    def gaps(self) -> int:
        return abs(self.last_seq - self.reports)

    @property
    def is_intact(self) -> bool:
        return self.gaps == 0 and self.head == (self.last_head or genesis_head(self.epoch, self.lane))


class Misrolled(NamedTuple):
    """Rows of a rollup that are not the sums of their transfers."""

    quota: str
    region: str
    rollup: str  # the table
    rows: int
    units: int  # sum of the absolute differences
    begins_at: datetime  # the first hour or day that differs


Row = TypeVar("Row", LeaseRow, CorrectionRow)


class Books(NamedTuple):
    pools: Sequence[PoolRow]
    leases: Sequence[LeaseRow]
    moved: Sequence[Moved]
    lanes: Sequence[LaneSummary]
    misrolled: Sequence[Misrolled] = ()
    corrections: Sequence[CorrectionRow] = ()
    adjustments: Sequence[AdjustmentRow] = ()
    overages: Sequence[Overage] = ()


# --- the reconciliation -----------------------------------------------------------------------------------------------


class RegionAccount(Struct, frozen=True, kw_only=True):
    region: str
    granted: int
    consumed: int
    returned: int
    outstanding: int
    suspense: int
    written_off: int
    overage: int
    overdrawn: int  # units beyond its leases while it was disconnected: covered since, or overage
    corrected: int  # used in closed periods, booked in this one
    region_total: int  # the region's own total of consumed units
    drift: int  # the region's own total less the usage in the ledger
    oldest_unreported_age_ms: int | None  # since the last report of a lease with units outstanding
    gaps: int
    chain: ChainStatus


class QuotaAccount(Struct, frozen=True, kw_only=True):
    quota: str
    quota_key: str
    tenant: str | None
    funded: int
    unallocated: int
    outstanding: int
    suspense: int
    consumed: int
    overage: int
    written_off: int
    estimated: int
    suspense_carried_in: int  # suspense of a period that was closed
    suspense_carried: int  # the part that is still unresolved
    suspense_carried_out: int
    correction: int  # used in closed periods, beyond the carried suspense
    adjustment: int  # credits and write-offs, less debits
    soft_cap_extension: int  # units of the soft cap's extension that were needed
    carried_over_in: int  # unused units of the previous period
    carried_over_out: int  # unused units that went into the next period
    overage_used: int  # the part of `consumed` beyond the limit
    regions: list[RegionAccount]


class Finding(Struct, frozen=True):
    """One thing that does not balance."""

    kind: BalanceStatus
    quota_key: str
    region: str | None
    reason: str
    epoch: int | None = None


class AnomalyKind(StrEnum):
    IMPLAUSIBLE = "implausible"  # in quarantine: more than a region may report without approval
    IMPLAUSIBLE_PERIOD = "implausible_period"  # in quarantine: not a period of the quota's calendar around now
    OVER_BUDGET = "over_budget"  # in quarantine: the region named too many new keys or periods in a minute
    UNKNOWN_QUOTA = "unknown_quota"  # booked or in quarantine: the document in force has no such quota
    ABOVE_LIMIT = "above_limit"  # booked: more than twice what could be spent in the period
    WITHOUT_GRANT = "without_grant"  # booked: by epochs without any grant


class Anomaly(Struct, frozen=True):
    kind: AnomalyKind
    quota_key: str
    region: str | None
    units: int
    reason: str


class Reconciliation(Struct, frozen=True, kw_only=True):
    period: str
    state: str = "open"
    closed_at: datetime | None = None
    closed_by: str | None = None
    closed_by_name: str | UnsetType = UNSET
    status: BalanceStatus
    drift: int  # sum of the absolute drifts, so that two never cancel out
    findings: list[Finding]
    anomalies: list[Anomaly] = []  # they do not change the status
    quotas: list[QuotaAccount]


def reconcile(period: str, books: Books, now: datetime) -> Reconciliation:
    sums = Sums(period, books.moved)
    lanes = {(lane.epoch, lane.lane): lane for lane in books.lanes}
    leases, corrections = _by_quota(books.leases), _by_quota(books.corrections)
    adjusted = defaultdict(Adjusted, books.adjustments)
    quotas = [
        _quota_account(pool, leases[pool.quota], corrections[pool.quota], sums, lanes, now) for pool in books.pools
    ]
    findings = [
        *(each for pool in books.pools for each in _faults_of_pool(pool, leases, corrections, adjusted, sums)),
        *(each for pool in books.pools for each in _faults_of_adjustments(pool, adjusted[pool.quota])),
        *_faults_of_missing_rows(books, sums),
        *_faults_of_overage(period, books),
        *(finding for lease in books.leases for finding in _faults_of_lease(lease, sums)),
        *(finding for correction in books.corrections for finding in _faults_of_correction(correction, sums)),
        *(finding for quota in quotas for finding in _faults_of_regions(quota)),
        *(_fault_of_rollup(each) for each in books.misrolled),
    ]
    found = {finding.kind for finding in findings}
    return Reconciliation(
        period=period,
        status=next((status for status in BalanceStatus if status in found), BalanceStatus.BALANCED),
        drift=sum(abs(region.drift) for quota in quotas for region in quota.regions),
        findings=sorted(findings, key=lambda each: list(BalanceStatus).index(each.kind)),
        quotas=quotas,
    )


def _by_quota(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_quota: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_quota[row.quota].append(row)
    return by_quota


class Sums:
    """The balances that follow from the transfers alone."""

    def __init__(self, period: str, moved: Iterable[Moved]) -> None:
        self.of_pool: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.of_lease: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.of_correction: dict[tuple[str, int, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.usage: dict[tuple[str, int], int] = defaultdict(int)
        for each in moved:
            _move(self.of_pool[each.quota], each)
            if each.epoch is not None and each.charge_period == period:
                self._move_of_lease((each.quota, each.epoch), each)
            elif each.epoch is not None:
                self._move_of_correction((each.quota, each.epoch, each.charge_period), each)

    def _move_of_lease(self, key: tuple[str, int], each: Moved) -> None:
        _move(self.of_lease[key], each)
        self.of_lease[key]["granted"] += each.units * ((each.src, each.dst) == ("unallocated", "outstanding"))
        self.of_lease[key]["returned"] += each.units * (each.dst == "unallocated" and each.src not in _OF_POOLS)
        self.usage[key] += each.units * (each.cause == "usage")

    def _move_of_correction(self, key: tuple[str, int, str], each: Moved) -> None:
        _move(self.of_correction[key], each)
        self.of_correction[key]["replaced"] += each.units * (each.cause == "replaces_estimate")
        self.of_correction[key]["recovered"] += each.units * (each.cause == "replaces_write_off")


_OF_POOLS = ("funding", "soft_cap_extension")  # what a report moves there is of no lease
# The sources of units: these accounts count what has left them.
_SOURCES = {"funding": "funded", "soft_cap_extension": "soft_cap_extension"} | {
    name: name for name in ("overage", "suspense_carried_in", "correction", "adjustment", "carried_over_in")
}


def _move(accounts: dict[str, int], each: Moved) -> None:
    for account, units in ((each.src, -each.units), (each.dst, each.units)):
        if account in _SOURCES:
            accounts[_SOURCES[account]] -= units
        else:
            accounts[account] += units


def _faults_of_pool(
    pool: PoolRow,
    leases: Mapping[str, Sequence[LeaseRow]],
    corrections: Mapping[str, Sequence[CorrectionRow]],
    adjusted: Mapping[str, Adjusted],
    sums: Sums,
) -> Iterable[Finding]:
    for account in POOL:
        booked, kept = sums.of_pool[pool.quota][account], pool.accounts[account]
        if booked != kept:
            reason = f"the pool's {account} is {kept}, its transfers make {booked}"
            yield Finding(BalanceStatus.PROJECTION, pool.quota, None, reason)
    parts = [*(each.accounts for each in leases[pool.quota]), *(each.accounts for each in corrections[pool.quota])]
    parts.append({"written_off": adjusted[pool.quota].written_off})
    for account in dict.fromkeys((*SHARED, *CORRECTION)):
        held, kept = sum(part.get(account, 0) for part in parts), pool.accounts[account]
        if held != kept:
            reason = f"the pool's {account} is {kept}, its leases make {held}"
            yield Finding(BalanceStatus.PROJECTION, pool.quota, None, reason)


def _faults_of_missing_rows(books: Books, sums: Sums) -> Iterable[Finding]:
    """Find transfers without a pool, lease or correction, which no comparison of existing rows would show."""
    pools = {pool.quota for pool in books.pools}
    leases = {(lease.quota, lease.epoch) for lease in books.leases}
    corrections = {(each.quota, each.epoch, each.charge_period) for each in books.corrections}
    for quota in sorted(sums.of_pool.keys() - pools):
        yield Finding(BalanceStatus.PROJECTION, quota, None, "the pool of these transfers is missing")
    for quota, epoch in sorted(sums.of_lease.keys() - leases):
        if any(sums.of_lease[quota, epoch].values()):
            yield Finding(BalanceStatus.PROJECTION, quota, None, f"the lease of epoch {epoch} is missing", epoch)
    for quota, epoch, charge_period in sorted(sums.of_correction.keys() - corrections):
        if any(sums.of_correction[quota, epoch, charge_period].values()):
            reason = f"the correction of epoch {epoch} for {charge_period} is missing"
            yield Finding(BalanceStatus.PROJECTION, quota, None, reason, epoch)


def _faults_of_adjustments(pool: PoolRow, made: Adjusted) -> Iterable[Finding]:
    for account, approved, kept in (
        ("adjustment", made.adjustment, pool.accounts["adjustment"]),
        ("credited", made.credited, pool.credited),
    ):
        if approved != kept:
            reason = f"the pool's {account} is {kept}, what was approved makes {approved}"
            yield Finding(BalanceStatus.PROJECTION, pool.quota, None, reason)


def _faults_of_overage(period: str, books: Books) -> Iterable[Finding]:
    """Compare overage: a pool counts that of its own period, corrections count that of closed periods."""
    kept = Counter[tuple[str, str]]({(pool.quota, period): pool.overage_used for pool in books.pools})
    for each in books.corrections:
        kept[each.quota, each.charge_period] += each.overage_used
    told = {(quota, charge_period): units for quota, charge_period, units in books.overages}
    for quota, charge_period in sorted(kept.keys() | told.keys()):
        booked, beyond = told.get((quota, charge_period), 0), kept[quota, charge_period]
        if booked != beyond:
            reason = f"`overage_used` is {beyond} units of {charge_period}, and {booked} are booked as overage"
            yield Finding(BalanceStatus.PROJECTION, quota, None, reason)


def _faults_of_correction(correction: CorrectionRow, sums: Sums) -> Iterable[Finding]:
    about = f"of epoch {correction.epoch} in {correction.charge_period}"
    made = sums.of_correction[correction.quota, correction.epoch, correction.charge_period]
    counted_apart = {"replaced": correction.replaced, "recovered": correction.recovered}
    for account, kept in {**correction.accounts, **counted_apart}.items():
        booked = made[account]
        if booked != kept:
            reason = f"the correction {about} has {kept} as {account}, its transfers make {booked}"
            yield Finding(BalanceStatus.PROJECTION, correction.quota, correction.region, reason, correction.epoch)
    if correction.drift:
        reason = f"{about} it consumed {correction.drift:+} beside the ledger"
        yield Finding(BalanceStatus.DRIFT, correction.quota, correction.region, reason, correction.epoch)


_UNBOOKED_RETURNS = frozenset(LeaseState) - RETURNS_COUNT


def _faults_of_lease(lease: LeaseRow, sums: Sums) -> Iterable[Finding]:
    for account in LEASE:
        booked, kept = sums.of_lease[lease.quota, lease.epoch][account], lease.accounts[account]
        if booked != kept:
            reason = f"in epoch {lease.epoch} {account} is {kept}, its transfers make {booked}"
            yield Finding(BalanceStatus.PROJECTION, lease.quota, lease.region, reason, lease.epoch)
    # Returns of a store that lost data are not booked: the units may have been spent as well.
    unbooked = lease.region_returned - lease.accounts["returned"]
    if unbooked < 0 or (unbooked > 0 and lease.state not in _UNBOOKED_RETURNS):
        reason = f"in epoch {lease.epoch} it returned {lease.region_returned}, booked is {lease.accounts['returned']}"
        yield Finding(BalanceStatus.RETURNS, lease.quota, lease.region, reason, lease.epoch)
    if drift := _drift(lease, sums):
        reason = f"in epoch {lease.epoch} it consumed {lease.region_consumed}, which is {drift:+} beside the ledger"
        yield Finding(BalanceStatus.DRIFT, lease.quota, lease.region, reason, lease.epoch)


def _faults_of_regions(quota: QuotaAccount) -> Iterable[Finding]:
    for region in quota.regions:
        if region.gaps:
            reason = f"the lane lacks {counted(region.gaps, 'report')}"
            yield Finding(BalanceStatus.GAPS, quota.quota_key, region.region, reason)
        elif region.chain is ChainStatus.BROKEN:
            reason = "the lane's last report does not lead to its head"
            yield Finding(BalanceStatus.CHAIN, quota.quota_key, region.region, reason)


def _fault_of_rollup(each: Misrolled) -> Finding:
    rows, units = counted(each.rows, "row"), counted(each.units, "unit")
    reason = f"{rows} of {each.rollup} not as the transfers are, by {units} in all"
    return Finding(BalanceStatus.ROLLUP, each.quota, each.region, reason)


def _drift(lease: LeaseRow, sums: Sums) -> int:
    return lease.region_consumed - sums.usage[lease.quota, lease.epoch]


def _quota_account(
    pool: PoolRow,
    leases: Sequence[LeaseRow],
    corrections: Sequence[CorrectionRow],
    sums: Sums,
    lanes: Mapping[tuple[int, int], LaneSummary],
    now: datetime,
) -> QuotaAccount:
    regions = sorted({lease.region for lease in leases} | {each.region for each in corrections})
    return QuotaAccount(
        quota=pool.name,
        quota_key=pool.quota,
        tenant=pool.tenant,
        overage_used=pool.overage_used,
        regions=[
            _region_account(
                name,
                [lease for lease in leases if lease.region == name],
                [each for each in corrections if each.region == name],
                sums,
                lanes,
                now,
            )
            for name in regions
        ],
        **{account: pool.accounts[account] for account in _OF_QUOTA},
    )


_OF_QUOTA = (
    *("funded", "unallocated", "outstanding", "suspense", "consumed", "overage", "written_off", "estimated"),
    *(
        "suspense_carried_in",
        "suspense_carried",
        "suspense_carried_out",
        "correction",
        "adjustment",
        "soft_cap_extension",
    ),
    *("carried_over_in", "carried_over_out"),
)
_OF_REGION = ("granted", "consumed", "returned", "outstanding", "suspense", "written_off", "overage")


def _region_account(
    region: str,
    leases: Sequence[LeaseRow],
    corrections: Sequence[CorrectionRow],
    sums: Sums,
    lanes: Mapping[tuple[int, int], LaneSummary],
    now: datetime,
) -> RegionAccount:
    """Return one row for all epochs of a region."""
    in_lanes = [lanes.get((lease.epoch, lane_of(lease.quota, lease.lanes))) for lease in leases]
    gaps = sum(lane.gaps for lane in in_lanes if lane is not None)
    intact = all(lane is not None and lane.is_intact for lane in in_lanes)
    return RegionAccount(
        region=region,
        region_total=sum(lease.region_consumed for lease in leases),
        overdrawn=sum(lease.overdrawn for lease in leases),
        corrected=sum(each.accounts["consumed"] for each in corrections),
        drift=sum(_drift(lease, sums) for lease in leases) + sum(each.drift for each in corrections),
        oldest_unreported_age_ms=_oldest_age_ms(leases, now),
        gaps=gaps,
        chain=ChainStatus.INTACT if intact else ChainStatus.BROKEN,
        **{account: sum(lease.accounts[account] for lease in leases) for account in _OF_REGION},
    )


def _oldest_age_ms(leases: Sequence[LeaseRow], now: datetime) -> int | None:
    unreported = [lease.reported_at for lease in leases if lease.accounts["outstanding"]]
    return max(0, (now - min(unreported)) // timedelta(milliseconds=1)) if unreported else None
