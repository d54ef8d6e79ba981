"""`leasehold apply`: the limits document, seen as a difference before it is in force."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Key, Url, answer, asking, echo_json, keyed, text_of
from leasehold.cli.failure import fail, say

if TYPE_CHECKING:
    import httpx

MARKS = {"added": "+", "removed": "-", "changed": "~", "reordered": "~"}
LONGEST = 100


def apply(
    file: Annotated[Path, typer.Option("-f", "--file", help="The document, YAML or JSON; - for standard input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before it is applied.")] = False,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Apply a limits document: show what it changes, ask, and put it in force in every region.

    Exits with 0 if the document is in force, or with --dry-run could be. What somebody else applied between the
    question and the answer is not overwritten. The token, with the scope quota:write, is read from LEASEHOLD_TOKEN.
    """
    text = text_of(file)
    media_type = "application/json" if file.suffix == ".json" or text.lstrip()[:1] == b"{" else "application/yaml"
    if not (yes or dry_run) and (as_json or str(file) == "-"):
        fail("nobody can be asked: say --yes, or --dry-run")
    with asking(url, "quota:write") as client:
        seen = _put(client, text, {"Content-Type": media_type}, file, dry_run=True)
        found = seen.json()
        if not as_json:
            _show(found["changes"])
        if not dry_run and (found["changes"] or not found["version"]):
            _confirm(yes)
            headers = {"Content-Type": media_type, "If-Match": seen.headers["ETag"], **keyed(key)}
            found = _put(client, text, headers, file, dry_run=False).json()
            if not as_json:
                typer.echo(f"version {found['version']} is in force")
    if as_json:
        echo_json(found)


def _put(
    client: "httpx.Client", text: bytes, headers: dict[str, str], file: Path, *, dry_run: bool
) -> "httpx.Response":
    params = {"dry_run": "true"} if dry_run else {}
    response = client.put("/v1/limits", params=params, content=text, headers=headers)
    answer(response, of=str(file))
    return response


def _confirm(yes: bool) -> None:
    if not yes and not typer.confirm("Apply?"):
        say("nothing was changed")
        raise typer.Exit(1)


def _show(changes: list[dict[str, Any]]) -> None:
    if not changes:
        typer.echo("nothing changes")
    for change in changes:
        typer.echo(f"{MARKS[change['change']]} {change['path']}{_values(change)}")


def _values(change: dict[str, Any]) -> str:
    if change["change"] == "removed":
        return ""
    if change["change"] == "added":
        return f": {_short(change['after'])}"
    return f": {_short(change['before'])} → {_short(change['after'])}"


def _short(value: object) -> str:
    import json

    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
