"""`leasehold block`: who is denied everywhere."""

from typing import Annotated

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Key, Url, answer, asking, echo_json, keyed, part, show
from leasehold.cli.failure import fail

block = typer.Typer(no_args_is_help=True, help="Deny somebody everywhere within a second, whatever their quotas say.")
Who = Annotated[
    str, typer.Argument(metavar="FIELD=VALUE", help="Such as api_key=ak_7 or ip=203.0.113.0/24; also tenant and user.")
]


@block.command(name="list")
def list_(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List those that are in force."""
    with asking(url, "quota:read") as client:
        rows = answer(client.get("/v1/blocks"))["data"]
    if as_json:
        echo_json(rows)
        return
    columns = ["blocked", "since", "until", "reason"]
    show(
        columns,
        [
            [f"{each['field']}={each['value']}", each["created_at"], each["valid_until"] or "deleted", each["reason"]]
            for each in rows
        ],
    )


@block.command()
def add(
    who: Who,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit, and not told to whom it is for.")],
    until: Annotated[str | None, typer.Option(help="RFC 3339; until it is deleted.")] = None,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Block somebody, or change for how long and why."""
    field, value = _pair(who)
    body = {"field": field, "value": value, "reason": reason, "valid_until": until}
    with asking(url, "quota:write") as client:
        made = answer(client.post("/v1/blocks", json=body, headers=keyed(key)))
    echo_json(made) if as_json else typer.echo(f"{made['field']}={made['value']} is blocked")


@block.command()
def remove(who: Who, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Let somebody in again."""
    field, value = _pair(who)
    with asking(url, "quota:write") as client:
        answer(client.delete(f"/v1/blocks/{part(field)}/{part(value)}", headers=keyed(key)))


def _pair(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals:
        fail("it must look like FIELD=VALUE, such as api_key=ak_7")
    return field, value
