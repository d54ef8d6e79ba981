"""`leasehold token`: tokens are made in the database, because the first one cannot be requested over HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import UUID

import typer

from leasehold.cli.environment import secret_of
from leasehold.cli.output import fail, print_table
from leasehold.cli.up import default_data_directory
from leasehold.local_stack.plan import URL_VARIABLE

if TYPE_CHECKING:
    from coordinator.database.connection import Connection

Result = TypeVar("Result")

token = typer.Typer(
    no_args_is_help=True,
    help="Create, list and revoke the tokens of the coordinator's API.\n\n"
    f"The database is that of {URL_VARIABLE} (the owner's URL), or else that of a running `leasehold up`.",
)
Data = Annotated[Path | None, typer.Option(help="The data directory of a running `leasehold up`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@token.command()
def create(
    scope: Annotated[list[str], typer.Option(help="A scope, such as usage:read; repeatable.")],
    note: Annotated[str, typer.Option(help="A note that the list shows.")] = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Create a token. It is printed now and never again: only its hash is stored."""
    from coordinator.access.issue_token import issue_token

    issued = _with_database(data, lambda connection: issue_token(connection, scope, note, datetime.now(UTC)))
    typer.echo(json.dumps({"id": str(issued.id), "token": issued.token}) if as_json else issued.token)


@token.command(name="list")
def list_(data: Data = None, as_json: Json = False) -> None:
    """List all tokens with their scopes. The tokens themselves are not stored."""
    from coordinator.access.list_tokens import list_tokens

    rows = [_as_json(known._asdict()) for known in _with_database(data, list_tokens)]
    typer.echo(json.dumps(rows)) if as_json else _print(rows)


@token.command()
def revoke(
    token_id: Annotated[UUID, typer.Argument(help="An id of `token list`.")], data: Data = None, as_json: Json = False
) -> None:
    """Revoke a token. The next request with it is rejected."""
    from coordinator.access.revoke_token import revoke_token

    if not _with_database(data, lambda connection: revoke_token(connection, token_id, datetime.now(UTC))):
        fail(f"there is no token with the id {token_id}")
    typer.echo(json.dumps({"id": str(token_id), "revoked": True}) if as_json else f"{token_id} is revoked")


def _with_database(data: Path | None, operation: "Callable[[Connection], Awaitable[Result]]") -> Result:
    import asyncpg

    try:
        return asyncio.run(_connected(_database_url(data), operation))
    except asyncpg.UndefinedTableError:
        fail("the database has no schema yet: run `leasehold migrate` first")
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        fail(str(error) or type(error).__name__)


async def _connected(url: str, operation: "Callable[[Connection], Awaitable[Result]]") -> Result:
    from migrations.connect import connect

    connection = await connect(url)
    try:
        return await operation(connection)
    finally:
        await connection.close()


def _database_url(data: Path | None) -> str:
    url = secret_of(URL_VARIABLE) if data is None else None
    if url:
        return url
    stack = (data or default_data_directory()) / "stack.json"
    if not stack.exists():
        fail(f"{URL_VARIABLE} is not set, and no `leasehold up` is running ({stack} is not there)")
    return str(json.loads(stack.read_text())["postgres"])


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, list | None) else str(value) for name, value in row.items()}


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ["id", "scopes", "note", "created", "revoked"]
    print_table(columns, [[each["id"], " ".join(each["scopes"]), each["note"], *_moments(each)] for each in rows])


def _moments(token: dict[str, Any]) -> list[str]:
    return [str(token[name] or "")[:16] for name in ("created_at", "revoked_at")]
