"""`leasehold adjustment`: correct the books by a decision of two people."""

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

adjustment = typer.Typer(no_args_is_help=True, help="Correct the books: one proposes, and another approves.")
Id = Annotated[str, typer.Argument(metavar="ID", help="As `adjustment list` shows it.")]


@adjustment.command(name="list")
def list_(
    state: Annotated[
        str | None, typer.Option(help="Only those: `proposed`, `approved`, `withdrawn` or `expired`.")
    ] = None,
    period: Annotated[str | None, typer.Option(help="Only those about this period.")] = None,
    quota: Annotated[str | None, typer.Option(help="Only those of this quota key.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List them in the order in which they were proposed."""
    only = {name: value for name, value in (("state", state), ("period", period), ("quota", quota)) if value}
    with asking(url, "usage:read") as client:
        rows = every(client, "/v1/adjustments", **only)
    echo_json(rows) if as_json else _show(rows)


@adjustment.command(name="show")
def show_(adjustment_id: Id, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show all that is known of one."""
    with asking(url, "usage:read") as client:
        found = answer(client.get(_path(adjustment_id)))
    echo_json(found) if as_json else show(["", ""], [[name, str(value)] for name, value in found.items() if value])


@adjustment.command()
def propose(
    kind: Annotated[str, typer.Argument(help="`credit`, `debit` or `write_off`.")],
    quota: Annotated[str, typer.Argument(help="The quota key, such as exports:tenant=acme.")],
    period: Annotated[str, typer.Argument(help="The period that it is about, such as 2026-10.")],
    units: Annotated[int, typer.Argument(help="How many.")],
    reason: Annotated[str, typer.Option(help="Why.")],
    document: Annotated[str, typer.Option(help="Where somebody finds what it rests on: a ticket, a file.")],
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Propose one. Nothing is moved until somebody else approves it."""
    body = {"quota": quota, "period": period, "kind": kind, "units": units, "reason": reason, "document": document}
    with asking(url, "adjust:propose") as client:
        made = answer(client.post("/v1/adjustments", json=body, headers=keyed(key)))
    echo_json(made) if as_json else _show([made])


@adjustment.command()
def approve(adjustment_id: Id, as_json: Json = False, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Approve what somebody else has proposed: the units are moved."""
    _end(adjustment_id, "approve", as_json, key, url)


@adjustment.command()
def withdraw(adjustment_id: Id, as_json: Json = False, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Take back what nobody has approved yet."""
    _end(adjustment_id, "withdraw", as_json, key, url)


def _end(adjustment_id: str, how: str, as_json: bool, key: str | None, url: str) -> None:
    with asking(url, f"adjust:{'approve' if how == 'approve' else 'propose'}") as client:
        ended = answer(client.post(f"{_path(adjustment_id)}:{how}", headers=keyed(key)))
    echo_json(ended) if as_json else _show([ended])


def _path(adjustment_id: str) -> str:
    return f"/v1/adjustments/{part(adjustment_id)}"


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ["id", "state", "kind", "units", "quota", "period", "booked_in", "document"]
    show(columns, [[str(each[name] or "") for name in columns] for each in rows])
