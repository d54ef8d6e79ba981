"""`leasehold rebalance`: bring units from region to region, set who gets how much, empty a region; the plan first."""

import time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
from leasehold.cli.failure import fail, say
from protocol.counting import counted

if TYPE_CHECKING:
    import httpx

rebalance = typer.Typer(
    no_args_is_help=True, help="Bring idle units from region to region, set who gets how much, empty a region."
)

POLL_S = 0.5
INTERRUPTED = 130
SHOWN = 20
Quota = Annotated[str, typer.Argument(metavar="QUOTA", help="The key of an allowance, such as exports:tenant=acme.")]
Region = Annotated[str, typer.Argument(metavar="REGION")]
Id = Annotated[str, typer.Argument(metavar="ID", help="As `rebalance show` lists it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, and change nothing.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow it to its end; Ctrl-C ends only the following.")]
Reason = Annotated[str | None, typer.Option(help="Why; kept in the audit.")]


@rebalance.command()
def move(
    quota: Quota,
    units: Annotated[int, typer.Argument(min=1, metavar="UNITS")],
    source: Annotated[str, typer.Option("--from", metavar="REGION", help="Where they lie idle.")],
    target: Annotated[str, typer.Option("--to", metavar="REGION", help="Where they are to be.")],
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Bring so many idle units from one region to another. What is spent already is said, and the rest is moved."""
    wish = {"mode": "move", "quota": quota, "from": source, "to": target, "units": units, "reason": reason}
    _rebalance(wish, url, key, dry_run=dry_run, yes=yes, wait=wait, as_json=as_json)


@rebalance.command()
def weigh(
    quota: Annotated[str, typer.Argument(metavar="QUOTA", help="exports:tenant=acme, or exports for all of its keys.")],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="REGION.WORD=VALUE...", help="us-east.weight=3, .floor=100, .ceiling=, .pin=; - takes it away."
        ),
    ],
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Set weights, floors, ceilings and pins of regions. What is above a new ceiling is asked back."""
    said: dict[str, dict[str, int | str | None]] = {}
    for region, word, value in map(_setting, settings):
        said.setdefault(region, {})[word] = value
    wish = {"mode": "weigh", "quota": quota, "settings": said, "reason": reason}
    _rebalance(wish, url, key, dry_run=dry_run, yes=yes, wait=wait, as_json=as_json)


@rebalance.command()
def even_out(
    quota: Quota,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Bring idle units to where the demand is."""
    wish = {"mode": "even_out", "quota": quota, "reason": reason}
    _rebalance(wish, url, key, dry_run=dry_run, yes=yes, wait=wait, as_json=as_json)


@rebalance.command()
def drain(
    region: Region,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = True,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Take everything back from a region, and grant it nothing until it is restored."""
    wish = {"mode": "drain", "region": region, "reason": reason}
    _rebalance(wish, url, key, dry_run=dry_run, yes=yes, wait=wait, as_json=as_json)


@rebalance.command()
def restore(
    region: Region,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Grant to a region again that was drained."""
    wish = {"mode": "restore", "region": region, "reason": reason}
    _rebalance(wish, url, key, dry_run=dry_run, yes=yes, wait=True, as_json=as_json)


@rebalance.command(name="show")
def show_(
    id_: Annotated[str | None, typer.Argument(metavar="[ID]", help="Without it, the newest.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show how far one has come, and whose answer it waits for; or list them."""
    with asking(url, "quota:read") as client:
        if id_ is None:
            _list(every(client, "/v1/rebalances"), as_json=as_json)
            return
        found = answer(client.get(f"/v1/rebalances/{part(id_)}"))
        found = _followed(client, found) if wait and not as_json else found
    echo_json(found) if as_json else _tell(found)


@rebalance.command()
def cancel(id_: Id, as_json: Json = False, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Stop one: what is done stays done. A region that is being drained is granted to again."""
    with asking(url, "alloc:write") as client:
        found = answer(client.post(f"/v1/rebalances/{part(id_)}:cancel", json={}, headers=keyed(key)))
    echo_json(found) if as_json else _tell(found)


# --- from the plan to the end -----------------------------------------------------------------------------------------


def _rebalance(
    wish: dict[str, Any], url: str, key: str | None, *, dry_run: bool, yes: bool, wait: bool, as_json: bool
) -> None:
    with asking(url, "alloc:write") as client:
        response = client.post("/v1/rebalances", json=wish | {"dry_run": True})
        found = _accepted(response)
        if not dry_run:
            if not as_json:
                _show_plan(found)
            if not yes and not typer.confirm("Begin?"):
                say("nothing was changed")
                raise typer.Exit(1)
            headers = keyed(key) | {"If-Match": response.headers["ETag"]}
            found = _accepted(client.post("/v1/rebalances", json=wish, headers=headers))
            found = _followed(client, found, quietly=as_json) if wait else found
    if as_json:
        echo_json(found)
    elif dry_run:
        _show_plan(found)
    else:
        _tell(found)
    if found["state"] in ("partial", "cancelled"):
        raise typer.Exit(1)


def _accepted(response: "httpx.Response") -> dict[str, Any]:
    """What others did meanwhile, and what cannot be done, is told like a refusal of input, and ends the command."""
    if response.status_code in (409, 412):
        problem = response.json()
        for other in problem.get("changed", ()):
            say(f"meanwhile: {_sentence(other)}")
        for each in problem.get("cannot", ()):
            say(_cannot(each))
    return dict(answer(response))


def _followed(client: "httpx.Client", found: dict[str, Any], *, quietly: bool = False) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[waits]}"),
    )
    try:
        with Progress(*columns, console=Console(stderr=True, markup=False), disable=quietly) as bar:
            back = bar.add_task("returned", waits="")
            there = bar.add_task("regranted", waits="", visible=found["mode"] != "drain")
            while True:
                progress = found["progress"]
                bar.update(back, total=progress["recalled"], completed=progress["returned"], waits=_waits(found))
                bar.update(there, total=progress["recalled"], completed=progress["regranted"])
                if found["state"] != "running":
                    return found
                time.sleep(POLL_S)
                found = dict(answer(client.get(f"/v1/rebalances/{part(found['id'])}")))
    except KeyboardInterrupt:
        _goes_on(found["id"])


def _goes_on(id_: str) -> NoReturn:
    say(f"it goes on by itself: `leasehold rebalance show {id_}` says how far it is, `cancel` stops it")
    raise typer.Exit(INTERRUPTED)


# --- how it is told ---------------------------------------------------------------------------------------------------


def _show_plan(found: dict[str, Any]) -> None:
    plan = found["plan"]
    for before, after in zip(plan["before"], plan["after"], strict=True):
        typer.echo(f"{before['quota']} {before['period']}")
        later = {each["region"]: each["outstanding"] for each in after["regions"]}
        rows = [[each["region"], str(each["outstanding"]), str(later[each["region"]])] for each in before["regions"]]
        show(
            ["region", "holds", "is to hold"],
            [*rows, ["(nobody)", str(before["unallocated"]), str(after["unallocated"])]],
        )
    for region, setting in plan["settings_after"].items():
        typer.echo(f"{region}: {_words(plan['settings_before'][region])} → {_words(setting)}")
    for each in plan["moves"][:SHOWN]:
        typer.echo(f"recalls {each['units']} of {each['quota']} from {each['from']} for {each['to'] or 'whoever asks'}")
    if plan["recalled"]:
        typer.echo(f"recalls all that {found['asked']['region']} holds: {counted(plan['recalled'], 'unit')}")
    for each in plan["cannot"]:
        typer.echo(f"cannot: {_cannot(each)}")


def _tell(found: dict[str, Any]) -> None:
    progress = found["progress"]
    typer.echo(f"{found['id']}: {_sentence(found)}")
    if found["moves"] or progress["recalled"]:
        typer.echo(
            f"recalled {progress['recalled']}, returned {progress['returned']}, regranted {progress['regranted']}"
        )
    for each in found["moves"][:SHOWN]:
        why = f", ended: {each['reason']}" if each["reason"] else ""
        typer.echo(
            f"  {each['regranted'] if each['to'] else each['returned']} of {each['units']} of {each['quota']} "
            f"from {each['from']} to {each['to'] or 'nobody'}{why}"
        )
    for each in found["waits_for"][:SHOWN]:
        typer.echo(f"waits for {each['region']} to {each['what']} {each['units']} of {each['quota']}{_heard(each)}")


def _list(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        echo_json(rows)
        return
    columns = ["id", "mode", "of", "state", "recalled", "returned", "regranted", "begun"]
    show(
        columns,
        [
            [each["id"], each["mode"], _about(each), each["state"], *_progress(each), each["created_at"]]
            for each in rows
        ],
    )


def _progress(each: dict[str, Any]) -> list[str]:
    return [str(each["progress"][name]) for name in ("recalled", "returned", "regranted")]


def _sentence(each: dict[str, Any]) -> str:
    why = f" ({each['reason']})" if each["reason"] else ""
    return f"{each['mode']} of {_about(each)}, begun {each['created_at']} by {each['created_by']}: {each['state']}{why}"


def _about(each: dict[str, Any]) -> str:
    asked = each["request"]
    return str(asked.get("quota") or asked.get("region"))


def _cannot(each: dict[str, Any]) -> str:
    return f"{each['units']} of {each['quota']}: {each['region']}: {each['reason']} [{each['what']}]"


def _waits(found: dict[str, Any]) -> str:
    regions = sorted({each["region"] for each in found["waits_for"]})
    return f"waits for {', '.join(regions)}" if regions else ""


def _heard(each: dict[str, Any]) -> str:
    return f" (last heard {each['last_seen_at']})" if each["last_seen_at"] else " (never heard of it yet)"


def _words(setting: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items() if value is not None) or "nothing set"


def _setting(text: str) -> tuple[str, str, int | str | None]:
    name, equals, value = text.partition("=")
    region, dot, word = name.rpartition(".")
    if not equals or not dot or not value:
        fail(f"{text}: it must look like REGION.WORD=VALUE, such as us-east.floor=100; us-east.floor=- takes it away")
    return region, word, None if value == "-" else int(value) if value.isascii() and value.isdigit() else value
