"""Rows as one JSON parameter, which Postgres takes apart by column name: `json_populate_recordset(NULL::pool, $1)`.

A statement with many rows then has one parameter a table instead of one array a column, and no position is counted.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from coordinator.exchange.rules.balances import CORRECTION_COLUMNS, LEASE_COLUMNS, POOL_COLUMNS, Correction, Lease, Pool

Row = Mapping[str, object]


def recordset(rows: Iterable[Row]) -> str:
    """Return rows as `json_populate_recordset` reads them. Bytes are in base64."""
    return msgspec.json.encode(list(rows)).decode()


def _columns(names: tuple[str, ...]) -> Callable[[Any], dict[str, object]]:
    values_of = attrgetter(*names)
    return lambda row: dict(zip(names, values_of(row), strict=True))


_totals_of_pool = _columns(POOL_COLUMNS)
_totals_of_lease = _columns(("epoch", "region", "state", "reported_at", "expires_at", *LEASE_COLUMNS))
_totals_of_correction = _columns(("epoch", "charge_period", "region", *CORRECTION_COLUMNS))


def row_of_pool(pool: Pool) -> Row:
    return {"quota": pool.key.quota, "period": pool.key.period} | _totals_of_pool(pool)


def row_of_lease(lease: Lease) -> Row:
    return {"quota": lease.key.quota, "period": lease.key.period} | _totals_of_lease(lease)


def row_of_correction(correction: Correction) -> Row:
    return {"quota": correction.key.quota, "period": correction.key.period} | _totals_of_correction(correction)
