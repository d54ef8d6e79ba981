"""`leasehold webhook`: whom the coordinator tells of what happens to the books."""

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

webhook = typer.Typer(no_args_is_help=True, help="Let the coordinator tell others what happens to the books.")
Id = Annotated[str, typer.Argument(metavar="ID", help="As `webhook list` shows it.")]
SCOPE = "admin"


@webhook.command(name="list")
def list_(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List them, with how much waits for each, and how much was not taken."""
    with asking(url, SCOPE) as client:
        rows = every(client, "/v1/webhooks")
    echo_json(rows) if as_json else _show(rows)


@webhook.command()
def add(
    target: Annotated[str, typer.Argument(metavar="URL", help="https://; http:// on this machine alone.")],
    events: Annotated[list[str], typer.Argument(help="Such as threshold.reached, period.closed.")],
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Register one. The secret is printed now, and never again."""
    with asking(url, SCOPE) as client:
        made = answer(client.post("/v1/webhooks", json={"url": target, "events": events}, headers=keyed(key)))
    _show_secret(made, as_json)


@webhook.command()
def rotate(webhook_id: Id, as_json: Json = False, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Make a new secret, printed now and never again. The old one signs as well for a day."""
    _show_secret(_did(webhook_id, "rotate", key, url), as_json)


@webhook.command()
def pause(
    webhook_id: Id,
    resume: Annotated[bool, typer.Option("--resume", help="Go on.")] = False,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Let what happens wait, or go on."""
    found = _did(webhook_id, "resume" if resume else "pause", key, url)
    echo_json(found) if as_json else _show([found])


@webhook.command()
def replay(
    webhook_id: Id,
    events: Annotated[list[str] | None, typer.Argument(help="Only these; all that are dead.")] = None,
    as_json: Json = False,
    key: Key = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Tell dead letters once more."""
    done = _did(webhook_id, "replay", key, url, json={"events": events or []})
    echo_json(done) if as_json else typer.echo(f"{done['deliveries']} are told once more")


@webhook.command()
def delete(webhook_id: Id, key: Key = None, url: Url = DEFAULT_URL) -> None:
    """Tell it nothing any more, and forget what waits for it."""
    with asking(url, SCOPE) as client:
        answer(client.delete(f"/v1/webhooks/{part(webhook_id)}", headers=keyed(key)))


def _did(webhook_id: str, deed: str, key: str | None, url: str, **body: Any) -> Any:
    with asking(url, SCOPE) as client:
        return answer(client.post(f"/v1/webhooks/{part(webhook_id)}:{deed}", headers=keyed(key), **body))


def _show_secret(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo_json(made)
    else:
        _show([made])
        typer.echo(f"secret: {made['secret']}")


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ["id", "url", "events", "paused", "waiting", "dead"]
    show(
        columns, [[", ".join(each[name]) if name == "events" else str(each[name]) for name in columns] for each in rows]
    )
