"""`leasehold period` and `leasehold adjustment`: close periods, and correct them afterwards."""

import time
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, answer, api_command, fields, person, segment
from leasehold.cli.finance.usage import Period
from leasehold.cli.output import fail_for_each, progress_line
from protocol.counting import counted

period = typer.Typer(no_args_is_help=True, help="Look at the periods of the ledger, and close one that has ended.")
adjustment = typer.Typer(
    no_args_is_help=True, help="Correct the ledger: one person proposes an adjustment, and another approves it."
)

POLL_S = 2.0
CONFLICT = 409
PERIOD: dict[str, Column] = {
    "period": "id",
    **fields("state", "from", "to"),
    "closed": "closed_at",
    "by": lambda row: row.get("closed_by_name") or row.get("closed_by"),
}
BALANCES = fields("funded", "consumed", "estimated", "outstanding", "suspense", "suspense_carried", "unallocated")


# --- periods ----------------------------------------------------------------------------------------------------------


@api_command(period, scope="usage:read", name="list")
def list_periods(cli: Cli) -> None:
    """List the periods of the ledger and their states."""
    cli.render(cli.get_all("/v1/periods"), PERIOD)


@api_command(period, scope="usage:read", name="show")
def show_period(cli: Cli, name: Period) -> None:
    """Show whether a period's accounts agree, and what is not accounted for yet, by quota and region."""
    found = cli.get(f"/v1/periods/{segment(name)}")
    books = cli.get(f"/v1/periods/{segment(name)}/reconciliation")
    if cli.as_json:
        cli.print_json({"period": found, "reconciliation": books})
        return
    cli.render(found, PERIOD)
    typer.echo(f"its accounts: {books['status']}")
    for fault in books["findings"]:
        typer.echo(f"  {fault['kind']}: {fault['quota_key']} {fault['region'] or ''}: {fault['reason']}")
    for anomaly in books.get("anomalies", ()):
        where = f"{anomaly['quota_key']} {anomaly['region'] or ''}"
        typer.echo(f"  {anomaly['kind']}: {where}: {anomaly['units']} units: {anomaly['reason']}")
    cli.render(books["quotas"], {"quota": "quota_key", **BALANCES})
    if rows := [row for quota in books["quotas"] for row in _unaccounted(quota)]:
        typer.echo("not accounted for yet:")
        cli.render(rows, {**fields("quota", "region", "outstanding", "suspense"), "silent for": _silence})


def _unaccounted(quota: dict[str, Any]) -> list[dict[str, Any]]:
    regions = [region for region in quota["regions"] if region["outstanding"] or region["suspense"]]
    return [{**region, "quota": quota["quota_key"]} for region in regions]


def _silence(region: dict[str, Any]) -> str:
    age_ms = region["oldest_unreported_age_ms"]
    return "" if age_ms is None else f"{age_ms // 1000} s"


@api_command(period, scope="period:close", name="close", changes=True)
def close_period(
    cli: Cli,
    name: Period,
    carry_suspense: Annotated[
        bool, typer.Option("--carry-suspense", help="Move units in suspense to the current period.")
    ] = False,
    leave_holds: Annotated[
        bool,
        typer.Option("--leave-holds", help="Close although services hold units; committed later, they are late usage."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is missing, and change nothing.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the period is closed. Ctrl-C ends only the waiting.")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")] = False,
) -> None:
    """Close a period that has ended, for good: print what is missing, ask, and begin.

    From then on nothing is granted in the period. Regions have some time to report, and then it closes by itself. Exits
    with 0 if the close has begun, with --wait if the period is closed, and with --dry-run if no one has to act first.
    """
    path = f"/v1/periods/{segment(name)}:close"
    body: dict[str, Any] = {"carry_suspense": carry_suspense} | ({"holds": "leave"} if leave_holds else {})
    found = _closed(cli.preview(path, body))
    if not dry_run and found["period"]["state"] != "closed":
        if not cli.as_json:
            _print_close(found)
        cli.confirm(f"Close {name} for good?", yes=yes)
        found = _closed(cli.send("POST", path, body))
        found = _finished(cli, path, body, found) if wait else found
    if cli.as_json:
        cli.print_json(found)
    else:
        _print_close(found)


