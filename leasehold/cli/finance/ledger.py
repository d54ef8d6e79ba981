"""`leasehold ledger`: seals, the audit, and archives of closed periods."""

import asyncio
import json
import time
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, answer, api_command, fields, segment
from leasehold.cli.finance.usage import Period
from leasehold.cli.output import fail, fail_for_each, warn
from leasehold.cli.verify import kept_seal, verify
from protocol.counting import counted

ledger = typer.Typer(
    no_args_is_help=True, help="Look at balances, seals and the audit; verify the ledger, and archive closed periods."
)

POLL_S = 1.0
CONFLICT = 409
ARCHIVE = fields("period", "state", "transfers", "bytes", "archived_at", "location", "manifest_sha256", "failure")


SEAL = fields("number", "position", "sealed_at", "hash")
AUDIT: dict[str, Column] = {
    **fields("id", "recorded_at"),
    "actor": lambda entry: entry.get("actor_name") or entry["actor"],
    **fields("action", "object"),
    "details": lambda entry: json.dumps(entry["details"], ensure_ascii=False),
}


BALANCE = fields("account", "transfers", "pools", "leases", "regions")
api_command(ledger, scope="audit:read")(verify)


@api_command(ledger, scope="usage:read", name="balance")
def show_balance(cli: Cli, period: Period) -> None:
    """Show a period's trial balance: each account by its transfers, its pools and leases, and the regions' reports.

    Exits with 1 if the accounts do not agree.

    Example: leasehold ledger balance 2026-10
    """
    found = cli.get(f"/v1/periods/{segment(period)}/trial-balance")
    if cli.as_json:
        cli.print_json(found)
    else:
        cli.render(found["accounts"], BALANCE)
        typer.echo(f"{found['status']}: {found['sources']} units came from sources, and {found['uses']} are in use")
    if found["sources"] != found["uses"] or found["status"] != "balanced":
        raise typer.Exit(1)


# --- seals and the audit ----------------------------------------------------------------------------------------------


@api_command(ledger, scope="audit:read", name="seals")
def list_seals(cli: Cli, count: Annotated[int, typer.Option("--last", min=1, help="How many.")] = 10) -> None:
    """List the newest seals. The hash of one, kept elsewhere, covers everything up to its position."""
    cli.render(cli.get_some("/v1/seals", count), SEAL)


