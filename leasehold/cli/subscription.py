"""`leasehold subscription`: who is on which plan."""

from typing import Annotated

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

subscription = typer.Typer(
    no_args_is_help=True, help="Put tenants on plans. Who is on none is on the document's default plan."
)
Tenant = Annotated[str, typer.Argument(help="The tenant, as services name it.")]


@subscription.command(name="list")
def list_(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List who is on which plan."""
    with asking(url, "quota:read") as client:
        rows = every(client, "/v1/subscriptions")
    if as_json:
        echo_json(rows)
        return
    show(["tenant", "plan", "since"], [[each["tenant"], each["plan"], each["changed_at"]] for each in rows])


@subscription.command(name="show")
def show_(tenant: Tenant, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show one tenant's plan."""
    with asking(url, "quota:read") as client:
        found = answer(client.get(f"/v1/subscriptions/{part(tenant)}"))
    echo_json(found) if as_json else typer.echo(found["plan"])


@subscription.command(name="set")
def set_(
    tenant: Tenant,
    plan: Annotated[str, typer.Argument(help="A plan of the document.")],
    began_at: Annotated[
        str | None, typer.Option(help="RFC 3339: when one that is new here began. Now unless it says so.")
    ] = None,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Put a tenant on a plan, or move it to another."""
    body = {"plan": plan} | ({"began_at": began_at} if began_at else {})
    with asking(url, "quota:write") as client:
        put = answer(client.put(f"/v1/subscriptions/{part(tenant)}", json=body, headers=keyed(key)))
    echo_json(put) if as_json else typer.echo(f"{put['tenant']} is on {put['plan']}")


@subscription.command()
def remove(tenant: Tenant, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Take a tenant off its plan: it is on the default plan from then on."""
    with asking(url, "quota:write") as client:
        answer(client.delete(f"/v1/subscriptions/{part(tenant)}", headers=keyed(key)))
