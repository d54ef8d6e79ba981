"""Read the simulated ledger before a period is closed, as the product does with SQL."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.adjustments.rules import AdjustmentKind
from coordinator.exchange.rules.balances import Correction, Key, Lease
from coordinator.periods.rules.closing import OpenLease
from coordinator.usage.rules.reconciliation import (
    CORRECTION,
    LEASE,
    POOL,
    Adjusted,
    AdjustmentRow,
    Books,
    CorrectionRow,
    LaneSummary,
    LeaseRow,
    Moved,
    Overage,
    PoolRow,
)

if TYPE_CHECKING:
    from tests.simulation.simulated.ledger_model import LedgerModel


def open_leases(ledger: "LedgerModel", period: str) -> Iterator[OpenLease]:
    parts: list[Lease | Correction] = [*ledger.leases.values(), *ledger.corrections.values()]
    for part in [part for part in parts if part.key.period == period]:
        outstanding = part.outstanding if isinstance(part, Lease) else 0
        is_proposed = ledger.proposals.get((part.epoch, Key(part.key.quota, part.charge_period))) is not None
        if outstanding or part.to_carry or part.is_quarantined or is_proposed:
            yield OpenLease(
                part.key.quota,
                part.region,
                part.epoch,
                part.charge_period,
                outstanding,
                part.to_carry,
                part.is_quarantined,
                is_proposed,
                part.reported_at if isinstance(part, Lease) else None,
            )


def read_books(ledger: "LedgerModel", period: str) -> Books:
    leases = [lease for lease in ledger.leases.values() if lease.key.period == period]
    corrections = [each for each in ledger.corrections.values() if each.key.period == period]
    epochs = {lease.epoch for lease in leases} | {each.epoch for each in corrections}
    return Books(
        pools=[
            PoolRow(
                key.quota,
                key.quota,
                None,
                {account: getattr(pool, account) for account in POOL},
                pool.credited,
                pool.overage_used,
            )
            for key, pool in ledger.pools.items()
            if key.period == period
        ],
        leases=[
            LeaseRow(
                lease.key.quota,
                lease.epoch,
                lease.region,
                lease.state,
                ledger.epochs[lease.epoch].lanes,
                {account: getattr(lease, account) for account in LEASE},
                lease.region_consumed,
                lease.region_returned,
                lease.reported_at,
            )
            for lease in leases
        ],
        moved=[
            Moved(key.quota, epoch, charge_period, src, dst, cause, units)
            for (key, epoch, charge_period, src, dst, cause), units in ledger.rows["moved"].items()
            if key.period == period and units
        ],
        lanes=list(_lanes(ledger, epochs)),
        corrections=[_correction(ledger, each) for each in corrections],
        adjustments=[AdjustmentRow(key.quota, made) for key, made in adjusted(ledger).items() if key.period == period],
        overages=[
            Overage(key.quota, charge_period, units)
            for (key, charge_period), units in ledger.rows["overage"].items()
            if key.period == period and units
        ],
    )


def adjusted(ledger: "LedgerModel") -> dict[Key, Adjusted]:
    """Return the sums of approved adjustments, by the pool in which they are booked."""
    made: dict[Key, Adjusted] = {}
    for each in ledger.adjustments.values():
        if each.booked_in is not None:
            key = Key(each.terms.key.quota, each.booked_in)
            made[key] = in_all(made.get(key, Adjusted()), each.terms.kind, each.terms.units)
    return made


def in_all(before: Adjusted, kind: AdjustmentKind, units: int) -> Adjusted:
    adjustment, credited, written_off = before
    if kind is AdjustmentKind.WRITE_OFF:
        return Adjusted(adjustment + units, credited, written_off + units)
    change = units if kind is AdjustmentKind.CREDIT else -units
    return Adjusted(adjustment + change, credited + change, written_off)


def _lanes(ledger: "LedgerModel", epochs: set[int]) -> Iterator[LaneSummary]:
    for (epoch, lane), row in ledger.lane_rows.items():
        if epoch in epochs:
            receipts = {
                seq: receipt for (e, n, seq), receipt in ledger.rows["receipt"].items() if (e, n) == (epoch, lane)
            }
            last_head = bytes.fromhex(receipts[max(receipts)].head) if receipts else None
            yield LaneSummary(epoch, lane, row.last_seq, row.head, len(receipts), last_head)


def _correction(ledger: "LedgerModel", each: Correction) -> CorrectionRow:
    """Return a correction. A region has one total for all periods in which its lease is booked; the newest has it."""
    about = Key(each.key.quota, each.charge_period)
    every, lease = ledger.late_books(each.epoch, about), ledger.leases.get((each.epoch, about))
    is_newest = max(other.key.period for other in every) == each.key.period
    booked = (lease.consumed if lease else 0) + sum(other.consumed for other in every)
    accounts = {account: getattr(each, account) for account in CORRECTION}
    drift = each.region_consumed - booked if is_newest else 0
    counted = each.overage_used, each.replaced, each.recovered
    return CorrectionRow(each.key.quota, each.epoch, each.charge_period, each.region, accounts, drift, *counted)
