"""`leasehold rebalance`: move units between regions, set weights and bounds, drain a region; each prints its plan."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from leasehold.cli.api import Cli, Column, answer, api_command, fields, segment
from leasehold.cli.output import fail, print_table, warn
from protocol.counting import counted

if TYPE_CHECKING:
    import httpx

rebalance = typer.Typer(
    no_args_is_help=True, help="Move idle units between regions, set weights and bounds, or drain a region."
)

POLL_S = 0.5
INTERRUPTED = 130
MOST_SHOWN = 20
CONFLICT, PRECONDITION_FAILED = 409, 412

Quota = Annotated[str, typer.Argument(metavar="QUOTA", help="The key of an allowance, such as exports:tenant=acme.")]
Region = Annotated[str, typer.Argument(metavar="REGION")]
RebalanceId = Annotated[str, typer.Argument(metavar="ID", help="An id of `rebalance show`.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan, and change nothing.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow it to its end; Ctrl-C ends only the following.")]
Reason = Annotated[str | None, typer.Option(help="The reason, which the audit log keeps.")]


class Answers(NamedTuple):
    """The options of a plan: only print it, do not ask, and follow it to its end."""

    dry_run: bool
    yes: bool
    wait: bool = True


@api_command(rebalance, scope="alloc:write", changes=True)
def move(
    cli: Cli,
    quota: Quota,
    units: Annotated[int, typer.Argument(min=1, metavar="UNITS")],
    source: Annotated[str, typer.Option("--from", metavar="REGION", help="The region that gives the units.")],
    target: Annotated[str, typer.Option("--to", metavar="REGION", help="The region that gets the units.")],
    hold: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep them there for 30m, 1h or 2d; then demand decides again.")
    ] = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
) -> None:
    """Move idle units from one region to another. Units that are spent already are reported, and the rest is moved.

    Without --hold idle units may be recalled soon, and the plan says when. `rebalance cancel` ends a
    hold before its time. Exits with 0 only if all of them were moved, and with 130 after Ctrl-C.

    Example: leasehold rebalance move exports:tenant=acme 300 --from us-east --to ap-south --hold 1h
    """
    request = {"mode": "move", "quota": quota, "from": source, "to": target, "units": units, "reason": reason}
    request |= {} if hold is None else {"hold": hold}
    _rebalance(cli, request, Answers(dry_run, yes, wait))


@api_command(rebalance, scope="alloc:write", changes=True)
def weigh(
    cli: Cli,
    quota: Annotated[str, typer.Argument(metavar="QUOTA", help="exports:tenant=acme, or exports for all of its keys.")],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="REGION.SETTING=VALUE...", help="us-east.weight=3, .floor=100, .ceiling=, .pin=; - removes it."
        ),
    ],
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
) -> None:
    """Set weights, floors, ceilings and pins of regions. Units above a new ceiling are recalled."""
    by_region: dict[str, dict[str, int | str | None]] = {}
    for region, name, value in map(_setting, settings):
        if name in by_region.setdefault(region, {}):
            fail(f"{region}.{name} is given twice")
        by_region[region][name] = value
    request = {"mode": "weigh", "quota": quota, "settings": by_region, "reason": reason}
    _rebalance(cli, request, Answers(dry_run, yes, wait))


@api_command(rebalance, scope="alloc:write", changes=True)
def even_out(
    cli: Cli, quota: Quota, reason: Reason = None, dry_run: DryRun = False, yes: Yes = False, wait: Wait = True
) -> None:
    """Move idle units to the regions with demand."""
    _rebalance(cli, {"mode": "even_out", "quota": quota, "reason": reason}, Answers(dry_run, yes, wait))


@api_command(rebalance, scope="alloc:write", changes=True)
def drain(
    cli: Cli, region: Region, reason: Reason = None, dry_run: DryRun = False, yes: Yes = False, wait: Wait = True
) -> None:
    """Take all units back from a region, and grant it nothing until it is restored.

    Example: leasehold rebalance drain ap-south --reason "the region is lost"
    """
    _rebalance(cli, {"mode": "drain", "region": region, "reason": reason}, Answers(dry_run, yes, wait))


@api_command(rebalance, scope="alloc:write", changes=True)
def restore(cli: Cli, region: Region, reason: Reason = None, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Grant units to a drained region again."""
    _rebalance(cli, {"mode": "restore", "region": region, "reason": reason}, Answers(dry_run, yes))


