"""The pace of a region's exchanges: how long a grant lasts, and how long usage may wait for its report.

Each exchange costs rows in the ledger: a transfer for its grant, and one for each line of usage. So both follow from
how long the rest of the limit lasts at the demand of all regions. While much is left, grants are large and reports are
rare; towards the end both become small and frequent, and units go where they are used.
"""

from collections.abc import Iterable

from coordinator.webhooks.rules import PoolUsage
from protocol.limits.document import Horizon, Portion
from protocol.units import MAX_UNITS

# A grant lasts for at most this part of the time for which the rest of the limit lasts, unless the horizon is longer.
PART_OF_REST = 30
SHORTEST_DEFAULT_MS, LONGEST_DEFAULT_MS = 1_000, 60_000  # how long usage may wait, if its quota says nothing
FOREVER_MS = 10**15


def rest_lasts_ms(grantable: int, demand_milli: int) -> int:
    """Return how long what may be granted lasts at the demand of all regions that share it."""
    return grantable * 1_000_000 // demand_milli if demand_milli else FOREVER_MS


def horizon_ms(horizon: Horizon, rest_ms: int) -> int:
    """Return how long a grant should last."""
    return min(max(rest_ms // PART_OF_REST, horizon.shortest_ms), horizon.longest_ms)


def report_within_ms(set_ms: int | None, rest_ms: int, lease_ms: int) -> int:
    """Return how long usage may wait for its report: as its quota says (`set_ms`), else in proportion to the rest.

    It never waits until the lease expires: what is not reported by then goes to suspense. Once nothing is left to
    grant, usage does not wait at all, unless its quota says so.
    """
    by_rest_ms = min(max(rest_ms // PART_OF_REST, SHORTEST_DEFAULT_MS), LONGEST_DEFAULT_MS) if rest_ms else 0
    return min(by_rest_ms if set_ms is None else set_ms, lease_ms // 2)


def report_at(consumed: int, usage: PoolUsage, thresholds: Iterable[Portion], regions: int) -> int:
    """Return the consumed total at which a region reports at once; 0 if all thresholds are reached.

    Each region may use an equal part of what is left to the next threshold. Together they cannot reach it before one of
    them has used its part, and reports.
    """
    units = usage.units_to_next(thresholds)
    return 0 if units is None else min(MAX_UNITS, consumed + -(-units // max(1, regions)))
