"""`leasehold allocations`: who holds what, once or as a view that follows."""

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, asking, echo_json, every

if TYPE_CHECKING:
    import httpx
    from rich.console import Group
    from rich.table import Table

WATCH_S = 1.0
COLUMNS = ("region", "state", "holds", "used", "demand/s", "dry in", "coming", "suspense", "set")
LEFT_OUT_FIRST = ("state", "used", "set", "suspense", "coming", "demand/s")  # where a terminal is too narrow for all
GAP = 2


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
            _print(every(client, "/v1/allocations", **params))


def _follow(client: "httpx.Client", params: dict[str, str]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(tables(every(client, "/v1/allocations", **params), live.console.width), refresh=True)
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console(markup=False)
    console.print(tables(rows, console.width))


def tables(pools: list[dict[str, Any]], width: int) -> "Group":
    """A line for each allowance, and under it its regions."""
    from rich.console import Group
    from rich.text import Text

    now = datetime.now(UTC)
    parts: list[Text | Table] = []
    for each in pools:
        rows = [_of_pool(each), *(_of_region(region, now) for region in each["regions"])]
        shown, left_out = fitting(rows, width)
        parts += [Text(f"{each['quota']} {each['period']}"), _table(shown, rows)]
        if left_out:
            parts.append(Text(f"too narrow for: {', '.join(left_out)}"))
    return Group(*parts)


def _table(columns: list[str], rows: list[dict[str, str]]) -> "Table":
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in columns))
    return table


def fitting(rows: list[dict[str, str]], width: int) -> tuple[list[str], list[str]]:
    """The columns in which anything stands, and which of them are left out, so that no word is broken."""
    widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) + GAP for name in COLUMNS}
    shown = [name for name in COLUMNS if any(row.get(name) for row in rows)]
    left_out = []
    for name in LEFT_OUT_FIRST:
        if name in shown and sum(widths[each] for each in shown) > width:
            shown.remove(name)
            left_out.append(name)
    return shown, left_out


def _of_pool(each: dict[str, Any]) -> dict[str, str]:
    """What no region holds, and of that what is on its way to one."""
    return {
        "region": f"(nobody, of {each['funded']})",
        "state": each["state"],
        "holds": str(each["unallocated"]),
        "used": str(each["consumed"]),
        "coming": _unless_0(each["kept"]),
        "suspense": _unless_0(each["suspense"]),
    }


def _of_region(each: dict[str, Any], now: datetime) -> dict[str, str]:
    return {
        "region": each["region"],
        "state": each["state"],
        "holds": str(each["outstanding"]),
        "used": str(each["consumed"]),
        "demand/s": f"{each['demand_milli'] / 1000:g}" if each["demand_milli"] else "",
        "dry in": _left(each["dry_at"], now),
        "coming": _unless_0(each["coming"]),
        "suspense": _unless_0(each["suspense"]),
        "set": _set(each),
    }


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
