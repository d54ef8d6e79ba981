"""`leasehold webhook` and `leasehold installation`: who receives events, and whether this database may send them."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, api_command, fields, person, segment

webhook = typer.Typer(no_args_is_help=True, help="Send events of the ledger to other programs.")
installation = typer.Typer(no_args_is_help=True, help="Tell an installation from a copy of its database.")

WebhookId = Annotated[str, typer.Argument(metavar="ID", help="An id of `webhook list`.")]
WEBHOOK: dict[str, Column] = {
    **fields("id", "url"),
    "events": lambda each: ", ".join(each["events"]),
    **fields("paused", "waiting", "dead"),
    "by": person("created_by"),
}

DELIVERY: dict[str, Column] = {
    "id": "event",
    **fields("kind", "occurred_at", "attempts"),
    "delivered": "delivered_at",
    "dead": "dead_at",
    "answer": lambda each: each["error"] or each["status"],
}


@api_command(webhook, scope="admin", name="list")
def list_webhooks(cli: Cli) -> None:
    """List the webhooks, and how many deliveries of each are waiting and dead."""
    cli.render(cli.get_all("/v1/webhooks"), WEBHOOK)


@api_command(webhook, scope="admin", name="add", changes=True)
def add_webhook(
    cli: Cli,
    target: Annotated[str, typer.Argument(metavar="URL", help="https://; http:// on this machine only.")],
    events: Annotated[list[str], typer.Argument(help="Such as threshold.reached, period.closed.")],
) -> None:
    """Register a webhook. The secret is printed now, and never again."""
    _print_secret(cli, cli.post("/v1/webhooks", {"url": target, "events": events}))


@api_command(webhook, scope="admin", name="rotate", changes=True)
def rotate_secret(cli: Cli, webhook_id: WebhookId) -> None:
    """Make a new secret, printed now and never again. For a day, deliveries are signed with the old one as well."""
    _print_secret(cli, cli.post(f"/v1/webhooks/{segment(webhook_id)}:rotate"))


@api_command(webhook, scope="admin", name="pause", changes=True)
def pause_webhook(
    cli: Cli,
    webhook_id: WebhookId,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the deliveries.")] = False,
) -> None:
    """Let deliveries wait, or resume them."""
    action = "resume" if resume else "pause"
    cli.render(cli.post(f"/v1/webhooks/{segment(webhook_id)}:{action}"), WEBHOOK)


@api_command(webhook, scope="admin", name="deliveries")
def list_deliveries(
    cli: Cli,
    webhook_id: WebhookId,
    dead: Annotated[bool, typer.Option("--dead", help="Only those that are not tried again.")] = False,
) -> None:
    """List the deliveries of the last 40 days: when each was tried, and what the receiver answered."""
    cli.render(cli.get_all(f"/v1/webhooks/{segment(webhook_id)}/deliveries", dead=dead), DELIVERY)


@api_command(webhook, scope="admin", name="replay", changes=True)
def replay_deliveries(
    cli: Cli,
    webhook_id: WebhookId,
    events: Annotated[
        list[str] | None, typer.Argument(help="The ids of events.", show_default="all dead deliveries")
    ] = None,
) -> None:
    """Send dead deliveries again."""
    done = cli.post(f"/v1/webhooks/{segment(webhook_id)}:replay", {"events": events or []})
    cli.report(done, f"deliveries to be sent again: {done['deliveries']}")


@api_command(webhook, scope="admin", name="delete", changes=True)
def delete_webhook(cli: Cli, webhook_id: WebhookId) -> None:
    """Delete a webhook and the deliveries that wait for it."""
    cli.delete(f"/v1/webhooks/{segment(webhook_id)}")


def _print_secret(cli: Cli, made: dict[str, Any]) -> None:
    cli.render(made, WEBHOOK)
    if not cli.as_json:
        typer.echo(f"secret: {made['secret']}")


# --- installation -----------------------------------------------------------------------------------------------------


@api_command(installation, scope="admin", name="show")
def show_installation(cli: Cli) -> None:
    """Show the installation's id, and whether webhooks are sent."""
    _print_installation(cli, cli.get("/v1/installation"))


@api_command(installation, scope="admin", name="confirm", changes=True)
def confirm_installation(
    cli: Cli,
    new_id: Annotated[
        bool, typer.Option("--new-id", help="This copy is an installation of its own, such as a staging system.")
    ] = False,
) -> None:
    """Confirm that this coordinator's database is the installation, so that webhooks are sent from it.

    Delete or change the webhooks of a copy first: its events would reach the receivers of the original.
    """
    _print_installation(cli, cli.post("/v1/installation:confirm", {"new_id": new_id}))


def _print_installation(cli: Cli, found: dict[str, Any]) -> None:
    if found["is_confirmed"]:
        cli.report(found, f"installation {found['id']}, confirmed at {found['confirmed_at']}")
    else:
        cli.report(found, f"installation {found['id']} is not confirmed, and no webhooks are sent: {found['reason']}")