@api_command(ledger, scope="audit:read", name="audit")
def list_audit(
    cli: Cli,
    action: Annotated[
        list[str] | None, typer.Option(help="Only this action, such as period.closed; repeatable.")
    ] = None,
    about: Annotated[
        list[str] | None, typer.Option("--object", help="Only what was done to this, such as acme; repeatable.")
    ] = None,
    actor: Annotated[list[str] | None, typer.Option(help="Only what the token with this id did; repeatable.")] = None,
    start: Annotated[str | None, typer.Option("--from", help="A date in UTC or an RFC 3339 time.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="The first moment that is not included.")] = None,
    count: Annotated[int, typer.Option("--last", min=1, help="How many.")] = 100,
) -> None:
    """List who did what, newest first."""
    only = {"action": action, "object": about, "actor": actor, "from": start, "to": end}
    cli.render(cli.get_some("/v1/audit", count, **only), AUDIT)


# --- archives ---------------------------------------------------------------------------------------------------------


@api_command(ledger, scope="period:close", name="archive", changes=True)
def archive_period(
    cli: Cli,
    name: Period,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the rows and bytes, and what is missing; change nothing.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return when the archive is requested.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before.")] = False,
) -> None:
    """Archive a closed period: its lines go into files, are verified there, and leave the database.

    Statements, hourly and daily usage, and seals stay. Ctrl-C ends only the waiting. Exits with 0 if the period is
    archived, with --no-wait if the archive is requested, and with --dry-run if nothing is missing. Waiting needs the
    scope `usage:read` as well.
    """
    found = cli.preview("/v1/archives", {"period": name})
    if not found.is_success:
        _end(found)
    preview = found.json()
    if dry_run:
        rows, size = counted(preview["rows"], "transfer"), counted(preview["bytes"], "byte")
        cli.report(preview, f"{name}: {rows}, {size} in the database")
        for missing in preview["missing"]:
            warn(f"{missing['what']}: {missing['reason']}")
        raise typer.Exit(1 if preview["missing"] else 0)
    cli.confirm(f"Archive {name}, and remove its lines from the database?", yes=yes)
    response = cli.send("POST", "/v1/archives", {"period": name})
    if not response.is_success:
        _end(response)
    archive = response.json() if no_wait else _finished(cli, response.json())
    if archive["state"] == "failed":
        fail(f"{name} was not archived, and nothing was removed: {archive['failure']}")
    cli.report(archive, _sentence(archive))


def _end(response: Any) -> None:
    """Print each thing that is missing on a line of its own, and end the command."""
    if response.status_code == CONFLICT and (missing := response.json().get("missing")):
        fail_for_each(f"{each['what']}: {each['reason']}" for each in missing)
    answer(response)


def _finished(cli: Cli, archive: dict[str, Any]) -> dict[str, Any]:
    """Wait until the archive is complete or failed, and show how many rows are written."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("transfers", total=archive["rows_expected"])
        while archive["state"] in ("waiting", "writing"):
            progress.update(task, completed=archive["rows"])
            time.sleep(POLL_S)
            archive = cli.get(f"/v1/archives/{segment(archive['period'])}")
    return archive


def _sentence(archive: dict[str, Any]) -> str:
    if archive["state"] != "archived":
        return f"{archive['period']}: the archive is {archive['state']}"
    moved = counted(archive["transfers"], "transfer")
    return f"{archive['period']} is archived in {archive['location']}: {moved}, manifest {archive['manifest_sha256']}"


@api_command(ledger, scope="usage:read", name="archives")
def list_archives(cli: Cli) -> None:
    """List the archives: where each is, and the SHA-256 of its manifest."""
    cli.render(cli.get_all("/v1/archives"), ARCHIVE)


@ledger.command("verify-archive")
def verify_archive(
    location: Annotated[str, typer.Argument(help="A directory, or s3://BUCKET/PREFIX, with one archive or several.")],
    kept: Annotated[
        list[str] | None,
        typer.Option("--kept", metavar="NUMBER:HASH", help="A seal that you kept and that must agree; repeatable."),
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option("--manifest", metavar="SHA256", help="The hash of its manifest, from the ledger's audit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object for each archive, for programs.")] = False,
) -> None:
    """Verify archives from their files alone: hashes, chains, seals and sums.

    It needs no coordinator, no database and no token. Exits with 0 only if every archive below the location is intact.
    """
    import msgspec

    from coordinator.archives.store import ArchiveUnreadable, can_archive

    if not can_archive():
        fail("archives take pyarrow: install leasehold[parquet]")
    seals = [kept_seal(text) for text in kept or ()]
    try:
        found = asyncio.run(_verify(location, seals, manifest))
    except (ArchiveUnreadable, OSError, ValueError) as error:
        fail(f"{location} cannot be read: {error}")
    if not found:
        fail(f"{location} has no archive: there is no manifest.json")
    for each in found:
        if as_json:
            typer.echo(msgspec.json.encode(each).decode())
        elif each.fault is None:
            size = f"{counted(each.reports, 'report')}, {counted(each.transfers, 'transfer')}"
            typer.echo(f"{each.location}: intact: {size}, seals up to {each.newest_seal}")
        else:
            typer.echo(f"{each.location}: NOT INTACT: {each.fault.table or ''} {each.fault.kind}: {each.fault.reason}")
    if any(each.fault for each in found):
        raise typer.Exit(1)


async def _verify(location: str, kept: list[dict[str, Any]], manifest: str | None) -> list[Any]:
    import msgspec

    from coordinator.archives.check import check_archive
    from coordinator.archives.rules import MANIFEST
    from coordinator.archives.store import ArchiveStore
    from coordinator.proof.rules import KeptSeal

    store = ArchiveStore(location)
    folders = [name.removesuffix(MANIFEST).rstrip("/") for name in store.names("") if name.endswith(MANIFEST)]
    recorded = bytes.fromhex(manifest) if manifest else None
    seals = msgspec.convert(kept, list[KeptSeal])
    return [await check_archive(store, folder, recorded, seals) for folder in folders]
