"""`leasehold installation`: which installation a coordinator serves, and that its database is no copy."""

from typing import Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Key, Url, answer, asking, echo_json, keyed

installation = typer.Typer(no_args_is_help=True, help="Tell an installation from a copy of its database.")
SCOPE = "admin"


@installation.command()
def show(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show the installation's id, and whether webhooks are sent."""
    with asking(url, SCOPE) as client:
        _show(answer(client.get("/v1/installation")), as_json)


@installation.command()
def confirm(
    new_id: Annotated[
        bool, typer.Option("--new-id", help="This copy is an installation of its own, such as a staging system.")
    ] = False,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Confirm that this coordinator's database is the installation, so that webhooks are sent from it.

    Delete or change the webhooks of a copy first: its events would reach the receivers of the original.
    """
    with asking(url, SCOPE) as client:
        body = {"new_id": new_id}
        _show(answer(client.post("/v1/installation:confirm", json=body, headers=keyed(key))), as_json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo_json(found)
    elif found["is_confirmed"]:
        typer.echo(f"installation {found['id']}, confirmed at {found['confirmed_at']}")
    else:
        typer.echo(f"installation {found['id']} is not confirmed, and no webhooks are sent: {found['reason']}")
