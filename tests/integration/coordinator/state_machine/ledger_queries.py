"""The invariants of the ledger at any moment, as queries on the tables: each row returned is a fault."""

from coordinator.database.connection import Connection


async def faults_of_books(connection: Connection) -> list[str]:
    return [f"{row['rule']}: {row['found']}" for row in await connection.fetch(_FAULTS)]


async def everything(connection: Connection) -> dict[str, str | None]:
    """Return the contents of each table, as one word.

    A pool without transfers counts as absent, and so does its period.
    """
    return {row["name"]: row["held"] for row in await connection.fetch(_EVERYTHING)}


_LEASE_ACCOUNTS = ("consumed", "outstanding", "suspense", "suspense_carried_out", "estimated", "written_off")
_POOL_ACCOUNTS = (*_LEASE_ACCOUNTS, "unallocated", "suspense_carried")
_SOURCES = {"funded": "funding", "soft_cap_extension": "soft_cap_extension"} | {
    name: name for name in ("overage", "correction", "suspense_carried_in", "adjustment")
}
_POOL_COLUMNS = tuple(name for name in (*_SOURCES, *_POOL_ACCOUNTS) if name != "adjustment")  # which may be below zero
_CORRECTION_ACCOUNTS = ("consumed", "suspense_carried", "suspense_carried_out", "estimated", "written_off")
_LEASE_COLUMNS = ("granted", "overage", "returned", *_LEASE_ACCOUNTS, "region_consumed", "region_returned")
_ROLLUPS = ("hour", "day")


def _plus(names: tuple[str, ...]) -> str:
    return " + ".join(names)


def _rule(name: str, faulty: str) -> str:
    return f"SELECT '{name}' AS rule, faulty::text AS found FROM ({faulty}) AS faulty"


def _rollup(width: str) -> str:
    booked = f"""
        SELECT date_trunc('{width}', window_at, 'UTC') AS begins_at, quota, period, charge_period, region,
            dimensions ->> 'policy' AS policy, dimensions ->> 'counted_as' AS counted_as, sum(units)::bigint AS units
        FROM transfer WHERE dst = 'consumed' GROUP BY 1, 2, 3, 4, 5, 6, 7"""
    kept = f"SELECT begins_at, quota, period, charge_period, region, policy, counted_as, units FROM usage_{width}"
    return f"(({booked}) EXCEPT ({kept})) UNION ALL (({kept}) EXCEPT ({booked}))"


# Both sides of each transfer, by account; the source is negative. A report may fund a pool as well.
_MOVED = """
    SELECT epoch, quota, period, charge_period, src AS account, dst AS other, -units AS units FROM transfer
    UNION ALL SELECT epoch, quota, period, charge_period, dst, src, units FROM transfer"""
_MOVED_OF_LEASES = f"""
    SELECT * FROM ({_MOVED}) AS moved
    WHERE NOT ARRAY[account, other] && ARRAY['funding', 'soft_cap_extension'] AND period = charge_period"""
_POOL_SAYS = ", ".join(
    [
        *(f"('{account}', {account})" for account in _POOL_ACCOUNTS),
        *(f"('{account}', -{column})" for column, account in _SOURCES.items()),
    ]
)
_LEASE_SAYS = ", ".join(
    [*(f"('{account}', {account})" for account in _LEASE_ACCOUNTS), "('unallocated', returned - granted)",
     "('overage', -overage)"]
)  # fmt: skip
_CORRECTION_SAYS = ", ".join(
    [*(f"('{account}', {account})" for account in _CORRECTION_ACCOUNTS),
     "('suspense_carried_in', -suspense_carried_in)", "('correction', -correction)"]
)  # fmt: skip

