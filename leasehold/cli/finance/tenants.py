"""`leasehold tenant`: the names, ids in other systems and addresses of tenants, as statements show them."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, api_command, fields, pairs, segment

tenant = typer.Typer(no_args_is_help=True, help="Register who tenants are, for statements, spreadsheets and webhooks.")

TenantId = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant, as services name it.")]


def _external_ids(row: dict[str, Any]) -> str:
    return ", ".join(f"{system}={id_}" for system, id_ in row["external_ids"].items())


TENANT: dict[str, Column] = {
    **fields("tenant", "name"),
    "external ids": _external_ids,
    "address": lambda row: ", ".join(row["address"]),
    "time zone": "time_zone",
}


@api_command(tenant, scope="usage:read", name="list")
def list_tenants(cli: Cli) -> None:
    """List the registered tenants."""
    cli.render(cli.get_all("/v1/tenants"), TENANT)


@api_command(tenant, scope="usage:read", name="show")
def show_tenant(cli: Cli, name: TenantId) -> None:
    """Show what is registered of a tenant."""
    cli.render(cli.get(f"/v1/tenants/{segment(name)}"), TENANT)


@api_command(tenant, scope="tenant:write", name="set", changes=True)
def set_tenant(
    cli: Cli,
    tenant_id: TenantId,
    name: Annotated[str, typer.Option(help="The name on paper, such as Acme GmbH.")],
    external_id: Annotated[
        list[str] | None, typer.Option(metavar="SYSTEM=ID", help="An id in another system, such as stripe=cus_9s6.")
    ] = None,
    address: Annotated[list[str] | None, typer.Option(help="A line of the address; repeatable.")] = None,
    time_zone: Annotated[str, typer.Option("--time-zone", help="The zone of times on paper.")] = "UTC",
) -> None:
    """Register a tenant, in place of what is registered of it."""
    ids = pairs(external_id or (), "--external-id SYSTEM=ID, such as stripe=cus_9s6")
    body = {"name": name, "external_ids": ids, "address": address or [], "time_zone": time_zone}
    cli.render(cli.put(f"/v1/tenants/{segment(tenant_id)}", body), TENANT)


@api_command(tenant, scope="tenant:write", name="remove", changes=True)
def remove_tenant(cli: Cli, name: TenantId) -> None:
    """Delete what is registered of a tenant. Its usage stays."""
    cli.delete(f"/v1/tenants/{segment(name)}")
