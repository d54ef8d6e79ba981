"""`leasehold apply` and `leasehold quota`: change the limits document, and look at the one in force."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.api import Cli, answer, api_command, fields, read_input
from leasehold.cli.deciding.replay import DEFAULT_TIME, Last, OnlyTenant, print_replay, replay
from leasehold.cli.output import fail

if TYPE_CHECKING:
    import httpx

commands = typer.Typer()
quota = typer.Typer(no_args_is_help=True, help="Look at quotas and the policies that use them; export the document.")

MARKS = {"added": "+", "removed": "-", "changed": "~", "reordered": "~"}
LONGEST_VALUE = 100
ALWAYS = ("name", "kind", "limit")
KINDS = {
    "allowance": ("period", "time_zone", "cap", "mode", "horizon", "report_within", "durability"),
    "rate": ("algorithm", "sharing", "slices"),
    "concurrency": ("slot_ttl",),
}


@api_command(commands, scope="quota:write", changes=True)
def apply(
    cli: Cli,
    file: Annotated[Path, typer.Option("-f", "--file", help="The document, YAML or JSON; - for standard input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change, and change nothing.")] = False,
    against_traffic: Annotated[
        str | None,
        typer.Option(help="Show what it would deny of the checks of the last 24h, 30m, ..., from the decision log."),
    ] = None,
    tenant: OnlyTenant = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before it is applied.")] = False,
) -> None:
    """Apply a limits document: show what it changes, ask, and put it in force in every region.

    Exits with 0 if the document is in force, or with --dry-run could be. If another document was applied between the
    question and the answer, the command fails and changes nothing.
    """
    text = read_input(file)
    media_type = "application/json" if file.suffix == ".json" or text.lstrip()[:1] == b"{" else "application/yaml"
    if not (yes or dry_run) and (cli.as_json or str(file) == "-"):
        fail("the command cannot ask here: use --yes, or --dry-run")
    seen = _put(cli, text, {"Content-Type": media_type}, file, dry_run=True)
    found, traffic = seen.json(), {}
    if against_traffic is not None:
        traffic = {"traffic": replay(cli, "/v1/limits:replay", against_traffic, tenant, text, media_type)}
    if not cli.as_json:
        _print_changes(found["changes"])
        _print_examples(found["examples"])
        if traffic:
            print_replay(cli, traffic["traffic"])
    if not dry_run and (found["changes"] or not found["version"]):
        cli.confirm("Apply?", yes=yes)
        found = _put(cli, text, {"Content-Type": media_type, "If-Match": seen.headers["ETag"]}, file).json()
        if not cli.as_json:
            typer.echo(f"version {found['version']} is in force")
    if cli.as_json:
        cli.print_json(found | traffic)


def _put(cli: Cli, text: bytes, headers: dict[str, str], file: Path, *, dry_run: bool = False) -> "httpx.Response":
    if dry_run:
        response = cli.client.put("/v1/limits", params={"dry_run": "true"}, content=text, headers=headers)
    else:
        response = cli.send("PUT", "/v1/limits", headers=headers, content=text)
    answer(response, file=str(file))
    return response


def _print_changes(changes: list[dict[str, Any]]) -> None:
    if not changes:
        typer.echo("nothing changes")
    for change in changes:
        typer.echo(f"{MARKS[change['change']]} {change['path']}{_values(change)}")


def _print_examples(examples: list[dict[str, Any]]) -> None:
    """Print for each example which policies match it, with the quota keys that they count."""
    for each in examples:
        found = each["explanation"]
        policies = [f"{policy['policy']} ({policy['key'] or policy['invalid']})" for policy in found["policies"]]
        subject = " ".join(f"{field}={value}" for field, value in found["subject"].items())
        typer.echo(f"example {subject}: {', '.join(policies) or 'no policy'}{_unmatched(found)}")


def _unmatched(explanation: dict[str, Any]) -> str:
    return "" if explanation["unmatched"] is None else f"; unmatched: {explanation['unmatched']}"


def _values(change: dict[str, Any]) -> str:
    if change["change"] == "removed":
        return ""
    if change["change"] == "added":
        return f": {_short(change['after'])}"
    return f": {_short(change['before'])} → {_short(change['after'])}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


# --- the document in force --------------------------------------------------------------------------------------------


@api_command(quota, scope="quota:read", name="list")
def list_quotas(cli: Cli) -> None:
    """List the quotas, their limits, and by how many policies each is used."""
    document = _document(cli)
    used = [policy["quota"] for policy in document["policies"]]
    cli.render(
        document["quotas"],
        {
            "quota": "name",
            "kind": "kind",
            "limit": _limit,
            "period": lambda each: each.get("period"),
            "policies": lambda each: str(used.count(each["name"])),
        },
    )


@api_command(quota, scope="quota:read", name="show")
def show_quota(cli: Cli, name: Annotated[str, typer.Argument(help="The quota's name.")]) -> None:
    """Show one quota, and the policies that use it."""
    document = _document(cli)
    found = next((each for each in document["quotas"] if each["name"] == name), None)
    if found is None:
        fail(f"there is no quota {name!r}")
    policies = [policy for policy in document["policies"] if policy["quota"] == name]
    if cli.as_json:
        cli.print_json({"quota": found, "policies": policies})
        return
    known = (*ALWAYS, *KINDS[found["kind"]])
    settings = [{"": field, " ": _limit(found) if field == "limit" else str(found.get(field))} for field in known]
    cli.render(settings, fields("", " "))
    cli.render(
        policies,
        {
            "policy": "name",
            "route": _matched,
            "by": lambda each: ", ".join(each["by"]) or "all",
            "cost": "cost",
            "store failure": "on_store_failure",
        },
    )


@api_command(quota, scope="quota:read", name="export")
def export_document(cli: Cli) -> None:
    """Print the whole document in force as YAML; `leasehold apply` accepts it unchanged."""
    response = cli.client.get("/v1/limits", headers={"Accept": "application/yaml"})
    if not response.is_success:
        answer(response)
    typer.echo(response.text, nl=False)


@api_command(quota, scope="quota:write", name="replay")
def replay_version(
    cli: Cli,
    version: Annotated[int, typer.Argument(min=1, help="A version of the limits document.")],
    against_traffic: Last = DEFAULT_TIME,
    tenant: OnlyTenant = None,
) -> None:
    """Show what a version of the document would deny of recent traffic, from the decision log. It changes nothing."""
    found = replay(cli, f"/v1/limits/{version}:replay", against_traffic, tenant)
    if cli.as_json:
        cli.print_json(found)
    else:
        print_replay(cli, found)


def _document(cli: Cli) -> dict[str, Any]:
    return dict(cli.get("/v1/limits")["document"])


def _limit(quota: dict[str, Any]) -> str:
    limit = quota["limit"]
    return ", ".join(f"{plan}: {value}" for plan, value in limit.items()) if isinstance(limit, dict) else str(limit)


def _matched(policy: dict[str, Any]) -> str:
    match = policy["match"]
    method = match["method"] if isinstance(match["method"], str) else "|".join(match["method"])
    rest = [f"{name} {match[name]}" for name in ("route_class", "ip", "labels") if match.get(name)]
    return " ".join([*([] if method == "*" else [method]), match["route"], *rest])