# The permitted sources, destinations and causes of transfers.
_WAITING = ("outstanding", "suspense", "estimated", "written_off")
_MOVES = {
    "funded": {"funding → unallocated"},
    "defunded": {"unallocated → funding"},
    "extended": {"soft_cap_extension → unallocated"},
    "retracted": {"unallocated → soft_cap_extension"},
    "grant": {"unallocated → outstanding"},
    "covering": {"unallocated → outstanding"},
    "overage": {"overage → outstanding"},
    "usage": {f"{account} → consumed" for account in (*_WAITING, "suspense_carried", "correction")},
    "returned": {
        *(f"{account} → unallocated" for account in _WAITING),
        *(f"{account} → written_off" for account in ("suspense_carried", "estimated")),
    },
    "quarantined": {"outstanding → suspense"},
    "expired": {"outstanding → suspense"},
    "written_off": {f"{account} → written_off" for account in ("suspense", "suspense_carried", "adjustment")},
    "credited": {"adjustment → unallocated"},
    "debited": {"unallocated → adjustment"},
    "charged": {"suspense → estimated", "suspense_carried → estimated"},
    "estimated": {"suspense → estimated", "suspense_carried → estimated"},
    "suspense_carried": {
        "suspense → suspense_carried_out",
        "suspense_carried → suspense_carried_out",
        "suspense_carried_in → suspense_carried",
    },
    "replaces_estimate": {"correction → consumed", "correction → written_off"},
    "replaces_write_off": {"correction → consumed"},
    "rebased": {"funding → unallocated", "unallocated → outstanding", "overage → outstanding"},
}
_MAY_MOVE = ", ".join(f"'{cause}: {move}'" for cause, moves in _MOVES.items() for move in moves)

# Usage that is marked as beyond the limit, and its accounts.
_BEYOND = """
    SELECT quota, period, charge_period, epoch, units FROM transfer
    WHERE dst = 'consumed' AND dimensions ->> 'counted_as' = 'overage'"""
_ADJUSTED = "(src = 'adjustment' OR dst = 'adjustment')"

