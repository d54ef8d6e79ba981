"""`leasehold lane`: lanes that wait because the ledger has lost data, and how two people let them go on."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, api_command, fields, segment
from leasehold.cli.output import fail, progress_line

lane = typer.Typer(
    no_args_is_help=True,
    help="Let lanes go on after the ledger has lost data: one person proposes, and another approves.",
)

Regions = Annotated[list[str] | None, typer.Option("--region", help="Only this region; repeatable.")]
Lanes = Annotated[
    list[str] | None,
    typer.Argument(metavar="EPOCH/LANE...", help="As `lane list` and `stopped_lanes` of `/v1/status` name them: 7/2."),
]
LANE: dict[str, Column] = {
    "lane": lambda row: f"{row['epoch']}/{row['lane']}",
    **fields("region", "last_seq", "waiting_seq", "lacking", "waiting_since", "proposal"),
}
PROPOSAL: dict[str, Column] = {
    "lane": lambda row: f"{row['epoch']}/{row['lane']}",
    **fields("id", "seq", "reason", "proposed_by", "approved_by"),
}


@api_command(lane, scope="usage:read", name="list")
def list_lanes(
    cli: Cli,
    region: Regions = None,
    all_: Annotated[bool, typer.Option("--all", help="Also lanes that go on.")] = False,
) -> None:
    """List the lanes that wait to be rebased, and what is proposed.

    A lane that stopped for another reason is in `stopped_lanes` of its agents' `/v1/status`.

    Example: leasehold lane list --region us-east
    """
    cli.render(cli.get_all("/v1/lanes", region=region, waiting=not all_), LANE)


@api_command(lane, scope="adjust:propose")
def rebase(
    cli: Cli,
    reason: Annotated[str, typer.Option(help="The reason, which the audit keeps.")],
    lanes: Lanes = None,
    all_: Annotated[bool, typer.Option("--all", help="All lanes that wait and have no proposal.")] = False,
    region: Regions = None,
) -> None:
    """Propose that lanes go on with the batch that their store offers. Another person has to approve it.

    Example: leasehold lane rebase 7/2 7/3 --reason "restored from last night's backup"
    """
    if bool(lanes) == all_:
        fail("name lanes such as 7/2, or give --all")
    if lanes and region:
        fail("--region belongs to --all")
    waiting = cli.get_all("/v1/lanes", region=region, waiting=True) if all_ else []
    names = [_parsed(text) for text in lanes or ()]
    names += [(each["epoch"], each["lane"]) for each in waiting if each["proposal"] is None]
    cli.render([_proposed(cli, *name, reason) for name in names], PROPOSAL)


@api_command(lane, scope="adjust:approve")
def approve(
    cli: Cli,
    proposals: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids of `lane list`.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All open proposals about lanes.")] = False,
    region: Regions = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")] = False,
) -> None:
    """Approve what another person has proposed. Each lane goes on when its store offers the batch again, within 30 s.

    Example: leasehold lane approve --all --region us-east
    """
    if bool(proposals) == all_:
        fail("name proposals, or give --all")
    waiting = cli.get_all("/v1/lanes", region=region, waiting=True)
    known = {each["proposal"]: each for each in waiting if each["proposal"] is not None}
    ids = list(known) if all_ else proposals or []
    if not all_ and (missing := [each for each in ids if each not in known]):
        fail(f"no lane waits for {', '.join(missing)}: see `leasehold lane list`")
    about = ", ".join(f"{known[each]['epoch']}/{known[each]['lane']}" for each in ids)
    cli.confirm(f"Rebase {about or 'nothing'}?", yes=yes or not ids)
    approved = []
    with progress_line() as show:
        for number, each in enumerate(ids, 1):
            approved.append(cli.post(f"/v1/suspense/{segment(each)}:approve"))
            show(f"approved: {number} of {len(ids)}")
    cli.render(approved, PROPOSAL)


def _parsed(text: str) -> tuple[int, int]:
    epoch, slash, number = text.partition("/")
    if not (slash and epoch.isascii() and epoch.isdigit() and number.isascii() and number.isdigit()):
        fail(f"{text}: write a lane as EPOCH/LANE, such as 7/2")
    return int(epoch), int(number)


def _proposed(cli: Cli, epoch: int, number: int, reason: str) -> dict[str, Any]:
    body = {"epoch": epoch, "lane": number, "kind": "rebase", "reason": reason}
    return dict(cli.post("/v1/suspense:propose", body))
