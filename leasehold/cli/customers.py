"""`leasehold subscription`, `override`, `reset` and `block`: plans of tenants, other limits for a while, and blocks."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, api_command, fields, pair, pairs, person, segment
from protocol.messages import MAX_RESETS

subscription = typer.Typer(
    no_args_is_help=True, help="Put tenants on plans. A tenant without a plan is on the document's default plan."
)
override = typer.Typer(no_args_is_help=True, help="Give a subject another limit for a while, from now or later.")
reset = typer.Typer(
    no_args_is_help=True, help="Let every region forget what a rate has counted, such as the failures of a log-in."
)
block = typer.Typer(no_args_is_help=True, help="Deny a subject everywhere within a second, whatever its quotas say.")

Tenant = Annotated[str, typer.Argument(help="The tenant, as services name it.")]
Blocked = Annotated[
    str, typer.Argument(metavar="FIELD=VALUE", help="Such as api_key=ak_7 or ip=203.0.113.0/24; also tenant and user.")
]
BLOCK_EXAMPLE = "FIELD=VALUE, such as api_key=ak_7"


def _subject(override: dict[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in override["subject"].items()) or "everybody"


OVERRIDE: dict[str, Column] = {
    **fields("id", "quota"),
    "for": _subject,
    "limit": "limit",
    "from": "valid_from",
    "until": lambda each: each["valid_until"] or "no end",
    "reason": "reason",
    "by": person("created_by"),
}


# --- subscriptions ----------------------------------------------------------------------------------------------------


@api_command(subscription, scope="quota:read", name="list")
def list_subscriptions(cli: Cli) -> None:
    """List the tenants and their plans."""
    cli.render(cli.get_all("/v1/subscriptions"), {"tenant": "tenant", "plan": "plan", "since": "changed_at"})


@api_command(subscription, scope="quota:read", name="show")
def show_subscription(cli: Cli, tenant: Tenant) -> None:
    """Show one tenant's plan."""
    found = cli.get(f"/v1/subscriptions/{segment(tenant)}")
    cli.report(found, found["plan"])


@api_command(subscription, scope="quota:write", name="set", changes=True)
def set_subscription(
    cli: Cli,
    tenant: Tenant,
    plan: Annotated[str, typer.Argument(help="A plan of the document.")],
    began_at: Annotated[
        str | None, typer.Option(help="When a new subscription began, as an RFC 3339 time.", show_default="now")
    ] = None,
) -> None:
    """Put a tenant on a plan, or move it to another."""
    body = {"plan": plan} | ({"began_at": began_at} if began_at else {})
    found = cli.put(f"/v1/subscriptions/{segment(tenant)}", body)
    cli.report(found, f"{found['tenant']} is on {found['plan']}")


@api_command(subscription, scope="quota:write", name="remove", changes=True)
def remove_subscription(cli: Cli, tenant: Tenant) -> None:
    """Take a tenant off its plan. It is on the default plan from then on."""
    cli.delete(f"/v1/subscriptions/{segment(tenant)}")


# --- overrides --------------------------------------------------------------------------------------------------------


@api_command(override, scope="quota:read", name="list")
def list_overrides(
    cli: Cli,
    quota: Annotated[str | None, typer.Option(help="Only overrides of this quota.")] = None,
    over: Annotated[bool, typer.Option("--over", help="Include overrides that have ended.")] = False,
) -> None:
    """List the overrides that are or will be in force."""
    cli.render(cli.get_all("/v1/overrides", quota=quota, over=over), OVERRIDE)