_RULES = {
    "units move where they may": f"""
        SELECT * FROM transfer WHERE cause || ': ' || src || ' → ' || dst NOT IN ({_MAY_MOVE})""",
    "a lease ends with its epoch": """
        SELECT epoch, quota, period, lease.state, its.state AS its_epoch, lost_data
        FROM lease JOIN region_epoch AS its USING (epoch) WHERE lease.state NOT IN ('quarantined', 'closed')
        AND CASE its.state WHEN 'current' THEN lease.state NOT IN ('active', 'expired')
            WHEN 'fenced' THEN lease.state <> CASE WHEN lost_data THEN 'lost' ELSE 'fenced' END
            ELSE lease.state <> 'retired' END""",
    "invariant 3": f"SELECT * FROM lease WHERE granted + overage <> returned + {_plus(_LEASE_ACCOUNTS)}",
    "invariant 4": f"""SELECT * FROM pool
        WHERE {_plus(tuple(_SOURCES))} <> {_plus(_POOL_ACCOUNTS)}""",
    "a pool is never below zero": f"SELECT * FROM pool WHERE least({', '.join(_POOL_COLUMNS)}) < 0",
    "a lease is never below zero": f"SELECT * FROM lease WHERE least({', '.join(_LEASE_COLUMNS)}) < 0",
    "a pool is its transfers": f"""
        SELECT pool.quota, pool.period, says.account, says.units, sum(moved.units) AS moved
        FROM pool CROSS JOIN LATERAL (VALUES {_POOL_SAYS}) AS says (account, units)
        LEFT JOIN ({_MOVED}) AS moved USING (quota, period, account)
        GROUP BY 1, 2, 3, 4 HAVING says.units <> coalesce(sum(moved.units), 0)""",
    "a lease is its transfers": f"""
        SELECT lease.epoch, lease.quota, lease.period, says.account, says.units, sum(moved.units) AS moved
        FROM lease CROSS JOIN LATERAL (VALUES {_LEASE_SAYS}) AS says (account, units)
        LEFT JOIN ({_MOVED_OF_LEASES}) AS moved USING (epoch, quota, period, account)
        GROUP BY 1, 2, 3, 4, 5 HAVING says.units <> coalesce(sum(moved.units), 0)""",
    "a correction is its transfers": f"""
        SELECT correction.epoch, quota, period, charge_period, says.account, says.units, sum(moved.units) AS moved
        FROM correction CROSS JOIN LATERAL (VALUES {_CORRECTION_SAYS}) AS says (account, units)
        LEFT JOIN ({_MOVED}) AS moved USING (epoch, quota, period, charge_period, account)
        GROUP BY 1, 2, 3, 4, 5, 6 HAVING says.units <> coalesce(sum(moved.units), 0)""",
    "overage is told once, and counted": f"""
        SELECT pool.quota, pool.period, overage_used, sum(units) FROM pool
        LEFT JOIN ({_BEYOND}) AS told USING (quota, period) WHERE charge_period = period OR charge_period IS NULL
        GROUP BY pool.quota, pool.period HAVING overage_used <> coalesce(sum(units), 0)""",
    "overage that is late is told once, and counted": f"""
        SELECT late.epoch, late.quota, late.period, late.charge_period, overage_used, sum(units) FROM correction AS late
        LEFT JOIN ({_BEYOND}) AS told USING (epoch, quota, period, charge_period)
        GROUP BY late.epoch, late.quota, late.period, late.charge_period
        HAVING overage_used <> coalesce(sum(units), 0)""",
    "usage is of a minute of its period": """
        SELECT transfer.* FROM transfer JOIN period ON period.id = charge_period
        WHERE dst = 'consumed' AND (window_at < starts_at OR window_at >= ends_at) IS NOT FALSE""",
    "what can be spent beyond the limit was credited": """
        SELECT pool.quota, pool.period, credited FROM pool LEFT JOIN transfer USING (quota, period)
        GROUP BY pool.quota, pool.period HAVING credited <> coalesce(sum(units) FILTER (WHERE cause = 'credited'), 0)
            - coalesce(sum(units) FILTER (WHERE cause = 'debited'), 0)""",
    "an adjustment is booked once, and when it is approved": f"""
        SELECT made.id, units, booked_in, moved.* FROM adjustment AS made
        FULL JOIN (SELECT movement_id AS id, sum(units)::bigint AS of_units, min(quota) AS of_quota,
            min(period) AS of_period, min(charge_period) AS of
            FROM transfer WHERE {_ADJUSTED} GROUP BY movement_id) AS moved USING (id)
        WHERE CASE WHEN approved_at IS NULL THEN of_units IS NOT NULL
            ELSE (of_quota, of_period, of, of_units) IS DISTINCT FROM (quota, booked_in, made.period, units) END""",
    "what a region says in totals is booked": """
        SELECT * FROM lease WHERE consumed <> region_consumed AND state <> 'quarantined'""",
    "nothing comes back that no region gave back": "SELECT * FROM lease WHERE returned > region_returned",
    "a lane is its reports": """
        SELECT lane.epoch, lane.lane, last_seq, count(seq) FROM lane LEFT JOIN report USING (epoch, lane)
        GROUP BY lane.epoch, lane.lane HAVING last_seq <> count(seq) OR last_seq <> coalesce(max(seq), 0)""",
    "a lane ends with its last report": """
        SELECT lane.* FROM lane LEFT JOIN report ON (report.epoch, report.lane, seq) = (lane.epoch, lane.lane, last_seq)
        WHERE last_seq > 0 AND (lane.head, last_hash) IS DISTINCT FROM (report.head, body_hash)""",
    **{f"usage by the {width} is its transfers": _rollup(width) for width in _ROLLUPS},
}
_FAULTS = " UNION ALL ".join(_rule(name, faulty) for name, faulty in _RULES.items())

_TABLES = {
    **dict.fromkeys(("region", "region_epoch", "lane", "lease", "report", "transfer", "usage_hour", "usage_day"), ""),
    **dict.fromkeys(
        ("quarantine", "correction", "resolution", "adjustment", "limits_version", "limit_override", "policy_version"),
        "",
    ),
    "audit": "",
    "pool": "WHERE funded + soft_cap_extension + overage + consumed > 0 OR adjustment <> 0",
    "period": "WHERE state <> 'open'",
}
_EVERYTHING = " UNION ALL ".join(
    f"SELECT '{name}' AS name, md5(string_agg(t::text, '|' ORDER BY t::text)) AS held FROM {name} AS t {some}"
    for name, some in _TABLES.items()
)