@api_command(rebalance, scope="quota:read")
def show(
    cli: Cli,
    rebalance_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Without it, all are listed.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end.")] = False,
) -> None:
    """Show the progress of a rebalance and the regions it waits for, or list all."""
    if rebalance_id is None:
        _list(cli)
        return
    found = cli.get(f"/v1/rebalances/{segment(rebalance_id)}")
    found = _followed(cli, found) if wait and not cli.as_json else found
    _print_result(cli, found)


@api_command(rebalance, scope="alloc:write", changes=True)
def cancel(cli: Cli, rebalance_id: RebalanceId) -> None:
    """Stop a rebalance, and end its hold. What is done stays done; a region that is drained is granted units again."""
    _print_result(cli, cli.post(f"/v1/rebalances/{segment(rebalance_id)}:cancel", {}))


# --- from the plan to the end -----------------------------------------------------------------------------------------


def _rebalance(cli: Cli, request: Mapping[str, Any], answers: Answers) -> None:
    response = cli.preview("/v1/rebalances", request)
    found = _accepted(response)
    if not answers.dry_run:
        if not cli.as_json:
            _print_plan(found)
        cli.confirm("Begin?", yes=answers.yes)
        found = _accepted(cli.send("POST", "/v1/rebalances", request, {"If-Match": response.headers["ETag"]}))
        found = _followed(cli, found) if answers.wait else found
    elif not cli.as_json:
        _print_plan(found)
        return
    _print_result(cli, found)
    if found["state"] in ("partial", "cancelled"):
        raise typer.Exit(1)


def _accepted(response: "httpx.Response") -> dict[str, Any]:
    """Return the rebalance. If it is refused, print what changed meanwhile and what is impossible, and end."""
    if response.status_code in (CONFLICT, PRECONDITION_FAILED):
        problem = response.json()
        for other in problem.get("changed", ()):
            warn(f"meanwhile: {_sentence(other)}")
        for each in problem.get("cannot", ()):
            warn(_impossible(each))
    return dict(answer(response))