def _finished(cli: Cli, path: str, body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Wait until the period is closed."""
    with progress_line() as show:
        while found["missing"]:
            show("waits for " + ", ".join(dict.fromkeys(missing["what"] for missing in found["missing"])))
            time.sleep(POLL_S)
            found = _closed(cli.client.post(path, json=body))
    return found


def _closed(response: Any) -> dict[str, Any]:
    """Return the state of the close. Print what people have to do first, and end the command, if it is refused."""
    if response.status_code == CONFLICT and (missing := response.json().get("missing")):
        fail_for_each(map(_sentence, missing))
    return dict(answer(response))


def _print_close(found: dict[str, Any]) -> None:
    booked = found["period"]
    verb = "was" if booked["state"] == "closed" else "is to be"
    for missing in found["missing"]:
        typer.echo(f"waits for {_sentence(missing)}")
    for each in found["suspense_carried"]:
        typer.echo(f"{verb} carried: {each['units']} of {each['quota']} in {each['region']} ({each['charge_period']})")
    for each in found["carried_over"]:
        typer.echo(f"{verb} carried over: {each['units']} of {each['quota']}, into {each['into']}")
    if booked["state"] == "closed":
        typer.echo(f"{booked['id']} is closed: {counted(booked['transfers'], 'transfer')}, root {booked['root']}")
    elif not found["is_dry_run"]:
        typer.echo(f"{booked['id']} is closing; it closes by itself")


def _sentence(missing: dict[str, Any]) -> str:
    """Such as: suspense: 3 of exports:tenant=acme in us-east, epoch 7: resolve it, or close with `carry_suspense`."""
    what, quota, units = missing["what"], missing["quota"], missing["units"]
    if not quota:
        return f"{what}: {missing['reason']}"
    where = [f" in {missing['region']}"] if missing["region"] else []
    where += [f", epoch {missing['epoch']}"] if missing["epoch"] else []
    where += [f", until {missing['until']} at most"] if missing.get("until") else []
    return f"{what}: {f'{units} of ' if units else ''}{quota}{''.join(where)}: {missing['reason']}"


# --- adjustments ------------------------------------------------------------------------------------------------------

AdjustmentId = Annotated[str, typer.Argument(metavar="ID", help="An id of `adjustment list`.")]
ADJUSTMENT: dict[str, Column] = {
    **fields("id", "state", "kind", "units", "quota", "period", "booked_in", "document"),
    "proposed by": person("proposed_by"),
    "approved by": person("approved_by"),
}


@api_command(adjustment, scope="usage:read", name="list")
def list_adjustments(
    cli: Cli,
    state: Annotated[str | None, typer.Option(help="`proposed`, `approved`, `withdrawn` or `expired`.")] = None,
    period: Annotated[str | None, typer.Option(help="Only adjustments of this period.")] = None,
    quota: Annotated[str | None, typer.Option(help="Only adjustments of this quota key.")] = None,
) -> None:
    """List the adjustments in the order in which they were proposed."""
    cli.render(cli.get_all("/v1/adjustments", state=state, period=period, quota=quota), ADJUSTMENT)


@api_command(adjustment, scope="usage:read", name="show")
def show_adjustment(cli: Cli, adjustment_id: AdjustmentId) -> None:
    """Show all fields of one adjustment."""
    found = cli.get(f"/v1/adjustments/{segment(adjustment_id)}")
    if cli.as_json:
        cli.print_json(found)
    else:
        cli.render([{"": name, " ": value} for name, value in found.items() if value], fields("", " "))


@api_command(adjustment, scope="adjust:propose", name="propose", changes=True)
def propose_adjustment(
    cli: Cli,
    kind: Annotated[str, typer.Argument(help="`credit`, `debit` or `write_off`.")],
    quota: Annotated[str, typer.Argument(help="The quota key, such as exports:tenant=acme.")],
    period: Annotated[str, typer.Argument(help="The period that is corrected, such as 2026-10.")],
    units: Annotated[int, typer.Argument(help="The number of units.")],
    reason: Annotated[str, typer.Option(help="The reason.")],
    document: Annotated[str, typer.Option(help="The evidence: a ticket, a file.")],
) -> None:
    """Propose an adjustment. Nothing is booked until another person approves it."""
    body = {"quota": quota, "period": period, "kind": kind, "units": units, "reason": reason, "document": document}
    cli.render(cli.post("/v1/adjustments", body), ADJUSTMENT)


@api_command(adjustment, scope="adjust:approve", name="approve", changes=True)
def approve_adjustment(cli: Cli, adjustment_id: AdjustmentId) -> None:
    """Approve what another person has proposed, and book it."""
    cli.render(cli.post(f"/v1/adjustments/{segment(adjustment_id)}:approve"), ADJUSTMENT)


@api_command(adjustment, scope="adjust:propose", name="withdraw", changes=True)
def withdraw_adjustment(cli: Cli, adjustment_id: AdjustmentId) -> None:
    """Withdraw an adjustment that has not been approved."""
    cli.render(cli.post(f"/v1/adjustments/{segment(adjustment_id)}:withdraw"), ADJUSTMENT)
