"""`leasehold region`: the regions that there are; `leasehold rebalance drain` empties one."""

from typing import Annotated, Any

import typer

from leasehold.cli.coordinator_api import (
    DEFAULT_URL,
    Json,
    Key,
    Url,
    answer,
    asking,
    echo_json,
    every,
    keyed,
    part,
    show,
)

region = typer.Typer(no_args_is_help=True, help="Look at the regions, add one, change its weight.")
Name = Annotated[str, typer.Argument(metavar="REGION")]


@region.command(name="list")
def list_(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List them: weight, status, the epoch of each, and when each was last heard."""
    with asking(url, "quota:read") as client:
        rows = every(client, "/v1/regions")
    echo_json(rows) if as_json else _show(rows)


@region.command(name="show")
def show_(name: Name, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show one."""
    with asking(url, "quota:read") as client:
        found = answer(client.get(f"/v1/regions/{part(name)}"))
    echo_json(found) if as_json else _show([found])


@region.command(name="put")
def put(
    name: Name,
    weight: Annotated[int | None, typer.Option(help="Its part of every quota, beside the other regions'.")] = None,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Add a region, or change its weight."""
    with asking(url, "alloc:write") as client:
        made = answer(client.put(f"/v1/regions/{part(name)}", json={"weight": weight}, headers=keyed(key)))
    echo_json(made) if as_json else _show([made])


def _show(rows: list[dict[str, Any]]) -> None:
    show(["region", "weight", "status", "epoch", "last heard", "faults"], [_row(each) for each in rows])


def _row(each: dict[str, Any]) -> list[str]:
    faults = ["two stores answer under its name"] if each["contested"] else []
    faults += [f"{each['regressed_lanes']} lanes stand"] if each["regressed_lanes"] else []
    heard = each.get("last_seen_at") or "never"
    return [each["name"], str(each["weight"]), each["status"], str(each["epoch"] or ""), heard, ", ".join(faults)]
