"""`leasehold allocations`: who holds what, once or as a view that follows."""

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, asking, echo_json, every

if TYPE_CHECKING:
    import httpx
    from rich.table import Table

WATCH_S = 1.0
COLUMNS = ("quota", "region", "state", "holds", "used", "demand/s", "dry in", "coming", "suspense", "set")


def allocations(
    quota: Annotated[
        str | None, typer.Option(help="Only this one, by its name or its key: exports:tenant=acme.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    region: Annotated[str | None, typer.Option(help="Only what this region holds.")] = None,
    period: Annotated[
        str | None, typer.Option(help="Of this one, such as 2026-10; without it, of those that run.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow, until Ctrl-C; without a terminal, once.")
    ] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show who holds what of each allowance, as its regions last told."""
    asked = {"quota": quota, "tenant": tenant, "region": region, "period": period}
    params = {name: value for name, value in asked.items() if value}
    with asking(url, "quota:read") as client:
        if as_json:
            echo_json(every(client, "/v1/allocations", **params))
        elif watch and sys.stdout.isatty():
            _follow(client, params)
        else:
            _print(_table(every(client, "/v1/allocations", **params)))


def _follow(client: "httpx.Client", params: dict[str, str]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(_table(every(client, "/v1/allocations", **params)), refresh=True)
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return


def _print(table: "Table") -> None:
    from rich.console import Console

    Console(markup=False).print(table)


def _table(rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, overflow="fold") for name in COLUMNS), box=None)
    now = datetime.now(UTC)
    for each in rows:
        for cells in [_of_pool(each), *(_of_region(region, now) for region in each["regions"])]:
            table.add_row(*map(Text, cells))
    return table


def _of_pool(each: dict[str, Any]) -> list[str]:
    """What no region holds, and of that what is on its way to one."""
    name = f"{each['quota']} {each['period']}"
    sums = [
        str(each["unallocated"]),
        str(each["consumed"]),
        "",
        "",
        _unless_0(each["kept"]),
        _unless_0(each["suspense"]),
    ]
    return [name, f"(nobody, of {each['funded']})", each["state"], *sums, ""]


def _of_region(each: dict[str, Any], now: datetime) -> list[str]:
    demand = f"{each['demand_milli'] / 1000:g}" if each["demand_milli"] else ""
    return [
        "",
        each["region"],
        each["state"],
        str(each["outstanding"]),
        str(each["consumed"]),
        demand,
        _left(each["dry_at"], now),
        _unless_0(each["coming"]),
        _unless_0(each["suspense"]),
        _set(each),
    ]


def _left(dry_at: str | None, now: datetime) -> str:
    if dry_at is None:
        return ""
    seconds = (datetime.fromisoformat(dry_at) - now).total_seconds()
    return "now" if seconds <= 0 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _set(each: dict[str, Any]) -> str:
    floor, ceiling = each["floor"], each["ceiling"]
    if floor is not None and floor == ceiling:
        return f"weight {each['weight']}, pin {floor}"
    words = [("weight", each["weight"]), ("floor", floor), ("ceiling", ceiling)]
    return ", ".join(f"{name} {value}" for name, value in words if value is not None)


def _unless_0(units: int) -> str:
    return str(units) if units else ""
