"""`leasehold verify`: prove that the ledger is what was booked."""

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, api_command
from leasehold.cli.output import fail, print_table, progress_line
from leasehold.cli.services import owners_url
from leasehold.local_stack.plan import URL_VARIABLE

commands = typer.Typer()
POLL_S = 0.2


@api_command(commands, scope="audit:read")
def verify(
    cli: Cli,
    database: Annotated[
        bool, typer.Option("--database", help=f"Read the database that {URL_VARIABLE} names, without a coordinator.")
    ] = False,
    kept: Annotated[
        list[str] | None,
        typer.Option("--kept", metavar="NUMBER:HASH", help="A seal that you kept and that must exist; repeatable."),
    ] = None,
) -> None:
    """Prove the whole ledger from its rows, and name the first place that is not as it was booked.

    Exits with 0 only if all is intact. With --database it needs no coordinator and no token, and trusts none: it reads
    every row itself.

    Example: leasehold verify --kept 1047:8c3f0b… --json
    """
    seals = [kept_seal(text) for text in kept or ()]
    found = _verify_database(seals) if database else _verify_by_coordinator(cli, seals)
    if cli.as_json:
        cli.print_json(found)
    else:
        _print(found)
    if not found["intact"]:
        raise typer.Exit(1)


def kept_seal(text: str) -> dict[str, Any]:
    number, _, digest = text.strip().partition(":")
    if not (re.fullmatch("0*[1-9][0-9]{0,14}", number) and re.fullmatch("[0-9a-fA-F]{64}", digest)):
        fail(f"--kept {text!r} is not NUMBER:HASH: a seal's number, a colon and its hash of 64 hexadecimal digits")
    return {"number": int(number), "hash": digest.lower()}


def _verify_database(kept: list[dict[str, Any]]) -> dict[str, Any]:
    import asyncpg
    import msgspec

    try:
        return dict(msgspec.to_builtins(asyncio.run(_verify(owners_url(), kept))))
    except asyncpg.UndefinedTableError:
        fail("the database has no such schema: run `leasehold migrate` first")
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        fail(f"the ledger could not be read: {str(error) or type(error).__name__}")


async def _verify(url: str, kept: list[dict[str, Any]]) -> object:
    import msgspec

    from coordinator.database.connection import read_sums_as_integers
    from coordinator.proof.rules import KeptSeal
    from coordinator.proof.verify import verify as verify_ledger
    from migrations.connect import connect

    connection = await connect(url)
    try:
        await read_sums_as_integers(connection)
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return await verify_ledger(connection, datetime.now(UTC), msgspec.convert(kept, list[KeptSeal]))
    finally:
        await connection.close()


def _verify_by_coordinator(cli: Cli, kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Wait as long as it takes: a large ledger is read for minutes. Ctrl-C ends only the waiting."""
    verification = cli.post("/v1/verifications", {"kept_seals": kept})
    if verification.get("kept_seals", []) != kept:
        fail("this coordinator compares no kept seals: it is older than this command; use --database")
    began = time.monotonic()
    with progress_line() as show:
        while verification["result"] is None:
            show(f"verifying the ledger, for {time.monotonic() - began:.0f} s")
            time.sleep(POLL_S)
            verification = cli.get(f"/v1/verifications/{verification['id']}")
    return dict(verification["result"])


def _print(found: dict[str, Any]) -> None:
    names = ("lanes", "reports", "transfers", "movements", "seals", "sealed_position", "newest_seal")
    values = ("-" if found[name] is None else str(found[name]) for name in names)
    print_table(["proven", ""], [[name.replace("_", " "), value] for name, value in zip(names, values, strict=True)])
    for part in found.get("not_compared", ()):
        typer.echo(f"not compared: {part}")
    if found["intact"]:
        typer.echo("intact: every row is as it was booked")
        return
    fault = found["fault"]
    places = ("table", "key", "epoch", "lane", "seq", "seal", "period")
    place = ", ".join(f"{name} {fault[name]}" for name in places if name in fault)
    typer.echo(f"NOT INTACT, first at {place}: {fault['kind']}: {fault['reason']}")