def _followed(cli: Cli, found: dict[str, Any]) -> dict[str, Any]:
    """Show a progress bar until the rebalance ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[waits]}"),
    )
    try:
        with Progress(*columns, console=Console(stderr=True, markup=False), disable=cli.as_json) as bar:
            returned = bar.add_task("returned", waits="")
            regranted = bar.add_task("regranted", waits="", visible=found["mode"] != "drain")
            while True:
                progress = found["progress"]
                bar.update(returned, total=progress["recalled"], completed=progress["returned"], waits=_waits(found))
                bar.update(regranted, total=progress["recalled"], completed=progress["regranted"])
                if found["state"] != "running":
                    return found
                time.sleep(POLL_S)
                found = dict(cli.get(f"/v1/rebalances/{segment(found['id'])}"))
    except KeyboardInterrupt:
        _leave_running(found["id"])


def _leave_running(rebalance_id: str) -> NoReturn:
    warn(f"it goes on by itself: `leasehold rebalance show {rebalance_id}` shows its progress, `cancel` stops it")
    raise typer.Exit(INTERRUPTED)


# --- output -----------------------------------------------------------------------------------------------------------


def _print_plan(found: dict[str, Any]) -> None:
    plan = found["plan"]
    for before, after in zip(plan["before"], plan["after"], strict=True):
        typer.echo(f"{before['quota']} {before['period']}")
        later = {each["region"]: each["outstanding"] for each in after["regions"]}
        rows = [[each["region"], str(each["outstanding"]), str(later[each["region"]])] for each in before["regions"]]
        print_table(
            ["region", "holds", "is to hold"],
            [*rows, ["(unallocated)", str(before["unallocated"]), str(after["unallocated"])]],
        )
    for region, setting in plan["settings_after"].items():
        typer.echo(f"{region}: {_worded(plan['settings_before'][region])} → {_worded(setting)}")
    for each in plan["moves"][:MOST_SHOWN]:
        typer.echo(f"recalls {each['units']} of {each['quota']} from {each['from']} for {each['to'] or 'the pool'}")
    if plan["recalled"]:
        typer.echo(f"recalls all that {found['request']['region']} holds: {counted(plan['recalled'], 'unit')}")
    for each in plan["cannot"]:
        typer.echo(f"cannot: {_impossible(each)}")
    for each in plan["holds"]:
        typer.echo(
            f"keeps {each['units']} of {each['quota']} {each['period']} for {each['region']} until {each['until']}"
        )
    for each in plan["taken_back"]:
        typer.echo(_taken_back(each, is_held=bool(plan["holds"])))


def _taken_back(each: dict[str, Any], *, is_held: bool) -> str:
    soon = "at once" if not each["after_ms"] else f"in about {_duration(each['after_ms'])}"
    keeping = "" if is_held else "; --hold 1h keeps them"
    units = f"{each['units']} of {each['quota']} from {each['region']}"
    return f"demand may take back {units} {soon}: {each['reason']}{keeping}"


def _duration(milliseconds: int) -> str:
    seconds = milliseconds // 1000
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _print_result(cli: Cli, found: dict[str, Any]) -> None:
    if cli.as_json:
        cli.print_json(found)
        return
    progress = found["progress"]
    typer.echo(f"{found['id']}: {_sentence(found)}")
    if found["moves"] or progress["recalled"]:
        typer.echo(
            f"recalled {progress['recalled']}, returned {progress['returned']}, regranted {progress['regranted']}"
        )
    for each in found["moves"][:MOST_SHOWN]:
        why = f", ended: {each['reason']}" if each["reason"] else ""
        typer.echo(
            f"  {each['regranted'] if each['to'] else each['returned']} of {each['units']} of {each['quota']} "
            f"from {each['from']} to {each['to'] or 'the pool'}{why}"
        )
    for each in found.get("holds", ()):
        typer.echo(f"keeps {each['units']} of {each['quota']} for {each['region']} until {each['until']}")
    for each in found["waits_for"][:MOST_SHOWN]:
        typer.echo(f"waits for {each['region']} to {each['what']} {each['units']} of {each['quota']}{_last_seen(each)}")


def _list(cli: Cli) -> None:
    progress = {
        name: lambda each, name=name: str(each["progress"][name]) for name in ("recalled", "returned", "regranted")
    }
    columns: dict[str, Column] = {**fields("id", "mode"), "of": _target, "state": "state", **progress}
    cli.render(cli.get_all("/v1/rebalances"), columns | {"begun": "created_at"})


def _sentence(each: dict[str, Any]) -> str:
    why = f" ({each['reason']})" if each["reason"] else ""
    return (
        f"{each['mode']} of {_target(each)}, begun {each['created_at']} by {each['created_by']}: {each['state']}{why}"
    )


def _target(each: dict[str, Any]) -> str:
    request = each["request"]
    return str(request.get("quota") or request.get("region"))


def _impossible(each: dict[str, Any]) -> str:
    return f"{each['units']} of {each['quota']}: {each['region']}: {each['reason']} [{each['what']}]"


def _waits(found: dict[str, Any]) -> str:
    regions = sorted({each["region"] for each in found["waits_for"]})
    return f"waits for {', '.join(regions)}" if regions else ""


def _last_seen(each: dict[str, Any]) -> str:
    return f" (last seen {each['last_seen_at']})" if each["last_seen_at"] else " (never seen)"


def _worded(setting: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items() if value is not None) or "nothing set"


def _setting(text: str) -> tuple[str, str, int | str | None]:
    name, equals, value = text.partition("=")
    region, dot, setting = name.rpartition(".")
    if not equals or not dot or not value:
        fail(f"{text}: write it as REGION.SETTING=VALUE, such as us-east.floor=100; us-east.floor=- removes it")
    return region, setting, None if value == "-" else int(value) if value.isascii() and value.isdigit() else value
