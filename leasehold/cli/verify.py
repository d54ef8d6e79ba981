"""`leasehold verify`: are the books what was booked?"""

import asyncio
import os
import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Url, answer, asking
from leasehold.cli.failure import fail
from leasehold.local_stack.plan import URL_VARIABLE

POLL_S = 0.2


def verify(
    url: Url = DEFAULT_URL,
    database: Annotated[
        bool, typer.Option("--database", help=f"Read the database that {URL_VARIABLE} names, and ask nobody.")
    ] = False,
    kept: Annotated[
        list[str] | None,
        typer.Option("--kept", metavar="NUMBER:HASH", help="A seal that you kept; it must still be there. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Prove the whole ledger from nothing, and name the first place that is not as it was booked.

    Exits with 0 only if all is intact. The token, with the scope audit:read, is read from LEASEHOLD_TOKEN. With
    --database it needs no coordinator and trusts none: it reads every row itself.
    """
    import msgspec

    seals = [_kept_seal(text) for text in kept or ()]
    found = _by_ourselves(seals) if database else _by_the_coordinator(url, seals)
    typer.echo(msgspec.json.encode(found).decode()) if as_json else _show(found)
    if not found["intact"]:
        raise typer.Exit(1)


def _kept_seal(text: str) -> dict[str, Any]:
    number, _, digest = text.strip().partition(":")
    if not (re.fullmatch("0*[1-9][0-9]{0,14}", number) and re.fullmatch("[0-9a-fA-F]{64}", digest)):
        fail(f"--kept {text!r} is not NUMBER:HASH: a seal's number, a colon and its hash of 64 hexadecimal digits")
    return {"number": int(number), "hash": digest.lower()}


def _by_ourselves(kept: list[dict[str, Any]]) -> dict[str, Any]:
    import asyncpg
    import msgspec

    url = os.environ.get(URL_VARIABLE)
    if not url:
        fail(
            f"{URL_VARIABLE} is not set; it must be the owner's, such as postgresql://owner:secret@127.0.0.1:5432/leasehold"
        )
    try:
        return dict(msgspec.to_builtins(asyncio.run(_read(url, kept))))
    except asyncpg.UndefinedTableError:
        fail("the database has no such schema: run `leasehold migrate` first")
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        fail(f"the books could not be read: {str(error) or type(error).__name__}")


async def _read(url: str, kept: list[dict[str, Any]]) -> object:
    import asyncpg
    import msgspec

    from coordinator.database.connection import read_sums_as_integers
    from coordinator.proof.rules import KeptSeal
    from coordinator.proof.verify import verify as proven

    connection = await asyncpg.connect(url)
    try:
        await read_sums_as_integers(connection)
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return await proven(connection, datetime.now(UTC), msgspec.convert(kept, list[KeptSeal]))
    finally:
        await connection.close()


def _by_the_coordinator(url: str, kept: list[dict[str, Any]]) -> dict[str, Any]:
    """However long it takes: a large ledger is read for minutes, and Ctrl-C ends only the asking."""
    with asking(url, "audit:read") as client:
        asked = answer(client.post("/v1/verifications", json={"kept_seals": kept}))
        if asked.get("kept_seals", []) != kept:
            fail("this coordinator compares no kept seals: it is older than this command; use --database")
        while asked["result"] is None:
            time.sleep(POLL_S)
            asked = answer(client.get(f"/v1/verifications/{asked['id']}"))
        return dict(asked["result"])


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("proven"), Column("", overflow="fold"), box=None)
    for name in ("lanes", "reports", "transfers", "movements", "seals", "sealed_position", "newest_seal"):
        table.add_row(name.replace("_", " "), "-" if found[name] is None else str(found[name]))
    Console().print(table)
    for part in found.get("not_compared", ()):
        typer.echo(f"not compared: {part}")
    if found["intact"]:
        typer.echo("intact: every row is as it was booked")
        return
    fault = found["fault"]
    places = ("table", "key", "epoch", "lane", "seq", "seal", "period")
    place = ", ".join(f"{name} {fault[name]}" for name in places if name in fault)
    typer.echo(f"NOT INTACT, first at {place}: {fault['kind']}: {fault['reason']}")
