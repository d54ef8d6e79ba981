"""`leasehold suspense` and `leasehold quarantine`: what no report accounts for, and how two people end it."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, answer, api_command, fields, person, segment
from leasehold.cli.output import progress_line, warn
from protocol.counting import counted
from protocol.lease import LeaseState

suspense = typer.Typer(
    no_args_is_help=True, help="Resolve units that no report accounts for: one person proposes, and another approves."
)
quarantine = typer.Typer(no_args_is_help=True, help="Look at reports that were not booked.")

Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="Only quotas of this tenant; repeatable.")]
Quotas = Annotated[
    list[str] | None, typer.Option("--quota", help="Only this quota, by its name or its key; repeatable.")
]
Regions = Annotated[list[str] | None, typer.Option("--region", help="Only this region; repeatable.")]
Epochs = Annotated[list[int] | None, typer.Option("--epoch", help="Only this epoch; repeatable.")]
Periods = Annotated[list[str] | None, typer.Option("--period", help="Only this period; repeatable.")]
States = Annotated[list[LeaseState] | None, typer.Option("--state", help="Only leases in this state; repeatable.")]

SUSPENSE: dict[str, Column] = {
    **fields("period", "quota", "epoch", "region", "state", "suspense", "consumed", "reported_at"),
    "proposed": lambda row: row["proposal"] and row["proposal"]["kind"],
    "proposal": lambda row: row["proposal"] and (row["proposal"]["bulk"] or row["proposal"]["id"]),
    "by": lambda row: row["proposal"] and (row["proposal"].get("proposed_by_name") or row["proposal"]["proposed_by"]),
}
NOT_FOUND = 404
QUARANTINE = fields("epoch", "lane", "seq", "quota", "period", "reason", "is_open", "recorded_at")
RESOLUTION: dict[str, Column] = {
    **fields("id", "epoch", "quota", "period", "kind", "suspense", "charged", "reason"),
    "by": person("proposed_by"),
    "approved": "approved_at",
}
BULK: dict[str, Column] = {
    **fields("id", "kind", "leases", "units", "charged", "approved"),
    "by": person("proposed_by"),
}


@api_command(suspense, scope="usage:read", name="list")
def list_suspense(
    cli: Cli,
    tenant: Tenants = None,
    quota: Quotas = None,
    region: Regions = None,
    epoch: Epochs = None,
    period: Periods = None,
    state: States = None,
    bulk: Annotated[str | None, typer.Option(help="Only what is open of this proposal.")] = None,
) -> None:
    """List leases with units in suspense or in quarantine, and the open proposals."""
    only = {"tenant": tenant, "quota": quota, "region": region, "epoch": epoch, "period": period, "reason": state}
    cli.render(cli.get_all("/v1/suspense", **only, bulk=bulk), SUSPENSE)


@api_command(suspense, scope="adjust:propose", changes=True)
def propose(
    cli: Cli,
    kind: Annotated[str, typer.Argument(help="`write_off`, `charge`, or `unattributed` for leases in quarantine.")],
    reason: Annotated[str, typer.Option(help="The reason, which the audit keeps.")],
    tenant: Tenants = None,
    quota: Quotas = None,
    region: Regions = None,
    epoch: Epochs = None,
    period: Periods = None,
    state: States = None,
) -> None:
    """Propose one end for all leases that the options find now. Nothing is booked until another person approves it.

    Example: leasehold suspense propose write_off --region us-east --state lost --reason "its store failed over"
    """
    given = {"tenant": tenant, "quota": quota, "region": region, "epoch": epoch, "period": period, "reason": state}
    only = {name: values for name, values in given.items() if values}
    cli.render(cli.post("/v1/suspense/bulk", {"filter": only, "kind": kind, "reason": reason}), BULK)


@api_command(suspense, scope="adjust:propose", changes=True)
def resolve(
    cli: Cli,
    kind: Annotated[str, typer.Argument(help="`write_off`, `charge`, `estimate` or `unattributed`.")],
    epoch: Annotated[int, typer.Argument(min=1, help="The epoch of the lease.")],
    quota: Annotated[str, typer.Argument(help="The quota key, such as exports:tenant=acme.")],
    period: Annotated[str, typer.Argument(help="The lease's own period, such as 2026-10.")],
    reason: Annotated[str, typer.Option(help="The reason, which the audit keeps.")],
    units: Annotated[int | None, typer.Option(min=0, help="How many units an `estimate` bills.")] = None,
) -> None:
    """Propose an end for one lease, or for one report in quarantine. Another person approves it with `approve`.

    Example: leasehold suspense resolve estimate 7 exports:tenant=acme 2026-10 --units 40 --reason "their own count"
    """
    body = {"epoch": epoch, "quota": quota, "period": period, "kind": kind, "reason": reason}
    body |= {} if units is None else {"units": units}
    cli.render(cli.post("/v1/suspense:propose", body), RESOLUTION)


@api_command(suspense, scope="adjust:approve")
def approve(
    cli: Cli,
    proposal: Annotated[str, typer.Argument(metavar="ID", help="An id that `suspense propose` or `resolve` printed.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")] = False,
) -> None:
    """Approve what another person has proposed, and carry it out for each lease that was found then.

    Exits with 0 only if all of it is carried out. After Ctrl-C, the same command continues.

    Example: leasehold suspense approve 3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10 --yes
    """
    path = f"/v1/suspense/bulk/{segment(proposal)}"
    read = cli.client.get(path)
    if read.status_code == NOT_FOUND:
        cli.confirm(f"Approve {proposal}?", yes=yes)
        cli.render(cli.post(f"/v1/suspense/{segment(proposal)}:approve"), RESOLUTION)
        return
    found = answer(read)
    what = f"{found['kind']}: {counted(found['units'], 'unit')} of {counted(found['leases'], 'lease')}"
    cli.confirm(f"Approve {what} ({found['reason']})?", yes=yes)
    refused = list[dict[str, Any]]()
    with progress_line() as show:
        body: dict[str, str] = {}
        while True:
            found = cli.post(f"{path}:approve", body)
            refused += found["refused"]
            show(f"approved: {found['approved']} of {found['leases']}")
            if found["next"] is None:
                break
            body = {"after": found["next"]}
    cli.render({**found, "refused": refused}, BULK)
    for each in refused:
        warn(f"{each['id']} does not fit its lease any more: {each['refusal']}")
    if refused:
        raise typer.Exit(1)


@api_command(quarantine, scope="usage:read", name="list")
def list_quarantine(
    cli: Cli,
    quota: Quotas = None,
    region: Regions = None,
    epoch: Epochs = None,
    reason: Annotated[list[str] | None, typer.Option(help="Only for this reason; repeatable.")] = None,
) -> None:
    """List the reports that were not booked, and whether each waits for a decision."""
    only = {"quota": quota, "region": region, "epoch": epoch, "reason": reason}
    cli.render(cli.get_all("/v1/quarantine", **only), QUARANTINE)
