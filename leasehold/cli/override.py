"""`leasehold override`: another limit for somebody, for a while."""

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
from leasehold.cli.failure import fail

override = typer.Typer(
    no_args_is_help=True, help="Give somebody another limit for a while, now or announced for later."
)


@override.command(name="list")
def list_(
    quota: Annotated[str | None, typer.Option(help="Only of this quota.")] = None,
    over: Annotated[bool, typer.Option("--over", help="Also those that are over.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List those that are or will be in force."""
    params = ({"quota": quota} if quota else {}) | ({"over": "true"} if over else {})
    with asking(url, "quota:read") as client:
        rows = every(client, "/v1/overrides", **params)
    echo_json(rows) if as_json else _show(rows)


@override.command()
def create(
    quota: Annotated[str, typer.Argument(help="The quota's name.")],
    limit: Annotated[str, typer.Argument(help="Units, or a rate such as '100/second, burst 200'.")],
    reason: Annotated[str, typer.Option(help="Why; kept in the audit.")],
    subject: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="FIELD=VALUE", help="Whom; may be repeated. Without it, everybody."),
    ] = None,
    valid_from: Annotated[str | None, typer.Option("--from", help="RFC 3339; now.")] = None,
    valid_until: Annotated[str | None, typer.Option("--until", help="RFC 3339; until it is deleted.")] = None,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Give somebody another limit."""
    body = {
        "quota": quota,
        "subject": dict(_pair(text) for text in subject or []),
        "limit": int(limit) if limit.isascii() and limit.isdigit() else limit,
        "reason": reason,
        "valid_from": valid_from,
        "valid_until": valid_until,
    }
    with asking(url, "quota:write") as client:
        made = answer(client.post("/v1/overrides", json=body, headers=keyed(key)))
    echo_json(made) if as_json else _show([made])


@override.command()
def delete(
    override_id: Annotated[str, typer.Argument(metavar="ID", help="As `override list` shows it.")],
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """End one before its time, or take back one that was announced."""
    with asking(url, "quota:write") as client:
        answer(client.delete(f"/v1/overrides/{part(override_id)}", headers=keyed(key)))


def _pair(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals:
        fail("--for: it must look like FIELD=VALUE, such as tenant=acme")
    return field, value


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ["id", "quota", "for", "limit", "from", "until", "reason"]
    show(columns, [_row(each) for each in rows])


def _row(each: dict[str, Any]) -> list[str]:
    subject = ", ".join(f"{field}={value}" for field, value in each["subject"].items()) or "everybody"
    validity = [each["valid_from"], each["valid_until"] or "deleted"]
    return [each["id"], each["quota"], subject, str(each["limit"]), *validity, each["reason"]]
