"""`leasehold allocations`: who holds what, once or as a view that follows."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, asking, echo_json, every, given
from leasehold.cli.live_tables import Block, Columns, Watch, show_tables

COLUMNS = Columns(
    ("region", "state", "holds", "used", "demand/s", "dry in", "coming", "suspense", "set"),
    left_out_first=("state", "used", "set", "suspense", "coming", "demand/s"),
)
NOTHING = "no region holds any"


def allocations(
    quota: Annotated[
        str | None, typer.Option(help="Only this one, by its name or its key: exports:tenant=acme.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    region: Annotated[str | None, typer.Option(help="Only what this region holds.")] = None,
    period: Annotated[
        str | None, typer.Option(help="Of this one, such as 2026-10; without it, of those that run.")
    ] = None,
    watch: Watch = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show who holds what of each allowance, as its regions last told."""
    params = given(quota=quota, tenant=tenant, region=region, period=period)
    with asking(url, "quota:read") as client:
        if as_json:
            echo_json(every(client, "/v1/allocations", **params))
        else:
            show_tables(lambda: blocks(every(client, "/v1/allocations", **params)), COLUMNS, NOTHING, watch=watch)


def blocks(pools: list[dict[str, Any]]) -> list[Block]:
    """A line for each allowance, and under it its regions."""
    now = datetime.now(UTC)
    return [
        Block(
            f"{each['quota']} {each['period']}",
            [_of_pool(each), *(_of_region(region, now) for region in each["regions"])],
        )
        for each in pools
    ]


def _of_pool(each: dict[str, Any]) -> dict[str, str]:
    """What no region holds, and of that what is on its way to one."""
    return {
        "region": f"(nobody, of {each['funded']})" + ("" if each["mode"] == "leased" else f" {each['mode']}"),
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
    words = [("weight", each["weight"]), ("floor", floor), ("ceiling", ceiling), ("limit", each["limit"])]
    return ", ".join(f"{name} {value}" for name, value in words if value is not None)


def _unless_0(units: int) -> str:
    return str(units) if units else ""