@api_command(override, scope="quota:write", name="create", changes=True)
def create_override(
    cli: Cli,
    quota: Annotated[str, typer.Argument(help="The quota's name.")],
    limit: Annotated[str, typer.Argument(help="Units, or a rate such as '100/second, burst 200'.")],
    reason: Annotated[str, typer.Option(help="The reason, which the audit log keeps.")],
    subject: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="FIELD=VALUE", help="The subject; repeatable.", show_default="every subject"),
    ] = None,
    valid_from: Annotated[str | None, typer.Option("--from", help="An RFC 3339 time.", show_default="now")] = None,
    valid_until: Annotated[
        str | None, typer.Option("--until", help="An RFC 3339 time.", show_default="until it is deleted")
    ] = None,
) -> None:
    """Give a subject another limit."""
    body = {
        "quota": quota,
        "subject": pairs(subject or [], "--for FIELD=VALUE, such as tenant=acme"),
        "limit": int(limit) if limit.isascii() and limit.isdigit() else limit,
        "reason": reason,
        "valid_from": valid_from,
        "valid_until": valid_until,
    }
    cli.render(cli.post("/v1/overrides", body), OVERRIDE)


@api_command(override, scope="quota:write", name="delete", changes=True)
def delete_override(
    cli: Cli, override_id: Annotated[str, typer.Argument(metavar="ID", help="An id of `override list`.")]
) -> None:
    """End an override before its time, or delete one that has not begun."""
    cli.delete(f"/v1/overrides/{segment(override_id)}")


# --- resets -----------------------------------------------------------------------------------------------------------

RESET: dict[str, Column] = {
    "at": "created_at",
    "by": person("created_by"),
    "quota": "quota",
    "for": _subject,
    "reason": "reason",
}


@api_command(reset, scope="quota:read", name="list")
def list_resets(cli: Cli) -> None:
    """List the resets of the last seven days, the oldest first."""
    page = cli.get("/v1/resets")
    found = page["data"]
    while len(page["data"]) == MAX_RESETS:  # the last one again: with the newest number the coordinator would wait
        page = cli.get("/v1/resets", since=page["version"] - 1)
        found += page["data"][1:]
    cli.render(found, RESET)


@api_command(reset, scope="quota:write", name="create", changes=True)
def create_reset(
    cli: Cli,
    quota: Annotated[str, typer.Argument(help="The name of a quota of kind rate.")],
    reason: Annotated[str, typer.Option(help="The reason, which the audit log keeps.")],
    subject: Annotated[
        list[str],
        typer.Option("--for", metavar="FIELD=VALUE", help="A field that the quota is counted by; repeatable."),
    ],
) -> None:
    """Let every region forget, within a second, what a rate has counted of a subject."""
    counted_by = pairs(subject, "--for FIELD=VALUE, such as user=jane")
    cli.render(cli.post("/v1/resets", {"quota": quota, "subject": counted_by, "reason": reason}), RESET)


# --- blocks -----------------------------------------------------------------------------------------------------------


@api_command(block, scope="quota:read", name="list")
def list_blocks(cli: Cli) -> None:
    """List the blocks that are in force."""
    cli.render(
        cli.get("/v1/blocks")["data"],
        {
            "blocked": lambda each: f"{each['field']}={each['value']}",
            "since": "created_at",
            "until": lambda each: each["valid_until"] or "no end",
            "reason": "reason",
            "by": person("created_by"),
        },
    )


@api_command(block, scope="quota:write", name="add", changes=True)
def add_block(
    cli: Cli,
    blocked: Blocked,
    reason: Annotated[str, typer.Option(help="The reason, which the audit log keeps and the subject does not see.")],
    until: Annotated[str | None, typer.Option(help="An RFC 3339 time.", show_default="until it is removed")] = None,
) -> None:
    """Block a subject, or change the end and the reason of its block."""
    field, value = pair(blocked, BLOCK_EXAMPLE)
    body = {"field": field, "value": value, "reason": reason, "valid_until": until}
    made = cli.post("/v1/blocks", body)
    cli.report(made, f"{made['field']}={made['value']} is blocked")


@api_command(block, scope="quota:write", name="remove", changes=True)
def remove_block(cli: Cli, blocked: Blocked) -> None:
    """Remove a block."""
    field, value = pair(blocked, BLOCK_EXAMPLE)
    cli.delete(f"/v1/blocks/{segment(field)}/{segment(value)}")
