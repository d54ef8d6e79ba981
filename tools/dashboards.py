"""Write the Grafana dashboards of `compose/grafana/` from the table below: `python -m tools.dashboards`.

A dashboard is rows of panels, and a panel is a title, a unit and a few queries. Everything else, such as ids and places
in the grid, follows from that. Tests compare the files with this table, and the queries with the metrics of the code.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent.parent / "compose" / "grafana"
SCHEMA_VERSION = 39
WIDTH = 24  # of Grafana's grid
STAT_HEIGHT, GRAPH_HEIGHT = 4, 8
GRAPHS_IN_A_ROW, STATS_IN_A_ROW = 2, 6
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    title: str
    unit: str
    queries: Mapping[str, str]  # by their legends
    about: str
    is_stat: bool = False


class Dashboard(NamedTuple):
    name: str
    title: str
    variables: Mapping[str, str]  # by their names: the query that finds the values
    panels: Sequence[Panel]


def stat(title: str, unit: str, query: str, about: str) -> Panel:
    return Panel(title, unit, {"": query}, about, is_stat=True)


RATE = "$__rate_interval"
FAULTS = 'answer="denied",reason=~"cut_off|expired|no_lease|store"'
DECIDED = 'answer=~"allowed|denied"'


def rate(metric: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{matchers}}}[{RATE}]))"


def quantile(part: float, metric: str, by: str, matchers: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({part}, {rate(f'{metric}_bucket', labels, matchers)})"


def age(metric: str, by: str = "", function: str = "max") -> str:
    grouping = f" by ({by})" if by else ""
    return f"time() - {function}{grouping} ({metric})"


_C = "leasehold_coordinator_"
_IN_REGION = 'region=~"$region"'
_OF_QUOTA = 'quota=~"$quota"'

OVERVIEW = Dashboard(
    "overview",
    "Leasehold: overview",
    {},
    (
        stat("Regions that enforce", "short", "sum(max by (region) (leasehold_ready))", "Regions with a ready agent."),
        stat("Regions in all", "short", "count(count by (region) (leasehold_ready))", "Regions whose agents report."),
        stat("Coordinators that commit", "short", f"sum({_C}ready)", "Coordinators that are ready."),
        stat(
            "Denied for a fault",
            "percentunit",
            f"sum(rate(leasehold_checks_total{{{FAULTS}}}[{RATE}])) / "
            f"sum(rate(leasehold_checks_total{{{DECIDED}}}[{RATE}]))",
            "Part of the decisions that no limit explains.",
        ),
        stat(
            "Alerts",
            "short",
            'count(ALERTS{alertname=~"Leasehold.*",alertstate="firing"}) or vector(0)',
            "Alerts of Leasehold that fire now. The runbook has an entry for each.",
        ),
        stat(
            "Age of the last seal", "s", age(f"{_C}last_seal_timestamp_seconds"), "The ledger is sealed once a minute."
        ),
        Panel(
            "Decisions by region",
            "ops",
            {"{{region}}": rate("leasehold_checks_total", "region", DECIDED)},
            "Decisions of policies per second. A request may meet several policies.",
        ),
        Panel(
            "Denials by reason",
            "ops",
            {"{{reason}}": rate("leasehold_checks_total", "reason", 'answer="denied"')},
            "limit and never are the customers' own; all others are faults, or a drained region.",
        ),
        Panel(
            "Duration of checks",
            "s",
            {
                "99 of 100, {{region}}": quantile(0.99, "leasehold_check_duration_seconds", "region"),
                "half, {{region}}": quantile(0.5, "leasehold_check_duration_seconds", "region"),
            },
            "Time to decide, including waits for units of a lease.",
        ),
        Panel(
            "Exchanges by outcome",
            "ops",
            {"{{outcome}}": rate(f"{_C}exchanges_total", "outcome")},
            "Exchanges of all regions with the coordinators.",
        ),
        Panel(
            "Regions not seen",
            "s",
            {"{{region}}": age(f"{_C}region_last_seen_timestamp_seconds", "region")},
            "Time since any coordinator saw the region, to about ten seconds.",
        ),
        Panel(
            "Usage that is not booked",
            "s",
            {"{{region}}": "max by (region) (leasehold_unreported_usage_age_seconds)"},
            "Age of the oldest usage that waits in a region's store.",
        ),
    ),
)

REGION = Dashboard(
    "region",
    "Leasehold: region",
    {"region": "label_values(leasehold_ready, region)"},
    (
        Panel(
            "Agents",
            "short",
            {
                "ready": f"sum(min by (instance) (leasehold_ready{{{_IN_REGION}}}))",
                "scraped": f'sum(up{{job="leasehold-agent",{_IN_REGION}}})',
            },
            "Agents that answer, and those that can enforce.",
        ),
        Panel(
            "Reasons of health",
            "short",
            {"{{code}}": f"count by (code) (leasehold_health_reason{{{_IN_REGION}}} == 1)"},
            "How many agents and workers have each reason. The guide about health lists the codes.",
        ),
        Panel(
            "Decisions",
            "ops",
            {"{{answer}}": rate("leasehold_checks_total", "answer", _IN_REGION)},
            "By answer; shadow_ are those of shadow policies.",
        ),
        Panel(
            "Denials by reason",
            "ops",
            {"{{reason}}": rate("leasehold_checks_total", "reason", f'{_IN_REGION},answer="denied"')},
            "limit and never are the customers' own.",
        ),
        Panel(
            "Duration of checks",
            "s",
            {
                f"{name}": quantile(part, "leasehold_check_duration_seconds", "", _IN_REGION)
                for name, part in (("half", 0.5), ("95 of 100", 0.95), ("99 of 100", 0.99))
            },
            "Time to decide, including waits for units of a lease.",
        ),
        Panel(
            "Calls of the store",
            "s",
            {
                "99 of 100, {{kind}}": quantile(0.99, "leasehold_store_call_duration_seconds", "kind", _IN_REGION),
                "time-out of a decision": f"max(leasehold_store_decision_timeout_seconds{{{_IN_REGION}}})",
            },
            "Round trips, also of calls that timed out.",
        ),
        Panel(
            "Errors of the store",
            "ops",
            {"{{kind}}": rate("leasehold_store_errors_total", "kind", _IN_REGION)},
            "timeout, connection_lost, not_connected, or the code of the store's error.",
        ),
        Panel(
            "Checks without the store",
            "ops",
            {"{{mode}}": rate("leasehold_outage_fallback_checks_total", "mode", _IN_REGION)},
            "What on_store_failure decided.",
        ),
        Panel(
            "Leases last",
            "s",
            {"{{quota}}": f"min by (quota) (leasehold_lease_dry_in_seconds{{{_IN_REGION}}})"},
            "Time until the first lease of a quota is spent or expires, without another grant.",
        ),
        Panel(
            "Cut off",
            "s",
            {
                "no exchange answered": f"max(leasehold_exchanges_failing_seconds{{{_IN_REGION}}})",
                "usage not booked": f"max(leasehold_unreported_usage_age_seconds{{{_IN_REGION}}})",
                "age of {{feed}}": f"max by (feed) (leasehold_feed_age_seconds{{{_IN_REGION}}})",
            },
            "How long the coordinator has not answered, and what that makes old.",
        ),
        Panel(
            "Exchanges",
            "s",
            {"99 of 100": quantile(0.99, "leasehold_exchange_duration_seconds", "", _IN_REGION)},
            "Round trip of an exchange with the coordinator.",
        ),
        Panel(
            "Outage journal",
            "bytes",
            {"{{instance}}": f"sum by (instance) (leasehold_outage_journal_bytes{{{_IN_REGION}}})"},
            "Bytes that are not booked yet.",
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "{{instance}} {{worker}}": "sum by (instance, worker) "
                f'(process_resident_memory_bytes{{job="leasehold-agent",{_IN_REGION}}})'
            },
            "Of each process.",
        ),
        Panel(
            "Processor",
            "percentunit",
            {
                "{{instance}} {{worker}}": rate(
                    "process_cpu_seconds_total", "instance, worker", f'job="leasehold-agent",{_IN_REGION}'
                )
            },
            "Part of one core, of each process.",
        ),
    ),
)

QUOTA = Dashboard(
    "quota",
    "Leasehold: quota",
    {"quota": f"label_values({_C}units, quota)"},
    (
        Panel(
            "Units by account",
            "short",
            {"{{quota}} {{account}}": f"max by (quota, account) ({_C}units{{{_OF_QUOTA}}})"},
            "Units of the open periods: funded = unallocated + outstanding + consumed + suspense, less overage.",
        ),
        Panel(
            "Consumption",
            "short",
            {"{{quota}}": f'max by (quota) (deriv({_C}units{{{_OF_QUOTA},account="consumed"}}[15m])) * 3600'},
            "Booked units per hour, over a quarter of an hour.",
        ),
        Panel(
            "Keys",
            "short",
            {
                "{{quota}}": f"max by (quota) ({_C}quota_keys{{{_OF_QUOTA}}})",
                "{{quota}} used up": f"max by (quota) ({_C}used_up_keys{{{_OF_QUOTA}}})",
                "{{quota}} grown": f"max by (quota) ({_C}growing_tenants{{{_OF_QUOTA}}})",
            },
            "Keys with units in an open period, those with nothing left, and tenants whose usage grew suddenly.",
        ),
        Panel(
            "Leases last",
            "s",
            {"{{region}} {{quota}}": f"min by (region, quota) (leasehold_lease_dry_in_seconds{{{_OF_QUOTA}}})"},
            "By region: the time until the first lease is spent or expires, without another grant.",
        ),
        Panel(
            "Overshoot of shared rates",
            "short",
            {
                "{{quota}}": f"max by (quota) ({_C}rate_overshoot_units{{{_OF_QUOTA}}})",
                "{{quota}} at worst": f"max by (quota) ({_C}rate_overshoot_bound_units{{{_OF_QUOTA}}})",
            },
            "Units that a key may have had beyond limit and burst: measured, beside the published bound.",
        ),
        Panel(
            "Hot keys",
            "short",
            {"{{quota}}": "topk(10, sum by (quota) (leasehold_hot_key_units_per_second))"},
            "The ten keys with the highest demand, in units per second.",
        ),
        Panel(
            "Decisions by policy",
            "ops",
            {"{{policy}} {{answer}}": rate("leasehold_checks_total", "policy, answer")},
            "Of all quotas: a policy names its quota in the limits document.",
        ),
        Panel(
            "Nothing left",
            "percentunit",
            {
                "{{policy}}": f"{rate('leasehold_remaining_ratio_bucket', 'policy', 'le=' + chr(34) + '0.0' + chr(34))}"
                f" / {rate('leasehold_remaining_ratio_count', 'policy')}"
            },
            "Part of the checks that found nothing left of the limit, by policy.",
        ),
    ),
)

LEDGER = Dashboard(
    "ledger",
    "Leasehold: ledger and finance",
    {},
    (
        stat("Last verification", "short", f"min({_C}last_verification_intact)", "1: the ledger was found intact."),
        stat("Age of the last seal", "s", age(f"{_C}last_seal_timestamp_seconds"), "It is sealed once a minute."),
        stat("Leases that differ", "short", f"max({_C}drifting_leases)", "From what their region counted."),
        stat("Leases in quarantine", "short", f"sum(max by (region) ({_C}quarantined_leases))", "People decide."),
        stat("Periods that close", "short", f"max({_C}closing_periods)", "Closes that wait for something."),
        stat("Dead letters", "short", f"max({_C}webhook_dead_letters)", "Deliveries of webhooks that were given up."),
        Panel(
            "Suspense",
            "short",
            {"{{region}}": f"max by (region) ({_C}suspense_units)"},
            "Units that a region was leased and has not accounted for.",
        ),
        Panel(
            "Age of suspense",
            "s",
            {"{{region}}": age(f"{_C}suspense_oldest_timestamp_seconds", "region", "min")},
            "Since the last report of the lease that has waited for longest.",
        ),
        Panel(
            "Booked units",
            "ops",
            {
                "consumed": f"sum(rate({_C}consumed_units_total[{RATE}]))",
                "granted": f"sum(rate({_C}granted_units_total[{RATE}]))",
                "overage": f"sum(rate({_C}overage_units_total[{RATE}]))",
            },
            "Units per second, of all coordinators.",
        ),
        Panel(
            "Transactions of exchanges",
            "s",
            {
                "99 of 100": quantile(0.99, f"{_C}exchange_duration_seconds", ""),
                "half": quantile(0.5, f"{_C}exchange_duration_seconds", ""),
            },
            "Time to book a group of exchanges, with retries.",
        ),
        Panel(
            "Connections to PostgreSQL",
            "short",
            {
                "{{instance}} {{pool}} {{state}}": f"sum by (instance, pool, state) ({_C}database_connections)",
                "{{instance}} {{pool}} waiting": f"max by (instance, pool) ({_C}database_waiters)",
            },
            "Of each coordinator: for requests, and for background jobs.",
        ),
        Panel(
            "Wait for a connection",
            "s",
            {"99 of 100, {{pool}}": quantile(0.99, f"{_C}database_wait_duration_seconds", "pool")},
            "How long operations wait until they have one.",
        ),
        Panel(
            "Jobs that fail",
            "short",
            {"{{job_name}}": f"max by (job_name) ({_C}job_failures_in_a_row) > 0"},
            "Failures in a row. Nothing is shown while all jobs work.",
        ),
        Panel(
            "Deliveries of webhooks",
            "ops",
            {"{{result}}": rate(f"{_C}webhook_attempts_total", "result")},
            "Attempts by result: failed ones are repeated, dead ones are not.",
        ),
    ),
)

DASHBOARDS = (OVERVIEW, REGION, QUOTA, LEDGER)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    return {
        "uid": f"leasehold-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["leasehold"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(*each) for each in dashboard.variables.items())]},
        "panels": list(_panels(dashboard.panels)),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".+",
        "multi": True,
        "sort": 1,
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    x = y = height = 0
    for number, panel in enumerate(panels, start=1):
        width = WIDTH // (STATS_IN_A_ROW if panel.is_stat else GRAPHS_IN_A_ROW)
        if x + width > WIDTH or (height and height != _height(panel)):
            x, y = 0, y + height
        height = _height(panel)
        yield {
            "id": number,
            "type": "stat" if panel.is_stat else "timeseries",
            "title": panel.title,
            "description": panel.about,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": width, "h": height},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + place), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
                for place, (legend, query) in enumerate(panel.queries.items())
            ],
        }
        x += width


def _height(panel: Panel) -> int:
    return STAT_HEIGHT if panel.is_stat else GRAPH_HEIGHT


def written(dashboard: Dashboard) -> str:
    return json.dumps(document(dashboard), indent=2) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(written(dashboard), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
