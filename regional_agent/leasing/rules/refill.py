"""When to request more of an allowance, and how long to back off.

The low water mark is what the region will spend while a refill is under way. A refill is requested before it is needed,
so that no request waits. Only at the very end of an allowance, when nothing can be granted ahead, does a request wait
for its own units, for as long as its policy says.
"""

# A quota of which nothing is left is asked for again after these pauses, until something comes.
FIRST_PAUSE_MS = 500
LONGEST_PAUSE_MS = 30_000
# Between a short grant and the next attempt, while other regions are asked to return units. A signal comes sooner.
RETRY_MS = 250


# A grant that lasts for longer than this is refilled at its half: refills are rare anyway, and the rest has to outlast
# an outage of the coordinator. A month's grant lasts for 120 s, so a minute's demand is always left of it.
LONG_GRANT_MS = 30_000


def low_water(last_grant: int, demand_milli: int, round_trip_ms: int) -> int:
    """Return at how many units left of a lease to request more."""
    if 1_000_000 * last_grant >= demand_milli * LONG_GRANT_MS:
        return last_grant // 2
    spent_meanwhile = demand_milli * (1.5 * round_trip_ms + 550) / 1_000_000
    return int(min(last_grant / 2, max(spent_meanwhile, last_grant / 4)))
