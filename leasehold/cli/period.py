"""`leasehold period`: the months, days and hours of the books, whether they agree, and how one is closed for good."""

import time
from typing import TYPE_CHECKING, Annotated, Any

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
from leasehold.cli.failure import say
from protocol.counting import counted

if TYPE_CHECKING:
    import httpx

period = typer.Typer(no_args_is_help=True, help="Look at the periods of the books, and close one that has ended.")

POLL_S = 2.0
SUMS = ("funded", "consumed", "estimated", "outstanding", "suspense", "suspense_carried", "unallocated")
Period = Annotated[str, typer.Argument(metavar="PERIOD", help="Such as 2026-10, 2026-10-31 or 2026-10-31T09; UTC.")]


@period.command(name="list")
def list_(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the periods that the books have, and how far each is."""
    with asking(url, "usage:read") as client:
        rows = every(client, "/v1/periods")
    if as_json:
        echo_json(rows)
    else:
        show(["period", "state", "from", "to", "closed"], [_row(each) for each in rows])


@period.command(name="show")
def show_(name: Period, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show one: whether its accounts agree, and what is not accounted for yet, by quota and region."""
    with asking(url, "usage:read") as client:
        found = answer(client.get(f"/v1/periods/{part(name)}"))
        books = answer(client.get(f"/v1/periods/{part(name)}/reconciliation"))
    if as_json:
        echo_json({"period": found, "reconciliation": books})
        return
    show(["period", "state", "from", "to", "closed"], [_row(found)])
    typer.echo(f"its accounts: {books['word']}")
    for fault in books["findings"]:
        typer.echo(f"  {fault['word']}: {fault['quota_key']} {fault['region'] or ''}: {fault['reason']}")
    for anomaly in books.get("anomalies", ()):
        where = f"{anomaly['quota_key']} {anomaly['region'] or ''}"
        typer.echo(f"  {anomaly['kind']}: {where}: {anomaly['units']} units: {anomaly['reason']}")
    show(["quota", *SUMS], [[each["quota_key"], *(str(each[name]) for name in SUMS)] for each in books["quotas"]])
    waiting = [_waiting(quota, region) for quota in books["quotas"] for region in quota["regions"]]
    if rows := [row for row in waiting if row[2:4] != ["0", "0"]]:
        typer.echo("not accounted for yet:")
        show(["quota", "region", "outstanding", "suspense", "silent for"], rows)


@period.command()
def close(
    name: Period,
    carry_suspense: Annotated[
        bool, typer.Option("--carry-suspense", help="What is in suspense leaves for the period that runs.")
    ] = False,
    leave_holds: Annotated[
        bool, typer.Option("--leave-holds", help="Close without what services hold; committed later, it is late usage.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is missing, and change nothing.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is closed; Ctrl-C ends only the waiting.")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")] = False,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Close one that has ended, for good: say what is missing, ask, and begin.

    From then on nothing is granted in it; regions have some time to report, and then it is closed by itself. Exits with
    0 if the close has begun, with --wait if the period is closed, and with --dry-run if nothing is missing that people
    have to end. The token, with the scope period:close, is read from LEASEHOLD_TOKEN.
    """
    body: dict[str, Any] = {"carry_suspense": carry_suspense} | ({"holds": "leave"} if leave_holds else {})
    with asking(url, "period:close") as client:
        found = _asked(client, name, body | {"dry_run": True})
        if not dry_run and found["period"]["state"] != "closed":
            if not as_json:
                _tell(found)
            if not yes and not typer.confirm(f"Close {name} for good?"):
                say("nothing was changed")
                raise typer.Exit(1)
            found = _asked(client, name, body, key)
            while wait and found["missing"]:
                _tell(found)
                time.sleep(POLL_S)
                found = _asked(client, name, body)
    if as_json:
        echo_json(found)
    else:
        _tell(found)


def _asked(client: "httpx.Client", name: str, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
    """What people have to end first is told like a refusal of input, and ends the command."""
    response = client.post(f"/v1/periods/{part(name)}:close", json=body, headers=keyed(key))
    if response.status_code == 409:
        for missing in response.json().get("missing", ()):
            say(_sentence(missing))
    return dict(answer(response))


def _tell(found: dict[str, Any]) -> None:
    booked = found["period"]
    for missing in found["missing"]:
        typer.echo(f"waits for {_sentence(missing)}")
    for each in found["suspense_carried"]:
        verb = "was" if booked["state"] == "closed" else "is to be"
        typer.echo(f"{verb} carried: {each['units']} of {each['quota']} in {each['region']} ({each['charge_period']})")
    for each in found["carried_over"]:
        verb = "was" if booked["state"] == "closed" else "is to be"
        typer.echo(f"{verb} carried over: {each['units']} of {each['quota']}, into {each['into']}")
    if booked["state"] == "closed":
        typer.echo(f"{booked['id']} is closed: {counted(booked['transfers'], 'transfer')}, root {booked['root']}")
    elif not found["is_dry_run"]:
        typer.echo(f"{booked['id']} is closing; it goes on by itself")


def _sentence(missing: dict[str, Any]) -> str:
    """Such as: suspense: 3 of exports:tenant=acme in us-east, epoch 7: resolve it, or close with `carry_suspense`."""
    what, quota, units = missing["what"], missing["quota"], missing["units"]
    if not quota:
        return f"{what}: {missing['reason']}"
    where = [f" in {missing['region']}"] if missing["region"] else []
    where += [f", epoch {missing['epoch']}"] if missing["epoch"] else []
    where += [f", until {missing['until']} at most"] if missing.get("until") else []
    return f"{what}: {f'{units} of ' if units else ''}{quota}{''.join(where)}: {missing['reason']}"


def _row(each: dict[str, Any]) -> list[str]:
    return [each["id"], each["state"], each["from"], each["to"], each["closed_at"] or ""]


def _waiting(quota: dict[str, Any], region: dict[str, Any]) -> list[str]:
    age_ms = region["oldest_unreported_age_ms"]
    silent = "" if age_ms is None else f"{age_ms // 1000} s"
    return [quota["quota_key"], region["region"], str(region["outstanding"]), str(region["suspense"]), silent]
